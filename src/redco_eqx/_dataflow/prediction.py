"""Bytes that a layout sends, predicted from the program, for `explain`."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import Precision

from redco_eqx._base.jaxprs import dtype_of
from redco_eqx._base.tree import ring_bytes, size_text
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.search import best_set
from redco_eqx._dataflow.values import (
    ENDS,
    Event,
    Split,
    Value,
    events_of,
    resolve,
    short_line,
    total_bytes,
)
from redco_eqx._dataflow.walk import Costs

# The least number of bytes that any layout of a stated class sends.


def lower_bound(analysis: Analysis, *, merged: bool) -> float:
    """A lower bound on the bytes that a device sends in a step, for layouts that free
    as much memory as the chosen one.

    The bound holds for all layouts that split each parameter along at most one dim,
    split arrays that share an index in the same way, and split the batch over the other
    axes. Only unavoidable bytes count: sums over devices of products over a split dim,
    lookups in a split table, and gradients. The bound assumes that changes of layout
    are free, and that split weights are used as they are split. `merged` has the same
    meaning as in [`total_bytes`][]. If the chosen layout is not of this kind, only
    gradients count: in any layout, a device receives the gradient of its part of a
    parameter.
    """
    costs = analysis.costs
    layout = analysis.layout
    numbers = set(layout.values())
    meet = any(len(numbers.intersection(group)) > 1 for group in costs.clashes)
    if meet or any(
        leaf not in layout for number in numbers for leaf in costs.splits[number].leaves
    ):
        held = [
            x.num_bytes / (costs.tensor if leaf in layout else 1)
            for leaf, x in enumerate(analysis.walk.gradients)
            if x is not None and x.is_data
        ]
        return ring_bytes("all-reduce", sum(held), costs.num_shards)
    batch = _least_over_batch(analysis)
    whole = total_bytes(batch, merged=merged)
    unsent = [0.0] * len(costs.splits)
    for event, size in batch:
        for number in costs.leads.splitting(event.sent.dims):
            unsent[number] += size * (1 - 1 / costs.tensor)
    # A sum that several splits could cause is shared among them.
    together: dict[Event, dict[Event, None]] = {}
    for split in costs.splits:
        for event, _ in split.sent:
            together.setdefault(event.summed_with(merged=merged), {})[event] = None
    shares = {event: 1 / len(group) for group in together.values() for event in group}
    worths = [
        unsent[split.number] - unavoidable(costs, split, shares)
        for split in costs.splits
    ]
    freed = [split.freed for split in costs.splits]
    least_freed = 0.999 * sum(freed[number] for number in sorted(numbers))
    options = [n for n, x in enumerate(worths) if x > 0 or least_freed > 0]
    chosen = best_set(worths, options, costs.clashes, freed, least_freed)
    return max(0.0, whole - sum(worths[n] for n in chosen))


def _least_over_batch(analysis: Analysis) -> list[tuple[Event, float]]:
    """The bytes over the batch axes that no program avoids: those of sums that make
    gradients or scatter rows.

    A sum with dims that no parameter has may be added up later, where it is smaller,
    such as in the gradient of a table of relative positions. The gradients of looked-up
    rows may go to the devices that store the rows. A program may compute where an array
    lies, instead of gathering it.
    """
    costs = analysis.costs
    found: list[tuple[Event, float]] = []
    of_parameters = {
        atom
        for x in analysis.walk.parameters
        for dim in x.dims
        for atom in resolve(dim)
    }
    for event in filter(costs.leads.over_batch, analysis.walk.events):
        size = costs.sent_over_batch(event, 1.0)
        is_gradient = of_parameters.issuperset(
            atom for dim in event.sent.dims for atom in resolve(dim)
        )
        is_scattered = event.equation.primitive.name.startswith("scatter")
        if is_gradient and is_scattered and event.block not in ENDS:
            size = min(size, _sent_as_rows(event, costs.num_shards))
        if event.kind == "sum" and (is_gradient or is_scattered):
            found.append((event, size))
    return found


def unavoidable(costs: Costs, split: Split, shares: Mapping[Event, float]) -> float:
    """Add up the bytes that a split sends in any case."""

    def is_split(value: Value) -> bool:
        # An activation may be whole where it could be split. A parameter of the split
        # is always split, but along only one dim if two have the index.
        return bool(value.weights) and split.number not in costs.leads.doubled(
            value.dims
        )

    total = 0.0
    for event, size in split.sent:
        weights = [x for x in event.arrays if is_split(x)]
        if event.kind in ("sum", "lookup") and weights:
            if not all(x.is_learned for x in event.arrays):
                # No split applies to a value that depends on no parameter. A compiler
                # may cut the value, and sum; or gather the weight.
                size = min(
                    size, *(costs.gathered(x.num_bytes * event.times) for x in weights)
                )
            total += size * shares[event]
    return total


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes that one device sends in a step by the ring algorithm, predicted from the
    program, in its dtypes.

    `communication` counts those of a compiled step in the same way (`sent_bytes`).

    - `num_bytes`: the total with a compiler that adds the results of products before it
        sums them over devices, as the compilers for TPU and GPU do.
    - `num_bytes_unmerged`: the total with a compiler that does not, such as that for
        CPU.
    - `at_least`: a lower bound, with a compiler that adds first. No layout in which
        arrays that share an index are split alike sends less, if its parameters take as
        little memory. Bytes over `fsdp` are not compared. If this layout has splits
        that meet, the bound holds for any layout: then only gradients count. 0 if an
        operation is not understood.
    - `opaque`: operations that are not understood. They are assumed to need their
        operands whole.
    """

    num_bytes: float
    num_bytes_unmerged: float
    at_least: float
    opaque: tuple[str, ...]

    def __str__(self) -> str:
        total = f"sent by a device in a step: {size_text(self.num_bytes)}"
        if self.num_bytes_unmerged > 1.01 * self.num_bytes:
            total += (
                f" ({size_text(self.num_bytes_unmerged)} on CPU, whose compiler sums "
                "before it adds)"
            )
        if self.at_least > 0:
            gap = f"{self.num_bytes / self.at_least:.2f}"
            total += (
                f"; lower bound with as little memory: {size_text(self.at_least)}, "
                f"ratio {gap}"
            )
        if self.opaque:
            total += (
                "\noperations without a rule, assumed to need whole operands: "
                f"{', '.join(self.opaque)}"
            )
        return total


