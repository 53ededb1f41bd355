"""Find the place of this process in a run: from arguments, the environment, or a
launcher such as SLURM.

Only this file uses private names of JAX. It imports them only in programs with many
processes.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Launch(NamedTuple):
    """The place of one process in a run.

    - `coordinator_address`: `host:port` of process 0.
    - `num_processes`: the number of processes.
    - `process_id`: the number of this process.
    - `local_device_ids`: the devices of this host that this process uses; `None` for
        all.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None

    @property
    def place(self) -> tuple[str, int]:
        """The host of the coordinator, without brackets, and the port."""
        host, _, port = self.coordinator_address.rpartition(":")
        return host.strip("[]"), int(port)


def find_launch(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: int | Sequence[int] | None,
    timeout_seconds: int,
) -> Launch | None:
    """Find the place of this process in the run; `None` if it is the only process.

    Arguments take precedence over environment variables, and these over values that JAX
    detects.

    Raises `ValueError` if the values do not fit together, and `RuntimeError` in a SLURM
    batch script with several tasks but without srun.
    """
    address = _read("coordinator_address", coordinator_address, str, "a text")
    number = _read("num_processes", num_processes, int, "a whole number")
    process = _read("process_id", process_id, int, "a whole number")
    devices = _read(
        "local_device_ids",
        local_device_ids,
        _numbers,
        "numbers with commas between them",
    )
    if number != 1 and None in (address, number, process):
        from jax._src.clusters import ClusterEnv

        # `jax.distributed.initialize` would detect the same values, but only after it
        # has begun to connect.
        address, number, process, local = (
            ClusterEnv.auto_detect_unset_distributed_params(
                address, number, process, None, None, timeout_seconds
            )
        )
        if devices is None and local is not None:
            devices = share_of_devices(local[0])
        if address is None and number is None and process is None:
            _refuse_batch_script()
            return None
    if number is not None and process is not None and not 0 <= process < number:
        raise ValueError(
            f"initialize_distributed: process_id={process}, but with "
            f"num_processes={number} it must be in 0..{number - 1}. Each process has "
            "its own."
        )
    if number == 1:
        return None
    if address is None or number is None or process is None:
        given = {
            "coordinator_address": address,
            "num_processes": number,
            "process_id": process,
        }
        missing = [name for name, value in given.items() if value is None]
        raise ValueError(
            f"initialize_distributed: this process lacks {' and '.join(missing)} (of "
            f"{list(given)}), and no launcher that JAX knows (SLURM, Open MPI, "
            "Kubernetes, TPU) provides it. Pass all three, or set "
            f"{' and '.join(map(_variable, missing))} in the environment."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"initialize_distributed: coordinator_address={address!r}, but it must be "
            "'host:port', such as '10.0.0.1:1234': the address of process 0 and a port "
            "that is free there."
        )
    return Launch(address, number, process, devices)


def share_of_devices(local_process: int) -> tuple[int, ...] | None:
    """Return the devices of process number `local_process` on this node, or `None` for
    all visible ones.

    By default, JAX uses only device number `local_process`. That leaves devices idle if
    there are more devices than tasks, and names a missing device if the launcher shows
    each task only some of the devices.
    """
    num_here = _num_processes_here()
    if num_here is None:
        return (local_process,)
    environment = os.environ
    visible = environment.get("CUDA_VISIBLE_DEVICES") or environment.get(
        "ROCR_VISIBLE_DEVICES"
    )
    # Without a list, one device for each process.
    num_devices = len(visible.split(",")) if visible else num_here
    each = num_devices // num_here
    if num_here == 1 or each == 0:
        return None
    return tuple(range(local_process * each, (local_process + 1) * each))


def _num_processes_here() -> int | None:
    """Return the number of processes on this node, or `None` if no launcher says it."""
    of_open_mpi = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if of_open_mpi:
        return int(of_open_mpi)
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    if num_tasks is None:
        return None
    num_nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    # Rounded up, because a node may have one task more than another.
    return -(-int(num_tasks) // num_nodes)


def _variable(name: str) -> str:
    return f"JAX_{name.upper()}"


def _read(
    name: str, argument: Any, parse: Callable[[Any], T], expected: str
) -> T | None:
    """Return an argument, or else the value of the environment variable for it."""
    value = argument
    if value is None:
        value = os.environ.get(_variable(name), "").strip()
    try:
        return None if value == "" else parse(value)
    except (TypeError, ValueError):
        about = f"{name} (or {_variable(name)}) is {value!r}, but it must be {expected}"
        raise ValueError(f"initialize_distributed: {about}.") from None


def _numbers(value: int | str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    numbers = value.split(",") if isinstance(value, str) else value
    return tuple(map(int, numbers))


def _refuse_batch_script() -> None:
    """Raise in a batch script of a SLURM job with several tasks, because such a script
    is a single process."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    tasks = os.environ.get("SLURM_NTASKS", nodes)
    is_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NODELIST" not in os.environ
    if is_script and {nodes, tasks} != {"1"}:
        raise RuntimeError(
            f"initialize_distributed: this SLURM job has {nodes} nodes and {tasks} "
            "tasks, but this process was not started by srun, so it is the only one. "
            "Write `srun python train.py` in the batch script, or set "
            f"{_variable('num_processes')}=1 if you want one process."
        )


def has_devices() -> bool:
    """Return true if JAX has found the devices. It does so together with all processes,
    so it can wait."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any:
    """Return the client of JAX's coordination service, or `None` if JAX has no
    connection to others."""
    from jax._src import distributed

    return distributed.global_state.client
