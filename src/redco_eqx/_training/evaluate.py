"""`evaluate` and `predict`: a whole set of examples, none lost and none counted twice."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from redco_eqx._data.batches import batches
from redco_eqx._distributed.watchdog import Watchdog
from redco_eqx._sharding.mesh import check_mesh, one_device_mesh
from redco_eqx._step.state import EVALUATE, PREDICT, TrainState, check_alive, layout_of
from redco_eqx._step.steps import eval_step, predict_step
from redco_eqx._training.throttle import lagging
from redco_eqx._types import Batch, CollateFn, LossFn, Metrics, PredictFn


def evaluate(
    state: TrainState,
    examples: Any,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
    prefetch: int = 2,
) -> dict[str, float]:
    """The loss and metrics over all examples: exact weighted means, independent of batch size and mesh.

    The model is in inference mode. A scalar that `loss_fn` returns weighs the number of examples of its
    batch; a [`Mean`][] weighs what it says.

    **Arguments:**

    - `state`: from `init_state` (an optimizer is not needed); it also gives the mesh and the randomness.
    - `examples`: as for `batches`.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `batch_size`: a multiple of the number of data shards. The tail is evaluated at its true size.
    - `prefetch`: how many batches a thread makes ahead; 0 for no thread.

    **Returns:**

    `{"loss": ..., <metrics of loss_fn>}` as floats.

    **Raises:**

    `ValueError` as `batches` and `eval_step` do, and for a state that was donated.
    """
    return watched_evaluate(None, state, examples, collate_fn, loss_fn, batch_size, prefetch)


def watched_evaluate(
    watchdog: Watchdog | None,
    state: TrainState,
    examples: Any,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
    prefetch: int,
) -> dict[str, float]:
    """`evaluate`, of whose steps a watchdog is told."""
    mesh = mesh_of(state)
    step = _jitted_eval_step(_ByIdentity(loss_fn), _layout(state))
    stream = batches(
        examples, collate_fn, batch_size=batch_size, mesh=mesh, remainder="split", prefetch=prefetch
    )
    totals: dict[str, tuple[float, float]] = {}
    with contextlib.closing(stream):  # an error holds this frame, and with it the thread
        results = (step(state, batch, np.int32(index)) for index, batch in enumerate(stream))
        for metrics in lagging(results, watchdog=watchdog):
            for name, mean in jax.device_get(metrics).items():
                total, weight = totals.get(name, (0.0, 0.0))
                totals[name] = (total + float(mean.total), weight + float(mean.weight))
    return {name: total / weight if weight else 0.0 for name, (total, weight) in totals.items()}


def predict(
    state: TrainState,
    examples: Any,
    *,
    collate_fn: CollateFn,
    predict_fn: PredictFn,
    batch_size: int,
    prefetch: int = 2,
) -> list[Any]:
    """What `predict_fn` gives for each example, in order, on every process.

    The model is in inference mode. The last batch is filled up by repeating its last example, and what
    belongs to the repetitions is dropped.

    **Arguments:** as for `evaluate`, with `predict_fn` a [`PredictFn`][].

    **Returns:**

    A list with one entry per example: what `predict_fn` returns for it, as NumPy arrays without the
    batch dim.

    **Raises:**

    `ValueError` as `batches` and `predict_step` do, and for a state that was donated.
    """
    return watched_predict(None, state, examples, collate_fn, predict_fn, batch_size, prefetch)


def watched_predict(
    watchdog: Watchdog | None,
    state: TrainState,
    examples: Any,
    collate_fn: CollateFn,
    predict_fn: PredictFn,
    batch_size: int,
    prefetch: int,
) -> list[Any]:
    """`predict`, of whose steps a watchdog is told."""
    mesh = mesh_of(state)
    step = _jitted_predict_step(_ByIdentity(predict_fn), _layout(state))
    stream = batches(examples, collate_fn, batch_size=batch_size, mesh=mesh, remainder="pad", prefetch=prefetch)
    rows: list[Any] = []
    outputs = (step(state, batch, np.int32(index)) for index, batch in enumerate(stream))
    with contextlib.closing(stream):
        for output in lagging(outputs, num_behind=1, watchdog=watchdog):  # outputs may be large
            leaves, treedef = jax.tree.flatten(jax.tree.map(_to_host, output))
            for i in range(min(batch_size, len(examples) - len(rows))):
                rows.append(jax.tree.unflatten(treedef, [leaf[i] for leaf in leaves]))
    return rows


def mesh_of(state: TrainState) -> Mesh:
    """The mesh that a state lies on.

    Raises `ValueError` if the state was donated or deleted, or if the mesh is not of a kind that can be used.
    """
    check_alive(state)
    sharding = state.step.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        check_mesh(sharding.mesh)
        return sharding.mesh
    return one_device_mesh(next(iter(state.step.devices())))


class _ByIdentity:
    """A user's function as a key of the cache of compiled steps, hashable or not."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.function is other.function

    def __hash__(self) -> int:
        return id(self.function)


_Layout = tuple[tuple[str, NamedSharding], ...]


@functools.lru_cache(maxsize=32)
def _jitted_eval_step(loss_fn: _ByIdentity, layout: _Layout) -> Callable[..., Metrics]:
    shardings = dict(layout) or None

    def step(state: TrainState, batch: Batch, index: Any) -> Metrics:
        state = _reseed(state, EVALUATE, index)
        return eval_step(state, batch, loss_fn=loss_fn.function, shardings=shardings)

    return jax.jit(step)


@functools.lru_cache(maxsize=32)
def _jitted_predict_step(predict_fn: _ByIdentity, layout: _Layout) -> Callable[..., PyTree]:
    shardings = dict(layout) or None

    def step(state: TrainState, batch: Batch, index: Any) -> PyTree:
        state = _reseed(state, PREDICT, index)
        return predict_step(state, batch, predict_fn=predict_fn.function, shardings=shardings)

    return jax.jit(step)


def _layout(state: TrainState) -> _Layout:
    return tuple(sorted((layout_of(state) or {}).items(), key=lambda item: item[0]))


def _reseed(state: TrainState, tag: int, index: Any) -> TrainState:
    """The state with a key of its own for each batch."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, tag), index)
    return dataclasses.replace(state, key=key)


def _to_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
