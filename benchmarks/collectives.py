"""The communication of a train step, read from the compiled program: nothing is run, no
array is made.

    python benchmarks/collectives.py
    # only table 4; for a TPU if its compiler is installed
    python benchmarks/collectives.py fsdp [v5e:2x4]

1. The quickstart's model, which is plain `eqx.nn`, and the library's LLaMA, GPT-2,
   GPT-J, OPT, T5 and BART, laid out by `shard_rules` on data 2 x tensor 4 and with the
   stream between layers whole, compared with the least that this layout needs.
2. LLaMA on other meshes: memory and bytes, for each choice of recomputation in the
   backward pass, with the stream between layers whole and split along the tokens.
3. The quickstart's model on other meshes.
4. LLaMA, GPT-2, T5 and BART on fsdp 8, in a list and stacked: MiB sent and the peak of
   a device, for each value of `reshard_after_forward`.

Sizes are those of results, in MiB per device and step, for one `train_step` with AdamW
in float32. With U the size of one activation [batch on a device, length, dim], the
least of a Megatron layout is:

- tensor axis: 2 U a layer forward and 2 U backward (1 U and 1 U where attention and MLP
  are side by side), 1 U for the lookup in a split vocabulary, and backward 1 U for the
  head. With an encoder, 3 U a layer of the decoder each way, 1 U for the encoder's
  lookup, and backward 1 U for the gradient of the encoder's output: keys and values of
  all cross-attentions read it, so their gradients are added before they are reduced.
- data axis: the gradient of each parameter once: the bytes of a device's parameters.

The reductions over a split vocabulary in the cross-entropy, [batch on a device, length]
at most, and those of the gradient norm's scalars count as "small".
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from workloads import (
    COMPILER_OPTIONS,
    ENCODER_DECODERS,
    FAMILIES,
    MIB,
    Case,
    Overrides,
    Sizes,
    abstract_model,
    family_case,
    lower_step,
    num_shards,
    quickstart_case,
    table,
)

import redco_eqx as rx
from redco_eqx._compiled.communication import Collective, Communication, memory_bytes
from redco_eqx._compiled.hlo import num_elements, shape_bytes
from redco_eqx._planning.targets import find_target


def step_communication(
    case: Case,
    mesh: Mesh,
    *,
    train: bool = True,
    overrides: Overrides = (),
    **options: Any,
) -> Communication:
    """Return the communication of a step with these options, or of a forward pass if
    not `train`."""
    lowered = lower_step(case, mesh, train=train, overrides=overrides, **options)
    return rx.communication(lowered.compile(compiler_options=COMPILER_OPTIONS), mesh)


class Result(NamedTuple):
    """The result of one collective: an array on each device, `times` per step."""

    kind: str
    axes: tuple[str, ...]
    small: bool
    backward: bool
    size: int
    times: int


def results(found: Iterable[Collective], case: Case, mesh: Mesh) -> list[Result]:
    """Separate the results that the compiler combined: the compiler, not the layout,
    chooses the all-reduces that share an instruction. A small result has at most [batch
    on a device, length] over the tensor axis; over other axes it is a scalar."""
    rows = math.prod(case.activation[:2]) // num_shards(mesh)
    apart = []
    for c in found:
        # The pieces of one all-to-all that the CPU compiler prints stay together.
        for shapes in [[x] for x in c.shapes] if c.kind == "all-reduce" else [c.shapes]:
            small = sum(map(num_elements, shapes)) <= (
                rows if "tensor" in c.axes else 1
            )
            size = sum(map(shape_bytes, shapes))
            apart.append(Result(c.kind, c.axes, small, c.is_backward, size, c.count))
    assert total_bytes(apart) == sum(c.total_bytes for c in found)
    return apart


def count(
    found: Iterable[Result], *, small: bool = False
) -> dict[tuple[str, tuple[str, ...]], int]:
    """Count the results, `{(kind, axes): number}`: only large ones, or only small ones
    if `small`."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for r in found:
        if r.small == small:
            counts[r.kind, r.axes] += r.times
    return dict(counts)


def total_bytes(found: Iterable[Result]) -> int:
    return sum(r.size * r.times for r in found)


# The least.


def activation_bytes(case: Case, mesh: Mesh) -> int:
    """Return U, in float32."""
    return 4 * math.prod(case.activation) // num_shards(mesh)


def parameter_bytes(case: Case, mesh: Mesh) -> int:
    """Return the bytes of all parameters on one device."""
    model, _ = abstract_model(case, mesh)
    arrays = rx.to_arrays(model).values()
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays
    )


