"""Dropout, which needs a key and a model in training mode, and the keys for its
layers."""

import equinox as eqx
import jax
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks.layers import LayerNorm, RMSNorm


def dropout(layer: eqx.nn.Dropout, x: Array, key: Key | None) -> Array:
    """Apply dropout if there is a key and the model is in training mode."""
    if key is None:
        # Equinox would raise an error for a model in training mode.
        return x
    return layer(x, key=key)


def drops(layer: eqx.nn.Dropout, key: Key | None) -> bool:
    """Return true if `dropout` changes anything."""
    return key is not None and not layer.inference and layer.p != 0


def split_key(key: Key | None, num: int) -> list[Key] | list[None]:
    """Return `num` keys, or `None` repeated `num` times."""
    if key is None:
        return [None] * num
    return list(jax.random.split(key, num))


def add_and_norm(
    x: Float[Array, "*batch size"],
    y: Float[Array, "*batch size"],
    norm: LayerNorm | RMSNorm,
    layer: eqx.nn.Dropout,
    key: Key | None,
) -> Float[Array, "*batch size"]:
    """Return `norm(x + dropout(y))`, the end of a layer with normalisation after, not
    before (Vaswani et al. 2017).
    """
    return norm(x + dropout(layer, y, key))
