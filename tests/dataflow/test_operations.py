"""Operations one at a time, between two layers: what each needs whole, as the compiled
program has it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import MESH, sent, specs_of
from jax.sharding import PartitionSpec as P
from layouts import compiled_bytes

import redco_eqx as rx

ROWS, LENGTH, WIDTH, HIDDEN = 8, 16, 32, 64
shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
MODEL = {"up": shaped((WIDTH, HIDDEN)), "down": shaped((HIDDEN, WIDTH))}
DEVICES = rx.make_mesh(tensor=4)
BATCH = {"x": shaped((ROWS, LENGTH, WIDTH))}


def loss(operation, model, batch, key):
    """Return the loss of an operation on (length, hidden) arrays, between a masked `up`
    and a `down`."""

    def one(x):
        return (
            operation(x @ jnp.where(jnp.tri(WIDTH, HIDDEN) > 0, model["up"], 0))
            @ model["down"]
        )

    return jnp.mean(jax.vmap(one)(batch["x"]) ** 2)


@jax.custom_vjp
def scaled(x):
    return 2 * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (2 * g,))


def windows(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME")


def depthwise(x):
    kernel = jnp.ones((HIDDEN, 1, 3))
    return jax.lax.conv_general_dilated(
        x.T[None], kernel, (1,), "SAME", feature_group_count=HIDDEN
    )[0].T


def by_heads(x):
    heads = x.reshape(LENGTH, 8, -1)
    return jnp.einsum("qhd,khd,khe->qhe", heads, heads, heads).reshape(x.shape)


# What leaves the columns alone: split, they cost the sum that `down` takes and its
# transpose.
LOCAL = {
    "nothing": lambda x: x,
    "sort_rows": lambda x: jnp.sort(x, axis=0),
    "cumsum_rows": lambda x: jnp.cumsum(x, axis=0),
    "roll_rows": lambda x: jnp.roll(x, 1, axis=0),
    "window_over_rows": windows,
    "depthwise": depthwise,
    "heads": by_heads,
    "transposed": lambda x: jnp.tanh(x.T).T,
    "scan_over_rows": lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), x[0], x)[1],
    "map_over_rows": lambda x: jax.lax.map(jnp.tanh, x),
    "remat": jax.checkpoint(jnp.sin),
    "custom_vjp": scaled,
    "cond": lambda x: jax.lax.cond(jnp.arange(3)[1] > 0, jnp.sin, jnp.cos, x),
    "gather_rows": lambda x: x[jnp.arange(LENGTH)[::-1]],
    "scatter_rows": lambda x: x.at[jnp.array([0, 2])].add(1.0),
    "stack": lambda x: jnp.stack([x, 2 * x]).sum(0),
    "associative_scan": partial(jax.lax.associative_scan, jnp.add),
}
# What needs every column: their split is not worth it, or its cost is known.
ACROSS = {
    "softmax": jax.nn.softmax,
    "sort": jnp.sort,
    "cumsum": partial(jnp.cumsum, axis=-1),
    "reverse": lambda x: x[:, ::-1],
    "top_k": lambda x: jax.lax.top_k(x, HIDDEN)[0],
    "fft": lambda x: jnp.fft.fft(x).real,
    "norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "shard_map": lambda x: jax.shard_map(
        lambda x: 2 * x, mesh=DEVICES, in_specs=P(), out_specs=P()
    )(x),
    "between_layers": lambda x: rx.layers.scan_layers(
        lambda _, x: jnp.tanh(x), [()], x, batched=False
    ),
}


BY_COLUMNS = {"down": P("tensor"), "up": P(None, "tensor")}


def explained(operation):
    found = rx.explain(MODEL, MESH, loss_fn=partial(loss, operation), batch=BATCH)
    left_to_itself = [text.partition(" ")[0] for text in sent(found).opaque]
    assert left_to_itself == ["shard_map"] * (operation is ACROSS["shard_map"])
    return found


def bytes_as_compiled(operation):
    return compiled_bytes(MODEL, partial(loss, operation), BATCH, BY_COLUMNS, DEVICES)


# The first layer's input has no gradient: one sum of an activation forward over 4
# devices, and gradients over data. A sum by the ring algorithm sends 2 (n - 1) / n
# times the array.
LEAST = 3 / 2 * 4 * ROWS // 2 * LENGTH * WIDTH + 2 * 4 * WIDTH * HIDDEN // 4


def test_what_is_local_is_split_and_costs_one_sum_each_way():
    for name, operation in LOCAL.items():
        explanation = explained(operation)
        assert specs_of(explanation) == BY_COLUMNS, name
        # Of `down` and `up`.
        assert [d.role for d in explanation.decisions.values()] == ["row", "column"], (
            name
        )
        assert sent(explanation).num_bytes_unmerged == pytest.approx(LEAST, abs=64), (
            name
        )


@pytest.mark.parametrize(
    "name", ["heads", "scan_over_rows", "depthwise", "associative_scan", "remat"]
)
def test_what_is_local_is_so_when_compiled(name):
    assert bytes_as_compiled(LOCAL[name]) == pytest.approx(LEAST, rel=0.02)


def test_what_goes_across_columns_is_charged():
    for name, operation in ACROSS.items():
        assert sent(explained(operation), BY_COLUMNS).num_bytes_unmerged > LEAST + 64, (
            name
        )


@pytest.mark.parametrize("name", ["softmax", "cumsum", "norm"])
def test_what_goes_across_columns_is_charged_as_compiled(name):
    predicted = sent(explained(ACROSS[name]), BY_COLUMNS).num_bytes_unmerged
    assert bytes_as_compiled(ACROSS[name]) == pytest.approx(predicted, rel=0.25)


@pytest.mark.parametrize("is_first", [True, False])
# At 2 it depends on how the product is written.
@pytest.mark.parametrize("times", [1, 3])
def test_what_is_gathered_is_kept_for_the_gradient_of_a_wide_layer(times, is_first):
    """Rows that a split scale splits are gathered for a product, whose gradient takes
    them once more."""
    dims = (HIDDEN, times * HIDDEN) if is_first else (times * HIDDEN, HIDDEN)
    model = {"scale": shaped((HIDDEN,)), "up": shaped(dims)}
    batch = shaped((ROWS, LENGTH, HIDDEN))

    def loss(model, batch, key):
        x = jnp.tanh(batch * model["scale"])
        up = model["up"]
        out = x @ up if is_first else jax.vmap(jax.vmap(lambda row: up @ row))(x)
        return jnp.mean(jnp.tanh(out) ** 2)

    specs = {"scale": P("tensor"), "up": P(None, "tensor") if is_first else P("tensor")}
    found = rx.explain(model, MESH, loss_fn=loss, batch=batch)
    compiled = compiled_bytes(model, loss, batch, specs, DEVICES)
    assert sent(found, specs).num_bytes_unmerged == pytest.approx(compiled, rel=0.01)


def test_a_split_beside_a_transformed_dim_is_charged():
    """The steps keep the operand of an FFT whole over `tensor`, so a split weight is
    gathered."""

    def bytes_of(transform):
        def loss(model, batch, key):
            return jnp.mean((batch @ transform(model["w"])) ** 2)

        model, batch = (
            jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (8, 64))
        )
        split = {"loss_fn": loss, "batch": batch, "overrides": [("w", P("tensor"))]}
        return sent(rx.explain({"w": model}, MESH, **split)).num_bytes_unmerged

    gathered = 3 / 4 * 64 * 16 * 8  # of complex64
    assert bytes_of(lambda w: jnp.fft.fft(w).real) >= bytes_of(lambda w: w) + gathered
