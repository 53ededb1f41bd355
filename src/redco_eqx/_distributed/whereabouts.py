"""The places of the processes, and the others for which they wait: those that can never
meet are named.

A process waits for others in a meeting (see `meeting`), or for arrays that several
processes compute together. Neither wait ends if one of the others never comes: it has
ended, or it waits for this process in another call. The threads of `ProcessGroup`
therefore tell process 0 where their main threads are, and process 0 decides.
"""

import contextlib
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import equinox
import jax
import jaxlib
import numpy as np
import optax

from redco_eqx._distributed.cluster import has_devices

SLOW_SECONDS = 10.0
"""A wait that takes longer is reported."""
# The time for which a pair of processes must be seen to be stuck.
_ENDED_SECONDS = 3.0
_CROSSED_SECONDS = 10.0
_REPEAT_SECONDS = 600.0
_MAX_LISTED = 1000  # processes, so that a status is a short message

_LIBRARY = str(pathlib.Path(__file__).parents[1])
_STANDARD = str(pathlib.Path(threading.__file__).parent)
_OTHERS = tuple(
    str(pathlib.Path(str(x.__file__)).parent) for x in (jax, jaxlib, equinox, optax, np)
)


class Status(NamedTuple):
    """The place of a process. It holds only plain JSON.

    - `where`: the place of the main thread, for people.
    - `call`: the function of the library that the program has called, or the empty
        string.
    - `seconds`: the time since when the main thread is at this place, or in this
        meeting.
    - `absent`: the processes that have not come to the meeting in which this process
        waits.
    - `computing`: the processes that compute arrays together with this one, if these
        are not ready yet.
    - `has_ended`: true after the end of the program.
    - `left`: the `SystemExit` by which the program left a function of the library;
        empty for none.
    """

    where: str
    call: str = ""
    seconds: float = 0.0
    absent: Sequence[int] = ()
    computing: Sequence[int] = ()
    has_ended: bool = False
    left: str = ""

    @property
    def waits(self) -> bool:
        """True if the process seems to wait for others."""
        return bool(self.absent or self.computing)


# This process.


@dataclasses.dataclass
class _Meeting:
    """A wait of this process until others come to the same call."""

    absent: Sequence[int]
    begin: float


_meetings: list[_Meeting] = []


@contextlib.contextmanager
def meeting(absent: Sequence[int]) -> Iterator[_Meeting]:
    """A wait for these processes. Update `absent` of the result when some of them have
    come."""
    waiting = _Meeting(absent, time.monotonic())
    _meetings.append(waiting)
    try:
        yield waiting
    finally:
        _meetings.remove(waiting)


