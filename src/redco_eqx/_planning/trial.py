"""The trials of a plan: a mesh, a variant of the model, and its step, compiled for the
target."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._base.protocols import Batch, Metrics
from redco_eqx._compiled.communication import Communication, communication, memory_bytes
from redco_eqx._planning.memory import Memory, limit_by_message, peak_by_message
from redco_eqx._planning.targets import Target, gib
from redco_eqx._sharding.mesh import num_batch_shards
from redco_eqx._step.state import TrainState

# The meshes and variants of a model that a plan chooses from, and their order.


Option: TypeAlias = bool | int | float | str | Callable[..., Any] | None


# Compared by identity, because a state has no single truth value.
@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One way to train: the facts that follow from the program and its layout, and
    those of the compiled step.

    - `mesh`: a mesh of the target's devices.
    - `options`: the options of the model, by name, and `split_activations` if the loss
        function asks for it.
    - `num_microbatches`: as for `train_step`.
    - `state`, `batch`: the abstract state of a run, and its batch, laid out on the
        mesh.
    - `target`: the devices.
    - `memory`: the bytes on one device. Its `peak` is that of the compiled step.
    - `flops`: the floating-point operations in products on one device, including
        recomputed ones, if all devices do the same work.
    - `predicted_bytes`: the bytes that a device sends in a step by the ring algorithm,
        predicted from the program.
    - `communication`: that of the compiled step; `None` without one.
    - `fits`: true if the step fits; `None` if it was not compiled.
    - `verdict`: the reason, in words.
    """

    mesh: Mesh | AbstractMesh
    options: Mapping[str, Option]
    num_microbatches: int
    state: TrainState
    batch: Batch
    target: Target
    memory: Memory
    flops: float
    predicted_bytes: float
    communication: Communication | None = None
    fits: bool | None = None
    verdict: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step by the ring algorithm: as compiled, or
        else as predicted."""
        if self.communication is None:
            return self.predicted_bytes
        return self.communication.total.sent_bytes

    @property
    def seconds(self) -> float:
        """The time for `flops` and then `sent_bytes` at the speeds of the chip. Use it
        only for ranking."""
        chip = self.target.chip
        return self.flops / chip.flops + self.sent_bytes / chip.bandwidth

    def __str__(self) -> str:
        given = {**self.mesh.shape, **self.options}
        if self.num_microbatches > 1:
            given["num_microbatches"] = self.num_microbatches
        return ", ".join(f"{name}={_named(value)}" for name, value in given.items())


def _named(value: Option) -> str:
    """Write the value of an option: a function by its name, without its address."""
    if getattr(value, "__module__", "").startswith("jax."):
        # From JAX 0.12 on, a policy of names is a function inside another one.
        name = getattr(value, "__qualname__", "")
        name = name.partition(".<locals>")[0]
    else:
        name = getattr(value, "__name__", "")
    return name or repr(value)


def meshes(num_devices: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield all sizes of `data`, `fsdp` and `tensor` that use all devices and split the
    batch evenly."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor, fsdp in itertools.product(divisors, repeat=2):
        data, left = divmod(num_devices, tensor * fsdp)
        if left == 0 and batch_size % (data * fsdp) == 0:
            yield {"data": data, "fsdp": fsdp, "tensor": tensor}


def attempt(
    trial: Trial, step: Callable[..., tuple[TrainState, Metrics]], capacity: int
) -> Trial:
    """Compile the `train_step` of a trial, which fits if it needs at most `capacity`
    bytes on a device."""
    layout = trial.state.shardings
    step = functools.partial(
        step, num_microbatches=trial.num_microbatches, shardings=layout
    )
    # Donated, as in a run, so that the new state takes the memory of the old one.
    lowered = jax.jit(step, donate_argnums=0).lower(trial.state, trial.batch)
    found = None
    failure = ""
    try:
        compiled = lowered.compile(compiler_options=dict(trial.target.compiler_options))
        found = communication(compiled, trial.mesh)
        peak, _ = memory_bytes(compiled)
    except jax.errors.JaxRuntimeError as error:
        # Some compilers refuse a program that is too large.
        message = str(error)
        peak = peak_by_message(message)
        # `bytes_per_device` may be more than the device has.
        capacity = min(capacity, limit_by_message(message) or capacity)
        if "RESOURCE_EXHAUSTED" not in message:
            failure = f"does not compile: {message.strip().splitlines()[0][:200]}"
    is_small = peak is not None and peak <= capacity
    fits = is_small and found is not None
    if failure:
        verdict = failure
    elif fits:
        verdict = "fits"
    else:
        needed = "more than a device has" if peak is None else f"{gib(peak)} GiB"
        limit = f"but {gib(capacity)} GiB are available"
        if is_small:
            limit = "more than the compiler allows"
        verdict = f"needs {needed}, {limit}"
    return dataclasses.replace(
        trial,
        memory=dataclasses.replace(trial.memory, peak=peak),
        communication=found,
        fits=fits,
        verdict=verdict,
    )


# The search compiles the fastest trials first, until one fits.


CLOSE = 1.1
"""Trials that are predicted to be slower than the best by no more than this factor are
compiled, too."""


def search(
    trials: Sequence[Trial],
    compile: Callable[[Trial], Trial],
    capacity: int,
    most: int,
    num_rows: int,
) -> tuple[Trial, ...]:
    """Compile at most `most` trials, the fastest first, until one fits, and then those
    that are faster or close behind it. Return the best first.

    Trials that seem too large, judged by the memory of others, come after the rest, the
    smallest first. A trial is refused without compilation only if its arguments alone
    are too large. If this is true of all, the smallest is compiled. The trials that fit
    are followed by those that do not, starting with the one that comes closest, and
    then by those that were not compiled. If none fits, the second result is the first
    trial again, compiled with microbatches of one row on a device.
    """
    left = list(trials)
    tried: list[Trial] = []
    smaller: list[Trial] = []
    best = math.inf
    reason = "max_compilations is reached" if most else "max_compilations=0"

    def order(x: Trial) -> tuple[bool, int, float]:
        # Trials that seem to fit differ only in their time.
        return (
            x.memory.arguments > capacity,
            max(_likely_bytes(x, tried), capacity),
            x.seconds,
        )

    try:
        while len(tried) < most:
            hopeful = [x for x in left if x.seconds <= CLOSE * best]
            if not hopeful:
                break
            # Found anew each time, because a compiled trial tells about the others.
            next_trial = min(hopeful, key=order)
            if tried and next_trial.memory.arguments > capacity:
                break
            tried.append(compile(next_trial))
            left.remove(next_trial)
            if tried[-1].fits:
                best = min(best, tried[-1].seconds)
        if tried:
            least = min(tried, key=_rank)
            # Microbatches of one row on a device.
            count = num_rows // num_batch_shards(least.mesh)
            can_shrink = count > least.num_microbatches
            if not least.fits and least.memory.arguments <= capacity and can_shrink:
                smaller = [compile(dataclasses.replace(least, num_microbatches=count))]
    except KeyboardInterrupt:
        reason = "interrupted"

    def untried(trial: Trial) -> Trial:
        slower = trial.seconds / max(best, 1e-30)
        verdict = f"not compiled: {reason}"
        if trial.memory.arguments > capacity:
            verdict = (
                "parameters, optimizer state and batch alone take "
                f"{gib(trial.memory.arguments)} GiB"
            )
        elif slower > CLOSE:
            verdict = f"predicted to take {slower:.2f} times as long"
        return dataclasses.replace(trial, verdict=verdict)

    rest = map(untried, sorted(left, key=order))
    first, *others = [*sorted(tried, key=_rank), *rest]
    return first, *smaller, *others


def _likely_bytes(trial: Trial, tried: Sequence[Trial]) -> int:
    """Estimate the bytes that a trial needs on a device, only to order the trials, from
    its arguments and the activations of other trials with the same options."""
    activations = [0.0]
    for other in tried:
        if other.memory.peak is not None and other.options == trial.options:
            share = min(1.0, other.num_microbatches / trial.num_microbatches)
            # Without gradients, and some of the copies.
            activations.append(share * (other.memory.peak - 2 * other.memory.arguments))
    return trial.memory.arguments + int(max(activations))


def _rank(trial: Trial) -> tuple[bool, float, float]:
    peak = math.inf if trial.memory.peak is None else float(trial.memory.peak)
    if trial.fits:
        return False, trial.seconds, peak
    return True, peak, peak
