"""Holds the goldens against the compiler: `cd tests && python -m zoo._verify [name ...]`.

On data 2 x tensor 4 CPU devices, each model laid out by its golden: the loss and the gradients equal those of
one device, no gradient is zero, and the forward program has the all-reduces that the entry says. Prints what
every entry costs.
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_eqx import communication
from redco_eqx._compiled.hlo import num_elements

from . import ZOO, Entry, arrays, goldens

BATCH, DATA, TENSOR = 4, 2, 4


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
    ahead = communication(_text(jit_forward.lower(placed, placed_batch).compile()), grid)
    step = communication(_text(compiled), grid)
    sizes = {size * BATCH // DATA for size in entry.activation_sizes}
    arrays_sent = [(c, shape) for c in ahead for shape in c.shapes]
    return {
        "error": worst,
        "dead": [path for path, g in arrays(reference[1]).items() if not np.abs(g).max() > 0],
        "count": sum(c.count for c, x in arrays_sent if c.kind == "all-reduce" and num_elements(x) in sizes),
        "kinds": {kind: total.count for kind, total in ahead.by_kind.items()},
        "forward_bytes": ahead.total.result_bytes,
        "step_bytes": step.total.result_bytes,
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
            print(got["collectives"])
    return failed


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main(sys.argv[1:]))
