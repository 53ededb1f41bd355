"""Gathers, scatters, sums by segment, slices at computed places."""

import jax
import jax.numpy as jnp
from gradients.operations._registry import (
    either,
    mixed,
    one_of,
    operation,
    rows,
    scaled,
)

ROWS = one_of(16, 8, 12, 7)


@operation(
    "indexing",
    rows,
    size=ROWS,
    scaled=either,
    axis=one_of(0, 1),
    mode=one_of("fill", "clip", "wrap", "along"),
    beyond=either,
)
def embedding(weight, x, index, *, size, scaled, axis, mode, beyond):
    """Rows or columns of a table; with `beyond` some places lie outside, on both
    sides."""
    x = x.mean(1, keepdims=True)
    table = weight(
        "embedding", *((size, x.shape[-1]) if axis == 0 else (x.shape[-1], size))
    )
    places = index % (3 * size) - size if beyond else index % size
    if mode == "along":  # each entry of a row from a place of its own
        table = table if axis == 0 else table.T
        each = (places[..., None] + jnp.arange(x.shape[-1])) % size
        found = jnp.take_along_axis(table[None], each, axis=1)
    else:
        found = jnp.take(
            table,
            places,
            axis=axis,
            mode=mode,
            fill_value=0.5 if mode == "fill" else None,
        )
        found = found if axis == 0 else jnp.moveaxis(found, 0, -1)
    return x + (found * weight("scale", x.shape[-1]) if scaled else found)


@operation(
    "indexing", scaled, axis=one_of(1, 2, 0), mode=one_of("fill", "clip", "wrap")
)
def take(weight, x, index, *, axis, mode):
    n = x.shape[axis]
    places = (jnp.arange(n) * 3 + index[0, 0] % 2) % n
    return jnp.take(x, places, axis=axis, mode=mode)


@operation(
    "indexing",
    rows,
    how=one_of("add", "max", "min"),
    size=ROWS,
    local=one_of(True, False),
)
def scatter(weight, x, index, *, how, size, local):
    """Into a table for each example, or into one for the whole batch."""
    x = x.mean(1, keepdims=True) * weight("scale", 8, x.shape[-1])
    start = weight("start", size, x.shape[-1])
    places = index % size
    if local:
        return jax.vmap(lambda x, i: getattr(start.at[i], how)(x))(x, places)
    table = getattr(start.at[places.reshape(-1)], how)(x.reshape(-1, x.shape[-1]))
    return x + table[places]


@operation("indexing", mixed, update=either, each=either)
def dynamic_slice(weight, x, index, *, update, each):
    part = weight("part", 2, 4)

    def one(x, i):
        if update:
            return jax.lax.dynamic_update_slice(
                x, x[:2, :4] * part, (i[0] % 3, i[1] % 4)
            )
        return jax.lax.dynamic_slice(x, (i[0] % 3, i[1] % 4), (2, 4)) * part

    return jax.vmap(one)(x, index) if each else jax.vmap(one, (0, None))(x, index[0])


@operation("indexing")
def across_the_batch(weight, x, index):
    """Each example reads another one."""
    partner = (jnp.arange(x.shape[0]) * 3 + 1) % x.shape[0]
    chosen = index[:, 0] % x.shape[0]
    return (
        x * weight("own", x.shape[-1])
        + x[partner] * weight("other", x.shape[-1])
        + 0.5 * x[chosen]
    )
