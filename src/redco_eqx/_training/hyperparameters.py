"""The numbers that `optax.inject_hyperparams` keeps in a state: which of them count
when a run continues."""

import dataclasses
import os
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from redco_eqx._base.tree import children, first_few, from_arrays, join, to_arrays
from redco_eqx._base.warn import warn
from redco_eqx._sharding.mesh import put_global
from redco_eqx._step.state import TrainState

Numbers: TypeAlias = dict[str, np.ndarray]
"""Hyperparameters by their path in the optimizer's state:
`0.hyperparams.learning_rate`."""


def hyperparameters_in(opt_state: PyTree) -> Numbers:
    """Return the hyperparameters that the state of an optimizer keeps, and that its
    updates use."""
    return _copied(_hyperparameters_below(opt_state, ""))


def given_by(optimizer: optax.GradientTransformation, state: TrainState) -> Numbers:
    """Return the hyperparameters with which an optimizer begins. Its moments are not
    computed."""
    begun = jax.jit(lambda params: _hyperparameters_below(optimizer.init(params), ""))(
        state.params
    )
    return _copied(begun)


def _copied(numbers: dict[str, Any]) -> Numbers:
    """Fetch numbers. On a CPU, JAX gives a view of the memory of its array, which is
    used anew when `fit` deletes the array."""
    return {path: np.array(x) for path, x in jax.device_get(numbers).items()}


def _hyperparameters_below(node: PyTree, path: str) -> dict[str, Any]:
    found = {}
    if hasattr(node, "hyperparams") and hasattr(node, "hyperparams_states"):
        # Those with a state are computed at each update, by a schedule.
        numbers = {
            name: x
            for name, x in node.hyperparams.items()
            if name not in node.hyperparams_states
        }
        found = {join(path, "hyperparams", name): x for name, x in numbers.items()}
    for name, child in children(node):
        found |= _hyperparameters_below(child, join(path, name))
    return found


def warn_of_others(counting: Numbers, other: Numbers, source: os.PathLike[str]) -> None:
    """Warn if the hyperparameters of the checkpoint `source`, which count, are not
    those of this call."""
    if changed := _changed(counting, other):
        warn(
            "fit: the optimizer keeps its hyperparameters in its state, so those of "
            f"{os.fspath(source)} count, and not those of this call: {changed}. To "
            "continue with those of this call, pass the state of init_state(model, "
            "optimizer) and Checkpoints(..., allow_changes=True)."
        )


def with_hyperparameters(
    restored: TrainState, given: Numbers, source: os.PathLike[str]
) -> TrainState:
    """Return the state that was read from the checkpoint `source`, with the
    hyperparameters of this call. Warn if they change anything."""
    changed = _changed(given, hyperparameters_in(restored.opt_state))
    if not changed:
        return restored
    warn(
        f"fit: the run continues from {os.fspath(source)} with other hyperparameters, "
        f"because allow_changes=True: {changed}."
    )
    arrays = to_arrays(restored.opt_state)
    for path, number in given.items():
        arrays[path] = put_global(number, arrays[path].sharding)
    return dataclasses.replace(
        restored, opt_state=from_arrays(restored.opt_state, arrays)
    )


def _changed(numbers: Numbers, others: Numbers) -> str:
    """List the numbers that differ from the others; `""` if none does."""
    lines = []
    for path, number in numbers.items():
        other = others.get(path, number)
        if not np.array_equal(number, other, equal_nan=True):
            lines.append(f"{path} is {_text(number)}, not {_text(other)}")
    return first_few(lines, most=6)


def _text(number: np.ndarray) -> str:
    if number.ndim == 0:
        return f"{number.item():.6g}"
    return np.array2string(number, threshold=4)
