"""Turn chosen splits into a layout, judge it as a whole, and compare it with that of
the path rules."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from redco_eqx._base.policy import MAX_STEPS, MAX_STEPS_TAKEN, MEMORY
from redco_eqx._dataflow.values import (
    STREAM,
    Event,
    Split,
    Step,
    Value,
    size_of,
    total_bytes,
)
from redco_eqx._dataflow.walk import Costs, Walk

# The exact choice: among all splits that do not clash, the set that is worth the most.


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


# The bytes that any layout sends: one pass through the program, with each result split
# as the operands are.


# Operations that pass a gradient on unchanged.
_PASSING = (
    "add",
    "add_any",
    "convert_element_type",
    "reshape",
    "scan",
    "squeeze",
    "stack",
    "transpose",
)


def simulate(costs: Costs, walk: Walk, layout: Mapping[int, int]) -> "Sent":
    """Simulate the bytes that are sent if parameters are split by `layout`: by leaf,
    the index of a split.

    Where splits meet, each operation keeps the cheapest, and operands that are split
    differently are gathered. An operation with no split operand runs in the split that
    a gradient needs.
    """
    wanted = _passed_back(
        walk,
        {
            id(x): number
            for leaf, number in layout.items()
            if (x := walk.gradients[leaf]) is not None
        },
    )
    cut = _cut(costs, walk, wanted)
    splits = {id(walk.parameters[leaf]): number for leaf, number in layout.items()}
    if costs.num_shards > 1:
        splits |= _cut_rows(costs, walk, cut)

    def run(splits: dict[int, int]) -> Sent:
        sent = Sent(costs, splits, wanted, cut)
        for step in walk.steps:
            sent.step(step)
        return sent

    sent = run(dict(splits))
    # A loop takes a value in the split in which its last trip returned it.
    carried = {
        id(x): number
        for x, y in walk.carried
        if (number := sent.split_of(y)) is not None
    }
    if carried.keys() - splits.keys():
        sent = run(splits | carried)
    for leaf, gradient in enumerate(walk.gradients):
        if gradient is not None and sent.split_of(gradient) not in (
            None,
            layout.get(leaf),
        ):
            moved = costs.gathered(sent.part(gradient) * gradient.num_bytes)
            sent.moved += moved
            sent.moved_by[sent.split_of(gradient)] += moved
    return sent


def _passed_back(walk: Walk, found: dict[int, int]) -> dict[int, int]:
    """The splits `found` of values, by `id`, and those of the values that become these
    by being passed on."""
    for step in reversed(walk.steps):
        if step.equation.primitive.name in _PASSING:
            numbers = [found[id(x)] for x in step.results if id(x) in found]
            found |= {
                id(x): numbers[0]
                for x in step.operands
                if numbers and id(x) not in found
            }
    return found


def _cut(costs: Costs, walk: Walk, wanted: Mapping[int, int]) -> set[tuple[int, int]]:
    """The arrays that the gradient of a weight takes in parts, with the split. Other
    products take these parts too.

    Arrays that are passed on from the inputs of the program are left out: they keep
    their layout. Those of the batch do so only if there is one shard of it, see
    [`_cut_rows`][].
    """
    kept = [*walk.parameters]
    if costs.num_shards == 1:
        kept += walk.rows
    inputs = {id(x) for x in kept}
    cut = set[tuple[int, int]]()
    for step in walk.steps:
        if step.equation.primitive.name in _PASSING and all(
            id(x) in inputs for x in step.operands
        ):
            inputs |= set(map(id, step.results))
        computed = [x for x in step.operands if id(x) not in inputs]
        for number in (wanted[id(x)] for x in step.results if id(x) in wanted):
            cut |= {
                (id(x), number) for x in computed if number in costs.leads.of(x.dims)
            }
    return cut


def _cut_rows(costs: Costs, walk: Walk, cut: set[tuple[int, int]]) -> dict[int, int]:
    """The splits of the arrays of the batch, by `id`, that are taken in parts.

    A step splits the rows of its batch over the batch axes, and leaves the other dims
    to the compiler. So these arrays are in parts for all operations.
    """
    found = _passed_back(walk, dict(sorted(cut)))
    return {
        id(x): found[id(x)]
        for x in walk.rows
        if id(x) in found and found[id(x)] in costs.leads.splitting(x.dims)
    }


class Sent:
    """Bytes that a device sends in a step, by the ring algorithm.

    - `events`: the events that send, with bytes, over `tensor` or over the batch axes.
    - `moved`: bytes of arrays that are sent because they are used in a split other than
        their own.
    """

    def __init__(
        self,
        costs: Costs,
        splits: dict[int, int],
        wanted: dict[int, int],
        cut: set[tuple[int, int]],
    ):
        self.events: list[tuple[Event, float]] = []
        self.moved = 0.0
        self.of_split: dict[int, list[tuple[Event, float]]] = defaultdict(list)
        self.moved_by: dict[int | None, float] = defaultdict(float)
        self._costs = costs
        self._leads = costs.leads
        self._splits = splits
        self._wanted = wanted
        self._cut = cut
        # The values that only some atoms of a split still split.
        self._partial: dict[int, int] = {}
        # The copies that were gathered, see `_copy`
        self._gathered: set[tuple[int, bool, bool]] = set()

    def num_bytes(self, *, merged: bool) -> float:
        return total_bytes(self.events, merged=merged) + self.moved

    def split_of(self, value: Value) -> int | None:
        return self._splits.get(id(value))

    def part(self, value: Value) -> float:
        """The fraction of an array that one device along `tensor` holds."""
        return 1.0 if self.split_of(value) is None else 1 / self._costs.tensor

    def step(self, step: Step) -> None:
        """Run an operation in the split that sends least, among the splits of its
        operands."""
        if step.block == STREAM:
            self._gather(step)
            return
        numbers = dict.fromkeys(
            n for x in step.operands if (n := self.split_of(x)) is not None
        )
        partial = dict.fromkeys(
            self._partial[id(x)] for x in step.operands if id(x) in self._partial
        )
        wanted = dict.fromkeys(
            self._wanted[id(x)] for x in step.results if id(x) in self._wanted
        )
        options = [(*self._through(step, n), n) for n in numbers or partial or wanted]
        chosen = None
        if options:
            _, sent, moved, gathered, number = min(
                options, key=lambda option: option[0]
            )
            chosen = self._costs.splits[number]
            self.events += sent
            self.of_split[number] += sent
            self.moved += moved
            self.moved_by[number] += moved
            self._gathered |= {self._copy(step, value, number) for value in gathered}
            is_whole = bool(numbers) or not partial
            for value in step.results:
                if is_whole and number in self._leads.splitting(value.dims):
                    self._splits[id(value)] = number
                elif number in self._leads.of(value.dims):
                    self._partial[id(value)] = number
        for event in step.events:
            if self._leads.over_batch(event):
                part = self.part(event.sent)
                size = self._costs.sent_over_batch(event, part, chosen)
                self.events.append((event, size))
                more = size - self._costs.sent_over_batch(event, part)
                if chosen is not None and more > 0:
                    self.of_split[chosen.number].append((event, more))

    def _gather(self, step: Step) -> None:
        """Pass a boundary of layers: values that were split before it are whole from
        here on."""
        for value in step.operands:
            self._partial.pop(id(value), None)
            number = self._splits.pop(id(value), None)
            if number is not None:
                split = self._costs.splits[number]
                sent = [
                    (e, size)
                    for e in step.events
                    if (size := self._costs.caused(split, e)) > 0
                ]
                self.events += sent
                self.of_split[number] += sent

    def _through(
        self, step: Step, number: int
    ) -> tuple[float, list[tuple[Event, float]], float, list[Value]]:
        """Price an operation in this split.

        Return the price, the events that send, and the bytes that are gathered before
        it, with their arrays.
        """
        split = self._costs.splits[number]
        sent = []
        for event in step.events:
            size = self._costs.caused(split, event)
            if size > 0 and not self._leads.over_batch(event):
                sent += self._sent(event, split, size, step)
        others = dict.fromkeys(
            x for x in step.operands if self.split_of(x) not in (None, number)
        )
        gathered = [
            x for x in others if self._copy(step, x, number) not in self._gathered
        ]
        moved = self._costs.gathered(
            sum(self._costs.local_bytes(x, step.times) for x in gathered)
        )
        # A gradient that is split in this way may be needed in another.
        wrong = [x for x in step.results if self._wanted.get(id(x), number) != number]
        later = self._costs.gathered(
            sum(x.num_bytes * step.times * self.part(x) for x in wrong)
        )
        return sum(size for _, size in sent) + moved + later, sent, moved, gathered

    def _copy(self, step: Step, value: Value, number: int) -> tuple[int, bool, bool]:
        """Identify the whole copy of an array that an operation takes. Equal copies are
        gathered once.

        A product and the gradient of its weight take the same copy if the other operand
        is split along more than twice as many elements. XLA was seen to do this; at
        exactly twice, in only one order of the operands. If the backward pass
        recomputes, it takes a copy of its own.
        """
        is_weight = not any(self._leads.has_batch(x.dims) for x in step.results)
        lengths = [self._length(x) for x in step.operands if self.split_of(x) == number]
        is_long = max(lengths, default=0) > 2 * self._length(value)
        is_again = self._costs.recomputes and "transpose(" in str(
            step.equation.source_info.name_stack
        )
        return id(value), is_weight and not is_long, is_again

    def _sent(
        self, event: Event, split: Split, size: float, step: Step
    ) -> list[tuple[Event, float]]:
        """Price an event, given the splits of the operands. An operand may be gathered
        instead."""
        number = split.number
        if event.kind == "twice":
            is_met = sum(self.split_of(x) == number for x in step.operands) > 1
            return [(event, size)] if is_met else []
        if len(event.along) != 2 or len(split.atoms) > 1:
            return [(event, size)]
        places = [
            self._place(x) if self.split_of(x) == number else None for x in event.arrays
        ]
        is_along = [place in dims for place, dims in zip(places, event.along)]
        if all(is_along) or not any(is_along):
            return [(event, size)] if all(is_along) else []
        first = is_along.index(True)
        other = is_along.index(False)
        one = event.arrays[first]
        whole = self._costs.local_bytes(one, event.times)
        # Only a product uses a part of its operand; a convolution gathers it.
        is_product = step.equation.primitive.name == "dot_general"
        is_cut = is_product and (id(event.arrays[other]), number) in self._cut
        made = self._costs.local_bytes(event.sent, event.times)
        if places[other] is None and (is_cut or whole > made):
            # The other operand is cut to match.
            return [(event, size)]
        dims = [one.dims[places[first] or 0]]
        gathered = dataclasses.replace(
            event, kind="whole", dims=dims, sent=one, arrays=(one,), along=()
        )
        return [(gathered, self._costs.gathered(whole))]

    def _place(self, value: Value) -> int | None:
        """The dim of an array that is split."""
        number = self.split_of(value)
        return next(
            (i for i, dim in enumerate(value.dims) if number in self._leads.of([dim])),
            None,
        )

    def _length(self, value: Value) -> int:
        """The number of elements along the dim that is split."""
        place = self._place(value)
        return 1 if place is None else size_of(value.dims[place])


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
