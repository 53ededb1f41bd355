"""Operations one at a time, between two layers: what each needs whole, as the compiled program has it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import abstract_mesh
from jax.sharding import PartitionSpec
from layouts import compiled_bytes

import redco_eqx as rx
from redco_eqx._sharding.rules import analysis_of

ROWS, LENGTH, WIDTH, HIDDEN = 8, 16, 32, 64
MODEL = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)}


def loss(operation, model, batch, key):
    """Return the loss of an operation on (length, hidden) arrays, between an `up` and a `down`."""

    def one(x):
        return operation(x @ model["up"]) @ model["down"]

    return jnp.mean(jax.vmap(one)(batch["x"]) ** 2)


@jax.custom_vjp
def scaled(x):
    return 2 * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (2 * g,))


def windows(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME")


def depthwise(x):
    kernel = jnp.ones((HIDDEN, 1, 3))
    out = jax.lax.conv_general_dilated(x.T[None], kernel, (1,), "SAME", feature_group_count=HIDDEN)
    return out[0].T


def by_heads(x):
    heads = x.reshape(LENGTH, 8, -1)
    return jnp.einsum("qhd,khd,khe->qhe", heads, heads, heads).reshape(x.shape)


# What leaves the columns alone: split, they cost the sum that `down` takes and its transpose.
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
    "between_layers": lambda x: rx.layers.scan_layers(lambda _, x: jnp.tanh(x), [()], x, batched=False),
}


def analysed(operation):
    analysis = analysis_of(MODEL, abstract_mesh(), partial(loss, operation), BATCH)
    assert analysis is not None
    assert not analysis.walk.opaque
    return analysis


def columns_of(analysis):
    """The layout that splits the hidden dim of both."""
    return analysis.laid_out({"down": 0, "up": 1}).layout


def bytes_as_compiled(operation, specs):
    return compiled_bytes(MODEL, partial(loss, operation), BATCH, specs, rx.make_mesh(tensor=4))


# Leaves are in the order of their names: `down`, `up`.
BY_COLUMNS = {"down": PartitionSpec("tensor"), "up": PartitionSpec(None, "tensor")}


@pytest.mark.parametrize("name", list(LOCAL))
def test_what_is_local_is_split_and_costs_one_sum_each_way(name):
    analysis = analysed(LOCAL[name])
    assert analysis.layout == columns_of(analysis)
    activation = 4 * ROWS // 2 * LENGTH * WIDTH
    gradients = 2 * 4 * WIDTH * HIDDEN // 4
    # The input of the first layer has no gradient: one sum forward.
    assert analysis.sent(analysis.layout).num_bytes(merged=False) == pytest.approx(
        activation + gradients, abs=64
    )


@pytest.mark.parametrize("name", ["heads", "scan_over_rows", "depthwise", "associative_scan", "remat"])
def test_what_is_local_is_so_when_compiled(name):
    analysis = analysed(LOCAL[name])
    predicted = analysis.sent(analysis.layout).num_bytes(merged=False)
    assert bytes_as_compiled(LOCAL[name], BY_COLUMNS) == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("name", list(ACROSS))
def test_what_goes_across_columns_is_charged(name):
    analysis = analysed(ACROSS[name])
    free = analysed(LOCAL["nothing"])
    cost = analysis.sent(columns_of(analysis)).num_bytes(merged=False)
    assert cost > free.sent(columns_of(free)).num_bytes(merged=False)


@pytest.mark.parametrize("name", ["softmax", "cumsum", "norm", "between_layers"])
def test_what_goes_across_columns_is_charged_as_compiled(name):
    analysis = analysed(ACROSS[name])
    predicted = analysis.sent(columns_of(analysis)).num_bytes(merged=False)
    assert bytes_as_compiled(ACROSS[name], BY_COLUMNS) == pytest.approx(predicted, rel=0.25)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("times", [1, 3])  # at 2 it depends on how the product is written
def test_what_is_gathered_is_kept_for_the_gradient_of_a_wide_layer(times, is_first):
    """Rows that a split scale splits are gathered for a product, whose gradient takes them once more."""
    dims = (HIDDEN, times * HIDDEN) if is_first else (times * HIDDEN, HIDDEN)
    model = {
        "scale": jax.ShapeDtypeStruct((HIDDEN,), jnp.float32),
        "up": jax.ShapeDtypeStruct(dims, jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH, HIDDEN), jnp.float32)

    def loss(model, batch, key):
        x, up = jnp.tanh(batch * model["scale"]), model["up"]
        out = x @ up if is_first else jax.vmap(jax.vmap(lambda row: up @ row))(x)
        return jnp.mean(jnp.tanh(out) ** 2)

    analysis = analysis_of(model, abstract_mesh(), loss, batch)
    assert analysis is not None
    laid_out = analysis.laid_out({"scale": 0, "up": int(is_first)})
    assert laid_out is not None
    sent = analysis.sent(laid_out.layout)
    up = PartitionSpec(None, "tensor") if is_first else PartitionSpec("tensor")
    specs = {"scale": PartitionSpec("tensor"), "up": up}
    compiled = compiled_bytes(model, loss, batch, specs, rx.make_mesh(tensor=4))
    assert sent.num_bytes(merged=False) == pytest.approx(compiled, rel=0.01)
    assert sent.moved == {1: 2, 3: 1}[times] * 4 * ROWS // 2 * LENGTH * HIDDEN


def test_a_shard_map_is_left_to_itself():
    mesh = rx.make_mesh(tensor=4)

    def doubled(x):
        return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)

    analysis = analysis_of(MODEL, abstract_mesh(), partial(loss, doubled), BATCH)
    assert analysis is not None
    assert set(analysis.walk.opaque) == {"shard_map"}
    free = analysed(LOCAL["nothing"])
    ours, least = (x.sent(columns_of(x)).num_bytes(merged=False) for x in (analysis, free))
    assert ours > least
