"""The owner of a directory of checkpoints: a second live run that uses the directory is
rejected.

On one host, a kernel lock decides. It ends with its process, however that process ends.
A file system may not pass locks on to other hosts, so the owner also touches its file.
A process that finds the file of another host watches whether the time of the file
changes.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import weakref
from typing import Any

from redco_eqx._checkpoint.run_record import CheckpointError

OWNER = "owner.json"
"""The name of the file of the owner in a directory of checkpoints."""

_BEAT_SECONDS = 2.0
_WATCH_SECONDS = 12.0


class Owner:
    """The sole right of this process to write into a directory. It ends with `release`,
    or with the process."""

    def __init__(self, directory: pathlib.Path):
        """Raise `CheckpointError` if the directory has a live owner, and `OSError` if
        it cannot be written.

        Takes at most 13 seconds, to watch an owner on another host or one that is
        ending.
        """
        self._file = directory / OWNER
        self._is_in_child = False
        self._done = threading.Event()
        # Lock the directory, because a file open for writing would keep the file system
        # from becoming read-only.
        self._fd = os.open(directory, os.O_RDONLY)
        _owners.add(self)
        try:
            self._take()
            # A disk that cannot be written, or a read-only file, raises here.
            self._write(this_process())
        except BaseException:
            self.unlock()
            raise
        threading.Thread(target=self._beat, name="redco_eqx.owner", daemon=True).start()

    def release(self) -> None:
        """Release the directory to others. You may call it twice. Does nothing in a
        forked child, because the directory belongs to its parent."""
        if not self._is_in_child and not self._done.is_set():
            self._done.set()
            with contextlib.suppress(OSError):
                # On a full disk, others still see the lock or the time.
                self._file.unlink()
            self.unlock()

    def unlock(self) -> None:
        """Give up only the kernel's lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def leave_to_parent(self) -> None:
        """In a forked child: give up the copy of the lock, which would outlive the
        parent, and never touch its file."""
        self._is_in_child = True
        self.unlock()

    def _take(self) -> None:
        """Wait until no other process owns the directory."""
        start = time.monotonic()
        _, first = _read(self._file)
        while True:
            has_lock = self._has_lock()
            owner, beat = _read(self._file)
            this = this_process()
            is_here = owner.get("host") == this["host"]
            is_late = time.monotonic() - start > _WATCH_SECONDS
            # A lock says nothing about an owner on another host, which may still touch
            # its file.
            is_dead = is_late or (has_lock and is_here)
            if has_lock is not False and (not owner or is_dead):
                return
            is_alive = is_late or (owner and beat != first)
            if owner == this or is_alive:
                who = f"process {owner.get('pid')} on {owner.get('host')}"
                if owner == this:
                    who = "this very process"
                raise CheckpointError(
                    f"{self._file.parent} is in use: {who} is writing its checkpoints "
                    "there (a run that has not ended, or a writer that is not closed). "
                    "Pass another directory, or wait until it ends."
                )
            time.sleep(0.2)

    def _has_lock(self) -> bool | None:
        """Return true if this process has the kernel's lock; `None` if this file system
        has no locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):  # another process has it
                return False
            # NFS, for example, locks only files that are open for writing.
            return None
        return True

    def _write(self, owner: dict[str, Any]) -> None:
        # Write in place, which needs no space on a full disk.
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            file.write(json.dumps(owner).encode())
            file.truncate()

    def _beat(self) -> None:
        """Show others that this process is alive."""
        while not self._done.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                # The next save reports a disk that fails.
                os.utime(self._file)


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
os.register_at_fork(
    after_in_child=lambda: [owner.leave_to_parent() for owner in _owners]
)


def wait_for(directory: pathlib.Path, owner: dict[str, Any]) -> None:
    """Wait until the file in the directory names this owner, which may be on another
    host.

    Raises `CheckpointError` after 12 seconds, because this is then another directory
    with the same name.
    """
    start = time.monotonic()
    while _read(directory / OWNER)[0] != owner:
        if time.monotonic() - start > _WATCH_SECONDS:
            raise CheckpointError(
                f"{directory} is not the directory that process 0 writes to: its file "
                f"{OWNER} is missing here. Pass a directory that all processes see "
                "under the same name."
            )
        time.sleep(0.2)


def this_process() -> dict[str, Any]:
    """Identify this process and this boot of the host, because hosts may share a
    name."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text()[:8] if boot.exists() else ""
    host = f"{socket.gethostname()} {start}".strip()
    return {"host": host, "pid": os.getpid()}


def _read(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """Return the content of the file of an owner, and the time at which it was last
    touched."""
    for _ in range(3):
        try:
            with file.open("rb") as opened:
                owner = dict(json.loads(opened.read()))
                return owner, os.fstat(opened.fileno()).st_mtime_ns
        except FileNotFoundError:
            break
        except (ValueError, TypeError):
            # Another process is writing it, or was killed while it did.
            time.sleep(0.1)
    return {}, 0
