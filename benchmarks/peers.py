"""One training step of this library, compared with those of similar libraries, each in
a separate environment.

    python -m nox -s peers
    python benchmarks/peers.py of_redco=/path/to/its/python of_scalax=... \\
        of_parallax=... ours=...

All have the same architecture, sizes, batch, optimizer and mesh (`peer/comparison.py`).
The table has MiB of collective results and bytes sent by the ring algorithm, read from
the compiled programs by the same code; the memory of a device; the fastest of some
steps; and the time to trace and compile. Times are ratios to ours on the same mesh,
with the stream between layers whole.

Left out: levanter and haliax, whose releases in the registry are years old; and XLA's
auto_sharding, which is neither in JAX 0.10 (no `AUTO` for shardings, no
`use_auto_spmd_partitioning` among its options) nor in its binaries.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
from workloads import MIB, table

import redco_eqx as rx
from redco_eqx._compiled.communication import communication

HERE = pathlib.Path(__file__).parent
WHOLE_STREAM = "redco_eqx, whole stream"
HEADER = ["mesh, model", "", "MiB", "MiB sent", "memory MiB"]
HEADER += ["step", "trace", "compile", "loss after 20 steps"]


def rows(directory: pathlib.Path) -> list[list[str]]:
    found: list[dict[str, Any]] = [
        json.loads(p.read_text()) for p in sorted(directory.glob("*.json"))
    ]
    base = {(x["mesh"], x["model"]): x for x in found if x["peer"] == "redco_eqx"}
    # Where there is `tensor`, with a stream that is whole between layers.
    base |= {(x["mesh"], x["model"]): x for x in found if x["peer"] == WHOLE_STREAM}
    mesh = rx.make_mesh(tensor=4)
    lines = []
    for x in sorted(
        found,
        key=lambda x: (
            x["mesh"],
            x["model"],
            not x["peer"].startswith("redco_eqx"),
            x["peer"],
        ),
    ):
        cells = [f"{x['mesh']}, {x['model']}", x["peer"]]
        if "error" in x:
            lines.append([*cells, *"------", x["error"][:60]])
            continue
        name = "-".join(x[key] for key in ("peer", "model", "mesh")).replace(" ", "_")
        total = communication((directory / f"{name}.hlo").read_text(), mesh).total
        ours = base.get((x["mesh"], x["model"]), x)
        cells += [
            f"{size / MIB:.1f}"
            for size in (total.result_bytes, total.sent_bytes, x["memory"])
        ]
        cells += [f"{x[key] / ours[key]:.2f}" for key in ("step", "trace", "compile")]
        lines.append([*cells, f"{x['losses'][1]:.3f}"])
    return lines


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    pythons = dict(given.split("=", 1) for given in sys.argv[1:]) or {
        "ours": sys.executable
    }
    with tempfile.TemporaryDirectory() as directory:
        for script, python in pythons.items():
            done = subprocess.run(
                [python, HERE / "peer" / f"{script}.py", directory], check=False
            )
            if done.returncode:
                print(f"{script}: ended with {done.returncode}", file=sys.stderr)
        print(table([HEADER, *rows(pathlib.Path(directory))], num_left=2))


if __name__ == "__main__":
    main()
