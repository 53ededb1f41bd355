"""Floating-point operations of traced programs: closed forms, and XLA's own count where it has no loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_eqx._planning.memory import num_flops

X, W = jnp.ones((8, 16)), jnp.ones((16, 32))


def flops(function: Any, *arguments: Any) -> float:
    return num_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def scanned(x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def convolved(x: Any, kernel: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", feature_group_count=groups)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "product": (lambda x, w: x @ w, (X, W), 2 * 8 * 16 * 32),
    "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))), 720),
    "gradient": (jax.grad(lambda w: jnp.sum(jnp.sin(X @ w) ** 2)), (W,), 2 * 2 * 8 * 16 * 32),
    "scan": (scanned, (X, jnp.ones((5, 16, 16))), 5 * 2 * 8 * 16 * 16),
    "scan's gradient": (
        lambda x, w: jax.grad(lambda w: jnp.sum(scanned(x, w)))(w),
        (X, jnp.ones((5, 16, 16))),
        3 * 5 * 2 * 8 * 16 * 16,
    ),
    "recomputed": (
        lambda w: jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda w: jnp.sin(jnp.sin(X @ w) @ w.T))(w)))(w),
        (W,),
        # Forward twice, but the last product is not needed again; backward two products for each.
        2 * 8 * 16 * 32 * (2 + 1 + 4),  # the last product is not needed again
    ),
    "cond": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x),
        (jnp.ones((4, 4)),),
        2 * 2 * 4**3,
    ),
    "jit": (jax.jit(lambda x, w: x @ w), (X, W), 2 * 8 * 16 * 32),
    "convolution": (
        convolved,
        (jnp.ones((2, 4, 9, 9)), jnp.ones((6, 4, 3, 3))),
        2 * (2 * 6 * 7 * 7) * 4 * 9,
    ),
    "depthwise": (
        lambda x, k: convolved(x, k, groups=4),
        (jnp.ones((2, 4, 9, 9)), jnp.ones((4, 1, 3, 3))),
        2 * (2 * 4 * 7 * 7) * 9,
    ),
    "experts": (
        lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([3, 5])),
        (X, jnp.ones((2, 16, 32))),
        2 * 8 * 16 * 32,
    ),
    "experts' gradient": (
        jax.grad(lambda w: jnp.sum(jax.lax.ragged_dot(X, w, jnp.array([3, 5])) ** 2)),
        (jnp.ones((2, 16, 32)),),
        2 * 2 * 8 * 16 * 32,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_closed_forms(name: str) -> None:
    function, arguments, expected = PROGRAMS[name]
    assert flops(function, *arguments) == expected


@pytest.mark.parametrize("name", ["product", "batched", "gradient", "convolution", "depthwise"])
def test_as_the_compiler_counts(name: str) -> None:
    function, arguments, _ = PROGRAMS[name]
    analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert analysis is not None
    elementwise = 4 * sum(np.size(x) for x in jax.tree.leaves(jax.eval_shape(function, *arguments)))
    found = flops(function, *arguments)
    assert found <= analysis["flops"] <= found + elementwise + 4 * 8 * 32
