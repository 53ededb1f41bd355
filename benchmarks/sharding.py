"""Automatic sharding of published models at their true sizes: the bytes predicted and
compiled, and the memory.

    python benchmarks/sharding.py [NAME ...] [--meshes 8 2x4] [--out sharding.jsonl] \\
        [--limit 600]

Each row is one step of AdamW in float32 on 16 x 128 tokens, compiled for eight virtual
CPU devices, and for eight TPUs and GPUs where their compilers are installed
(`jax[tpu]`, `jax[cuda12]`). No array is made, and nothing is downloaded. The mesh `8`
is fsdp 8, and `2x4` is fsdp 2 x tensor 4: like autoparallel's script, they split the
batch over the first axis, and divide the parameters over all devices.

Each row is a separate process with a time limit. A finished row is appended to `--out`,
and a row that is there already is not made again, unless it failed. The table, as
Markdown, has all rows of that file.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time
import warnings
from typing import Any

import equinox as eqx
import jax
import optax
from published import GROUPS, Opened, open_model
from workloads import MIB, run_alone

import redco_eqx as rx
from redco_eqx._dataflow.prediction import lower_bound, over_fsdp
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._sharding.rules import analyse, explain_by

MESHES: dict[str, dict[str, Any]] = {"8": {"fsdp": 8}, "2x4": {"fsdp": 2, "tensor": 4}}
TARGETS = {"cpu": None, "tpu": "v5e:2x4", "gpu": "h100:8"}
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
SOON = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Options for CPU programs that never run. They take effect after the collectives are
decided."""


