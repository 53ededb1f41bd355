"""`nox -s hosts`: really several processes, hosts and launchers; a table of what became
of each.

    python tests/hosts/run.py [PART ...]     namespaces nodes slurm xmanager faults

FAULT=name, in the environment, runs only the faults whose names contain it.

A part whose tools are not there is reported, and fails.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback

import cluster
import harness
import network
import program

REPOSITORY = pathlib.Path(__file__).parents[2]
TRAIN = REPOSITORY / "examples/launch/train.py"
TOLERANCE = 1e-12  # float64, SGD: what differs is the order of sums
SOME = ["microbatches", "tensor8"]
ARGUMENTS = ["--tensor", "2", "--epochs", "1"]  # of train.py

rows = []


def row(part, what, outcome, ok):
    rows.append((part, what, outcome, ok))
    print(
        f"{'ok    ' if ok else 'FAILED'}  {part:<12} {what:<44} {outcome}", flush=True
    )


class Session:
    """Directories for the runs, and the results of one process, computed once."""

    def __init__(self, root):
        self.root = root
        self._expected = {}

    def directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.root))

    def expected(self, names):
        new = [name for name in names if name not in self._expected]
        if new:
            self._expected |= harness.one_process(self.directory(), "equal", *new)
        return {name: self._expected[name] for name in names}

    def check_equal(self, part, what, processes, out, names):
        """Waits for a run of the program's `equal`, and compares it with one
        process."""
        codes, _ = processes.leave(400)
        if any(codes):
            print(processes.text()[-3000:])
            row(part, what, f"exit codes {codes}", False)
            return
        for name, difference in harness.compare(
            harness.results(out), self.expected(names)
        ).items():
            row(
                part,
                f"{what}: {name}",
                f"differs by {difference:.0e}",
                difference < TOLERANCE,
            )


# Launchers


def start_on_hosts(hosts, out, *arguments, num_devices=4):
    """The program, once on each host."""
    places = [harness.joined(i, 2, f"{network.ADDRESSES[0]}:9876") for i in range(2)]
    commands = [
        hosts.command(i, sys.executable, harness.PROGRAM, out, *arguments)
        for i in range(2)
    ]
    return harness.start(
        commands,
        [harness.environment(num_devices=num_devices, **x) for x in places],
        out,
    )


def namespaces(session):
    if reason := network.missing():
        return row("namespaces", "two hosts", reason, False)
    out = session.directory()
    every = list(program.MESHES)
    with network.TwoHosts(out) as hosts:
        session.check_equal(
            "namespaces",
            "two hosts",
            start_on_hosts(hosts, out, "equal", *every),
            out,
            every,
        )
        for host in range(2):
            out = session.directory()
            hosts.write_hosts_files(wrong=host)
            processes = start_on_hosts(hosts, out, "equal", *SOME)
            codes, took = processes.leave(60)
            name = hosts.names[host]
            message = (
                rf"host {name}, pid \d+\): the name of this host resolves to 127.0.1.1"
            )
            said = all(re.search(message, processes.text(i)) for i in range(2))
            outcome = (
                f"codes {codes}, {max(took.values(), default=0):.0f} s from start, "
                f"both told: {said}"
            )
            row(
                "namespaces",
                f"127.0.1.1 {name} in its hosts file",
                outcome,
                codes == [1, 1] and said,
            )


def train_line(text):
    """Return the line that `train.py` prints at its end, without the number of
    processes."""
    found = re.search(r"(\d+) processes, (\d+ devices: .*)", text)
    return (int(found[1]), found[2]) if found else (0, "nothing")


def output(command, num_devices=2, **more):
    """The exit code of a command, and what it printed."""
    env = harness.environment(num_devices=num_devices, **more)
    pipe, into = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(
        command, env=env, text=True, timeout=300, check=False, stdout=pipe, stderr=into
    )
    return done.returncode, done.stdout


def check_train(session, part, what, code, text):
    if "train" not in session._expected:
        _, alone = output([sys.executable, TRAIN, *ARGUMENTS], num_devices=4)
        session._expected["train"] = (2, train_line(alone)[1])
    ok = code == 0 and train_line(text) == session._expected["train"]
    row(
        part,
        what,
        "same numbers as one process" if ok else f"{code}: {text[-2000:]}",
        ok,
    )


def nodes(session):
    """`nodes.sh` with a stand-in for ssh that enters the namespace of the host."""
    if reason := network.missing():
        return row("nodes.sh", "train.py", reason, False)
    out = session.directory()
    with network.TwoHosts(out) as hosts:
        ssh = out / "ssh"
        lines = ["#!/bin/bash", 'case "$1" in']
        for i, address in enumerate(network.ADDRESSES):
            words = " ".join(f"'{word}'" for word in hosts.command(i, "bash", "-c"))
            lines.append(f'{address}) shift; exec {words} "$*" ;;')
        ssh.write_text("\n".join([*lines, "esac", ""]))
        ssh.chmod(0o755)
        command = [
            TRAIN.with_name("nodes.sh"),
            *network.ADDRESSES,
            "--",
            sys.executable,
            TRAIN,
            *ARGUMENTS,
        ]
        check_train(
            session, "nodes.sh", "train.py on two hosts", *output(command, SSH=ssh)
        )


def slurm(session):
    if reason := network.missing() or cluster.missing():
        return row("slurm", "two nodes", reason, False)
    out = session.directory()
    with network.TwoHosts(out) as hosts, cluster.Cluster(hosts, out) as slurm:
        version = slurm.run("srun", "--version").stdout.strip()
        for options in (["-N2", "-n2"], ["-N1", "-n2"]):
            out = session.directory()
            program = (sys.executable, harness.PROGRAM, out, "equal", *SOME)
            command = hosts.command(0, "srun", *options, *program)
            env = {**harness.environment(num_devices=4), **slurm.environment}
            processes = harness.start([command], [env], out)
            session.check_equal(
                "slurm", f"srun {' '.join(options)} ({version})", processes, out, SOME
            )
        log = session.directory() / "log"
        env = {
            **harness.environment(num_devices=2),
            "PYTHON": sys.executable,
            "SCRIPT": str(TRAIN),
        }
        script = TRAIN.with_name("slurm.sh")
        done = slurm.run(
            "sbatch", "--wait", f"--output={log}", script, *ARGUMENTS, env=env
        )
        text = log.read_text() if log.exists() else done.stderr
        check_train(
            session,
            "slurm",
            "sbatch slurm.sh, one task per node",
            done.returncode,
            text,
        )
        script = session.directory() / "batch.sh"
        script.write_text(f"#!/bin/bash\nexec {sys.executable} {TRAIN}\n")
        log = script.with_name("log")
        done = slurm.run(
            "sbatch", "--wait", "-N2", "-n2", f"--output={log}", script, env=env
        )
        said = "not started by srun" in log.read_text()
        outcome = f"code {done.returncode}, told so: {said}"
        row("slurm", "sbatch without srun", outcome, bool(done.returncode) and said)


def xmanager(session):
    uv = shutil.which("uv") or str(pathlib.Path(sys.executable).with_name("uv"))
    if not pathlib.Path(uv).exists():
        return row("xmanager", "local executor", "uv not found (pip install uv)", False)
    out = session.directory()
    home = pathlib.Path(os.environ.get("REDCO_XMANAGER") or out / "xmanager")
    if not home.exists():
        for command in (
            [uv, "venv", "-q", "--python", sys.executable, home],
            [
                uv,
                "pip",
                "install",
                "-q",
                "--python",
                home / "bin/python",
                "xmanager==0.8.5",
            ],
        ):
            subprocess.run(command, check=True, timeout=600)
    arguments = [f"--python={sys.executable}", f"--arguments={' '.join(ARGUMENTS)}"]
    command = [
        home / "bin/xmanager",
        "launch",
        TRAIN.with_name("xmanager_local.py"),
        "--",
        *arguments,
    ]
    check_train(session, "xmanager", "local executor", *output(command, HOME=out))


# Faults


ABORTED = (1, -6)  # by us, or by JAX, which may be faster
KILLED = (-9,)
FROZEN = None
UNREACHED = "is lost|JAX distributed service detected fatal errors"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and its expected effect.

    - `fault`, `process`: the kind and the place; the program causes it, or else
        `signal` is sent to the process, or the link between two hosts goes down.
    - `message`: text in the log of each process that can still write.
    - `codes`: the possible exit codes.
    - `at_most`: the seconds within which all processes have left.
    """

    fault: str
    process: int
    message: str
    codes: tuple = ((1,), (1,))
    at_most: float = 7  # leave_seconds = 3, and what Python needs on a busy machine
    signal: int | None = None


