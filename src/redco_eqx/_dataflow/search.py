"""From the chosen splits to a layout, which is judged as a whole and compared with that of the path rules."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from redco_eqx._dataflow.values import STREAM, Event, Split, Step, Value, total_bytes
from redco_eqx._dataflow.walk import MESSAGE, Costs, Walk

# The exact choice: of all splits that do not clash, those that are worth the most together.


WORK = 3.0
"""A split that divides a whole layer of average depth is worth sending this many of the layer's results.
Because worth is measured by the depth of the model, a layout does not change with the sizes of model, batch and
sequence: a user who sets a tensor axis wants layers split, even if they are small."""

MEMORY = 0.01
"""A byte of parameters that is no longer on a device is worth this many bytes sent."""


def worth(costs: Costs, split: Split) -> float:
    """The worth of choosing a split, in bytes sent."""
    gained = split.unsent + WORK * split.work / costs.depth + MEMORY * split.freed
    return gained - split.num_bytes(merged=True) - split.waits


def choose(
    costs: Costs,
    least_freed: float = 0.0,
    *,
    forced: Collection[int] = (),
    barred: Collection[int] = (),
) -> list[Split]:
    """Chooses splits that do not clash and are worth the most: all of the `forced`, and none of the `barred`.

    Raises `ValueError` if no choice frees `least_freed` bytes of parameters on a device.
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
    """Find the set of these numbers with the largest worth that frees enough, with at most one of each group.

    Raises `ValueError` if no set frees enough.
    """
    if not numbers and least_freed == 0:
        return []
    if not numbers:
        raise ValueError("no splits")
    place = {n: i for i, n in enumerate(numbers)}
    groups = list(dict.fromkeys(tuple(n for n in group if n in place) for group in groups))
    rows: list[Constraint] = [
        ([(place[n], 1.0) for n in group], -np.inf, 1.0) for group in groups if len(group) > 1
    ]
    if least_freed > 0:
        rows.append(([(place[n], freed[n] / least_freed) for n in numbers], 1.0, np.inf))
    largest = max(1e-30, *(abs(worths[n]) for n in numbers))
    found = cheapest([-worths[n] / largest for n in numbers], rows, [True] * len(numbers))
    return [n for n, x in zip(numbers, found) if x > 0.5]


Constraint: TypeAlias = tuple[Sequence[tuple[int, float]], float, float]
"""Variables with factors. Their weighted sum is at least the first number and at most the second."""


def cheapest(
    costs: Sequence[float], rows: Sequence[Constraint], integer: Sequence[bool], **options: int | float
) -> np.ndarray:
    """Finds the numbers between 0 and 1 that cost least. Those marked in `integer` are integers.

    `options` are those of `scipy.optimize.milp`. Raises `ValueError` if no numbers fit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    places = np.array([(i, j, x) for i, (terms, _, _) in enumerate(rows) for j, x in terms]).reshape(-1, 3)
    numbers = places[:, :2].astype(int).T
    matrix: Any = csr_array((places[:, 2], tuple(numbers)), shape=(len(rows), len(costs)))
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


# The bytes that any layout sends: one pass through the program, with each result split as the operands are.


# Operations that hand a gradient on as it is.
_PASSING = ("add", "add_any", "convert_element_type", "reshape", "scan", "squeeze", "stack", "transpose")


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that a device sends in a step.

    - `events`: the events that send, with bytes, over `tensor` or over the batch axes.
    - `moved`: bytes of arrays that are gathered because they are used in another split than they have.
    - `waits`: the cost of waiting, in bytes.
    """

    events: list[tuple[Event, float]]
    moved: float
    waits: float

    def num_bytes(self, *, merged: bool) -> float:
        return total_bytes(self.events, merged=merged) + self.moved


