"""Layouts by the traced program, compared with others: the bytes that one step sends, compiled and predicted.

    python benchmarks/layouts.py [zoo] [families] [foreign]

`predicted` are the predicted bytes for the layout of `dataflow` with the CPU compiler, and `at least` the bound
for them. `merged` is the prediction if results are added before they are summed over devices, as compilers for
TPU and GPU do. The loss and its gradient are compiled for data 2 x tensor 4 virtual CPU devices; nothing is
run. Engines: `dataflow` (the program decides), `paths` (names and shapes do), `hand` (the zoo's own layouts),
`parallax` (the automatic strategy of google-parallax, if it is installed, for the loss; or the error that it
raises), `column` (dim 0 of every matrix that divides), `largest` (the largest dim that divides), `whole` (all
on every device). Times are those of `dataflow`: to trace the loss and its gradient, to walk through the program
and weigh all splits, and to choose.
"""

import importlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from workloads import COMPILER_OPTIONS, FAMILIES, Sizes, family_case

import redco_eqx as rx
from redco_eqx._dataflow.engine import choose_layout, weigh
from redco_eqx._dataflow.prediction import lower_bound
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._sharding.rules import analysis_of, explain_by

TENSOR = 4

Specs = dict[str, PartitionSpec]


@dataclass(frozen=True)
class Case:
    """A model with its loss and batch.

    - `model`: the abstract model.
    - `loss`: (model, batch, key) -> loss, or a tuple of the loss and others.
    - `hand`: a layout written by hand, by path.
    """

    name: str
    model: Any
    loss: Callable[..., Any]
    batch: Any
    hand: Specs | None = None


def compiled_bytes(
    model: Any, loss: Any, batch: Any, specs: Any, mesh: Mesh, options: Any = COMPILER_OPTIONS
) -> int:
    """Return the bytes that the compiled loss and gradient send. A gradient is laid out like its parameter."""

    def is_abstract(x: Any) -> bool:
        return isinstance(x, jax.ShapeDtypeStruct)

    def place(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    left = iter([specs[path] for path in rx.to_arrays(model)])
    placed = jax.tree.map(lambda x: place(x, next(left)) if is_abstract(x) else x, model)
    params, rest = eqx.partition(placed, lambda x: is_abstract(x) and jnp.issubdtype(x.dtype, jnp.floating))
    buffers, static = eqx.partition(rest, is_abstract)
    rows = rx.batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)

    def step(params: Any, buffers: Any, batch: Any) -> Any:
        def of_params(params: Any) -> Any:
            result = loss(eqx.combine(params, buffers, static), batch, jax.random.key(0))
            first, *others = result if isinstance(result, tuple) else (result,)
            value = first.value if isinstance(first, rx.Mean) else first
            return value, [x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]

        return jax.value_and_grad(of_params, has_aux=True)(params)

    layout = (None, jax.tree.map(lambda x: x.sharding, params))
    compiled = jax.jit(step, out_shardings=layout).lower(params, buffers, batch).compile(options)
    return rx.communication(compiled, mesh).total.sent_bytes


# Cases.


def zoo_cases() -> Iterator[Case]:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    zoo = importlib.import_module("zoo")

    for entry in zoo.ZOO:
        model = eqx.filter_eval_shape(entry.make, jax.random.key(0))
        hand = {path: PartitionSpec(*(() if s is ... else s)) for path, s in zoo.goldens(entry, model).items()}

        def loss(model: Any, batch: Any, key: Any, entry: Any = entry) -> Any:
            return entry.loss(model, batch)

        yield Case(entry.name, model, loss, entry.inputs(8), hand)


def family_cases() -> Iterator[Case]:
    sizes = Sizes(dim=128, num_layers=2, length=64)
    for name in FAMILIES:
        for stacked in (False, True):
            case = family_case(name, sizes, stacked=stacked)
            model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
            yield Case(f"{name}{', stacked' if stacked else ''}", model, case.loss_fn, case.batch)


def foreign_cases() -> Iterator[Case]:
    from foreign_models import foreign_models

    models, missing = foreign_models()
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    for foreign in models:
        model = eqx.filter_eval_shape(foreign.make, jax.random.key(0))
        yield Case(f"{foreign.name}", model, foreign.loss, foreign.batch)


# Engines.


def naive(model: Any, pick: Callable[[tuple[int, ...]], int | None]) -> Specs:
    """Split one dim of every floating array of two or more dims, chosen by its shape alone."""
    specs = {}
    for path, x in rx.to_arrays(model).items():
        dim = pick(x.shape) if len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating) else None
        specs[path] = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "tensor")
    return specs


def first_dim(shape: tuple[int, ...]) -> int | None:
    return 0 if shape[0] % TENSOR == 0 else None


def largest_dim(shape: tuple[int, ...]) -> int | None:
    dims = [i for i, size in enumerate(shape) if size % TENSOR == 0 and size > 1]
    return max(dims, key=lambda i: shape[i], default=None)