FAULTS = (
    Fault("raise", 1, "KeyError: 'no such column'"),
    Fault("raise", 0, "KeyError: 'no such column'"),
    Fault("fewer", 1, r"len\(train_examples\) is"),
    Fault("learning rate", 1, "what optimizer computes is", at_most=15),
    Fault("model key", 1, "init_model: key is", at_most=15),
    Fault("key", 1, "the key of the state is", at_most=15),
    Fault(
        "weights", 1, "init_model: the checksum of make_model's program is", at_most=15
    ),
    Fault("loss", 1, "what loss_fn computes is", at_most=15),
    Fault("examples", 1, r"train_examples\[0\] is", at_most=15),
    Fault("order", 1, r"train_examples\[3\] is", at_most=15),
    Fault("collate", 1, "collate_fn's weight is", at_most=15),
    Fault("steps", 1, "num_steps=79", at_most=15),
    Fault("drift", 1, rf"{program.LAST_BIAS} should be the same", at_most=15),
    Fault("directory", 1, "is not the directory that process 0 writes to", at_most=17),
    Fault(
        "shape", 1, r"mask is float32\[rows, 5\], but was float32\[rows, 4\] in batch"
    ),
    Fault("stuck", 1, "no step has finished for 5 s", at_most=15),
    Fault("random rows", 1, r"the rows of weight have the checksum", at_most=15),
    Fault(
        "exit",
        1,
        r"waits in fit .* for process 1 .* has ended \(SystemExit: 1\)",
        at_most=20,
    ),
    Fault(
        "evaluates", 1, r"but evaluate on process 1 .* first is at fit \(", at_most=15
    ),
    Fault("evaluates", 0, "evaluate has been reached on process 0", at_most=15),
    Fault(
        "ends", 1, r"waits in evaluate .* for process 1 .*, which has ended", at_most=40
    ),
    Fault("forks", 1, "process 1 .* is lost", ((1,), KILLED)),
    Fault("kill -9", 1, "is lost", ((1,), KILLED), signal=signal.SIGKILL),
    Fault("kill -9", 0, "is lost", (KILLED, ABORTED), signal=signal.SIGKILL),
    Fault("SIGSTOP", 1, r"unhealthy .*:\n1\n", (ABORTED, FROZEN), 17, signal.SIGSTOP),
    Fault("SIGSTOP", 0, UNREACHED, (FROZEN, ABORTED), 17, signal.SIGSTOP),
    Fault("SIGTERM", 1, "", ((143,), (143,)), signal=signal.SIGTERM),
    Fault("link down", 1, UNREACHED, (ABORTED, ABORTED), 17),
)


