"""Joining the processes of a run on many hosts, or failing soon and with a reason."""

import os
import socket
import warnings
from collections.abc import Sequence

import jax

from redco_eqx._distributed import store
from redco_eqx._distributed.cluster import Launch, find_launch, is_loopback
from redco_eqx._distributed.failure import Leaving, say
from redco_eqx._distributed.heartbeat import watch_coordinator, watch_processes
from redco_eqx._distributed.jax_internals import has_devices
from redco_eqx._distributed.rendezvous import meet


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout_seconds: int = 120,
    heartbeat_timeout_seconds: int = 30,
    shutdown_timeout_seconds: int = 300,
    leave_seconds: float = 5.0,
) -> None:
    """Joins the processes of a run, each of which calls this before it uses JAX otherwise.

    Nothing else in a script changes. Under SLURM (`srun`), Open MPI, Kubernetes and on TPU pods no
    argument is needed: JAX finds them. Elsewhere each process is told by arguments or by the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, which come after arguments
    and before what is found. With one process, or where nothing says that there are more, it does nothing.

    **Main arguments:**

    - `coordinator_address`: `"host:port"` of process 0, which opens that port and one more that is free.
    - `num_processes`: how many there are.
    - `process_id`: which one this is, from 0.

    **Other arguments:**

    - `local_device_ids`: the numbers of the host's devices that this process uses; also
        `JAX_LOCAL_DEVICE_IDS`. By default all, and where the launcher starts several tasks on a node, each
        its part.
    - `timeout_seconds`: how long to wait for the others to come.
    - `heartbeat_timeout_seconds`: after how long a process that is frozen, or whose host is gone, counts
        as lost.
    - `shutdown_timeout_seconds`: how long a process that is done waits for the others to be done.
    - `leave_seconds`: after an uncaught exception in any process, or the loss of one, all have ended
        after this time and three seconds.

    The process that fails is named on the standard error of each. Files are flushed; functions that were
    registered with `atexit` before this call are not called then. What ends without an exception
    (`sys.exit`) counts as done, not as failed.

    **Raises:**

    - `ValueError`, `TypeError`: the arguments do not fit together, or those of two processes do not.
    - `RuntimeError`: called twice, or after JAX was used; a SLURM batch script without `srun`; a host that
        takes its own name for a loopback address, so that the others could not reach it.
    - `TimeoutError`: process 0 does not answer, or others did not come to it; it says which.
    - `OSError`: on process 0, the port is taken.
    """
    for name, value in (
        ("timeout_seconds", timeout_seconds),
        ("heartbeat_timeout_seconds", heartbeat_timeout_seconds),
        ("shutdown_timeout_seconds", shutdown_timeout_seconds),
        ("leave_seconds", leave_seconds),
    ):
        if value <= 0:
            raise ValueError(f"initialize_distributed: {name}={value}, but it must be positive.")
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize_distributed: the processes have joined already. Call it once.")
    launch = find_launch(coordinator_address, num_processes, process_id, local_device_ids, timeout_seconds)
    if launch is None:
        return
    if has_devices():
        raise RuntimeError(
            "initialize_distributed: JAX has been used already (an array, jax.devices(), ...), and its "
            f"devices are those of one process, not of {launch.num_processes}. Call it first of all."
        )
    meet(launch, timeout_seconds)
    jax.distributed.initialize(
        launch.coordinator_address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=launch.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    store.introduce(launch.process_id)
    if launch.process_id != 0:
        store.wait("process/0", timeout_seconds)
    leaving = Leaving(launch.process_id, launch.num_processes, leave_seconds)
    leaving.start()
    # A little before JAX aborts for the same reason, with a message that names no host.
    probe = 0.5 * heartbeat_timeout_seconds
    if launch.process_id == 0:
        leaving.before_exit(watch_processes(leaving.lost, leaving.silent, probe_seconds=probe))
    else:
        try:
            done = watch_coordinator(
                launch.host,
                launch.process_id,
                leaving.lost,
                leaving.silent,
                probe_seconds=probe,
                timeout_seconds=10,
            )
            leaving.before_exit(done)
        except OSError as error:
            say(f"no connection to watch process 0 by ({error}); if it is lost, heartbeats will tell.")
    _check_own_address(launch)


def _check_own_address(launch: Launch) -> None:
    """Refuses a hosts file that gives this host's name a loopback address, where there are other hosts.

    On CPU each process tells the others to connect to what its own host name resolves to; a line such as
    `127.0.1.1 myhost`, which Debian writes, has them wait for themselves.
    """
    own, name = _network(), socket.gethostname()
    store.put(f"network/{launch.process_id}", own)
    others = [0] if launch.process_id else range(1, launch.num_processes)
    if all(store.wait(f"network/{other}", 60) == own for other in others):
        return
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = ""
    if address and not is_loopback(address):
        return
    found = f"resolves to {address}, which other hosts cannot reach" if address else "does not resolve"
    message = (
        f"initialize_distributed: the name of this host, {name!r}, {found}. On CPU the processes would wait "
        f"for each other in vain. Give {name} its address in the network in /etc/hosts (Debian writes "
        f"`127.0.1.1 {name}` there)."
    )
    if _platform() == "cpu":
        raise RuntimeError(message)
    warnings.warn(f"{message} On GPU and TPU this does not matter.", stacklevel=3)


def _platform() -> str:
    """The one that was asked for, and nothing where the choice is JAX's; asking JAX would use its devices."""
    return (jax.config.jax_platforms or "").split(",")[0]  # pyright: ignore[reportAttributeAccessIssue]


def _network() -> str:
    """Names the network stack of this process: equal for processes that share loopback addresses."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
