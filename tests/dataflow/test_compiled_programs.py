"""Compiled programs in the layout that they decide: the gradients of one device, and
the bytes predicted."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import (
    MESH,
    PROGRAMS,
    ROWS,
    SOLVES_AND_GROUPS,
    explained,
    loss_of,
    lstm,
    recurrent,
    sent,
    specs_of,
)
from helpers import abstract, filled, mesh_of, stepped
from jax.sharding import PartitionSpec as P
from layouts import compiled_bytes

import redco_eqx as rx

# What the program splits otherwise than the path rules, or what only it splits: fused
# weights across borders, a stream, experts with their router, members of an ensemble, a
# table of relative positions; linear solves, and products by groups of rows. What is
# predicted apart: keys and values split by some of the shards, low-rank branches,
# windows, a recurrent cell.
BY_MESH = {
    "data2xtensor4": (
        "stacked_llama_gqa_refused gpt2 t5 fused_qkv ensemble lora conv2d gru "
        "solve_of_rows"
    ),
    "tensor8": "gate_narrow groupnorm_between ridge_of_heads recurrence",
    "2x2x2": "moe experts_by_example",
}
CASES = [
    (name, mesh_name) for mesh_name, names in BY_MESH.items() for name in names.split()
]
CASES += [("experts_of_rows", "data2xtensor4")]


@pytest.mark.parametrize(("name", "mesh_name"), CASES)
def test_gradients_are_those_of_one_device_and_bytes_those_predicted(name, mesh_name):
    """In float64, by plain JAX, and by a step whose optimizer keeps the gradient: a
    trace of decay 0."""
    entry = PROGRAMS[name]
    mesh = mesh_of(mesh_name)
    with jax.enable_x64(True):
        model = filled(abstract(entry.make), jnp.float64, 0)
        batch = {
            k: x.astype(np.float64) if x.dtype.kind == "f" else x
            for k, x in entry.inputs(ROWS).items()
        }
        loss, gradients = eqx.filter_jit(eqx.filter_value_and_grad(entry.loss))(
            model, batch
        )
        expected = {"loss": loss, **rx.to_arrays(gradients)}
        explanation = rx.explain(model, mesh, loss_fn=loss_of(entry), batch=batch)
        options = {"shardings": explanation.shardings}
        step = stepped(model, batch, mesh, loss_of(entry), optax.trace(0.0), **options)
        found = jax.device_get(
            {"loss": step.metrics["loss"].value, **step.state.opt_state.trace}
        )
    assert any(not x.is_fully_replicated for x in step.state.params.values())
    largest = max(1.0, *(float(np.abs(x).max()) for x in expected.values()))
    for path, x in found.items():
        # Sums of some thousand terms in another order: rounding of float64.
        np.testing.assert_allclose(
            x, expected[path], rtol=0, atol=1e-12 * largest, err_msg=path
        )
    # Its step sends more than the loss and its gradient, which are below.
    if name in SOLVES_AND_GROUPS:
        return
    # Besides, a step sends the norm of the gradients, and the metrics.
    total = rx.communication(step.compiled, mesh).total.sent_bytes
    assert sent(explanation).num_bytes_unmerged == pytest.approx(
        total, rel=0.03, abs=200
    )
    assert sent(explanation).at_least <= total


WHOLE, COLUMNS, STACKED_COLUMNS = P(), P("tensor"), P(None, "tensor")
BY_COLUMNS: dict[str, Any] = {"up": STACKED_COLUMNS, "down": COLUMNS}
BY_INNER: dict[str, Any] = {"up": P(None, None, "tensor"), "down": STACKED_COLUMNS}

EACH_GROUP: dict[str, Any] = dict.fromkeys(("up", "down"), COLUMNS)

# Layouts that the program would not choose, those by hand of solves and groups, and the
# program's own (`None`).
NAMED_LAYOUTS: dict[str, dict[str, Any] | None] = {
    "own": None,
    "whole": {},
    "all columns": {"*": COLUMNS},
    "by columns": BY_COLUMNS,
    "by inner": BY_INNER,
    "each group": EACH_GROUP,
}
# In `projections` the first weight is smaller than what it makes, so that it is
# gathered and nothing is summed.
LAYOUTS = [
    *((name, "own", 0.01) for name in ("projections", "solve_of_rows", "recurrence")),
    ("mlp_4", "whole", 0.01),
    *((name, "all columns", 0.25) for name in ("mlp_4", "llama_gqa_refused")),
    *((name, "by columns", 0.035) for name in ("ridge_of_heads", "solve_of_rows")),
    *(
        (name, layout, 0.035)
        for name in ("experts_of_rows", "experts_by_example")
        for layout in ("by inner", "each group", "whole")
    ),
]


@pytest.mark.parametrize(("name", "layout_name", "rel"), LAYOUTS)
def test_any_layout_is_predicted(name, layout_name, rel):
    entry = PROGRAMS[name]
    layout = NAMED_LAYOUTS[layout_name]
    specs = specs_of(explained(name))
    if layout is not None:
        specs = {path: layout.get("*", layout.get(path, WHOLE)) for path in specs}
    predicted = sent(explained(name), specs).num_bytes_unmerged
    mesh = mesh_of("data2xtensor4")
    compiled = compiled_bytes(
        abstract(entry.make), loss_of(entry), entry.inputs(ROWS), specs, mesh
    )
    assert predicted == pytest.approx(compiled, rel=rel)


def iterated(model: Any, x: Any) -> Any:
    """One stream through the same square weights several times: a split of it leads
    both their dims."""
    for _ in range(3):
        source, target = (jax.vmap(model[name])(x) for name in "ab")
        pairs = jax.nn.leaky_relu(source[:, None] + target[None])
        x = (
            jax.nn.softmax(jax.vmap(jax.vmap(model["out"]))(pairs)[..., 0], axis=1)
            @ target
        )
    return x


def quantised(model: Any, x: Any) -> Any:
    """Frozen weights in int8 with trained scales."""
    hidden = jax.nn.gelu((model["up"].astype(jnp.float32) @ x) * model["up_scale"])
    return x + (model["down"].astype(jnp.float32) @ hidden) * model["down_scale"]


def linears(**sizes: Any) -> Any:
    return lambda key: {
        name: eqx.nn.Linear(*size, key=key) for name, size in sizes.items()
    }


def int8_weights(key: Any) -> Any:
    scales = {"up_scale": jnp.ones(64), "down_scale": jnp.ones(32)}
    return {
        "up": jnp.zeros((64, 32), jnp.int8),
        "down": jnp.zeros((32, 64), jnp.int8),
        **scales,
    }


OF_INPUTS = P(None, "tensor")
OF_CELL = ("cell.weight_ih", "cell.weight_hh", "cell.bias")
STRANGE = [
    (
        iterated,
        linears(a=(32, 32), b=(32, 32), out=(32, 1, False)),
        (16, 32),
        None,
        0.03,
    ),
    (
        quantised,
        int8_weights,
        (32,),
        {"up": COLUMNS, "up_scale": COLUMNS, "down": OF_INPUTS},
        0.02,
    ),
    (
        recurrent,
        lstm(32, 64),
        (12, 32),
        {**dict.fromkeys(OF_CELL, COLUMNS), "out.weight": OF_INPUTS},
        0.02,
    ),
]


@pytest.mark.parametrize(("apply", "make", "shape", "expected", "rel"), STRANGE)
def test_an_index_along_both_dims_frozen_integers_and_gates_are_predicted(
    apply, make, shape, expected, rel
):
    def mean_square(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(partial(apply, model))(batch) ** 2)

    model = abstract(make)
    batch = jax.ShapeDtypeStruct((ROWS, *shape), jnp.float32)
    explanation = rx.explain(model, MESH, loss_fn=mean_square, batch=batch)
    specs = specs_of(explanation)
    if expected is None:
        assert specs["a.weight"] == specs["b.weight"] == COLUMNS
    else:
        assert {path: spec for path, spec in specs.items() if spec != WHOLE} == expected
    compiled = compiled_bytes(
        model, mean_square, batch, specs, mesh_of("data2xtensor4")
    )
    assert sent(explanation).num_bytes_unmerged == pytest.approx(compiled, rel=rel)


# A step splits the rows of its batch, and leaves the other dims to the compiler. So the
# compiler takes parts of the batch where a weight is split along its inputs, and sums.


def hidden(model: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ model["up"].T) @ model["down"].T


OF_BATCH: dict[str, Any] = {
    "chain": hidden,
    "residual": lambda model, x: x + hidden(model, x),
    "scaled": lambda model, x: hidden(model, 2 * x),
    "gated": lambda model, x: x * hidden(model, x),
    # The other product needs the batch whole, and gathers it in both passes.
    "whole_beside": lambda model, x: hidden(model, x) + x @ model["beside"].T,
}
ROW_THEN_COLUMN = {"up": P(None, "tensor"), "down": COLUMNS, "beside": COLUMNS}


@pytest.mark.parametrize("mesh_name", ["data2xtensor4", "tensor8"])
@pytest.mark.parametrize("name", OF_BATCH)
def test_a_product_of_the_batch_with_a_row_split_weight_is_predicted(name, mesh_name):
    """Over one shard of the batch, a step leaves the batch as it was placed."""

    def mean_square(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(OF_BATCH[name](model, batch) ** 2)

    shapes = {"up": (256, 64), "down": (64, 256)}
    if name == "whole_beside":
        shapes["beside"] = (64, 64)
    model = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    batch = jax.ShapeDtypeStruct((ROWS, 64, 64), jnp.float32)
    mesh = mesh_of(mesh_name)
    specs = {path: ROW_THEN_COLUMN[path] for path in model}
    explanation = rx.explain(model, mesh, loss_fn=mean_square, batch=batch)
    compiled = compiled_bytes(model, mean_square, batch, specs, mesh)
    predicted = sent(explanation, specs).num_bytes_unmerged
    assert predicted == pytest.approx(compiled, rel=0.01)


def columns_at_both_ends(model: Any, x: Any) -> Any:
    first = jax.nn.gelu(x @ model["inp"].T)
    return jnp.tanh(first @ model["mid"].T) @ model["fin"].T


MET: dict[str, Any] = {
    "residual": lambda model, x: x + columns_at_both_ends(model, x),
    "of_activation": lambda model, x: x + columns_at_both_ends(model, jax.nn.gelu(x)),
    "gated": lambda model, x: x * columns_at_both_ends(model, jnp.tanh(x)),
    "scaled": lambda model, x: 2 * x + columns_at_both_ends(model, jnp.tanh(x)),
    "not_met": columns_at_both_ends,
}


@pytest.mark.parametrize("mesh_name", ["data2xtensor4", "tensor8"])
@pytest.mark.parametrize("name", MET)
def test_a_batch_that_meets_something_split_is_predicted(name, mesh_name):
    """The compiler takes it in parts, and gathers it for the product."""

    def mean_square(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(MET[name](model, batch) ** 2)

    specs = {"inp": COLUMNS, "mid": P(None, "tensor"), "fin": COLUMNS}
    model = {path: jax.ShapeDtypeStruct((64, 64), jnp.float32) for path in specs}
    batch = jax.ShapeDtypeStruct((ROWS, 64, 64), jnp.float32)
    mesh = mesh_of(mesh_name)
    explanation = rx.explain(model, mesh, loss_fn=mean_square, batch=batch)
    compiled = compiled_bytes(model, mean_square, batch, specs, mesh)
    predicted = sent(explanation, specs).num_bytes_unmerged
    assert predicted == pytest.approx(compiled, rel=0.01)


def merged_patches(model: Any, batch: Any, key: Any) -> Any:
    """Residual layers, then four neighbouring tokens become one, as in Swin."""
    x = batch
    for up, down in zip(model["ups"], model["downs"]):
        x = x + jax.nn.gelu(x @ up.T) @ down.T
    x = jnp.concatenate([x[:, i::4] for i in range(4)], axis=-1)
    return jnp.mean(jnp.square(x @ model["merge"].T))


def test_layers_before_a_concatenation_are_not_split_for_the_sake_of_its_pieces():
    """The compiler would split the stream of all layers before, and gather it again in
    each."""
    wide = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    narrow = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    merge = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    model = {"ups": [wide] * 3, "downs": [narrow] * 3, "merge": merge}
    batch = jax.ShapeDtypeStruct((ROWS, 64, 64), jnp.float32)
    mesh = mesh_of("data2xtensor4")
    explanation = rx.explain(model, mesh, loss_fn=merged_patches, batch=batch)
    specs = specs_of(explanation)
    assert specs["merge"] in (WHOLE, COLUMNS)
    assert specs["ups.0"] == COLUMNS
    compiled = compiled_bytes(model, merged_patches, batch, specs, mesh)
    assert sent(explanation).num_bytes_unmerged == pytest.approx(compiled, rel=0.01)
    rows = {**specs, "merge": P(None, "tensor")}
    assert compiled_bytes(model, merged_patches, batch, rows, mesh) > 1.4 * compiled
    overrides = [("merge", rows["merge"])]
    overridden = rx.explain(
        model, mesh, overrides=overrides, loss_fn=merged_patches, batch=batch
    )
    assert overridden.communication is None
    assert str(overridden).endswith(
        "are not predicted: the program cannot follow the split of merge"
    )


def dispatched(model: Any, batch: Any) -> Any:
    """Two of eight experts for each token, with places for 64 tokens each."""
    tokens = batch.reshape(-1, batch.shape[-1])
    weights, choices = jax.lax.top_k(jax.nn.softmax(tokens @ model["router"].T), 2)
    chosen = jax.nn.one_hot(choices, 8)  # (tokens, 2, experts)
    places = jnp.cumsum(chosen.reshape(-1, 8), axis=0).reshape(chosen.shape)
    slots = jax.nn.one_hot((places * chosen - 1).astype(jnp.int32), 64)
    taken = jnp.einsum("nkec,nd->ecd", slots, tokens)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, model["up"]))
    given = jnp.einsum("ecf,efd->ecd", hidden, model["down"])
    return jnp.einsum("nk,nkec,ecd->nd", weights, slots, given)


def test_tokens_that_are_dispatched_to_experts_are_summed_in_parts():
    """The sums over the batch that collect the tokens of an expert, and the gradient of
    its results, are only of the experts that a device has."""

    def mean_square(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(dispatched(model, batch) ** 2)

    shapes = {"router": (8, 128), "up": (8, 128, 256), "down": (8, 256, 128)}
    model = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    batch = jax.ShapeDtypeStruct((ROWS, 32, 128), jnp.float32)
    specs = {"router": WHOLE, "up": COLUMNS, "down": COLUMNS}
    explanation = rx.explain(model, MESH, loss_fn=mean_square, batch=batch)
    compiled = compiled_bytes(
        model, mean_square, batch, specs, mesh_of("data2xtensor4")
    )
    predicted = sent(explanation, specs).num_bytes_unmerged
    assert predicted == pytest.approx(compiled, rel=0.02)
