"""A SLURM cluster of two nodes on the hosts of `network.TwoHosts`, by Debian's
packages. Needs root."""

import os
import pathlib
import signal
import subprocess
import time

from network import ADDRESSES, TwoHosts, lacking

PACKAGES = "slurmctld slurmd slurm-client munge"

CONFIGURATION = """
ClusterName=redco
SlurmctldHost=n0({addresses[0]})
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdSpoolDir={root}/spool.%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=5
NodeName=n0 NodeAddr={addresses[0]} Port=16818 CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n1 NodeAddr={addresses[1]} Port=16819 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing():
    """Return the missing requirements, as a sentence; empty if there are none."""
    return lacking(
        ("slurmctld", "slurmd", "srun", "munged"), f"--no-install-recommends {PACKAGES}"
    )


class Cluster:
    """While entered, nodes n0 and n1 on the two hosts; everything it writes is under
    one directory."""

    def __init__(self, hosts: TwoHosts, directory: pathlib.Path):
        self._hosts = hosts
        # Short: a socket's path has no more than 107 letters.
        self._root = directory / "slurm"
        self.environment = {"SLURM_CONF": str(self._root / "slurm.conf")}

    def __enter__(self):
        root = self._root
        for name in ("state", "spool.n0", "spool.n1"):
            (root / name).mkdir(parents=True)
        root.chmod(0o755)
        for path in [*root.parents, root]:
            path.chmod(path.stat().st_mode | 0o001) if path != pathlib.Path(
                "/"
            ) else None
        (root / "key").write_bytes(os.urandom(1024))
        (root / "key").chmod(0o600)
        (root / "slurm.conf").write_text(
            CONFIGURATION.format(root=root, addresses=ADDRESSES)
        )
        (root / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
        )
        try:
            files = [
                f"--{name}-file={root}/munged.{name}" for name in ("pid", "log", "seed")
            ]
            self._run(
                [
                    "munged",
                    "--force",
                    f"--key-file={root}/key",
                    f"--socket={root}/munge.socket",
                    *files,
                ]
            )
            self._run(self._hosts.command(0, "slurmctld"))
            self._run(self._hosts.command(0, "slurmd", "-N", "n0"))
            self._run(self._hosts.command(1, "slurmd", "-N", "n1"))
            end = time.monotonic() + 30
            while self.run("sinfo", "-h", "-o", "%D %t").stdout.strip() != "2 idle":
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"the nodes are not idle: {self.run('sinfo').stdout}"
                    )
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in ("slurmd.n0", "slurmd.n1", "slurmctld", "munged"):
            file = self._root / f"{name}.pid"
            if not file.exists() or not file.read_text().strip():
                continue
            pid = int(file.read_text())
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.kill(pid, number)
                    for _ in range(50):
                        os.kill(pid, 0)
                        time.sleep(0.1)
                except ProcessLookupError:
                    break

    def run(self, *command, env=None):
        """Runs `srun` or another of SLURM's commands, from the first node, to its
        end."""
        environment = {**(env or os.environ), **self.environment}
        options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
        return subprocess.run(
            self._hosts.command(0, *command), env=environment, **options
        )

    def _run(self, command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command, env=environment, timeout=60, check=False, **pipes
        )
        if done.returncode:
            raise RuntimeError(
                f"{command[-3:]} ended with {done.returncode}: {done.stdout}"
            )
