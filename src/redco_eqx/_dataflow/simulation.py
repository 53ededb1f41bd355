"""The bytes that any layout of the parameters sends: one pass through the program, with
each result split as the operands are.

XLA gives each array of a program one layout, and spreads the layouts of the parameters
from operation to operation (sharding propagation, as in GSPMD and Shardy). The
simulation does the same in the order of the program, and decides each operation by its
price. Some prices rely on habits of XLA that nothing promises. They were seen with the
CPU compiler of jaxlib 0.10.2, unless a row names another. A test, or a model of
`tests/zoo`, compares the prediction with the compiled program.

    habit                                    priced by         seen in
    ---------------------------------------  ----------------  ------------------------
    Results that are added are summed over   `merges`,         compiled steps; programs
    devices one by one on CPU, and once,     `Event.first`     of the TPU compiler
    after the addition, on TPU and GPU.

    An array that the gradient of a weight   `_cut`            `squares` of the zoo
    takes in parts is in parts for all
    products: these sum, and gather no
    weight.

    So is an array of the batch, whose dims  `_cut_rows`       `row_split_weight` in
    a step leaves open but for the rows. A                     `test_compiled_programs`
    batch in one part stays as it was
    placed.

    So is an array of the batch that meets   `_met_rows`       `columns_at_both_ends`
    something split elementwise. A product                     in
    that takes it whole gathers it.                            `test_compiled_programs`

    Of a sum over the batch whose result     `_used_in_parts`  `dispatched` in
    the gradient of a weight takes in                          `test_compiled_programs`
    parts, only the parts are computed.

    Of a split and a whole operand of a      `Sent._sent`      `projections` of the zoo
    product along its sum, the split one is
    gathered if it is smaller than the
    result. Else the other is cut, and the
    result is summed.

    A convolution gathers its split          `Sent._sent`      `conv2d` of the zoo
    operand: it uses no parts of the other.

    A product and the gradient of its        `Sent._copy`      `kept_for_the_gradient`
    weight share a gathered copy if the                        in `test_operations`
    other operand is split along more than
    twice as many elements.

    An array that only some of the atoms of  `Costs.caused`    keys and values of fewer
    a split lead is gathered soon; in a                        heads in the zoo
    loop it is summed after all.

    Parts of fused pieces go to an even      `Costs.caused`    `fused_qkv` of the zoo
    split by permutes of neighbours, and
    back by two all-to-alls.

    A concatenation that is split along its  `_pin_joined`     `merged_patches` in
    pieces splits all pieces inside, and                       `test_compiled_programs`
    all layers that they come from: it is
    never split so.

    Of one index along two dims of a         `_count_doubles`  `iterated` in
    result, one dim is split, and the                          `test_compiled_programs`
    smaller operand is gathered.

    An FFT with a split dim fails, so that   `shapes.fft`      `_step/workarounds.py`
    a step takes all dims but the batch
    whole.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from redco_eqx._dataflow.values import (
    STREAM,
    Event,
    Split,
    Value,
    Visit,
    size_of,
    total_bytes,
)
from redco_eqx._dataflow.walk import Costs, Walk

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

# Elementwise operations of several arrays.
_MEETING = ("add", "add_any", "div", "max", "min", "mul", "pow", "select_n", "sub")


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
    parts = _passed_back(walk, dict(sorted(cut)))
    if costs.num_shards > 1:
        splits |= _cut_rows(costs, walk, parts)

    def run(splits: dict[int, int]) -> Sent:
        sent = Sent(costs, splits, wanted, cut, parts)
        for visit in walk.visits:
            sent.visit(visit)
        return sent

    sent = run(dict(splits))
    # A loop takes a value in the split in which its last trip returned it.
    carried = {
        id(x): number
        for x, y in walk.carried
        if (number := sent.split_of(y)) is not None
    }
    met = {} if costs.num_shards == 1 else _met_rows(walk, sent)
    if (carried | met).keys() - splits.keys():
        sent = run(splits | carried | met)
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
    for visit in reversed(walk.visits):
        if visit.equation.primitive.name in _PASSING:
            numbers = [found[id(x)] for x in visit.results if id(x) in found]
            found |= {
                id(x): numbers[0]
                for x in visit.operands
                if numbers and id(x) not in found
            }
    return found


def _cut(costs: Costs, walk: Walk, wanted: Mapping[int, int]) -> set[tuple[int, int]]:
    """The arrays that the gradient of a weight takes in parts, with the split. Other
    products take these parts too.

    Arrays that are passed on from the inputs of the program are left out: they keep
    their layout. Those of the batch do so if there is one shard of it, see
    [`_cut_rows`][]. They also do so if the split leads both dims of the weight, unless
    something that is split is added to them, or the like: the gradient alone does not
    say which of the dims is in parts.
    """
    inputs = {id(x) for x in walk.parameters}
    # The array of the batch that a value is.
    row_of = {id(x): id(x) for x in walk.rows}
    met = set[tuple[int, int]]()
    for visit in walk.visits:
        operands = {id(x) for x in visit.operands}
        passes = visit.equation.primitive.name in _PASSING
        if passes and operands <= inputs:
            inputs |= {id(x) for x in visit.results}
        elif passes and len(operands) == 1 and operands <= row_of.keys():
            row = row_of[operands.pop()]
            row_of |= {id(x): row for x in visit.results}
        elif (
            visit.equation.primitive.name in _MEETING
            and not operands <= inputs | row_of.keys()
        ):
            met |= {
                (row_of[id(x)], number)
                for x in visit.operands
                if id(x) in row_of
                for number in costs.leads.of(x.dims)
            }
    cut = set[tuple[int, int]]()
    for visit in walk.visits:
        for result in visit.results:
            number = wanted.get(id(result))
            if number is None:
                continue
            led = [dim for dim in result.dims if number in costs.leads.of([dim])]
            for x in visit.operands:
                row = row_of.get(id(x))
                is_kept = id(x) in inputs
                if row is not None:
                    is_alone = (row, number) not in met
                    is_kept = costs.num_shards == 1 or (len(led) > 1 and is_alone)
                if not is_kept and number in costs.leads.of(x.dims):
                    cut.add((id(x), number))
    return cut


def _cut_rows(costs: Costs, walk: Walk, parts: Mapping[int, int]) -> dict[int, int]:
    """The splits of the arrays of the batch, by `id`, that are taken in parts.

    A step splits the rows of its batch over the batch axes, and leaves the other dims
    to the compiler. So these arrays are in parts for all operations.
    """
    return {
        id(x): parts[id(x)]
        for x in walk.rows
        if id(x) in parts and parts[id(x)] in costs.leads.splitting(x.dims)
    }


def _met_rows(walk: Walk, sent: "Sent") -> dict[int, int]:
    """The splits of the arrays of the batch, by `id`, that meet something split in an
    elementwise operation, as they are or computed from one array of the batch alone."""
    rows = {id(x): x for x in walk.rows}
    # The array of the batch that a value was computed from.
    source = {id(x): id(x) for x in walk.rows}
    found = dict[int, int]()
    for visit in walk.visits:
        with_dims = [id(x) for x in visit.operands if x.dims]
        known = {source[x] for x in with_dims if x in source}
        if len(known) == 1 and all(x in source for x in with_dims):
            source |= dict.fromkeys(map(id, visit.results), known.pop())
        elif visit.equation.primitive.name in _MEETING:
            numbers = {sent.split_of(x) for x in visit.results}
            for row in known:
                for number in sent.leads.splitting(rows[row].dims):
                    if number in numbers:
                        found.setdefault(row, number)
    return {row: number for row, number in found.items() if sent.is_whole(row)}


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
        parts: dict[int, int],
    ):
        self.events: list[tuple[Event, float]] = []
        self.moved = 0.0
        self.of_split: dict[int, list[tuple[Event, float]]] = defaultdict(list)
        self.moved_by: dict[int | None, float] = defaultdict(float)
        self._costs = costs
        self.leads = costs.leads
        self._splits = splits
        self._wanted = wanted
        self._cut = cut
        self._parts = parts
        # The values that only some atoms of a split still split.
        self._partial: dict[int, int] = {}
        # The copies that were gathered, see `_copy`
        self._gathered: set[tuple[int, bool, bool]] = set()

    def num_bytes(self, *, merged: bool) -> float:
        return total_bytes(self.events, merged=merged) + self.moved

    def split_of(self, value: Value) -> int | None:
        return self._splits.get(id(value))

    def is_whole(self, value_id: int) -> bool:
        return value_id not in self._splits

    def part(self, value: Value) -> float:
        """The fraction of an array that one device along `tensor` holds."""
        return 1.0 if self.split_of(value) is None else 1 / self._costs.tensor

    def visit(self, visit: Visit) -> None:
        """Run an operation in the split that sends least, among the splits of its
        operands."""
        if visit.block == STREAM:
            self._gather(visit)
            return
        numbers = dict.fromkeys(
            n for x in visit.operands if (n := self.split_of(x)) is not None
        )
        partial = dict.fromkeys(
            self._partial[id(x)] for x in visit.operands if id(x) in self._partial
        )
        wanted = dict.fromkeys(
            self._wanted[id(x)] for x in visit.results if id(x) in self._wanted
        )
        options = [
            (*self._through(visit, n), n)
            for n in numbers or partial or wanted or self._used_in_parts(visit)
        ]
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
            self._gathered |= {self._copy(visit, value, number) for value in gathered}
            is_whole = bool(numbers) or not partial
            for value in visit.results:
                if is_whole and number in self.leads.splitting(value.dims):
                    self._splits[id(value)] = number
                elif number in self.leads.of(value.dims):
                    self._partial[id(value)] = number
        for event in visit.events:
            if self.leads.over_batch(event):
                part = self.part(event.sent)
                size = self._costs.sent_over_batch(event, part, chosen)
                self.events.append((event, size))
                more = size - self._costs.sent_over_batch(event, part)
                if chosen is not None and more > 0:
                    self.of_split[chosen.number].append((event, more))

    def _used_in_parts(self, visit: Visit) -> dict[int, None]:
        """The splits in which the results of a sum over the batch are used later. Only
        these parts are summed."""
        if not any(self.leads.over_batch(event) for event in visit.events):
            return {}
        return dict.fromkeys(
            self._parts[id(x)] for x in visit.results if id(x) in self._parts
        )

    def _gather(self, visit: Visit) -> None:
        """Pass a boundary of layers: values that were split before it are whole from
        here on."""
        for value in visit.operands:
            self._partial.pop(id(value), None)
            number = self._splits.pop(id(value), None)
            if number is not None:
                split = self._costs.splits[number]
                sent = [
                    (e, size)
                    for e in visit.events
                    if (size := self._costs.caused(split, e)) > 0
                ]
                self.events += sent
                self.of_split[number] += sent

    def _through(
        self, visit: Visit, number: int
    ) -> tuple[float, list[tuple[Event, float]], float, list[Value]]:
        """Price an operation in this split.

        Return the price, the events that send, and the bytes that are gathered before
        it, with their arrays.
        """
        split = self._costs.splits[number]
        sent = []
        for event in visit.events:
            size = self._costs.caused(split, event)
            if size > 0 and not self.leads.over_batch(event):
                sent += self._sent(event, split, size, visit)
        others = dict.fromkeys(
            x for x in visit.operands if self.split_of(x) not in (None, number)
        )
        gathered = [
            x for x in others if self._copy(visit, x, number) not in self._gathered
        ]
        moved = self._costs.gathered(
            sum(self._costs.local_bytes(x, visit.times) for x in gathered)
        )
        # A gradient that is split in this way may be needed in another.
        wrong = [x for x in visit.results if self._wanted.get(id(x), number) != number]
        later = self._costs.gathered(
            sum(x.num_bytes * visit.times * self.part(x) for x in wrong)
        )
        return sum(size for _, size in sent) + moved + later, sent, moved, gathered

    def _copy(self, visit: Visit, value: Value, number: int) -> tuple[int, bool, bool]:
        """Identify the whole copy of an array that an operation takes. Equal copies are
        gathered once.

        A product and the gradient of its weight take the same copy if the other operand
        is split along more than twice as many elements. XLA was seen to do this; at
        exactly twice, in only one order of the operands. If the backward pass
        recomputes, it takes a copy of its own.
        """
        is_weight = not any(self.leads.has_batch(x.dims) for x in visit.results)
        lengths = [
            self._length(x) for x in visit.operands if self.split_of(x) == number
        ]
        is_long = max(lengths, default=0) > 2 * self._length(value)
        is_again = self._costs.recomputes and "transpose(" in str(
            visit.equation.source_info.name_stack
        )
        return id(value), is_weight and not is_long, is_again

    def _sent(
        self, event: Event, split: Split, size: float, visit: Visit
    ) -> list[tuple[Event, float]]:
        """Price an event, given the splits of the operands. An operand may be gathered
        instead."""
        number = split.number
        if event.kind == "twice":
            is_met = sum(self.split_of(x) == number for x in visit.operands) > 1
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
        is_product = visit.equation.primitive.name == "dot_general"
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
            (i for i, dim in enumerate(value.dims) if number in self.leads.of([dim])),
            None,
        )

    def _length(self, value: Value) -> int:
        """The number of elements along the dim that is split."""
        place = self._place(value)
        return 1 if place is None else size_of(value.dims[place])
