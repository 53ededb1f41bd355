"""What `fit` does at an evaluation: loss, predictions, metrics of them, a file of them."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from redco_eqx._data.batches import batches
from redco_eqx._distributed.watchdog import Watchdog
from redco_eqx._step.state import TrainState
from redco_eqx._training.evaluate import mesh_of, watched_evaluate, watched_predict
from redco_eqx._types import CollateFn, LossFn, PredictFn

MetricFn: TypeAlias = Callable[[Any, list[Any]], Mapping[str, Any]]
"""`metric_fn(examples, predictions) -> {name: number}`."""


class _Stopped(BaseException):
    """Ends an evaluation from within."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The arguments of `fit` that say how to evaluate."""

    collate_fn: CollateFn
    loss_fn: LossFn
    predict_fn: PredictFn | None
    metric_fn: MetricFn | None
    batch_size: int
    directory: str | os.PathLike[str] | None
    prefetch: int
    watchdog: Watchdog

    def __post_init__(self) -> None:
        if self.metric_fn is not None and self.predict_fn is None:
            raise ValueError("fit: metric_fn needs predict_fn, whose predictions it is given.")
        if self.directory is not None and self.predict_fn is None:
            raise ValueError("fit: predictions_directory needs predict_fn.")

    def rehearse(self, state: TrainState, examples: Any) -> dict[str, float]:
        """Evaluates one batch, so that what is broken fails now and not after an epoch."""
        try:
            batches(examples, self.collate_fn, batch_size=self.batch_size, mesh=mesh_of(state), remainder="pad")
            size = min(len(examples), self.batch_size)
            return self._measure(state, [examples[i] for i in range(size)], lambda: False)[0]
        except Exception as error:
            error.add_note("This happened when fit tried the evaluation on the first batch of eval_examples.")
            raise

    def __call__(
        self, state: TrainState, examples: Any, step: int, *, stops: Callable[[], bool]
    ) -> dict[str, float] | None:
        """The row `{"eval/loss": ..., "eval/<metric>": ...}`; writes the predictions to their file.

        `None` if `stops()`, which is asked before each batch, became true.
        """
        try:
            row, predictions = self._measure(state, examples, stops)
        except _Stopped:
            return None
        if self.directory is not None and jax.process_index() == 0:
            _write(pathlib.Path(self.directory) / f"step-{step}.jsonl", examples, predictions)
        return row

    def _measure(
        self, state: TrainState, examples: Any, stops: Callable[[], bool]
    ) -> tuple[dict[str, float], list[Any]]:
        def collate_fn(examples: Any) -> Any:
            if stops():
                raise _Stopped
            return self.collate_fn(examples)

        sizes = self.batch_size, self.prefetch
        losses = watched_evaluate(self.watchdog, state, examples, collate_fn, self.loss_fn, *sizes)
        row = {f"eval/{name}": value for name, value in losses.items()}
        if self.predict_fn is None:
            return row, []
        predictions = watched_predict(self.watchdog, state, examples, collate_fn, self.predict_fn, *sizes)
        if self.metric_fn is None:
            return row, predictions
        metrics = self.metric_fn(examples, predictions)
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"metric_fn must return a dict of numbers by name, but returned a {type(metrics).__name__}."
            )
        for name, value in metrics.items():
            if f"eval/{name}" in row:
                raise ValueError(f"metric_fn: loss_fn already reports a metric {name!r}. Rename one.")
            row[f"eval/{name}"] = _number(name, value)
        return row, predictions


def _number(name: str, x: Any) -> float:
    if not isinstance(x, str | bytes):
        try:
            if np.shape(x) == ():
                return float(x)
        except (TypeError, ValueError):
            pass
    raise ValueError(f"metric_fn: {name!r} is {x!r} ({type(x).__name__}), but a metric is one number.")


def _write(path: pathlib.Path, examples: Sequence[Any], predictions: list[Any]) -> None:
    """One line of JSON for each example: `{"example": ..., "prediction": ...}`; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        # A half of a surrogate pair is not UTF-8; what the handler writes for it is its escape in JSON.
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for i, prediction in enumerate(predictions):
                file.write(f'{{"example": {_json(examples[i])}, "prediction": {_json(prediction)}}}\n')
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _json(x: Any) -> str:
    try:
        return json.dumps(x, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, an object within itself
        return json.dumps(repr(x), ensure_ascii=False)


def _plain(x: Any) -> Any:
    """Arrays as nested lists, and what else JSON has no form for by its `repr`."""
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return np.asarray(x).tolist()
    return repr(x)
