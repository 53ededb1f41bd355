"""A layout for each value of a program: whole, split along one dim over `tensor`, or a
sum still pending.

Each operation has strategies. A strategy splits a factor of the operation's dims in all
operands and results that have it; a result that is summed over this factor is pending.
If an operation returns a value in a layout that the next operation does not take, the
change of layout sends bytes. An integer program finds the smallest sum of these bytes;
its relaxation by flows is almost exact.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from redco_eqx._base.tree import ring_bytes
from redco_eqx._dataflow.values import (
    Atom,
    Dim,
    Leads,
    Value,
    Visit,
    leading_atoms,
    new_dims,
    resolve,
    size_of,
)
from redco_eqx._dataflow.walk import Walk

WHOLE = "whole"
PENDING = "pending"

State: TypeAlias = Any
"""The dim of a value that is split, or the slot of a group of values; or `WHOLE`; or
`PENDING`, if each device has a summand."""

PRODUCTS = ("dot_general", "conv_general_dilated")
ADDITIVE = (
    *PRODUCTS,
    "ragged_dot_general",
    "reduce_sum",
    "scatter-add",
    "scatter_add",
    "gather",
)
ADDING_UP = ("add", "add_any", "sub")
LINEAR = (
    "neg",
    "convert_element_type",
    "copy",
    "transpose",
    "squeeze",
    "reshape",
    "real",
)


class Strategy(NamedTuple):
    """One way to run an operation: the states that it takes and returns, and the work
    of one device.

    `is_late`: true if a result is pending over `tensor` along a different dim from the
    one that the batch is summed along.
    """

    takes: tuple[State, ...]
    gives: tuple[State, ...]
    work: float
    is_late: bool = False


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation that is not contracted into a group.

    - `visit`: the operation, as the walk visited it; `None` for the update of a
        parameter.
    - `over_batch`: true if the results are summed over the batch axes.
    """

    visit: Visit | None
    operands: list[Value]
    results: list[Value]
    times: tuple[float, float]
    strategies: list[Strategy]
    over_batch: bool = False


class Groups(dict[Any, Any]):
    """Disjoint sets. One member represents each set."""

    def find(self, x: Any) -> Any:
        while (above := self.setdefault(x, x)) != x:
            # Shorten the path for the next time: a stream joins a value per layer.
            self[x] = self[above]
            x = self[x]
        return x

    def join(self, a: Any, b: Any) -> None:
        self[self.find(a)] = self.find(b)


