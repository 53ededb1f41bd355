"""Code that the tests of this directory share: programs beside the zoo, and layouts by
the program for all."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers import abstract, abstract_mesh
from jax.sharding import PartitionSpec
from zoo import BY_NAME, Entry, of_rows

import redco_eqx as rx
from redco_eqx.types import Explanation

# Programs with linear solves and with products by groups of rows, in the form of the
# zoo's entries.

LENGTH, DIM, HIDDEN, HEADS, GROUPS = 16, 32, 64, 8, 4
COLUMN_ROW = {"up": (None, "tensor"), "down": ("tensor",)}
COLUMN_ROW_BY_GROUP = {"up": (None, None, "tensor"), "down": (None, "tensor")}


def weights(*lead: int) -> Any:
    def make(key: Any) -> Any:
        normal = jax.random.normal
        up, down = jax.random.split(key)
        up, down = normal(up, (*lead, DIM, HIDDEN)), normal(down, (*lead, HIDDEN, DIM))
        return {"up": up / DIM**0.5, "down": down / HIDDEN**0.5}

    return make


def of_groups(num_rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((num_rows, LENGTH, DIM), np.float32)
    return {
        "x": x,
        "group": np.random.default_rng(1).integers(
            0, GROUPS, (num_rows, LENGTH), np.int32
        ),
    }


def ridge_of_heads(model: Any, x: Any) -> Any:
    """Each head fits its own features by least squares."""
    h = (x @ model["up"]).reshape(LENGTH, HEADS, -1)
    gram = jnp.einsum("lhd,lhe->hde", h, h) + LENGTH * jnp.eye(HIDDEN // HEADS)
    solved = jnp.linalg.solve(gram, jnp.moveaxis(h, 0, -1))
    return jnp.moveaxis(solved, -1, 0).reshape(LENGTH, HIDDEN) @ model["down"]


def solve_of_rows(model: Any, x: Any) -> Any:
    """Rows are mixed by the inverse of a matrix of their own: columns are gathered to
    be solved for."""
    return (
        jnp.linalg.solve(LENGTH * jnp.eye(LENGTH) + x @ x.T, x @ model["up"])
        @ model["down"]
    )


def experts_of_rows(model: Any, batch: Any) -> Any:
    """All rows of the batch, sorted by their expert."""
    x, group = batch["x"].reshape(-1, DIM), batch["group"].reshape(-1)
    order, sizes = jnp.argsort(group), jnp.bincount(group, length=GROUPS)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], model["up"], sizes))
    y = jax.lax.ragged_dot(hidden, model["down"], sizes)[jnp.argsort(order)]
    return jnp.mean((y - x) ** 2)


def experts_by_example(model: Any, batch: Any) -> Any:
    """The rows of each example are in the order of their experts, `vmap` is over
    examples."""
    sizes = jax.vmap(lambda group: jnp.bincount(group, length=GROUPS))(batch["group"])

    def product(x: Any, weight: Any) -> Any:
        return jax.vmap(jax.lax.ragged_dot)(
            x, jnp.broadcast_to(weight, (len(x), *weight.shape)), sizes
        )

    hidden = jax.nn.gelu(product(batch["x"], model["up"]))
    return jnp.mean((product(hidden, model["down"]) - batch["x"]) ** 2)


def lstm(size: int, hidden: int) -> Any:
    def make(key: Any) -> Any:
        return {
            "cell": eqx.nn.LSTMCell(size, hidden, key=key),
            "out": eqx.nn.Linear(hidden, size, key=key),
        }

    return make


def recurrent(model: Any, x: Any) -> Any:
    """A scan along the row, by the same weights."""

    def step(carry: Any, x: Any) -> Any:
        carry = model["cell"](x, carry)
        return carry, carry[0]

    start = jnp.zeros(model["cell"].hidden_size)
    return jax.vmap(model["out"])(jax.lax.scan(step, (start, start), x)[1])


def recurrence(model: Any, x: Any) -> Any:
    """A linear recurrence along the row, by levels: the last has slices without
    elements."""
    inputs = x @ model["up"]

    def then(before: Any, after: Any) -> Any:
        return before[0] * after[0], after[0] * before[1] + after[1]

    decays = jnp.broadcast_to(jax.nn.sigmoid(model["decay"]), inputs.shape)
    _, states = jax.lax.associative_scan(then, (decays, inputs))
    return x + jax.nn.gelu(states) @ model["down"]


def weights_and_decay(key: Any) -> Any:
    return {**weights()(key), "decay": jnp.linspace(-2.0, 2.0, HIDDEN)}


_ENTRIES = (
    of_rows(
        "recurrence",
        weights_and_decay,
        recurrence,
        {**COLUMN_ROW, "decay": ("tensor",)},
        x=(LENGTH, DIM),
    ),
    of_rows("ridge_of_heads", weights(), ridge_of_heads, COLUMN_ROW, x=(LENGTH, DIM)),
    of_rows("solve_of_rows", weights(), solve_of_rows, {"*": ...}, x=(LENGTH, DIM)),
    Entry(
        "experts_of_rows",
        weights(GROUPS),
        of_groups,
        experts_of_rows,
        COLUMN_ROW_BY_GROUP,
    ),
    Entry(
        "experts_by_example",
        weights(GROUPS),
        of_groups,
        experts_by_example,
        COLUMN_ROW_BY_GROUP,
    ),
)
SOLVES_AND_GROUPS = {entry.name: entry for entry in _ENTRIES}

# Layouts by the program.

MESH = abstract_mesh(data=2, tensor=4)
ROWS = 8
PROGRAMS = {**BY_NAME, **SOLVES_AND_GROUPS}


def loss_of(entry: Entry) -> Any:
    return lambda model, batch, key: entry.loss(model, batch)


@cache
def explained(name: str, rows: int = ROWS) -> Explanation:
    """A program on `MESH`."""
    entry = PROGRAMS[name]
    return rx.explain(
        abstract(entry.make), MESH, loss_fn=loss_of(entry), batch=entry.inputs(rows)
    )


def specs_of(explanation: Explanation) -> dict[str, PartitionSpec]:
    return {path: d.spec for path, d in explanation.decisions.items()}


def sent(
    explanation: Explanation, specs: Mapping[str, PartitionSpec] | None = None
) -> Any:
    """The bytes that are predicted for a layout: that of `explanation`, or another one
    of the same program."""
    if specs is not None:
        decisions = {
            p: dataclasses.replace(d, spec=specs[p])
            for p, d in explanation.decisions.items()
        }
        explanation = dataclasses.replace(explanation, decisions=decisions)
    found = explanation.communication
    assert found is not None
    return found
