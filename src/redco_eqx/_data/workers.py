"""Work ahead of a loop, by threads and processes, in order; and who does what, so that what hangs is named."""

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import jax

from redco_eqx._data.data import Data, Stream
from redco_eqx._types import Batch, CollateFn

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


def run_ahead(
    jobs: Iterator[J],
    make: Callable[[J], B],
    *,
    num_ahead: int,
    num_threads: int,
    timeout_seconds: float | None = None,
) -> Generator[B]:
    """`make(job)` for each job in order, made up to `num_ahead` before it is asked for.

    **Arguments:**

    - `jobs`: read by one thread.
    - `num_ahead`: 0 for no thread at all.
    - `num_threads`: how many call `make` at the same time.
    - `timeout_seconds`: for how long at most one is waited for. Raises `TimeoutError` then, saying who hangs.
    """
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
            if not wait([pending[0]], timeout_seconds).done:
                raise TimeoutError(
                    f"batches: the next one has not come for {timeout_seconds:g} s (timeout_seconds).\n"
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


# Processes that collate. Each is started anew, and does one batch at a time for the thread that calls.


class CollatingProcesses:
    """`collate_fn` in so many processes; to be called by as many threads at once, and closed.

    The processes are started by the first call.
    """

    def __init__(self, collate_fn: CollateFn, num: int):
        """Raises `TypeError` if `collate_fn` cannot be sent to a process."""
        try:
            payload = pickle.dumps(collate_fn)
        except Exception as error:
            raise TypeError(
                f"processes=True: collate_fn cannot be sent to a process: {error}. It must be a function of a "
                "module (no lambda, none within a function); or use threads, num_workers= alone."
            ) from error
        self._payload, self._num = payload, num
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False

    def __call__(self, examples: Sequence[Any], /) -> Batch:
        """What `collate_fn` returns or raises. Raises `RuntimeError` if the process has died."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the processes that collate are closed")
            if not self._workers:
                self._workers = [_Worker(self._payload, i) for i in range(self._num)]
                for worker in self._workers:
                    self._idle.put(worker)
        worker = self._idle.get()
        try:
            with working(f"in the process {worker.process.name} (pid {worker.process.pid})"):
                return worker.collate(examples)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes at once; who waits for one gets a `RuntimeError`."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def collator(data: Data | Stream, collate_fn: CollateFn) -> CollateFn:
    """`collate_fn`, or processes that do the same. Raises `TypeError` as these do."""
    return CollatingProcesses(collate_fn, data.num_workers) if data.processes else collate_fn


@contextlib.contextmanager
def closed_after(collate_fn: CollateFn) -> Iterator[None]:
    """Ends the processes of `collator` on leaving, if there are any."""
    try:
        yield
    finally:
        if isinstance(collate_fn, CollatingProcesses):
            collate_fn.close()


class _Worker:
    def __init__(self, payload: bytes, number: int):
        # Not a fork: JAX has threads, whose locks a child would find locked for ever.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, payload), name=f"redco_eqx.collate-{number}", daemon=True
        )
        with _without_interrupts():
            self.process.start()
        theirs.close()  # so that its death is the end of the pipe

    def collate(self, examples: Sequence[Any]) -> Batch:
        try:
            self._connection.send(examples)
            batch, error = self._connection.recv()
        except (EOFError, ConnectionError) as lost:
            raise RuntimeError(self._how_it_died()) from lost
        if error is not None:
            raise error
        return batch

    def _how_it_died(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"ended with exit code {code}"
        hint = 'What it printed says why. A program that starts processes needs `if __name__ == "__main__":`.'
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            hint = "The machine may be out of memory: use fewer workers." if code == -signal.SIGKILL else ""
        return (
            f"the process {self.process.name} (pid {self.process.pid}) {how} while it collated. {hint}".strip()
        )


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started in here never see a Ctrl-C, which is for their parent."""
    # They inherit the mask. What tracks their resources unblocks the signal when it is started: so before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, payload: bytes) -> None:
    """What a process does: collates what it is sent, until its parent is gone."""
    jax.config.update("jax_platforms", "cpu")  # the accelerators are the parent's
    with contextlib.suppress(EOFError, ConnectionError):
        collate_fn = pickle.loads(payload)
        while True:
            examples = connection.recv()
            try:
                connection.send((collate_fn(examples), None))
            except (EOFError, ConnectionError):
                return
            except Exception as error:
                connection.send((None, _picklable(error)))


def _picklable(error: Exception) -> Exception:
    """The error with its traceback as a note, or what can be sent of it."""
    text = "".join(traceback.format_exception(error))
    try:
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    same.add_note(f"In a process (pid {os.getpid()}) that collates:\n{text}")
    return same