def measure(model: Opened, mesh: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a row: bytes on a device, and seconds."""
    marks = [time.monotonic()]
    shapes = eqx.filter_eval_shape(model.make, jax.random.key(0))
    traced = trace_step(model.loss, shapes, model.batch)
    marks.append(time.monotonic())
    on = rx.make_mesh(**mesh)
    analysis = analyse(traced, shapes, on)
    stored = explain_by(analysis, shapes, on).stored
    marks.append(time.monotonic())
    least = lower_bound(analysis, merged=False) + over_fsdp(
        analysis, stored, merged=False
    )
    found: dict[str, Any] = {
        "parameters": model.num_parameters,
        "traced_seconds": marks[1] - marks[0],
        "choice_seconds": marks[2] - marks[1],
        "at_least": least,
        "opaque": [f"{name} ({len(x)})" for name, x in analysis.walk.opaque.items()],
    }
    for name, target in TARGETS.items():
        if name == "cpu" or any(map(importlib.util.find_spec, COMPILERS[name])):
            found[name] = compiled(model, mesh, target)
    return {**found, "seconds": time.monotonic() - marks[0]}


def compiled(model: Opened, mesh: dict[str, Any], target: str | None) -> dict[str, Any]:
    """Returns the bytes that a device sends, predicted and compiled, and those that it
    holds at the peak."""
    best = rx.plan(
        model.make,
        loss_fn=model.loss,
        optimizer=optax.adamw(1e-4),
        batch=model.batch,
        target=target,
        mesh=mesh,
        bytes_per_device=2**50,
        progress=False,
    ).best
    if best.communication is None:
        return {
            "predicted": best.predicted_bytes,
            "memory": best.memory.peak,
            "error": best.verdict,
        }
    return {
        "predicted": best.predicted_bytes,
        "sent": best.sent_bytes,
        "memory": best.memory.peak,
    }


def row(name: str, mesh: str) -> dict[str, Any]:
    """Returns a row, or the reason why there is none."""
    try:
        return measure(open_model(name), MESHES[mesh])
    except (ImportError, ValueError) as error:
        kind = (
            "closed"
            if "model_type" in str(error) or isinstance(error, ImportError)
            else "error"
        )
        return {kind: str(error).removeprefix("config.json: ").partition(", only")[0]}


HEADER = [
    "model",
    "parameters, M",
    "mesh",
    "traced, s",
    "choice, s",
    "at least, MiB",
    "predicted, MiB",
    "compiled, MiB",
    "predicted / compiled",
    "memory, GiB",
    "TPU: compiled, MiB",
    "TPU: ratio",
    "GPU: compiled, MiB",
    "GPU: ratio",
    "row, s",
]


def cells(name: str, mesh: str, found: dict[str, Any]) -> list[str]:
    """Formats a row of the table."""
    reason = found.get("closed") or found.get("error") or found["cpu"].get("error")
    if reason:
        return [
            name,
            "",
            mesh,
            f"does not open: {reason}" if "closed" in found else reason,
            *[""] * 11,
        ]
    cpu = found["cpu"]

    def by(compiler: str) -> list[str]:
        numbers = found.get(compiler, {})
        if "sent" not in numbers:
            return [numbers.get("error", ""), ""]
        ratio = numbers["predicted"] / numbers["sent"]
        missed = next(
            (
                f" (over {limit}% off)"
                for limit in (10, 5)
                if abs(ratio - 1) > limit / 100
            ),
            "",
        )
        return [f"{numbers['sent'] / MIB:,.1f}", f"{ratio:.3f}{missed}"]

    sent, ratio = by("cpu")
    least = f"{found['at_least'] / MIB:,.1f}" + (
        " (above compiled)" if is_above(found) else ""
    )
    seconds = f"{found['seconds']:.0f}" + (
        " (over 120)" if found["seconds"] > 120 else ""
    )
    return [
        name,
        f"{found['parameters'] / 1e6:,.1f}",
        mesh,
        f"{found['traced_seconds']:.1f}",
        f"{found['choice_seconds']:.1f}",
        least,
        f"{cpu['predicted'] / MIB:,.1f}",
        sent,
        ratio,
        f"{cpu['memory'] / 2**30:.2f}",
        *by("tpu"),
        *by("gpu"),
        seconds,
    ]


def is_above(found: dict[str, Any]) -> bool:
    """Returns true if the bound is above the compiled bytes, by more than rounding."""
    return found["at_least"] > 1.001 * found["cpu"]["sent"]


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts the rows that meet the goals."""
    done = [found for found in rows if "sent" in found.get("cpu", {})]
    off = [abs(found["cpu"]["predicted"] / found["cpu"]["sent"] - 1) for found in done]
    above = sum(map(is_above, done))
    return (
        f"{len(rows)} rows: {sum('closed' in found for found in rows)} do not open, "
        f"{len(done)} compiled. Of these, the prediction is within 5% on "
        f"{sum(x <= 0.05 for x in off)}, within 10% on {sum(x <= 0.1 for x in off)}, "
        f"and off by {max(off, default=0):.1%} at most. {above} bounds are above the "
        "compiled bytes by more than 0.1%. "
        f"{sum(found['seconds'] < 120 for found in done)} rows took less than two "
        "minutes."
    )


def report(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Makes the tables, one for each group of models."""
    lines = []
    for group, names in GROUPS.items():
        lines += [
            "",
            group,
            "",
            *(f"| {' | '.join(x)} |" for x in (HEADER, ["---"] * len(HEADER))),
        ]
        keys = [
            (name, mesh) for name in names for mesh in MESHES if (name, mesh) in found
        ]
        lines += [f"| {' | '.join(cells(*key, found[key]))} |" for key in keys]
    return "\n".join([*lines, "", summary(list(found.values()))])


def read(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Reads the rows of a file, the last one for each model and mesh."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {(found["name"], found["mesh"]): found for found in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for names in GROUPS.values() for name in names]
    parser.add_argument(
        "names", nargs="*", choices=[*every, []], help="all without any"
    )
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("sharding.jsonl")
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for a row")
    parser.add_argument(
        "--row", nargs=3, metavar=("NAME", "MESH", "FILE"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.row:
        os.environ["XLA_FLAGS"] = SOON
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        warnings.simplefilter("ignore")
        name, mesh, file = given.row
        pathlib.Path(file).write_text(json.dumps(row(name, mesh)))
        return
    for name in given.names or every:
        for mesh in given.meshes:
            known = read(given.out).get((name, mesh), {"error": ""})
            if "error" not in known and "error" not in known.get("cpu", {}):
                continue
            result = run_alone([__file__, "--row", name, mesh], given.limit)
            found = {
                "name": name,
                "mesh": mesh,
                **result,
                "jax": jax.__version__,
                "on": platform.machine(),
            }
            with given.out.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
            print(
                "  ".join(filter(None, cells(name, mesh, found))),
                file=sys.stderr,
                flush=True,
            )
    print(report(read(given.out)))


if __name__ == "__main__":
    main()
