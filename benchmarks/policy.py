"""Halve and double each number of `redco_eqx/_base/policy.py`, and list the
layouts and warnings that change.

    python benchmarks/policy.py [NAME ...]

The models are those of `tests/zoo` and of our families, laid out by the path rules and
by their programs. Nothing is compiled.
"""

import importlib
import sys
import warnings
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from layouts import Case, family_cases, zoo_cases

import redco_eqx as rx

# The modules that use each number.
USERS = {
    "WORK": ("_dataflow.walk", "_dataflow.solution"),
    "MEMORY": ("_dataflow.search", "_dataflow.engine"),
    "MAX_STEPS": ("_dataflow.search",),
    "MAX_STEPS_TAKEN": ("_dataflow.search",),
    "FSDP_MIN_SIZE": ("_sharding.rules",),
    "STORED_BYTES": ("_sharding.rules",),
    "LARGE_BYTES": ("_sharding.rules",),
    "LARGE_SHARE": ("_sharding.rules",),
}
AXES = ("data", "fsdp", "tensor")
MESHES = [
    AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    for sizes in ((2, 1, 4), (1, 2, 4))
]

# A layout and the number of warnings, for each mesh, by paths and by the program.
Found = list[tuple[str, int]]


def found(case: Case) -> Found:
    results = []
    for mesh in MESHES:
        for program in ({}, {"loss_fn": case.loss, "batch": case.batch}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                shardings = rx.shard_rules(case.model, mesh, **program)
            results.append((str(jax.tree.leaves(shardings)), len(caught)))
    return results


def with_number(name: str, factor: float, cases: dict[str, list[Case]]) -> Any:
    """What is found if the number is so many times as large."""
    modules = [importlib.import_module(f"redco_eqx.{user}") for user in USERS[name]]
    before = getattr(modules[0], name)
    try:
        for module in modules:
            setattr(module, name, type(before)(before * factor))
        return {group: [found(case) for case in cases[group]] for group in cases}
    finally:
        for module in modules:
            setattr(module, name, before)


def main(names: list[str]) -> None:
    cases = {"zoo": list(zoo_cases()), "families": list(family_cases())}
    print("models:", {group: len(members) for group, members in cases.items()})
    own = with_number("WORK", 1, cases)
    for name in names or USERS:
        for factor in (0.5, 2):
            others = with_number(name, factor, cases)
            for group, members in cases.items():
                moved = []
                warned = []
                for case, was, became in zip(members, own[group], others[group]):
                    if [layout for layout, _ in was] != [x for x, _ in became]:
                        moved.append(case.name)
                    if [number for _, number in was] != [n for _, n in became]:
                        warned.append(case.name)
                print(f"{name} x {factor}, {group}: layouts {moved}, warnings {warned}")


if __name__ == "__main__":
    main(sys.argv[1:])
