"""Layouts by the traced program, compared with others: the bytes that one step sends,
compiled and predicted.

    python benchmarks/layouts.py [zoo] [families] [others] [foreign] [strangers]
    python benchmarks/layouts.py generated [NUMBER]

Fails after the last row if a number is wrong, see `faults`, unless `KNOWN` has its
cause, or if a row of `KNOWN` is right. `generated` takes programs of `tests/gradients`,
300 unless a number is given. `strangers` are models in the style of users, see
`strangers.py`.

`predicted` are the predicted bytes for the layout of `dataflow` with the CPU compiler,
`at least` the bound for them, and `gap` the bound over the prediction. There are none
if an operation is `opaque`. `merged` is the prediction if results are added before they
are summed over devices, as compilers for TPU and GPU do. The loss and its gradient are
compiled for data 2 x tensor 4 virtual CPU devices; nothing is run. Engines: `dataflow`
(the program decides), `paths` (names and shapes do), `hand` (the zoo's own layouts),
`parallax` (the automatic strategy of google-parallax, if it is installed, for the loss;
or the error that it raises), `column` (dim 0 of every matrix that divides), `largest`
(the largest dim that divides), `whole` (all on every device). Times are those of
`dataflow`: to trace the loss and its gradient, to walk through the program and weigh
all splits, and to choose.
"""

import importlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from workloads import COMPILER_OPTIONS, FAMILIES, Sizes, family_case

import redco_eqx as rx
from redco_eqx._base.jaxprs import trace
from redco_eqx._dataflow.engine import choose_layout, weigh
from redco_eqx._dataflow.prediction import lower_bound
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._sharding.rules import analysis_of, explain_by
from redco_eqx._step.layout import split_rows
from redco_eqx._step.passes import split_kernels
from redco_eqx._step.workarounds import for_partitioner

TENSOR = 4

KNOWN = {
    "Mamba-2": "a piece of a fused projection that is no even part of it is priced as "
    "the whole, so that the better layout of the path rules is not taken",
    "diffusion U-Net": "the gathers and permutes in the backward pass of a concatenate "
    "of split channels are not priced",
}
"""The rows that have a fault, with the cause."""

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
    model: Any,
    loss: Any,
    batch: Any,
    specs: Any,
    mesh: Mesh,
    options: Any = COMPILER_OPTIONS,
    *,
    corrected: bool = False,
) -> int:
    """Return the bytes that the compiled loss and gradient send. A gradient is laid out
    like its parameter, and the batch as in the steps of the library, which leave all
    its dims but the rows to the compiler.

    `corrected`: replaces the operations that the steps of the library replace, such as
    Fourier transforms.
    """

    def is_abstract(x: Any) -> bool:
        return isinstance(x, jax.ShapeDtypeStruct)

    def place(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    left = iter([specs[path] for path in rx.to_arrays(model)])
    placed = jax.tree.map(
        lambda x: place(x, next(left)) if is_abstract(x) else x, model
    )
    params, rest = eqx.partition(
        placed, lambda x: is_abstract(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    )
    buffers, static = eqx.partition(rest, is_abstract)
    rows = rx.batch_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
    )

    def step(params: Any, buffers: Any, batch: Any) -> Any:
        def of_params(params: Any) -> Any:
            result = loss(
                eqx.combine(params, buffers, static),
                split_rows(batch, mesh),
                jax.random.key(0),
            )
            first, *others = result if isinstance(result, tuple) else (result,)
            value = first.value if isinstance(first, rx.Mean) else first
            return value, [
                x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)
            ]

        return jax.value_and_grad(of_params, has_aux=True)(params)

    by_path = {path: x.sharding for path, x in rx.to_arrays((params, buffers)).items()}
    kernels = split_kernels(rx.to_arrays((params, buffers)), by_path)

    def corrected_step(*arguments: Any) -> Any:
        return for_partitioner(trace(step, *arguments), mesh, kernels)(*arguments)

    layout = (None, jax.tree.map(lambda x: x.sharding, params))
    jitted = jax.jit(corrected_step if corrected else step, out_shardings=layout)
    compiled = jitted.lower(params, buffers, batch).compile(options)
    return rx.communication(compiled, mesh).total.sent_bytes


# Cases.


def zoo_cases() -> Iterator[Case]:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    zoo = importlib.import_module("zoo")

    for entry in zoo.ZOO:
        model = eqx.filter_eval_shape(entry.make, jax.random.key(0))
        hand = {
            path: PartitionSpec(*(() if s is ... else s))
            for path, s in zoo.goldens(entry, model).items()
        }

        def loss(model: Any, batch: Any, key: Any, entry: Any = entry) -> Any:
            return entry.loss(model, batch)

        yield Case(entry.name, model, loss, entry.inputs(8), hand)


