"""Train in several processes on this machine with XManager's local executor, without
Docker.

    xmanager launch examples/launch/xmanager_local.py -- --num_processes=2 \\
        --arguments="--tensor 2"

XManager needs its own environment (`uv venv && uv pip install xmanager`), because its
pinned versions conflict with those of other packages. `--python` is the interpreter of
the environment with `redco_eqx`.
"""

import pathlib
import shlex
import socket

from absl import app, flags
from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]

_PYTHON = flags.DEFINE_string("python", "python", "Interpreter that has redco_eqx.")
_SCRIPT = flags.DEFINE_string(
    "script", str(pathlib.Path(__file__).with_name("train.py")), "What to run."
)
_ARGUMENTS = flags.DEFINE_string("arguments", "", "Arguments of the script.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 2, "How many processes.")


def main(_):
    """Add one job per process, all in one group, which is one work unit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with xm_local.create_experiment(experiment_title="redco_eqx") as experiment:
        # Run an existing program, with the script as its first argument.
        spec = xm.Binary(path=_PYTHON.value)
        [executable] = experiment.package([xm.Packageable(spec, xm_local.Local.Spec())])
        jobs = {
            f"process_{i}": xm.Job(
                executable,
                executor=xm_local.Local(),
                args=xm.SequentialArgs.from_collection(
                    [_SCRIPT.value, *shlex.split(_ARGUMENTS.value)]
                ),
                env_vars={
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(_NUM_PROCESSES.value),
                    "JAX_PROCESS_ID": str(i),
                },
            )
            for i in range(_NUM_PROCESSES.value)
        }
        experiment.add(xm.JobGroup(**jobs))


if __name__ == "__main__":
    app.run(main)
