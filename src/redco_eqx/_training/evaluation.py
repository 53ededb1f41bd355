"""`evaluate`, `predict` and `Evaluation`: each covers every example of a set exactly
once."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from redco_eqx._base.protocols import (
    Batch,
    CollateFn,
    Examples,
    LossFn,
    Mean,
    OutputFn,
    PredictFn,
    check_functions,
    check_integers,
    check_positive,
)
from redco_eqx._base.warn import warn
from redco_eqx._data.batches import batches
from redco_eqx._data.data import Data, Stream, as_sequence, num_examples_of
from redco_eqx._data.workers import noting
from redco_eqx._distributed.consensus import agree, from_first, is_shared
from redco_eqx._paths import local_path
from redco_eqx._sharding.mesh import in_own_context, put_global, replicated
from redco_eqx._step.compile_cache import check_compiles, compile_once, signature
from redco_eqx._step.state import TrainState, check_is_one_state, state_mesh, step_of
from redco_eqx._step.steps import eval_step, predict_step
from redco_eqx._training.in_flight import NUM_AHEAD
from redco_eqx._training.loggers import write_atomically


class _Compiled(NamedTuple):
    """A compiled program of an evaluation. It keeps the functions that it was made of
    alive, because they are found by `id`."""

    call: jax.stages.Compiled
    functions: tuple[Callable[..., Any], ...]


Programs: TypeAlias = dict[Hashable, _Compiled]
"""Compiled programs, by what was compiled. See `programs` of [`evaluate`][]."""


@in_own_context
def evaluate(
    state: TrainState,
    examples: Examples | Data,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
    programs: Programs | None = None,
) -> dict[str, float]:
    """Compute the loss and metrics over all examples, as exact weighted means over
    batches.

    If the loss is a mean or a [`Mean`][] over rows, the numbers are the same for any
    batch size and mesh. If rows meet in it, as in a contrastive loss, they depend on
    which rows share a batch.

    The model is in inference mode. If `loss_fn` returns a scalar, its weight is the
    number of examples in the batch; a [`Mean`][] has its own weight.

    Each call traces `loss_fn`, so that nothing that it reads is stale, and compiles the
    program only if it is new or calls back into Python. In a loop, `programs` also
    saves the tracing.

    ```python
    functions = dict(collate_fn=collate_fn, loss_fn=loss_fn)
    row = rx.evaluate(state, held_out, **functions, batch_size=64)
    print(row["loss"])
    ```

    **Arguments:**

    - `state`: from `init_state`, with or without an optimizer. The mesh and the random
        key are those of the state.
    - `examples`: as for `batches`, but no `Stream`.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `batch_size`: a multiple of the number of data shards. If the last examples do not
        fill a batch, they are evaluated without padding: a batch that the data shards
        divide, and one of the rest. So which of these rows share a batch depends on the
        number of data shards, and so do the random numbers that `loss_fn` draws.
    - `programs`: a dict that keeps the compiled programs. Create it empty, and pass it
        to each call. The same functions are then traced once for each shape, as by
        `jax.jit`: what they read besides their arguments stays as it was.

    **Returns:**

    `{"loss": ..., <metrics of loss_fn>}` as floats. The mean over a total weight of 0
    is NaN.

    **Raises:**

    `ValueError` as `batches` and `eval_step` do, and for a state that was donated.
    """
    return _means(
        _outputs(
            "evaluate",
            eval_step,
            state,
            examples,
            collate_fn,
            batch_size,
            programs=programs,
            loss_fn=loss_fn,
        )
    )


@in_own_context
def predict(
    state: TrainState,
    examples: Examples | Data,
    *,
    collate_fn: CollateFn,
    predict_fn: PredictFn,
    output_fn: OutputFn | None = None,
    batch_size: int,
    programs: Programs | None = None,
) -> list[Any]:
    """Compute `predict_fn` for each example, and return all predictions, in order, on
    every process.

    The model is in inference mode. The last batch is filled by repeating its last
    example, and the predictions for the repetitions are dropped.

    ```python
    functions = dict(collate_fn=collate_fn, predict_fn=predict_fn)
    outputs = rx.predict(state, held_out, **functions, batch_size=64)
    print(len(outputs), outputs[0].shape)
    ```

    **Arguments:** the same as for `evaluate`, with `predict_fn` (a [`PredictFn`][]) in
    place of `loss_fn`, and

    - `output_fn`: `(example, prediction) -> anything`. It turns the arrays of one
        example into something that a person can read, such as decoded text or the name
        of a label.

    **Returns:**

    A list with one entry per example: the result of `predict_fn` as NumPy arrays
    without the batch dim, or the result of `output_fn` if you pass one.

    **Raises:**

    `ValueError` as `batches` and `predict_step` do, and for a state that was donated.
    """
    data = as_sequence("predict: examples", examples)
    outputs = _outputs(
        "predict",
        predict_step,
        state,
        data,
        collate_fn,
        batch_size,
        programs=programs,
        predict_fn=predict_fn,
    )
    return _rows(outputs, data.sequence, output_fn)


def _outputs(
    where: str,
    step: Callable[..., Any],
    state: TrainState,
    examples: Examples | Data | Stream,
    collate_fn: CollateFn,
    batch_size: int,
    num_batches: int | None = None,
    watch: Callable[[], object] = lambda: None,
    programs: Programs | None = None,
    **function: Callable[..., Any],
) -> Generator[PyTree[Array]]:
    """Yield the result of `step` for each batch, after a few more batches have been
    dispatched.

    `num_batches` is for a stream, of which it takes the first batches. `function` is
    the user's function that `step` takes, by name. `watch` is called before each batch,
    and at the end. If it raises an error, the generator ends. Compiled programs are
    added to `programs`, and those that are there already are not traced again.
    """
    check_is_one_state(state, f"{where}: state")
    check_compiles(where)
    data: Data | Stream
    if num_batches is not None and isinstance(examples, Stream):
        data = examples
    else:
        data = as_sequence(f"{where}: examples", examples)
    check_functions(where, collate_fn=collate_fn, **function)
    check_integers(where, batch_size=batch_size)
    step = functools.partial(step, shardings=state.shardings, **function)

    def inference(
        state: TrainState, batch: Batch, index: Array
    ) -> tuple[PyTree, Array]:
        # To count on the devices is cheaper than to send them a number each time.
        return step(state, batch, index=index), index + 1

    programs = {} if programs is None else programs
    mesh = state_mesh(state)
    if is_shared(mesh):
        from redco_eqx._training.identity import compare_examples, compare_states

        if isinstance(data, Data):
            # first, because it names a process that does not come.
            compare_examples(where, mesh, data.sequence)
        compare_states(state, f"{where} got different ones")

    # No step of an evaluation reads the optimizer's state.
    state = dataclasses.replace(state, opt_state=())
    of_state = signature(state)
    functions = tuple(function.values())
    # Not by equality, which the user's objects define.
    of_functions = tuple(map(id, functions))
    everywhere = replicated(mesh)
    index = put_global(np.int32(0), everywhere)
    # Predictions may be large. The last batch of an evaluation is not padded.
    num_ahead, remainder = (1, "pad") if where == "predict" else (NUM_AHEAD, "split")
    if isinstance(data, Stream):
        remainder = "drop"
    stream = batches(
        data, collate_fn, batch_size=batch_size, mesh=mesh, remainder=remainder
    )
    ahead: deque[PyTree] = deque()
    num_read = 0
    with contextlib.closing(stream):
        for batch in itertools.islice(stream, num_batches):
            watch()
            num_read += 1
            inputs = state, batch, index
            key = where, of_functions, of_state, signature(batch)
            if key not in programs:
                lowered = jax.jit(
                    inference, keep_unused=True, out_shardings=(None, everywhere)
                ).lower(*inputs)
                compiled, digest = compile_once(lowered, inputs)
                programs[key] = _Compiled(compiled, functions)
                agree(
                    mesh,
                    where,
                    {f"the checksum of what {' '.join(function)} computes": digest},
                )
            output, index = programs[key].call(*inputs)
            ahead.append(output)
            if len(ahead) > num_ahead:
                yield ahead.popleft()
    if num_batches is not None and num_read < num_batches:
        warn(
            f"Evaluation: the stream ended after {num_read} whole batches of "
            f"{batch_size}, but num_batches={num_batches}. The numbers are those of "
            "these batches. To evaluate every example, pass list(stream)."
        )
    yield from ahead
    watch()


def _means(outputs: Generator[dict[str, Mean]]) -> dict[str, float]:
    """Compute the means over all batches, summed in float64."""
    totals: dict[str, np.ndarray] = {}
    with contextlib.closing(outputs):
        # An error would keep this frame alive, and with it the thread.
        for metrics in outputs:
            for name, mean in jax.device_get(metrics).items():
                totals[name] = totals.get(name, 0.0) + np.array(
                    [mean.total, mean.weight], np.float64
                )
    # A mean over nothing is unknown. As 0, it would be the best loss of all.
    return {
        name: float(total / weight) if weight else math.nan
        for name, (total, weight) in totals.items()
    }


def _rows(
    outputs: Generator[PyTree[Array]], examples: Examples, output_fn: OutputFn | None
) -> list[Any]:
    """Return the result of `output_fn` for each example. Drop the predictions for the
    padding of the last batch."""
    rows: list[Any] = []
    with contextlib.closing(outputs):
        for output in outputs:
            leaves, treedef = jax.tree.flatten(jax.tree.map(_to_host, output))
            num_left = len(examples) - len(rows)
            for leaves_of_one in itertools.islice(zip(*leaves), num_left):
                row = treedef.unflatten(leaves_of_one)
                if output_fn is not None:
                    row = _made_readable(output_fn, examples, len(rows), row)
                rows.append(row)
    return rows


def _made_readable(
    output_fn: OutputFn, examples: Examples, index: int, prediction: Any
) -> Any:
    with noting(f"output_fn was given example {index} and its prediction."):
        return output_fn(examples[index], prediction)


def _to_host(x: Array) -> np.ndarray:
    is_here = x.is_fully_addressable or x.is_fully_replicated
    return (
        jax.device_get(x)
        if is_here
        else multihost_utils.process_allgather(x, tiled=True)
    )


# `Evaluation`: the loss, the predictions and their metrics, which a run measures on
# other examples.


MetricFn: TypeAlias = Callable[[Examples, list[Any]], Mapping[str, Any]]
"""`metric_fn(examples, predictions) -> {name: number}`."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation for [`fit`][]: its examples, intervals and functions. Call it with
    a state to evaluate that state at once.

    ```python
    def worst(examples, outputs):
        return {"worst": np.max(np.abs(np.stack(outputs) - np.stack(examples)))}

    evaluation = rx.Evaluation(held_out, predict_fn=predict_fn, metric_fn=worst)
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, evaluation=evaluation)
    functions = dict(collate_fn=collate_fn, loss_fn=loss_fn)
    row = rx.Evaluation(held_out, **functions, batch_size=64)(state)
    ```

    - `examples`: the examples to evaluate (see `evaluate`), or a [`Stream`][].
    - `num_batches`: the number of batches to read of a stream, which needs it. Each
        evaluation reads the stream from the beginning of epoch 0, so its numbers are
        those of the same examples each time, if the stream gives the same ones. If the
        stream ends earlier, the evaluation covers its whole batches, and warns.
    - `every_steps`: the number of steps between two evaluations. Without it, there is
        an evaluation after each epoch. There is always one at the end of a run.
    - `collate_fn`, `loss_fn`, `batch_size`: by default, the ones that you pass to
        `fit`.
    - `state_fn`: turns the state of the run into the state to evaluate, for example one
        with averaged parameters.
    - `predict_fn`, `output_fn`: make a prediction per example, and turn it into
        something that a person can read (see `predict`). They need a sequence of
        examples.
    - `metric_fn`: a function `metric_fn(examples, predictions)` that returns a dict of
        numbers. The predictions are the outputs of the functions above.
    - `predictions_directory`: the directory for the outputs and their examples, as
        `step-<step>.jsonl`.

    Raises `TypeError` for examples of another type, and for a stream without
    `num_batches`; `ValueError` for values that cannot be used together.
    """

    examples: Examples | Data | Stream
    _: dataclasses.KW_ONLY
    num_batches: int | None = None
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
        check_positive(
            "Evaluation",
            num_batches=self.num_batches,
            every_steps=self.every_steps,
            batch_size=self.batch_size,
        )
        if self.predictions_directory is not None:
            local_path("Evaluation: predictions_directory", self.predictions_directory)
        self._check_examples()
        names = (
            "collate_fn",
            "loss_fn",
            "state_fn",
            "predict_fn",
            "output_fn",
            "metric_fn",
        )
        check_functions(
            "Evaluation",
            **{name: x for name in names if (x := getattr(self, name)) is not None},
        )
        for name in ("output_fn", "metric_fn", "predictions_directory"):
            if getattr(self, name) is not None and self.predict_fn is None:
                raise ValueError(
                    f"Evaluation: {name} needs predict_fn, which makes the predictions."
                )

    def _check_examples(self) -> None:
        """Raise if the examples are not of a kind that this evaluation can read."""
        if not isinstance(self.examples, Stream):
            as_sequence("Evaluation: examples", self.examples)
            if self.num_batches is not None:
                raise ValueError(
                    f"Evaluation: num_batches={self.num_batches} is for a Stream, but "
                    f"examples is a {type(self.examples).__name__}. Pass a part of the "
                    "examples, such as examples[:1000], without num_batches."
                )
            return
        if self.num_batches is None:
            raise TypeError(
                "Evaluation: examples is a Stream, whose length is unknown. Pass "
                "num_batches=, or list(stream) to evaluate every example."
            )
        if self.predict_fn is not None:
            raise ValueError(
                "Evaluation: predict_fn needs a sequence of examples, but examples is "
                "a Stream. Pass a list of its first examples, such as "
                "list(itertools.islice(source, 1000))."
            )

    def or_else(self, **defaults: Any) -> "Evaluation":
        """Return a copy with these values for the fields that are `None`."""
        missing = {
            name: value
            for name, value in defaults.items()
            if getattr(self, name) is None
        }
        return dataclasses.replace(self, **missing)

    def rehearse(self, state: TrainState) -> dict[str, float]:
        """Evaluate one batch, so that an error comes before a run and not during it.
        Write no files."""
        with noting(
            "This happened when fit tried the evaluation on the first batch of its "
            "examples."
        ):
            if isinstance(self.examples, Stream):
                return dataclasses.replace(self, num_batches=1)(state)
            data = as_sequence("Evaluation: examples", self.examples)
            num_first = min(num_examples_of(data.sequence), self.batch_size or 1)
            first = dataclasses.replace(
                data, examples=[data.sequence[i] for i in range(num_first)]
            )
            return dataclasses.replace(
                self, examples=first, predictions_directory=None
            )(state)

    @in_own_context
    def __call__(self, state: TrainState, **options: Any) -> dict[str, float]:
        """Return the row `{"eval/loss": ..., "eval/<metric>": ...}`, and write the
        predictions to their file.

        The mean over a total weight of 0 is NaN, which is never the best.

        `options` are `programs`, as for [`evaluate`][], and `watch`, a function that is
        called before each batch and at the end, and whose error ends the evaluation.
        `fit` passes both, so that an evaluation does not trace the functions again.

        Raises `ValueError` for a value that is missing or cannot be used, and any error
        that the functions raise.
        """
        if self.collate_fn is None or self.loss_fn is None or self.batch_size is None:
            raise ValueError(
                "Evaluation: outside of fit it needs collate_fn, loss_fn and "
                "batch_size."
            )
        check_is_one_state(state, "Evaluation: state")
        step = step_of(state)
        state = state if self.state_fn is None else self.state_fn(state)
        check_is_one_state(state, "Evaluation: what state_fn returns")
        common: Any = self.collate_fn, self.batch_size
        losses = _outputs(
            "evaluate",
            eval_step,
            state,
            self.examples,
            *common,
            num_batches=self.num_batches,
            loss_fn=self.loss_fn,
            **options,
        )
        metrics = _means(losses)
        row = {f"eval/{name}": value for name, value in metrics.items()}
        if self.predict_fn is None:
            return row
        data = as_sequence("Evaluation: examples", self.examples)
        outputs = _outputs(
            "predict",
            predict_step,
            state,
            data,
            *common,
            predict_fn=self.predict_fn,
            **options,
        )
        predicted = _rows(outputs, data.sequence, self.output_fn)
        if self.metric_fn is not None:
            found = _as_row(self.metric_fn(data.sequence, predicted), row)
            # So that each process has the same numbers, even of a clock.
            row |= from_first(lambda: found)
        if self.predictions_directory is not None and jax.process_index() == 0:
            directory = local_path(
                "Evaluation: predictions_directory", self.predictions_directory
            )
            path = directory / f"step-{step}.jsonl"
            _write(path, data.sequence, predicted)
        return row


def _as_row(metrics: object, taken: Mapping[str, float]) -> dict[str, float]:
    """Make a row from the result of `metric_fn`. The metrics of `loss_fn` have the
    names in `taken`."""
    if not isinstance(metrics, Mapping):
        raise ValueError(
            "metric_fn must return a dict of numbers by name, but returned a "
            f"{type(metrics).__name__}."
        )
    for name in metrics:
        if f"eval/{name}" in taken:
            raise ValueError(
                f"metric_fn: loss_fn already reports a metric {name!r}. Rename one."
            )
    return {f"eval/{name}": _number(name, value) for name, value in metrics.items()}


def _number(name: str, x: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(x, str | bytes) and np.shape(x) == ():
            return float(x)
    raise ValueError(
        f"metric_fn: {name!r} is {x!r} ({type(x).__name__}), but a metric is one "
        "number."
    )


def _write(path: pathlib.Path, examples: Sequence[Any], predictions: list[Any]) -> None:
    """Write a line of JSON for each example, `{"example": ..., "prediction": ...}`.
    Write the whole file or nothing."""
    pairs = ((examples[i], prediction) for i, prediction in enumerate(predictions))
    lines = [f'{{"example": {_json(x)}, "prediction": {_json(y)}}}\n' for x, y in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half of a surrogate pair has no form in UTF-8; the handler writes its JSON escape
    # instead.
    write_atomically(path, "".join(lines).encode(errors="backslashreplace"))


def _json(x: Any) -> str:
    try:
        return json.dumps(x, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        # Keys that are not strings, an object in itself.
        return json.dumps(repr(x), ensure_ascii=False)


def _plain(x: Any) -> Any:
    """Turn an array into nested lists, and any other object that JSON cannot represent
    into its `repr`."""
    return (
        np.asarray(x).tolist()
        if isinstance(x, np.ndarray | np.generic | jax.Array)
        else repr(x)
    )
