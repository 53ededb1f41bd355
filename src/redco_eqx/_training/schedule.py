"""The schedule of a run: what is due at a step, as a pure function of where it stands and what was planned."""

import dataclasses

from redco_eqx._checkpoint.record import RunRecord
from redco_eqx._training.checks import check_positive


@dataclasses.dataclass(frozen=True)
class Every:
    """A period: so many steps, so many epochs, or either."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_positive("Every", steps=self.steps, epochs=self.epochs)

    def is_due(self, run: RunRecord) -> bool:
        """True if it is due where `run` stands."""
        by_steps = self.steps is not None and run.num_steps % self.steps == 0
        by_epochs = self.epochs is not None and run.batch == 0 and run.epoch % self.epochs == 0
        return by_steps or by_epochs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run, and what it does on the way.

    - `num_epochs`, `num_steps`: how long; exactly one of them.
    - `log_every`: the number of steps that a row of the log covers.
    - `evaluate`, `save`: how often; `None` for never. What is done at all is done at the end, too.

    Raises `ValueError` for numbers that cannot be used.
    """

    num_epochs: int | None = None
    num_steps: int | None = None
    log_every: int = 50
    evaluate: Every | None = None
    save: Every | None = None

    def __post_init__(self) -> None:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError(
                f"fit: num_epochs={self.num_epochs}, num_steps={self.num_steps}, but exactly one of them must "
                "be given."
            )
        check_positive("fit", num_epochs=self.num_epochs, num_steps=self.num_steps, log_every=self.log_every)


@dataclasses.dataclass(frozen=True)
class Due:
    """The things that are due after a step, in this order.

    - `log`: a row with the metrics since the last one.
    - `evaluate`: an evaluation, on a state that is known to be finite.
    - `save`: a checkpoint, which holds the results of the evaluation.
    - `finish`: nothing more; the run is at its end.
    """

    log: bool
    evaluate: bool
    save: bool
    finish: bool


def due(plan: Plan, run: RunRecord, *, stop: bool = False, is_time: bool = False, is_end: bool = False) -> Due:
    """List what is due where a run stands, after its last step or where it goes on.

    **Arguments:**

    - `plan`: of the run.
    - `run`: where it stands, with its evaluations so far: none is made twice at one step.
    - `stop`: whether the run has been asked to stop: it saves and evaluates no more. What it saves holds the
        metrics that are not logged yet; without a save they are logged.
    - `is_time`: whether it is time to save by the clock.
    - `is_end`: whether there are no more batches.
    """
    is_end = is_end or run.stopped or (plan.num_steps is not None and run.num_steps >= plan.num_steps)
    is_end = is_end or (plan.num_epochs is not None and run.epoch >= plan.num_epochs)
    evaluate = plan.evaluate is not None and (is_end or plan.evaluate.is_due(run))
    evaluate = evaluate and not stop and not run.is_evaluated
    save = plan.save is not None and (is_end or stop or is_time or plan.save.is_due(run))
    log = not save if stop else is_end or evaluate or run.num_steps % plan.log_every == 0
    return Due(log=log, evaluate=evaluate, save=save, finish=is_end or stop)