def parallax(case: Case) -> Specs | None:
    """Return the splits of google-parallax over its `model` axis, where that divides; `None` if it is not
    installed."""
    try:
        from parallax.sharding.auto_shard import get_shardings  # type: ignore[import-not-found]
    except ImportError:
        return None
    arrays = rx.to_arrays(case.model)
    params = {path: x for path, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {path: x for path, x in arrays.items() if path not in params}
    dynamic, static = eqx.partition(case.model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    treedef = jax.tree.structure(dynamic)

    def loss(params: Any, others: Any, batch: Any) -> Any:
        leaves = [{**params, **others}[path] for path in rx.to_arrays(dynamic)]
        result = case.loss(eqx.combine(jax.tree.unflatten(treedef, leaves), static), batch, jax.random.key(0))
        first = result[0] if isinstance(result, tuple) else result
        return first.value if isinstance(first, rx.Mean) else first

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, TENSOR), ("data", "model"))):
        (chosen, *_), _ = get_shardings(loss, params, others, case.batch)

    def ours(path: str, x: Any) -> PartitionSpec:
        spec = chosen.get(path, ())
        return PartitionSpec(*("tensor" if a and n % TENSOR == 0 else None for a, n in zip(spec, x.shape)))

    return {path: ours(path, x) for path, x in arrays.items()}


def memory(model: Any, specs: Specs, mesh: Mesh) -> float:
    """Return the bytes of the model's arrays on one device."""
    total = 0.0
    for path, x in rx.to_arrays(model).items():
        split = math.prod(mesh.shape[axis] for axis in specs[path] if axis is not None)
        total += math.prod(x.shape) * getattr(x.dtype, "itemsize", 4) / split
    return total


HEAD = [
    "",
    "dataflow",
    "predicted",
    "at least",
    "merged",
    "paths",
    "hand",
    "parallax",
    "column",
    "largest",
    "whole",
]
HEAD += ["memory", "of paths", "whole", "arrays", "steps", "ms trace", "walk", "choose"]


def times_of(case: Case) -> list[str]:
    """Return the milliseconds to trace, to walk, and to choose."""
    marks = [time.perf_counter()]
    traced = trace_step(case.loss, case.model, case.batch)
    marks.append(time.perf_counter())
    analysis = weigh(traced, tensor=TENSOR, num_shards=2)
    marks.append(time.perf_counter())
    choose_layout(analysis, given={}, fixed={})
    marks.append(time.perf_counter())
    return [f"{1e3 * (after - before):.0f}" for before, after in itertools.pairwise(marks)]


def row(case: Case, mesh: Mesh, *, engines: bool = True) -> list[str]:
    """Make a line of the table: MB sent in a step, MB of arrays on a device, and the time for the decision."""
    times = times_of(case)
    analysis = analysis_of(case.model, mesh, case.loss, case.batch)
    assert analysis is not None
    by_flow = {path: d.spec for path, d in explain_by(analysis, case.model, mesh).decisions.items()}
    by_paths = {path: d.spec for path, d in rx.explain(case.model, mesh).decisions.items()}
    whole = naive(case.model, lambda shape: None)
    layouts: dict[str, Specs | None] = {"dataflow": by_flow, "paths": by_paths, "hand": case.hand}
    sent: dict[str, str] = {}
    if engines:
        try:
            layouts["parallax"] = parallax(case)
        except Exception as error:
            sent["parallax"] = type(error).__name__[:9]
        layouts["column"] = naive(case.model, first_dim)
        layouts["largest"] = naive(case.model, largest_dim)
        layouts["whole"] = whole
    known: list[tuple[Specs, str]] = []
    for name, specs in layouts.items():
        if specs is None:
            continue
        same = [text for other, text in known if other == specs]
        try:
            number = compiled_bytes(case.model, case.loss, case.batch, specs, mesh) if not same else 0
            sent[name] = same[0] if same else f"{number / 1e6:.3f}"
        except Exception as error:
            sent[name] = type(error).__name__[:9]
        known.append((specs, sent[name]))
    prediction = analysis.simulated
    predicted, merged = (prediction.num_bytes(merged=flag) for flag in (False, True))
    least = lower_bound(analysis, merged=False)
    sizes = [f"{memory(case.model, specs, mesh) / 1e6:.3f}" for specs in (by_flow, by_paths, whole)]
    return [
        case.name,
        sent["dataflow"],
        f"{predicted / 1e6:.3f}",
        f"{least / 1e6:.3f}",
        f"{merged / 1e6:.3f}",
        *(sent.get(name, "-") for name in ("paths", "hand", "parallax", "column", "largest", "whole")),
        *sizes,
        str(len(by_flow)),
        str(len(analysis.walk.steps)),
        *times,
    ]


def main(names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parent))
    mesh = rx.make_mesh(tensor=TENSOR)
    sources = {"zoo": zoo_cases, "families": family_cases, "foreign": foreign_cases}
    for name in names or sources:
        print(f"\n{name}: MB sent by a device in a step on data 2 x tensor 4, MB of arrays on a device\n")
        print(line(HEAD))
        for case in sources[name]():
            print(line(row(case, mesh)), flush=True)


def line(cells: list[str]) -> str:
    return cells[0].ljust(31) + "".join(cell.rjust(10) for cell in cells[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
