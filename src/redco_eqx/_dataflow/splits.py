"""Splits: the leading atoms of parameter dims that can be split over an axis."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from redco_eqx._dataflow.atoms import Atom, Dim, resolve
from redco_eqx._dataflow.values import Event, Value


@dataclasses.dataclass(eq=False)
class Split:
    """One way to split: some leading atoms, in all dims that they lead.

    - `number`: in the order in which parameters first have it.
    - `leaves`: of each parameter that it splits, the dim.
    - `borders`: the leading atoms of dims that are several pieces, each led by the split's own atoms, if these
        are split too: evenly, across the borders of pieces. `crossed` are the parameters among `leaves` of
        which that is so.
    - `sent`: bytes that a device sends for it in a step, event by event.
    - `waits`: what waiting for these costs, in bytes.
    - `unsent`: bytes that are not sent over the batch axes, because what it splits has smaller gradients.
    - `work`: bytes of weights, times how often they are used, that a device leaves to others.
    - `freed`: bytes of parameters that a device does not hold.
    """

    number: int
    atoms: tuple[Atom, ...]
    leaves: dict[int, int] = dataclasses.field(default_factory=dict)
    borders: tuple[Atom, ...] = ()
    crossed: tuple[int, ...] = ()
    sent: list[tuple[Event, float]] = dataclasses.field(default_factory=list)
    waits: float = 0.0
    unsent: float = 0.0
    work: float = 0.0
    freed: float = 0.0

    def num_bytes(self, *, merged: bool) -> float:
        """All bytes sent; `merged` as in [`total_bytes`][]."""
        return total_bytes(self.sent, merged=merged)


def total_bytes(sent: Iterable[tuple[Event, float]], *, merged: bool) -> float:
    """Bytes sent: of an array that is gathered whole for several operations, once.

    If `merged`, results that are added are summed over devices at once.
    """
    sizes: dict[Event | tuple[str, Value], float] = {}
    for event, size in sent:
        if event.kind in ("twice", "whole") and not event.unless:
            key: Event | tuple[str, Value] = (event.kind, event.sent)
        else:
            key = event.summed_with(merged=merged)
        sizes[key] = max(sizes.get(key, 0.0), size)
    return sum(sizes.values(), 0.0)


def leading_atoms(dim: Dim, size: int, *, pinned: bool = False) -> tuple[Atom, ...] | None:
    """The leading atoms of `dim` that `size` shards are made of; `None` if the dim does not divide so."""
    left = size
    chosen: list[Atom] = []
    for atom in resolve(dim):
        common = math.gcd(atom.size, left)
        if (atom.pin and not pinned) or common == 1 or common not in (atom.size, left):
            return None
        chosen.append(atom)
        left //= common
        if left == 1:
            return tuple(chosen)
    return None


def find_splits(parameters: Sequence[Sequence[Dim]], tensor: int) -> list[Split]:
    """Every way to split dims of parameters; and again, with the parameters that are several such pieces."""
    found: dict[tuple[Atom, ...], Split] = {}
    for leaf, dims in enumerate(parameters):
        for i, dim in enumerate(dims):
            atoms = leading_atoms(dim, tensor)
            if atoms is not None:
                split = found.setdefault(atoms, Split(len(found), atoms))
                split.leaves.setdefault(leaf, i)
    crossing: dict[int, Split] = {}
    for leaf, dims in enumerate(parameters):
        for i, dim in enumerate(dims):
            border, *rest = resolve(dim) or (None,)
            clean = found.get(leading_atoms(tuple(rest), tensor) or ())
            divides = math.prod(atom.size for atom in resolve(dim)) % tensor == 0
            if border is None or border.pin or clean is None or leaf in clean.leaves or not divides:
                continue
            number = len(found) + len(crossing)
            split = crossing.setdefault(clean.number, Split(number, clean.atoms, dict(clean.leaves)))
            if leaf not in split.leaves:
                split.leaves[leaf] = i
                split.borders = tuple(dict.fromkeys((*split.borders, border)))
                split.crossed = (*split.crossed, leaf)
    return [*found.values(), *crossing.values()]


class Leads:
    """Which splits, and whether the batch, lead a dim: there, and only there, an array can be split so."""

    def __init__(self, splits: Sequence[Split], rows: Sequence[Value], num_shards: int):
        self.splits = splits
        self._of_atom: dict[Atom, list[int]] = {}
        self._of_border: dict[tuple[Atom, Atom], list[int]] = {}
        for split in splits:
            for atom in split.atoms:
                self._of_atom.setdefault(atom, []).append(split.number)
            for border in split.borders:
                self._of_border.setdefault((border, split.atoms[0]), []).append(split.number)
        leading = [leading_atoms(row.dims[0], num_shards, pinned=True) or () for row in rows]
        self._batch = {atom for atoms in leading for atom in atoms}

    def of(self, dims: Iterable[Dim]) -> list[int]:
        """The numbers of the splits that lead one of `dims`, evenly or by whole pieces."""
        found: dict[int, None] = {}
        for dim in dims:
            atoms = resolve(dim)
            if atoms:
                found |= dict.fromkeys(self._of_atom.get(atoms[0], ()))
            if len(atoms) > 1:
                found |= dict.fromkeys(self._of_border.get((atoms[0], atoms[1]), ()))
        return list(found)

    def splitting(self, dims: Sequence[Dim]) -> list[int]:
        """The numbers of the splits that an array with these dims can have as a whole."""
        return [n for n in self.of(dims) if len(self.splits[n].atoms) == 1 or self.cover(self.splits[n], dims)]

    def num_pieces(self, split: Split, dims: Iterable[Dim]) -> int:
        """How many pieces an even split of one of `dims` crosses; 0 if it crosses none."""
        for dim in dims:
            atoms = resolve(dim)
            if len(atoms) > 1 and atoms[0] in split.borders and atoms[1] is split.atoms[0]:
                return atoms[0].size
        return 0

    def cover(self, split: Split, dims: Iterable[Dim]) -> bool:
        """Whether all of its atoms are still at the front of `dims`, so that these can be split as before."""
        left = list(split.atoms)
        for dim in dims:
            for atom in resolve(dim):
                if atom not in left:
                    break
                left.remove(atom)
        return not left

    def over_batch(self, event: Event) -> bool:
        """Whether an event happens because the batch is split."""
        return self.has_batch(event.dims) and not self.has_batch(event.unless)

    def has_batch(self, dims: Iterable[Dim]) -> bool:
        return any(resolve(dim)[0] in self._batch for dim in dims if dim)

    def doubled(self, dims: Iterable[Dim]) -> list[int]:
        """The splits that lead two dims by one atom."""
        firsts = [resolve(dim)[0] for dim in dims if dim]
        if len(set(firsts)) == len(firsts):
            return []
        twice = dict.fromkeys(atom for i, atom in enumerate(firsts) if atom in firsts[:i])
        return [number for atom in twice for number in self._of_atom.get(atom, ())]
