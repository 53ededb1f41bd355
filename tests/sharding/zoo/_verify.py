"""Holds the goldens against the compiler: `cd tests && python -m zoo._verify [name ...]`.

On data 2 x tensor 4 CPU devices, each model laid out by its golden: the loss and the gradients equal those of
one device, no gradient is zero, and the forward program has the all-reduces that the entry says. Prints what
every entry costs.
"""

import math
import re
import sys
from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import ZOO, Entry, arrays, goldens

BATCH, DATA, TENSOR = 4, 2, 4
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
CALLS = re.compile(r"(body|condition|to_apply|calls)=%?([\w.\-]+)")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}


def collectives(hlo: str) -> list[tuple[str, int, int, int]]:
    """(kind, elements, bytes, times) of each collective result; loops multiplied by their trip counts."""
    bodies: dict[str, list[str]] = {}
    name, entry = "", ""
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name:
            bodies[name].append(line)
    found: list[tuple[str, int, int, int]] = []

    def walk(computation: str, times: int) -> None:
        for line in bodies.get(computation, ()):
            match = COLLECTIVE.search(line)
            if match:
                for dtype, dims in SHAPE.findall(match[1]):
                    size = math.prod(int(n) for n in dims.split(",") if n)
                    bits = BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
                    found.append((match[2], size, size * bits // 8, times))
                continue
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for role, callee in CALLS.findall(line):
                walk(callee, times * int(trips[1]) if role == "body" and trips else times)

    walk(entry, 1)
    return found


def mesh() -> Any:
    auto = (AxisType.Auto,) * 3
    return jax.make_mesh((DATA, 1, TENSOR), ("data", "fsdp", "tensor"), axis_types=auto)


def place(model: Any, specs: dict[str, Any], mesh: Any) -> Any:
    """The model laid out by `{path: spec}`; `...` is placed whole."""

    def spec_of(path):
        return PartitionSpec() if specs[path] is ... else PartitionSpec(*specs[path])

    found = iter(arrays(model))
    kinds = (jax.Array, np.ndarray)
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(next(found)))) if isinstance(x, kinds) else x,
        model,
    )


def cost(entry: Entry, specs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compiles the entry under `specs` (its goldens), and compares it with one device."""
    grid = mesh()
    model = entry.make(jax.random.key(0))
    batch = entry.inputs(BATCH)
    specs = goldens(entry, model) if specs is None else specs

    def forward(model, batch):
        return entry.loss(model, batch)

    def both(model, batch):
        trainable, rest = eqx.partition(
            model, lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        )
        return jax.value_and_grad(lambda p: entry.loss(eqx.combine(p, rest), batch))(trainable)

    jit_forward: Any = eqx.filter_jit(forward)
    jit_both: Any = eqx.filter_jit(both)
    placed = place(model, specs, grid)
    rows = NamedSharding(grid, PartitionSpec(("data", "fsdp")))
    placed_batch = jax.device_put(batch, rows)
    reference = jit_both(model, batch)
    compiled = jit_both.lower(placed, placed_batch).compile()
    result = compiled(placed, placed_batch)
    worst = 0.0
    for want, got in zip(jax.tree.leaves(reference), jax.tree.leaves(result)):
        want, got = np.asarray(want), np.asarray(got)
        worst = max(worst, float(np.abs(want - got).max() / max(np.abs(want).max(), 1e-3)))
    ahead = collectives(_text(jit_forward.lower(placed, placed_batch).compile()))
    step = collectives(_text(compiled))
    sizes = {size * BATCH // DATA for size in entry.activation_sizes}
    kinds = Counter()
    for kind, _, _, times in ahead:
        kinds[kind] += times
    return {
        "error": worst,
        "dead": [path for path, g in arrays(reference[1]).items() if not np.abs(g).max() > 0],
        "count": sum(t for kind, n, _, t in ahead if kind == "all-reduce" and n in sizes),
        "kinds": dict(kinds),
        "forward_bytes": sum(b * t for _, _, b, t in ahead),
        "step_bytes": sum(b * t for _, _, b, t in step),
        "collectives": ahead,
    }


def _text(compiled: Any) -> str:
    return getattr(compiled, "compiled", compiled).as_text()


def main(names: list[str]) -> int:
    failed = 0
    for entry in ZOO:
        if names and entry.name not in names:
            continue
        got = cost(entry)
        counted = entry.activation_all_reduces in (None, got["count"])
        ok = got["error"] < 1e-5 and counted and not got["dead"]
        failed += not ok
        print(
            f"{'ok  ' if ok else 'FAIL'} {entry.name:26} all-reduces {got['count']:2} "
            f"(expected {entry.activation_all_reduces}) error {got['error']:.0e} "
            f"bytes {got['forward_bytes']:6} step {got['step_bytes']:6} {got['kinds']}"
            f"{' zero gradients: ' + str(got['dead']) if got['dead'] else ''}",
            flush=True,
        )
        if names:
            for row in got["collectives"]:
                print("      ", row)
    return failed


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main(sys.argv[1:]))
