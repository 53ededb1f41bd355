"""Weights that are split over `fsdp` are gathered where they are used, in the layout that was chosen."""

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
from redco_eqx._compiled.collectives import Collective, collectives
from redco_eqx._program.gather import gather_where_used
from redco_eqx._program.trace import trace

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
    found = collectives(gradient.lower(weight, X).compile(), MESH)
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
    return rx.cross_entropy(hidden, model.head, batch[:, 1:])


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_an_override_reaches_every_block(stacked):
    """What is whole by an override is not gathered: neither layers, nor the lookup, nor the head."""
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
        found = collectives(jax.jit(step).lower(state, batch).compile(), MESH)
        return {shape for c in found if c.kind == "all-gather" for shape in c.shapes}

    by_rules = gathered([])
    mlp, others = "f32[128,64]", "f32[64,64]"
    assert {mlp, others} <= {shape.replace("[1,", "[") for shape in by_rules}
    everything = ("*", PartitionSpec())
    assert gathered([everything]) == set()
    dims = [None, None, "fsdp"] if stacked else [None, "fsdp"]
    only_up = gathered([("*up_proj.weight", PartitionSpec(*dims)), everything])
    assert {shape.replace("[1,", "[") for shape in only_up} == {mlp}


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

    monkeypatch.setattr("redco_eqx._sharding.rules.decide", refuse)
    rows = np.random.default_rng(0).integers(0, 64, (24, 17)).astype(np.int32)
    rx.fit(
        state, rows, collate_fn=np.stack, loss_fn=loss_fn, optimizer=optimizer, batch_size=8, num_steps=3,
        progress=False,
    )  # fmt: skip
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
