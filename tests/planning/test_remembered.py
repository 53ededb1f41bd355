"""What a program remembers: closed forms, and never more than the compiled program takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from redco_eqx._planning.memory import remembered

ROWS, WIDTH, LAYERS = 64, 32, 6
X = jnp.ones((ROWS, WIDTH))
STACK = jnp.ones((LAYERS, WIDTH, WIDTH))
ACTIVATION, KEPT_STACK, GRADIENT = 4 * ROWS * WIDTH, 4 * LAYERS * ROWS * WIDTH, 4 * WIDTH * WIDTH


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def scanned(layer: Callable[..., Any]) -> Callable[..., Any]:
    def loss(stack: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), X, stack)[0] ** 2)

    return loss


def unrolled(stack: jax.Array) -> jax.Array:
    x = X
    for w in stack:
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def halved(stack: jax.Array) -> jax.Array:
    x = X.astype(jnp.bfloat16)
    for w in stack[:3]:
        x = jnp.sin((x @ w).astype(jnp.bfloat16))
    return jnp.sum(x.astype(jnp.float32))


# Of a scanned layer its input and the cosine of its product; of others, where a sine and a cosine are of one
# product, one of them. Then the last x, or the first gradient of a weight; in bfloat16 also that of an x.
PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "scan": (scanned(layer), 2 * KEPT_STACK + ACTIVATION),
    "scan that recomputes": (scanned(jax.checkpoint(layer, prevent_cse=False)), KEPT_STACK + ACTIVATION),
    "a loop in Python": (unrolled, KEPT_STACK + GRADIENT),
    "half the precision": (halved, 2 * ACTIVATION + GRADIENT),
    "called twice": (
        lambda stack: jnp.sum(jax.jit(layer)(jax.jit(layer)(X, stack[0]), stack[1])),
        2 * ACTIVATION + GRADIENT,
    ),
    "nothing but a product at a time": (lambda stack: jnp.sum(X @ stack[0]), ACTIVATION),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_closed_forms(name: str) -> None:
    function, expected = PROGRAMS[name]
    found = remembered(jax.make_jaxpr(jax.value_and_grad(function))(STACK).jaxpr)
    assert sum(value.num_bytes for value in found) == expected
    assert [value.num_bytes for value in found] == sorted((v.num_bytes for v in found), reverse=True)
    assert all("test_remembered.py:" in value.source for value in found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiled_program_takes_no_less(name: str) -> None:
    function, _ = PROGRAMS[name]
    step = jax.value_and_grad(function)
    stats: Any = jax.jit(step).lower(STACK).compile().memory_analysis()
    taken = stats.temp_size_in_bytes + stats.output_size_in_bytes
    assert sum(value.num_bytes for value in remembered(jax.make_jaxpr(step)(STACK).jaxpr)) <= taken
