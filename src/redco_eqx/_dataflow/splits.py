"""Splits: the leading atoms of parameter dims that can be split over an axis, and what each costs and gains."""

import dataclasses
import math
from collections.abc import Sequence

from redco_eqx._dataflow.atoms import Atom, Dim, resolve
from redco_eqx._dataflow.values import Event, Value


@dataclasses.dataclass(eq=False)
class Split:
    """One way to split: some leading atoms, in all dims that they lead.

    - `number`: in the order in which parameters first have it.
    - `leaves`: of each parameter that it splits, the dim.
    - `crossed`: of each parameter that is made of several pieces which each have it, the dim. An even split of
        that crosses the borders of pieces.
    - `sent`: bytes that a device sends for it in a step, event by event.
    - `waits`: what waiting for these costs, in bytes.
    - `unsent`: bytes that are not sent over the batch axes, because what it splits has smaller gradients.
    - `work`: bytes of weights, times how often they are used, that a device leaves to others.
    - `freed`: bytes of parameters that a device does not hold.
    """

    number: int
    atoms: tuple[Atom, ...]
    leaves: dict[int, int] = dataclasses.field(default_factory=dict)
    crossed: dict[int, int] = dataclasses.field(default_factory=dict)
    sent: list[tuple[Event, float]] = dataclasses.field(default_factory=list)
    waits: float = 0.0
    unsent: float = 0.0
    work: float = 0.0
    freed: float = 0.0

    @property
    def num_bytes(self) -> float:
        return sum(size for _, size in self.sent)


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


def find_splits(parameters: Sequence[Value], tensor: int) -> list[Split]:
    """Every way to split a dim of a parameter."""
    found: dict[tuple[Atom, ...], Split] = {}
    for leaf, value in enumerate(parameters):
        for i, dim in enumerate(value.dims):
            atoms = leading_atoms(dim, tensor)
            if atoms is not None:
                split = found.setdefault(atoms, Split(len(found), atoms))
                split.leaves.setdefault(leaf, i)
    for leaf, value in enumerate(parameters):
        for i, dim in enumerate(value.dims):
            atoms = resolve(dim)
            split = found.get(leading_atoms(atoms[1:], tensor) or ())
            is_pieces = split is not None and not atoms[0].pin and leading_atoms(dim, tensor) is None
            if split is not None and is_pieces and leaf not in split.leaves:
                if math.prod(atom.size for atom in atoms) % tensor == 0:
                    split.crossed.setdefault(leaf, i)
    return list(found.values())
