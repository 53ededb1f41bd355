"""What each split of a program sends, and what it saves."""

import dataclasses
from collections.abc import Iterable, Sequence

from redco_eqx._dataflow.atoms import Dim
from redco_eqx._dataflow.splits import Leads, Split, find_splits
from redco_eqx._dataflow.values import Event, Value
from redco_eqx._dataflow.walk import Walk

MESSAGE = 2**16
"""In a loop that waits at each step, a collective costs as much time as this many bytes, however small it is."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """All splits of a program over `tensor` devices, of a batch in `num_shards` parts.

    - `splits`: by number, with what they send and save.
    - `clashes`: groups of their numbers, of which at most one can be chosen: they meet in one array.
    - `batch`: what is summed over the batch axes, with its bytes if nothing is split.
    - `depth`: how many products a number of this model's activations is the sum of, on average.
    """

    tensor: int
    num_shards: int
    splits: list[Split]
    clashes: list[tuple[int, ...]]
    batch: list[tuple[Event, float]]
    depth: float


def count(
    walk: Walk,
    parameters: Sequence[Value],
    splittable: Sequence[Sequence[Dim]],
    rows: Sequence[Value],
    tensor: int,
    num_shards: int,
) -> Costs:
    """Weighs every split of the `splittable` dims of parameters; `rows` are the arrays of the batch."""
    splits = find_splits(splittable, tensor)
    leads = Leads(splits, rows, num_shards)
    costs = Costs(tensor, num_shards, splits, [], [], _depth(walk))
    for event in walk.events:
        _count_event(costs, event, leads)
    _count_doubles(costs, walk, leads)
    work: dict[int, float] = {}
    for use in walk.uses:
        work[use.weight] = max(work.get(use.weight, 0.0), use.work)
    for split in splits:
        for leaf in split.leaves:
            split.work += (1 - 1 / tensor) * work.get(leaf, 0.0) / num_shards
            split.freed += (1 - 1 / tensor) * parameters[leaf].num_bytes
    costs.clashes.extend(_clashes(walk, parameters, splits, leads))
    return costs


def _count_event(costs: Costs, event: Event, leads: Leads) -> None:
    size = float(event.sent.num_bytes * event.times)
    over_batch = leads.has_batch(event.dims) and not leads.has_batch(event.unless)
    if over_batch:
        costs.batch.append((event, size))
        for number in leads.of(event.sent.dims):
            costs.splits[number].unsent += (1 - 1 / costs.tensor) * size
    if leads.has_batch(event.sent.dims):
        size /= costs.num_shards
    for number in leads.of(event.dims):
        split = costs.splits[number]
        partial = _partly(split, event, leads)
        if partial is not None:
            # With some of several atoms an array is not split for long: as compilers do it, it is gathered
            # and not summed, or in a loop summed after all.
            part = 1.0 if event.kind == "sum" else 0.0
            size = size if event.times > 1 else partial / costs.num_shards
        else:
            part = _part(costs, split, event, leads)
        if part > 0:
            # What is summed over both kinds of axes is sent once.
            split.sent.append((event, 0.0 if over_batch else part * size))
            split.waits += MESSAGE * event.times if event.waits > 1 else 0


def _partly(split: Split, event: Event, leads: Leads) -> float | None:
    """Bytes of the array that has only some of the split's atoms, if none has all of them."""
    if len(split.atoms) == 1 or any(split.number in leads.splitting(array.dims) for array in event.arrays):
        return None
    return min(x.num_bytes * event.times for x in event.arrays if split.number in leads.of(x.dims))


def _part(costs: Costs, split: Split, event: Event, leads: Leads) -> float:
    """How much of the array is sent, if the split causes the event."""
    if not event.unless:
        return 1.0
    before, after = (leads.num_pieces(split, dims) for dims in (event.dims, event.unless))
    if before and after:
        return 0.0
    if before:
        # As the compiler does it: pieces come by permutes of neighbouring shards, ...
        num_cuts = 1 if event.kind == "whole" else before
        return num_cuts * (1 + 1 / before**2) / costs.tensor if leads.cover(split, event.unless) else 1.0
    if after:
        return 2 / costs.tensor  # ... and go back by two all-to-alls.
    return 0.0 if leads.cover(split, event.unless) else 1.0


def _count_doubles(costs: Costs, walk: Walk, leads: Leads) -> None:
    """One index along two dims of an array (`x @ x.T`): only one of them is split, so an operand is gathered."""
    for step in walk.steps:
        for value in step.results:
            if value.weights or len(value.dims) < 2:
                continue
            for number in leads.doubled(value.dims):
                if any(number in leads.doubled(x.dims) for x in step.operands):
                    continue
                smallest = min(step.operands, key=lambda x: x.num_bytes, default=value)
                event = Event("twice", value.dims, smallest, (smallest,), step.equation, step.times, 1)
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


def _depth(walk: Walk) -> float:
    products = [use for use in walk.uses if "vocabulary" not in use.roles]
    return sum(use.work for use in products) / max(sum(use.num_bytes for use in products), 1)
