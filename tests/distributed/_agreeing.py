"""One of the processes of `test_process_group.py`: it agrees with the others, and then one has a fault.

Its arguments are a directory, the number of the process that fails, and the line that makes it fail.
"""

import io
import os
import pathlib
import signal  # noqa: F401  a fault uses it
import sys
import time

import jax

import redco_eqx as rx
from redco_eqx._distributed.consensus import Vote, from_all, from_first, together


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


def error(act):
    try:
        return act()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


assert from_all({"of": "ä" * me}) == [{"of": "ä" * process} for process in range(number)]
assert from_first(lambda: [me, "x", None]) == [0, "x", None]
assert error(lambda: from_first(lambda: fail(1))) == 0
said = error(lambda: from_first(lambda: fail(0)))
assert said == ("" if me == 0 else "RuntimeError: on process 0: ") + "OSError: no disk on 0", said
said = error(lambda: from_first(lambda: {1, 2}))  # no JSON
assert "not JSON serializable" in said, said
assert together(fail, OSError) == me
said = error(lambda: together(lambda: fail(1, 2), OSError))
expected = f"no disk on {me}" if me in (1, 2) else "on process 1: OSError: no disk on 1"
assert said == f"OSError: {expected}", said
vote = Vote(rx.make_mesh())
answers = [vote(step * (me == 1), me) for step in range(1, 6)]
assert answers == [None, None, *((step, number - 1) for step in (1, 2, 3))], answers

file = (pathlib.Path(sys.argv[1]) / f"{me}.txt").open("w")
file.write("not flushed")
if me == 2:
    slow = Slow()
if me == 3:
    close_stderr()
if me == int(sys.argv[2]):
    exec(sys.argv[3])
time.sleep(60)
