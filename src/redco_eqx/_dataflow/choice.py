"""The choice: of all splits that do not clash, those that are worth the most together, exactly."""

from collections.abc import Collection, Sequence

import numpy as np

from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.splits import Split

WORK = 3.0
"""A split that takes over a whole layer of average depth is worth sending this many of the layer's results.
Measured by the model's own depth, a layout does not change with the sizes of model, batch and sequence: who
asks for a tensor axis wants layers split, however small they are."""

MEMORY = 0.01
"""A byte of parameters that a device does not hold is worth this many bytes sent."""


def worth(costs: Costs, split: Split) -> float:
    """What choosing a split is worth, in bytes sent."""
    gained = split.unsent + WORK * split.work / costs.depth + MEMORY * split.freed
    return gained - split.num_bytes(merged=True) - split.waits


def choose(
    costs: Costs,
    least_freed: float = 0.0,
    *,
    forced: Collection[int] = (),
    barred: Collection[int] = (),
) -> list[Split]:
    """The splits that are worth the most, of those that do not clash: the `forced` and none of the `barred`.

    Raises `ValueError` if a device cannot be relieved of `least_freed` bytes of parameters by any.
    """
    worths = [worth(costs, split) for split in costs.splits]
    largest = 1 + sum(abs(x) for x in worths)
    worths = [x + largest * (n in forced) for n, x in enumerate(worths)]
    is_open = [(x > 0 or least_freed > 0) and n not in barred for n, x in enumerate(worths)]
    groups = [[n for n in group if is_open[n]] for group in costs.clashes]
    clashing = {n for group in groups if len(group) > 1 for n in group}
    left = [n for n, x in enumerate(is_open) if x and (least_freed > 0 or n in clashing)]
    free = [n for n, x in enumerate(is_open) if x and n not in left]
    freed = [split.freed for split in costs.splits]
    chosen = best_set(worths, freed, left, costs.clashes, least_freed)
    return [costs.splits[n] for n in sorted((*free, *chosen))]


def best_set(
    worths: Sequence[float],
    freed: Sequence[float],
    numbers: Sequence[int],
    groups: Sequence[tuple[int, ...]],
    least_freed: float = 0.0,
) -> list[int]:
    """Of these numbers, the set of largest worth with at most one of each group, that frees enough.

    Raises `ValueError` if none does.
    """
    if not numbers and least_freed == 0:
        return []
    if not numbers:
        raise ValueError("no splits")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    place = {n: i for i, n in enumerate(numbers)}
    groups = list(dict.fromkeys(tuple(n for n in group if n in place) for group in groups))
    groups = [group for group in groups if len(group) > 1]
    pairs = [(row, place[n]) for row, group in enumerate(groups) for n in group]
    constraints = []
    if pairs:
        shape = (len(groups), len(numbers))
        at_most_one = csr_array((np.ones(len(pairs)), tuple(zip(*pairs))), shape=shape)
        constraints.append(LinearConstraint(at_most_one, ub=1))
    if least_freed > 0:
        share = np.array([freed[n] for n in numbers]) / least_freed
        constraints.append(LinearConstraint(share[None], lb=1))
    weights = np.array([worths[n] for n in numbers])
    solved = milp(
        -weights / max(abs(weights).max(), 1e-30),
        integrality=np.ones(len(numbers)),
        bounds=Bounds(0, 1),
        constraints=constraints,
    )
    if solved.x is None:
        raise ValueError("no set of splits frees enough")
    return [n for n, x in zip(numbers, solved.x) if x > 0.5]
