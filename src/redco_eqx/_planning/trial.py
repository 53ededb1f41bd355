"""One choice put to the test: its step, compiled for the target."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from redco_eqx._base.protocols import Batch, Metrics
from redco_eqx._compiled.communication import Communication, communication, peak_bytes
from redco_eqx._compiled.hlo import Buffer, largest_buffers, parse
from redco_eqx._planning.memory import Memory, largest_arrays, memory_of, peak_by_message
from redco_eqx._planning.targets import gib
from redco_eqx._sharding.mesh import batch_sharding
from redco_eqx._step.state import TrainState, layout_of

# Which meshes, and which variants of a model, a plan chooses among, and in what order.


Option: TypeAlias = bool | int | float | str | None
Variant: TypeAlias = tuple[tuple[str, Option], ...]


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

    @property
    def variant(self) -> Variant:
        """The options, hashable."""
        return tuple(self.options.items())

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
    step: Callable[..., tuple[TrainState, Metrics]],
    capacity: int,
    compiler_options: Mapping[str, bool],
) -> Trial:
    """Compiles the `train_step` of a candidate, which fits if it takes no more than `capacity` bytes of a
    device."""
    start = time.monotonic()
    rows = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    step = functools.partial(
        step, num_microbatches=candidate.choice.num_microbatches, shardings=layout_of(state)
    )
    memory = memory_of(state, batch)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    sent, buffers = None, ()
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options))
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        fits, verdict = False, f"does not compile: {message.strip().splitlines()[0][:200]}"
        if "RESOURCE_EXHAUSTED" in message:
            memory = dataclasses.replace(memory, peak=peak_by_message(message))
            verdict = _too_much(memory, capacity)
    else:
        peak, text = peak_bytes(compiled), compiled.as_text() or ""
        memory = dataclasses.replace(memory, peak=peak)
        fits = peak <= capacity
        verdict = "fits" if fits else _too_much(memory, capacity)
        sent, buffers = communication(text, mesh), tuple(largest_buffers(parse(text)))
    arrays = tuple(largest_arrays(state).items())
    return Trial(candidate, fits, verdict, memory, sent, arrays, buffers, time.monotonic() - start)


def _too_much(memory: Memory, capacity: int) -> str:
    peak = "more than there is" if memory.peak is None else f"{gib(memory.peak)} GiB"
    return f"needs {peak}, and {gib(capacity)} GiB are there"


# The search: the fastest first, until one fits.


CLOSE = 1.1
"""Plans that are predicted to be slower than the best by no more than this factor are compiled too."""


def search(
    candidates: Sequence[Candidate],
    compile: Callable[[Candidate], Trial],
    capacity: int,
    max_compilations: int,
) -> tuple[Trial, ...]:
    """Compiles candidates, the fastest first, until one fits, and those that are close; the best comes first.

    After those that fit come those that do not, the one that lacks least first, and then what was not compiled.
    """
    tried: list[Trial] = []
    rest: list[Trial] = []
    best = math.inf
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        peaks = [(t.candidate, t.memory.peak) for t in tried if t.memory is not None and t.memory.peak]
        if candidate.state_bytes > capacity:
            need = f"parameters and optimizer state alone take {gib(candidate.state_bytes)} GiB"
            rest.append(Trial(candidate, False, need))
        elif candidate.least_bytes > capacity:
            need = f"with what is kept for the backward pass, evenly spread, {gib(candidate.least_bytes)} GiB"
            rest.append(Trial(candidate, False, need))
        elif not may_fit(candidate, capacity, peaks):
            rest.append(Trial(candidate, False, "the activations alone, evenly spread, are too much"))
        elif len(tried) >= max_compilations:
            rest.append(Trial(candidate, None, "not compiled: max_compilations is reached"))
        elif candidate.seconds > CLOSE * best:
            slower = f"predicted to take {candidate.seconds / best:.2f} times as long"
            rest.append(Trial(candidate, None, slower))
        else:
            try:
                tried.append(compile(candidate))
            except KeyboardInterrupt:
                max_compilations = len(tried)
                rest.append(Trial(candidate, None, "not compiled: interrupted"))
            else:
                best = min(best, candidate.seconds) if tried[-1].fits else best
    return *sorted(tried, key=_rank), *rest


def _rank(trial: Trial) -> tuple[bool, float]:
    peak = math.inf if trial.memory is None or trial.memory.peak is None else float(trial.memory.peak)
    return not trial.fits, trial.candidate.seconds if trial.fits else peak
