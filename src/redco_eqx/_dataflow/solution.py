"""Find the choice with the lowest cost for all values, by an integer program.

The program in words. All variables lie between 0 and 1; 1 means yes.

**Variables**

1. *State*: a group of values is in this state. Integer, one for each state.
2. *Strategy*: an operation runs so. Integer, one for each of its strategies.
3. *Flow*: a value is in this state, and an operation takes or gives it in that one. One
    for each operand and result of an operation, and each such pair. Not integer: where
    states and strategies are, flows are.
4. *Change*: any of the operations that read a value changes it from this state to that
    one. Not integer either.

**Objective**: the smallest sum, in bytes that a device sends in a step, of

1. the changes, each once however many operations need it, times the number of times
    that a loop makes it;
2. the flows from an operation to a result: the sum over `tensor` of a pending result,
    or another change, and the sum of the result over the batch axes;
3. the strategies: the work of a device, see `WORK`;
4. the states: the bytes of its values that a device computes, see `MADE`.

**Constraints**

1. A group has one state, and an operation one strategy (`one_of`).
2. The flows from a state of a value add up to that state, and the flows to what the
    strategies of an operation take or give add up to these strategies (`equal`). So
    flow is conserved as in a network, which makes the relaxation almost exact.
3. A change is at least each of the flows that need it (`solved`).
4. A parameter is in the state of its layout (`fix`). The update of a parameter takes
    it, and so its gradient, in that state (`add`).
5. A flow that cannot be is left out: to a pending sum from anything else, and a change
    of all layers of a stack at once where one layer at a time can change.

Groups and operations that are [`alike`][] share their variables, whose costs count as
often as they occur.
"""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from redco_eqx._base.policy import WORK
from redco_eqx._dataflow.choice import (
    PENDING,
    WHOLE,
    Operation,
    State,
    Strategy,
    Values,
)
from redco_eqx._dataflow.search import Constraint, cheapest
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import depth_of

MADE = 0.003
"""The cost of a byte that a device computes, in bytes sent. So among choices that send
the same, the one that computes less wins. Work is weighed as for layouts of only the
parameters."""


class Solution(NamedTuple):
    """The states of groups, the strategies of operations, and the bytes that a device
    sends by the ring: over `tensor`, and over the batch axes."""

    values: Values
    states: dict[int, State]
    strategies: list[Strategy]
    sent: tuple[float, float]

    def state(self, value: Value) -> State:
        """The state of the group of a value."""
        return self.states[self.values.group(value)]


def solve(
    values: Values, dims: Mapping[int, int | None], *, is_quick: bool = False
) -> Solution:
    """Make the choice with the lowest cost.

    **Arguments:**

    - `dims`: for each parameter, by index, the dim that is split, or `None`.
    - `is_quick`: do not branch, and refuse a program with so many variables that it
        takes a minute.

    Raises `ValueError` if there is no choice.
    """
    search = _Search(values, *alike(values, dims))
    search.fix(dims)
    return search.solved(is_quick)


NUM_APART = 4
"""Of groups with the same surroundings, such as those of equal layers, every fourth has
the same state: enough for layers to alternate, while the integer program does not grow
with their number."""


def alike(
    values: Values, dims: Mapping[int, int | None]
) -> tuple[dict[int, int], list[Hashable]]:
    """Find the groups and operations for which one decision is enough.

    Return, for each group, the first group that has the same state; and the kind of
    each operation. The groups are colored, and four times recolored by the operations
    around them, as Weisfeiler and Leman do for graphs.
    """
    numbers: dict[Hashable, int] = {}

    def color(*facts: Hashable) -> int:
        return numbers.setdefault(facts, len(numbers))

    decided = {
        values.group(values.walk.parameters[leaf]): dim for leaf, dim in dims.items()
    }
    colors = {
        group: color(
            decided.get(group, WHOLE),
            len(values.states[group]),
            *map(values.form, members),
        )
        for group, members in values.members.items()
    }
    operations: list[tuple[int, ...]] = []
    for o in values.operations:
        arrays = (*o.operands, *o.results)
        kind = color(
            o.visit is None,
            o.times,
            o.over_batch,
            *o.strategies,
            *map(values.form, arrays),
        )
        operations.append((kind, *map(values.group, arrays)))
    for _ in range(4):
        around: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for kind, *groups in operations:
            of_operation = color(kind, *map(colors.__getitem__, groups))
            for place, group in enumerate(groups):
                around[group].append((of_operation, place))
        colors = {
            group: color(old, *sorted(around[group])) for group, old in colors.items()
        }
    same: dict[int, list[int]] = defaultdict(list)
    first: dict[int, int] = {}
    for group, number in colors.items():
        same[number].append(group)
        first[group] = same[number][(len(same[number]) - 1) % NUM_APART]
    return first, [
        (kind, *map(first.__getitem__, groups)) for kind, *groups in operations
    ]


