"""The launch files of Kubernetes and SkyPilot: short, and with what `initialize_distributed` needs."""

import pathlib
from typing import Any

import yaml

LAUNCH = pathlib.Path(__file__).parents[1] / "examples" / "launch"
VARIABLES = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}


def read(name: str) -> Any:
    text = (LAUNCH / name).read_text()
    assert len(text.splitlines()) <= 30
    return yaml.safe_load(text)


def test_each_pod_of_the_jobset_is_one_process() -> None:
    found = read("jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [job] = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert set(variables) == VARIABLES
    assert spec["parallelism"] == spec["completions"] == int(variables["JAX_NUM_PROCESSES"]["value"])
    # The DNS name of a pod: <set>-<job>-<replica>-<index>.<set>
    name = f"{found['metadata']['name']}-{job['name']}-0-0.{found['metadata']['name']}"
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")[0] == name
    assert (LAUNCH.parents[1] / container["command"][1]).exists()


def test_the_variables_of_skypilot_are_those_of_initialize_distributed() -> None:
    found = read("skypilot.yaml")
    assert set(found) <= {"name", "num_nodes", "resources", "workdir", "setup", "run", "envs", "file_mounts"}
    assert all(variable in found["run"] for variable in VARIABLES)
    assert (LAUNCH.parents[1] / found["run"].split()[-1]).exists()
