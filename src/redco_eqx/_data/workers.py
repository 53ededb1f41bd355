"""Work ahead of a loop, by threads, in order; and which does what, so that what hangs is named."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from redco_eqx._data.data import Data, Stream

# The work in hand: what each thread that makes batches is doing, so that what hangs can be named.


_in_hand: dict[int, list[tuple[float, str]]] = {}


@contextlib.contextmanager
def working(what: str, note: str | None = None) -> Iterator[None]:
    """Says what this thread does inside, within what it has said before. An error gets the note."""
    mine = _in_hand.setdefault(threading.get_ident(), [])
    mine.append((time.monotonic(), what))
    try:
        yield
    except Exception as error:
        if note is not None:
            error.add_note(note)
        raise
    finally:
        mine.pop()
        if not mine:
            del _in_hand[threading.get_ident()]


def work_in_hand() -> str:
    """A line for each thread that is at work: at what, for how long, and its name. The slowest comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, mine in list(_in_hand.items()):
        doing = list(mine)
        if doing and ident in names:
            since = time.monotonic() - doing[-1][0]
            what = ", ".join(what for _, what in doing)
            found.append((-since, f"{what}: not back for {since:.0f} s, in the thread {names[ident]}"))
    return "\n".join(line for _, line in sorted(found))


# Work ahead: what a loop will ask for is made by threads, and comes in order.


J = TypeVar("J")
B = TypeVar("B")

_END = object()


def run_ahead(jobs: Iterator[J], make: Callable[[J], B], options: Data | Stream) -> Generator[B]:
    """`make(job)` for each job in order, made ahead of being asked for, as the options say.

    The jobs are read by one thread. Raises `TimeoutError`, saying who hangs, if one does not come in time.
    """
    num_ahead, num_threads = max(options.prefetch, options.num_workers), options.num_workers
    if num_ahead == 0:
        for job in jobs:  # not `map`, which would take a StopIteration in `make` for the end
            yield make(job)
        return
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redco_eqx.batches")
    makers = reader
    if num_threads > 1:
        makers = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="redco_eqx.batches")

    def read() -> J | object:
        return next(jobs, _END)

    def made(job: "Future[J | object]") -> B | object:
        return _END if job.result() is _END else make(job.result())  # pyright: ignore[reportArgumentType]

    pending: deque[Future[B | object]] = deque()
    try:
        while True:
            while len(pending) <= num_ahead:
                pending.append(makers.submit(made, reader.submit(read)))
            if not wait([pending[0]], options.timeout_seconds).done:
                raise TimeoutError(
                    f"batches: the next one has not come for {options.timeout_seconds:g} s (timeout_seconds).\n"
                    + work_in_hand()
                )
            batch = pending.popleft().result()
            if batch is _END:
                return
            yield batch  # pyright: ignore[reportReturnType]
    finally:
        # Not waiting: each thread ends after the batch in hand, and garbage collection may run in it.
        for threads in {reader, makers}:
            threads.shutdown(wait=False, cancel_futures=True)