def family_cases() -> Iterator[Case]:
    sizes = Sizes(dim=128, num_layers=2, length=64)
    for name in FAMILIES:
        for stacked in (False, True):
            # A prediction is that of a stream which is whole between layers. One that
            # is split sends the same, and the output of the last layer once more.
            case = family_case(name, sizes, stacked=stacked, sequence_parallel=False)
            model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
            yield Case(
                f"{name}{', stacked' if stacked else ''}",
                model,
                case.loss_fn,
                case.batch,
            )


def foreign_cases() -> Iterator[Case]:
    from foreign_models import foreign_models

    return _cases_of(*foreign_models())


def stranger_cases() -> Iterator[Case]:
    from strangers import strangers

    return _cases_of(*strangers())


def _cases_of(models: Iterable[Any], missing: dict[str, str]) -> Iterator[Case]:
    """Make cases of models with `name`, `make`, `loss` and `batch`, and print why
    others are left out."""
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    for each in models:
        model = eqx.filter_eval_shape(each.make, jax.random.key(0))
        yield Case(each.name, model, each.loss, each.batch)


def other_cases() -> Iterator[Case]:
    """Programs on which predictions or bounds were wrong once."""

    def mean_square(model: Any, batch: Any, key: Any) -> Any:
        return (jax.vmap(model)(batch) ** 2).mean()

    def case(name: str, model: Callable[[Any], Any], *shape: int) -> Case:
        abstract = eqx.filter_eval_shape(model, jax.random.key(0))
        return Case(
            name, abstract, mean_square, jax.ShapeDtypeStruct(shape, jnp.float32)
        )

    def linear(in_size: int, out_size: int) -> eqx.nn.Linear:
        return eqx.nn.Linear(in_size, out_size, key=jax.random.key(0))

    class Tokens(eqx.Module):
        layers: list[eqx.nn.Linear]
        mix: Any = None

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                hidden = jax.nn.relu(jax.vmap(layer)(x))
                x = hidden if self.mix is None else self.mix @ hidden
            return x

    class Quantised(eqx.Module):
        up: Any
        up_scale: Any
        down: Any
        down_scale: Any

        def __call__(self, x: Any) -> Any:
            hidden = jax.nn.gelu((self.up.astype(jnp.float32) @ x) * self.up_scale)
            return x + (self.down.astype(jnp.float32) @ hidden) * self.down_scale

    class Recurrent(eqx.Module):
        cell: eqx.nn.LSTMCell
        out: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                carry = self.cell(x, carry)
                return carry, carry[0]

            zero = jnp.zeros(self.cell.hidden_size)
            return jax.vmap(self.out)(jax.lax.scan(step, (zero, zero), x)[1])

    mix = sparse.BCOO.fromdense(
        jnp.asarray(np.random.default_rng(0).random((64, 64)) < 0.1, jnp.float32)
    )
    int8 = [
        jnp.zeros((8192, 2048), jnp.int8),
        jnp.ones(8192),
        jnp.zeros((2048, 8192), jnp.int8),
        jnp.ones(2048),
    ]
    yield case(
        "long tokens",
        lambda key: Tokens([linear(64, 256), linear(256, 64)] * 2),
        4,
        8192,
        64,
    )
    yield case(
        "BCOO",
        lambda key: Tokens([linear(64, 256), linear(256, 64)] * 2, mix),
        8,
        64,
        64,
    )
    yield case("int8", lambda key: Quantised(*int8), 16, 2048)
    yield case(
        "LSTM",
        lambda key: Recurrent(eqx.nn.LSTMCell(64, 128, key=key), linear(128, 64)),
        16,
        16,
        64,
    )


def drawn(strategy: Any, number: int) -> list[Any]:
    """Return the same draws of a strategy each time."""
    import hypothesis

    found = []

    def keep(x: Any) -> None:
        found.append(x)

    settings = hypothesis.settings(
        max_examples=2 * number,
        database=None,
        phases=[hypothesis.Phase.generate],
        deadline=None,
        suppress_health_check=[
            hypothesis.HealthCheck.filter_too_much,
            hypothesis.HealthCheck.too_slow,
        ],
    )
    hypothesis.seed(0)(settings(hypothesis.given(strategy)(keep)))()
    return found[:number]


CONVOLUTIONS = ("convolution", "per_example")


