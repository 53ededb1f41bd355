"""The owner of a directory of checkpoints: of two live runs in one directory, the second is refused.

On one host a kernel lock decides, which ends with its process, in whatever way. A file system may not pass
locks on to other hosts: so the owner also touches its file, and whoever finds the file of another host looks
whether its time moves.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from redco_eqx._checkpoint.runs import CheckpointError, Identity

BEGUN = "begun.json"
"""In a directory of checkpoints: its owner, and the run that began there before its first one is whole."""

_BEAT_SECONDS, _WATCH_SECONDS = 2.0, 12.0


class Owner:
    """This process, as the only one that writes into a directory. Ends by `release`, or with the process."""

    def __init__(self, directory: pathlib.Path):
        """Raises `CheckpointError` if the directory has a live owner, and `OSError` if it cannot be written.

        Takes at most 13 seconds: that long an owner of another host, or one that is ending, is watched.
        """
        self._file = directory / BEGUN
        self._done = threading.Event()
        # The directory: a file open for writing would keep a file system from becoming read-only.
        self._fd = os.open(directory, os.O_RDONLY)
        _owners.add(self)
        try:
            self.content = self._take()
            # At once, so that a disk that cannot be written, or a file that is read-only, is told now.
            self._write(owner=_this_process())
        except BaseException:
            self.unlock()
            raise
        threading.Thread(target=self._beat, name="redco_eqx.owner", daemon=True).start()

    def begin(
        self, begin: int, identity: Identity, differs: Callable[[Identity | None, Identity], object]
    ) -> tuple[str, bool]:
        """The id of the run that begins here, and whether it began before: it was killed before its first save.

        **Arguments:**

        - `begin`: its first step.
        - `identity`: what it is; it is kept in the file.
        - `differs`: true, called with the identity in the file and this one, if they are of two runs.
        """
        before = self.content
        if before.get("begin") == begin and "id" in before and not differs(before.get("identity"), identity):
            return before["id"], True
        run_id = secrets.token_hex(4)
        self._write(begin=begin, id=run_id, identity=identity)
        return run_id, False

    def release(self) -> None:
        """Leave the directory to others. May be called twice."""
        if not self._done.is_set():
            self._done.set()
            with contextlib.suppress(OSError):  # a full disk: the kernel's lock, or the time, tells others
                if "id" in self.content:
                    self._write(owner=None)
                else:
                    self._file.unlink()
            self.unlock()

    def unlock(self) -> None:
        """Give up the kernel's lock alone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> dict[str, Any]:
        """The content of the file, once nobody else owns it."""
        start, (_, first) = time.monotonic(), _read(self._file)
        while True:
            has_lock, (content, beat) = self._has_lock(), _read(self._file)
            owner, this = content.get("owner") or {}, _this_process()
            is_here, is_late = owner.get("host") == this["host"], time.monotonic() - start > _WATCH_SECONDS
            if has_lock is not False and (not owner or is_late or (has_lock and is_here)):
                return content
            if owner == this or is_late or (owner and beat != first):
                who = f"process {owner.get('pid')} on {owner.get('host')}"
                who = "this very process" if owner == this else who
                raise CheckpointError(
                    f"{self._file.parent} is in use: {who} is writing its checkpoints there (a run that goes "
                    "on, or a writer that was not closed). Pass another directory, or wait until it has ended."
                )
            time.sleep(0.2)

    def _has_lock(self) -> bool | None:
        """Returns true if the kernel's lock is ours; `None` if this file system has none."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # none is where a lock needs a file open for writing, such as NFS
            return False if isinstance(error, BlockingIOError) else None
        return True

    def _write(self, **changes: Any) -> None:
        self.content = {**self.content, **changes}
        # In place, which needs no room on a full disk.
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            file.write(json.dumps(self.content).encode())
            file.truncate()

    def _beat(self) -> None:
        """Shows others that this process is alive."""
        while not self._done.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a disk that fails is told by the next save
                os.utime(self._file)


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
# Or a child that outlives its parent would hold the parent's lock.
os.register_at_fork(after_in_child=lambda: [owner.unlock() for owner in _owners])


def wait_for(directory: pathlib.Path, owner: dict[str, Any]) -> None:
    """Returns when the directory has this owner, on another host perhaps.

    Raises `CheckpointError` if that is not so within 12 seconds: it is another directory, of the same name.
    """
    start = time.monotonic()
    while _read(directory / BEGUN)[0].get("owner") != owner:
        if time.monotonic() - start > _WATCH_SECONDS:
            raise CheckpointError(
                f"{directory} is not the directory that process 0 writes to: its file {BEGUN} is not seen "
                "here. Checkpoints need one that all processes see, by the same name."
            )
        time.sleep(0.2)


def _this_process() -> dict[str, Any]:
    """This process, on this host as long as that runs: hosts may share a name."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text()[:8] if boot.exists() else ''}".strip()
    return {"host": host, "pid": os.getpid()}


def _read(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """The content of the file of an owner, and when it was last touched."""
    for _ in range(3):
        try:
            with file.open("rb") as opened:
                return dict(json.loads(opened.read())), os.fstat(opened.fileno()).st_mtime_ns
        except FileNotFoundError:
            break
        except (ValueError, TypeError):  # just being written; or left so by a process that was killed
            time.sleep(0.1)
    return {}, 0
