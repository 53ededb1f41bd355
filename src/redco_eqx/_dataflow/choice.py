"""The choice: of all splits that do not clash, those that are worth the most together, exactly."""

from collections.abc import Sequence

import numpy as np

from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.splits import Split

WORK = 3.0
"""A split that takes over a whole layer of average depth is worth sending this many of the layer's results. Measured
by the model's own depth, a layout does not change with the sizes of model, batch and sequence: who asks for a tensor
axis wants layers split, however small they are."""

MEMORY = 0.01
"""A byte of parameters that a device does not hold is worth this many bytes sent."""


def worth(costs: Costs, split: Split) -> float:
    """What choosing a split is worth, in bytes sent."""
    gained = split.unsent + WORK * split.work / max(costs.depth, 1) + MEMORY * split.freed
    return gained - split.num_bytes(merged=True) - split.waits


def choose(costs: Costs) -> list[Split]:
    """The splits that are worth the most, of those that do not clash."""
    worths = [worth(costs, split) for split in costs.splits]
    open_ = [split.number for split in costs.splits if worths[split.number] > 0]
    groups = [tuple(n for n in group if worths[n] > 0) for group in costs.clashes]
    groups = [group for group in dict.fromkeys(groups) if len(group) > 1]
    clashing = sorted({n for group in groups for n in group})
    chosen = [n for n in open_ if n not in set(clashing)]
    chosen += _best_set([worths[n] for n in clashing], clashing, groups)
    return [costs.splits[n] for n in sorted(chosen)]


def _best_set(worths: Sequence[float], numbers: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[int]:
    """The set of largest worth with at most one of each group."""
    if not numbers:
        return []
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    place = {n: i for i, n in enumerate(numbers)}
    rows = [row for row, group in enumerate(groups) for _ in group]
    columns = [place[n] for group in groups for n in group]
    matrix = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(groups), len(numbers)))
    weights = np.asarray(worths) / max(worths)
    solved = milp(
        -weights, integrality=np.ones(len(numbers)), bounds=Bounds(0, 1), constraints=LinearConstraint(matrix, ub=1)
    )
    return [n for n, x in zip(numbers, solved.x) if x > 0.5]
