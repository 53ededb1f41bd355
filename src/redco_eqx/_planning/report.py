"""A plan as people read it: a table."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from redco_eqx._compiled.communication import Communication
from redco_eqx._compiled.hlo import Buffer
from redco_eqx._planning.memory import Memory
from redco_eqx._planning.targets import Target
from redco_eqx._planning.trial import Option, Trial, gib
from redco_eqx._tree import table


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh on which a step fits, or lacks least. `str()` is a table.

    - `target`: the devices. By the CPU compiler (`target.compiler == "cpu"`) memory is an estimate, and
        `target.margin(mesh)` its margin: what others were measured to ask for.
    - `capacity`: bytes that a step may take of each device.
    - `trials`: what was considered, the best first.
    """

    target: Target
    capacity: int
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial that fits best; if nothing does, the one that lacks least."""
        return self.trials[0]

    @property
    def fits(self) -> bool:
        """True if anything fits."""
        return self.best.fits is True

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes: `make_mesh(**plan.mesh)`."""
        return dict(self.best.candidate.choice.mesh)

    @property
    def options(self) -> dict[str, Option]:
        """The options to call the function with that makes the model."""
        return dict(self.best.candidate.choice.options)

    @property
    def num_microbatches(self) -> int:
        return self.best.candidate.choice.num_microbatches

    @property
    def memory(self) -> Memory | None:
        """On one device; `None` if nothing was compiled."""
        return self.best.memory

    @property
    def communication(self) -> Communication | None:
        """The communication of a step; `None` if it did not compile."""
        return self.best.communication

    def __str__(self) -> str:
        best = self.best
        lines = [f"plan for {self.target}, {gib(self.capacity)} GiB for a step"]
        lines += [f"{'fits' if self.fits else 'DOES NOT FIT'}: {best.candidate.choice}: {best.verdict}"]
        if best.memory is not None:
            margin = self.target.margin(best.candidate.choice.mesh)
            lines += ["", *table(_of_memory(best.memory, self.capacity, margin), right=(1,))]
        if best.arrays and not self.fits:
            lines += ["", "largest arrays of the state, on a device"]
            lines += table([(path, f"{gib(size)} GiB") for path, size in best.arrays], right=(1,))
        if best.buffers:
            lines += ["", "largest values that the step computes, on a device"]
            lines += _of_buffers(best.buffers)
        elif best.candidate.remembered and not self.fits:
            # The compiler gave no program to look into.
            lines += ["", "largest values that are kept for the backward pass, over all devices"]
            lines += _of_buffers(best.candidate.remembered[:5])
        if best.communication is not None:
            lines += ["", *str(best.communication).splitlines()]
        lines += ["", *table(_of_trials(self.trials), right=(1, 2, 3, 4))]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table in a notebook, and in IPython."""
        printer.text(str(self))


def _of_memory(memory: Memory, capacity: int, margin: tuple[float, float] | None) -> list[tuple[str, str]]:
    rows = [
        ("on a device", "GiB"),
        ("parameters", gib(memory.parameters)),
        ("optimizer state", gib(memory.optimizer_state)),
        ("batch", gib(memory.batch)),
    ]
    if memory.temporaries is not None:
        rows.append((f"temporaries (all gradients: {gib(memory.gradients)})", gib(memory.temporaries)))
    peak = "?" if memory.peak is None else gib(memory.peak)
    rows.append(("peak", f"{peak} of {gib(capacity)}"))
    if memory.peak is not None and margin is not None:
        least, most = (gib(int(memory.peak / factor)) for factor in margin[::-1])
        rows.append(("by the devices' own compiler, as measured", f"{least} to {most}"))
    return rows


def _of_buffers(buffers: Sequence[Buffer]) -> list[str]:
    rows = [(f"{gib(b.num_bytes)} GiB", b.shape, os.path.basename(b.source)) for b in buffers]
    return table(rows, right=(0,))


def _of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("considered", "predicted ms", "peak GiB", "MiB sent", "compiled in s", "outcome")
    ]
    for trial in trials[:MOST]:
        peak = "" if trial.memory is None or trial.memory.peak is None else gib(trial.memory.peak)
        sent = "" if trial.communication is None else f"{trial.communication.total.sent_bytes / 2**20:.0f}"
        seconds = f"{trial.seconds:.1f}" if trial.seconds else ""
        milliseconds = f"{1000 * trial.candidate.seconds:.2f}"
        rows.append((str(trial.candidate.choice), milliseconds, peak, sent, seconds, trial.verdict))
    if len(trials) > MOST:
        rows.append((f"and {len(trials) - MOST} more", "", "", "", "", ""))
    return rows


MOST = 12
"""So many trials are in a table."""
