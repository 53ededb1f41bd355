"""What processes must agree on: facts that the first one knows, and failures that not all have seen."""

import functools
import json
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

T = TypeVar("T")


def from_first(make: Callable[[], T]) -> T:
    """What `make()` gives on process 0, on all of them; it must be plain JSON. What it raises there is raised
    on the others as a `RuntimeError`."""
    if jax.process_count() == 1:
        return make()
    text, problem = b"", None
    if jax.process_index() == 0:
        try:
            text = json.dumps({"made": make()}).encode()
        except Exception as error:
            problem = error
            text = json.dumps({"problem": f"{type(error).__name__}: {error}"}).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text, np.uint8) if text else np.zeros(size, np.uint8)
    told = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8).tobytes())
    if problem is not None:
        raise problem
    if "problem" in told:
        raise RuntimeError(f"on process 0: {told['problem']}")
    return told["made"]


def from_all(value: T) -> list[T]:
    """What each process hands in, in their order, on all of them; it must be plain JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def on_first(act: Callable[[], object]) -> None:
    """`act()` on process 0. What it raises there is raised on all."""
    from_first(lambda: act() and None)


def together(load: Callable[[], T], failure: type[Exception]) -> T:
    """`load()`, which raises `failure` on every process if it does so on one."""
    result, problem = None, None
    try:
        result = load()
    except failure as error:
        problem = error
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(problem is not None))
        if problem is None and np.any(failed):
            problem = failure(f"this failed on the processes {np.flatnonzero(failed).tolist()}")
    if problem is not None:
        raise problem
    return cast(T, result)


class Vote:
    """Small numbers of which every process learns the greatest, without any of them waiting.

    Each call hands in this process's numbers, and gives the greatest of those of all processes of a few calls
    ago: the same on each of them, if all call it at the same steps. The devices compare them between two steps.
    On one process the answer is at once what was handed in.
    """

    NUM_BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._behind: deque[Int[Array, " n"]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        if jax.process_count() == 1:
            return numbers
        self._behind.append(_greatest(self._mesh, numbers))
        if len(self._behind) <= self.NUM_BEHIND:
            return (0,) * len(numbers)
        return tuple(np.asarray(self._behind.popleft()).tolist())

    def of_earlier(self, *numbers: int) -> tuple[int, ...] | None:
        """As a call, but `None` as long as there is no answer; so the n-th answer is of the n-th call."""
        is_early = jax.process_count() > 1 and len(self._behind) < self.NUM_BEHIND
        answer = self(*numbers)
        return None if is_early else answer

    def now(self, *numbers: int) -> tuple[int, ...]:
        """The same for the numbers of this very call; waits."""
        self._behind.clear()
        if jax.process_count() == 1:
            return numbers
        return tuple(np.asarray(_greatest(self._mesh, numbers)).tolist())


def _greatest(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, " n"]:
    return _compiled_max(mesh)(_placed(mesh, numbers))


@functools.lru_cache(maxsize=4)
def _compiled_max(mesh: Mesh) -> Callable[[Int[Array, "devices n"]], Int[Array, " n"]]:
    return jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(maxsize=4)  # nearly always zeros
def _placed(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, "devices n"]:
    row = np.array([numbers], np.int32)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.make_array_from_callback((mesh.size, len(numbers)), sharding, lambda _: row)
