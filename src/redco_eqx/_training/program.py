"""The compiled step of a run."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from redco_eqx._base.protocols import Batch, LossFn, without_options
from redco_eqx._sharding.mesh import put_global, replicated
from redco_eqx._step.compile_cache import compile_once
from redco_eqx._step.guard import guarded
from redco_eqx._step.passed_through import frozen_passed_through
from redco_eqx._step.state import TrainState, state_mesh
from redco_eqx._step.step_functions import TrainStepFn
from redco_eqx._step.steps import corrected, train_step
from redco_eqx._step.window import Window, accumulated
from redco_eqx._step.workarounds import is_wrong_on


class TrainProgram(NamedTuple):
    """A compiled step that leaves the state as it was if the step is not finite.

    - `compiled`: `(changing, constants, window, batch) -> (changing, window)`, where
        `changing` and `constants` are the leaves of a state. It reuses the memory of
        `changing`. `constants` are frozen arrays, which it neither changes nor returns.
    - `is_constant`: for each leaf of a state, whether it is among the `constants`.
    - `taken_over`: the paths of the frozen arrays that are not.
    - `window`: an empty window, on the devices.
    - `digest`: that of [`compile_once`][], to compare it between processes.
    - `peak_seconds`: the time that its products would take at the peak speed of the
        devices; 0 if that is not known.
    """

    compiled: jax.stages.Compiled
    is_constant: list[bool]
    taken_over: list[str]
    window: Window
    digest: str
    peak_seconds: float

    def __call__(
        self, arrays: list[Any], window: Window, batch: Batch
    ) -> tuple[list[Any], Window]:
        """Take a step. `arrays` are all the leaves of the state."""
        changing, constants = _divided(arrays, self.is_constant)
        changing, window = self.compiled(changing, constants, window, batch)
        return _joined(changing, constants, self.is_constant), window


def _divided(arrays: list[Any], is_constant: list[bool]) -> tuple[list[Any], list[Any]]:
    changing = [x for x, constant in zip(arrays, is_constant) if not constant]
    constants = [x for x, constant in zip(arrays, is_constant) if constant]
    return changing, constants


def _joined(
    changing: list[Any], constants: list[Any], is_constant: list[bool]
) -> list[Any]:
    """The inverse of `_divided`."""
    of_changing = iter(changing)
    of_constants = iter(constants)
    return [next(of_constants if constant else of_changing) for constant in is_constant]


def is_train_step(step_fn: TrainStepFn) -> bool:
    """True for `train_step`, also with options (`functools.partial`)."""
    return without_options(step_fn) is train_step


def reduces_once(step_fn: TrainStepFn) -> bool:
    """True for `train_step` with the option `reduce_once`."""
    options = getattr(step_fn, "keywords", {})
    return is_train_step(step_fn) and bool(options.get("reduce_once"))


def train_program(
    state: TrainState,
    batch: Batch,
    *,
    step_fn: TrainStepFn = train_step,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_microbatches: int = 1,
    compiler_options: dict[str, Any] | None = None,
) -> TrainProgram:
    """Compile a step for states with this layout and batches with these shapes. It
    leaves the state as it was if it is not finite.

    Raises `ValueError` as `guarded` does, and the errors of the user's functions.
    """
    own_step: Any = functools.partial(
        step_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        shardings=state.shardings,
    )
    mesh = state_mesh(state)
    everywhere = replicated(mesh)
    is_good = put_global(np.ones((), bool), everywhere)
    # A `jit` that is called inside another one is traced once for each function and
    # types of arguments. So the trace of the body below uses this one.
    step = jax.jit(guarded(own_step))
    trace = step.trace(state, batch, is_good)
    # `train_step` has corrected its gradient already, but not the optimizer.
    if is_wrong_on(trace.jaxpr.jaxpr, mesh):
        step = jax.jit(guarded(corrected(own_step)))
        trace = step.trace(state, batch, is_good)
    # The results of the trace are the state, the metrics, and `ok`.
    window = jax.tree.map(
        lambda x: put_global(x, everywhere), Window.empty(trace.out_info[1])
    )
    arrays, tree = jax.tree.flatten(state)
    numbered = jax.tree.unflatten(tree, range(len(arrays)))
    passed = frozen_passed_through(trace.jaxpr.jaxpr, numbered, numbered)
    indices = {numbered.frozen[path] for path in passed}
    is_constant = [i in indices for i in range(len(arrays))]
    on_all_arrays = accumulated(step, tree)

    def body(
        changing: list[Any], constants: list[Any], window: Window, batch: Batch
    ) -> tuple[list[Any], Window]:
        joined = _joined(changing, constants, is_constant)
        arrays, window = on_all_arrays(joined, window, batch)
        return _divided(arrays, is_constant)[0], window

    changing, constants = _divided(arrays, is_constant)
    layout: Any = (
        [x.sharding for x in changing],
        jax.tree.map(lambda _: everywhere, window),
    )
    # A compiled program refuses inputs in another layout, and its results are the next
    # step's inputs, so their layout is fixed. The window is not donated: the queue of
    # steps in flight still reads earlier ones.
    jitted = jax.jit(body, donate_argnums=0, out_shardings=layout, keep_unused=True)
    inputs = (changing, constants, window, batch)
    program, digest = compile_once(
        jitted.lower(*inputs), inputs, compiler_options=compiler_options
    )
    return TrainProgram(
        program,
        is_constant,
        sorted(state.frozen.keys() - passed),
        window,
        digest,
        peak_seconds(trace.jaxpr, state_mesh(state).devices),
    )


def peak_seconds(program: ClosedJaxpr, devices: np.ndarray) -> float:
    """Compute the time that the products of a program (without recomputed ones) would
    take at the peak speed of the devices; 0 if that is not known."""
    if devices.flat[0].platform == "cpu":
        return 0.0
    # Imported only if the peak is known.
    from redco_eqx._planning.memory import num_flops
    from redco_eqx._planning.targets import chip_of

    chip = chip_of(devices.flat[0])
    return (
        num_flops(program.jaxpr, recomputed=False) / (chip.flops * devices.size)
        if chip
        else 0.0
    )