def generated_cases(number: int = 300) -> Iterator[Case]:
    """Generate the same programs each time, of all families of operations but
    convolutions.

    Of some gradients of convolutions, XLA's partitioner aborts the process;
    `train_step` replaces these.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    generated = importlib.import_module("gradients.programs")
    operations = importlib.import_module("gradients.operations").OPERATIONS
    jax.config.update("jax_enable_x64", True)
    families = [family for family in generated.FAMILIES if family not in CONVOLUTIONS]

    def is_compiled(spec: Any) -> bool:
        return all(
            operations[entry["name"]].family not in CONVOLUTIONS
            for entry in spec["operations"]
        )

    each = math.ceil(number / len(families))
    for family in families:
        for i, spec in enumerate(
            drawn(generated.programs(family).filter(is_compiled), each)
        ):
            program, batch = generated.build(spec), generated.make_batch(spec)
            names = "+".join(entry["name"] for entry in spec["operations"])
            model = {"layers": program.weights}

            def loss(model: Any, batch: Any, key: Any, program: Any = program) -> Any:
                return program.loss(model, batch)

            yield Case(f"{family} {i} {names}"[:45], model, loss, batch)


# Engines.


def naive(model: Any, pick: Callable[[tuple[int, ...]], int | None]) -> Specs:
    """Split one dim of every floating array of two or more dims, chosen by its shape
    alone."""
    specs = {}
    for path, x in rx.to_arrays(model).items():
        dim = (
            pick(x.shape)
            if len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating)
            else None
        )
        specs[path] = (
            PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "tensor")
        )
    return specs


def first_dim(shape: tuple[int, ...]) -> int | None:
    return 0 if shape[0] % TENSOR == 0 else None


def largest_dim(shape: tuple[int, ...]) -> int | None:
    dims = [i for i, size in enumerate(shape) if size % TENSOR == 0 and size > 1]
    return max(dims, key=lambda i: shape[i], default=None)


def parallax(case: Case) -> Specs | None:
    """Return the splits of google-parallax over its `model` axis, where that divides;
    `None` if it is not installed."""
    try:
        from parallax.sharding.auto_shard import get_shardings  # type: ignore[import-not-found]
    except ImportError:
        return None
    arrays = rx.to_arrays(case.model)
    params = {
        path: x for path, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)
    }
    others = {path: x for path, x in arrays.items() if path not in params}
    dynamic, static = eqx.partition(
        case.model, lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    treedef = jax.tree.structure(dynamic)

    def loss(params: Any, others: Any, batch: Any) -> Any:
        leaves = [{**params, **others}[path] for path in rx.to_arrays(dynamic)]
        result = case.loss(
            eqx.combine(jax.tree.unflatten(treedef, leaves), static),
            batch,
            jax.random.key(0),
        )
        first = result[0] if isinstance(result, tuple) else result
        return first.value if isinstance(first, rx.Mean) else first

    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(
            (2, TENSOR), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
    ):
        (chosen, *_), _ = get_shardings(loss, params, others, case.batch)

    def ours(path: str, x: Any) -> PartitionSpec:
        spec = chosen.get(path, ())
        return PartitionSpec(
            *(
                "tensor" if a and n % TENSOR == 0 else None
                for a, n in zip(spec, x.shape)
            )
        )

    return {path: ours(path, x) for path, x in arrays.items()}


def memory(model: Any, specs: Specs, mesh: Mesh) -> float:
    """Return the bytes of the model's arrays on one device."""
    total = 0.0
    for path, x in rx.to_arrays(model).items():
        split = math.prod(
            mesh.shape[axis] for axis in jax.tree.leaves(tuple(specs[path]))
        )
        total += math.prod(x.shape) * getattr(x.dtype, "itemsize", 4) / split
    return total


HEAD = ["", "dataflow", "predicted", "at least", "gap", "merged", "paths", "hand"]
HEAD += ["parallax", "column", "largest", "whole"]
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
    return [
        f"{1e3 * (after - before):.0f}" for before, after in itertools.pairwise(marks)
    ]


def faults(
    sent: dict[str, int], held: dict[str, float], predicted: float, least: float
) -> list[str]:
    """Return what is wrong with the numbers of a row: bytes compiled and held, by
    engine, and predicted bytes.

    Without a prediction, `predicted` is 0.
    """
    found, ours = [], sent["dataflow"]
    if predicted and not 0.9 * ours <= predicted <= 1.1 * ours:
        found.append(f"predicted {predicted:.0f}, compiled {ours}")
    as_small = [name for name in sent if held[name] <= 1.001 * held["dataflow"]]
    best = min(as_small, key=lambda name: sent[name])
    if least > sent[best]:
        found.append(f"at least {least:.0f}, but {best} sends {sent[best]}")
    if "paths" in as_small and ours > sent["paths"]:
        found.append(f"sends {ours}, but paths sends {sent['paths']}")
    return found


