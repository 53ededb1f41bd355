"""Programs to differentiate: what one is as JSON, the loss built from it, a strategy
that draws them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gradients.operations import OPERATIONS, one_of
from gradients.wrappers import WRAPPERS
from hypothesis import strategies as st

Spec = dict[str, Any]
"""A draw of `programs`: `batch`, `spatial`, `channels`; `operations`, each with a
`name`, a `wrapper` and its settings; `objective`; `mode`; `num_microbatches`;
`reshard_after_forward`; `layouts`, pairs of a mesh and a kind of layout. A golden one
may ask for `collectives`."""

MESHES: dict[str, dict[str, Any]] = {
    "data2xtensor4": {"data": 2, "tensor": 4},
    "fsdp2xtensor4": {"data": 1, "fsdp": 2, "tensor": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp8": {"data": 1, "fsdp": 8},
}
FAMILIES = sorted({operation.family for operation in OPERATIONS.values()})
OBJECTIVES = ("loss", "gradient_penalty", "inner_step")
MODES = ("step", "ensemble", "outer", "reduce_once")


class Program(NamedTuple):
    """- `weights`: shape and dtype of each parameter, one dict for each operation.
    - `loss`: `(model, batch) -> scalar`, with `model` as `weights` in a dict under
        `layers`.
    """

    weights: list[dict[str, jax.ShapeDtypeStruct]]
    loss: Callable[[Any, Any], Any]


def build(spec: Spec) -> Program:
    """The program of a spec."""
    x = jax.ShapeDtypeStruct(
        (spec["batch"], *spec["spatial"], spec["channels"]), jnp.float64
    )
    index = jax.ShapeDtypeStruct((spec["batch"], 8), jnp.int32)
    weights, layers = [], []
    for entry in spec["operations"]:
        settings = {
            name: value
            for name, value in entry.items()
            if name not in ("name", "wrapper")
        }
        shapes, x = _weights_of(OPERATIONS[entry["name"]].apply, settings, x, index)
        weights.append(shapes)
        layers.append(
            WRAPPERS[entry["wrapper"]](
                _layer(OPERATIONS[entry["name"]].apply, settings)
            )
        )

    def plain(model: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer, weights in zip(layers, model["layers"]):
            x = jnp.tanh(layer(weights, x, batch["index"]))
        return jnp.mean((x + 0.5) ** 2)

    return Program(weights, _objective(spec["objective"], plain))


def _weights_of(
    apply: Any, settings: Spec, x: Any, index: Any
) -> tuple[dict[str, Any], Any]:
    shapes: dict[str, Any] = {}

    def record(name: str, *shape: int, dtype: Any = jnp.float64) -> Any:
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
        return jnp.zeros(shape, dtype)

    return shapes, jax.eval_shape(
        lambda x, index: apply(record, x, index, **settings), x, index
    )


def _layer(apply: Any, settings: Spec) -> Callable[[Any, Any, Any], Any]:
    return lambda weights, x, index: apply(
        lambda name, *_, **__: weights[name], x, index, **settings
    )


def _objective(name: str, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss, or one with derivatives in it."""

    def gradient_penalty(model: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda x: loss(model, {**batch, "x": x}))(
            batch["x"]
        )
        return value + batch["x"].shape[0] * jnp.sum(gradient**2)

    def inner_step(model: Any, batch: Any) -> Any:
        gradient = jax.grad(loss)(model, batch)
        return loss(
            jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), model, gradient), batch
        )

    return {"gradient_penalty": gradient_penalty, "inner_step": inner_step}.get(
        name, loss
    )


def make_model(program: Program, seed: int) -> Any:
    """Random parameters of the program, in NumPy."""
    rng = np.random.default_rng(seed)

    def one(x: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = max(1, math.prod(x.shape[:-1])) ** -0.5
        values = rng.normal(size=x.shape, scale=scale)
        return (
            values + 1j * rng.normal(size=x.shape, scale=scale)
            if x.dtype == jnp.complex128
            else values
        )

    return {
        "layers": [
            {name: one(x) for name, x in weights.items()} for weights in program.weights
        ]
    }


def make_batch(spec: Spec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(spec["batch"], *spec["spatial"], spec["channels"])),
        "index": rng.integers(0, 1000, (spec["batch"], 8)).astype(np.int32),
    }


@st.composite
def programs(draw: Callable[..., Any], family: str) -> Spec:
    """Specs of one to three operations, of which one at least is of this family."""
    own = sorted(
        name for name, operation in OPERATIONS.items() if operation.family == family
    )

    def one(names: list[str], wrapper: st.SearchStrategy[str]) -> Spec:
        name = draw(st.sampled_from(names))
        settings = {
            key: draw(values) for key, values in OPERATIONS[name].settings.items()
        }
        return {"name": name, "wrapper": draw(wrapper), **settings}

    wrapper = one_of("none", "none", *WRAPPERS)
    others = [
        one(sorted(OPERATIONS), one_of("none")) for _ in range(draw(one_of(0, 1, 2)))
    ]
    operations = [one(own, wrapper), *others]
    if others and draw(st.booleans()):
        operations = operations[::-1]
    kinds = st.one_of(
        one_of("whole", "rules", "program", "activations"), st.integers(0, 99)
    )
    layouts = [[mesh, draw(kinds)] for mesh in draw(st.permutations(list(MESHES)))[:3]]
    num_microbatches = draw(one_of(1, 1, 2))
    return {
        "batch": 16 if num_microbatches == 2 else draw(one_of(8, 16)),
        "spatial": draw(one_of([8], [6], [4, 4], [5, 4], [8, 6])),
        "channels": draw(one_of(8, 4, 6, 16)),
        "operations": operations,
        "objective": draw(one_of("loss", "loss", "loss", *OBJECTIVES)),
        "mode": draw(one_of("step", "step", "step", *MODES)),
        "num_microbatches": num_microbatches,
        "reshard_after_forward": draw(one_of(None, True, False)),
        "layouts": layouts,
    }
