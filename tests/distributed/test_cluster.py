"""Launchers' descriptions of a run, and input that is refused before anything hangs."""

import os
from typing import Any

import jax
import pytest

import redco_eqx as rx
from redco_eqx._distributed.cluster import Launch, find_launch, share_of_devices


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS", "JAX_LOCAL")):
            monkeypatch.delenv(name)


def find(address=None, number=None, process=None, devices=None):
    return find_launch(address, number, process, devices, 5)


def test_one_process_does_nothing(monkeypatch):
    assert find() is None
    assert find(number=1) is None
    assert find("10.0.0.1:1234", 1, 0) is None
    rx.initialize_distributed()
    rx.initialize_distributed(num_processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert find() is None
    assert not jax.distributed.is_initialized()


def test_arguments_come_before_the_environment(monkeypatch):
    assert find("a:1", 4, 3) == Launch("a:1", 4, 3, None)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "b:2")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "8")
    monkeypatch.setenv("JAX_PROCESS_ID", "5")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    assert find() == Launch("b:2", 8, 5, (2, 3))
    assert find(process=0) == Launch("b:2", 8, 0, (2, 3))
    assert find("[::1]:7", 2, 1, 4) == Launch("[::1]:7", 2, 1, (4,))
    launch = find("[::1]:7", 2, 1, [4, 5])
    assert launch is not None
    assert (launch.place, launch.local_device_ids) == (("::1", 7), (4, 5))


def test_what_does_not_fit_together_is_refused(monkeypatch):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    cases: list[tuple[tuple[Any, ...], dict[str, str], type[Exception], str]] = [
        (("a:1", 2, 2), {}, ValueError, r"process_id=2, .*num_processes=2 .*0\.\.1"),
        (("a:1", 2, -1), {}, ValueError, "process_id=-1"),
        (("a:1", 1, 1), {}, ValueError, r"process_id=1, .*0\.\.0"),
        (("a:1", 0, 0), {}, ValueError, "num_processes=0"),
        (("a", 2, 0), {}, ValueError, "coordinator_address='a'.*host:port"),
        (("a:", 2, 0), {}, ValueError, "host:port"),
        (("a:99999", 2, 0), {}, ValueError, "host:port"),
        (("a:1", 2, None), {}, ValueError, "lacks process_id.*JAX_PROCESS_ID"),
        (("a:1", None, None), {}, ValueError, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ((None, 2, 0), {}, ValueError, "JAX_COORDINATOR_ADDRESS"),
        (("a:1", 2, None), {"JAX_PROCESS_ID": "x"}, ValueError, r"JAX_PROCESS_ID\) is 'x'"),
        (("a:1", 2, 0), {"JAX_LOCAL_DEVICE_IDS": "0;1"}, ValueError, r"JAX_LOCAL_DEVICE_IDS\) is '0;1'"),
        ((None, None, None), slurm, RuntimeError, "2 nodes and 2 tasks.*srun python"),
    ]
    for arguments, environment, error, message in cases:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(error, match=message):
                find(*arguments)


def slurm(monkeypatch, *, process, local, num_nodes, nodes="n[0-1]", tasks=2):
    values = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": local,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_NUM_NODES": num_nodes,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_slurm_shares_the_devices_of_a_node_between_its_tasks(monkeypatch):
    slurm(monkeypatch, process=1, local=0, num_nodes=2)
    launch = find()
    assert launch is not None
    assert (launch.place[0], launch.num_processes, launch.process_id) == ("n0", 2, 1)
    assert launch.local_device_ids is None  # JAX would take device 0 alone
    assert find(devices=3) == Launch(launch.coordinator_address, 2, 1, (3,))

    slurm(monkeypatch, process=1, local=1, num_nodes=1, nodes="n0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    launch = find()
    assert launch is not None
    assert launch.local_device_ids == (4, 5, 6, 7)


def test_one_task_of_slurm_is_one_process(monkeypatch):
    slurm(monkeypatch, process=0, local=0, num_nodes=1, nodes="n0", tasks=1)
    assert find() is None
    monkeypatch.delenv("SLURM_STEP_NODELIST")  # the batch script of such a job
    assert find() is None


def test_share_of_devices(monkeypatch):
    for local, slurm, visible, expected in (
        (0, (2, 2), None, None),
        (0, (1, 1), "0,1,2,3", None),
        (1, (2, 1), None, (1,)),
        (1, (2, 1), "0,1,2,3", (2, 3)),
        (3, (16, 2), "0,1,2,3,4,5,6,7", (3,)),
        (3, (4, 1), "3", None),  # the launcher has given each task its own
        (1, (2, 1), "0,1,2", (1,)),
        (1, (7, 4), "0,1,2,3", (2, 3)),  # not as many on each node
        (2, None, None, (2,)),
    ):
        with monkeypatch.context() as patch:
            if slurm is not None:
                patch.setenv("SLURM_STEP_NUM_TASKS", str(slurm[0]))
                patch.setenv("SLURM_STEP_NUM_NODES", str(slurm[1]))
            if visible is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert share_of_devices(local) == expected, (local, slurm, visible)
            patch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
            assert share_of_devices(local) is None


def test_joining_twice(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="joined already"):
        rx.initialize_distributed()
