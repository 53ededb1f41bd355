"""The steps that were dispatched and may not have finished yet, and the rows of the log
that end with them.

JAX dispatches a step and returns at once, while the devices still compute the steps
before. `fit` stays ahead of the devices by a few steps, so they never wait for Python.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from redco_eqx._base.protocols import Batch
from redco_eqx._checkpoint.run_record import LogRow
from redco_eqx._step.window import Window

NUM_AHEAD = 4
"""The maximum number of unfinished steps. Waiting batches take memory, and the CPU
client can deadlock when computations that wait for each other take all of its threads
(see `give_threads` in `_sharding/mesh.py`; no upstream issue is known)."""


@dataclasses.dataclass
class PendingRow:
    """A row of the log whose last step may not have finished yet.

    - `step`: the number of the state after its last step.
    - `epochs_done`: the number of epochs so far, including the fraction of the current
        one.
    - `window`: its metrics, on the devices.
    - `finite`: a scalar on the devices: true if all parameters are finite.
    - `waited_seconds`: the seconds that `fit` waited for its batches.
    - `compared`: returns the numbers of its comparison with the other processes.
    - `done_at`: the time when its last step was first seen to be finished.
    """

    step: int
    epochs_done: float
    window: Window
    finite: Any
    waited_seconds: float
    compared: Callable[[], LogRow] = dict
    done_at: float | None = None


@dataclasses.dataclass
class StepInFlight:
    """A dispatched step.

    - `batch`: its batch, to name what is wrong in it if the step is not finite. `None`
        stands for steps of an earlier call, of which only the window is left.
    - `window`: the window after the step.
    - `row`: the row of the log that ends with the step, if one does.
    """

    batch: Batch | None
    window: Window
    row: PendingRow | None = None


class InFlight:
    """The queue of dispatched steps."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        """Add the step that was dispatched last."""
        self._steps.append(step)

    @property
    def newest(self) -> StepInFlight:
        """The step that was dispatched last."""
        return self._steps[-1]

    def wait_for_oldest(self) -> StepInFlight:
        """Wait until the oldest step has finished. It stays in the queue."""
        step = self._steps[0]
        jax.block_until_ready(step.window.ok)
        self.note_finished_rows()
        return step

    def remove_oldest(self) -> None:
        """Remove the oldest step."""
        self._steps.popleft()

    def note_finished_rows(self) -> None:
        """Note the time for each row that has finished by now, without waiting.

        A row is reported only some steps after it has finished. Its rates must not
        include the time of those steps.
        """
        now = time.perf_counter()
        for step in self._steps:
            ok: Any = step.window.ok
            if step.row is not None and step.row.done_at is None and ok.is_ready():
                step.row.done_at = now
