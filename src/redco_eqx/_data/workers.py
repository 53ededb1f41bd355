"""Threads that work ahead of a loop, in order."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from redco_eqx._data.data import Data, Stream

J = TypeVar("J")
B = TypeVar("B")

_END = object()


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to errors that are raised in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def run_ahead(jobs: Iterator[J], make: Callable[[J], B], options: Data | Stream) -> Generator[B]:
    """Yield `make(job)` for each job in order. Threads make the results ahead, as the options say.

    One thread reads the jobs.
    """
    num_ahead, num_threads = max(options.prefetch, options.num_workers), options.num_workers
    if num_ahead == 0:
        for job in jobs:  # `map` would take a StopIteration in `make` for the end
            yield make(job)
        return
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redco_eqx.batches")
    makers = reader
    if num_threads > 1:
        makers = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="redco_eqx.batches")

    def made(job: "Future[J | object]") -> B | object:
        return _END if job.result() is _END else make(job.result())  # pyright: ignore[reportArgumentType]

    pending: deque[Future[B | object]] = deque()
    try:
        while True:
            while len(pending) <= num_ahead:
                pending.append(makers.submit(made, reader.submit(next, jobs, _END)))
            batch = pending.popleft().result()
            if batch is _END:
                return
            yield batch  # pyright: ignore[reportReturnType]
    finally:
        # Do not wait: each thread ends after its current batch, and garbage collection may run this in one of
        # them.
        for threads in {reader, makers}:
            threads.shutdown(wait=False, cancel_futures=True)
