"""What each split of a program sends, and what it saves."""

import dataclasses
from collections.abc import Iterable, Sequence

from redco_eqx._dataflow.atoms import Atom, Dim, resolve
from redco_eqx._dataflow.splits import Split, find_splits, leading_atoms
from redco_eqx._dataflow.values import Event, Value
from redco_eqx._dataflow.walk import Walk

MESSAGE = 2**16
"""In a loop that waits at each step, a collective costs as much time as this many bytes, however small it is."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """All splits of a program over `tensor` devices, of a batch in `num_shards` parts.

    - `splits`: in order, with what they send and save.
    - `clashes`: groups of their numbers, of which at most one can be chosen: they meet in one array.
    - `batch`: what is summed over the batch axes, with its bytes if nothing is split.
    """

    tensor: int
    num_shards: int
    splits: list[Split]
    clashes: list[tuple[int, ...]]
    batch: list[tuple[Event, float]]


def count(
    walk: Walk, parameters: Sequence[Value], rows: Sequence[Value], tensor: int, num_shards: int
) -> Costs:
    """Weighs every split of `parameters`; `rows` are the arrays of the batch."""
    splits = find_splits(parameters, tensor)
    costs = Costs(tensor, num_shards, splits, [], [])
    leads = _Leads(splits, rows, num_shards)
    _count_events(costs, walk.events, leads)
    _count_doubles(costs, walk, leads)
    work: dict[int, float] = {}
    for use in walk.uses:
        work[use.weight] = max(work.get(use.weight, 0.0), float(use.work))
    share = (1 - 1 / tensor) / num_shards
    for split in splits:
        for leaf in (*split.leaves, *split.crossed):
            split.work += share * work.get(leaf, 0.0)
            split.freed += (1 - 1 / tensor) * parameters[leaf].num_bytes
    _find_clashes(costs, walk, parameters, leads)
    return costs


class _Leads:
    """Which splits, and whether the batch, lead a dim."""

    def __init__(self, splits: Sequence[Split], rows: Sequence[Value], num_shards: int):
        self.of_atom: dict[Atom, list[Split]] = {}
        for split in splits:
            for atom in split.atoms:
                self.of_atom.setdefault(atom, []).append(split)
        leading = [leading_atoms(row.dims[0], num_shards, pinned=True) or () for row in rows]
        self.batch_atoms = {atom for atoms in leading for atom in atoms}

    def splits(self, dims: Iterable[Dim]) -> list[Split]:
        found: dict[int, Split] = {}
        for dim in dims:
            if dim:
                found |= {split.number: split for split in self.of_atom.get(resolve(dim)[0], ())}
        return list(found.values())

    def has_batch(self, dims: Iterable[Dim]) -> bool:
        return any(resolve(dim)[0] in self.batch_atoms for dim in dims if dim)


def _count_events(costs: Costs, events: Iterable[Event], leads: _Leads) -> None:
    kept = 1 - 1 / costs.tensor
    for event in events:
        size = float(event.sent.num_bytes * event.times)
        over_batch = leads.has_batch(event.dims) and not leads.has_batch(event.unless)
        if over_batch:
            costs.batch.append((event, size))
            for split in leads.splits(event.sent.dims):
                split.unsent += kept * size
        causes = leads.splits(event.dims)
        spared = leads.splits(event.unless) if causes and event.unless else []
        if leads.has_batch(event.sent.dims):
            size /= costs.num_shards
        for split in causes:
            if split not in spared:
                # What is summed over both kinds of axes is sent once.
                split.sent.append((event, 0.0 if over_batch else size))
                split.waits += MESSAGE * event.times if event.waits > 1 else 0


def _count_doubles(costs: Costs, walk: Walk, leads: _Leads) -> None:
    """One index along two dims of an array (`x @ x.T`): only one of them is split, so an operand is gathered."""
    for step in walk.steps:
        for value in step.results:
            if value.weights or len(value.dims) < 2:
                continue
            for split in _doubled(value, leads):
                if any(split in _doubled(x, leads) for x in step.operands):
                    continue
                smallest = min(step.operands, key=lambda x: x.num_bytes, default=value)
                event = Event("twice", value.dims, smallest, step.equation, step.times, 1)
                shards = costs.num_shards if leads.has_batch(smallest.dims) else 1
                split.sent.append((event, smallest.num_bytes * step.times / shards))


def _doubled(value: Value, leads: _Leads) -> list[Split]:
    firsts = [resolve(dim)[0] for dim in value.dims if dim]
    if len(set(firsts)) == len(firsts):
        return []
    twice = [atom for i, atom in enumerate(firsts) if atom in firsts[:i]]
    return [split for atom in twice for split in leads.of_atom.get(atom, ())]


def _find_clashes(costs: Costs, walk: Walk, parameters: Sequence[Value], leads: _Leads) -> None:
    values = [*parameters, *(value for step in walk.steps for value in step.results)]
    found: dict[tuple[int, ...], None] = {}
    for value in values:
        if len(value.dims) > 1:
            numbers = tuple(sorted(split.number for split in leads.splits(value.dims)))
            if len(numbers) > 1:
                found[numbers] = None
    for sharing in leads.of_atom.values():
        if len(sharing) > 1:
            found[tuple(sorted(split.number for split in sharing))] = None
    for split in costs.splits:
        for leaf in split.crossed:
            for other in costs.splits:
                if other is not split and leaf in other.leaves:
                    found[tuple(sorted((split.number, other.number)))] = None
    costs.clashes.extend(found)