class Values:
    """The values of a walk, in groups with the same layout, and the operations between
    the groups."""

    def __init__(self, walk: Walk, tensor: int, num_shards: int, scatters: bool):
        self.walk = walk
        self.tensor = tensor
        self.num_shards = num_shards
        self.scatters = scatters
        self._leads = Leads([], walk.rows, num_shards)
        self.groups = Groups()
        self.slots = Groups()
        self.values: dict[int, Value] = {}
        self.operations: list[Operation] = []
        self._pending: set[int] = set()
        self._spoiled: set[int] = {id(x) for x in (*walk.parameters, *walk.rows)}
        self._batch_dims: dict[int, frozenset[int]] = {}
        self._know(*walk.parameters, *walk.rows)
        for before, after in walk.carried:
            self._join(before, after, [(i, i) for i in range(len(before.dims))])
            self._spoiled |= {id(before), id(after)}
        for visit in walk.visits:
            self._add(visit)
        for parameter, gradient in zip(walk.parameters, walk.gradients):
            if gradient is not None:
                both = set(self.splits(parameter)) & set(self.splits(gradient))
                options = [Strategy((s, s), (), 0.0) for s in (WHOLE, *sorted(both))]
                self._know(gradient)
                self.operations.append(
                    Operation(None, [parameter, gradient], [], (1, 1), options)
                )
        self._find_states()

    def _know(self, *values: Value) -> None:
        self.values |= {id(value): value for value in values}

    # The layouts that a value may have.

    def batch_dims(self, value: Value) -> frozenset[int]:
        """The dims of a value that the batch axes split."""
        key = id(value)
        if key not in self._batch_dims:
            found = [
                i
                for i, dim in enumerate(value.dims)
                if dim and self._leads.has_batch([dim])
            ][:1]
            # Rows in two dims, the first of which is shorter than the number of shards,
            # are left whole.
            self._batch_dims[key] = frozenset(
                i for i in found if size_of(value.dims[i]) % self.num_shards == 0
            )
        return self._batch_dims[key]

    def local_bytes(self, value: Value) -> float:
        """Bytes of a value on one device if it is whole over `tensor`."""
        return value.num_bytes / (self.num_shards if self.batch_dims(value) else 1)

    def splits(self, value: Value) -> list[int]:
        """The dims of a value that `tensor` can split, because they divide."""
        batch = self.batch_dims(value)
        parts = [
            self.tensor * (self.num_shards if i in batch else 1)
            for i in range(len(value.dims))
        ]
        sizes = [size_of(dim) for dim in value.dims]
        is_free = [
            i in batch or not (dim and resolve(dim)[0].pin)
            for i, dim in enumerate(value.dims)
        ]
        return [
            i
            for i, n in enumerate(parts)
            if sizes[i] > 1 and sizes[i] % n == 0 and is_free[i]
        ]

    # Groups.

    def group(self, value: Value) -> int:
        """The member that represents a value's group."""
        return self.groups.find(id(value))

    def _join(self, one: Value, other: Value, dims: Sequence[tuple[int, int]]) -> bool:
        """Join two values into one group by these pairs of dims; False if it already
        pairs them differently."""
        self._know(one, other)
        pairs = [((id(one), i), (id(other), j)) for i, j in dims if one.dims[i]]
        find = self.slots.find
        is_joined = self.groups.find(id(one)) == self.groups.find(id(other))
        if is_joined and any(find(a) != find(b) for a, b in pairs):
            return False
        for a, b in pairs:
            self.slots.join(a, b)
        self.groups.join(id(one), id(other))
        return True

    def slot(self, value: Value, state: State) -> State:
        """Turn the state of a value into the state of its group."""
        return self.slots.find((id(value), state)) if isinstance(state, int) else state

    def dim_of(self, value: Value, state: State) -> int | None:
        """Return the dimension along which a value is split when its group is in this
        state."""
        return next(
            (
                i
                for i, dim in enumerate(value.dims)
                if dim and self.slot(value, i) == state
            ),
            None,
        )

    def _add(self, visit: Visit) -> None:
        operands = [x for x in visit.operands if any(x.dims)]
        self._know(*operands, *visit.results)
        if not operands and not any(any(x.dims) for x in visit.results):
            return
        if visit.handed:
            self._hand_on(visit)
            return
        if visit.equation.primitive.name == "sharding_constraint":
            self._constraint(visit)
            return
        sizes = [tuple(size_of(dim) for dim in x.dims) for x in visit.operands]
        local = Walk(self.walk.rule_of, visit.block)
        inputs = [
            Value(new_dims(size), x.num_bytes, (0,), True)
            for size, x in zip(sizes, visit.operands)
        ]
        outputs = local.results(visit.equation, inputs)
        name = visit.equation.primitive.name
        is_sum = name in ADDING_UP and len(operands) == 2
        is_scaled = (
            name in ("mul", "div")
            and len(operands) == 1
            and operands[0] is visit.operands[0]
        )
        is_linear = (name in LINEAR and len(operands) == 1) or is_scaled
        passes = (is_sum or is_linear) and all(id(x) in self._pending for x in operands)
        if passes:
            self._pending |= {id(x) for x in visit.results}
        can_join = (
            len(outputs) == 1
            and operands
            and not local.events
            and not (is_sum and passes)
        )
        if can_join and self._contract(visit, inputs, outputs[0]):
            if not is_linear:
                self._spoiled.add(id(visit.results[0]))
        else:
            self._operation(
                visit, local, inputs, outputs, passes and (is_linear or self.scatters)
            )

    def _contract(self, visit: Visit, inputs: Sequence[Value], output: Value) -> bool:
        """Join operands and result into a group if all of them have the same dims."""
        result = visit.results[0]
        of_output = {resolve(dim): i for i, dim in enumerate(output.dims) if dim}
        if len(of_output) != sum(map(bool, output.dims)):
            return False
        pairs = []
        for value, own in zip(visit.operands, inputs):
            if not any(own.dims):
                continue
            dims = [
                (i, of_output.get(resolve(dim)))
                for i, dim in enumerate(own.dims)
                if dim
            ]
            if len(dims) != len(of_output) or any(j is None for _, j in dims):
                return False
            pairs.append((value, dims))
        return all(self._join(value, result, dims) for value, dims in pairs)

    # Operations.

    def _hand_on(self, visit: Visit) -> None:
        """Add a value that is passed into a loop or out of it. A stack of layers has
        one more dim outside."""
        (one,) = visit.operands
        (other,) = visit.results
        shift = len(other.dims) - len(one.dims)
        common = [i for i in self.splits(one) if i + shift in self.splits(other)]
        options = [Strategy((i,), (i + shift,), 0.0) for i in common]
        whole = Strategy((WHOLE,), (WHOLE,), 0.0)
        if any(one.dims):
            self.operations.append(
                Operation(
                    visit, [one], [other], visit.handed or (1, 1), [whole, *options]
                )
            )

    def _constraint(self, visit: Visit) -> None:
        """Add a constraint of the program, which is kept. Each dim that it leaves open
        may be split."""
        value = visit.operands[0]
        result = visit.results[0]
        spec = [*visit.equation.params["sharding"].spec, *[None] * len(value.dims)][
            : len(value.dims)
        ]
        stands = [i for i in self.splits(value) if spec[i] == "tensor"]
        free = [i for i in self.splits(value) if spec[i] is PartitionSpec.UNCONSTRAINED]
        options = [Strategy((s,), (s,), 0.0) for s in stands or (WHOLE, *free)]
        self._spoiled |= {id(value), id(result)}
        self.operations.append(
            Operation(visit, [value], [result], (visit.times, visit.times), options)
        )

    def _operation(
        self,
        visit: Visit,
        local: Walk,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        passes: bool,
    ) -> None:
        """Add an operation with its strategies. If it `passes`, results are pending if
        operands are."""
        batch: set[Atom] = set()
        for value, own in (*zip(visit.operands, inputs), *zip(visit.results, outputs)):
            batch |= {
                resolve(own.dims[i])[0] for i in self.batch_dims(value) if own.dims[i]
            }

        def key_of(dim: Dim) -> tuple[Atom, ...] | None:
            """The atoms of a dim that `tensor` splits, after those that the batch axes
            split."""
            parts = self.num_shards if not batch.isdisjoint(resolve(dim)[:1]) else 1
            both = leading_atoms(dim, self.tensor * parts)
            rows = leading_atoms(dim, parts) or ()
            is_apart = (
                both is not None
                and both[: len(rows)] == rows
                and size_of(rows) == parts
            )
            return both[len(rows) :] or both if both and is_apart else both

        def places(value: Value, own: Value) -> dict[tuple[Atom, ...], list[int]]:
            found = defaultdict(list)
            for i in self.splits(value):
                key = key_of(own.dims[i])
                if key is not None:
                    found[key].append(i)
            return dict(found)

        operands = [(x, own) for x, own in zip(visit.operands, inputs) if any(x.dims)]
        of_operands = [places(x, own) for x, own in operands]
        of_results = [places(x, own) for x, own in zip(visit.results, outputs)]
        events = [
            ([key_of(d) for d in e.dims], [key_of(d) for d in e.unless], e.kind)
            for e in local.events
        ]
        name = visit.equation.primitive.name
        work = next((use.work for use in local.uses if name in PRODUCTS), 0.0)
        work /= self.num_shards if any(map(self.batch_dims, visit.operands)) else 1
        strategies = [
            Strategy((WHOLE,) * len(operands), (WHOLE,) * len(visit.results), work)
        ]
        for key in dict.fromkeys(
            key for found in (*of_operands, *of_results) for key in found
        ):
            hit = [
                kind
                for dims, unless, kind in events
                if key in dims and key not in unless
            ]
            is_twice = any(
                len(found.get(key, ())) > 1 for found in (*of_operands, *of_results)
            )
            if is_twice or not {"sum", "lookup"}.issuperset(hit):
                continue
            takes = tuple(
                found[key][0] if key in found else WHOLE for found in of_operands
            )
            gives = tuple(
                found[key][0] if key in found else PENDING if hit else WHOLE
                for found in of_results
            )
            gives_whole = any(
                g == WHOLE and any(x.dims) for g, x in zip(gives, visit.results)
            )
            if gives_whole or (hit and name == "gather" and key not in of_operands[0]):
                continue
            if not hit and all(g in (WHOLE, PENDING) for g in gives):
                continue
            is_late = bool(hit) and key[0] not in batch and not self.scatters
            strategies.append(Strategy(takes, gives, work / self.tensor, is_late))
        if name in ADDITIVE and any(kind in ("sum", "lookup") for _, _, kind in events):
            self._pending |= {id(x) for x in visit.results}
        if passes:
            strategies.append(
                Strategy(
                    (PENDING,) * len(operands), (PENDING,) * len(visit.results), work
                )
            )
        times = visit.times, visit.times
        taken = [x for x, _ in operands]
        over_batch = any(self._leads.over_batch(e) for e in visit.events)
        self.operations.append(
            Operation(visit, taken, list(visit.results), times, strategies, over_batch)
        )

    def _find_states(self) -> None:
        members = defaultdict(list)
        for key, value in self.values.items():
            members[self.groups.find(key)].append(value)
        bad = {self.groups.find(key) for key in self._spoiled}
        self.members = dict(members)
        self.states: dict[int, list[State]] = {}
        for group, values in self.members.items():
            sets = [{self.slot(x, i) for i in self.splits(x)} for x in values]
            slots = [
                self.slot(values[0], i)
                for i in range(len(values[0].dims))
                if values[0].dims[i]
            ]
            states = [
                WHOLE,
                *(s for s in dict.fromkeys(slots) if all(s in found for found in sets)),
            ]
            if group not in bad and all(id(x) in self._pending for x in values):
                states.append(PENDING)
            self.states[group] = states

    def form(self, value: Value) -> tuple[Any, ...]:
        """Everything that the prices of a value depend on, and the place of each dim
        among its group's states."""
        states = self.states[self.group(value)]
        dims = range(len(value.dims))
        places = tuple(
            s in states and states.index(s) for s in (self.slot(value, i) for i in dims)
        )
        return (
            value.num_bytes,
            tuple(map(size_of, value.dims)),
            self.batch_dims(value),
            places,
        )

    # Prices.

    def change(self, value: Value, before: State, after: State) -> float:
        """Bytes that a device sends by a ring, to change a value from one state to
        another."""
        n = self.tensor
        size = self.local_bytes(value)
        gathered = ring_bytes("all-gather", size, n)
        if before in (after, WHOLE):
            return math.inf if after == PENDING and before != PENDING else 0.0
        if after == PENDING:
            return math.inf
        if before == PENDING:
            return (2 if after == WHOLE or not self.scatters else 1) * gathered
        return gathered if after == WHOLE else gathered / n

    def over_batch(
        self, value: Value, given: State, own: State, is_late: bool
    ) -> float:
        """Bytes that a device sends to sum a result over the batch axes. A result that
        is `given` pending is summed over all axes at once."""
        share = (
            1
            if is_late
            else 1 / self.tensor
            if given == PENDING != own
            else self.share(own)
        )
        return ring_bytes("all-reduce", value.num_bytes * share, self.num_shards)

    def share(self, state: State) -> float:
        """The fraction of a value in this state that one device along `tensor`
        holds."""
        return 1.0 if state in (WHOLE, PENDING) else 1 / self.tensor
