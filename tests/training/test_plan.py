"""The work due at a step: one table."""

import dataclasses

from redco_eqx._checkpoint.runs import RunRecord
from redco_eqx._training.course import Due, Plan, due

# Ten examples in batches of 2: five steps an epoch.
STEPS = 5


def at(num_steps: int, *, evaluated: bool = False, stopped: bool = False, begin: int = 100) -> RunRecord:
    """A run that has taken so many steps, of which the last was evaluated or not."""
    run = RunRecord(begin, num_steps, num_steps // STEPS, num_steps % STEPS, 2, 10)
    rows = ({"step": run.step, "eval/loss": 1.0},) if evaluated else ()
    return dataclasses.replace(run, evaluations=rows, stopped=stopped)


def word(what: Due) -> str:
    return " ".join(name for name, is_due in dataclasses.asdict(what).items() if is_due)


BY_STEPS = Plan(num_steps=12, log_every=4, evaluate=6, save=3)
BY_EPOCHS = Plan(num_epochs=2, log_every=4, evaluate=0, save=0)
BARE = Plan(num_steps=3, log_every=2)


CASES: list[tuple[Plan, RunRecord, dict[str, bool], str]] = [
    (BY_STEPS, at(1), {}, ""),
    (BY_STEPS, at(3), {}, "save"),
    (BY_STEPS, at(4), {}, "log"),
    (BY_STEPS, at(5), {}, ""),
    (BY_STEPS, at(6), {}, "log evaluate save"),
    (BY_STEPS, at(12), {}, "log evaluate save finish"),
    (BY_STEPS, at(13), {}, "log evaluate save finish"),
    (BY_EPOCHS, at(4), {}, "log"),
    (BY_EPOCHS, at(5), {}, "log evaluate save"),
    (BY_EPOCHS, at(10), {}, "log evaluate save finish"),
    (BARE, at(2), {}, "log"),
    (BARE, at(3), {}, "log finish"),
    # Where a run goes on: what was done is not done again, what was cut short is.
    (BY_STEPS, at(6, evaluated=True), {}, "save"),
    (BY_STEPS, at(12, evaluated=True), {}, "log save finish"),
    # A signal: a save, which holds what is not logged, or a row; and no evaluation.
    (BY_STEPS, at(1), {"stop": True}, "save finish"),
    (BY_STEPS, at(6), {"stop": True}, "save finish"),
    (BARE, at(1), {"stop": True}, "log finish"),
    # A hook that has ended the run.
    (BY_STEPS, at(1, stopped=True), {}, "log evaluate save finish"),
    (BY_STEPS, at(1, stopped=True, evaluated=True), {}, "log save finish"),
]


def test_what_is_due() -> None:
    for plan, run, options, expected in CASES:
        assert word(due(plan, run, **options)) == expected, (plan, run, options)