def simulate(costs: Costs, walk: Walk, layout: Mapping[int, int]) -> Sent:
    """Simulate the bytes that are sent if parameters are split by `layout`: by leaf, the number of a split.

    Where splits meet, each operation keeps the cheapest, and operands that are split otherwise are gathered. An
    operation with no split operand is done in the split that a gradient needs.
    """
    wanted = {id(x): number for leaf, number in layout.items() if (x := walk.gradients[leaf]) is not None}
    for step in reversed(walk.steps):
        if step.equation.primitive.name in _PASSING:
            numbers = [wanted[id(x)] for x in step.results if id(x) in wanted]
            wanted |= {id(x): numbers[0] for x in step.operands if numbers and id(x) not in wanted}
    splits = {id(walk.parameters[leaf]): number for leaf, number in layout.items()}
    run = _Run(costs, splits, wanted, _cut(costs, walk, wanted))
    for step in walk.steps:
        run.step(step)
    for leaf, gradient in enumerate(walk.gradients):
        if gradient is not None and run.split_of(gradient) not in (None, layout.get(leaf)):
            run.moved += run.part(gradient) * gradient.num_bytes
    return Sent(run.events, run.moved, run.waits)


def _cut(costs: Costs, walk: Walk, wanted: Mapping[int, int]) -> set[tuple[int, int]]:
    """The arrays of which the gradient of a weight takes parts, with the split. Other products take these too.

    Arrays that come with the batch are left out, and so are parameters that are handed on: they keep the layout
    in which they come.
    """
    inputs, cut = {id(x) for x in walk.parameters}, set[tuple[int, int]]()
    for step in walk.steps:
        if step.equation.primitive.name in _PASSING and all(id(x) in inputs for x in step.operands):
            inputs |= set(map(id, step.results))
        computed = [x for x in step.operands if x.is_learned and id(x) not in inputs]
        for number in (wanted[id(x)] for x in step.results if id(x) in wanted):
            cut |= {(id(x), number) for x in computed if number in costs.leads.of(x.dims)}
    return cut