def row(case: Case, mesh: Mesh, *, engines: bool = True) -> tuple[list[str], list[str]]:
    """Make a line of the table: MB sent in a step, MB of arrays on a device, and the
    time for the decision.

    Also return its faults.
    """
    times = times_of(case) if engines else ["-"] * 3
    analysis = analysis_of(case.model, mesh, case.loss, case.batch)
    assert analysis is not None
    by_flow = {
        path: d.spec
        for path, d in explain_by(analysis, case.model, mesh).decisions.items()
    }
    by_paths = {
        path: d.spec for path, d in rx.explain(case.model, mesh).decisions.items()
    }
    whole = naive(case.model, lambda shape: None)
    layouts: dict[str, Specs | None] = {
        "dataflow": by_flow,
        "paths": by_paths,
        "hand": case.hand,
    }
    cells: dict[str, str] = {}
    if engines:
        try:
            layouts["parallax"] = parallax(case)
        except Exception as error:
            cells["parallax"] = type(error).__name__[:9]
        layouts["column"] = naive(case.model, first_dim)
        layouts["largest"] = naive(case.model, largest_dim)
        layouts["whole"] = whole
    sent: dict[str, int] = {}
    tried: list[tuple[Specs, str]] = []
    for name, specs in layouts.items():
        if specs is None:
            continue
        same = next((other for known, other in tried if known == specs), name)
        tried.append((specs, name))
        try:
            if same in cells:
                sent[name] = sent[same]
            else:
                program = case.model, case.loss, case.batch
                sent[name] = compiled_bytes(
                    *program, specs, mesh, corrected=not engines
                )
            cells[name] = f"{sent[name] / 1e6:.3f}"
        except Exception as error:
            cells[name] = cells.get(same, type(error).__name__[:9])
    prediction = analysis.simulated
    predicted, merged = (prediction.num_bytes(merged=flag) for flag in (False, True))
    least = lower_bound(analysis, merged=False)
    numbers = [f"{x / 1e6:.3f}" for x in (predicted, least)] + [
        f"{least / max(predicted, 1):.2f}"
    ]
    numbers.append(f"{merged / 1e6:.3f}")
    if analysis.walk.opaque:
        predicted = least = 0.0
        numbers = ["opaque", "-", "-", "-"]
    held = {
        name: memory(case.model, specs, mesh)
        for name, specs in layouts.items()
        if specs is not None
    }
    found = (
        faults(sent, held, predicted, least) if "dataflow" in sent else ["not compiled"]
    )
    sizes = [
        f"{x / 1e6:.3f}"
        for x in (held["dataflow"], held["paths"], memory(case.model, whole, mesh))
    ]
    others = [
        cells.get(name, "-")
        for name in ("paths", "hand", "parallax", "column", "largest", "whole")
    ]
    counts = [str(len(by_flow)), str(len(analysis.walk.visits))]
    return [
        case.name,
        cells["dataflow"],
        *numbers,
        *others,
        *sizes,
        *counts,
        *times,
    ], found


def main(names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parent))
    mesh = rx.make_mesh(tensor=TENSOR)
    sources: dict[str, Callable[[], Iterator[Case]]] = {
        "zoo": zoo_cases,
        "families": family_cases,
        "others": other_cases,
        "foreign": foreign_cases,
        "strangers": stranger_cases,
    }
    number = int(names.pop()) if names and names[-1].isdigit() else 300
    found: list[str] = []
    for name in names or sources:
        print(
            f"\n{name}: MB sent by a device in a step on data 2 x tensor 4, MB of "
            "arrays on a device\n"
        )
        print(line(HEAD))
        for case in generated_cases(number) if name == "generated" else sources[name]():
            try:
                cells, wrong = row(case, mesh, engines=name != "generated")
            except (NotImplementedError, TypeError, ValueError) as error:
                if name != "generated":
                    raise
                print(
                    f"{case.name}: left out, {type(error).__name__}: {str(error)[:60]}",
                    file=sys.stderr,
                )
                continue
            print(line(cells), flush=True)
            cause = KNOWN.get(case.name)
            if cause is None:
                found += [f"{case.name}: {text}" for text in wrong]
            elif wrong:
                print(f"    known: {'; '.join(wrong)}: {cause}", flush=True)
            else:
                found.append(f"{case.name}: right, strike it from KNOWN")
    if found:
        sys.exit("\n".join(["", f"{len(found)} faults:", *found]))


def line(cells: list[str]) -> str:
    return cells[0].ljust(46) + "".join(cell.rjust(10) for cell in cells[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
