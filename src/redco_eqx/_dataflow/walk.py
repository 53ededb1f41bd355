"""One walk through a program: dims become atoms, and the costs and savings of each
split are recorded."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.core import AbstractValue
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from redco_eqx._base.jaxprs import JAX_CHECKPOINTS, Operand, num_bytes, shape_of, used
from redco_eqx._base.policy import WORK
from redco_eqx._base.tree import ring_bytes
from redco_eqx._dataflow.values import (
    ADDING,
    ENDS,
    Body,
    Dim,
    Event,
    Leads,
    Split,
    Sum,
    Use,
    Value,
    Visit,
    block_of,
    events_of,
    find_splits,
    firsts,
    new_dims,
    resolve,
    unify,
)

# One walk through a program: dims become atoms, and the costs of each split are
# recorded.


Results: TypeAlias = Sequence[Value | Sequence[Dim]]
"""The results of an operation: each as a value, or only its dims."""

Rule: TypeAlias = Callable[["Walk", list[Value]], Results]
"""The effect of the current operation on the dims of its operands:
`(walk, operands) -> results`."""


class Walk:
    """The records of a walk up to this point.

    - `parameters`, `rows`: the inputs of the program: parameters, and arrays of the
        batch.
    - `gradients`: for each parameter, the result that is its gradient, or `None`.
    - `events`, `uses`, `visits`: in the order of the program.
    - `opaque`: operations about which nothing is known, by name; `opaque_in_loops`: the
        names of those that a loop repeats.
    - `pieces`: the dims that count equal pieces of an array, in the order of the
        program: of one that was cut, or (true) of one that was put together.
    - `sums`: the sums of several events; `num_sums`: how often any was made.
    - `equation`: the operation that the walk is at; `block`, `checkpoint`, `num_loops`:
        the building block, the `jax.checkpoint` and the number of loops that it is in.
    """

    def __init__(self, rule_of: Callable[[JaxprEqn], Rule], block: str = ""):
        self.rule_of = rule_of
        self.block = block
        self.equation: Any = None
        self.checkpoint: JaxprEqn | None = None
        self.parameters: list[Value] = []
        self.gradients: list[Value | None] = []
        self.rows: list[Value] = []
        self.events: list[Event] = []
        self.uses: list[Use] = []
        self.visits: list[Visit] = []
        self.opaque: dict[str, list[JaxprEqn]] = {}
        self.opaque_in_loops: dict[str, None] = {}
        self.num_loops = 0
        self.carried: list[tuple[Value, Value]] = []
        self.bodies: list[Body] = []
        self.pieces: list[tuple[Dim, bool]] = []
        self.sums: list[Sum] = []
        self.num_sums = 0
        self.times = 1.0

    def run(self, program: Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Walk through a program without constants, and return its results."""
        values: dict[Operand, Value] = dict(zip(program.invars, arguments))
        values |= {var: unknown(var.aval) for var in program.constvars}
        flags, _ = used(program, [True] * len(program.outvars))
        done: list[Visit] = []

        def read(atom: Operand) -> Value:
            known = None if isinstance(atom, Literal) else values.get(atom)
            return unknown(atom.aval) if known is None else known

        for equation in itertools.compress(program.eqns, flags):
            operands = [read(atom) for atom in equation.invars]
            num_visits = len(self.visits)
            num_events = len(self.events)
            around = self.equation, self.block, self.bodies, self.checkpoint
            self.block = block_of(equation) or self.block
            self.bodies = []
            if equation.primitive.name in JAX_CHECKPOINTS:
                self.checkpoint = equation
            results = self.results(equation, operands)
            if self.block in ENDS:  # which take a table split over its rows, or whole
                for table in (x for x in operands if x.weights):
                    self.event("whole", table.dims[1:], table)
            if self.block in ADDING and equation.primitive.name in LATER:
                self._sum_later(operands, results)
            own = self.events[num_events:]
            inside = self.bodies, self.checkpoint
            visit = Visit(
                equation, self.times, operands, results, own, self.block, None, *inside
            )
            if len(self.visits) == num_visits:
                # Otherwise it has a body, whose visits are recorded instead.
                self.visits.append(visit)
            done.append(visit)
            self.equation, self.block, self.bodies, self.checkpoint = around
            values.update(zip(equation.outvars, results))
        found = [read(atom) for atom in program.outvars]
        self.bodies.append(Body(arguments, found, done))
        return found

    def _sum_later(self, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Record that a block of the library sums over devices only after more
        operations."""
        sums = [
            part
            for x in operands
            for part in x.sums
            # A gradient from outside comes in summed.
            if all(event.block == self.block for event in events_of([part]))
        ]
        for out in results:
            out.sums = tuple(dict.fromkeys((*out.sums, *sums)))
            for event in events_of(sums):
                event.sent = min(event.sent, out, key=lambda x: x.num_bytes)

    def added(self, operands: Sequence[Value]) -> tuple[Event | Sum, ...]:
        """Combine the sums over devices of values that are added."""
        parts = tuple(dict.fromkeys(part for x in operands for part in x.sums))
        self.num_sums += 1
        if len(parts) > 1:
            first = parts[0] if isinstance(parts[0], Event) else parts[0].first
            is_joined = all(
                part.block in ADDING if isinstance(part, Event) else part.is_joined
                for part in parts
            )
            self.sums.append(Sum(parts, first, is_joined, self.num_sums))
            return (self.sums[-1],)
        for part in parts:
            if isinstance(part, Sum):
                part.time = self.num_sums
        return parts

    def add_up(self) -> None:
        """Record for each event with which others it is summed over devices, after the
        walk."""
        for event, first in firsts(self.sums).items():
            event.first = first
        for event, first in firsts([x for x in self.sums if x.is_joined]).items():
            event.joined = first

    def results(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The results of one operation."""
        self.equation = equation
        if all(0 in shape for shape in self.after):
            # Nothing is computed or sent for results without elements, as in the last
            # level of `associative_scan`, where the shapes of operands need not fit.
            return [
                self.result(new_dims(shape), operands, i)
                for i, shape in enumerate(self.after)
            ]
        try:
            given = self.rule_of(equation)(self, operands)
        except (AttributeError, IndexError, KeyError, TypeError):
            # The rule was written for a different version of JAX, and a parameter is
            # missing.
            given = []
            self.equation = equation
        pairs = enumerate(given[: len(equation.outvars)])
        found = [
            x if isinstance(x, Value) else self.result(x, operands, i) for i, x in pairs
        ]
        if [len(x.dims) for x in found] == [len(shape) for shape in self.after]:
            return found
        return [
            self.result(x, operands, i)
            for i, x in enumerate(self.opaque_dims(operands))
        ]

    def result(
        self, dims: Sequence[Dim], operands: Sequence[Value], number: int = 0
    ) -> Value:
        """A result of this operation, with these dims, that is computed from these
        operands."""
        is_data = any(x.is_data for x in operands)
        is_learned = any(x.is_learned for x in operands)
        weights = (
            ()
            if is_data
            else tuple(sorted({leaf for x in operands for leaf in x.weights}))
        )
        size = num_bytes(self.equation.outvars[number].aval)
        return Value(tuple(dims), size, weights, is_data, is_learned)

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def before(self) -> list[tuple[int, ...]]:
        """The shapes of this operation's operands."""
        return [shape_of(var) for var in self.equation.invars]

    @property
    def after(self) -> list[tuple[int, ...]]:
        """The shapes of this operation's results."""
        return [shape_of(var) for var in self.equation.outvars]

    def opaque_dims(self, operands: Sequence[Value]) -> list[Sequence[Dim]]:
        """Dims of the results of an unknown operation, which needs every operand
        whole."""
        name = self.equation.primitive.name
        self.opaque.setdefault(name, []).append(self.equation)
        if self.num_loops:
            self.opaque_in_loops[name] = None
        for operand in operands:
            self.event("whole", operand.dims, operand)
        return [new_dims(shape) for shape in self.after]

    def event(
        self,
        kind: str,
        dims: Sequence[Dim],
        sent: Value,
        *,
        unless: Sequence[Dim] = (),
        arrays: Sequence[Value] = (),
        along: Sequence[Sequence[int]] = (),
    ) -> None:
        """Record that `sent` is sent if one of `dims`, which are dims of `sent` or of
        `arrays`, is split."""
        if any(dims):
            of = arrays or (sent,)
            found = Event(
                kind,
                dims,
                sent,
                of,
                self.equation,
                self.times,
                unless,
                self.block,
                along,
            )
            self.events.append(found)
            if kind == "sum":
                sent.sums = (*sent.sums, found)

    def hand_on(
        self,
        before: Sequence[Value],
        after: Sequence[Value],
        trips: tuple[int, int] = (1, 1),
    ) -> None:
        """Record that values are passed unchanged into a body, or out of it.

        `trips`: how often the values `before` are there, and how often the values
        `after` are.
        """
        times = (self.times * trips[0], self.times * trips[1])
        for one, other in zip(before, after):
            self.visits.append(
                Visit(self.equation, self.times, [one], [other], [], handed=times)
            )

    def same(self, first: Sequence[Dim], second: Sequence[Dim], value: Value) -> None:
        """Unify dims pairwise. Where two do not fit, `value`, which has the dims
        `second`, would be sent."""
        for one, other in zip(first, second):
            if not unify(one, other):
                self.event("reshard", (one, other), value)

    def carry(self, before: Sequence[Value], after: Sequence[Value]) -> None:
        """Record that a loop passes the values `after` one trip to the next, as the
        values `before`."""
        for one, other in zip(before, after):
            self.same(one.dims, other.dims, other)
            self.carried.append((one, other))

    def use(
        self, weight: Value, data: Value, roles: Sequence[str], made: Value, depth: int
    ) -> None:
        """Record the use of a weight on data, if the two operands are a weight and
        data."""
        if data.is_data:
            size = made.num_bytes * self.times
            self.uses += [
                Use(n, weight.dims, roles, size, size * depth) for n in weight.weights
            ]


def unknown(aval: AbstractValue) -> Value:
    """A value about whose dims nothing is known."""
    return Value(new_dims(getattr(aval, "shape", ())), num_bytes(aval))


Held: TypeAlias = Callable[[int, int | None], float]

LATER = (
    "convert_element_type",
    "gather",
    "reduce_sum",
    "reshape",
    "scatter-add",
    "transpose",
)
"""Linear operations on a sum over devices, which may come before that sum."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """All splits of a program over `tensor` devices, with a batch in `num_shards`
    parts.

    Bytes sent are those that one device sends by the ring algorithm.

    - `splits`: the splits by index, with the bytes that they send and save.
    - `leads`: says which splits lead a dim.
    - `clashes`: groups of indices of splits. At most one of each group can be chosen,
        because they meet in one array.
    - `work`: for each parameter, its bytes times the number of their uses by one
        device.
    - `depth`: the average number of products that each number in this model's
        activations is the sum of.
    - `held`: bytes of a parameter on one device, if `tensor` splits this dim of the
        parameter, or none.
    - `recomputes`: true if the backward pass computes values again, and so gathers them
        again.
    """

    tensor: int
    num_shards: int
    splits: list[Split]
    leads: Leads
    clashes: list[tuple[int, ...]]
    work: list[float]
    depth: float
    held: Held
    recomputes: bool

    def freed(self, leaf: int, dim: int) -> float:
        """Bytes of a parameter that are no longer on a device if this dim of it is
        split."""
        return self.held(leaf, None) - self.held(leaf, dim)

    def local_bytes(self, value: Value, times: float = 1) -> float:
        """Bytes of an array on one device if `tensor` does not split it, multiplied by
        `times`."""
        return (
            value.num_bytes
            * times
            / (self.num_shards if self.leads.has_batch(value.dims) else 1)
        )

    def gathered(self, num_bytes: float) -> float:
        """Bytes sent to gather an array of this size over `tensor`, or to split it
        along a different dim."""
        return ring_bytes("all-gather", num_bytes, self.tensor)

    def sent_over_batch(
        self, event: Event, part: float, split: Split | None = None
    ) -> float:
        """Bytes sent to sum or gather a `part` of an array over the batch axes, and
        over `tensor` if `split` needs it."""
        is_both = split is not None and split.number in self.leads.of(event.dims)
        num_parts = self.num_shards * (self.tensor if is_both else 1)
        kind = "all-reduce" if event.kind in ("sum", "lookup") else "all-gather"
        return ring_bytes(kind, part * event.num_bytes, num_parts)

    def worth_of_work(self, work: float) -> float:
        """The worth, in bytes sent, of work that a device leaves to others."""
        return WORK * ring_bytes("all-reduce", work, self.tensor) / self.depth

    def caused(self, split: Split, event: Event) -> float:
        """Bytes that a device sends over `tensor` for an event, by one split."""
        if split.number not in self.leads.of(event.dims):
            return 0.0
        if self.leads.over_batch(event):  # one sum over both kinds of axes
            return self.sent_over_batch(event, 1.0, split) - self.sent_over_batch(
                event, 1.0
            )
        size = self.local_bytes(event.sent, event.times)
        if len(split.atoms) > 1 and not any(
            split.number in self.leads.splitting(x.dims) for x in event.arrays
        ):
            # An array with only some of several atoms is not split for long: compilers
            # gather it instead of summing, or sum after all in a loop.
            if event.kind != "sum":
                return 0.0
            if event.times > 1:
                return ring_bytes("all-reduce", size, self._num_summands(split, event))
            partial = min(
                x.num_bytes
                for x in event.arrays
                if split.number in self.leads.of(x.dims)
            )
            return self.gathered(partial / self.num_shards)
        if event.kind in ("sum", "lookup"):
            num = self._num_summands(split, event)
            # By the other atoms:
            leads = self.leads.of(event.sent.dims)
            is_split = num < self.tensor and split.number in leads
            return ring_bytes(
                "all-reduce", size * num / self.tensor if is_split else size, num
            )
        before, after = (
            self.leads.num_pieces(split, dims) for dims in (event.dims, event.unless)
        )
        if before and after:
            return 0.0
        if (before or after) and event.kind == "merge":
            return self.gathered(size)  # a reshape across borders needs the whole array
        if before and self.leads.cover(split, event.unless):
            if before % self.tensor == 0:
                # The device that has a piece sends out its parts, ...
                return self.gathered(size / before)
            # ... or it comes by permutes of neighbours, ...
            return (1 + 1 / before**2) * size / self.tensor
        if after:  # ... and go back by two all-to-alls, as compilers do it
            return 2 * self.gathered(size / self.tensor)
        return 0.0 if self.leads.cover(split, event.unless) else self.gathered(size)

    def _num_summands(self, split: Split, event: Event) -> int:
        """The number of devices that a sum is over: those along the atoms of the split
        that it has."""
        atoms = {atom for dim in event.dims for atom in resolve(dim)}
        left = self.tensor
        num = 1
        for atom in split.atoms:
            num_parts = math.gcd(atom.size, left)
            left //= num_parts
            num *= num_parts if atom in atoms else 1
        return num


def count(
    walk: Walk,
    splittable: Sequence[Sequence[Dim]],
    tensor: int,
    num_shards: int,
    held: Held,
    recomputes: bool,
) -> Costs:
    """Weigh every split of the `splittable` dims of parameters."""
    splits = find_splits(splittable, tensor)
    leads = Leads(splits, walk.rows, num_shards)
    work = [0.0] * len(walk.parameters)
    for use in walk.uses:
        work[use.weight] = max(work[use.weight], use.work / num_shards)
    clashes = _clashes(walk, leads)
    costs = Costs(
        tensor,
        num_shards,
        splits,
        leads,
        clashes,
        work,
        depth_of(walk),
        held,
        recomputes,
    )
    kept = 1 - 1 / tensor
    for event in walk.events:
        if leads.over_batch(event):
            for number in leads.splitting(event.sent.dims):
                splits[number].unsent += costs.sent_over_batch(event, kept)
        for number in leads.of(event.dims):
            size = costs.caused(splits[number], event)
            if size > 0:
                splits[number].sent.append((event, size))
    _count_doubles(costs, walk)
    for split in splits:
        split.work = kept * sum(work[leaf] for leaf in split.leaves)
        split.freed = sum(
            (costs.freed(leaf, dim) for leaf, dim in split.leaves.items()), 0.0
        )
    return costs


def depth_of(walk: Walk) -> float:
    """The mean number of products that an activation of the model is the sum of."""
    products = [use for use in walk.uses if "vocabulary" not in use.roles]
    return max(
        1.0,
        sum(use.work for use in products)
        / max(sum(use.num_bytes for use in products), 1),
    )


def _count_doubles(costs: Costs, walk: Walk) -> None:
    """Add the cost of one index along two dims of an array (`x @ x.T`).

    Only one of the two dims is split, so an operand is gathered.
    """
    leads = costs.leads
    for visit in walk.visits:
        before = [number for x in visit.operands for number in leads.doubled(x.dims)]
        made = [
            (x, number)
            for x in visit.results
            if not x.weights
            for number in leads.doubled(x.dims)
        ]
        for value, number in made:
            if number in before:
                continue
            smallest = min(
                visit.operands[::-1], key=lambda x: x.num_bytes, default=value
            )
            event = Event(
                "twice", value.dims, smallest, (smallest,), visit.equation, visit.times
            )
            visit.events.append(event)
            costs.splits[number].sent.append(
                (event, costs.gathered(costs.local_bytes(smallest, visit.times)))
            )


def _clashes(walk: Walk, leads: Leads) -> list[tuple[int, ...]]:
    values = (
        *walk.parameters,
        *(value for visit in walk.visits for value in visit.results),
    )
    found = [
        tuple(sorted(leads.splitting(value.dims)))
        for value in values
        if len(value.dims) > 1
    ]
    found += map(tuple, leads.of_atom.values())
    return [group for group in dict.fromkeys(found) if len(group) > 1]
