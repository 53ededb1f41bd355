"""Convolutions of every grouping, stride, padding, dilation; kernels shared, of an
ensemble, or by example."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from gradients.operations._registry import either, one_of, operation

MAX_CHANNELS = 32

GEOMETRY: dict[str, Any] = {
    "size": one_of(3, 1, 2),
    "stride": one_of(1, 2),
    "padding": one_of("same", "valid", "wide"),
    "spread": one_of(1, 2),
    "dilation": one_of(1, 2),
    "channels_first": either,
}
GROUPS = one_of(1, "depthwise", 2, 4)
WIDTH = one_of(1, 2, 4, 8)


def convolve(
    x,
    kernel,
    *,
    groups=1,
    batch_groups=1,
    stride=1,
    padding="same",
    spread=1,
    dilation=1,
    channels_first=False,
):
    """`x` `(batch, *spatial, in)` with `kernel` `(*window, in / groups, out)`; `spread`
    dilates `x`."""
    rank = x.ndim - 2
    letters = "HW"[:rank]
    spaces = []
    for n, size in zip(x.shape[1:-1], kernel.shape):
        reach = (size - 1) * dilation
        room = (n - 1) * spread + 1
        low, high = {
            "same": (reach // 2, reach - reach // 2),
            "valid": (0, 0),
            "wide": (reach, reach),
        }[padding]
        spaces.append((low, high) if room + low + high > reach else (reach, reach))
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    if channels_first:
        x, kernel = jnp.moveaxis(x, -1, 1), jnp.moveaxis(kernel, (-1, -2), (0, 1))
        numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    strides, lhs, rhs = ((n,) * rank for n in (stride, spread, dilation))
    y = jax.lax.conv_general_dilated(
        x, kernel, strides, spaces, lhs, rhs, numbers, groups, batch_groups
    )
    return jnp.moveaxis(y, 1, -1) if channels_first else y


def grouping(groups: Any, width: int, channels: int) -> tuple[int, int]:
    """The number of groups that divides the channels, and that of output channels."""
    number = channels if groups == "depthwise" else math.gcd(groups, channels)
    return number, number * (width if number * width <= MAX_CHANNELS else 1)


def window(x: Any, size: int) -> tuple[int, ...]:
    return (size,) * (x.ndim - 2)


@operation("convolution", groups=GROUPS, width=WIDTH, bias=either, **GEOMETRY)
def convolution(weight, x, index, *, groups, width, bias, size, **geometry):
    groups, out = grouping(groups, width, x.shape[-1])
    y = convolve(
        x,
        weight("weight", *window(x, size), x.shape[-1] // groups, out),
        groups=groups,
        **geometry,
    )
    return y + weight("bias", out) if bias else y


@operation("convolution", width=WIDTH, multiplier=one_of(1, 2), **GEOMETRY)
def separable_convolution(weight, x, index, *, width, multiplier, size, **geometry):
    """A stem, a depthwise and a pointwise convolution."""
    x = jnp.tanh(convolve(x, weight("stem", *window(x, size), x.shape[-1], 8)))
    x = convolve(
        x,
        weight("depthwise", *window(x, size), 1, 8 * multiplier),
        groups=8,
        **geometry,
    )
    return convolve(x, weight("pointwise", *window(x, 1), x.shape[-1], 2 * width))


@operation(
    "convolution",
    groups=one_of(2, 4),
    width=WIDTH,
    size=one_of(3, 1),
    channels_first=either,
)
def batch_group_convolution(weight, x, index, *, groups, width, size, channels_first):
    kernel = weight("weight", *window(x, size), x.shape[-1], groups * width)
    return jnp.concatenate(
        [convolve(x, kernel, batch_groups=groups, channels_first=channels_first)]
        * groups
    )


@operation(
    "convolution",
    members=one_of(2, 4, 3),
    groups=GROUPS,
    width=WIDTH,
    own=either,
    **GEOMETRY,
)
def ensemble_convolution(
    weight, x, index, *, members, groups, width, own, size, **geometry
):
    """`vmap` over kernels, which all read `x`, or each its `own` part of it."""
    channels = x.shape[-1]
    members = math.gcd(members, channels) if own else members
    size_in = channels // members if own else channels
    groups, out = grouping(groups, width, size_in)
    kernels = weight("weight", members, *window(x, size), size_in // groups, out)
    x = x.reshape(*x.shape[:-1], members, size_in) if own else x
    axes = (-2 if own else None, 0)
    return jax.vmap(lambda x, k: convolve(x, k, groups=groups, **geometry), axes)(
        x, kernels
    ).mean(0)


@operation(
    "per_example",
    shots=one_of(1, 2, 4),
    groups=GROUPS,
    width=WIDTH,
    given=either,
    **GEOMETRY,
)
def per_example_convolution(
    weight, x, index, *, shots, groups, width, given, size, **geometry
):
    """Each task of `shots` examples has its own kernel: of a hypernetwork, or picked
    from a table."""
    groups, out = grouping(groups, width, x.shape[-1])
    shape = (*window(x, size), x.shape[-1] // groups, out)
    tasks = x.reshape(-1, math.gcd(shots, x.shape[0]), *x.shape[1:])
    if given:
        kernels = weight("table", 6, *shape)[index[: len(tasks), 0] % 6]
    else:
        summary, size = tasks.mean(tuple(range(1, tasks.ndim - 1))), math.prod(shape)
        kernels = jnp.tanh(
            summary @ weight("weight", x.shape[-1], size) + weight("bias", size)
        )
        kernels = kernels.reshape(len(tasks), *shape)
    y = jax.vmap(lambda x, k: convolve(x, k, groups=groups, **geometry))(tasks, kernels)
    return y.reshape(x.shape[0], *y.shape[2:])


@operation(
    "per_example", groups=GROUPS, width=WIDTH, rate=one_of(0.1, 1.0), size=one_of(3, 1)
)
def adapted_convolution(weight, x, index, *, groups, width, rate, size):
    """Each example takes a gradient step on a shared kernel first, as in
    meta-learning."""
    groups, out = grouping(groups, width, x.shape[-1])
    kernel = weight("weight", *window(x, size), x.shape[-1] // groups, out)

    def one(x: Any) -> Any:
        def apply(kernel: Any) -> Any:
            return convolve(x[None], kernel, groups=groups)[0]

        gradient = jax.grad(lambda kernel: jnp.mean(jnp.tanh(apply(kernel)) ** 2))(
            kernel
        )
        return apply(kernel - rate * gradient)

    return jax.vmap(one)(x)
