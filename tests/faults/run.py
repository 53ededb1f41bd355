"""Faults that happen to a training run, and what is lost:
`python tests/faults/run.py [--reduced]`.

Prints a table: fault, tries, survived, lost. A try survives if what the library
promises for that fault has come true, most often: the run goes on and ends with every
bit that an uninterrupted one has. Ends with status 1 if anything is lost.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402
from fit_helpers import MESHES, Collate, assert_same, bits, counted, mlp_state, read_log  # noqa: E402
from hosts.harness import free_port  # noqa: E402

import redco_eqx as rx  # noqa: E402
from redco_eqx._checkpoint.arrays import to_names  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("program.py")
ADAM = optax.adam(1e-2)
ALL_MESHES = {**MESHES, "data4xtensor2": {"tensor": 2}}


# Runs as programs


def start(**options: Any) -> subprocess.Popen[str]:
    text = json.dumps(
        {
            name: str(x) if isinstance(x, pathlib.Path) else x
            for name, x in options.items()
        }
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), text], stdout=pipe, stderr=pipe, text=True
    )


def finish(*programs: subprocess.Popen[str], code: int = 0) -> list[dict[str, Any]]:
    """Return the final output of each program, which must end with this code."""
    results = []
    for program in programs:
        out, err = program.communicate(timeout=300)
        assert program.returncode == code, (
            f"ended with {program.returncode}, not {code}: {err[-2000:]}"
        )
        lines = [
            line[line.index("{") :] for line in out.splitlines() if '{"step"' in line
        ]
        results.append(json.loads(lines[-1]) if lines else {})
    return results


def two(**options: Any) -> list[subprocess.Popen[str]]:
    """A run on two processes of four devices."""
    port = free_port()
    return [start(port=port, process=i, **options) for i in range(2)]


def same_rows(log: pathlib.Path, other: pathlib.Path) -> None:
    assert read_log(log) == read_log(other), "the rows of the log differ"


def newest(directory: pathlib.Path) -> int:
    return max(
        (int(path.name) for path in directory.glob("*") if path.name.isdecimal()),
        default=0,
    )


# Faults: each yields once for a try that survives


def kills(base: pathlib.Path, tries: int, name: str = "killed") -> Iterator[str]:
    """kill -9 at random instants of a run that saves at every step."""
    directory = base / name
    log = base / "killed.jsonl"
    draw = random.Random(0)
    num_between = 0
    like = mlp_state(ADAM)
    for _ in range(tries):
        before = newest(directory)
        program = start(
            directory=directory, log=log, num_steps=10**9, num_microbatches=2
        )
        while newest(directory) <= before + 1 and program.poll() is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.4))
        program.kill()
        program.wait()
        names = os.listdir(directory)
        num_between += any("orbax-checkpoint-tmp" in name for name in names)
        assert len(names) <= 8, f"litter grows: {names}"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the newest, not one before it
            state = rx.restore(directory, like)
        assert int(state.step) == newest(directory) > before, "no progress"
        yield ""
    num_steps = newest(directory) + 5
    options: Any = {"num_steps": num_steps, "num_microbatches": 2}
    (ended,) = finish(start(directory=directory, log=log, **options))
    (expected,) = finish(
        start(directory=base / "whole", log=base / "whole.jsonl", **options)
    )
    assert ended["digest"] == expected["digest"], "the trajectory differs"
    same_rows(log, base / "whole.jsonl")
    yield (
        f"{num_steps} steps in all; {num_between} of the kills between temporary "
        "directory and commit"
    )


small_run = functools.partial(counted, None, num_steps=8)


def damage(change: Callable[[pathlib.Path], None]) -> Callable[..., Iterator[str]]:
    """Each file of the newest checkpoint is changed in turn."""

    def run(base: pathlib.Path, tries: int) -> Iterator[str]:
        expected = small_run(base / "whole", num_steps=14)
        small_run(base / "run")
        files = sorted(
            path for path in (base / "run" / "8").rglob("*") if path.is_file()
        )
        num_refused = 0
        for index in range(min(tries, len(files))):
            directory = shutil.copytree(base / "run", base / f"copy-{index}")
            path = directory / files[index].relative_to(base / "run")
            change(path)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = small_run(directory, num_steps=14)
            assert_same(found, expected)
            told = [
                str(w.message) for w in caught if str(directory / "8") in str(w.message)
            ]
            assert bool(told) == (directory / "8.damaged").exists(), (
                "skipped without a word"
            )
            num_refused += bool(told)
            yield f"{num_refused} named and skipped, the others harmless"
            shutil.rmtree(directory)

    return run


def broken_disk(
    breaking: Callable[[pathlib.Path], Any],
) -> Callable[..., Iterator[str]]:
    """A file system that breaks under way; needs the right to mount. The error reaches
    the caller with the state, and the run goes on when the disk is whole again."""

    def run(base: pathlib.Path, tries: int) -> Iterator[str]:
        expected = small_run(base / "whole")
        for index in range(tries):
            disk = base / str(index)
            disk.mkdir()
            if not mounted(disk, "-t", "tmpfs", "-o", "size=16m", "none"):
                yield "not tried: no right to mount"
                return
            # None is removed, which would make room.
            checkpoints = rx.Checkpoints(disk, every_steps=2, keep_last=None)
            state = None
            try:
                with contextlib.ExitStack() as stack:
                    act = functools.partial(stack.enter_context, breaking(disk))
                    small_run(checkpoints, collate_fn=Collate(3 + index % 5, act))
            except (rx.errors.CheckpointError, OSError) as error:
                state = getattr(error, "state", None)
            try:
                assert state is not None, "nothing was said"
                assert int(state.step) >= 3, "the state is not the last one"
                assert_same(small_run(disk), expected)
            finally:
                subprocess.run(["umount", str(disk)], check=True)
            yield ""

    return run


def mounted(disk: pathlib.Path, *options: str) -> bool:
    return (
        subprocess.run(["mount", *options, str(disk)], capture_output=True).returncode
        == 0
    )


@contextlib.contextmanager
def without_room(disk: pathlib.Path) -> Iterator[None]:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def read_only(disk: pathlib.Path) -> Iterator[None]:
    until = time.monotonic() + 10  # a file may be open for writing, for a moment
    while not mounted(disk, "-o", "remount,ro"):
        assert time.monotonic() < until, "a file is held open for writing"
        time.sleep(0.01)
    try:
        yield
    finally:
        assert mounted(disk, "-o", "remount,rw")


def signals(base: pathlib.Path, tries: int) -> Iterator[str]:
    """SIGTERM and SIGINT in each phase: saved at the next step, the exit code tells,
    resumed exactly."""
    options: Any = {"num_steps": 24, "every_steps": 7, "evaluates": True}
    whole = start(directory=base / "whole", log=base / "whole.jsonl", **options)
    # The first calls are those of the rehearsal; the second trace is that of training.
    places = (("training", 9), ("compilation", 2), ("evaluation", 6), ("prediction", 2))
    term, interrupt = signal.SIGTERM, signal.SIGINT
    numbers = (term, interrupt, interrupt, term, interrupt, term, term, interrupt)
    cases = [(number, *places[i % 4]) for i, number in enumerate(numbers)][:tries]
    logs = [base / f"{number.name}-{where}.jsonl" for number, where, _ in cases]

    def started(case: Any, log: pathlib.Path, is_cut: bool) -> subprocess.Popen[str]:
        number, where, at = case
        fault = {"signal": number, "where": where, "at": at} if is_cut else {}
        return start(directory=log.with_suffix(""), log=log, **fault, **options)

    programs = [started(case, log, True) for case, log in zip(cases, logs, strict=True)]
    (expected,) = finish(whole)
    for case, log, program in zip(cases, logs, programs, strict=True):
        number, where, _ = case
        (cut,) = finish(program, code=128 + number)
        assert newest(log.with_suffix("")) == cut["step"] < 24, (
            f"{where}: not saved at {cut['step']}"
        )
        (ended,) = finish(started(case, log, False))
        assert ended["digest"] == expected["digest"], f"{where}: the trajectory differs"
        same_rows(log, base / "whole.jsonl")
        yield ""


def signals_again(base: pathlib.Path, tries: int) -> Iterator[str]:
    """The same signal twice, as from srun and the batch script: one request, which is
    saved."""
    options: Any = {"num_steps": 24, "every_steps": 7}
    (expected,) = finish(start(directory=base / "whole", **options))
    for index in range(tries):
        directory = base / str(index)
        number = (signal.SIGTERM, signal.SIGINT)[index % 2]
        fault = {
            "signal": number,
            "at": 9 + index,
            "again_after": (0.01, 0.2, 1.0)[index % 3],
        }
        (cut,) = finish(
            start(directory=directory, **fault, **options), code=128 + number
        )
        assert newest(directory) == cut["step"] < 24, f"not saved at {cut['step']}"
        (ended,) = finish(start(directory=directory, **options))
        assert ended["digest"] == expected["digest"], "the trajectory differs"
        yield ""


def hanging_reader(base: pathlib.Path, tries: int) -> Iterator[str]:
    """A signal while `collate_fn` hangs, in the main thread or in another: saved, and
    ended in seconds."""
    options: Any = {"num_steps": 24, "every_steps": 7}
    (expected,) = finish(start(directory=base / "whole", **options))
    for index in range(tries):
        directory = base / str(index)
        number = (signal.SIGTERM, signal.SIGINT)[index // 2 % 2]
        fault = {"signal": number, "at": 9, "hangs": True, "prefetch": 2 * (index % 2)}
        (cut,) = finish(
            start(directory=directory, **fault, **options), code=128 + number
        )
        assert newest(directory) == cut["step"] > 0, f"not saved at {cut['step']}"
        (ended,) = finish(start(directory=directory, **options))
        assert ended["digest"] == expected["digest"], "the trajectory differs"
        yield ""


def layouts(base: pathlib.Path, tries: int) -> Iterator[str]:
    """Saved on any mesh, of one process or two, and restored on any other:
    bit-equal."""
    num_tries = 0
    for source, options in {"2 processes x 4": None, **ALL_MESHES}.items():
        if num_tries == tries:
            return
        directory = base / source
        if options is None:
            finish(*two(directory=directory, num_steps=3))
        else:
            finish(start(directory=directory, num_steps=3, mesh=options))
        first = None
        for name, axes in ALL_MESHES.items():
            arrays = bits(
                to_names(rx.restore(directory, mlp_state(ADAM, rx.make_mesh(**axes))))
            )
            first = first or arrays
            assert arrays == first, f"{source} to {name}"
            num_tries += 1
            yield ""
        finish(*two(directory=directory, num_steps=4))  # and from each the two go on
        yield ""


# name: (fault, tries in full, tries if reduced)
FAULTS: dict[str, tuple[Callable[[pathlib.Path, int], Iterator[str]], int, int]] = {
    "kill -9 at a random instant": (kills, 50, 3),
    "the same, in a directory betas=[0.9,*]": (
        functools.partial(kills, name="betas=[0.9,*]"),
        8,
        1,
    ),
    "a file deleted": (damage(pathlib.Path.unlink), 99, 4),
    "a file cut in half": (
        damage(lambda path: os.truncate(path, path.stat().st_size // 2)),
        99,
        4,
    ),
    "a full disk": (broken_disk(without_room), 10, 1),
    "a disk turned read-only": (broken_disk(read_only), 4, 1),
    "SIGTERM or SIGINT, each phase": (signals, 8, 2),
    "SIGTERM or SIGINT twice": (signals_again, 6, 1),
    "a signal while the reader hangs": (hanging_reader, 4, 2),
    "a different mesh or number of processes": (layouts, 999, 14),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reduced", action="store_true", help="fewer tries")
    parser.add_argument(
        "--tries", type=int, default=999, help="at most so many of each"
    )
    parser.add_argument("--only", default="", help="faults whose name contains this")
    arguments = parser.parse_args()
    print(
        f"{'fault':<42}{'tries':>6}{'survived':>10}{'lost':>6}{'seconds':>9}",
        flush=True,
    )
    num_lost = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # When a save fails, the threads of Orbax and TensorStore print a page of what they
    # also raise.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for name, (fault, in_full, reduced) in FAULTS.items():
        if arguments.only not in name:
            continue
        num_tries = reduced if arguments.reduced else in_full
        began = time.monotonic()
        survived = lost = 0
        note = ""
        with tempfile.TemporaryDirectory() as base:
            try:
                for note in fault(pathlib.Path(base), min(num_tries, arguments.tries)):
                    survived += not note.startswith("not tried")
            except Exception as error:
                traceback.print_exc(file=sys.stdout)
                lost = 1
                note = f"{type(error).__name__}: {error}"
        num_lost += lost
        line = (
            f"{name:<42}{survived + lost:>6}{survived:>10}{lost:>6}"
            f"{time.monotonic() - began:>9.0f}  {note}"
        )
        print(line.rstrip(), flush=True)
    sys.exit(1 if num_lost else 0)


if __name__ == "__main__":
    main()
