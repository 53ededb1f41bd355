"""One choice put to the test: its step, compiled for the target."""

import dataclasses
import functools
import time
from collections.abc import Mapping

import jax
import optax
from jax.sharding import Mesh

from redco_eqx._compiled.buffers import Buffer, largest_buffers
from redco_eqx._compiled.communication import Communication, communication
from redco_eqx._compiled.hlo import parse
from redco_eqx._planning.candidates import Candidate
from redco_eqx._planning.memory import Memory, held, largest_arrays, needed, refused
from redco_eqx._sharding.mesh import batch_sharding
from redco_eqx._step.state import TrainState, layout_of
from redco_eqx._step.steps import train_step
from redco_eqx._types import Batch, LossFn


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of a candidate.

    - `fits`: whether it does; `None` if it was not compiled.
    - `verdict`: why it was taken or not, in words.
    - `memory`, `communication`: of the compiled step; `None` without one.
    - `arrays`, `buffers`: the largest of the state, by path, and of what the step computes.
    - `seconds`: what tracing and compiling took.
    """

    candidate: Candidate
    fits: bool | None
    verdict: str
    memory: Memory | None = None
    communication: Communication | None = None
    arrays: tuple[tuple[str, int], ...] = ()
    buffers: tuple[Buffer, ...] = ()
    seconds: float = 0.0


def attempt(
    candidate: Candidate,
    state: TrainState,
    batch: Batch,
    mesh: Mesh,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    capacity: int,
    compiler_options: Mapping[str, bool],
) -> Trial:
    """Compiles the step of a candidate, which fits if it takes no more than `capacity` bytes of a device."""
    start = time.monotonic()
    rows = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    step = functools.partial(
        train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        num_microbatches=candidate.choice.num_microbatches,
        shardings=layout_of(state),
    )
    before = held(state, batch)
    arrays = tuple(largest_arrays(state).items())
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options))
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        is_full = "RESOURCE_EXHAUSTED" in message
        memory = refused(before, message) if is_full else before
        verdict = _too_much(memory, capacity) if is_full else f"does not compile: {_first_line(message)}"
        return Trial(candidate, False, verdict, memory, None, arrays, seconds=time.monotonic() - start)
    memory = needed(before, compiled)
    text = compiled.as_text() or ""
    assert memory.peak is not None
    fits = memory.peak <= capacity
    return Trial(
        candidate,
        fits,
        "fits" if fits else _too_much(memory, capacity),
        memory,
        communication(text, mesh),
        arrays,
        tuple(largest_buffers(parse(text))),
        time.monotonic() - start,
    )


def gib(num_bytes: int) -> str:
    """`1.25` of so many bytes."""
    return f"{num_bytes / 2**30:.2f}"


def _too_much(memory: Memory, capacity: int) -> str:
    peak = "more than there is" if memory.peak is None else f"{gib(memory.peak)} GiB"
    return f"needs {peak}, and {gib(capacity)} GiB are there"


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
