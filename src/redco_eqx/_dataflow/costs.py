"""What each split of a program sends, and what it saves."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from redco_eqx._dataflow.atoms import Dim
from redco_eqx._dataflow.splits import Leads, Split, find_splits
from redco_eqx._dataflow.values import Event, Value
from redco_eqx._dataflow.walk import Walk

Held: TypeAlias = Callable[[int, int | None], float]

MESSAGE = 2**16
"""In a loop that waits at each step, a collective costs as much time as this many bytes, if not more."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """All splits of a program over `tensor` devices, of a batch in `num_shards` parts.

    - `splits`: by number, with what they send and save.
    - `leads`: which of them lead a dim.
    - `clashes`: groups of their numbers, of which at most one can be chosen: they meet in one array.
    - `batch`: what is summed over the batch axes, with its bytes if nothing is split.
    - `work`: for each parameter, bytes of it times how often they are used by one device.
    - `depth`: how many products a number of this model's activations is the sum of, on average.
    - `held`: bytes of a parameter on one device, if `tensor` splits this dim of it, or none.
    """

    tensor: int
    num_shards: int
    splits: list[Split]
    leads: Leads
    clashes: list[tuple[int, ...]]
    batch: list[tuple[Event, float]]
    work: list[float]
    depth: float
    held: Held

    def freed(self, leaf: int, dim: int) -> float:
        """Bytes of a parameter that a device does not hold if this dim of it is split."""
        return self.held(leaf, None) - self.held(leaf, dim)

    def caused(self, split: Split, event: Event) -> float:
        """Bytes that a device sends over `tensor` for an event, by one split."""
        if split.number not in self.leads.of(event.dims):
            return 0.0
        shards = self.num_shards if self.leads.has_batch(event.sent.dims) else 1
        size = event.sent.num_bytes * event.times / shards
        if len(split.atoms) > 1 and not any(split.number in self.leads.splitting(x.dims) for x in event.arrays):
            # With some of several atoms an array is not split for long: as compilers do it, it is gathered and
            # not summed, or in a loop summed after all.
            partial = min(x.num_bytes for x in event.arrays if split.number in self.leads.of(x.dims))
            size = size if event.times > 1 else partial / self.num_shards
            return size if event.kind == "sum" else 0.0
        return self._part(split, event) * size

    def _part(self, split: Split, event: Event) -> float:
        """How much of the array is sent."""
        if not event.unless:
            return 1.0
        before, after = (self.leads.num_pieces(split, dims) for dims in (event.dims, event.unless))
        if before and after:
            return 0.0
        if (before or after) and event.kind == "merge":
            return 1.0  # a reshape across borders is done whole
        if before and self.leads.cover(split, event.unless):
            return (1 + 1 / before**2) / self.tensor  # a piece comes by permutes of neighbouring shards, ...
        if after:
            return 2 / self.tensor  # ... and goes back by two all-to-alls, as compilers do it
        return 0.0 if self.leads.cover(split, event.unless) else 1.0


def count(
    walk: Walk,
    parameters: Sequence[Value],
    splittable: Sequence[Sequence[Dim]],
    rows: Sequence[Value],
    tensor: int,
    num_shards: int,
    held: Held,
) -> Costs:
    """Weighs every split of the `splittable` dims of parameters; `rows` are the arrays of the batch."""
    splits = find_splits(splittable, tensor)
    leads = Leads(splits, rows, num_shards)
    work = [0.0] * len(parameters)
    for use in walk.uses:
        work[use.weight] = max(work[use.weight], use.work / num_shards)
    costs = Costs(tensor, num_shards, splits, leads, [], [], work, _depth(walk), held)
    kept = 1 - 1 / tensor
    for event in walk.events:
        over_batch = leads.over_batch(event)
        if over_batch:
            size = float(event.sent.num_bytes * event.times)
            costs.batch.append((event, size))
            for number in leads.splitting(event.sent.dims):
                splits[number].unsent += kept * size
        for number in leads.of(event.dims):
            size = costs.caused(splits[number], event)
            if size > 0:
                # What is summed over both kinds of axes is sent once.
                splits[number].sent.append((event, 0.0 if over_batch else size))
                splits[number].waits += MESSAGE * event.times if event.waits > 1 else 0
    _count_doubles(costs, walk)
    for split in splits:
        split.work = kept * sum(work[leaf] for leaf in split.leaves)
        split.freed = sum((costs.freed(leaf, dim) for leaf, dim in split.leaves.items()), 0.0)
    costs.clashes.extend(_clashes(walk, parameters, splits, leads))
    return costs


def _depth(walk: Walk) -> float:
    products = [use for use in walk.uses if "vocabulary" not in use.roles]
    return max(1.0, sum(use.work for use in products) / max(sum(use.num_bytes for use in products), 1))


def _count_doubles(costs: Costs, walk: Walk) -> None:
    """One index along two dims of an array (`x @ x.T`): only one is split, so an operand is gathered."""
    leads = costs.leads
    for step in walk.steps:
        for value in step.results:
            if value.weights or len(value.dims) < 2:
                continue
            for number in leads.doubled(value.dims):
                if any(number in leads.doubled(x.dims) for x in step.operands):
                    continue
                smallest = min(step.operands[::-1], key=lambda x: x.num_bytes, default=value)
                event = Event("twice", value.dims, smallest, (smallest,), step.equation, step.times, 1)
                step.events.append(event)
                shards = costs.num_shards if leads.has_batch(smallest.dims) else 1
                costs.splits[number].sent.append((event, smallest.num_bytes * step.times / shards))


def _clashes(
    walk: Walk, parameters: Sequence[Value], splits: Sequence[Split], leads: Leads
) -> Iterable[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}
    for value in (*parameters, *(value for step in walk.steps for value in step.results)):
        if len(value.dims) > 1:
            numbers = tuple(sorted(leads.splitting(value.dims)))
            if len(numbers) > 1:
                found[numbers] = None
    of_atom: dict[int, list[int]] = {}
    for split in splits:
        for atom in split.atoms:
            of_atom.setdefault(id(atom), []).append(split.number)
    found |= {tuple(numbers): None for numbers in of_atom.values() if len(numbers) > 1}
    return found
