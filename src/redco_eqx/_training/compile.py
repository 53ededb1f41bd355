"""The steps of `fit`, `evaluate` and `predict`: compiled, and how far ahead of the devices they run."""

import functools
import hashlib
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from redco_eqx._jaxprs import trace
from redco_eqx._sharding.mesh import put_global, replicated
from redco_eqx._step.kept import kept, signature
from redco_eqx._step.state import TrainState, layout_of, state_mesh
from redco_eqx._step.steps import train_step
from redco_eqx._step.window import StepFn, Window, accumulated, empty_window
from redco_eqx._types import Batch, LossFn

# The steps of `fit`, `evaluate` and `predict`, compiled for the state and the batches at hand.


P = TypeVar("P")


class PerShape(Generic[P]):
    """A program for each shape of batches that comes, made once and kept from call to call (see `kept`)."""

    def __init__(
        self,
        make: Callable[[TrainState, Batch], P],
        *,
        functions: tuple[Any, ...],
        key: Hashable,
        state: TrainState,
    ):
        """**Arguments:**

        - `make`: compiles the program for a state and a batch. It must depend on nothing but these, on
            `functions`, which it must not hold on to, and on `key`.
        - `state`: all states that the program is for are like this one.
        """
        self._make, self._functions = make, functions
        self._key = key, signature(state)
        self._programs: dict[Hashable, P] = {}

    def __call__(self, state: TrainState, batch: Batch) -> P:
        shapes = signature(batch)
        if shapes not in self._programs:
            self._programs[shapes] = kept(
                self._functions, (self._key, shapes), lambda: self._make(state, batch)
            )
        return self._programs[shapes]


class TrainProgram(NamedTuple):
    """A guarded step, compiled.

    - `compiled`: `(state, window, batch) -> (state, window)`; it takes over the memory of the state.
    - `window`: an empty one, on the devices.
    - `digest`: of its text before it was compiled, if there are other processes to compare it with.
    """

    compiled: jax.stages.Compiled
    window: Window
    digest: str


def train_program(step_fn: StepFn, state: TrainState, batch: Batch) -> TrainProgram:
    """Traces `step_fn` once, and compiles it for states that lie as this one does.

    Raises `ValueError` as `accumulated` does, and what `step_fn` raises.
    """
    program = trace(step_fn, state, batch)
    everywhere = replicated(state_mesh(state))
    window = jax.tree.map(lambda x: put_global(x, everywhere), empty_window(program, state, batch))
    layout: Any = jax.tree.map(lambda x: x.sharding, state), jax.tree.map(lambda _: everywhere, window)
    body = jax.jit(accumulated(program), donate_argnums=0, out_shardings=layout)
    lowered = body.lower(state, window, batch)
    digest = ""
    if jax.process_count() > 1:  # without addresses in memory
        text = re.sub(r"\b\d{12,}\b", "", lowered.as_text())
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    compiled = lowered.compile()
    return TrainProgram(compiled, window, digest)


def train_programs(
    state: TrainState,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int,
) -> PerShape[TrainProgram]:
    """`train_step`, guarded, for states like this one, whose layout it takes."""
    step = functools.partial(
        train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        shardings=layout_of(state),
    )
    make = functools.partial(train_program, step)
    return PerShape(make, functions=(loss_fn, optimizer), key=("train_step", num_microbatches), state=state)


def indexed(step: Callable[..., PyTree]) -> Callable[[TrainState, Batch], jax.stages.Compiled]:
    """Compiles `step(state, batch, index=)` as `(state, batch, index) -> result`."""

    def inference(state: TrainState, batch: Batch, index: Any) -> PyTree:
        return step(state, batch, index=index)

    return lambda state, batch: jax.jit(inference).lower(state, batch, np.int32(0)).compile()


# A bound on how far a loop runs ahead of the devices.
#
# Dispatch stays ahead, but not without end: batches that wait hold memory, and the CPU client can deadlock when
# computations that wait for each other take all of its threads (see `give_threads`; no upstream issue known).


T = TypeVar("T")

NUM_AHEAD = 4


def lagging(results: Iterable[T], num_behind: int = NUM_AHEAD) -> Iterator[T]:
    """The results of dispatched steps in order, each when `num_behind` more have been dispatched."""
    behind: deque[T] = deque()
    for result in results:
        behind.append(result)
        if len(behind) > num_behind:
            yield behind.popleft()
    yield from behind