def least(case: Case, mesh: Mesh) -> dict[str, int]:
    """Return the bytes of the Megatron layout over the tensor axis, forward and
    backward, and over data."""
    one_way = case.reductions * activation_bytes(case, mesh)
    return {
        "forward": one_way,
        "backward": one_way,
        "gradients": parameter_bytes(case, mesh),
    }


# The tables.


def mib(size: float) -> str:
    return f"{size / MIB:.2f}"


def excess(
    name: str, found: list[Result], needed: dict[str, int], unit: int
) -> list[str]:
    """Describe the communication of a model beyond the least, most bytes first."""
    parts: dict[str, list[Result]] = {}
    for r in found:
        if r.small:
            continue
        if r.axes == ("data",):
            part = "gradients"
        else:
            part = "backward" if r.backward else "forward"
            part += "" if r.kind == "all-reduce" else f" {r.kind}"
        parts.setdefault(part, []).append(r)
    lines = []
    for part, members in parts.items():
        over = total_bytes(members) - needed.get(part, 0)
        if over > 0.01 * sum(needed.values()):
            number = sum(r.times for r in members)
            where = (
                "over data"
                if part == "gradients"
                else f"= {total_bytes(members) / unit:g} U over tensor"
            )
            least_of = (
                f"at least {mib(needed[part])}" if part in needed else "none is needed"
            )
            lines.append(
                (
                    over,
                    f"  {name} {part}: {number} arrays, {mib(total_bytes(members))} "
                    f"MiB {where}; {least_of}",
                )
            )
    return [line for _, line in sorted(lines, reverse=True)]


def report_models(cases: dict[str, Case], mesh: Mesh) -> None:
    """Print table 1."""
    head = ["", "tensor", "MiB", "small", "MiB", "data", "MiB"]
    rows = [[*head, "total MiB", "least MiB", "ratio"]]
    remarks = []
    for name, case in cases.items():
        found = results(step_communication(case, mesh), case, mesh)
        needed = least(case, mesh)
        large = [r for r in found if not r.small]
        over_data = [r for r in large if r.axes == ("data",)]
        over_tensor = [r for r in large if r.axes != ("data",)]
        small = [r for r in found if r.small]
        row = [name]
        for group in (over_tensor, small, over_data):
            row += [str(sum(r.times for r in group)), mib(total_bytes(group))]
        total, minimum = total_bytes(found), sum(needed.values())
        row += [mib(total), mib(minimum), f"{total / minimum:.2f}"]
        rows.append(row)
        remarks += excess(name, found, needed, activation_bytes(case, mesh))
    print(
        "One train step on data 2 x tensor 4: number of results, and MiB of them, per "
        "device\n"
    )
    print(table(rows))
    print(f"\nBeyond the least:\n{chr(10).join(remarks)}\n\n{NOTES}")


NOTES = (
    "A result is one array; the compiler combines several into one instruction. "
    "Small is at most [batch on a device,\n"
    "length]. U is 0.5 MiB, the quickstart's 0.19. The ratio is total / least. "
    "Beside redco: `nox -s peers`.\n"
    "- The quickstart's model is the user's own, plain `eqx.nn`: the CPU compiler "
    "reduces the input gradients of its\n"
    "  separate query, key and value apart, where one sum would do. The compiler for "
    "TPU adds before it reduces\n"
    "  (`nox -s aot`); with `column` every compiler does.\n"
    "- GPT-J's attention and MLP stand side by side: one reduction each way serves "
    "both.\n"
    "- A table has a gradient for each use, a lookup or a head: the CPU compiler "
    "reduces those of one over data\n"
    "  apart, the one for TPU adds them first."
)


def report_memory(name: str, sizes: Sizes, meshes: dict[str, Mesh]) -> None:
    """Print table 2."""
    head = [
        "mesh",
        "remat",
        "stream",
        "tensor MiB",
        "fsdp MiB",
        "data MiB",
        "mixed MiB",
    ]
    rows = [[*head, "sent MiB", "weights MiB", "memory MiB"]]
    for mesh_name, mesh in meshes.items():
        for remat, parallel in itertools.product(
            ("none", "full", "row_out"), (False, True)
        ):
            if parallel and mesh.shape["tensor"] == 1:
                continue
            case = family_case(
                name, sizes, stacked=True, remat=remat, sequence_parallel=parallel
            )
            compiled = lower_step(case, mesh).compile(compiler_options=COMPILER_OPTIONS)
            found = rx.communication(compiled, mesh)
            parts = dict.fromkeys(("tensor", "fsdp", "data", "mixed"), 0)
            for c in found:
                parts[
                    c.axes[0] if len(c.axes) == 1 and c.axes[0] in parts else "mixed"
                ] += c.sent_bytes
            memory = compiled.memory_analysis()
            assert memory is not None
            row = [mesh_name, remat, "split" if parallel else "whole"]
            row += [
                mib(n)
                for n in (
                    *parts.values(),
                    sum(parts.values()),
                    parameter_bytes(case, mesh),
                )
            ]
            rows.append(
                [*row, mib(memory.argument_size_in_bytes + memory.temp_size_in_bytes)]
            )
            mesh_name = ""
    print(
        f"\n{name} (layers stacked, length {sizes.length}, batch {sizes.batch_size}): "
        "bytes sent, and memory\n"
    )
    print(table(rows, num_left=3))
    print(f"\n{MEMORY_NOTES}")


