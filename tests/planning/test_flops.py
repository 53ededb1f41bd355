"""Floating-point operations of traced programs: closed forms, and XLA's own count where
it has no loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_eqx._planning.memory import num_flops

X, W = jnp.ones((8, 16)), jnp.ones((16, 32))


def scanned(weights: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), X, weights)[0])


def depthwise(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", feature_group_count=4
    )


def recomputed(w: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda w: jnp.sin(jnp.sin(X @ w) @ w.T))(w))


def experts(w: Any) -> Any:
    return jnp.sum(jax.lax.ragged_dot(X, w, jnp.array([3, 5])) ** 2)


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "gradient": (
        jax.grad(lambda w: jnp.sum(jnp.sin(X @ w) ** 2)),
        (W,),
        2 * 2 * 8 * 16 * 32,
    ),
    "batched": (
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        (jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))),
        720,
    ),
    "depthwise": (
        depthwise,
        (jnp.ones((2, 4, 9, 9)), jnp.ones((4, 1, 3, 3))),
        2 * (2 * 4 * 7 * 7) * 9,
    ),
    "scan's gradient": (
        jax.grad(scanned),
        (jnp.ones((5, 16, 16)),),
        3 * 5 * 2 * 8 * 16 * 16,
    ),
    # Forward twice, but the last product is not needed again; backward two products for
    # each.
    "recomputed": (jax.grad(recomputed), (W,), 2 * 8 * 16 * 32 * (2 + 1 + 4)),
    "cond": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x),
        (X[:4, :4],),
        256,
    ),
    "experts' gradient": (
        jax.grad(experts),
        (jnp.ones((2, 16, 32)),),
        2 * 2 * 8 * 16 * 32,
    ),
}


def test_products_are_counted_in_loops_too_and_else_as_the_compiler_counts() -> None:
    for name, (function, arguments, expected) in PROGRAMS.items():
        assert num_flops(jax.make_jaxpr(function)(*arguments).jaxpr) == expected, name
        if name in ("gradient", "batched", "depthwise"):
            analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
            elementwise = 4 * sum(
                np.size(x)
                for x in jax.tree.leaves(jax.eval_shape(function, *arguments))
            )
            assert (
                expected
                <= (analysis or {})["flops"]
                <= expected + elementwise + 4 * 8 * 32
            ), name
