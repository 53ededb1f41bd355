"""Bytes that a layout sends, predicted from the program, for `explain`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.engine import Analysis, factors, largest_sends
from redco_eqx._dataflow.search import best_set
from redco_eqx._dataflow.values import ENDS, Event, Split, Value, short_line, total_bytes
from redco_eqx._dataflow.walk import Costs

# The least number of bytes that any layout of a stated class sends.


def lower_bound(analysis: Analysis, *, merged: bool) -> float:
    """Bytes that a device sends at least in a step, in a layout that frees as much memory as the chosen one.

    The bound holds for all layouts that split each parameter along at most one dim, split arrays that share an
    index alike, and split the batch over the other axes. Only unavoidable bytes count: sums over devices of
    products over a split dim, lookups in a split table, and gradients. Changes of layout are assumed to be
    free, and split weights to be used as they are split. `merged` is that of [`total_bytes`][]. If the chosen
    layout is not of this kind, only gradients count: in any layout a device is sent the gradient of the part of
    a parameter that it has.
    """
    costs, layout = analysis.costs, analysis.layout
    numbers = set(layout.values())
    meet = any(len(numbers.intersection(group)) > 1 for group in costs.clashes)
    if meet or any(leaf not in layout for number in numbers for leaf in costs.splits[number].leaves):
        held = [
            x.num_bytes / (costs.tensor if leaf in layout else 1)
            for leaf, x in enumerate(analysis.walk.gradients)
            if x is not None and x.is_data
        ]
        return sum(held, 0.0) if costs.num_shards > 1 else 0.0
    batch = [(e, e.num_bytes) for e in analysis.walk.events if costs.leads.over_batch(e)]
    whole = total_bytes(batch, merged=merged)
    # A sum that several splits could cause is shared among them.
    together: dict[Event, dict[Event, None]] = {}
    for split in costs.splits:
        for event, _ in split.sent:
            together.setdefault(event.summed_with(merged=merged), {})[event] = None
    shares = {event: 1 / len(group) for group in together.values() for event in group}
    worths = [split.unsent - unavoidable(costs, split, shares) for split in costs.splits]
    freed = [split.freed for split in costs.splits]
    least_freed = 0.999 * sum(freed[number] for number in sorted(numbers))
    options = [n for n, x in enumerate(worths) if x > 0 or least_freed > 0]
    chosen = best_set(worths, freed, options, costs.clashes, least_freed)
    return max(0.0, whole - sum(worths[n] for n in chosen))


def unavoidable(costs: Costs, split: Split, shares: Mapping[Event, float]) -> float:
    """Add up the bytes that a split sends in any case."""

    def is_split(value: Value) -> bool:
        # An activation may be whole where it could be split. A parameter of the split is always split, but
        # along only one dim if two have the index.
        return bool(value.weights) and split.number not in costs.leads.doubled(value.dims)

    total = 0.0
    for event, size in split.sent:
        weights = [x for x in event.arrays if is_split(x)]
        if event.kind in ("sum", "lookup") and weights:
            if not all(x.is_learned for x in event.arrays):
                # Nothing splits a value that depends on no parameter. A compiler may cut it, and sum; or gather
                # the weight.
                size = min(size, *(float(x.num_bytes * event.times) for x in weights))
            total += size * shares[event]
    return total


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes that one device sends in a step, predicted from the program.

    A collective counts the size of its result; with split activations it counts the bytes that a ring sends.

    - `num_bytes`: the total with a compiler that adds the results of products before it sums them over devices,
        as the compilers for TPU and GPU do.
    - `num_bytes_unmerged`: the total with a compiler that does not, such as that for CPU.
    - `at_least`: a lower bound, with a compiler that adds first. No layout in which arrays that share an index
        are split alike sends less, if its parameters take as little memory. Bytes over `fsdp` are not compared.
        If this layout has splits that meet, the bound holds for any layout: then only gradients count.
    - `lines`: the places that send, most bytes first.
    - `advice`: advice on changes in the model.
    - `opaque`: operations that are not understood. They are assumed to need their operands whole.
    """

    num_bytes: float
    num_bytes_unmerged: float
    at_least: float
    lines: tuple[str, ...]
    advice: tuple[str, ...]
    opaque: tuple[str, ...]

    def __str__(self) -> str:
        total = f"sent by a device in a step: {size_text(self.num_bytes)}"
        if self.num_bytes_unmerged > 1.01 * self.num_bytes:
            total += f" ({size_text(self.num_bytes_unmerged)} on CPU, whose compiler sums before it adds)"
        if self.at_least > 0:
            gap = f"{self.num_bytes / self.at_least:.2f} times that"
            total += f"; at least {size_text(self.at_least)} with as little memory, this is {gap}"
        unknown = [f"not understood, and taken to need operands whole: {', '.join(self.opaque)}"]
        lines = [total, *(f"  {line}" for line in self.lines), *self.advice, *(unknown if self.opaque else [])]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that is split where it is stored, into `num_parts`, and gathered for use.

    - `num_bytes`: bytes of the array as it is used, on one device.
    - `over_data`: true if the gradient is also summed over an axis that does not split the stored array.
    """

    num_bytes: float
    num_parts: int
    over_data: bool


def over_fsdp(analysis: Analysis, stored: Mapping[str, Stored], *, merged: bool) -> float:
    """Bytes that gathering adds in a step.

    An array is gathered for the loss and again for its gradient. The gradient is summed whole over the axes
    that store the array, which counts among the sums over the batch axes, and in parts over the other axes. The
    blocks in `ENDS` gather once (several of them gather the same), and give each device its part of the
    gradient.
    """
    total, paths = 0.0, analysis.traced.paths
    users: dict[int, dict[str, None]] = {}
    for step in analysis.walk.steps:
        if any(x.is_data for x in step.results):
            for leaf in (leaf for x in step.operands for leaf in x.weights):
                users.setdefault(leaf, {})[step.block] = None
    for path, array in stored.items():
        leaf = paths.index(path) if path in paths else None
        part = array.num_bytes / array.num_parts
        blocks = [] if leaf is None else list(users.get(leaf, ()))
        is_trained = leaf is not None and analysis.walk.gradients[leaf] is not None
        if blocks and all(block in ENDS for block in blocks) and is_trained:
            num_sums = 1 if merged else len(blocks)
            total += array.num_bytes + len(blocks) * part
            total += num_sums * (part * array.over_data - array.num_bytes)
        else:
            total += 2 * array.num_bytes + part * (array.over_data and is_trained)
    return total


def opaque_of(analysis: Analysis) -> tuple[str, ...]:
    """The operations that are not understood."""
    return tuple(
        f"{name} ({len(found)}, first at {short_line(found[0])})"
        for name, found in analysis.walk.opaque.items()
    )


def predict_communication(analysis: Analysis, stored: Mapping[str, Stored]) -> Prediction:
    """Predicts the bytes that the layout of `analysis` sends, with those that gather the `stored` arrays."""
    costs, paths = analysis.costs, analysis.traced.paths
    sent = analysis.sent(analysis.layout)
    merged, unmerged = (sent.num_bytes(merged=flag) for flag in (True, False))
    least = lower_bound(analysis, merged=True)
    numbers = dict.fromkeys(analysis.layout.values())
    splits = [costs.splits[number] for number in numbers]
    over_batch = sum((size for event, size in sent.events if costs.leads.over_batch(event)), 0.0)
    groups: dict[str, list[Split]] = {}
    for split in splits:
        name = re.sub(r"\d+", "#", paths[next(iter(split.leaves))])
        groups.setdefault(f"{name} {len(split.leaves)}", []).append(split)
    sizes = {"over the batch axes, gradients before all": over_batch}
    sizes |= {_line(group, analysis): _total(group) for group in groups.values()}
    gathered, gathered_unmerged = (over_fsdp(analysis, stored, merged=flag) for flag in (True, False))
    sizes[OVER_FSDP] = gathered
    return Prediction(
        num_bytes=merged + gathered,
        num_bytes_unmerged=unmerged + gathered_unmerged,
        at_least=min(least, merged) + gathered if least > 0 else 0.0,
        lines=lines_of(sizes),
        advice=tuple(_advice(group, analysis) for group in groups.values() if group[0].crossed),
        opaque=opaque_of(analysis),
    )


OVER_FSDP = "over fsdp: weights gathered, and parts of their gradients"


def lines_of(sizes: Mapping[str, float]) -> tuple[str, ...]:
    """Lines for a reader, most bytes first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(f"{size_text(size)} {name}" for name, size in ordered if size > 0)


