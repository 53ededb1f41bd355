"""One of the processes of `test_process_group.py`: it agrees with the others, and then
one has a fault.

Its arguments are a directory, the number of the process that fails, and the line that
makes it fail.
"""

import io
import itertools
import os
import pathlib
import re
import signal  # noqa: F401  a fault uses it
import sys
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

import redco_eqx as rx
from redco_eqx._distributed.cluster import coordination_client
from redco_eqx._distributed.consensus import (
    _NUM_KEPT,
    Vote,
    agree,
    from_all,
    from_first,
    together,
)
from redco_eqx._distributed.process_group import end_process, process_names  # noqa: F401  a fault uses it


class Slow(io.RawIOBase):
    def flush(self):
        time.sleep(0.8)


def close_stderr():
    _, pipe = os.pipe()
    os.set_blocking(pipe, False)
    try:
        while os.write(pipe, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(pipe, True)
    os.dup2(pipe, 2)


rx.initialize_distributed(leave_seconds=1.0)
me, number = jax.process_index(), jax.process_count()


def fail(*processes):
    if me in processes:
        raise OSError(f"no disk on {me}")
    return me


def barrier():
    """Waits without a number of its own, so that the calls of `agree` keep theirs."""
    multihost_utils.sync_global_devices("barrier")


def error(act, *arguments, **options):
    try:
        return act(*arguments, **options)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


assert from_all({"of": "ä" * me}) == [
    {"of": "ä" * process} for process in range(number)
]
assert from_first(lambda: [me, "x", None]) == [0, "x", None]
assert error(lambda: from_first(lambda: fail(1))) == 0
said = error(lambda: from_first(lambda: fail(0)))
assert (
    said
    == ("" if me == 0 else "RuntimeError: on process 0: ") + "OSError: no disk on 0"
), said
said = error(lambda: from_first(lambda: {1, 2}))  # no JSON
assert "not JSON serializable" in said, said
assert together(fail, OSError) == me
said = error(lambda: together(lambda: fail(1, 2), OSError))
expected = f"no disk on {me}" if me in (1, 2) else "on process 1: OSError: no disk on 1"
assert said == f"OSError: {expected}", said
mesh = rx.make_mesh()
names = process_names()
vote = Vote(mesh)
answers = [vote(step * (me == 1), me) for step in range(1, 6)]
assert answers == [None, None, *((step, number - 1) for step in (1, 2, 3))], answers

# One process, the first or another, calls `agree` with something else. Each is compared
# with the first: the later one of two names the first difference, or both do if they
# wait.
FACTS = {"batch_size": "8", "the order": "[1, 0]", "loss_fn": "a"}
UNLIKE: list[Any] = [
    (
        "fit",
        {**FACTS, "the order": "[0, 1]", "loss_fn": "b"},
        "fit: the order is ",
        "[1, 0]",
        "[0, 1]",
    ),
    (
        "fit",
        {"batch_size": "8", "loss_fn": "a"},
        "fit: the order is ",
        "[1, 0]",
        "missing",
    ),
    ("fit", {**FACTS, "z": "1"}, "fit: z is ", "missing", "1"),
    ("evaluate", FACTS, "", "fit", "evaluate"),
    ("fit", FACTS, "", "", ""),
]
for (*other, start, usual, unusual), odd in itertools.product(UNLIKE, (0, 1)):
    call = other if me == odd else ("fit", FACTS)
    values = [unusual if process == odd else usual for process in range(number)]
    for order in (range(number), range(number)[::-1], ()):
        said = ""
        known = range(number)
        if not order:
            said = str(error(agree, mesh, *call))
        for process in order:
            if process == me:
                said = str(error(agree, mesh, *call, wait=False))
                known = order[: order.index(me)]
            barrier()
        pairs = [
            sorted((me, i))
            for i in known
            if i != me and 0 in (me, i) and odd in (me, i) and start + unusual
        ]
        expected = [
            f"ValueError: {re.escape(start + values[i])}( has been reached)? "
            f"on {re.escape(names[i])}, "
            rf"but {re.escape(values[j])} on {re.escape(names[j])}\. Each process must"
            for i, j in pairs
        ]
        found = [re.match(pattern, said) for pattern in expected]
        assert any(found) if expected else said == "None", (order, said, expected)

# The first process waits for all, each of the others for the first.
called = pathlib.Path(sys.argv[1]) / "called"
if me == 1:
    time.sleep(0.5)
    called.touch()
agree(mesh, "waiting", {})
assert me or called.exists()

# The store does not grow. A slow process is compared with what is still known.
last = 3 * _NUM_KEPT
said = ""
for process in range(number):
    for i in range(last + 1 if process == me else 0):
        facts = {"x": "1" if (me, i) == (1, last) else "0"}
        said = str(error(agree, mesh, f"call {i}", facts, wait=False))
    barrier()
assert said.startswith(
    f"ValueError: call {last}: x is 0 on process 0 " if me == 1 else "None"
), said
assert (
    len(coordination_client().key_value_dir_get("redco_eqx/agreement"))
    <= 2 * _NUM_KEPT * number
)

file = (pathlib.Path(sys.argv[1]) / f"{me}.txt").open("w")
file.write("not flushed")
if me == 2:
    slow = Slow()
if me == 3:
    close_stderr()
if me == int(sys.argv[2]):
    exec(sys.argv[3])
time.sleep(60)
