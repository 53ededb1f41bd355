"""A bound on how far a loop runs ahead of the devices.

Dispatch stays ahead, but not without end: batches that wait hold memory, and the CPU client can deadlock
when computations that wait for each other take all of its threads.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jax
from jaxtyping import Array, PyTree

from redco_eqx._distributed.watchdog import Watchdog

T = TypeVar("T")

NUM_AHEAD = 4


class Throttle:
    """Waits, at each step, for the result of a few steps ago."""

    def __init__(self, watchdog: Watchdog | None = None):
        """**Arguments:** `watchdog`: is told of each step."""
        self._watchdog = watchdog
        self._behind: deque[PyTree[Array]] = deque()

    def __call__(self, result: PyTree[Array]) -> None:
        """Takes what the newest step returned; it must not be donated."""
        if self._watchdog is not None:
            self._watchdog.beat()
        self._behind.append(result)
        if len(self._behind) > NUM_AHEAD:
            jax.block_until_ready(self._behind.popleft())


def lagging(results: Iterable[T], num_behind: int = NUM_AHEAD, watchdog: Watchdog | None = None) -> Iterator[T]:
    """The results of dispatched steps in order, each when `num_behind` more have been dispatched.

    `watchdog` is told of each step.
    """
    behind: deque[T] = deque()
    for result in results:
        if watchdog is not None:
            watchdog.beat()
        behind.append(result)
        if len(behind) > num_behind:
            yield behind.popleft()
    yield from behind
