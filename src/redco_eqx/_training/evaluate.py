"""`evaluate` and `predict`: a whole set of examples, none lost and none counted twice."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from redco_eqx._data.batches import batches
from redco_eqx._data.data import Data, Stream, check_examples
from redco_eqx._data.streams import as_sequence
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._step.state import TrainState, check_is_state, layout_of, state_mesh
from redco_eqx._step.steps import eval_step, predict_step
from redco_eqx._training.checks import check_whole
from redco_eqx._training.compile import PerShape, indexed
from redco_eqx._training.throttle import lagging
from redco_eqx._types import CollateFn, Examples, LossFn, OutputFn, PredictFn, check_function


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
    check_is_state(state, "evaluate: state")
    check_examples("evaluate: examples", examples)
    check_function("evaluate", "collate_fn", collate_fn, "examples")
    check_function("evaluate", "loss_fn", loss_fn, "model", "batch", "key")
    check_whole("evaluate", batch_size=batch_size)
    step = functools.partial(eval_step, loss_fn=loss_fn, shardings=layout_of(state))
    programs = PerShape(indexed(step), functions=(loss_fn,), key="evaluate", state=state)
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
    """What `predict_fn` gives for each example, in order, on every process.

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
    check_is_state(state, "predict: state")
    check_examples("predict: examples", examples)
    check_function("predict", "collate_fn", collate_fn, "examples")
    check_function("predict", "predict_fn", predict_fn, "model", "batch", "key")
    check_whole("predict", batch_size=batch_size)
    step = functools.partial(predict_step, predict_fn=predict_fn, shardings=layout_of(state))
    programs = PerShape(indexed(step), functions=(predict_fn,), key="predict", state=state)
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
    """What the program gives for each batch, dispatched as it is asked for, until `stops()`."""
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