class Stored(NamedTuple):
    """An array that is split where it is stored, into `num_parts`, and gathered for
    use.

    - `num_bytes`: those of the array as it is used, on one device.
    - `num_summed`: the number of parts along `fsdp` alone, over which gradients are
        summed.
    """

    num_bytes: float
    num_parts: int
    num_summed: int


def over_fsdp(
    analysis: Analysis,
    stored: Mapping[str, Stored],
    *,
    merged: bool,
    narrowed: bool = False,
) -> float:
    """Bytes that are sent because arrays are stored split, beside the all-reduces of
    their gradients.

    An array is gathered for the loss, and again for the gradient if that uses it.
    Scattering a gradient instead of summing it whole saves as much as a gather over
    `fsdp` sends. The blocks in `ENDS` gather once, several of them the same, and
    scatter: each of them, or with compilers that merge, once. With the others, and
    where activations are split, `train_step` gathers arrays only once that are used
    outside of loops. `merged` and `narrowed` are the answers of `merges` and `narrows`
    for the mesh.
    """
    uses = defaultdict[int, list[tuple[str, Value, float]]](list)
    in_loops = set[int]()
    read_wide = set[int]()
    for visit in analysis.walk.visits:
        if any(x.is_data for x in visit.results):
            for x in visit.operands:
                for leaf in x.weights:
                    uses[leaf].append((visit.block, x, visit.times))
                    in_loops |= {leaf} if visit.times > 1 else set()
                    read_wide |= set() if _reads_narrow(visit.equation) else {leaf}
    total = 0.0
    for leaf, path in enumerate(analysis.traced.paths):
        if path not in stored or not uses[leaf]:
            continue
        whole, num_parts, num_summed = stored[path]
        # An array that is used in each step of a loop is gathered once, and so is one
        # that is used in pieces.
        used = sum(
            {
                id(x): x.num_bytes * max(times, 1.0) for _, x, times in uses[leaf]
            }.values()
        )
        size = min(
            whole,
            used / (1 if analysis.dim_of(leaf) is None else analysis.costs.tensor),
        )
        is_trained = analysis.walk.gradients[leaf] is not None
        blocks = [block for block, *_ in uses[leaf]]
        most = 1 if (not merged or analysis.solution) and leaf not in in_loops else 2
        num_gathers = min(most, len(uses[leaf]))
        num_scatters = merged and is_trained
        if set(blocks).issubset(ENDS):
            # Each lookup has a gradient. The head has one, although it is used forward
            # and backward.
            num_gradients = blocks.count(ENDS[0]) + (ENDS[1] in blocks)
            num_gathers = 1
            num_scatters = (1 if merged else num_gradients) * is_trained
        if num_parts == analysis.costs.num_shards and analysis.costs.tensor == 1:
            total -= _saved_by_lookups(analysis, leaf, num_parts, merged=merged)
        gathered = num_gathers * (0.5 if narrowed and leaf not in read_wide else 1.0)
        total += gathered * ring_bytes("all-gather", size, num_parts)
        total -= num_scatters * ring_bytes(
            "reduce-scatter", size / num_summed, num_summed
        )
    return total


