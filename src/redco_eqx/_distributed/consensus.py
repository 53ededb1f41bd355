"""Facts that one process knows, and failures that not all have seen, made known to all of them."""

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


def from_all(value: T) -> list[T]:
    """The values that the processes hand in, in their order, on all of them. They must be plain JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_first(make: Callable[[], T]) -> T:
    """The result of `make()` on process 0, on all of them; it must be plain JSON.

    An error that it raises there is raised on the others as a `RuntimeError`.
    """
    if jax.process_count() == 1:
        return make()
    text, problem = "", None
    if jax.process_index() == 0:
        try:
            text = json.dumps(make())
        except Exception as error:
            problem = error
    text, about = from_all((text, problem and f"{type(problem).__name__}: {problem}"))[0]
    if problem is not None:
        raise problem
    if about is not None:
        raise RuntimeError(f"on process 0: {about}")
    return json.loads(text)


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
    failed = [process for process, has_failed in enumerate(from_all(problem is not None)) if has_failed]
    if failed:
        raise problem or failure(f"this failed on the processes {failed}")
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
        return self.of_earlier(*numbers) or (0,) * len(numbers)

    def of_earlier(self, *numbers: int) -> tuple[int, ...] | None:
        """As a call, but `None` as long as there is no answer; so the n-th answer is of the n-th call."""
        if jax.process_count() == 1:
            return numbers
        self._behind.append(_greatest(self._mesh, numbers))
        if len(self._behind) <= self.NUM_BEHIND:
            return None
        return tuple(np.asarray(self._behind.popleft()).tolist())

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
