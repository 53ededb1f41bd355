"""The arguments of `fit`, looked at together before anything is compiled."""

import os
from collections.abc import Sequence
from typing import Any

from redco_eqx._checkpoint.checkpoints import Checkpoints
from redco_eqx._data.data import check_examples
from redco_eqx._step.optimizer import check_optimizer
from redco_eqx._step.state import check_is_state
from redco_eqx._training.evaluation import Evaluation
from redco_eqx._types import check_function


def check_arguments(
    state: Any,
    train_examples: object,
    *,
    collate_fn: object,
    loss_fn: object,
    optimizer: Any,
    num_microbatches: int,
    step_fn: object | None,
    evaluation: object | None,
    hook: object | None,
    checkpoints: object | None,
    loggers: object | None,
    on_nonfinite: object,
) -> None:
    """Raises `TypeError` for what is of another kind than it must be, and `ValueError` for what does not fit
    together. How long a run is, and the sizes of batches, are checked where they are used."""
    check_is_state(state, "fit: state")
    check_examples("fit: train_examples", train_examples)
    if callable(train_examples):
        check_function("fit", "train_examples", train_examples, "epoch")
    check_function("fit", "collate_fn", collate_fn, "examples")
    check_function("fit", "loss_fn", loss_fn, "model", "batch", "key")
    if step_fn is not None:
        check_function("fit", "step_fn", step_fn, "state", "batch")
    if hook is not None:
        check_function("fit", "hook", hook, "run", "row", "state")
    _check_loggers(loggers)
    _check_kind("evaluation", evaluation, Evaluation, "rx.Evaluation(examples) makes one of examples.")
    _check_kind("checkpoints", checkpoints, (Checkpoints, str, os.PathLike), "A directory, or rx.Checkpoints.")
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'fit: on_nonfinite={on_nonfinite!r}, but it must be "raise" or "skip".')
    if not state.params:
        raise ValueError(
            "fit: the state has no trainable leaf. Check `trainable` of init_state (NumPy arrays are "
            "constants; jnp.asarray makes a parameter)."
        )
    check_optimizer("fit", state, optimizer)
    if step_fn is not None and num_microbatches != 1:
        raise ValueError("fit: num_microbatches is train_step's; with a step_fn it must be 1.")


def _check_loggers(loggers: object | None) -> None:
    if loggers is None:
        return
    if not isinstance(loggers, Sequence) or isinstance(loggers, str):
        raise TypeError(
            f"fit: loggers must be a list of functions, but is a {type(loggers).__name__}. One alone is "
            "loggers=[logger]."
        )
    for logger in loggers:
        check_function("fit", "a logger", logger, "step", "row")


def _check_kind(name: str, x: object, kind: type | tuple[type, ...], remedy: str) -> None:
    if x is not None and not isinstance(x, kind):
        raise TypeError(f"fit: {name} is a {type(x).__name__}. {remedy}")
