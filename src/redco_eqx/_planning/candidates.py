"""Which meshes, and which variants of a model, a plan chooses among, and in what order."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from redco_eqx._compiled.buffers import Buffer

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
        """What a device needs at least: the state, and a microbatch's memories, evenly spread over all."""
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
    """Whether a candidate can fit, after others took so many bytes.

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