MEMORY_NOTES = (
    "MiB sent is by the ring algorithm: an all-reduce is a reduce-scatter and an "
    "all-gather. The CPU compiler makes\n"
    "no reduce-scatter of a sum and a slice: layers' gradients over fsdp are sent "
    "twice; TPU's does (`nox -s aot`).\n"
    "Weights are a device's own part, at rest; memory is arguments (weights, and "
    "twice as much for AdamW) and\n"
    "temporaries, as planned by the CPU compiler, which fuses less than others.\n"
    "- `row_out` keeps what `row` returned, so that no sum over tensor is repeated; "
    "`full` repeats those of the\n"
    "  forward pass. A split stream gathers what `column` reads, again backward if "
    "activations are not kept.\n"
    "- Under fsdp, `none` keeps the results of products, and gathers each layer's "
    "weights forward and backward (the\n"
    "  layers are stacked; table 4 has lists)."
)


def report_meshes(case: Case, meshes: dict[str, Mesh]) -> None:
    """Print table 3."""
    print(
        "\nThe quickstart's model on other meshes: instructions by kind, axes and "
        "line, per device"
    )
    for name, mesh in meshes.items():
        print(f"\n{name}\n{step_communication(case, mesh)}")
    print(f"\n{MESH_NOTES}")


MESH_NOTES = (
    "MiB sent is by the ring algorithm, which makes kinds comparable.\n"
    "- tensor 8: the 4 heads do not divide, so attention is whole on every device "
    "and communicates nothing.\n"
    "- fsdp 8: parameters are gathered once, gradients reduced once; the CPU compiler "
    "has no reduce-scatter."
)


def report_kept(target: str | None) -> None:
    """Print table 4."""
    devices: Sequence[Any] = jax.devices()
    options: dict[str, Any] = COMPILER_OPTIONS
    if target is not None:
        found = find_target(target)
        options, devices = dict(found.compiler_options), found.devices
    mesh = rx.make_mesh(fsdp=len(devices), devices=devices)
    rows = [
        [
            "MiB sent, MiB at the peak",
            "gathered again",
            "",
            "by default",
            "",
            "kept",
            "",
        ]
    ]
    for name, stacked in itertools.product(
        ("LLaMA", "GPT-2", "T5", "BART"), (False, True)
    ):
        row = [f"{name}, {'stacked' if stacked else 'list'}"]
        case = family_case(name, stacked=stacked)
        for reshard in (True, None, False):
            lowered = lower_step(case, mesh, reshard_after_forward=reshard)
            compiled = lowered.compile(compiler_options=options)
            peak = memory_bytes(compiled)[0]
            row += [
                f"{x / MIB:.1f}"
                for x in (rx.communication(compiled, mesh).total.sent_bytes, peak)
            ]
        rows.append(row)
        print("  ".join(row), flush=True)
    print(
        f"\nfsdp {len(devices)}, by the compiler for {target or 'CPU'}\n\n{table(rows)}"
    )


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=["fsdp"], help="only this table")
    parser.add_argument(
        "target", nargs="?", help="devices to compile for, by the names of `rx.plan`"
    )
    args = parser.parse_args()
    if args.table == "fsdp":
        report_kept(args.target)
        return
    quickstart = quickstart_case()
    # The least is that of a stream that is whole between layers.
    families = {
        name: family_case(name, sequence_parallel=False)
        for name in FAMILIES + ENCODER_DECODERS
    }
    report_models({"quickstart": quickstart, **families}, rx.make_mesh(tensor=4))
    meshes = {
        "data 8": rx.make_mesh(),
        "tensor 8": rx.make_mesh(tensor=8),
        "fsdp 8": rx.make_mesh(fsdp=8),
        "2 x 2 x 2": rx.make_mesh(tensor=2, fsdp=2),
    }
    report_memory(
        "LLaMA",
        Sizes(length=256),
        {name: mesh for name, mesh in meshes.items() if name != "data 8"},
    )
    report_meshes(quickstart, meshes)
    report_kept(None)


if __name__ == "__main__":
    main()
