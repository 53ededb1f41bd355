"""The place of this process in a run, from arguments, the environment, or a launcher that JAX detects.

The one file that uses names which JAX keeps private, and imports them where only programs of many processes do.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Launch:
    """The place of one process in a run.

    - `coordinator_address`: `host:port` of process 0.
    - `num_processes`, `process_id`: their number, and that of this one.
    - `local_device_ids`: the devices of this host that are this process's; `None` for all.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None

    @property
    def host(self) -> str:
        """The host of the coordinator, without brackets."""
        return self.coordinator_address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the coordinator."""
        return int(self.coordinator_address.rpartition(":")[2])


def find_launch(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: int | Sequence[int] | None,
    timeout_seconds: int,
    environment: Mapping[str, str] = os.environ,
) -> Launch | None:
    """Finds the place of this process in its run; `None` if it is the only one.

    An argument comes before an environment variable, and that before what JAX detects.

    Raises `TypeError` or `ValueError` if these do not fit together, `RuntimeError` in a batch script of
    SLURM with several tasks but without srun.
    """
    for name, value in (("num_processes", num_processes), ("process_id", process_id)):
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise TypeError(f"initialize_distributed: {name}={value!r}, but it must be a whole number.")
    if isinstance(local_device_ids, int):
        local_device_ids = (local_device_ids,)
    read = functools.partial(_setting, environment)
    address = read("coordinator_address", coordinator_address or None, str, "")
    number = read("num_processes", num_processes, int, "a whole number")
    process = read("process_id", process_id, int, "a whole number")
    devices = read("local_device_ids", local_device_ids, _numbers, "numbers with commas between them")
    if number != 1 and None in (address, number, process):
        address, number, process, local = detect_launch(address, number, process, timeout_seconds)
        if local is not None and devices is None:
            devices = share_of_devices(local, tasks_on_node(environment), environment)
        if address is None and number is None and process is None:
            _refuse_batch_script(environment)
            return None
    if number is not None and number < 1:
        raise ValueError(f"initialize_distributed: num_processes={number}, but there is at least one.")
    if number is not None and process is not None and not 0 <= process < number:
        raise ValueError(
            f"initialize_distributed: process_id={process}, but with num_processes={number} it must lie in "
            f"0..{number - 1}. Each process has its own."
        )
    if number == 1:
        return None
    if address is None or number is None or process is None:
        given = {"coordinator_address": address, "num_processes": number, "process_id": process}
        known = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        missing = [name for name, value in given.items() if value is None]
        raise ValueError(
            f"initialize_distributed: {known} given, but not {' and '.join(missing)}, and no launcher that "
            "JAX knows (SLURM, Open MPI, Kubernetes, TPU) says so. Pass all three, or set "
            f"{' and '.join(map(_variable, missing))} in the environment."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"initialize_distributed: coordinator_address={address!r}, but it must be 'host:port', such as "
            "'10.0.0.1:1234': the address of process 0 and a port that is free there."
        )
    return Launch(address, number, process, None if devices is None else tuple(devices))


def tasks_on_node(environment: Mapping[str, str]) -> int | None:
    """The number of processes that the launcher has put on this node, `None` if it does not say."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "2(x3),1"
    counts = [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def share_of_devices(
    local_process: int, num_tasks: int | None, environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """The devices of process number `local_process` of a node, `None` for all that it can see.

    JAX takes device number `local_process` alone. That leaves devices idle where there are more of them
    than tasks, and names one that is not there where the launcher has given each task its own.
    """
    if num_tasks is None:
        return (local_process,)
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES"))
    num_visible = len(visible.split(",")) if visible else None
    if num_tasks == 1 or (num_visible is not None and num_visible < num_tasks):
        return None
    each = num_visible // num_tasks if num_visible is not None and num_visible % num_tasks == 0 else 1
    return tuple(range(local_process * each, (local_process + 1) * each))


def _variable(name: str) -> str:
    return f"JAX_{name.upper()}"


def _setting(
    environment: Mapping[str, str], name: str, argument: T | None, parse: Callable[[str], T], expected: str
) -> T | None:
    """An argument, or else what its environment variable holds."""
    text = environment.get(_variable(name), "").strip()
    if argument is not None or not text:
        return argument
    try:
        return parse(text)
    except ValueError:
        raise ValueError(
            f"initialize_distributed: {_variable(name)}={text!r}, but it must be {expected}."
        ) from None


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(word) for word in text.split(","))


def _refuse_batch_script(environment: Mapping[str, str]) -> None:
    """In the script that sbatch starts there is one process, whatever the number of tasks."""
    if "SLURM_JOB_ID" not in environment or "SLURM_STEP_NODELIST" in environment:
        return
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    tasks = environment.get("SLURM_NTASKS", nodes)
    if any(count.isdigit() and int(count) > 1 for count in (nodes, tasks)):
        raise RuntimeError(
            f"initialize_distributed: this SLURM job has {nodes} nodes and {tasks} tasks, but this process "
            "was not started by srun, so that it is the only one. Write `srun python train.py` in the batch "
            f"script, or set {_variable('num_processes')}=1 if one process is meant."
        )


def coordination_client() -> Any:
    """The client of JAX's coordination service, `None` where JAX has not joined others, or has left them."""
    from jax._src import distributed

    return distributed.global_state.client


def has_devices() -> bool:
    """True if JAX has looked for devices already, after which it cannot join other processes."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def detect_launch(
    address: str | None, num_processes: int | None, process_id: int | None, timeout_seconds: int
) -> tuple[str | None, int | None, int | None, int | None]:
    """Fills in what JAX detects of a launcher. The last one is the number of the process on its node.

    `jax.distributed.initialize` would do the same, but there is no way to look before it leaps.
    """
    from jax._src.clusters import ClusterEnv

    # The last argument but two is for devices: JAX's choice of them is not always good.
    found = ClusterEnv.auto_detect_unset_distributed_params(
        address, num_processes, process_id, None, None, timeout_seconds
    )
    return *found[:3], None if found[3] is None else next(iter(found[3]))
