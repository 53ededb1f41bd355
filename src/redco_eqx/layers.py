"""Building blocks of layers, with built-in communication over `tensor`, and with
remat."""

from redco_eqx._parallel.activations import ActivationAxes, activation_axes
from redco_eqx._parallel.attention import attention
from redco_eqx._parallel.linear import column, row
from redco_eqx._parallel.scan import scan_layers
from redco_eqx._parallel.vocabulary import cross_entropy, embed

__all__ = [
    "ActivationAxes",
    "activation_axes",
    "attention",
    "column",
    "cross_entropy",
    "embed",
    "row",
    "scan_layers",
]
