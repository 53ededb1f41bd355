"""Forked children leave to their parent what belongs to it: its directory, its
checkpoints, its connections."""

import json
import pathlib

import pytest
from fit_helpers import python

FORKING = """
import json, os, pathlib, sys, warnings, weakref
warnings.simplefilter("ignore")  # JAX warns of each fork
import fit_helpers as tiny
import redco_eqx as rx

directory, way, exit = pathlib.Path(sys.argv[1]), *sys.argv[2:]
EXITS = {
    "error": "raise ValueError()",
    "sys.exit": "sys.exit(3)",
    "Ctrl-C": "raise KeyboardInterrupt",
}
parent, seen = os.getpid(), []

def fork():
    child = os.fork()
    if child == 0:
        if exit == "save":
            try:
                writer.save(state)
            finally:
                os._exit(len(list(directory.glob("[0-9]*"))))
        exec(EXITS[exit])
    _, status = os.waitpid(child, 0)
    files = sorted(x.name for x in directory.iterdir())
    seen.append([os.waitstatus_to_exitcode(status), files])

def collate(examples):
    if way == "collate_fn" and os.getpid() == parent:
        if len(seen) == 0 and len(examples) == 4:
            fork()
    return tiny.collate(examples)

def hook(run, row, state):
    if way == "hook" and run.step == 3:
        fork()

state = tiny.linear_state()
try:
    if way == "writer":
        with rx.Checkpoints(directory).open() as writer:
            fork()
    else:
        options = {"hook": hook, "log_every": 1, "num_steps": 5, "collate_fn": collate}
        tiny.counted(state, rx.Checkpoints(directory, every_steps=2), **options)
except BaseException:
    if os.getpid() != parent:
        # As Python does at its end, where JAX does not survive a fork.
        weakref.finalize._exitfunc()
        os._exit(7)
    raise
print(json.dumps([seen, sorted(x.name for x in directory.iterdir())]))
"""


@pytest.mark.parametrize(
    ("way", "exit"),
    [
        ("hook", "error"),
        ("hook", "sys.exit"),
        ("hook", "Ctrl-C"),
        ("collate_fn", "error"),
        ("writer", "sys.exit"),
    ],
)
def test_a_child_that_leaves_through_fit_leaves_the_directory_to_its_parent(
    way: str, exit: str, tmp_path: pathlib.Path
) -> None:
    child = python(FORKING, tmp_path / "run", way, exit, env={"JAX_PLATFORMS": "cpu"})
    out, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    [[code, during]], after = json.loads(out.splitlines()[-1])
    assert code == 7
    assert "owner.json" in during
    assert "owner.json" not in after
    assert [x for x in after if x.isdigit()] == ([] if way == "writer" else ["4", "5"])


def test_a_child_saves_nothing_in_the_directory_of_its_parent(
    tmp_path: pathlib.Path,
) -> None:
    child = python(
        FORKING, tmp_path / "run", "writer", "save", env={"JAX_PLATFORMS": "cpu"}
    )
    out, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    [[num_saved, during]], _ = json.loads(out.splitlines()[-1])
    assert num_saved == 0
    assert during == ["owner.json"]
