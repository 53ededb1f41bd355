"""The trial of one candidate: its step, compiled for the target."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from redco_eqx._base.protocols import Batch, Metrics
from redco_eqx._compiled.communication import Communication, communication, peak_bytes
from redco_eqx._planning.memory import Memory, memory_of, peak_by_message
from redco_eqx._planning.targets import gib
from redco_eqx._sharding.mesh import batch_sharding
from redco_eqx._step.state import TrainState, layout_of

# The meshes and the variants of a model among which a plan chooses, and their order.


Option: TypeAlias = bool | int | float | str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """One way to train, with the facts that follow from the program and its layout.

    - `mesh`: a mesh of the target's devices.
    - `options`: the options of the model, by name.
    - `num_microbatches`: as for `train_step`.
    - `state`: the abstract state of a run, laid out on the mesh.
    - `state_bytes`: bytes of parameters and optimizer state on one device. A step needs more.
    - `flops`: floating-point operations in products on one device, including recomputed ones, if all devices
        do the same work.
    - `sent_bytes`: bytes that a device sends in a step.
    - `seconds`: the time for `flops` and then `sent_bytes` at the speeds of the chip. For ranks only.
    """

    mesh: Mesh
    options: Mapping[str, Option]
    num_microbatches: int
    state: TrainState
    state_bytes: int
    flops: float
    sent_bytes: float
    seconds: float

    def __str__(self) -> str:
        given = {**self.mesh.shape, **self.options}
        if self.num_microbatches > 1:
            given["num_microbatches"] = self.num_microbatches
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


def meshes(num_devices: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yields all sizes of `data`, `fsdp` and `tensor` that use all devices and split the batch evenly."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor, fsdp in itertools.product(divisors, repeat=2):
        data, left = divmod(num_devices, tensor * fsdp)
        if left == 0 and batch_size % (data * fsdp) == 0:
            yield {"data": data, "fsdp": fsdp, "tensor": tensor}


def variants(options: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Returns every combination of values. The first one has the first value of each option."""
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of a candidate.

    - `fits`: whether the candidate fits; `None` if it was not compiled.
    - `verdict`: the reason, in words.
    - `memory`, `communication`: those of the compiled step; `None` without one.
    - `seconds`: the time to trace and compile.
    """

    candidate: Candidate
    fits: bool | None
    verdict: str
    memory: Memory | None = None
    communication: Communication | None = None
    seconds: float = 0.0


def attempt(
    candidate: Candidate,
    step: Callable[..., tuple[TrainState, Metrics]],
    batch: Batch,
    capacity: int,
    compiler_options: Mapping[str, bool],
) -> Trial:
    """Compiles the `train_step` of a candidate, which fits if it needs at most `capacity` bytes of a device."""
    start = time.monotonic()
    rows, state = batch_sharding(candidate.mesh), candidate.state
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    step = functools.partial(step, num_microbatches=candidate.num_microbatches, shardings=layout_of(state))
    memory, sent = memory_of(state, batch), None
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    try:
        compiled = lowered.compile(compiler_options=dict(compiler_options))
        peak, sent = peak_bytes(compiled), communication(compiled, candidate.mesh)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            verdict = f"does not compile: {message.strip().splitlines()[0][:200]}"
            return Trial(candidate, False, verdict, memory, seconds=time.monotonic() - start)
        peak = peak_by_message(message)
    fits = sent is not None and peak is not None and peak <= capacity
    needed = "more than there is" if peak is None else f"{gib(peak)} GiB"
    verdict = "fits" if fits else f"needs {needed}, but {gib(capacity)} GiB are available"
    memory = dataclasses.replace(memory, peak=peak)
    return Trial(candidate, fits, verdict, memory, sent, time.monotonic() - start)


# The search compiles the fastest candidates first, until one fits.


CLOSE = 1.1
"""Plans that are predicted to be slower than the best by no more than this factor are compiled too."""


def search(
    candidates: Sequence[Candidate],
    compile: Callable[[Candidate], Trial],
    capacity: int,
    max_compilations: int,
) -> tuple[Trial, ...]:
    """Compiles candidates, the fastest first, until one fits, and then those that are close behind it. Returns
    the best first.

    A candidate that seems too large, judged by the memory of others, comes after the rest; it is refused
    without compilation only if its state alone is too large. The trials that fit are followed by those that do
    not, the one that lacks the least memory first, and then by those that were not compiled.
    """
    by_state = sorted(candidates, key=lambda c: c.state_bytes)
    refused = [
        Trial(c, False, f"parameters and optimizer state alone take {gib(c.state_bytes)} GiB")
        for c in by_state
        if c.state_bytes > capacity
    ]
    left = sorted((c for c in candidates if c.state_bytes <= capacity), key=lambda c: c.seconds)
    tried: list[Trial] = []
    best, reason = math.inf, "max_compilations is reached"
    while left and len(tried) < max_compilations:
        candidate = min(left, key=lambda c: (_likely_bytes(c, tried) > capacity, c.seconds))
        if best < math.inf and (_likely_bytes(candidate, tried) > capacity or candidate.seconds > CLOSE * best):
            break
        try:
            tried.append(compile(candidate))
        except KeyboardInterrupt:
            reason = "interrupted"
            break
        left.remove(candidate)
        best = min(best, candidate.seconds) if tried[-1].fits else best

    def outcome(candidate: Candidate) -> str:
        if candidate.seconds > CLOSE * best:
            return f"predicted to take {candidate.seconds / best:.2f} times as long"
        is_large = best < math.inf and _likely_bytes(candidate, tried) > capacity
        return f"not compiled: {'it seems too large, judging by the others' if is_large else reason}"

    return *sorted(tried, key=_rank), *(Trial(c, None, outcome(c)) for c in left), *refused


def _likely_bytes(candidate: Candidate, tried: Sequence[Trial]) -> int:
    """Estimates the bytes that a candidate needs on a device: its state, and the activations of other
    candidates with the same options."""
    likely = candidate.state_bytes
    for trial in tried:
        other, peak = trial.candidate, None if trial.memory is None else trial.memory.peak
        if peak is not None and other.options == candidate.options:
            share = min(1.0, other.num_microbatches / candidate.num_microbatches)
            activations = max(0, peak - 2 * other.state_bytes)  # without gradients, and some of the copies
            likely = max(likely, candidate.state_bytes + int(activations * share))
    return likely


def _rank(trial: Trial) -> tuple[bool, float]:
    peak = math.inf if trial.memory is None or trial.memory.peak is None else float(trial.memory.peak)
    return not trial.fits, trial.candidate.seconds if trial.fits else peak
