"""The least that any layout of a stated class sends."""

from collections.abc import Mapping

from redco_eqx._dataflow.choice import best_set
from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.splits import Split, total_bytes
from redco_eqx._dataflow.values import Event, Value


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
    """What a split sends in any case."""

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
