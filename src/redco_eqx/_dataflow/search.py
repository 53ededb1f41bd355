"""From the chosen splits to a layout: judged as a whole, beside the layout of the path rules."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeAlias

from redco_eqx._dataflow.choice import MEMORY, WORK
from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.simulation import Sent

Layout = dict[int, int]
"""Of each parameter that is split, by number, the number of its split."""

Change: TypeAlias = Callable[[Layout], Layout]

MAX_STEPS = 50_000
"""So many operations are gone through at most, for layouts that leave single parameters whole."""

MAX_STEPS_GRAFTED = 4 * MAX_STEPS
"""And so many for layouts that take single splits from another one, which few programs have to."""


def as_layout(costs: Costs, dims: Mapping[int, int]) -> Layout | None:
    """The layout that splits these dims of parameters; of several such splits, those that split most of them.

    `None` if it splits a dim whose factors do not divide: what that sends is not known.
    """
    fitting = [sum(split.leaves.get(leaf) == dim for leaf, dim in dims.items()) for split in costs.splits]
    found: Layout = {}
    for leaf, dim in dims.items():
        numbers = [split.number for split in costs.splits if split.leaves.get(leaf) == dim]
        if not numbers:
            return None
        found[leaf] = max(numbers, key=lambda n: (fitting[n], -n))
    return found


def freed_bytes(costs: Costs, layout: Layout) -> float:
    """Bytes of parameters that a device does not hold."""
    freed = (costs.freed(leaf, costs.splits[number].leaves[leaf]) for leaf, number in layout.items())
    return sum(freed, 0.0)


def score(costs: Costs, layout: Layout, sent: Sent) -> float:
    """What a layout is worth, in bytes, as splits are weighed for the choice."""
    work = (1 - 1 / costs.tensor) * sum(costs.work[leaf] for leaf in layout)
    gained = WORK * work / costs.depth + MEMORY * freed_bytes(costs, layout)
    return gained - sent.num_bytes(merged=True) - sent.waits


def relax(
    layout: Layout,
    paths: Sequence[str],
    num_steps: int,
    fixed: Container[int],
    judge: Callable[[Layout], float],
) -> Layout:
    """`layout` without the parameters that are better left whole, such as routers beside split experts.

    Parameters that differ only in the numbers of their paths are tried together; those in `fixed` stay.
    """
    groups: dict[str, list[int]] = {}
    for leaf in (leaf for leaf in layout if leaf not in fixed):
        groups.setdefault(_without_numbers(paths[leaf]), []).append(leaf)
    if len(groups) * num_steps > MAX_STEPS:
        return layout

    def without(leaves: Container[int]) -> Change:
        return lambda layout: {leaf: number for leaf, number in layout.items() if leaf not in leaves}

    return _climb(layout, [without(leaves) for leaves in groups.values()], judge)


def graft(
    layout: Layout,
    other: Layout,
    paths: Sequence[str],
    num_steps: int,
    fixed: Container[int],
    judge: Callable[[Layout], float],
) -> Layout:
    """`layout` with the splits of `other` that are better: it may be right in one place, and wrong elsewhere.

    What one split has in it is taken together, and of layers that differ only in their numbers; what is in
    `fixed` stays.
    """
    differing: dict[int, Layout] = {}
    for leaf, number in other.items():
        if leaf not in fixed and layout.get(leaf) != number:
            differing.setdefault(number, {})[leaf] = number
    groups: dict[frozenset[str], Layout] = {}
    for part in differing.values():
        groups.setdefault(frozenset(_without_numbers(paths[leaf]) for leaf in part), {}).update(part)
    if len(groups) * num_steps > MAX_STEPS_GRAFTED:
        return layout

    def taking(part: Layout) -> Change:
        return lambda layout: layout | part

    return _climb(layout, [taking(part) for part in groups.values()], judge)


def _climb(layout: Layout, changes: Sequence[Change], judge: Callable[[Layout], float]) -> Layout:
    """`layout` with each of the changes, in their order, that makes it better by more than rounding."""
    best = judge(layout) if changes else 0.0
    for change in changes:
        changed = change(layout)
        found = judge(changed)
        if found > best + 1e-3 * abs(best):
            layout, best = changed, found
    return layout


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "#", path)
