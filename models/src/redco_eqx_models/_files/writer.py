"""The sole writer of a model directory. A second program that saves there waits until
the first one has ended.

On one host, a kernel lock decides. It ends with its process, however that process ends.
Some file systems have no locks, and others do not pass them on to other hosts. So the
writer also touches its file, and a program that finds the file of another host watches
whether the time of the file changes.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILE = ".writer.json"
"""The file of the writer in a model directory. It exists only during a save, or after
one that was killed."""

WAIT_SECONDS = 600.0
"""The limit on waiting for another program, which may be writing a large model."""

TELL_SECONDS = 10.0
BEAT_SECONDS = 2.0
WATCH_SECONDS = 12.0
_SETTLE_SECONDS = 0.5

_held: set[int] = set()
"""The open files whose locks this process has."""


def _forget() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    # Otherwise a child that outlives its parent would keep the parent's lock.
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def only_writer(what: str, directory: Path) -> Iterator[None]:
    """Keep other programs (and threads) from saving to a directory, which must exist.
    Wait for one that does.

    **Arguments:**

    - `what`: the function that saves, for messages.

    **Raises:**

    - `TimeoutError`, naming the other program, if it has not ended after 10 minutes.
    - `OSError` if the directory cannot be written.
    """
    file = directory / FILE
    fd = _wait(what, file)
    _held.add(fd)
    done = threading.Event()
    beat = threading.Thread(
        target=_beat, args=(file, done), name="redco_eqx.writer", daemon=True
    )
    beat.start()
    try:
        yield
    finally:
        done.set()
        # A thread that a dead disk holds would hold this one too.
        beat.join(BEAT_SECONDS)
        try:
            if _is_in(fd, file):
                with contextlib.suppress(OSError):
                    # The next writer finds the file without a lock.
                    os.unlink(file)
        finally:
            _release(fd)


def _wait(what: str, file: Path) -> int:
    """Return the open file, locked and with the name of this process in it."""
    start = seen_at = time.monotonic()
    seen: tuple[Mapping[str, object], int] = ({}, 0)
    told = False
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock = _lock(fd)
            found = _read(fd)
            if found != seen:
                seen = found
                seen_at = time.monotonic()
            is_late = time.monotonic() - seen_at > WATCH_SECONDS
            # The last writer removed its file while this process waited for the lock on
            # it.
            is_current = _is_in(fd, file)
            if is_current and _is_free(lock, found[0], is_late) and _take(fd, lock):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        waited = time.monotonic() - start
        if waited > WAIT_SECONDS:
            raise TimeoutError(
                f"{what}: {_name_of(found[0])} has been writing {file.parent} for "
                f"{waited:.0f} seconds. Pass another directory, or wait until it ends. "
                f"If it has ended, remove {file}."
            )
        if waited > TELL_SECONDS and not told:
            told = True
            warnings.warn(
                f"{what}: waiting for {_name_of(found[0])}, which is writing "
                f"{file.parent}, for at most {WAIT_SECONDS:.0f} seconds.",
                stacklevel=2,
            )
        if is_current:
            time.sleep(0.05)


def _lock(fd: int) -> bool | None:
    """Return true if this process has the kernel's lock; `None` if this file system has
    no locks."""
    if fcntl is None:
        return None
    try:
        # `flock`, not `lockf`, whose locks a process loses when it closes any file
        # object of the same file, and which threads share.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Lustre without the option flock, for example.
        return None
    return True


def _is_free(lock: bool | None, writer: Mapping[str, object], is_late: bool) -> bool:
    """Return true if the writer that the file names has ended."""
    if lock is False:
        return False
    if not writer:
        return True
    if writer.get("host") != _host():
        return is_late
    return lock is True or not _is_running(writer.get("pid"))


def _is_running(pid: object) -> bool:
    try:
        # Signal 0 only checks that the process exists.
        os.kill(int(str(pid)), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        # The process of another user.
        return True
    return True


def _take(fd: int, lock: bool | None) -> bool:
    """Write the name of this process into the file. Return false if another process did
    so at once."""
    text = json.dumps(
        {"host": _host(), "pid": os.getpid(), "save": secrets.token_hex(8)}
    ).encode()
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, text)
    os.ftruncate(fd, len(text))
    if lock is True:
        return True
    # Without a lock, the last of those that wrote is the writer.
    time.sleep(_SETTLE_SECONDS)
    os.lseek(fd, 0, os.SEEK_SET)
    return os.read(fd, len(text) + 1) == text


def _read(fd: int) -> tuple[dict[str, object], int]:
    """Return the content of the file, and the time at which it was last touched."""
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        return dict(json.loads(os.read(fd, 4096))), os.fstat(fd).st_mtime_ns
    except (ValueError, TypeError):
        # It is empty, or another process is writing it.
        return {}, 0


def _is_in(fd: int, file: Path) -> bool:
    """Return true if the open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(file))
    except FileNotFoundError:
        return False


def _beat(file: Path, done: threading.Event) -> None:
    """Show other hosts that this process is alive."""
    while not done.wait(BEAT_SECONDS):
        # The save itself reports a disk that fails.
        with contextlib.suppress(OSError):
            os.utime(file)


def _release(fd: int) -> None:
    if fd not in _held:
        # This is a child that was forked during the save.
        return
    _held.remove(fd)
    if fcntl is not None:
        with contextlib.suppress(OSError):
            # Also for children that were forked and have not closed it yet.
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _host() -> str:
    """Name this boot of this host, because hosts may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii')[:8]}"


def _name_of(writer: Mapping[str, object]) -> str:
    if not writer:
        return "another program"
    return f"process {writer.get('pid')} on {writer.get('host')}"
