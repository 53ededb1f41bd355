"""What processes must agree on: facts that the first one knows, and failures that not all have seen."""

import functools
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def from_first(make: Callable[[], Any]) -> Any:
    """What `make()` gives on process 0, on all of them; it must be plain JSON. What it raises there is raised
    on the others as a `RuntimeError`."""
    if jax.process_count() == 1:
        return make()
    text, problem = b"", None
    if jax.process_index() == 0:
        try:
            text = json.dumps([make(), None]).encode()
        except Exception as error:
            problem = error
            text = json.dumps([None, f"{type(error).__name__}: {error}"]).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text, np.uint8) if text else np.zeros(size, np.uint8)
    made, told = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8).tobytes())
    if problem is not None:
        raise problem
    if told is not None:
        raise RuntimeError(f"on process 0: {told}")
    return made


def on_first(act: Callable[[], Any]) -> None:
    """`act()` on process 0. What it raises there is raised on all."""

    def make() -> None:
        act()

    from_first(make)


def together(load: Callable[[], Any], failure: type[Exception]) -> Any:
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
    return result


class Vote:
    """Small numbers of which every process learns the greatest, without any of them waiting.

    Each call hands in this process's numbers, and gives the greatest of those of all processes of a few calls
    ago: the same on each of them, if all call it at the same steps. The devices compare them between two steps.
    On one process the answer is at once what was handed in.
    """

    NUM_BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._behind: deque[Any] = deque()
        self._handed_in: dict[tuple[int, ...], Any] = {}

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        if jax.process_count() == 1:
            return numbers
        self._behind.append(_greatest(self._mesh)(self._place(numbers)))
        if len(self._behind) <= self.NUM_BEHIND:
            return (0,) * len(numbers)
        return _to_ints(self._behind.popleft())

    def now(self, *numbers: int) -> tuple[int, ...]:
        """The same for the numbers of this very call; waits."""
        self._behind.clear()
        return numbers if jax.process_count() == 1 else _to_ints(_greatest(self._mesh)(self._place(numbers)))

    def _place(self, numbers: tuple[int, ...]) -> Any:
        if numbers not in self._handed_in:
            row = np.array([numbers], np.int32)
            self._handed_in = {
                numbers: jax.make_array_from_callback(
                    (self._mesh.size, len(numbers)),
                    NamedSharding(self._mesh, PartitionSpec(tuple(self._mesh.axis_names))),
                    lambda _: row,
                )
            }
        return self._handed_in[numbers]


@functools.cache
def _greatest(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _to_ints(x: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in np.asarray(x))
