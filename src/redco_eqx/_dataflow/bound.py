"""The least that any layout of a stated class sends."""

from redco_eqx._dataflow.choice import best_set
from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.splits import Split, total_bytes


def lower_bound(costs: Costs, least_freed: float, *, merged: bool) -> float:
    """Bytes that a device sends at least in a step.

    Of all layouts that split each parameter along at most one dim, arrays that share an index alike, and the
    batch over the other axes, and that free `least_freed` bytes of parameters on a device. Counted is what
    cannot be avoided: sums over devices of products over a split dim, lookups in a split table, and
    gradients. Changes of layout are taken to be free. `merged` as in [`total_bytes`][].
    """
    whole = sum(size for _, size in costs.batch)
    worths = [split.unsent - unavoidable(split, merged=merged) for split in costs.splits]
    freed = [split.freed for split in costs.splits]
    numbers = [n for n, x in enumerate(worths) if x > 0 or least_freed > 0]
    try:
        chosen = best_set(worths, freed, numbers, costs.clashes, least_freed)
    except ValueError:
        return 0.0
    return max(0.0, whole - sum(worths[n] for n in chosen))


def unavoidable(split: Split, *, merged: bool) -> float:
    """What a split sends in any case."""
    sums = [
        (event, size)
        for event, size in split.sent
        # An activation may be whole where it could be split; a parameter that is split is split.
        if event.kind in ("sum", "lookup") and any(x.weights for x in event.arrays)
    ]
    return total_bytes(sums, merged=merged)
