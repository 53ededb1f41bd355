"""An operation is replaced wherever it stands: in calls, loops, branches, solvers, with what those capture."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import PartitionSpec as P

from redco_eqx._base.jaxprs import rewrite, trace

CAPTURED = np.arange(1.0, 4.0, dtype=np.float32)  # a constant of the traced program
X = jnp.asarray([0.3, 0.5, 0.7])


def scan(f: Any, x: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda c, y: (f(c) + y * CAPTURED, f(y)), x, jnp.stack([x, x]), **options)


def solve(f: Any, x: Any) -> Any:
    def inverse(_: Any, b: Any) -> Any:
        return b / f(CAPTURED)

    return jax.lax.custom_linear_solve(lambda v: v * f(CAPTURED), x, inverse, symmetric=True)


def custom_jvp(f: Any, x: Any) -> Any:
    of = jax.custom_jvp(lambda x: f(x) * CAPTURED)
    of.defjvps(lambda x_dot, y, x: x_dot)
    return of(x)


def custom_vjp(f: Any, x: Any) -> Any:
    of = jax.custom_vjp(lambda x: f(x) * CAPTURED)
    of.defvjp(lambda x: (x, None), lambda _, y_bar: (y_bar,))
    return of(x)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda f, x: jax.jit(lambda x: f(x) * CAPTURED)(x),
    "scan": scan,
    "reversed": lambda f, x: scan(f, x, reverse=True),
    "while": lambda f, x: jax.lax.while_loop(
        lambda c: f(c[0]) + c[1] < 3, lambda c: (f(c[0]) + 1, c[1] + 1), (x[0], 0)
    ),
    "cond": lambda f, x: jax.lax.cond(x[0] > 0, lambda x: f(x) * CAPTURED, lambda x: x, x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x) * CAPTURED)(x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "linear solve": solve,
    "shard_map": lambda f, x: jax.shard_map(f, mesh=mesh_of("data8"), in_specs=P(), out_specs=P())(x),
    "nested": lambda f, x: jax.jit(lambda x: jax.lax.map(lambda x: scan(f, x)[0], x[None]))(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_operation_is_replaced_wherever_it_stands(form):
    program = trace(lambda x: FORMS[form](jnp.sin, x), X)
    jaxpr = rewrite(program.closed.jaxpr, lambda e: jnp.cos if e.primitive.name == "sin" else None)
    expected = FORMS[form](jnp.cos, X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), program.replace(jaxpr)(X), expected)
    unchanged = rewrite(program.closed.jaxpr, lambda e: None)
    assert unchanged is program.closed.jaxpr
