"""Convolutions and a recurrent cell."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import SEQ, D, F, of_rows, split
from ._layers import named

IMAGE = (D, 4, 4)


def convolutions(key: Any, **sizes: tuple[int, int, int, int]) -> Any:
    """A convolution under each name, of so many inputs and outputs, with a window and
    groups."""
    keys = jax.random.split(key, len(sizes))
    return {
        name: eqx.nn.Conv2d(
            num_in, num_out, window, padding=window // 2, groups=groups, key=k
        )
        for (name, (num_in, num_out, window, groups)), k in zip(sizes.items(), keys)
    }


def conv_pair(key: Any) -> Any:
    return convolutions(key, conv1=(D, F, 3, 1), conv2=(F, D, 3, 1))


def apply_conv_pair(model: Any, x: Any) -> Any:
    return x + model["conv2"](jax.nn.relu(model["conv1"](x)))


def inverted_residual(key: Any) -> Any:
    """MobileNet: expand, depthwise, project."""
    return convolutions(
        key, expand=(D, F, 1, 1), depthwise=(F, F, 3, F), project=(F, D, 1, 1)
    )


def apply_inverted(model: Any, x: Any) -> Any:
    return x + model["project"](
        jax.nn.relu(model["depthwise"](jax.nn.relu(model["expand"](x))))
    )


def recurrent(key: Any) -> Any:
    k1, k2 = jax.random.split(key)
    return {"cell": eqx.nn.GRUCell(8, D, key=k1), **named(k2, head=(D, D))}


def apply_recurrent(model: Any, x: Any) -> Any:
    return model["head"](
        jax.lax.scan(lambda h, x: (model["cell"](x, h), None), jnp.zeros(D), x)[0]
    )


ENTRIES = [
    # A bias is (out, 1, 1).
    of_rows("conv2d", conv_pair, apply_conv_pair, split("conv1", "conv2"), x=IMAGE),
    # The depthwise weight is (out, 1, 3, 3): it follows the split of the channels that
    # it gets.
    of_rows(
        "conv_depthwise",
        inverted_residual,
        apply_inverted,
        split("expand depthwise", "project"),
        x=IMAGE,
    ),
    # A split cell would reduce at every time step; the lone head may be split or not.
    of_rows("gru", recurrent, apply_recurrent, {"head.*": ...}, x=(SEQ, 8), y=(D,)),
]