class _Run:
    def __init__(self, costs: Costs, splits: dict[int, int], wanted: dict[int, int], cut: set[tuple[int, int]]):
        self.costs, self.leads = costs, costs.leads
        self.splits, self.wanted, self.cut = splits, wanted, cut
        self.partial: dict[int, int] = {}  # the values that only some atoms of a split still split
        self.events: list[tuple[Event, float]] = []
        self.gathered: set[tuple[int, bool]] = set()  # the copies that were gathered, see `_copy`
        self.moved = self.waits = 0.0

    def split_of(self, value: Value) -> int | None:
        return self.splits.get(id(value))

    def step(self, step: Step) -> None:
        if step.block == STREAM:
            self._gather(step)
            return
        is_partial, numbers = self._numbers(step)
        if numbers:
            self._split(step, numbers, is_partial)
        for event in step.events:
            if self.leads.over_batch(event):
                size = float(event.sent.num_bytes * event.times)
                self.events.append((event, size * self.part(event.sent)))

    def _numbers(self, step: Step) -> tuple[bool, list[int]]:
        """True if only some atoms of a split split the operands; and the splits in which it may be done."""
        numbers = dict.fromkeys(n for x in step.operands if (n := self.split_of(x)) is not None)
        partial = dict.fromkeys(self.partial[id(x)] for x in step.operands if id(x) in self.partial)
        wanted = dict.fromkeys(self.wanted[id(x)] for x in step.results if id(x) in self.wanted)
        return not numbers and bool(partial), list(numbers or partial or wanted)

    def _split(self, step: Step, numbers: Sequence[int], is_partial: bool) -> None:
        """Does an operation in the split that sends least."""
        options = [(*self._through(step, number), number) for number in numbers]
        sent, moved, number = min(
            options, key=lambda x: sum(s for _, s in x[0]) + x[1] + self._later(step, x[2])
        )
        self.events += sent
        self.moved += moved
        self.gathered |= {self._copy(step, value, number) for value in self._otherwise(step, number)}
        self.waits += sum(MESSAGE * event.times for event, _ in sent if event.waits > 1)
        for value in step.results:
            if not is_partial and number in self.leads.splitting(value.dims):
                self.splits[id(value)] = number
            elif number in self.leads.of(value.dims):
                self.partial[id(value)] = number

    def _gather(self, step: Step) -> None:
        """Passes a boundary of layers: values that were split before it are whole from here on."""
        for value in step.operands:
            self.partial.pop(id(value), None)
            number = self.splits.pop(id(value), None)
            if number is not None:
                sizes = [(event, self.costs.caused(self.costs.splits[number], event)) for event in step.events]
                self.events += [(event, size) for event, size in sizes if size > 0]

    def part(self, value: Value) -> float:
        """The share of an array that one device along `tensor` has."""
        return 1.0 if self.split_of(value) is None else 1 / self.costs.tensor

    def _through(self, step: Step, number: int) -> tuple[list[tuple[Event, float]], float]:
        """Price an operation in this split: the events that send, and the bytes that are gathered before it."""
        split, sent, moved = self.costs.splits[number], [], 0.0
        for event in step.events:
            size = self.costs.caused(split, event)
            if size > 0 and not self.leads.over_batch(event):
                sent += self._sent(event, split, size, step)
        for value in self._otherwise(step, number):
            moved += value.num_bytes * step.times / self._shards(value)
        return sent, moved

    def _otherwise(self, step: Step, number: int) -> list[Value]:
        """The operands that are split in another way and not gathered yet."""
        found = dict.fromkeys(x for x in step.operands if self.split_of(x) not in (None, number))
        return [x for x in found if self._copy(step, x, number) not in self.gathered]

    def _copy(self, step: Step, value: Value, number: int) -> tuple[int, bool]:
        """Identify the whole copy of an array that an operation takes. Equal copies are gathered once.

        A product and the gradient of its weight take the same copy if the other operand is split along more
        than twice as many elements. XLA was seen to do this; at exactly twice, in only one order of the
        operands.
        """
        is_weight = not any(self.leads.has_batch(x.dims) for x in step.results)
        lengths = [self._length(x, number) for x in step.operands if self.split_of(x) == number]
        own = self.split_of(value)
        is_long = own is not None and max(lengths, default=0) > 2 * self._length(value, own)
        return id(value), is_weight and not is_long

    def _length(self, value: Value, number: int) -> int:
        """The number of elements along the dim that this split splits."""
        return math.prod(atom.size for i in self._places(value, number) for atom in value.dims[i])

    def _sent(self, event: Event, split: Split, size: float, step: Step) -> list[tuple[Event, float]]:
        """Price an event, given the splits of the operands. An operand may be gathered instead."""
        number = split.number
        if event.kind == "twice":
            is_met = sum(self.split_of(x) == number for x in step.operands) > 1
            return [(event, size)] if is_met else []
        if len(event.along) != 2 or len(split.atoms) > 1:
            return [(event, size)]
        places = [self._places(x, number) for x in event.arrays]
        is_along = [any(i in dims for i in own) for own, dims in zip(places, event.along)]
        if all(is_along) or not any(is_along):
            return [(event, size)] if all(is_along) else []
        split_one = event.arrays[is_along.index(True)]
        other = is_along.index(False)
        whole = split_one.num_bytes * event.times / self._shards(split_one)
        is_product = step.equation.primitive.name == "dot_general"  # a convolution gathers
        is_cut = is_product and (id(event.arrays[other]), number) in self.cut
        if not places[other] and (is_cut or whole > size):  # the other operand is cut to match
            return [(event, size)]
        gathered = dataclasses.replace(
            event, kind="whole", dims=split_one.dims, sent=split_one, arrays=(split_one,), along=()
        )
        return [(gathered, whole)]

    def _places(self, value: Value, number: int) -> list[int]:
        """The dim of an array that this split splits, if there is one."""
        if self.split_of(value) != number:
            return []
        return [i for i, dim in enumerate(value.dims) if number in self.leads.of([dim])][:1]

    def _shards(self, value: Value) -> int:
        return self.costs.num_shards if self.leads.has_batch(value.dims) else 1

    def _later(self, step: Step, number: int) -> float:
        """Price the bytes that are sent later if a gradient is split in this way but needed in another."""
        wrong = [x for x in step.results if self.wanted.get(id(x), number) != number]
        return sum((x.num_bytes * step.times * self.part(x) for x in wrong), 0.0)


SplitOfEach = dict[int, int]
"""For each parameter that is split, by number, the number of its split."""

