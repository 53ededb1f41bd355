"""`evaluate`, `predict`, and `Evaluation`: a whole set of examples, none lost and none counted twice."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from redco_eqx._data.batches import batches
from redco_eqx._data.data import Data, Stream, check_examples
from redco_eqx._data.placement import batch_sizes
from redco_eqx._data.streams import as_sequence
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._step.state import TrainState, check_is_state, layout_of, state_mesh, step_of
from redco_eqx._step.steps import eval_step, predict_step
from redco_eqx._training.checks import check_positive, check_whole
from redco_eqx._training.compile import PerShape, indexed, lagging
from redco_eqx._training.schedule import Every
from redco_eqx._types import CollateFn, Examples, LossFn, OutputFn, PredictFn, check_function

# `evaluate` and `predict`: a whole set of examples, none lost and none counted twice.


def evaluate(
    state: TrainState,
    examples: Examples | Data | Stream,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
) -> dict[str, float]:
    """The loss and metrics over all examples: exact weighted means, independent of batch size and mesh.

    The model is in inference mode. A scalar that `loss_fn` returns weighs the number of examples of its
    batch; a [`Mean`][] weighs what it says. The compiled program is kept for a next call with the same
    `loss_fn`.

    ```python
    row = rx.evaluate(state, held_out, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=64)
    print(row["loss"])
    ```

    **Arguments:**

    - `state`: from `init_state` (an optimizer is not needed); it also gives the mesh and the randomness.
    - `examples`: as for `batches`.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `batch_size`: a multiple of the number of data shards. The tail is evaluated at its true size.

    **Returns:**

    `{"loss": ..., <metrics of loss_fn>}` as floats.

    **Raises:**

    `ValueError` as `batches` and `eval_step` do, and for a state that was donated.
    """
    metrics = losses(state, examples, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=batch_size)
    assert metrics is not None
    return metrics


@in_own_context
def losses(
    state: TrainState,
    examples: Examples | Data | Stream,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
    stops: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """`evaluate`, or `None` once `stops()`, which is asked before each batch, is true."""
    programs = _programs("evaluate", eval_step, state, examples, collate_fn, batch_size, loss_fn=loss_fn)
    totals: dict[str, tuple[float, float]] = {}
    outputs = _outputs(state, examples, programs, collate_fn, batch_size, "split", stops)
    with contextlib.closing(outputs):  # an error holds this frame, and with it the thread
        for metrics in lagging(outputs):
            for name, mean in jax.device_get(metrics).items():
                total, weight = totals.get(name, (0.0, 0.0))
                totals[name] = (total + float(mean.total), weight + float(mean.weight))
    if stops():
        return None
    return {name: total / weight if weight else 0.0 for name, (total, weight) in totals.items()}


def predict(
    state: TrainState,
    examples: Examples | Data | Stream,
    *,
    collate_fn: CollateFn,
    predict_fn: PredictFn,
    output_fn: OutputFn | None = None,
    batch_size: int,
) -> list[Any]:
    """Compute `predict_fn` for each example, in order, on every process.

    The model is in inference mode. The last batch is filled up by repeating its last example, and what
    belongs to the repetitions is dropped.

    ```python
    outputs = rx.predict(state, held_out, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=64)
    print(len(outputs), outputs[0].shape)
    ```

    **Arguments:** as for `evaluate`, with `predict_fn` a [`PredictFn`][], and

    - `output_fn`: `(example, prediction) -> anything`, from the arrays of one example to what a person reads:
        decoded text, a label's name.

    **Returns:**

    A list with one entry per example: what `predict_fn` returns for it, as NumPy arrays without the
    batch dim; or what `output_fn` makes of that.

    **Raises:**

    `ValueError` as `batches` and `predict_step` do, and for a state that was donated.
    """
    rows = predictions(
        state,
        examples,
        collate_fn=collate_fn,
        predict_fn=predict_fn,
        output_fn=output_fn,
        batch_size=batch_size,
    )
    assert rows is not None
    return rows


@in_own_context
def predictions(
    state: TrainState,
    examples: Examples | Data | Stream,
    *,
    collate_fn: CollateFn,
    predict_fn: PredictFn,
    output_fn: OutputFn | None,
    batch_size: int,
    stops: Callable[[], bool] = lambda: False,
) -> list[Any] | None:
    """`predict`, or `None` once `stops()`, which is asked before each batch, is true."""
    programs = _programs(
        "predict", predict_step, state, examples, collate_fn, batch_size, predict_fn=predict_fn
    )
    rows: list[Any] = []
    data = as_sequence(examples)
    outputs = _outputs(state, data, programs, collate_fn, batch_size, "pad", stops)
    with contextlib.closing(outputs):
        for output in lagging(outputs, num_behind=1):  # outputs may be large
            leaves, treedef = jax.tree.flatten(jax.tree.map(_to_host, output))
            for i in range(min(batch_size, len(data.sequence) - len(rows))):
                row = jax.tree.unflatten(treedef, [leaf[i] for leaf in leaves])
                rows.append(row if output_fn is None else _output(output_fn, data.sequence, len(rows), row))
    return None if stops() else rows


def _programs(
    where: str,
    step: Callable[..., Any],
    state: TrainState,
    examples: Examples | Data | Stream,
    collate_fn: CollateFn,
    batch_size: int,
    **function: Callable[..., Any],
) -> PerShape[jax.stages.Compiled]:
    """Check the arguments of `where`, and return the programs of `step` with the one function of the user's."""
    ((name, use),) = function.items()
    check_is_state(state, f"{where}: state")
    check_examples(f"{where}: examples", examples)
    check_function(where, "collate_fn", collate_fn, "examples")
    check_function(where, name, use, "model", "batch", "key")
    check_whole(where, batch_size=batch_size)
    step = functools.partial(step, shardings=layout_of(state), **function)
    return PerShape(indexed(step), functions=(use,), key=where, state=state)


