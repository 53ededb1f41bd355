"""Choose splits by an integer program, turn them into a layout, and improve the layout
by what it sends as a whole.

The integer program has a variable for each split: 1 if it is chosen. The sum of what
the chosen ones are worth is to be as large as possible: the worth of the work that they
divide and of the memory that they free, without what each of them sends alone. Of each
group of splits that clash, at most one is chosen (a *set packing* problem). What splits
send where they meet is in no variable. So the layout is then judged by the simulation,
and improved in single steps (*hill climbing*).
"""

import math
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from redco_eqx._base.policy import MAX_STEPS, MAX_STEPS_TAKEN, MEMORY
from redco_eqx._dataflow.values import Split
from redco_eqx._dataflow.walk import Costs

# The integer program: among all splits that do not clash, the set worth the most.


def worth(costs: Costs, split: Split) -> float:
    """The worth of choosing a split, in bytes sent."""
    gained = split.unsent + costs.worth_of_work(split.work) + MEMORY * split.freed
    return gained - split.num_bytes(merged=True)


def choose(
    costs: Costs, *, forced: Collection[int] = (), barred: Collection[int] = ()
) -> list[Split]:
    """Choose splits that do not clash and are worth the most: all of the `forced`, and
    none of the `barred`."""
    worths = [worth(costs, split) for split in costs.splits]
    largest = 1 + sum(abs(x) for x in worths)
    worths = [x + largest * (n in forced) for n, x in enumerate(worths)]
    options = [n for n, x in enumerate(worths) if x > 0 and n not in barred]
    return [costs.splits[n] for n in best_set(worths, options, costs.clashes)]


def best_set(
    worths: Sequence[float],
    numbers: Sequence[int],
    groups: Sequence[tuple[int, ...]],
    freed: Sequence[float] = (),
    least_freed: float = -math.inf,
) -> list[int]:
    """Find the set of indices that has the largest total worth and frees enough memory.

    `numbers` are the indices to choose from; the set has at most one index from each
    group.
    """
    if not numbers:
        return []
    place = {n: i for i, n in enumerate(numbers)}
    groups = list(
        dict.fromkeys(tuple(n for n in group if n in place) for group in groups)
    )
    rows: list[Constraint] = [
        ([(place[n], 1.0) for n in group], -np.inf, 1.0)
        for group in groups
        if len(group) > 1
    ]
    if least_freed > -math.inf:
        scale = max(1.0, abs(least_freed))
        rows.append(
            (
                [(place[n], freed[n] / scale) for n in numbers],
                least_freed / scale,
                np.inf,
            )
        )
    largest = max(1e-30, *(abs(worths[n]) for n in numbers))
    found = cheapest(
        [-worths[n] / largest for n in numbers],
        rows,
        [True] * len(numbers),
        mip_rel_gap=0.0,
    )
    return [n for n, x in zip(numbers, found) if x > 0.5]


Constraint: TypeAlias = tuple[Sequence[tuple[int, float]], float, float]
"""Variables with factors. Their weighted sum is at least the first number and at most
the second."""


