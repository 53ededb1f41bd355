"""One choice put to the test: its step, compiled for the target."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import optax
from jax.sharding import Mesh

from redco_eqx._compiled.communication import Communication, communication, peak_bytes
from redco_eqx._compiled.hlo import Buffer, largest_buffers, parse
from redco_eqx._planning.memory import Memory, largest_arrays, memory_of, peak_by_message
from redco_eqx._sharding.mesh import batch_sharding
from redco_eqx._step.state import TrainState, layout_of
from redco_eqx._step.steps import train_step
from redco_eqx._types import Batch, LossFn

# Which meshes, and which variants of a model, a plan chooses among, and in what order.


Option: TypeAlias = bool | int | float | str | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to train.

    - `mesh`: sizes by axis, as for `make_mesh`.
    - `options`: of the model, by name.
    - `num_microbatches`: as for `train_step`.
    """

    mesh: Mapping[str, int]
    options: Mapping[str, Option]
    num_microbatches: int

    def __str__(self) -> str:
        given = {**self.mesh, **self.options}
        if self.num_microbatches > 1:
            given["num_microbatches"] = self.num_microbatches
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice with what is known of it from the program and its layout.

    - `state_bytes`: of parameters and optimizer state on one device; no more than what is needed.
    - `remembered`: what the forward pass keeps for the backward pass, over all devices and microbatches.
    - `flops`: products on one device, recomputed ones included, if all devices have the same to do.
    - `sent_bytes`: what a device sends in a step.
    - `seconds`: `flops` and `sent_bytes` at the speeds of the chip, one after the other. For ranks only.
    """

    choice: Choice
    state_bytes: int
    remembered: tuple[Buffer, ...]
    flops: float
    sent_bytes: float
    seconds: float

    @property
    def least_bytes(self) -> int:
        """Add up the least that a device needs: the state, and a microbatch's memories, evenly spread over
        all."""
        shares = math.prod(self.choice.mesh.values()) * self.choice.num_microbatches
        return self.state_bytes + sum(value.num_bytes for value in self.remembered) // shares


def meshes(num_devices: int, batch_size: int) -> Iterator[dict[str, int]]:
    """All sizes of `data`, `fsdp` and `tensor` that use all devices and split the batch evenly."""
    for tensor in _divisors(num_devices):
        shards = num_devices // tensor
        if batch_size % shards == 0:
            for fsdp in _divisors(shards):
                yield {"data": shards // fsdp, "fsdp": fsdp, "tensor": tensor}


def variants(options: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Every combination of values, the first of each first."""
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


def may_fit(candidate: Candidate, capacity: int, tried: Sequence[tuple[Candidate, int]]) -> bool:
    """True if a candidate can fit, after others took so many bytes.

    At best its activations are those of another with the same options, evenly spread over all devices that
    share a microbatch.
    """
    least = candidate.least_bytes
    for other, peak in tried:
        if other.choice.options == candidate.choice.options:
            share = other.choice.num_microbatches / candidate.choice.num_microbatches
            activations = max(0, peak - 2 * other.state_bytes)  # less gradients, and copies in part
            least = max(least, candidate.state_bytes + int(activations * min(1.0, share)))
    return least <= capacity


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of a candidate.

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
    memory = memory_of(state, batch)
    arrays = tuple(largest_arrays(state).items())
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    sent, buffers = None, ()
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options))
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        fits, verdict = False, f"does not compile: {_first_line(message)}"
        if "RESOURCE_EXHAUSTED" in message:
            memory = dataclasses.replace(memory, peak=peak_by_message(message))
            verdict = _too_much(memory, capacity)
    else:
        peak, text = peak_bytes(compiled), compiled.as_text() or ""
        memory = dataclasses.replace(memory, peak=peak)
        fits = peak <= capacity
        verdict = "fits" if fits else _too_much(memory, capacity)
        sent, buffers = communication(text, mesh), tuple(largest_buffers(parse(text)))
    return Trial(candidate, fits, verdict, memory, sent, arrays, buffers, time.monotonic() - start)


def gib(num_bytes: int) -> str:
    """`1.25` of so many bytes."""
    return f"{num_bytes / 2**30:.2f}"


def _too_much(memory: Memory, capacity: int) -> str:
    peak = "more than there is" if memory.peak is None else f"{gib(memory.peak)} GiB"
    return f"needs {peak}, and {gib(capacity)} GiB are there"


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
