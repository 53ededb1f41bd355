"""Convolutions and a recurrent cell."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import COL, ROW, SEQ, WHOLE, D, Entry, F, linear, pairs, squared_loss

SIDE = 4


def conv_pair(key: Any) -> Any:
    k1, k2 = jax.random.split(key)
    conv = partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
    return {"conv1": conv(D, F, key=k1), "conv2": conv(F, D, key=k2)}


def apply_conv_pair(model: Any, x: Any) -> Any:
    return x + model["conv2"](jax.nn.relu(model["conv1"](x)))


def shortcut(key: Any) -> Any:
    """A block of a ResNet that widens the stream."""
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "conv1": eqx.nn.Conv2d(D, F, 3, padding=1, key=k1),
        "conv2": eqx.nn.Conv2d(F, F, 3, padding=1, key=k2),
        "conv_shortcut": eqx.nn.Conv2d(D, F, 1, key=k3),
    }


def apply_shortcut(model: Any, x: Any) -> Any:
    return model["conv_shortcut"](x) + model["conv2"](jax.nn.relu(model["conv1"](x)))


def inverted_residual(key: Any) -> Any:
    """MobileNet: expand, depthwise, project."""
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "expand": eqx.nn.Conv2d(D, F, 1, key=k1),
        "depthwise": eqx.nn.Conv2d(F, F, 3, padding=1, groups=F, key=k2),
        "project": eqx.nn.Conv2d(F, D, 1, key=k3),
    }


def apply_inverted_residual(model: Any, x: Any) -> Any:
    h = jax.nn.relu(model["depthwise"](jax.nn.relu(model["expand"](x))))
    return x + model["project"](h)


def recurrent(key: Any) -> Any:
    k1, k2 = jax.random.split(key)
    return {"cell": eqx.nn.GRUCell(8, D, key=k1), "head": linear(D, D, k2)}


def apply_recurrent(model: Any, x: Any) -> Any:
    return model["head"](jax.lax.scan(lambda h, x: (model["cell"](x, h), None), jnp.zeros(D), x)[0])


CONV_PAIR_SPECS = {"conv1.*": COL, "conv2.weight": ROW, "conv2.bias": WHOLE}

ENTRIES = [
    Entry(
        "conv2d",
        conv_pair,
        pairs(D, SIDE, SIDE),
        squared_loss(apply_conv_pair),
        CONV_PAIR_SPECS,
        1,
        "a bias is (out, 1, 1)",
        activation_sizes=(D * SIDE * SIDE,),
    ),
    Entry(
        "conv_shortcut",
        shortcut,
        pairs(D, SIDE, SIDE, out=(F, SIDE, SIDE)),
        squared_loss(apply_shortcut),
        {**CONV_PAIR_SPECS, "conv_shortcut.*": WHOLE},
        1,
        "the shortcut has the shape of what opens the pair, and is no sibling of it: the stream stays whole",
        activation_sizes=(F * SIDE * SIDE,),
    ),
    Entry(
        "conv_depthwise",
        inverted_residual,
        pairs(D, SIDE, SIDE),
        squared_loss(apply_inverted_residual),
        {"expand.*": COL, "depthwise.*": COL, "project.weight": ROW, "project.bias": WHOLE},
        1,
        "the depthwise weight is (out, 1, 3, 3): it follows the split of the channels that it gets",
        activation_sizes=(D * SIDE * SIDE,),
    ),
    Entry(
        "gru",
        recurrent,
        pairs(SEQ, 8, out=(D,)),
        squared_loss(apply_recurrent),
        {"cell.*": WHOLE, "head.*": ...},
        None,
        "a split cell would reduce at every time step; the lone head may be split or not",
    ),
]
