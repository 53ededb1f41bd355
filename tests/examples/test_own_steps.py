"""A run with a step of the user's own is killed, and goes on to the bit."""

import pathlib
import signal

import own_steps
import pytest
from fit_helpers import assert_identical, python

import redco_eqx as rx

KILLED = """
import sys
sys.path.extend(sys.argv[3:])
import jax
jax.config.update("jax_num_cpu_devices", 8)
import own_steps
own_steps.run(sys.argv[1], sys.argv[2], killed=True)
"""
ROOT = pathlib.Path(__file__).parents[2]
PATH = (ROOT / "tests" / "examples", ROOT / "examples")


@pytest.mark.parametrize("kind", list(own_steps.RUNS))
def test_a_killed_run_ends_as_the_whole_run(kind: str, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "checkpoints"
    with python(KILLED, kind, directory, *PATH) as child:
        _, errors = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL, errors[-2000:]
    saved = rx.list_checkpoints(directory)
    assert 0 < saved[-1].step < own_steps.NUM_STEPS
    resumed = own_steps.run(kind, directory)
    assert_identical(resumed, own_steps.run(kind, None))