SplitChange: TypeAlias = Mapping[int, int | None]
"""For some parameters, the number of the split to take, or `None`."""

MAX_STEPS = 50_000
"""The limit on operations that are simulated for layouts that leave single parameters whole."""

MAX_STEPS_GRAFTED = 4 * MAX_STEPS
"""The limit for layouts that take single splits from another layout; few programs need these."""


def as_layout(costs: Costs, dims: Mapping[int, int | None]) -> SplitOfEach | None:
    """The layout that splits these dims of parameters. Of several such splits, it has those that split most.

    `None` if the layout splits a dim whose factors do not divide: it is not known how much that sends.
    """
    chosen = [(leaf, dim) for leaf, dim in dims.items() if dim is not None]
    fitting = [sum(split.leaves.get(leaf) == dim for leaf, dim in chosen) for split in costs.splits]
    found: SplitOfEach = {}
    for leaf, dim in chosen:
        numbers = [split.number for split in costs.splits if split.leaves.get(leaf) == dim]
        if not numbers:
            return None
        found[leaf] = max(numbers, key=lambda n: (fitting[n], -n))
    return found


def freed_bytes(costs: Costs, layout: SplitOfEach) -> float:
    """Bytes of parameters that a layout frees on a device."""
    freed = (costs.freed(leaf, costs.splits[number].leaves[leaf]) for leaf, number in layout.items())
    return sum(freed, 0.0)


def score(costs: Costs, layout: SplitOfEach, sent: Sent) -> float:
    """Score a layout, in bytes, in the way that splits are weighed for the choice."""
    work = (1 - 1 / costs.tensor) * sum(costs.work[leaf] for leaf in layout)
    gained = WORK * work / costs.depth + MEMORY * freed_bytes(costs, layout)
    return gained - sent.num_bytes(merged=True) - sent.waits


def relax(
    layout: SplitOfEach,
    paths: Sequence[str],
    num_steps: int,
    fixed: Container[int],
    judge: Callable[[SplitOfEach], float],
) -> SplitOfEach:
    """Takes out of `layout` the parameters that are better left whole, such as routers beside split experts.

    Parameters that differ only in the numbers of their paths are tried together. Those in `fixed` stay.
    """
    groups: dict[str, dict[int, None]] = {}
    for leaf in (leaf for leaf in layout if leaf not in fixed):
        groups.setdefault(_without_numbers(paths[leaf]), {})[leaf] = None
    if len(groups) * num_steps > MAX_STEPS:
        return layout
    return _climb(layout, list(groups.values()), judge)


def graft(
    layout: SplitOfEach,
    other: SplitOfEach,
    paths: Sequence[str],
    num_steps: int,
    fixed: Container[int],
    judge: Callable[[SplitOfEach], float],
) -> SplitOfEach:
    """Takes the splits of `other` that are better into `layout`: `other` may be right in one place, or in all.

    All parameters of one split are tried together, with those of layers that differ only in their numbers.
    Parameters in `fixed` stay.
    """
    differing: dict[int, SplitOfEach] = {}
    for leaf, number in other.items():
        if leaf not in fixed and layout.get(leaf) != number:
            differing.setdefault(number, {})[leaf] = number
    groups: dict[frozenset[str], SplitOfEach] = {}
    for part in differing.values():
        groups.setdefault(frozenset(_without_numbers(paths[leaf]) for leaf in part), {}).update(part)
    all_of_it = {leaf: other.get(leaf) for leaf in layout | other}
    is_long = len(groups) * num_steps > MAX_STEPS_GRAFTED
    return _climb(layout, [*([] if is_long else groups.values()), all_of_it], judge)


def _climb(
    layout: SplitOfEach, changes: Sequence[SplitChange], judge: Callable[[SplitOfEach], float]
) -> SplitOfEach:
    """Applies to `layout`, in order, each change that makes it better by more than rounding."""
    best = judge(layout) if changes else 0.0
    for change in changes:
        changed = {leaf: n for leaf, n in {**layout, **change}.items() if n is not None}
        found = judge(changed)
        if found > best + 1e-3 * abs(best):
            layout, best = changed, found
    return layout


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "#", path)
