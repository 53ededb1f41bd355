"""Joining the processes of a run on many hosts, or failing soon and with a reason."""

from collections.abc import Sequence

import jax

from redco_eqx._distributed.cluster import find_launch
from redco_eqx._distributed.jax_internals import has_devices
from redco_eqx._distributed.process_group import ProcessGroup
from redco_eqx._distributed.rendezvous import rendezvous


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

    ```python
    rx.initialize_distributed()      # on one machine it does nothing
    mesh = rx.make_mesh(fsdp=8)      # of the devices of all processes
    ```

    **Main arguments:**

    - `coordinator_address`: `"host:port"` of process 0, which opens that port.
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
    # The platform that was asked for; empty where the choice is JAX's.
    platform = (jax.config.jax_platforms or "").split(",")[0]  # pyright: ignore[reportAttributeAccessIssue]
    names, connections = rendezvous(launch, timeout_seconds, platform)
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
    # A process is named before JAX aborts for the same reason, with a message that names no host.
    group = ProcessGroup(
        launch.process_id,
        names,
        connections,
        leave_seconds=leave_seconds,
        silent_seconds=0.5 * heartbeat_timeout_seconds,
    )
    group.start()
