"""Weights that are split over `fsdp` are gathered where they are used, in the layout that was chosen."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import filled, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx import models
from redco_eqx._base.jaxprs import trace
from redco_eqx._compiled.communication import Collective, communication
from redco_eqx._sharding.mesh import for_use, stored_axes
from redco_eqx._step.gather import gather_where_used
from redco_eqx._step.state import layout_of

MESH = mesh_of("fsdp8")
SPLIT, WHOLE = NamedSharding(MESH, PartitionSpec("fsdp")), NamedSharding(MESH, PartitionSpec())
WEIGHT = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=SPLIT)
STACK = jax.ShapeDtypeStruct(
    (4, 64, 64), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec(None, "fsdp"))
)
X = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rx.batch_sharding(MESH))


def gathers(function: Callable[..., Any], weight: Any) -> list[Collective]:
    """The all-gathers of the gradient of a function of a weight and `X`."""
    program, keeps = gather_where_used(trace(function, weight, X), [weight.sharding, None])
    loss = jax.checkpoint(program, policy=lambda *_, **__: False) if keeps else program
    gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(WHOLE, weight.sharding))
    found = communication(gradient.lower(weight, X).compile(), MESH)
    assert {c.kind for c in found} <= {"all-gather", "all-reduce"}  # no activation was moved
    return [c for c in found if c.kind == "all-gather"]


def own_scan(stack: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0] ** 2)


def own_list(stack: Any, x: Any) -> Any:
    for i in range(len(stack)):
        x = jnp.sin(x @ stack[i])
    return jnp.mean(x**2)


@pytest.mark.parametrize("layers", [own_scan, own_list])
def test_a_stack_is_gathered_layer_by_layer_forward_and_backward(layers):
    found = gathers(layers, STACK)
    assert {c.shapes for c in found} <= {("f32[64,64]",), ("f32[1,64,64]",)}
    # The last layer of a list need not be gathered again.
    assert sum(c.count for c in found) in ({8} if layers is own_scan else {7, 8})


def test_a_cast_is_done_before_the_gather():
    def product(w: Any, x: Any) -> Any:
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    program, _ = gather_where_used(trace(product, WEIGHT, X), [SPLIT, None])
    (gather,) = [e for e in program.closed.jaxpr.eqns if "custom_vjp" in e.primitive.name]
    assert gather.invars[0].aval.dtype == jnp.bfloat16


def test_what_sums_a_weight_up_gathers_nothing():
    assert gathers(lambda w, x: jnp.sum(w**2) + jnp.sum(jnp.abs(w)), WEIGHT) == []


def test_a_weight_of_two_uses_is_gathered_once_each_way():
    assert sum(c.count for c in gathers(lambda w, x: jnp.mean(((x @ w) @ w.T) ** 2), WEIGHT)) <= 2


def test_branches_loops_and_calls_get_it_whole():
    def loss(w: Any, x: Any) -> Any:
        x = jax.jit(lambda w, x: x @ w)(w, x)
        x = jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x, w)
        x = jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=3)[0]
        return jnp.mean(x**2)

    program, keeps = gather_where_used(trace(loss, WEIGHT, X), [SPLIT, None])
    assert keeps
    w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)) / 8, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 64)), jnp.float32)
    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    found = jax.jit(jax.value_and_grad(program))(jax.device_put(w, SPLIT), jax.device_put(x, X.sharding))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)  # float32, summed in another order


def test_nothing_split_is_nothing_changed():
    program = trace(own_scan, STACK, X)
    assert gather_where_used(program, [WHOLE, None])[0] is program


# In a step.

CONFIG = models.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8
)


def model_loss(model: Any, batch: Any, key: Any) -> Any:
    hidden, _ = model.hidden_states(batch[:, :-1], key=key)
    return rx.layers.cross_entropy(hidden, model.head, batch[:, 1:])


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_an_override_reaches_every_block(stacked):
    """Arrays that an override makes whole are not gathered: in layers, in the lookup, or in the head."""
    abstract = eqx.filter_eval_shape(
        lambda key: models.LlamaForCausalLM(CONFIG, stacked=stacked, key=key), jax.random.key(0)
    )
    optimizer = optax.sgd(0.1)

    def gathered(overrides: Any) -> set[str]:
        shardings = rx.shard_rules(abstract, MESH, overrides=overrides)
        model = jax.tree.map(
            lambda x, s: x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            shardings,
        )
        state = rx.init_state(model, optimizer, key=jax.random.key(1))
        batch = jax.ShapeDtypeStruct((16, 17), jnp.int32, sharding=rx.batch_sharding(MESH))
        step = partial(rx.train_step, loss_fn=model_loss, optimizer=optimizer, shardings=shardings)
        found = communication(jax.jit(step).lower(state, batch).compile(), MESH)
        return {shape for c in found if c.kind == "all-gather" for shape in c.shapes}

    by_rules = gathered([])
    mlp, others = "f32[128,64]", "f32[64,64]"
    assert {mlp, others} <= {shape.replace("[1,", "[") for shape in by_rules}
    everything = ("*", PartitionSpec())
    assert gathered([everything]) == set()
    dims = [None, None, "fsdp"] if stacked else [None, "fsdp"]
    only_up = gathered([("*up_proj.weight", PartitionSpec(*dims)), everything])
    assert {shape.replace("[1,", "[") for shape in only_up} == {mlp}


# What `tensor` cannot split: 6 heads, and a vocabulary of 65.

ODD = models.LlamaConfig(
    vocab_size=65, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6
)


@pytest.fixture
def stores_all(monkeypatch):
    monkeypatch.setattr("redco_eqx._sharding.rules.STORED_BYTES", 0)


def trained(mesh: Any, stacked: bool, **options: Any) -> tuple[dict[str, Any], rx.TrainState]:
    """The layout, and the state after two steps, of a LLaMA on a mesh."""
    model = rx.init_model(
        lambda key: models.LlamaForCausalLM(ODD, stacked=stacked, key=key, **options),
        mesh,
        key=jax.random.key(0),
    )
    shardings, optimizer = rx.shard_rules(model, mesh), optax.sgd(0.5, momentum=0.9)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    rows = np.random.default_rng(0).integers(0, 65, (16, 17)).astype(np.int32)
    batch = jax.device_put(rows, rx.batch_sharding(mesh))
    step = jax.jit(
        partial(rx.train_step, loss_fn=model_loss, optimizer=optimizer, shardings=shardings, num_microbatches=2)
    )
    for _ in range(2):
        state, _ = step(state, batch)
    layout = {path: sharding.spec for path, sharding in (layout_of(state) or {}).items()}
    assert layout == {path: d.spec for path, d in rx.explain(model, mesh).decisions.items()}
    return layout, state


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
@pytest.mark.parametrize("remat", ["none", "row_out"])
def test_what_tensor_cannot_split_is_stored_split_and_no_number_changes(stacked, remat, stores_all):
    _, expected = trained(mesh_of("one"), stacked)
    for name in ("data2xtensor4", "tensor8") if remat == "none" else ("data2xtensor4",):
        layout, found = trained(mesh_of(name), stacked, remat=remat)
        stored = {path for path, spec in layout.items() if ("fsdp", "tensor") in spec}
        projections = {path for path in layout if "self_attn" in path}
        assert stored == projections | {"model.embed_tokens.weight", "lm_head.weight"}
        for path, x in found.params.items():
            # float32, summed in another order
            np.testing.assert_allclose(x, expected.params[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_over_fsdp_and_tensor_too(stores_all):
    mesh = rx.make_mesh(fsdp=2, tensor=4)
    _, expected = trained(mesh_of("one"), True)
    layout, found = trained(mesh, True)
    assert layout["model.layers.self_attn.q_proj.weight"] == PartitionSpec(None, ("fsdp", "tensor"))
    for path, x in found.params.items():
        np.testing.assert_allclose(x, expected.params[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_to_store_it_split_costs_its_gathers_alone(monkeypatch):
    """Forward and again backward: all else that is communicated is what is for weights that are whole."""
    mesh, optimizer = mesh_of("data2xtensor4"), optax.sgd(0.1)
    abstract = eqx.filter_eval_shape(
        lambda key: models.LlamaForCausalLM(ODD, stacked=True, key=key), jax.random.key(0)
    )

    def communicated(smallest: int) -> tuple[int, Counter[str]]:
        monkeypatch.setattr("redco_eqx._sharding.rules.STORED_BYTES", smallest)
        shardings = rx.shard_rules(abstract, mesh)
        model = jax.tree.map(
            lambda x, s: x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            shardings,
        )
        state = rx.init_state(model, optimizer, key=jax.random.key(1))
        stored = sum(state.params[path].size * 4 for path in state.stored)
        batch = jax.ShapeDtypeStruct((16, 17), jnp.int32, sharding=rx.batch_sharding(mesh))
        step = partial(rx.train_step, loss_fn=model_loss, optimizer=optimizer, shardings=shardings)
        sent: Counter[str] = Counter()
        for c in communication(jax.jit(step).lower(state, batch).compile(), mesh):
            sent[f"{c.kind} {c.axes}"] += c.total_bytes
        return stored, sent

    none, whole = communicated(2**40)
    stored, sent = communicated(0)
    gathers = sent.pop("all-gather ('tensor',)")
    assert none == 0
    assert 0 < gathers <= 2 * stored
    assert sent.total() <= whole.total() + 64  # the gradient norm sums what is split, a number for each array


@pytest.mark.parametrize("layers", [own_scan, own_list])
def test_what_is_stored_split_is_gathered_layer_by_layer(layers):
    mesh = mesh_of("data2xtensor4")
    spec = PartitionSpec(None, ("fsdp", "tensor"))
    stack = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rx.batch_sharding(mesh))
    program, keeps = gather_where_used(trace(layers, stack, x), [stack.sharding, None])
    assert keeps
    loss = jax.checkpoint(program, policy=lambda *_, **__: False)
    whole = NamedSharding(mesh, PartitionSpec())
    gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(whole, stack.sharding))
    found = [c for c in communication(gradient.lower(stack, x).compile(), mesh) if "tensor" in c.axes]
    assert {c.kind for c in found} == {"all-gather"}
    assert {c.shapes for c in found} <= {("f32[64,64]",), ("f32[1,64,64]",)}
    assert sum(c.count for c in found) in (7, 8)


def test_checkpoints_of_weights_that_are_whole_are_not_undone_for_a_gather_outside() -> None:
    """Layers that `tensor` splits recompute; a table of positions is stored split, and gathered outside."""
    rows = NamedSharding(MESH, PartitionSpec("fsdp"))
    stack = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32, sharding=WHOLE)
    table = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)

    def loss(stack: Any, table: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w.astype(jnp.float32)), prevent_cse=False)
        x = jax.jit(lambda x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0])(x @ table[:64].T)
        return jnp.mean(x**2)

    program = trace(loss, stack, table, X)
    _, keeps = gather_where_used(program, [WHOLE, rows, None])
    assert not keeps


def test_an_order_of_axes_says_what_is_for_storage_alone():
    spec = PartitionSpec(None, ("fsdp", "tensor"))
    assert (stored_axes(spec), for_use(spec)) == (("fsdp", "tensor"), PartitionSpec(None, None))
    spec = PartitionSpec(("tensor", "fsdp"))
    assert (stored_axes(spec), for_use(spec)) == (("fsdp",), PartitionSpec(("tensor",)))
    spec = PartitionSpec("fsdp", "tensor")
    assert (stored_axes(spec), for_use(spec)) == (("fsdp",), PartitionSpec(None, "tensor"))
    assert stored_axes(PartitionSpec("tensor")) == ()


def test_fit_traces_the_loss_once_and_asks_no_rule(monkeypatch):
    mesh = mesh_of("2x2x2")
    model = rx.init_model(
        lambda key: models.LlamaForCausalLM(CONFIG, stacked=True, key=key), mesh, key=jax.random.key(0)
    )
    optimizer, traces = optax.adam(1e-3), []
    state = rx.init_state(model, optimizer, key=jax.random.key(1))

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        traces.append(batch)
        return model_loss(model, batch, key)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the rules were asked again")

    monkeypatch.setattr("redco_eqx._sharding.rules.explain_by", refuse)
    rows = np.random.default_rng(0).integers(0, 64, (24, 17)).astype(np.int32)
    rx.fit(
        state,
        rows,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=8,
        num_steps=3,
        loggers=(),
    )
    assert len(traces) == 1


def test_a_plain_model_learns_the_same_on_every_mesh():
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    shape = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(64, 64, 128, 2, key=key), jax.random.key(0))
    results = []
    for name in ("one", "fsdp8", "2x2x2"):
        mesh = mesh_of(name)
        model = filled(shape, jnp.float32, 0)
        shardings = rx.shard_rules(model, mesh)
        state = rx.init_state(eqx.filter_shard(model, shardings), optax.sgd(0.1), key=jax.random.key(0))
        batch = jax.device_put(np.ones((16, 64), np.float32), rx.batch_sharding(mesh))
        step = partial(rx.train_step, loss_fn=loss_fn, optimizer=optax.sgd(0.1), shardings=shardings)
        results.append(jax.jit(step)(state, batch)[0].params)
    for found in results[1:]:
        for path, x in found.items():
            np.testing.assert_allclose(x, results[0][path], rtol=1e-4, atol=1e-6)  # float32 sums


def adapted(model: Any, batch: Any, key: Any) -> Any:
    """Quantised or half-precision weights under a trained scale, in a list of layers."""
    x = batch
    for layer in model["layers"]:
        x = x + jnp.sin(x @ layer["frozen"].astype(x.dtype)) * layer["scale"]
    return jnp.mean(x**2)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16])
def test_frozen_weights_are_gathered_where_they_are_used(dtype):
    """As those that are trained: in their own dtype, forward and backward, and nothing else moves."""
    shape = jax.ShapeDtypeStruct((64, 64), dtype, sharding=SPLIT)
    scale = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=WHOLE)
    model = {"layers": [{"frozen": shape, "scale": scale} for _ in range(3)]}
    shardings = jax.tree.map(lambda x: x.sharding, model)
    trainable = jax.tree.map(lambda x: x is scale, model)
    optimizer = optax.sgd(0.1)
    state = rx.init_state(model, optimizer, key=jax.random.key(0), trainable=trainable)
    assert len(state.frozen) == 3
    step = partial(rx.train_step, loss_fn=adapted, optimizer=optimizer, shardings=shardings)
    found = communication(jax.jit(step).lower(state, X).compile(), MESH)
    gathered = [c for c in found if c.kind == "all-gather"]
    assert {c.kind for c in found} <= {"all-gather", "all-reduce"}
    assert sum(c.count for c in gathered) in (5, 6)  # the last layer need not be gathered again
    assert all(c.total_bytes <= c.count * 64 * 64 * 4 for c in gathered)
    assert sum(c.total_bytes for c in found if c.kind == "all-reduce") <= 4 * (3 * 64 + 4)


def test_frozen_arrays_that_are_stored_split_change_no_number():
    mesh, rng = mesh_of("data2xtensor4"), np.random.default_rng(0)
    stored = NamedSharding(mesh, PartitionSpec(None, ("fsdp", "tensor")))
    whole = NamedSharding(mesh, PartitionSpec())
    values = [rng.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(3)]
    batch = rng.normal(size=(16, 64)).astype(np.float32)

    def trained(sharding: NamedSharding, batch: Any) -> Any:
        layers = [{"frozen": jax.device_put(x, sharding), "scale": jnp.ones(64)} for x in values]
        model = {"layers": [{**layer, "scale": jax.device_put(layer["scale"], whole)} for layer in layers]}
        trainable = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "scale", model)
        state = rx.init_state(model, optax.sgd(0.1), key=jax.random.key(0), trainable=trainable)
        assert bool(state.stored) == (sharding is stored)
        step = partial(rx.train_step, loss_fn=adapted, optimizer=optax.sgd(0.1), shardings=layout_of(state))
        return jax.jit(step)(state, jax.device_put(batch, rx.batch_sharding(mesh)))[0]

    found, expected = trained(stored, batch), trained(whole, batch)
    for path, x in found.params.items():
        np.testing.assert_allclose(x, expected.params[path], rtol=1e-5, atol=1e-6, err_msg=path)