class Lookout:
    """Looks at the main thread of this process, from another thread."""

    def __init__(self) -> None:
        self.has_ended = False
        self.left = ""
        self._place: tuple[Any, ...] = ()
        self._since = time.monotonic()

    def look(self, at_least: float = 0.0) -> Status:
        """Return the status. It lacks arrays if the main thread is at its place for
        less than `at_least` seconds, because it takes a while to look at all of
        them."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = () if frame is None else (id(frame), frame.f_lasti)
        if place != self._place:
            self._place = place
            self._since = time.monotonic()
        now = time.monotonic()
        seconds = now - self._since
        absent = ()
        for waiting in _meetings[-1:]:
            seconds = now - waiting.begin
            absent = tuple(waiting.absent[:_MAX_LISTED])
        computing = computing_with() if seconds >= at_least else ()
        if self.has_ended:
            return Status("its end", "", seconds, (), computing, True, self.left)
        where, call = place_of(frame)
        return Status(where, call, seconds, absent, computing)


def computing_with() -> tuple[int, ...]:
    """Return the other processes that hold parts of arrays which are not ready yet."""
    if not has_devices():  # to ask for arrays would wait for all processes
        return ()
    found: set[int] = set()
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # the main thread has deleted it
            if not x.is_deleted() and not x.is_ready():
                found |= {device.process_index for device in x.sharding.device_set}
    return tuple(sorted(found - {jax.process_index()}))[:_MAX_LISTED]


def place_of(frame: FrameType | None) -> tuple[str, str]:
    """Describe the place of a thread by its innermost function outside of libraries.
    Return it, and the function of this library that the program has called; the empty
    string for none."""
    where = ""
    inner = ""
    outer = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_LIBRARY):
            if "<locals>" not in code.co_qualname:  # no wrapper
                outer = code.co_qualname
        elif not where and not _is_of_a_library(code.co_filename):
            where = (
                f"{pathlib.Path(code.co_filename).name}, line {frame.f_lineno}, in "
                f"{code.co_name}"
            )
            inner = outer
        frame = frame.f_back
    if inner:
        return f"{inner} ({where})", outer
    if outer:
        return f"{where}, called by {outer}", outer
    return where or "an unknown place", outer


def _is_of_a_library(file: str) -> bool:
    is_standard = file.startswith(_STANDARD) and "site-packages" not in file
    return is_standard or file.startswith((*_OTHERS, "<frozen"))


# All processes.


class Judge:
    """Process 0, which is told from time to time where all processes are."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._stuck: dict[tuple[int, int], float] = {}
        self._reported: dict[tuple[str, int], float] = {}

    def verdict(self, statuses: Mapping[int, Status], now: float) -> str:
        """Return a reason to end all processes, if two of them can never meet.
        Otherwise return the empty text.

        One of them waits for the other. The other has ended, or waits in a meeting for
        the first one, and has no unfinished arrays, so it takes no part in anything
        that the first one waits for. All functions of the library end with a result
        that needs every process. So their arrays cannot be work that only the first one
        still does. Arrays of other functions can.
        """
        waiting = [
            one
            for one, this in statuses.items()
            if not this.has_ended and (this.waits or this.call)
        ]
        pairs = set()
        for other, that in statuses.items():
            # Look only at pairs that may be stuck, because there may be thousands of
            # processes.
            candidates = waiting
            if not that.has_ended:
                candidates = {*that.absent} & {*waiting}
            for one in candidates:
                if one != other and _never_meets(statuses[one], other, that):
                    pairs.add((one, other))
        self._stuck = {pair: self._stuck.get(pair, now) for pair in pairs}
        for (one, other), since in sorted(self._stuck.items()):
            this = statuses[one]
            that = statuses[other]
            limit = _ENDED_SECONDS if that.has_ended else _CROSSED_SECONDS
            if now - since >= limit:
                if not that.has_ended:
                    what = f"waits for it in {that.where}"
                elif that.left:
                    what = f"has ended ({that.left})"
                else:
                    what = "has ended"
                return (
                    f"{self._names[one]} waits in {this.where} for "
                    f"{self._names[other]}, which {what}. They can never meet. Each "
                    "process must make the same calls of the library, in the same "
                    "order."
                )
        return ""

    def reports(self, statuses: Mapping[int, Status], now: float) -> list[str]:
        """Return lines about processes that have waited for others for 10 s."""
        lines = []
        for one, this in statuses.items():
            if this.seconds < SLOW_SECONDS or not this.waits:
                continue
            late = [
                i
                for i in this.absent or this.computing
                if self._is_elsewhere(this, statuses.get(i))
            ]
            if not late:
                continue
            key = (this.where, late[0])
            if now - self._reported.get(key, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
                continue
            self._reported[key] = now
            last = statuses.get(late[0])
            where = "does not answer" if last is None else f"is at {last.where}"
            more = f" and {len(late) - 1} others" if len(late) > 1 else ""
            lines.append(
                f"{self._names[one]} has waited for {this.seconds:.0f} s in "
                f"{this.where} for {self._names[late[0]]}{more}, which {where}"
            )
            break  # the others probably wait for the same process
        return lines

    def _is_elsewhere(self, this: Status, that: Status | None) -> bool:
        """Return true unless both wait for arrays in the same call, because their
        devices are then busy."""
        if that is None or this.absent:
            return True
        return that.call != this.call or not that.computing


def _never_meets(this: Status, other: int, that: Status) -> bool:
    """Return true if a process with the first status waits for the process `other`,
    which has ended, or waits for it in another meeting."""
    if other in this.absent:
        # It waits in a meeting, as the other one does unless it has ended.
        return not that.has_ended or not that.computing
    # Small computations on CPU run in the call that starts them, and have no arrays
    # until they end.
    is_left = that.has_ended and bool(that.left) and this.seconds >= 2 * _ENDED_SECONDS
    computes_alone = other in this.computing and not that.computing
    return bool(this.call) and (is_left or computes_alone)