def _output(output_fn: OutputFn, examples: Examples, index: int, prediction: PyTree) -> Any:
    try:
        return output_fn(examples[index], prediction)
    except Exception as error:
        error.add_note(f"output_fn was given example {index} and its prediction.")
        raise


def _outputs(
    state: TrainState,
    examples: Examples | Data | Stream,
    programs: PerShape[jax.stages.Compiled],
    collate_fn: CollateFn,
    batch_size: int,
    remainder: str,
    stops: Callable[[], bool],
) -> Generator[PyTree[Array]]:
    """Yield the program's output for each batch, dispatched as it is asked for, until `stops()`."""
    mesh = state_mesh(state)
    stream = batches(examples, collate_fn, batch_size=batch_size, mesh=mesh, remainder=remainder)
    with contextlib.closing(stream):
        for index, batch in enumerate(stream):
            if stops():
                break
            yield programs(state, batch)(state, batch, np.int32(index))


def _to_host(x: Array) -> np.ndarray:
    if not x.is_fully_addressable and not x.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


# `Evaluation`: what a run measures on other examples: loss, predictions, metrics of them.


MetricFn: TypeAlias = Callable[[Examples, list[Any]], Mapping[str, Any]]
"""`metric_fn(examples, predictions) -> {name: number}`."""


