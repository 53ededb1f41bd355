"""A bound on how far a loop runs ahead of the devices.

Dispatch stays ahead, but not without end: batches that wait hold memory, and the CPU client can deadlock
when computations that wait for each other take all of its threads (as in `_cpu`; no upstream issue known).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")

NUM_AHEAD = 4


class Throttle:
    """Waits, at each step, for the result of a few steps ago."""

    def __init__(self) -> None:
        self._behind: deque[Any] = deque()

    def __call__(self, result: T) -> T | None:
        """Takes what the newest step returned; it must not be donated. Returns that of a step that is done."""
        self._behind.append(result)
        return jax.block_until_ready(self._behind.popleft()) if len(self._behind) > NUM_AHEAD else None


def lagging(results: Iterable[T], num_behind: int = NUM_AHEAD) -> Iterator[T]:
    """The results of dispatched steps in order, each when `num_behind` more have been dispatched."""
    behind: deque[T] = deque()
    for result in results:
        behind.append(result)
        if len(behind) > num_behind:
            yield behind.popleft()
    yield from behind
