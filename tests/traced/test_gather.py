"""Traced steps gather split weights where they are used, trained or frozen, and change
no number."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import SGD, fail, fit, make_examples, mlp_state, scalar_loss
from helpers import assert_close, mesh_of

import redco_eqx as rx
from redco_eqx._base.jaxprs import trace
from redco_eqx._compiled.communication import Collective, communication
from redco_eqx._sharding.mesh import for_use, stored_axes
from redco_eqx._step.gather import KEPT, gather_where_used

MESH = mesh_of("fsdp8")
SPLIT, WHOLE = jax.NamedSharding(MESH, jax.P("fsdp")), jax.NamedSharding(MESH, jax.P())
COLUMNS = jax.NamedSharding(MESH, jax.P(None, "fsdp"))
OVER_BOTH = jax.NamedSharding(mesh_of("data2xtensor4"), jax.P(None, ("fsdp", "tensor")))


def weight(
    sharding: jax.NamedSharding, *shape: int, dtype: Any = jnp.float32
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


WEIGHT = weight(SPLIT, 64, 64)
X = weight(rx.batch_sharding(MESH), 16, 64)


def gathers(
    function: Any, weight: Any, *, reshard: bool | None = True
) -> list[Collective]:
    """The all-gathers of the gradient of a function of a weight and a batch."""
    mesh = weight.sharding.mesh
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rx.batch_sharding(mesh))
    program, policy = gather_where_used(
        trace(function, weight, x), [weight.sharding, None], reshard=reshard
    )
    loss = program if policy is None else jax.checkpoint(program, policy=policy)
    whole = jax.NamedSharding(mesh, jax.P())
    gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(whole, weight.sharding))
    found = communication(gradient.lower(weight, x).compile(), mesh)
    # No activation is moved.
    assert {c.kind for c in found} <= {"all-gather", "all-reduce"}
    return [c for c in found if c.kind == "all-gather"]


def layer(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


def in_scan(stack: Any, x: Any, layer: Any = layer) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0] ** 2)


def in_list(stack: Any, x: Any, layer: Any = layer) -> Any:
    for i in range(len(stack)):
        x = layer(x, stack[i])
    return jnp.mean(x**2)


scan_of_checkpoints = partial(in_scan, layer=jax.checkpoint(layer))
nothing_saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
list_of_checkpoints = partial(in_list, layer=nothing_saved)


def shared(w: Any, x: Any) -> Any:
    """The weight is shared by the steps of a scan, after which it is used once more."""
    x = jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=3)[0]
    return jnp.mean((x @ w.T) ** 2)


@pytest.mark.parametrize(
    "function", [in_list, list_of_checkpoints, in_scan, scan_of_checkpoints]
)
def test_a_stack_is_gathered_layer_by_layer_and_kept_where_the_step_says_so(function):
    """For each of four layers one gather, and another one for the gradient where its
    weight is not kept."""
    cases: list[tuple[Any, bool | None]] = [(COLUMNS, None), (COLUMNS, False)]
    cases += (
        [(COLUMNS, True), (OVER_BOTH, True)] if function in (in_list, in_scan) else []
    )
    for sharding, reshard in cases:
        found = gathers(function, weight(sharding, 4, 64, 64), reshard=reshard)
        is_kept = not reshard and (
            reshard is False or function in (in_list, list_of_checkpoints)
        )
        assert {c.shapes for c in found} <= {("f32[64,64]",), ("f32[1,64,64]",)}
        # The last layer of a list need not be gathered again; of a scan it may be, if
        # the compiler unrolls it.
        assert sum(c.count for c in found) in ((4,) if is_kept else (7, 8)), reshard


def test_without_devices_nothing_is_kept_unless_the_step_says_so():
    """The layout of a mesh that has no devices yet says nothing about the compiler."""
    on = jax.NamedSharding(MESH.abstract_mesh, jax.P(None, "fsdp"))
    stack = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    traced = trace(
        list_of_checkpoints, stack, jax.ShapeDtypeStruct((16, 64), jnp.float32)
    )
    texts = []
    for reshard in (None, True, False):
        program, _ = gather_where_used(traced, [on, None], reshard=reshard)
        texts.append(
            str(jax.make_jaxpr(jax.grad(program))(*traced.closed.in_avals)).count(KEPT)
        )
    assert texts == [0, 0, 4]


def test_a_weight_of_several_uses_is_gathered_once_each_way():
    for sharding in (SPLIT, COLUMNS):
        assert sum(c.count for c in gathers(shared, weight(sharding, 64, 64))) <= 2


def test_what_sums_a_weight_up_gathers_nothing():
    assert gathers(lambda w, x: jnp.sum(w**2) + jnp.sum(jnp.abs(w)), WEIGHT) == []


def test_a_cast_is_done_before_the_gather():
    def product(w: Any, x: Any) -> Any:
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    program, _ = gather_where_used(trace(product, WEIGHT, X), [SPLIT, None])
    (gather,) = [
        e for e in program.closed.jaxpr.eqns if "custom_vjp" in e.primitive.name
    ]
    assert gather.invars[0].aval.dtype == jnp.bfloat16


def test_branches_loops_and_calls_get_it_whole():
    def loss(w: Any, x: Any) -> Any:
        x = jax.jit(lambda w, x: x @ w)(w, x)
        x = jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x, w)
        return shared(w, x)

    program, policy = gather_where_used(trace(loss, WEIGHT, X), [SPLIT, None])
    assert policy is not None
    w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)) / 8, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 64)), jnp.float32)
    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    found = jax.jit(jax.value_and_grad(program))(
        jax.device_put(w, SPLIT), jax.device_put(x, X.sharding)
    )
    # Float32, summed in another order.
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_nothing_split_is_nothing_changed():
    program = trace(in_scan, weight(WHOLE, 4, 64, 64), X)
    assert gather_where_used(program, [WHOLE, None])[0] is program


def test_checkpoints_of_whole_weights_are_not_undone_for_a_gather_outside() -> None:
    """Layers that `tensor` splits recompute; a table of positions is stored split, and
    gathered outside."""

    def loss(stack: Any, table: Any, x: Any) -> Any:
        layer = jax.checkpoint(
            lambda x, w: jnp.sin(x @ w.astype(jnp.float32)), prevent_cse=False
        )
        x = jax.jit(
            lambda x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]
        )(x @ table[:64].T)
        return jnp.mean(x**2)

    _, policy = gather_where_used(
        trace(loss, weight(WHOLE, 4, 64, 64), WEIGHT, X), [WHOLE, SPLIT, None]
    )
    assert policy is None


def test_an_order_of_axes_says_what_is_for_storage_alone():
    spec = jax.P(None, ("fsdp", "tensor"))
    assert (stored_axes(spec), for_use(spec)) == (("fsdp", "tensor"), jax.P(None, None))
    spec = jax.P(("tensor", "fsdp"))
    assert (stored_axes(spec), for_use(spec)) == (("fsdp",), jax.P(("tensor",)))
    spec = jax.P("fsdp", "tensor")
    assert (stored_axes(spec), for_use(spec)) == (("fsdp",), jax.P(None, "tensor"))
    assert stored_axes(jax.P("tensor")) == ()


# In a step.


def test_fit_traces_the_loss_once_and_asks_no_rule(monkeypatch):
    state = mlp_state(SGD, mesh_of("2x2x2"))
    traces = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        traces.append(batch)
        return scalar_loss(model, batch, key)

    monkeypatch.setattr("redco_eqx._sharding.rules.explain_by", fail)
    fit(state, make_examples(24, dim=8), loss_fn=loss_fn, batch_size=8, num_steps=3)
    assert len(traces) == 1


# Frozen weights.


def adapted(model: Any, batch: Any, key: Any) -> Any:
    """Quantised or half-precision weights under a trained scale, in a list of
    layers."""
    x = batch
    for layer in model:
        x = x + jnp.sin(x @ layer["frozen"].astype(x.dtype)) * layer["scale"]
    return jnp.mean(x**2)


def adapted_state(layers: Any) -> rx.TrainState:
    trainable = [{"frozen": False, "scale": True} for _ in layers]
    return rx.init_state(layers, SGD, key=jax.random.key(0), trainable=trainable)


def test_frozen_weights_are_gathered_where_they_are_used():
    """As those that are trained: in their own dtype, forward and backward, and nothing
    else moves."""
    layer = {
        "frozen": weight(SPLIT, 64, 64, dtype=jnp.int8),
        "scale": weight(WHOLE, 64),
    }
    state = adapted_state([layer] * 3)
    assert len(state.frozen) == 3
    shardings = [jax.tree.map(lambda x: x.sharding, layer)] * 3
    step = partial(rx.train_step, loss_fn=adapted, optimizer=SGD, shardings=shardings)
    found = communication(jax.jit(step).lower(state, X).compile(), MESH)
    gathered = [c for c in found if c.kind == "all-gather"]
    assert {c.kind for c in found} <= {"all-gather", "all-reduce"}
    # The last layer need not be gathered again.
    assert sum(c.count for c in gathered) in (5, 6)
    assert all(c.total_bytes <= c.count * 64 * 64 * 4 for c in gathered)
    assert sum(c.total_bytes for c in found if c.kind == "all-reduce") <= 4 * (
        3 * 64 + 4
    )


def test_frozen_arrays_that_are_stored_split_change_no_number():
    mesh = OVER_BOTH.mesh
    rng = np.random.default_rng(0)
    whole = jax.NamedSharding(mesh, jax.P())
    values = [rng.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(3)]
    batch = jax.device_put(
        rng.normal(size=(16, 64)).astype(np.float32), rx.batch_sharding(mesh)
    )
    params = []
    for sharding in (OVER_BOTH, whole):
        layers = [{"frozen": x, "scale": np.ones(64, np.float32)} for x in values]
        state = adapted_state(
            jax.device_put(layers, [{"frozen": sharding, "scale": whole}] * 3)
        )
        assert bool(state.stored) == (sharding is OVER_BOTH)
        step = partial(
            rx.train_step, loss_fn=adapted, optimizer=SGD, shardings=state.shardings
        )
        params.append(jax.jit(step)(state, batch)[0].params)
    assert_close(*params, rtol=1e-5, atol=1e-6)
