"""A function of the user's within `fit`, and what it may change in the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from redco_eqx._checkpoint.record import RunRecord
from redco_eqx._distributed.consensus import from_first
from redco_eqx._sharding.mesh import put_global
from redco_eqx._step.state import TrainState, check_is_state, first_change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change that a [`Hook`][] makes in a run.

    ```python
    def patient(run, row, state):
        losses = [evaluation["eval/loss"] for evaluation in run.evaluations]
        return rx.Change(stop=len(losses) > 3 and losses[-1] > losses[-4])

    evaluation = rx.Evaluation(held_out)
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=2, hook=patient, evaluation=evaluation)
    ```

    - `stop`: whether the run ends here, as at its last step: with an evaluation if one is wanted, and a save.
    - `state`: the state to go on with, of the same structure, shapes and dtypes. It is laid out as the one
        that the hook was given, whose `key` and `step` it keeps.
    """

    stop: bool = False
    state: TrainState | None = None


@runtime_checkable
class Hook(Protocol):
    """`(run, row, state) -> None`, or a [`Change`][]: called by `fit` after each row and each evaluation.

    - `run`: where the run stands ([`RunRecord`][]), with all its `evaluations`.
    - `row`: the metrics that were just logged: `train/...` of the steps since the last row, or `eval/...`.
    - `state`: after the last step. The next step deletes its arrays: `jax.device_get` what is to be kept.

    It is called on every process at the same steps. All of them must change the state alike; whether to stop
    is what process 0 says. A resumed run is exact if the hook decides by its arguments alone:
    what it keeps elsewhere is lost when the run ends.
    """

    def __call__(self, run: RunRecord, row: Mapping[str, float], state: TrainState, /) -> Change | None: ...


def apply_hook(
    hook: Hook, run: RunRecord, row: Mapping[str, float], state: TrainState
) -> tuple[RunRecord, TrainState]:
    """The run and the state after the hook.

    Raises `TypeError` or `ValueError` for a change that cannot be made.
    """
    change = hook(run, row, state)
    if change is not None and not isinstance(change, Change):
        raise TypeError(f"hook must return None or an rx.Change, but returned a {type(change).__name__}.")
    change = change or Change()
    has_state = change.state is not None
    stop, is_changed = from_first(lambda: [bool(change.stop), change.state is not None])
    if has_state != is_changed:
        returned = "returned a state" if has_state else "returned none"
        raise ValueError(
            f"hook: on process {jax.process_index()} it {returned}, unlike on process 0. All processes must "
            "change the state alike."
        )
    run = dataclasses.replace(run, stopped=run.stopped or stop)
    return run, state if change.state is None else _changed(state, change.state)


def _changed(old: TrainState, new: TrainState) -> TrainState:
    """`new`, laid out as `old`, and sharing no array with it or with anything else but where both have it."""
    check_is_state(new, "hook: Change's state")
    change = first_change(old, new)
    if change is not None:
        path, was, became = change
        raise ValueError(f"hook: it changes the state: {path} was {was} and became {became}.")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "hook: the returned state is of another model. dataclasses.replace(state, params=...)."
        )
    for name in ("key", "step"):
        a, b = getattr(old, name), getattr(new, name)
        if a is not b and not bool(jnp.all(a == b)):
            raise ValueError(
                f"hook: the returned state has another {name}. The run goes on with its own: "
                "dataclasses.replace(state, params=...) keeps it."
            )

    def one(before: Any, after: jax.Array) -> jax.Array:
        # The next step takes over the memory, so what stands twice, or is held elsewhere, must be a copy.
        return before if after is before else jnp.copy(put_global(after, before.sharding))

    return jax.tree.map(one, old, new)
