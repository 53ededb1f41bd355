"""Starting the processes of a run, waiting for what becomes of them, comparing their
results."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax

PROGRAM = pathlib.Path(__file__).with_name("program.py")
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(*, num_devices, **more):
    """Return the environment of one process: CPU devices, float64, fast compilation."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JAX_", "SLURM_", "XLA_", "OMPI_"))
    }
    fixed = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": num_devices,
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", FAST),
        "PYTHONUNBUFFERED": "",
    }
    return {**kept, **{name: str(value) for name, value in {**fixed, **more}.items()}}


def joined(process, num_processes, address):
    """The variables by which a process on a bare node is told its place."""
    place = {
        "NUM_PROCESSES": num_processes,
        "PROCESS_ID": process,
        "COORDINATOR_ADDRESS": address,
    }
    return {f"JAX_{name}": value for name, value in place.items()}


@dataclasses.dataclass
class Processes:
    """Some started processes, their logs, and since when something has been wrong."""

    workers: list[subprocess.Popen]
    logs: list[pathlib.Path]
    since: float = 0.0

    def wait_for(self, paths, seconds):
        """Until all files are there. Raises if a process ends before."""
        end = time.monotonic() + seconds
        while not all(path.exists() for path in paths):
            ended = [worker.poll() for worker in self.workers]
            if any(code is not None for code in ended) or time.monotonic() > end:
                raise AssertionError(f"exit codes {ended}, not ready\n{self.text()}")
            time.sleep(0.05)

    def wait_for_trouble(self, path, seconds):
        """Until the file is there, or a process has ended: what goes wrong then counts
        from now on."""
        with contextlib.suppress(AssertionError):
            self.wait_for([path], seconds)
        self.since = time.monotonic()

    def signal(self, process, number):
        self.since = time.monotonic()
        self.workers[process].send_signal(number)

    def leave(self, seconds, *, besides=()):
        """Waits until all, but some, have ended; their exit codes, and for each the
        seconds it took."""
        self.since = self.since or time.monotonic()
        waiting = set(range(len(self.workers))) - set(besides)
        took = {}
        while waiting and time.monotonic() - self.since < seconds:
            for i in list(waiting):
                if self.workers[i].poll() is not None:
                    took[i] = time.monotonic() - self.since
                    waiting.remove(i)
            time.sleep(0.02)
        for worker in self.workers:
            worker.kill()  # those that have ended are left alone
        codes = [worker.wait() for worker in self.workers]
        return [None if i in waiting else codes[i] for i in range(len(codes))], took

    def text(self, process=None):
        logs = self.logs if process is None else [self.logs[process]]
        return "\n".join(log.read_text(errors="replace") for log in logs)


def start(commands, environments, out):
    """Starts one process for each command."""
    workers = []
    logs = [out / f"{i}.log" for i in range(len(commands))]
    for command, env, log in zip(commands, environments, logs):
        with log.open("w") as file:
            workers.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
    return Processes(workers, logs)


def start_loopback(
    out, *arguments, program=PROGRAM, num_processes=2, num_devices=4, **more
):
    """A program as two processes of this host, or more."""
    address = f"127.0.0.1:{free_port()}"
    more = {"num_devices": num_devices, **more}
    command = [sys.executable, str(program), str(out), *map(str, arguments)]
    environments = [
        environment(**joined(i, num_processes, address), **more)
        for i in range(num_processes)
    ]
    return start([command] * num_processes, environments, out)


def one_process(out, *arguments):
    """Return the output of the program on one process with eight devices."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PROGRAM), str(out), *map(str, arguments)]
    subprocess.run(command, env=environment(num_devices=8), check=True, timeout=600)
    return json.loads((out / "result.0.json").read_text())


def results(out):
    return [json.loads((out / f"result.{i}.json").read_text()) for i in range(2)]


def compare(found, expected):
    """`{mesh: largest difference}`; every process has all results, process 0 alone the
    logged rows."""
    worst = {}
    for mesh in expected:
        for process, result in enumerate(found):
            wanted = dict(expected[mesh])
            if process:
                wanted["rows"] = []
            # Structures of numbers, which must be alike otherwise.
            differences = jax.tree.map(lambda x, y: abs(x - y), result[mesh], wanted)
            worst[mesh] = max([worst.get(mesh, 0.0), *jax.tree.leaves(differences)])
    return worst
