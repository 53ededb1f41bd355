"""A fact or a failure of one process is known to all."""

import sys

from hosts import harness

from redco_eqx._distributed.consensus import from_all, from_first, together

SCRIPT = """
import jax
import redco_eqx as rx
from redco_eqx._distributed.consensus import Vote, from_all, from_first, together

rx.initialize_distributed(leave_seconds=1.0)
me = jax.process_index()

def fail(*processes):
    if me in processes:
        raise OSError(f"no disk on {me}")
    return me

def error(act):
    try:
        return act()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

assert from_all({"of": "ä" * me}) == [{"of": "ä" * process} for process in range(3)]
assert from_first(lambda: [me, "x", None]) == [0, "x", None]
assert error(lambda: from_first(lambda: fail(1))) == 0
said = error(lambda: from_first(lambda: fail(0)))
assert said == ("" if me == 0 else "RuntimeError: on process 0: ") + "OSError: no disk on 0", said
said = error(lambda: from_first(lambda: {1, 2}))  # no JSON
assert "not JSON serializable" in said, said
assert together(fail, OSError) == me
said = error(lambda: together(lambda: fail(1, 2), OSError))
expected = f"no disk on {me}" if me else "on process 1: OSError: no disk on 1"
assert said == f"OSError: {expected}", said

vote = Vote(rx.make_mesh())
answers = [vote(step * (me == 1), me) for step in range(1, 6)]
assert answers == [None, None, (1, 2), (2, 2), (3, 2)], answers
"""


def test_three_processes(tmp_path):
    address = f"127.0.0.1:{harness.free_port()}"
    environments = [harness.environment(num_devices=1, **harness.joined(i, 3, address)) for i in range(3)]
    processes = harness.start([[sys.executable, "-c", SCRIPT]] * 3, environments, tmp_path)
    codes, _ = processes.leave(120)
    assert codes == [0, 0, 0], processes.text()


def test_one_process_is_asked_alone():
    assert from_all((1, 2)) == [(1, 2)]
    assert from_first(lambda: (1, 2)) == (1, 2)
    assert together(lambda: (1, 2), OSError) == (1, 2)
