"""The owner of a directory of checkpoints: of two live runs in one directory, the second is refused.

On one host a kernel lock decides, which ends with its process, in whatever way. A file system may not pass
locks on to other hosts: so the owner also counts in the file, and whoever finds a count of another host looks
whether it moves.
"""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from typing import Any

from redco_eqx._checkpoint.record import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: the count alone decides
    fcntl = None

BEGUN = "begun.json"
"""In a directory of checkpoints: its owner, and the run that began there before its first one is whole."""

_BEAT_SECONDS, _WATCH_SECONDS = 2.0, 12.0


class Owner:
    """This process, as the only one that writes into a directory. Ends by `release`, or with the process."""

    def __init__(self, directory: pathlib.Path, *, waits: bool = True):
        """Raises `CheckpointError` if the directory has a live owner, and `OSError` if it cannot be written.

        Takes at most 13 seconds: that long an owner of another host, or one that is ending, is watched. Without
        `waits` an owner on this host is taken for alive at once.
        """
        self._file = directory / BEGUN
        # Only to be locked: a file open for writing would keep a file system from becoming read-only.
        self._fd = os.open(self._file, os.O_RDONLY | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self._done = threading.Event()
        try:
            self.content = self._take(waits)
            # At once, so that a disk that cannot be written, or a file that is read-only, is told now.
            self.mark = new_id()
            self._write(owner={"host": _host(), "pid": os.getpid(), "mark": self.mark, "count": 0})
        except BaseException:
            os.close(self._fd)
            raise
        threading.Thread(target=self._count, name="redco_eqx.owner", daemon=True).start()

    def begin(self, begin: int, same: Any, **run: Any) -> tuple[str, bool]:
        """The id of the run that begins here, and whether it began before: it was killed before its first save.

        **Arguments:**

        - `begin`: its first step.
        - `same`: says of what `run` was before whether it is the same.
        - `run`: plain JSON, which is kept in the file.
        """
        before = self.content
        if before.get("begin") == begin and isinstance(before.get("id"), str) and same(before):
            return before["id"], True
        run_id = new_id()
        self._write(begin=begin, id=run_id, **run)
        return run_id, False

    def release(self) -> None:
        """Leave the directory to others. May be called twice."""
        with self._lock:
            if not self._done.is_set():
                self._done.set()
                with contextlib.suppress(OSError):  # a full disk: the kernel's lock, or the count, tells others
                    if "id" in self.content:
                        self._put({**self.content, "owner": None})
                    else:
                        self._file.unlink(missing_ok=True)
                os.close(self._fd)

    def _take(self, waits: bool) -> dict[str, Any]:
        """The content of the file, once nobody else owns it."""
        start, first = time.monotonic(), _content(self._file)
        while True:
            lock, content = self._has_lock(), _content(self._file)
            is_late = time.monotonic() - start > _WATCH_SECONDS
            owner = content.get("owner") or {}
            is_here = owner.get("host") == _host()
            is_free = lock is not False and (not owner or (lock and is_here))
            # Processes that a dead owner forked still hold its lock.
            if is_free or (is_late and (lock is not False or (is_here and not _is_alive(owner)))):
                return content
            is_self = is_here and owner.get("pid") == os.getpid()
            if is_self or is_late or (owner and content != first) or (lock is False and not waits):
                who = "this very process" if is_self else f"process {owner.get('pid')} on {owner.get('host')}"
                raise CheckpointError(
                    f"{self._file.parent} is in use: {who} is writing its checkpoints there (a run that goes "
                    "on, or a writer that was not closed). Pass another directory, or wait until it has ended."
                )
            time.sleep(0.2)

    def _has_lock(self) -> bool | None:
        """Returns true if the kernel's lock is ours; `None` if this file system has none."""
        if fcntl is None:
            return None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # none is where a lock needs a file open for writing (NFS): the count decides
            return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), self._file.stat()):
                return True
        os.close(self._fd)  # of a file that the owner before has removed
        self._fd = os.open(self._file, os.O_RDONLY | os.O_CREAT, 0o644)
        return self._has_lock()

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if not self._done.is_set():
                self.content = {**self.content, **changes}
                self._put(self.content)

    def _put(self, content: dict[str, Any]) -> None:
        with self._file.open("r+b") as file:
            file.write(json.dumps(content).encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())  # to where other hosts see it

    def _count(self) -> None:
        """Shows others that this process is alive."""
        while not self._done.wait(_BEAT_SECONDS):
            owner = self.content["owner"]
            with contextlib.suppress(OSError):  # a full disk: the next save tells
                self._write(owner={**owner, "count": owner["count"] + 1})


def wait_for(directory: pathlib.Path, mark: str) -> None:
    """Returns when the directory is owned by the one of this mark, on another host perhaps.

    Raises `CheckpointError` if that is not so within 12 seconds: it is another directory, of the same name.
    """
    start = time.monotonic()
    while (_content(directory / BEGUN).get("owner") or {}).get("mark") != mark:
        if time.monotonic() - start > _WATCH_SECONDS:
            raise CheckpointError(
                f"{directory} is not the directory that process 0 writes to: its file {BEGUN} is not seen "
                "here. Checkpoints need one that all processes see, by the same name."
            )
        time.sleep(0.2)


def new_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(4)


def _host() -> str:
    """This host, as long as it runs: hosts may share a name."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def _is_alive(owner: dict[str, Any]) -> bool:
    if fcntl is None:  # where a signal 0 would end it
        return True
    with contextlib.suppress(PermissionError, KeyError, TypeError, ValueError):  # of another user, or not known
        try:
            os.kill(int(owner["pid"]), 0)
        except ProcessLookupError:
            return False
    return True


def _content(file: pathlib.Path) -> dict[str, Any]:
    for _ in range(3):
        try:
            content = json.loads(file.read_bytes() or b"{}")
            return content if isinstance(content, dict) else {}
        except FileNotFoundError:
            break
        except ValueError:  # just being written; or left so by a process that was killed
            time.sleep(0.1)
    return {}