def faults(session):
    """Times are from the moment of the fault until the last process has left; then all
    start again."""
    chosen = os.environ.get("FAULT", "")
    out = session.directory()
    processes = harness.start_loopback(out, "finish", 0, num_devices=2)
    codes, _ = processes.leave(200)
    if any(codes):
        print(processes.text())
        return row("faults", "none", f"exit codes {codes}", False)
    whole = harness.results(out)
    for fault in FAULTS:
        if chosen in fault.fault:
            run_fault(session, fault, whole)
    if chosen not in "no coordinator":
        return
    out = session.directory()
    place = harness.joined(1, 2, f"127.0.0.1:{harness.free_port()}")
    env = harness.environment(num_devices=2, **place, REDCO_TIMEOUT="5")
    processes = harness.start(
        [[sys.executable, harness.PROGRAM, out, "equal"]], [env], out
    )
    codes, took = processes.leave(60)
    named = "has no answer from process 0 at 127.0.0.1" in processes.text()
    outcome = f"{took.get(0, 99):.0f} s from start, codes {codes}, named: {named}"
    row("faults", "no coordinator (time-out 5 s)", outcome, codes == [1] and named)


def run_fault(session, fault, whole):
    what = f"{fault.fault}, process {fault.process}"
    out = session.directory()
    checkpoints = out / "checkpoints"
    with contextlib.ExitStack() as stack:
        if fault.fault == "link down":
            if reason := network.missing():
                return row("faults", what, reason, False)
            hosts = stack.enter_context(network.TwoHosts(out))
            processes = start_on_hosts(
                hosts, out, "none", "1", checkpoints, num_devices=2
            )
            processes.wait_for([out / f"ready.{i}" for i in range(2)], 150)
            hosts.set_link(False)
        else:
            processes = harness.start_loopback(
                out, fault.fault, fault.process, checkpoints, num_devices=2
            )
            if fault.signal is None:
                processes.wait_for_trouble(out / f"ready.{fault.process}", 150)
            else:
                processes.wait_for([out / f"ready.{i}" for i in range(2)], 150)
                processes.signal(fault.process, fault.signal)
        frozen = [i for i, allowed in enumerate(fault.codes) if allowed is FROZEN]
        codes, took = processes.leave(max(60, 2 * fault.at_most), besides=frozen)
    fits = all(
        allowed is FROZEN or code in allowed
        for code, allowed in zip(codes, fault.codes)
    )
    speaking = [
        i for i, allowed in enumerate(fault.codes) if allowed not in (FROZEN, KILLED)
    ]
    named = all(re.search(fault.message, processes.text(i)) for i in speaking)
    seconds = max(took.values(), default=float("inf"))
    again = session.directory()
    restart = harness.start_loopback(again, "finish", 0, checkpoints, num_devices=2)
    restarted, _ = restart.leave(200)
    resumed = restarted == [0, 0] and harness.results(again) == whole
    outcome = (
        f"{seconds:.1f} s (at most {fault.at_most}), codes {codes}, named: {named}, "
        f"resumed: {resumed}"
    )
    ok = fits and named and seconds <= fault.at_most and resumed
    row("faults", what, outcome, ok)
    if not ok:
        print(processes.text()[-4000:], "AGAIN", restart.text()[-3000:])


PARTS = {part.__name__: part for part in (namespaces, nodes, slurm, xmanager, faults)}


def main():
    names = sys.argv[1:] or list(PARTS)
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="rx", dir="/tmp") as directory:
        session = Session(pathlib.Path(directory))
        for name in names:
            try:
                PARTS[name](session)
            except Exception as error:
                traceback.print_exc()
                row(name, "", f"{type(error).__name__}: {error}"[:500], False)
    print(f"\n{'part':<12} {'what':<58} outcome")
    for part, what, outcome, ok in rows:
        print(f"{part:<12} {what:<58} {'' if ok else 'FAILED: '}{outcome[:120]}")
    print(
        json.dumps(
            {
                "passed": sum(ok for *_, ok in rows),
                "failed": sum(not ok for *_, ok in rows),
            }
        )
    )
    sys.exit(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    main()
