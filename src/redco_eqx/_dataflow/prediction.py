"""Bytes that a layout sends, predicted from the program, for `explain`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.engine import Analysis, factors, largest_sends
from redco_eqx._dataflow.search import best_set
from redco_eqx._dataflow.values import ENDS, Event, Split, Value, short_line, total_bytes
from redco_eqx._dataflow.walk import Costs

# The least that any layout of a stated class sends.


def lower_bound(analysis: Analysis, *, merged: bool) -> float:
    """Bytes that a device sends at least in a step, in a layout that frees as much memory as the chosen one.

    Of all layouts that split each parameter along at most one dim, arrays that share an index alike, and the
    batch over the other axes. Counted is what cannot be avoided: sums over devices of products over a split
    dim, lookups in a split table, and gradients. Changes of layout are taken to be free, and weights that are
    split to be used so. `merged` as in [`total_bytes`][]. If the chosen layout is not of that kind itself,
    only gradients are counted: what a device holds of a parameter, it is sent the gradient of in any layout.
    """
    costs, layout = analysis.costs, analysis.layout
    numbers = set(layout.values())
    meet = any(len(numbers.intersection(group)) > 1 for group in costs.clashes)
    if meet or any(leaf not in layout for number in numbers for leaf in costs.splits[number].leaves):
        held = [
            x.num_bytes / (costs.tensor if leaf in layout else 1)
            for leaf, x in enumerate(analysis.gradients)
            if x is not None and x.is_data
        ]
        return sum(held, 0.0) if costs.num_shards > 1 else 0.0
    whole = total_bytes(costs.batch, merged=merged)
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
    """Add up what a split sends in any case."""

    def is_split(value: Value) -> bool:
        # An activation may be whole where it could be split; a parameter that is split is split, but along one
        # dim only, if two have the index.
        return bool(value.weights) and split.number not in costs.leads.doubled(value.dims)

    total = 0.0
    for event, size in split.sent:
        weights = [x for x in event.arrays if is_split(x)]
        if event.kind in ("sum", "lookup") and weights:
            if not all(x.is_learned for x in event.arrays):
                # Nothing splits what is given. A compiler may cut it, and sum; or gather the weight.
                size = min(size, *(float(x.num_bytes * event.times) for x in weights))
            total += size * shares[event]
    return total


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes that one device sends in a step, predicted from the program; of collectives the size of the
    results, with split activations what a ring sends.

    - `num_bytes`: in all, by a compiler that adds the results of products before it sums them over devices,
        as those for TPU and GPU do.
    - `num_bytes_unmerged`: by one that does not, as that for CPU.
    - `at_least`: no layout in which arrays that share an index are split alike sends less, if its parameters
        take as little memory. By a compiler that adds first. What is sent over `fsdp` is not compared. Where
        this layout has splits that meet, no layout at all does: then only gradients are counted.
    - `lines`: where it is sent, most bytes first.
    - `advice`: what to change in the model.
    - `opaque`: operations that are not understood, and so taken to need their operands whole.
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

    - `num_bytes`: as it is used, on one device.
    - `over_data`: whether its gradient is also summed over an axis that does not store it split.
    """

    num_bytes: float
    num_parts: int
    over_data: bool


def over_fsdp(analysis: Analysis, stored: Mapping[str, Stored], *, merged: bool) -> float:
    """Bytes that gathering adds in a step.

    An array is gathered for the loss and again for its gradient. This is summed over the axes that store the
    array, whole, which is counted among the sums over the batch axes; and over other axes in parts. A block
    that knows better gathers once (several of them the same), and hands each device its part of the gradient.
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
        is_trained = leaf is not None and analysis.gradients[leaf] is not None
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
    """The bytes that the layout of `analysis` sends, those that gather what is `stored` split among them."""
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
    name = f"dim {dim} of {analysis.traced.paths[leaf]}, {factors(analysis.parameters[leaf].dims[dim])}"
    name += f", and {others} more" if others else ""
    name += f" (and {len(group) - 1} splits like it)" if len(group) > 1 else ""
    sent = [pair for split in group for pair in split.sent]
    return f"for {name}: {largest_sends(sent)}"


def _advice(group: Sequence[Split], analysis: Analysis) -> str:
    """Say what a fused weight costs, and what it would cost with its pieces apart."""
    first, costs = group[0], analysis.costs
    leaf = first.crossed[0]
    dim = analysis.parameters[leaf].dims[first.leaves[leaf]]
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
