"""Threads that work ahead of a loop, in order."""

import atexit
import contextlib
import functools
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from redco_eqx._data.data import Data, Stream

J = TypeVar("J")
B = TypeVar("B")

CHEAP_SECONDS = 2e-4
"""The time to pass a batch between two threads that share Python's lock, measured with
the loop of `fit`, and with batches that are only counted."""

SHORT_SECONDS = 1e-3
"""The time of a batch from which a thread makes the next one, whatever the consumer
does."""

_NUM_SHORT = 32
"""After this many short batches, a thread pauses for one. Its times are too long, as it
also waits for Python's lock."""

_EXIT_SECONDS = 10.0
"""At the end of the program, the time that all threads may take to end their work."""

_HANG_SECONDS = 1.0
"""The same after Ctrl-C, or if one of the threads is known to hang."""

_Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class _Threads:
    """Threads that call functions, in the order in which they are submitted.

    When Python ends, it waits without a limit for the threads of a
    `ThreadPoolExecutor`. One that hangs (it reads from a dead network mount, for
    example) would keep the program alive, also after Ctrl-C. For these threads, it
    waits a few seconds.
    """

    def __init__(self, num_threads: int):
        # Garbage collection may call `end` in the middle of another call, which this
        # kind of queue allows.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            # Python does not wait for a daemon; `_end_all` does, for a limited time.
            thread = threading.Thread(
                target=_work, args=(self._calls,), name="redco_eqx.batches", daemon=True
            )
            thread.start()
            _running.add(thread)
        _pools.add(self)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function in one of the threads."""
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        """Let each thread end after its current call, and cancel the other calls. Does
        not wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                if call := self._calls.get_nowait():
                    call[0].cancel()  # another thread may wait for its result
        for _ in range(self._num_threads):
            self._calls.put(None)


_pools: weakref.WeakSet[_Threads] = weakref.WeakSet()
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as error:
            # A SystemExit, too, is raised where the result is asked for.
            future.set_exception(error)
        # Otherwise, this would keep a batch in memory while it waits for the next call.
        del call, future, function


_is_one_hanging = False


def note_hang() -> None:
    """Note that a thread hangs, so that the end of the program does not wait for it."""
    global _is_one_hanging
    _is_one_hanging = True


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter, because it aborts when one of them
    returns from C++ later."""
    # Python sets `last_value` for an exception that nothing has caught.
    was_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    seconds = _EXIT_SECONDS
    if _is_one_hanging or was_interrupted:
        seconds = _HANG_SECONDS
    end = time.monotonic() + seconds
    for pool in list(_pools):
        pool.end()
    for thread in list(_running):
        thread.join(max(0.0, end - time.monotonic()))


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to errors that are raised in the block."""
    try:
        yield
    except StopIteration:  # a generator would end with it
        raise RuntimeError(f"StopIteration was raised. {note}")  # noqa: B904 (`from` would raise it again)
    except Exception as error:
        error.add_note(note)
        raise


def run_ahead(
    jobs: Iterator[J], make: Callable[[J], B], options: Data | Stream
) -> Generator[B]:
    """Yield `make(job)` for each job in order. Threads make the results ahead, as the
    options say.

    One thread reads the jobs. With `Data` and without workers, a result is made without
    the thread if that is at least as fast, to judge by the result before it. (A stream
    may depend on the thread that reads it.)
    """
    num_ahead = max(options.prefetch, options.num_workers)
    num_threads = options.num_workers

    def made(next_job: Future[J | None] | None) -> tuple[B | None, float]:
        """The result for a job, or for the next one if it is `None`, and its time. The
        result is `None` at the end."""
        began = time.perf_counter()
        job = next(jobs, None) if next_job is None else next_job.result()
        result = None if job is None else make(job)
        return result, time.perf_counter() - began

    pending: deque[Future[tuple[B | None, float]]] = deque()
    reader: _Threads | None = None
    makers: _Threads | None = None

    def submit() -> None:
        """Let the threads make the next result."""
        nonlocal reader, makers
        if reader is None:
            reader = _Threads(1)
            if num_threads > 1:
                makers = _Threads(num_threads)
        if makers is None:  # a single thread reads and makes in one go
            pending.append(reader.submit(functools.partial(made, None)))
        else:
            # One thread alone reads, because two threads cannot advance the same
            # generator.
            next_job = reader.submit(functools.partial(next, jobs, None))
            pending.append(makers.submit(functools.partial(made, next_job)))

    can_be_here = isinstance(options, Data) and num_threads == 0
    in_threads = num_ahead > 0 and not can_be_here
    consumed = 0.0
    num_short = 0
    try:
        while True:
            while in_threads and len(pending) <= num_ahead:
                submit()
            is_here = not pending
            if pending:
                batch, seconds = pending.popleft().result()
            else:
                batch, seconds = made(None)
            if batch is None:
                return
            if can_be_here and num_ahead > 0:
                if is_here:
                    in_threads = _pays(seconds, consumed)
                    num_short = 0
                elif in_threads:
                    if seconds < SHORT_SECONDS:
                        num_short += 1
                    in_threads = _pays(seconds, consumed) and num_short < _NUM_SHORT
                # Otherwise the threads pause until nothing is pending.
            # After a result that was made here, begin while the consumer works.
            while in_threads and len(pending) < num_ahead:
                submit()
            began = time.perf_counter()
            yield batch
            consumed = time.perf_counter() - began
    finally:
        # Do not wait: each thread ends after its current batch, and garbage collection
        # may run this in one of them.
        for threads in (reader, makers):
            if threads is not None:
                threads.end()


def _pays(made: float, consumed: float) -> bool:
    """True if a thread should make the results. It saves the time of a result or that
    of its consumer (in seconds), and takes `CHEAP_SECONDS`.

    The consumer's time only counts for a short result. A consumer that seems to be fast
    may have started work on the devices, and wait for it later.
    """
    is_long = made >= SHORT_SECONDS
    return made >= CHEAP_SECONDS and (is_long or consumed >= CHEAP_SECONDS)
