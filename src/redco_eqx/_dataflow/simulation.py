"""What any layout sends: the program gone through once, each array split as its operands are."""

import dataclasses
from collections.abc import Mapping, Sequence

from redco_eqx._dataflow.costs import MESSAGE, Costs
from redco_eqx._dataflow.splits import total_bytes
from redco_eqx._dataflow.values import Event, Step, Value

# What hands a gradient on as it is.
_PASSING = ("add", "add_any", "convert_element_type", "reshape", "scan", "squeeze", "stack", "transpose")


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a device sends in a step.

    - `events`: what it sends, with bytes, over `tensor` or over the batch axes.
    - `moved`: bytes of arrays that are gathered because they are split otherwise than they are used.
    - `waits`: what waiting costs, in bytes.
    """

    events: list[tuple[Event, float]]
    moved: float
    waits: float

    def num_bytes(self, *, merged: bool) -> float:
        return total_bytes(self.events, merged=merged) + self.moved


def simulate(
    costs: Costs,
    steps: Sequence[Step],
    parameters: Sequence[Value],
    gradients: Sequence[Value | None],
    layout: Mapping[int, int],
) -> Sent:
    """What is sent if the parameters are split as `layout` says: by leaf, the number of a split.

    Where splits meet, the cheapest is kept at each operation, and what is split otherwise is gathered. What
    nothing splits is computed as a gradient is wanted.
    """
    wanted = {id(gradients[leaf]): number for leaf, number in layout.items() if gradients[leaf] is not None}
    for step in reversed(steps):
        if step.equation.primitive.name in _PASSING:
            numbers = [wanted[id(x)] for x in step.results if id(x) in wanted]
            wanted |= {id(x): numbers[0] for x in step.operands if numbers and id(x) not in wanted}
    run = _Run(costs, {id(parameters[leaf]): number for leaf, number in layout.items()}, wanted)
    for step in steps:
        run.step(step)
    for leaf, gradient in enumerate(gradients):
        if gradient is not None and run.split_of(gradient) not in (None, layout.get(leaf)):
            run.moved += run.part(gradient) * gradient.num_bytes
    return Sent(run.events, run.moved, run.waits)


class _Run:
    def __init__(self, costs: Costs, splits: dict[int, int], wanted: dict[int, int]):
        self.costs, self.leads = costs, costs.leads
        self.splits, self.wanted = splits, wanted
        self.events: list[tuple[Event, float]] = []
        self.moved = self.waits = 0.0
        self.whole: dict[int, float] = {}  # what was gathered once, and is there

    def split_of(self, value: Value) -> int | None:
        return self.splits.get(id(value))

    def step(self, step: Step) -> None:
        numbers = dict.fromkeys(n for x in step.operands if (n := self.split_of(x)) is not None)
        if not numbers:
            numbers = dict.fromkeys(self.wanted[id(x)] for x in step.results if id(x) in self.wanted)
        if numbers:
            options = [(*self._through(step, number), number) for number in numbers]
            sent, gathered, number = min(
                options, key=lambda x: sum(s for _, s in x[0]) + sum(x[1].values()) + self._later(step, x[2])
            )
            self.events += sent
            self.moved += sum(gathered.values())
            self.whole.update(gathered)
            self.waits += sum(MESSAGE * event.times for event, _ in sent if event.waits > 1)
            for value in step.results:
                if number in self.leads.splitting(value.dims):
                    self.splits[id(value)] = number
        for event in step.events:
            if self.leads.over_batch(event):
                size = float(event.sent.num_bytes * event.times)
                self.events.append((event, size * self.part(event.sent)))

    def part(self, value: Value) -> float:
        """How much of an array a device has, over `tensor`."""
        return 1.0 if self.split_of(value) is None else 1 / self.costs.tensor

    def _through(self, step: Step, number: int) -> tuple[list[tuple[Event, float]], dict[int, float]]:
        """What an operation sends if it is done split in this way; and what is gathered before it."""
        split = self.costs.splits[number]
        sent: list[tuple[Event, float]] = []
        gathered: dict[int, float] = {}
        for event in step.events:
            size = self.costs.caused(split, event)
            if size > 0 and not self.leads.over_batch(event):
                sent.append((event, size))
        for value in step.operands:
            if self.split_of(value) not in (None, number) and id(value) not in self.whole:
                shards = self.costs.num_shards if self.leads.has_batch(value.dims) else 1
                gathered[id(value)] = value.num_bytes * step.times / shards
        return sent, gathered

    def _later(self, step: Step, number: int) -> float:
        """What is sent later if a gradient is split in this way, and wanted in another."""
        wrong = [x for x in step.results if self.wanted.get(id(x), number) != number]
        return sum((x.num_bytes * step.times * self.part(x) for x in wrong), 0.0)
