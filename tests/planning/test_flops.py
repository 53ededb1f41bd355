"""Floating-point operations of traced programs: closed forms, and XLA's own count where it has no loop."""

import functools
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redco_eqx as rx
from redco_eqx import models
from redco_eqx._base.jaxprs import Program, trace
from redco_eqx._planning.memory import num_flops
from redco_eqx._training.run import peak_seconds

X, W = jnp.ones((8, 16)), jnp.ones((16, 32))


def scanned(weights: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), X, weights)[0])


def depthwise(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", feature_group_count=4)


def recomputed(w: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda w: jnp.sin(jnp.sin(X @ w) @ w.T))(w))


def experts(w: Any) -> Any:
    return jnp.sum(jax.lax.ragged_dot(X, w, jnp.array([3, 5])) ** 2)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "gradient": (jax.grad(lambda w: jnp.sum(jnp.sin(X @ w) ** 2)), (W,), 2 * 2 * 8 * 16 * 32),
    "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))), 720),
    "depthwise": (depthwise, (jnp.ones((2, 4, 9, 9)), jnp.ones((4, 1, 3, 3))), 2 * (2 * 4 * 7 * 7) * 9),
    "scan's gradient": (jax.grad(scanned), (jnp.ones((5, 16, 16)),), 3 * 5 * 2 * 8 * 16 * 16),
    # Forward twice, but the last product is not needed again; backward two products for each.
    "recomputed": (jax.grad(recomputed), (W,), 2 * 8 * 16 * 32 * (2 + 1 + 4)),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), (X[:4, :4],), 256),
    "experts' gradient": (jax.grad(experts), (jnp.ones((2, 16, 32)),), 2 * 2 * 8 * 16 * 32),
}


def test_products_are_counted_in_loops_too_and_else_as_the_compiler_counts() -> None:
    for name, (function, arguments, expected) in PROGRAMS.items():
        assert num_flops(jax.make_jaxpr(function)(*arguments).jaxpr) == expected, name
        if name in ("gradient", "batched", "depthwise"):
            analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
            elementwise = 4 * sum(np.size(x) for x in jax.tree.leaves(jax.eval_shape(function, *arguments)))
            assert expected <= (analysis or {})["flops"] <= expected + elementwise + 4 * 8 * 32, name


ROWS, LENGTH, LAYERS, WIDTH, HEADS = 8, 16, 2, 32, 4
CONFIG = models.LlamaConfig(
    vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=HEADS,
)  # fmt: skip


def step_of_llama(remat: Any, **sizes: Any) -> tuple[Program, Any]:
    """The traced step on a mesh, and its state."""
    mesh, optimizer = rx.make_mesh(**sizes), optax.sgd(0.1)
    make = functools.partial(models.LlamaForCausalLM, CONFIG, remat=remat)
    model = eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0))
    shardings = rx.shard_rules(model, mesh)

    def placed(x: Any, sharding: Any) -> Any:
        return x if sharding is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = rx.init_state(jax.tree.map(placed, model, shardings), optimizer, key=jax.random.key(0))
    step = functools.partial(
        rx.train_step,
        loss_fn=lambda model, ids, key: jnp.mean(model(ids) ** 2),
        optimizer=optimizer,
        shardings=shardings,
    )
    return trace(step, state, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)), state


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_has_the_operations_of_the_closed_form_on_every_mesh(remat: str) -> None:
    """`6N + 12 L d s` for a token (PaLM, appendix B): layers that are computed again do not count."""
    for sizes in ({"data": 1}, {"tensor": 4}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}):
        program, state = step_of_llama(remat, **sizes)
        num = sum(x.size for path, x in state.params.items() if x.ndim == 2 and "embed" not in path)
        expected = ROWS * LENGTH * (6 * num + 12 * LAYERS * WIDTH * LENGTH)
        assert num_flops(program.closed.jaxpr, recomputed=False) == expected, sizes
        chips = np.array([types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")] * 8)
        assert peak_seconds(program, chips) == pytest.approx(expected / 8 / 197e12, rel=1e-12)
        assert peak_seconds(program, np.array(jax.devices())) == 0
        of_unknown = types.SimpleNamespace(platform="gpu", device_kind="another")
        assert peak_seconds(program, np.array([of_unknown])) == 0