def _saved_by_lookups(
    analysis: Analysis, leaf: int, num_parts: int, *, merged: bool
) -> float:
    """Bytes that lookups outside the blocks save if the table is stored split: each
    device takes the rows that belong to its part, instead of summing the gradient of
    the whole table."""
    gradient = analysis.walk.gradients[leaf]
    sums = [] if gradient is None else events_of(gradient.sums)
    if merged and len(sums) > 1:  # the gradients of all uses are added first
        return 0.0
    # Scattering has saved one half already.
    kind = "all-gather" if merged else "all-reduce"
    saved = 0.0
    for event in sums:
        if (
            event.equation.primitive.name.startswith("scatter")
            and event.block not in ENDS
        ):
            sent = _sent_as_rows(event, num_parts)
            saved += max(0.0, ring_bytes(kind, event.num_bytes, num_parts) - sent)
    return saved


def _sent_as_rows(event: Event, num_parts: int) -> float:
    """Bytes sent if each gradient of a looked-up row goes to the device that stores the
    row."""
    return ring_bytes(
        "all-to-all", event.arrays[0].num_bytes * event.times / num_parts, num_parts
    )


def _reads_narrow(equation: JaxprEqn) -> bool:
    """True for a product of float32 numbers that a TPU computes in bfloat16."""
    if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
        return False
    precisions = equation.params["precision"] or ()
    return (
        set(precisions) <= {Precision.DEFAULT}
        and dtype_of(equation.invars[0]) == jnp.float32
    )


def sent_by_axes(
    analysis: Analysis,
    stored: Mapping[str, Stored],
    *,
    merged: bool,
    narrowed: bool = False,
) -> tuple[float, float, float]:
    """Bytes that a layout sends over `tensor`, for sums over the batch axes, and for
    arrays stored split."""
    return *analysis.sent(merged=merged), over_fsdp(
        analysis, stored, merged=merged, narrowed=narrowed
    )


def predict_communication(
    analysis: Analysis, stored: Mapping[str, Stored]
) -> Prediction:
    """Predict the bytes that the layout of `analysis` sends, with those that gather the
    `stored` arrays."""
    *_, gathered = sent = sent_by_axes(analysis, stored, merged=True)
    opaque = analysis.walk.opaque
    least = 0.0 if analysis.solution or opaque else lower_bound(analysis, merged=True)
    return Prediction(
        num_bytes=sum(sent),
        num_bytes_unmerged=sum(sent_by_axes(analysis, stored, merged=False)),
        at_least=min(least + gathered, sum(sent)) if least > 0 else 0.0,
        opaque=tuple(
            f"{name} ({len(x)}, first at {short_line(x[0])})"
            for name, x in opaque.items()
        ),
    )
