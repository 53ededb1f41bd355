"""A read that fails is no damage: it is raised as what it is, nothing is renamed, and
the run goes on later."""

import contextlib
import errno
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
import pytest
from fit_helpers import assert_same, counted, linear_state, raised, steps_in

import redco_eqx as rx
from redco_eqx._checkpoint.checkpoint_info import is_damage

NEWEST = 4


@pytest.fixture
def run() -> Iterator[pathlib.Path]:
    """The directory of a run with the checkpoints 2 and 4, which every user of the
    machine may read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        counted(None, pathlib.Path(directory), num_steps=NEWEST)
        rx.restore(directory, linear_state())  # so that all that it imports is loaded
        yield pathlib.Path(directory)


# Faults, each of the operating system itself


@contextlib.contextmanager
def no_permission(path: pathlib.Path) -> Iterator[None]:
    mode = path.stat().st_mode
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # to whom nothing is forbidden
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(mode)


@contextlib.contextmanager
def input_output_error(path: pathlib.Path) -> Iterator[None]:
    """Nothing is mapped at the beginning of a process's memory, so reading it gives
    EIO."""
    aside = path.rename(path.with_name("aside"))
    path.symlink_to("/proc/self/mem")
    try:
        yield
    finally:
        path.unlink()
        aside.rename(path)


@contextlib.contextmanager
def too_many_open_files(path: pathlib.Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    opened = []
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FILES = (
    "record/record.json",
    "arrays/manifest.ocdbt",
    "arrays/_METADATA",
    "arrays/d/*",
)
FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    **{f"EACCES of {file}": (no_permission, file) for file in FILES},
    "EACCES of a folder": (no_permission, "arrays"),
    **{f"EIO of {file}": (input_output_error, file) for file in FILES},
    "EMFILE": (too_many_open_files, "record"),
}


def names_in(directory: pathlib.Path) -> list[str]:
    return sorted(
        path.name for path in directory.iterdir() if path.name != "history.jsonl"
    )


def fails(call: Callable[[], Any]) -> str:
    with pytest.raises((rx.errors.CheckpointError, OSError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failed_read_renames_nothing_and_reads_nothing_older(
    kind: str, run: pathlib.Path
) -> None:
    fault, file = FAULTS[kind]
    like = linear_state()
    (path, *_) = (run / str(NEWEST)).glob(file)
    before = names_in(run)
    with fault(path):
        said = fails(lambda: rx.restore(run, like))
    assert str(run) in said
    if kind != "EMFILE":  # the directory cannot even be listed
        assert f"CheckpointError: {run / str(NEWEST)} cannot be read: " in said
        assert "nothing was renamed or changed" in said
    assert "damaged" not in said
    assert names_in(run) == before
    assert int(rx.restore(run, like).step) == NEWEST


@pytest.mark.parametrize(
    "kind",
    ["EACCES of record/record.json", "EACCES of arrays/d/*", "EIO of arrays/d/*"],
)
def test_a_run_does_not_go_on_from_an_older_checkpoint(
    kind: str, run: pathlib.Path
) -> None:
    fault, file = FAULTS[kind]
    (path, *_) = (run / str(NEWEST)).glob(file)
    before = names_in(run)
    if fault is no_permission:
        fault = unreadable_for_orbax if "arrays" in file else unreadable_record
    with fault(path):
        said = fails(lambda: counted(None, run, num_steps=8))
    assert f"{run / str(NEWEST)} cannot be read: " in said
    assert names_in(run) == before
    assert_same(counted(None, run, num_steps=8), counted(num_steps=8))
    assert (run / "4").is_dir() or "8" in names_in(run)
    assert not list(run.glob("*.damaged*"))


@contextlib.contextmanager
def unreadable_record(path: pathlib.Path) -> Iterator[None]:
    """As without the permission to read, which the owner of a directory of checkpoints
    must have to write."""
    read = pathlib.Path.read_bytes

    def read_bytes(self: pathlib.Path) -> bytes:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(self))
        return read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", read_bytes)
        yield


@contextlib.contextmanager
def unreadable_for_orbax(path: pathlib.Path) -> Iterator[None]:
    """With the error that tensorstore raises for a file that may not be read."""

    def restore(*_: Any, **__: Any) -> Any:
        raise ValueError(tensorstore_error(errno.EACCES, "PERMISSION_DENIED"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
        yield


def tensorstore_error(number: int, status: str) -> str:
    """As tensorstore 0.1.86 words it."""
    return (
        f'{status}: Error opening "zarr" driver: Error reading local file '
        '"/run/4/arrays/manifest.ocdbt": '
        f"Failed to read 115 bytes from file at offset 0: {os.strerror(number)} "
        f"[os_error_code='{number}'] "
        "[tensorstore_spec='{}']"
    )


NUMBERS = ("EIO", "ESTALE", "EACCES", "EPERM", "EMFILE", "ENFILE")
NUMBERS += ("ENOMEM", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN")


@pytest.mark.parametrize("name", NUMBERS)
def test_errors_of_the_system_are_no_damage(name: str) -> None:
    number = getattr(errno, name)
    assert not is_damage(OSError(number, os.strerror(number)))
    assert not is_damage(ValueError(tensorstore_error(number, "UNKNOWN")))
    wrapped = ValueError("Failed to restore")
    wrapped.__cause__ = OSError(number, os.strerror(number))
    assert not is_damage(wrapped)


@pytest.mark.parametrize("name", ["ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG"])
def test_a_missing_file_is_damage(name: str) -> None:
    number = getattr(errno, name)
    assert is_damage(OSError(number, os.strerror(number)))
    assert is_damage(ValueError(tensorstore_error(number, "NOT_FOUND")))
    assert is_damage(ValueError("DATA_LOSS: Error decoding manifest"))


def test_a_failure_of_one_read_is_looked_at_again(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A glitch whose kind nobody names."""
    read = ocp.PyTreeCheckpointHandler.restore
    num_calls = 0

    def restore(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ValueError("a glitch")
        return read(*arguments, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    assert int(rx.restore(run, linear_state()).step) == NEWEST


def test_the_list_does_not_leave_out_what_it_cannot_read(run: pathlib.Path) -> None:
    with no_permission(run / str(NEWEST) / "record" / "record.json"):
        assert "cannot be read" in fails(lambda: rx.list_checkpoints(run))
    assert steps_in(run) == [2, NEWEST]


def test_the_list_of_a_directory_that_cannot_be_read_is_not_empty(
    run: pathlib.Path,
) -> None:
    with no_permission(run):
        assert "PermissionError" in fails(lambda: rx.list_checkpoints(run))


def test_an_older_checkpoint_that_cannot_be_read_is_not_needed_and_is_left(
    run: pathlib.Path,
) -> None:
    with unreadable_record(run / "2" / "record" / "record.json"):
        assert_same(counted(None, run, num_steps=8), counted(num_steps=8))
    assert [path.name for path in sorted(run.glob("[0-9]*"))] == ["2", "6", "8"]


def test_a_run_does_not_begin_again_where_no_record_can_be_read(
    run: pathlib.Path,
) -> None:
    with contextlib.ExitStack() as stack:
        for step in ("2", "4"):
            stack.enter_context(
                unreadable_record(run / step / "record" / "record.json")
            )
        assert f"{run / '4'} cannot be read: PermissionError" in fails(
            lambda: counted(None, run, num_steps=8)
        )
    assert steps_in(run) == [2, 4]


def test_a_step_that_is_damaged_twice_is_set_aside_twice(run: pathlib.Path) -> None:
    for names in (["4.damaged"], ["4.damaged", "4.damaged-2"]):
        shutil.rmtree(run / "4" / "arrays" / "d")
        with pytest.warns(UserWarning, match="4 is damaged"):
            assert_same(counted(None, run, num_steps=4), counted(num_steps=4))
        assert sorted(path.name for path in run.glob("*.damaged*")) == names


def test_all_damaged_is_told_as_damage(run: pathlib.Path) -> None:
    for step in ("2", "4"):
        (run / step / "record" / "record.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match="4 is damaged"):
        raised(
            rx.errors.CheckpointError,
            rx.restore,
            run,
            linear_state(),
            match="no checkpoint can be restored",
        )