_CALLED_WITH = {
    "collate_fn": ("examples",),
    "loss_fn": ("model", "batch", "key"),
    "state_fn": ("state",),
    "predict_fn": ("model", "batch", "key"),
    "output_fn": ("example", "prediction"),
    "metric_fn": ("examples", "predictions"),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation that [`fit`][] makes: of which examples, when, and how; called with a state, it does so at
    once.

    ```python
    def worst(examples, outputs):
        return {"worst": np.max(np.abs(np.stack(outputs) - np.stack(examples)))}

    evaluation = rx.Evaluation(held_out, predict_fn=predict_fn, metric_fn=worst)
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, evaluation=evaluation)
    row = rx.Evaluation(held_out, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=64)(state)
    ```

    - `examples`: those to evaluate (see `evaluate`); a stream is read anew each time.
    - `every_steps`: how often; without it after each epoch. At the end of a run in any case.
    - `collate_fn`, `loss_fn`, `batch_size`: in `fit` its own by default.
    - `state_fn`: from the state of the run to the one to evaluate: the same with averaged parameters, say.
    - `predict_fn`, `output_fn`, `metric_fn`: predictions for the examples (see `predict`), what a person reads
        of each, and what `metric_fn(examples, predictions)` makes of these outputs: a dict of numbers.
    - `predictions_directory`: where the outputs are written beside their examples, as `step-<step>.jsonl`.

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Examples | Data | Stream
    _: dataclasses.KW_ONLY
    every_steps: int | None = None
    collate_fn: CollateFn | None = None
    loss_fn: LossFn | None = None
    batch_size: int | None = None
    state_fn: Callable[[TrainState], TrainState] | None = None
    predict_fn: PredictFn | None = None
    output_fn: OutputFn | None = None
    metric_fn: MetricFn | None = None
    predictions_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_positive("Evaluation", every_steps=self.every_steps, batch_size=self.batch_size)
        check_examples("Evaluation: examples", self.examples)
        for name, arguments in _CALLED_WITH.items():
            if getattr(self, name) is not None:
                check_function("Evaluation", name, getattr(self, name), *arguments)
        if isinstance(self.examples, Stream) and self.examples.is_once:
            raise ValueError(
                "Evaluation: its examples are a Stream of an iterator, which can be read only once, but each "
                "evaluation reads it. Give a function that returns one, or an iterable."
            )
        for name in ("output_fn", "metric_fn", "predictions_directory"):
            if getattr(self, name) is not None and self.predict_fn is None:
                raise ValueError(f"Evaluation: {name} needs predict_fn, which makes the predictions.")

    @property
    def every(self) -> Every:
        """The times at which it is due."""
        return Every(epochs=1) if self.every_steps is None else Every(steps=self.every_steps)

    def or_else(self, **defaults: Any) -> "Evaluation":
        """The same, with values for fields that are `None`."""
        return dataclasses.replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    def rehearse(self, state: TrainState) -> dict[str, float]:
        """Evaluates one batch, so that what is broken fails before a run and not in it. Writes no file."""
        try:
            first = as_sequence(self.examples, first=self.batch_size or 1)
            batch_sizes(first.sequence, self.batch_size or 1, "pad", state_mesh(state))
            return dataclasses.replace(self, examples=first, predictions_directory=None)(state)
        except Exception as error:
            error.add_note("This happened when fit tried the evaluation on the first batch of its examples.")
            raise

    def __call__(self, state: TrainState) -> dict[str, float]:
        """The row `{"eval/loss": ..., "eval/<metric>": ...}`; writes the predictions to their file.

        Raises `ValueError` for what is missing or cannot be used, and what the functions raise.
        """
        row = self.unless(lambda: False, state)
        assert row is not None
        return row

    def unless(self, stops: Callable[[], bool], state: TrainState) -> dict[str, float] | None:
        """The same; or `None`, and no file, once `stops()`, which is asked before each batch, is true."""
        collate_fn, loss_fn, batch_size = self.collate_fn, self.loss_fn, self.batch_size
        if collate_fn is None or loss_fn is None or batch_size is None:
            raise ValueError("Evaluation: outside of fit it needs collate_fn, loss_fn and batch_size.")
        check_is_state(state, "Evaluation: state")
        step = step_of(state)
        if self.state_fn is not None:
            state = self.state_fn(state)
            check_is_state(state, "Evaluation: what state_fn returns")
        common: Any = {"collate_fn": collate_fn, "batch_size": batch_size, "stops": stops}
        metrics = losses(state, self.examples, loss_fn=loss_fn, **common)
        if metrics is None:
            return None
        row = {f"eval/{name}": value for name, value in metrics.items()}
        if self.predict_fn is None:
            return row
        examples = as_sequence(self.examples)
        predicted = predictions(state, examples, predict_fn=self.predict_fn, output_fn=self.output_fn, **common)
        if predicted is None:
            return None
        if self.metric_fn is not None:
            row |= _of_predictions(self.metric_fn, examples.sequence, predicted, taken=row)
        if self.predictions_directory is not None and jax.process_index() == 0:
            path = pathlib.Path(self.predictions_directory).expanduser() / f"step-{step}.jsonl"
            _write(path, examples.sequence, predicted)
        return row


def _of_predictions(
    metric_fn: MetricFn, examples: Examples, predicted: list[Any], *, taken: Mapping[str, float]
) -> dict[str, float]:
    metrics = metric_fn(examples, predicted)
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"metric_fn must return a dict of numbers by name, but returned a {type(metrics).__name__}."
        )
    for name in metrics:
        if f"eval/{name}" in taken:
            raise ValueError(f"metric_fn: loss_fn already reports a metric {name!r}. Rename one.")
    return {f"eval/{name}": _number(name, value) for name, value in metrics.items()}


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