def _total(group: Sequence[Split]) -> float:
    return sum(split.num_bytes(merged=True) for split in group)


def _line(group: Sequence[Split], analysis: Analysis) -> str:
    first = group[0]
    leaf, dim = next(iter(first.leaves.items()))
    others = len(first.leaves) - 1
    name = f"dim {dim} of {analysis.traced.paths[leaf]}, {factors(analysis.walk.parameters[leaf].dims[dim])}"
    name += f", and {others} more" if others else ""
    name += f" (and {len(group) - 1} splits like it)" if len(group) > 1 else ""
    sent = [pair for split in group for pair in split.sent]
    return f"for {name}: {largest_sends(sent)}"


def _advice(group: Sequence[Split], analysis: Analysis) -> str:
    """Say how much a fused weight sends, and how much it would send with its pieces apart."""
    first, costs = group[0], analysis.costs
    leaf = first.crossed[0]
    dim = analysis.walk.parameters[leaf].dims[first.leaves[leaf]]
    before = _total(group)
    crossing = sum(
        size
        for split in group
        for event, size in split.sent
        if costs.leads.num_pieces(split, event.dims) or costs.leads.num_pieces(split, event.unless)
        if event.unless
    )
    pieces, *inner = factors(dim).partition("(")[2].rstrip(")").split(" x ")
    path, after = analysis.traced.paths[leaf], before - crossing
    return (
        f"{path} holds {pieces} pieces of {' x '.join(inner)}, and an even split crosses their borders: keep "
        f"the pieces on a dim of their own, {size_text(before)} -> {size_text(after)}"
    )