def cheapest(
    costs: Sequence[float],
    rows: Sequence[Constraint],
    integer: Sequence[bool],
    **options: int | float,
) -> np.ndarray:
    """Find the numbers between 0 and 1 that cost least. Those marked in `integer` are
    integers.

    `options` are those of `scipy.optimize.milp`. Raises `ValueError` if no numbers fit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    places = np.array(
        [(i, j, x) for i, (terms, _, _) in enumerate(rows) for j, x in terms]
    ).reshape(-1, 3)
    numbers = places[:, :2].astype(int).T
    matrix: Any = csr_array(
        (places[:, 2], tuple(numbers)), shape=(len(rows), len(costs))
    )
    low, high = (np.array([row[i] for row in rows]) for i in (1, 2))
    solved: Any = milp(
        np.array(costs),
        constraints=LinearConstraint(matrix, low, high),  # pyright: ignore[reportArgumentType]
        integrality=np.array(integer, int),
        bounds=Bounds(0, 1),
        options=options,
    )
    if solved.x is None:
        raise ValueError(f"no layout fits: {solved.message}")
    return solved.x


SplitOfEach = dict[int, int]
"""For each parameter that is split, by index, the index of its split."""

SplitChange: TypeAlias = Mapping[int, int | None]
"""For some parameters, the index of the split to take, or `None`."""


def as_layout(costs: Costs, dims: Mapping[int, int | None]) -> SplitOfEach | None:
    """Return the layout that splits these dimensions of the parameters; of several, the
    one that splits the most.

    Return `None` if the layout splits a dimension whose factors do not divide evenly,
    because the amount of communication is then unknown.
    """
    fitting = [
        [leaf for leaf, dim in split.leaves.items() if dims.get(leaf) == dim]
        for split in costs.splits
    ]
    numbers: dict[int, list[int]] = {
        leaf: [] for leaf, dim in dims.items() if dim is not None
    }
    for number, leaves in enumerate(fitting):
        for leaf in leaves:
            numbers[leaf].append(number)
    if not all(numbers.values()):
        return None
    return {
        leaf: max(options, key=lambda n: len(fitting[n]))
        for leaf, options in numbers.items()
    }


def freed_bytes(costs: Costs, layout: SplitOfEach) -> float:
    """Bytes of parameters that a layout frees on a device."""
    return sum(
        (
            costs.freed(leaf, costs.splits[number].leaves[leaf])
            for leaf, number in layout.items()
        ),
        0.0,
    )


def improve(
    layout: SplitOfEach,
    other: SplitOfEach | None,
    paths: Sequence[str],
    num_steps: int,
    fixed: Container[int],
    judge: Callable[[SplitOfEach], float],
) -> SplitOfEach:
    """Take parameters out of `layout` that are better left whole, such as routers
    beside split experts.

    Then adopt the splits of `other` that are better: `other` may be right in one place,
    or in all. Parameters that differ only in the numbers in their paths are tried
    together, and so are those of one split. Those in `fixed` stay.
    """
    left: dict[str, dict[int, int | None]] = {}
    for leaf in (leaf for leaf in layout if leaf not in fixed):
        left.setdefault(without_numbers(paths[leaf]), {})[leaf] = None
    if len(left) * num_steps <= MAX_STEPS:
        layout = _climb(layout, list(left.values()), judge)
    if other is None:
        return layout
    differing: dict[int, dict[int, int | None]] = {}
    for leaf, number in other.items():
        if leaf not in fixed and layout.get(leaf) != number:
            differing.setdefault(number, {})[leaf] = number
    taken: dict[frozenset[str], dict[int, int | None]] = {}
    for part in differing.values():
        taken.setdefault(
            frozenset(without_numbers(paths[leaf]) for leaf in part), {}
        ).update(part)
    all_of_it = {leaf: other.get(leaf) for leaf in layout | other}
    is_long = len(taken) * num_steps > MAX_STEPS_TAKEN
    return _climb(layout, [*([] if is_long else taken.values()), all_of_it], judge)


def _climb(
    layout: SplitOfEach,
    changes: Sequence[SplitChange],
    judge: Callable[[SplitOfEach], float],
) -> SplitOfEach:
    """Apply to `layout`, in order, each change that makes it better by more than
    rounding."""
    best = judge(layout) if changes else 0.0
    for change in changes:
        changed = {leaf: n for leaf, n in {**layout, **change}.items() if n is not None}
        if changed != layout and (found := judge(changed)) > best + 1e-3 * abs(best):
            layout = changed
            best = found
    return layout


def without_numbers(path: str) -> str:
    """The path with `#` for each number, which is the same for similar layers."""
    return re.sub(r"\d+", "#", path)
