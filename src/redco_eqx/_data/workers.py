"""Threads that work ahead of a loop, in order."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from redco_eqx._data.data import Data, Stream

J = TypeVar("J")
B = TypeVar("B")

CHEAP_SECONDS = 2e-4
"""The time to pass a batch between two threads that share Python's lock, measured with the loop of `fit`."""


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


def run_ahead(jobs: Iterator[J], make: Callable[[J], B], options: Data | Stream) -> Generator[B]:
    """Yield `make(job)` for each job in order. Threads make the results ahead, as the options say.

    One thread reads the jobs. With `Data` and without workers, a result that follows one which took less than
    `CHEAP_SECONDS` is made without the thread. (A stream may depend on the thread that reads it.)
    """
    num_ahead, num_threads = max(options.prefetch, options.num_workers), options.num_workers
    reader = makers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redco_eqx.batches")
    if num_threads > 1:
        makers = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="redco_eqx.batches")

    def made(next_job: Future[J | None] | None) -> tuple[B | None, float]:  # `None` at the end
        began = time.perf_counter()
        job = next(jobs, None) if next_job is None else next_job.result()
        return None if job is None else make(job), time.perf_counter() - began

    pending: deque[Future[tuple[B | None, float]]] = deque()
    can_be_here, seconds = isinstance(options, Data) and num_threads == 0, math.inf
    try:
        while True:
            is_here = num_ahead == 0 or (can_be_here and seconds < CHEAP_SECONDS)
            while not is_here and len(pending) <= num_ahead:
                # A single thread reads and makes in one go.
                next_job = None if makers is reader else reader.submit(next, jobs, None)
                pending.append(makers.submit(made, next_job))
            batch, seconds = pending.popleft().result() if pending else made(None)
            if batch is None:
                return
            yield batch
    finally:
        # Do not wait: each thread ends after its current batch, and garbage collection may run this in one of
        # them.
        for threads in {reader, makers}:
            threads.shutdown(wait=False, cancel_futures=True)