class _Search:
    """The integer program of the docstring of this file, as it is built.

    - `cost`, `integer`, `sends`: for each variable, its cost, whether it is integer,
        and the bytes in that cost that are sent over `tensor` and over the batch axes.
    - `rows`: the constraints.
    - `states`: the state variables of each group that has a choice.
    - `strategies`: for each operation, the variable of each strategy by its index.
    - `changes`: the flows that need each change, with its price.
    - `shares`: for each operand of a kind of operations, how many values it reads on
        average, by all that read the value.
    """

    def __init__(
        self, values: Values, first: Mapping[int, int], kinds: Sequence[Hashable]
    ):
        self.values = values
        self.depth = depth_of(values.walk)
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[Constraint] = []
        self.sends: list[tuple[float, float]] = []
        self.states: dict[int, dict[State, int]] = {}
        self.strategies: list[dict[int, int]] = []
        self.changes: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
        for group, states in values.states.items():
            if len(states) > 1 and first[group] == group:
                self.states[group] = {
                    s: self.variable(0.0, is_integer=True) for s in states
                }
                self.one_of(self.states[group].values())
            if len(states) > 1:
                self.states[group] = dict(
                    zip(states, self.states[first[group]].values())
                )
                made = MADE * sum(values.local_bytes(x) for x in values.members[group])
                for state, number in self.states[group].items():
                    self.cost[number] += made * values.share(state)
        counts = Counter(kinds)
        readers: dict[Any, list[Any]] = defaultdict(list)
        for operation, kind in zip(values.operations, kinds):
            # A checkpoint changes its own copies of what it reads.
            inside = operation.visit and id(operation.visit.checkpoint)
            for place, value in enumerate(operation.operands):
                readers[id(value), inside].append((kind, place))
        self.shares: dict[Any, dict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        # Numbered, because every layer may read the same value.
        numbers: dict[tuple[Any, ...], int] = {}
        for all_readers in map(tuple, readers.values()):
            number = numbers.setdefault(all_readers, len(numbers))
            for kind, place in dict.fromkeys(all_readers):
                self.shares[kind, place][number] += 1 / counts[kind]
        known: dict[Hashable, dict[int, int]] = {}
        for operation, kind in zip(values.operations, kinds):
            if kind not in known:
                before, after = (times * counts[kind] for times in operation.times)
                known[kind] = self.add(
                    dataclasses.replace(operation, times=(before, after)), kind
                )
            self.strategies.append(known[kind])

    def variable(
        self,
        price: float,
        sends: tuple[float, float] = (0.0, 0.0),
        *,
        is_integer: bool = False,
    ) -> int:
        """Add a variable between 0 and 1, and return its index.

        It costs `price`, and the bytes that it `sends`, over `tensor` and over the
        batch axes.
        """
        self.cost.append(price + sum(sends))
        self.sends.append(sends)
        self.integer.append(is_integer)
        return len(self.cost) - 1

    def one_of(self, numbers: Iterable[int]) -> None:
        self.rows.append(([(j, 1.0) for j in numbers], 1.0, 1.0))

    def equal(self, one: Iterable[int], other: Iterable[int]) -> None:
        """Require that the sums of two lists of variables are equal."""
        self.rows.append(
            ([*((j, 1.0) for j in one), *((j, -1.0) for j in other)], 0.0, 0.0)
        )

    def states_of(self, value: Value) -> dict[State, int]:
        return self.states.get(self.values.group(value), {})

    def can_be(self, value: Value, state: State) -> bool:
        return (
            self.values.slot(value, state)
            in self.values.states[self.values.group(value)]
        )

    def fix(self, dims: Mapping[int, int | None]) -> None:
        """Decide the states of the parameters. Raises `ValueError` if a parameter
        cannot have its state."""
        for leaf, dim in dims.items():
            value = self.values.walk.parameters[leaf]
            wanted = WHOLE if dim is None else dim
            if not self.can_be(value, wanted):
                raise ValueError(
                    f"dim {dim} of parameter {leaf} cannot be split where it is used"
                )
            if of := self.states_of(value):
                self.one_of([of[self.values.slot(value, wanted)]])

    def add(self, operation: Operation, kind: Hashable) -> dict[int, int]:
        """Add an operation: its strategies, whose variables are returned, and the flows
        from and to its values."""
        numbers: dict[int, int] = {}
        results = list(enumerate(operation.results))
        closed = [(place, x) for place, x in results if not self.states_of(x)]
        for i, strategy in enumerate(operation.strategies):
            is_taken = all(map(self.can_be, operation.operands, strategy.takes))
            if is_taken and all(
                strategy.gives[place] in (WHOLE, PENDING) for place, _ in closed
            ):
                work = WORK * strategy.work * operation.times[0] / self.depth
                sent = [
                    self.sent(operation, x, strategy.gives[place], WHOLE)
                    for place, x in closed
                ]
                numbers[i] = self.variable(work, added(sent), is_integer=True)
        self.one_of(numbers.values())
        chosen = [(operation.strategies[i], j) for i, j in numbers.items()]
        for place, value in enumerate(operation.operands):
            ends = [
                (self.values.slot(value, s.takes[place]), False, j) for s, j in chosen
            ]
            if operation.visit is None and place == 0:
                # The update has the layout of the parameter.
                for state, number in self.states_of(value).items():
                    self.equal([number], [j for other, _, j in ends if other == state])
            else:
                self.flow(operation, value, ends, self.shares[kind, place])
        for place, value in results:
            ends = [
                (self.values.slot(value, s.gives[place]), s.is_late, j)
                for s, j in chosen
            ]
            self.flow(operation, value, ends, {})
        return numbers

    def sent(
        self,
        operation: Operation,
        value: Value,
        given: State,
        own: State,
        is_late: bool = False,
    ) -> tuple[float, float]:
        """The bytes that are sent, over `tensor` and over the batch axes, if a result
        in state `own` is needed in state `given`."""
        times = operation.times[1]
        batch = 0.0
        if operation.over_batch:
            batch = self.values.over_batch(value, given, own, is_late)
        return times * self.values.change(value, given, own), times * batch

    def flow(
        self,
        operation: Operation,
        value: Value,
        ends: Sequence[tuple[State, bool, int]],
        shares: Mapping[int, float],
    ) -> None:
        """Add the flows between the states of a value and the strategies that consume
        or produce these. Only an operand has `shares`."""
        states = self.states_of(value)
        if not states:
            return
        by_end: dict[tuple[State, bool], list[int]] = defaultdict(list)
        for state, is_late, number in ends:
            by_end[state, is_late].append(number)
        flows: dict[tuple[State, tuple[State, bool]], int] = {}
        place = self.values.states[self.values.group(value)].index
        # A stack of layers changes in the loop, one layer at a time. All at once, it
        # would take more memory.
        times, times_beyond = operation.times if shares else operation.times[::-1]
        is_stack = times < times_beyond
        for own, end in itertools.product(states, by_end):
            way = (own, end[0]) if shares else (end[0], own)
            price = self.values.change(value, *way)
            if price == math.inf or (
                is_stack and own != end[0] and own in (state for state, _ in by_end)
            ):
                continue
            sends = (0.0, 0.0) if shares else self.sent(operation, value, *way, end[1])
            flows[own, end] = self.variable(0.0, sends)
            price *= operation.times[0]  # 0 in a scan of no steps
            for readers, share in shares.items() if price else ():
                self.changes[readers, *map(place, way)].append(
                    (flows[own, end], price * share)
                )
        for own, number in states.items():
            self.equal([number], [j for (a, _), j in flows.items() if a == own])
        for end, several in by_end.items():
            self.equal(several, [j for (_, b), j in flows.items() if b == end])

    def solved(self, is_quick: bool) -> Solution:
        """Solve the integer program. Raises `ValueError` if there is no solution."""
        if is_quick and len(self.cost) > 40_000:
            raise ValueError(f"the integer program has {len(self.cost)} variables")
        for several in self.changes.values():
            # A change that several operations need counts once.
            once = self.variable(0.0, (max(price for _, price in several), 0.0))
            self.rows += [
                ([(once, 1.0), (number, -1.0)], 0.0, np.inf) for number, _ in several
            ]
        found = cheapest(
            self.cost,
            self.rows,
            self.integer,
            mip_rel_gap=1e-3,
            node_limit=1 if is_quick else 200,
        )
        states = {
            group: max(of, key=lambda s: found[of[s]])
            for group, of in self.states.items()
        }
        every = {group: states.get(group, WHOLE) for group in self.values.states}
        best = [
            max(numbers, key=lambda i: found[numbers[i]]) for numbers in self.strategies
        ]
        strategies = [o.strategies[i] for o, i in zip(self.values.operations, best)]
        sent = added([sends for x, sends in zip(found, self.sends) if x > 0.5])
        return Solution(self.values, every, strategies, sent)


def added(sent: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Add the bytes over `tensor`, and those over the batch axes."""
    return sum(one for one, _ in sent), sum(other for _, other in sent)
