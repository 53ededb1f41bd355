"""The work that a layout by the program takes grows no faster than the model."""

import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import abstract_mesh

import redco_eqx as rx

DIM, HIDDEN, NUM = 8, 16, 20


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def abstract_array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def residual(num_layers: int) -> tuple[Any, Any]:
    """All arrays share one split, the stream's."""
    weights = [{"weight": (DIM, DIM), "bias": (DIM,)}] * num_layers

    def run(model: Any, x: Any) -> Any:
        for layer in model["layers"]:
            x = x + jnp.tanh(layer["weight"] @ x + layer["bias"])
        return x

    return {"layers": weights}, run


def blocks(num_layers: int) -> tuple[Any, Any]:
    """Each layer has a split of its own, which clashes with the stream's. The stream
    begins with a product, so that it is a sum over devices itself."""
    weights = [{"up": (HIDDEN, DIM), "down": (DIM, HIDDEN), "bias": (DIM,)}]

    def run(model: Any, x: Any) -> Any:
        x = model["first"] @ x
        for layer in model["layers"]:
            x = x + layer["down"] @ jnp.tanh(layer["up"] @ x) + layer["bias"]
        return x

    return {"first": (DIM, DIM), "layers": weights * num_layers}, run


def fused(num_layers: int) -> tuple[Any, Any]:
    """Each layer reads one mask, and has two pieces in one weight."""
    weights = [{"gate": (2 * HIDDEN, DIM), "down": (DIM, HIDDEN)}]

    def run(model: Any, x: Any) -> Any:
        mask = x > 0
        for layer in model["layers"]:
            gate, value = jnp.split(layer["gate"] @ jnp.where(mask, x, 0), 2)
            x = x + layer["down"] @ (jax.nn.silu(gate) * value)
        return x

    return {"layers": weights * num_layers}, run


def shared(num_layers: int) -> tuple[Any, Any]:
    """All layers use the same weights, whose gradient is a sum of as many gradients."""

    def run(model: Any, x: Any) -> Any:
        for _ in range(num_layers):
            x = x + model["down"] @ jnp.tanh(model["up"] @ x)
        return x

    return {"up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}, run


def calls(function: Callable[[], Any]) -> Counter[str]:
    """Count the calls of each function of the library, and the elements of each of its
    generators."""
    folder = str(pathlib.Path(rx.__file__).parent)
    found: Counter[str] = Counter()

    def watch(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            name = code.co_filename.removeprefix(folder)
            found[f"{name}:{code.co_firstlineno} {code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("build", [residual, blocks, fused, shared])
def test_no_function_is_called_more_often_than_the_model_grows(build):
    mesh = abstract_mesh(data=2, tensor=4)

    def explain(num_layers: int) -> None:
        shapes, run = build(num_layers)
        model = jax.tree.map(abstract_array, shapes, is_leaf=is_shape)
        batch = jax.ShapeDtypeStruct((8, DIM), jnp.float32)

        def loss_fn(model: Any, batch: Any, key: Any) -> Any:
            return jnp.mean(jax.vmap(lambda x: run(model, x))(batch) ** 2)

        str(rx.explain(model, mesh, loss_fn=loss_fn, batch=batch))

    explain(1)  # what is done once in a process
    once, twice = (calls(lambda n=n: explain(n)) for n in (NUM, 2 * NUM))
    # Of a function that is called for each pair of layers, `twice` is four times
    # `once`.
    grown = {
        name: (once[name], count)
        for name, count in twice.items()
        if count > 2.2 * once[name] + 10 * NUM
    }
    assert not grown
