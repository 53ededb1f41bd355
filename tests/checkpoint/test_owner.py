"""A second live writer in one directory is refused; a dead one is taken over."""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fit_helpers import full_disk, python

import redco_eqx as rx
from redco_eqx._checkpoint import owner
from redco_eqx._checkpoint.owner import BEGUN, Owner

CHILD = """
import os, pathlib, sys, time
from redco_eqx._checkpoint.owner import Owner
owner = Owner(pathlib.Path(sys.argv[1]))
owner.begin(0, {}, lambda before, now: ["another key"])
print("owns", flush=True)
if os.fork() == 0:  # a worker that outlives it
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns `tmp_path`."""
    process = python(CHILD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "owns\n"
    yield process
    process.kill()
    process.wait()


def test_a_live_process_is_named_and_a_killed_one_is_taken_over(child: Any, tmp_path: pathlib.Path) -> None:
    before = json.loads((tmp_path / BEGUN).read_bytes())
    with pytest.raises(rx.errors.CheckpointError, match=f"{tmp_path} is in use: process {child.pid} on "):
        Owner(tmp_path)
    assert json.loads((tmp_path / BEGUN).read_bytes())["id"] == before["id"]
    child.send_signal(signal.SIGKILL)
    child.wait()
    begin = time.monotonic()
    taken = Owner(tmp_path)
    assert time.monotonic() - begin < 2.0
    assert taken.begin(0, {}, lambda before, now: []) == (before["id"], True)
    taken.release()


def test_who_ends_while_another_waits_makes_room(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # so that the first is not taken for this process
    first = Owner(tmp_path)
    monkeypatch.undo()
    threading.Timer(0.5, first.release).start()
    Owner(tmp_path).release()
    assert list(tmp_path.iterdir()) == []  # no run began


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])
def test_an_owner_on_another_host_is_alive_if_it_touches_its_file(
    is_alive: bool, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    """No lock of the other is seen here, as on a file system that does not pass it on."""
    monkeypatch.setattr(owner, "_WATCH_SECONDS", 2.0)
    file, done = tmp_path / BEGUN, threading.Event()

    def touch_on() -> None:
        while not done.wait(0.3):
            file.touch()

    file.write_text(json.dumps({"id": "x", "owner": {"host": "elsewhere", "pid": 1}}))
    if is_alive:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(touch_on)
            with pytest.raises(rx.errors.CheckpointError, match="process 1 on elsewhere is writing"):
                Owner(tmp_path)
            done.set()
    else:
        begin = time.monotonic()
        Owner(tmp_path).release()
        assert 2.0 <= time.monotonic() - begin < 6.0
        assert json.loads(file.read_text()) == {"id": "x", "owner": None}


def test_an_owner_touches_its_file(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, "_BEAT_SECONDS", 0.05)
    one = Owner(tmp_path)
    first = (tmp_path / BEGUN).stat().st_mtime_ns
    end = time.monotonic() + 5
    while (tmp_path / BEGUN).stat().st_mtime_ns == first:
        assert time.monotonic() < end, "the time of the file does not move"
        time.sleep(0.05)
    one.release()


def test_a_torn_or_an_older_file_is_read(tmp_path: pathlib.Path) -> None:
    for content, is_known in (
        ('{"begin": 0, "id": "abc", "origin"', False),
        ("[]", False),
        ('{"begin": 0, "id": "abc", "origin": {}}', True),  # of version 0.2
        ('{"begin": 3, "id": "abc", "origin": {}}', False),
    ):
        (tmp_path / BEGUN).write_text(content)
        one = Owner(tmp_path)
        run_id, before = one.begin(0, {}, lambda before, now: [])
        assert (run_id == "abc", before) == (is_known, is_known)
        one.release()


def test_a_writer_that_is_dropped_leaves_the_directory(tmp_path: pathlib.Path) -> None:
    writer: Any = rx.Checkpoints(tmp_path).open()
    with pytest.raises(rx.errors.CheckpointError, match=f"{tmp_path} is in use: this very process"):
        rx.Checkpoints(tmp_path).open()
    del writer
    rx.Checkpoints(tmp_path).open().close()


def open_files(directory: pathlib.Path) -> list[int]:
    """The flags with which this process has files of a directory open."""
    flags = []
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(directory):
                flags.append(fcntl.fcntl(int(link.name), fcntl.F_GETFL))
    return flags


def test_a_live_owner_holds_no_file_open_for_writing(tmp_path: pathlib.Path) -> None:
    """Or a file system could not be made read-only, nor unmounted once a run has failed on a full disk."""
    owner = Owner(tmp_path)
    assert [flags & os.O_ACCMODE for flags in open_files(tmp_path)] == [os.O_RDONLY]
    with full_disk(8):
        owner.release()
    assert not open_files(tmp_path)
    Owner(tmp_path).release()
