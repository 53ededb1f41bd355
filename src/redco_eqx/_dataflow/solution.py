"""The choice with the least cost for each value, by an integer program."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from redco_eqx._dataflow.choice import PENDING, WHOLE, Operation, State, Strategy, Values
from redco_eqx._dataflow.search import WORK, Constraint, cheapest
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import depth_of

MADE = 0.003
"""A byte that is made on a device costs as much as this many bytes sent. So of choices that send the same, the
one that makes less is chosen. Work is weighed as for layouts of parameters alone."""


class Solution(NamedTuple):
    """The states of groups, and the strategies of operations."""

    values: Values
    states: dict[int, State]
    strategies: list[Strategy]

    def state(self, value: Value) -> State:
        """The state of the group of a value."""
        return self.states[self.values.groups.find(id(value))]


def solve(
    values: Values,
    *,
    fixed: Mapping[int, int | None],
    max_bytes: float | None = None,
    held: Callable[[int, int | None], float] | None = None,
) -> Solution:
    """Makes the choice with the least cost.

    **Arguments:**

    - `fixed`: for some parameters, by number, the dim that is split, or `None`.
    - `max_bytes`: a limit on the bytes of parameters on one device.
    - `held`: bytes of a parameter on one device, if `tensor` splits this dim of the parameter, or none.

    Raises `ValueError` if there is no choice.
    """
    search = _Search(values)
    search.fix(fixed)
    if max_bytes is not None and held is not None:
        search.limit(max_bytes, held)
    for operation in values.operations:
        search.add(operation)
    return search.solved()


class _Search:
    """An integer program: a state for each group, a strategy for each operation, and flows between these.

    Flows join the states and strategies that meet. With flows the relaxation is almost exact.
    """

    def __init__(self, values: Values):
        self.values, self.depth = values, depth_of(values.walk)
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[Constraint] = []
        self.states: dict[int, dict[State, int]] = {}  # of groups that have a choice
        self.strategies: list[dict[int, int]] = []
        self.changes: dict[tuple[int, State, State], list[tuple[int, float]]] = defaultdict(list)
        for group, states in values.states.items():
            if len(states) == 1:
                continue
            made = MADE * sum(values.local_bytes(x) for x in values.members[group])
            shares = {s: 1.0 if s in (WHOLE, PENDING) else 1 / values.tensor for s in states}
            self.states[group] = {s: self.variable(made * share, True) for s, share in shares.items()}
            self.one_of(list(self.states[group].values()))

    def variable(self, price: float, is_integer: bool = False) -> int:
        """Adds a variable between 0 and 1, and returns its number."""
        self.cost.append(price)
        self.integer.append(is_integer)
        return len(self.cost) - 1

    def one_of(self, numbers: Sequence[int]) -> None:
        self.rows.append(([(j, 1.0) for j in numbers], 1.0, 1.0))

    def equal(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Requires that the sums of two lists of variables are equal."""
        self.rows.append(([*((j, 1.0) for j in one), *((j, -1.0) for j in other)], 0.0, 0.0))

    def states_of(self, value: Value) -> dict[State, int]:
        return self.states.get(self.values.groups.find(id(value)), {})

    def fix(self, fixed: Mapping[int, int | None]) -> None:
        """Decides the states of some parameters. Raises `ValueError` for a state that one cannot have."""
        for leaf, dim in fixed.items():
            value = self.values.walk.parameters[leaf]
            wanted = WHOLE if dim is None else self.values.slot(value, dim)
            if wanted not in self.values.states[self.values.groups.find(id(value))]:
                raise ValueError(f"dim {dim} of parameter {leaf} cannot be split where it is used")
            if of := self.states_of(value):
                self.one_of([of[wanted]])

    def limit(self, max_bytes: float, held: Callable[[int, int | None], float]) -> None:
        """Bounds the bytes of parameters on one device."""
        terms, rest = [], 0.0
        for leaf, x in enumerate(self.values.walk.parameters):
            of = self.states_of(x)
            rest += 0.0 if of else held(leaf, None)
            terms += [(j, held(leaf, self.values.dim_of(x, s)) / max_bytes) for s, j in of.items()]
        self.rows.append((terms, 0.0, 1 - rest / max_bytes))

    def add(self, operation: Operation) -> None:
        """Adds an operation: its strategies, and the flows from and to the values that it joins."""
        numbers: dict[int, int] = {}
        for i, strategy in enumerate(operation.strategies):
            price = self.price(operation, strategy)
            if price < math.inf:
                numbers[i] = self.variable(price, True)
        self.strategies.append(numbers)
        self.one_of(list(numbers.values()))
        for place, value in enumerate(operation.operands):
            if operation.step is None and place == 0:  # the update has the layout of the parameter
                for state, number in self.states_of(value).items():
                    options = operation.strategies
                    same = [
                        j for i, j in numbers.items() if self.values.slot(value, options[i].takes[0]) == state
                    ]
                    self.equal([number], same)
            else:
                self.flow(operation, numbers, value, lambda s, place=place: (s.takes[place], False), True)
        for place, value in enumerate(operation.results):
            self.flow(operation, numbers, value, lambda s, place=place: (s.gives[place], s.is_late), False)

    def price(self, operation: Operation, strategy: Strategy) -> float:
        """The cost of a strategy where values have no choice; infinite if the strategy is impossible."""
        values, times = self.values, operation.times
        price = WORK * strategy.work * times[0] / self.depth
        for value, state in zip(operation.operands, strategy.takes):
            if values.slot(value, state) not in values.states[values.groups.find(id(value))]:
                return math.inf
        for value, state in zip(operation.results, strategy.gives):
            if not self.states_of(value):
                if state not in (WHOLE, PENDING):
                    return math.inf
                price += times[1] * values.change(value, state, WHOLE)
                price += times[1] * values.over_batch(value, WHOLE, False) * operation.over_batch
        return price

    def flow(
        self,
        operation: Operation,
        numbers: Mapping[int, int],
        value: Value,
        end: Callable[[Strategy], tuple[State, bool]],
        is_operand: bool,
    ) -> None:
        """Adds the flows between the states of a value and the strategies that take or give these states."""
        states, times = self.states_of(value), operation.times[not is_operand]
        if not states:
            return
        ends: dict[tuple[State, bool], list[int]] = defaultdict(list)
        for i, number in numbers.items():
            state, is_late = end(operation.strategies[i])
            ends[self.values.slot(value, state), is_late].append(number)
        flows: dict[tuple[State, tuple[State, bool]], int] = {}
        for own, other in itertools.product(states, ends):
            way = (own, other[0]) if is_operand else (other[0], own)
            price = self.values.change(value, *way)
            if price == math.inf:
                continue
            price *= times  # 0 in a scan of no steps
            if not is_operand and operation.over_batch:
                price += times * self.values.over_batch(value, own, other[1])
            flows[own, other] = self.variable(0.0 if is_operand else price)
            if is_operand and price:
                self.changes[id(value), own, other[0]].append((flows[own, other], price))
        for own, number in states.items():
            self.equal([number], [j for (a, _), j in flows.items() if a == own])
        for other, several in ends.items():
            self.equal(several, [j for (_, b), j in flows.items() if b == other])

    def solved(self) -> Solution:
        """Solves the integer program. Raises `ValueError` if there is no solution."""
        for several in self.changes.values():  # a change that several operations need is made once
            once = self.variable(max(price for _, price in several))
            self.rows += [([(once, 1.0), (number, -1.0)], 0.0, np.inf) for number, _ in several]
        found = cheapest(self.cost, self.rows, self.integer, mip_rel_gap=1e-3, node_limit=200)
        states = {g: max(of, key=lambda s: found[of[s]]) for g, of in self.states.items()}
        every = {g: states.get(g, WHOLE) for g in self.values.states}
        best = [max(numbers, key=lambda i: found[numbers[i]]) for numbers in self.strategies]
        strategies = [o.strategies[i] for o, i in zip(self.values.operations, best)]
        return Solution(self.values, every, strategies)


def sent(solution: Solution) -> dict[str, float]:
    """Bytes that a device sends by a ring, by kind."""
    values = solution.values
    total: dict[str, float] = defaultdict(float)
    once: dict[tuple[int, State], float] = {}
    for operation, strategy in zip(values.operations, solution.strategies):
        for value, state in zip(operation.operands, strategy.takes):
            own = solution.state(value)
            wanted = values.slot(value, state)
            price = operation.times[0] * values.change(value, own, wanted)
            before = once.get((id(value), wanted), 0.0)
            once[id(value), wanted] = max(before, price)
            total[kind(own, wanted)] += max(price - before, 0.0)
        for value, state in zip(operation.results, strategy.gives):
            own = solution.state(value)
            given = values.slot(value, state)
            total[kind(given, own)] += operation.times[1] * values.change(value, given, own)
            if operation.over_batch:
                total["over the batch"] += operation.times[1] * values.over_batch(value, own, strategy.is_late)
    return {name: size for name, size in total.items() if size}


def kind(before: State, after: State) -> str:
    if before == PENDING:
        return "all-reduce" if after == WHOLE else "reduce-scatter"
    return "all-gather" if after == WHOLE else "all-to-all"
