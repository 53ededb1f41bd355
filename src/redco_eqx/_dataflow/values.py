"""The values in a walk through a program: the atoms of their dims, their scopes, their
possible splits.

The words of this subpackage, each of which builds on those before it. Terms of the
literature stand in brackets.

- **atom**: a factor of the size of a dim (*factor* of an operation's dims in Shardy,
    *index* of an einsum). A dim of 192 that is reshaped into heads consists of the
    atoms 3 x 8 x 8, major to minor. The walk may find the same atom, which is the same
    index, in several dims.
- **unify**: to find that two dims are the same index, and cut their atoms until both
    have the same ones (*unification*, by union-find).
- **pin**: to mark an atom as never split, with the reason.
- **lead**: the first atoms of a dim lead it. An array can be split only along atoms
    that lead a dim: the others are spread over its whole length. A split leads a dim if
    its atoms do.
- **split**: some atoms, which make as many parts as `tensor` has devices, in all dims
    that they lead (a *sharding* of one mesh axis). To choose a split is to split all
    parameters that have such a dim.
- **border**: where two pieces meet that a program keeps in one dim, such as query, key
    and value. Each piece is led by the atoms of the split, the whole dim by others. A
    parameter whose whole dim is split evenly is *crossed*: its parts do not end where
    the pieces do.
- **clash**: two splits clash if both lead dims of one array, which can have only one of
    them.
- **event**: what an operation sends if a split leads one of its dims: a sum over
    devices (*all-reduce*), a whole operand (*all-gather*), a change of layout
    (*resharding*). It is over the batch if the batch leads the dim.
- **whole**: not split (*replicated*). **Pending**: each device has a summand
    (*partial*, *unreduced*).
- **merged**: counted as a compiler does it that adds the results of several events
    before it sums them over devices, once for all.
- **block**: a building block of this library, or of one that depends on it, which says
    in the scope of its operations how it communicates.
- **stream**: the arrays that flow between the layers of this library.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from redco_eqx._base.jaxprs import source_line

# The scopes of building blocks, and the place in the user's code that an operation
# comes from.


EXPERTS = "redco_eqx.row.experts"
"""The scope of the block that mixes experts. It splits each of them inside."""

ADDING = (EXPERTS, "redco_eqx.column", "redco_eqx.row")
"""The scopes of the building blocks that add results up before they sum over
devices."""

ENDS = ("redco_eqx.embed", "redco_eqx.cross_entropy")
"""The scopes of the blocks that gather stored shards once, and give each device its
part of the gradient."""

STREAM = "redco_eqx.stream"
"""The scope of the arrays that flow between layers: each device has their features
whole."""


def block_of(equation: JaxprEqn) -> str:
    """The building block of this library that an operation, or the one whose gradient
    it is, is in; or ''."""
    scopes = str(equation.source_info.name_stack)
    return next((name for name in (*ADDING, *ENDS, STREAM) if name in scopes), "")


def short_line(equation: JaxprEqn) -> str:
    """The line of user code that an operation comes from, as `file.py:12`, without the
    directory."""
    place = source_line(equation).partition(" (")[0]
    return place.replace("\\", "/").rpartition("/")[2]


# Atoms: the factors of dims, which may be the same index or not.
#
# A dim is a tuple of atoms, major to minor, whose sizes multiply to its size; a dim of
# size 1 has none. Operations say which dims are the same index. The atoms of these dims
# are unified; where the size of one is a multiple of the other, it is cut into factors.
# So a fused `3 * D` becomes `(3, heads, head size)` through the operations that the
# program applies to it.


@dataclasses.dataclass(eq=False, slots=True)
class Atom:
    """One factor of dims.

    - `size`: the number of values that the index takes.
    - `parts`: the atoms that this atom turned out to consist of: one other, or several,
        major to minor. Empty if there are none.
    - `pin`: the reason why `tensor` never splits the atom; empty if it may.
    """

    size: int
    pin: str = ""
    parts: "tuple[Atom, ...]" = ()


Dim: TypeAlias = tuple[Atom, ...]


def new_dim(size: int) -> Dim:
    """A dim that nothing is known about. A dim of size 1 or 0 has no index."""
    return (Atom(size),) if size > 1 else ()


def new_dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(new_dim(size) for size in shape)


def size_of(dim: Dim) -> int:
    return math.prod(atom.size for atom in dim)


def resolve(dim: Dim) -> Dim:
    """The atoms that `dim` consists of at this point in the walk."""
    if not any(atom.parts for atom in dim):
        return dim
    left = list(dim[::-1])
    return tuple(iter(lambda: _next(left), None))


def unify(first: Dim, second: Dim) -> bool:
    """Make two dims, or runs of dims, the same index, as far as their sizes allow.

    Where sizes differ, both atoms are cut at their common divisor. Return true if the
    whole of both was unified. If not, the rest has no common divisor, and only the
    leading factors are the same.
    """
    if first is second:
        return True
    left = list(first[::-1])
    right = list(second[::-1])
    while True:
        a = _next(left)
        b = _next(right)
        if a is None or b is None:
            return a is b
        if a is b:
            continue
        common = math.gcd(a.size, b.size)
        if common == 1:
            return False
        if a.size == b.size:
            a.pin = a.pin or b.pin
            b.parts = (a,)
            continue
        for atom, stack in ((a, left), (b, right)):
            if atom.size != common:
                atom.parts = (
                    Atom(common, atom.pin),
                    Atom(atom.size // common, atom.pin),
                )
            stack.append(atom)


def _next(stack: list[Atom]) -> Atom | None:
    """The next atom that does not consist of others."""
    while stack:
        atom = stack.pop()
        if not atom.parts:
            return atom
        if len(atom.parts) == 1 and atom.parts[0].parts:
            atom.parts = atom.parts[0].parts  # shortens the path for the next time
        stack.extend(atom.parts[::-1])
    return None


def pin(dim: Dim, reason: str) -> None:
    """Mark the atoms of `dim` as never split. If one is marked already, the first
    reason stays."""
    for atom in resolve(dim):
        atom.pin = atom.pin or reason


# The values of a program as a walk sees them, and the records that it writes.


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program.

    - `weights`: the indices of the parameters upstream, if only parameters are
        upstream. The value is then a weight.
    - `is_data`: true if the batch is upstream; `is_learned`: true if a parameter is
        upstream.
    - `sums`: the events that this value is the result of, or the sum of the results of:
        these can be summed over devices at once. [`events_of`][] lists them.
    """

    dims: tuple[Dim, ...]
    num_bytes: int
    weights: tuple[int, ...] = ()
    is_data: bool = False
    is_learned: bool = False
    sums: tuple["Event | Sum", ...] = ()


@dataclasses.dataclass(eq=False, slots=True)
class Event:
    """A cost: the array that is sent if a split of a dim reaches an operation that
    needs the dim whole.

    - `kind`: `sum`, `lookup`, `whole`, `reshard`, `merge`.
    - `dims`: the event happens if the leading atom of any of these dims is split ...
    - `unless`: ... but not if the atom leads one of these dims.
    - `sent`: the array that is summed or gathered. The bytes of one device's part of it
        count.
    - `arrays`: at least one of these arrays must be split for the event to happen.
    - `along`: for a sum, the indices of the dims of each of `arrays` that are summed
        over.
    - `equation`: the operation; `block`: the building block of this library that
        contains it, or ''.
    - `first`: the first of several events whose results are added. Compilers for TPU
        and GPU add before they sum over devices, once; the compiler for CPU does not.
    - `joined`: the first of several events whose results the library's blocks add,
        before the sum over devices, on every backend.
    - `times`: how often the operation runs, in loops; in a branch of several, the share
        of one run.
    """

    kind: str
    dims: Sequence[Dim]
    sent: Value
    arrays: Sequence[Value]
    equation: JaxprEqn
    times: float
    unless: Sequence[Dim] = ()
    block: str = ""
    along: Sequence[Sequence[int]] = ()
    first: "Event | None" = None
    joined: "Event | None" = None

    @property
    def num_bytes(self) -> float:
        """The number of bytes sent for this array, over all loop iterations."""
        return float(self.sent.num_bytes * self.times)

    def summed_with(self, *, merged: bool) -> "Event":
        """Return the event that stands for all events that are summed over devices
        together with this one.

        `merged`: true if the compiler adds the values locally before it sums over
        devices.
        """
        return (self.first if merged else self.joined) or self


@dataclasses.dataclass(eq=False, slots=True)
class Sum:
    """Events whose results are added, as events and sums of them.

    A stream adds the event of each layer to those of all layers before. So a sum holds
    the sum before it, not a list of all events.

    - `first`: the first of the events.
    - `is_joined`: true if all the events are in the library's blocks that add.
    - `time`: the number of sums made before this one, or before it was last made again.
    """

    parts: tuple["Event | Sum", ...]
    first: Event
    is_joined: bool
    time: int


def events_of(parts: Sequence[Event | Sum]) -> list[Event]:
    """The events in sums, in their order, each once."""
    found: dict[Event, None] = {}
    left = list(parts[::-1])
    seen = set[Sum]()
    while left:
        part = left.pop()
        if isinstance(part, Event):
            found[part] = None
        elif part not in seen:
            seen.add(part)
            left.extend(part.parts[::-1])
    return list(found)


def firsts(sums: Sequence[Sum]) -> dict[Event, Event]:
    """For each event, the first event of the last of these sums that has it and does
    not begin with it.

    `sums` are in the order in which they were made, so parts come before wholes.
    """
    # For each part, when a sum that has it was made last, and its first event; then the
    # last with another first event, for the part that is that event.
    latest: dict[Event | Sum, list[tuple[int, Event]]] = {}
    for whole in reversed(sums):
        around = [*latest.pop(whole, ()), (whole.time, whole.first)]
        around.sort(key=lambda found: -found[0])
        others = [found for found in around if found[1] is not around[0][1]]
        for part in whole.parts:
            latest.setdefault(part, []).extend((around[0], *others[:1]))
    found: dict[Event, Event] = {}
    for event, around in latest.items():
        others = [pair for pair in around if pair[1] is not event]
        if isinstance(event, Event) and others:
            found[event] = max(others, key=lambda pair: pair[0])[1]
    return found


@dataclasses.dataclass(eq=False, slots=True)
class Use:
    """An operation of a weight on data.

    - `weight`: the index of the parameter.
    - `roles`: for each dim of the weight in this place, the name of a split along it:
        `row`, `column`, ...
    - `dims`: these dims.
    - `num_bytes`: bytes of the results, in all loops.
    - `work`: these times the number of products that are summed in each element of the
        results. This equals the bytes of the weight times the number of their uses.
    """

    weight: int
    dims: tuple[Dim, ...]
    roles: Sequence[str]
    num_bytes: float
    work: float


@dataclasses.dataclass(eq=False, slots=True)
class Visit:
    """An operation, as a walk visits it: its operands and results, how often it is
    done, and the events if these are split.

    `block` is that of an [`Event`][]; `bodies` are the programs inside the operation
    that were walked; `checkpoint` is the `jax.checkpoint` that contains it.
    """

    equation: JaxprEqn
    times: float
    operands: list[Value]
    results: list[Value]
    events: list[Event]
    block: str = ""
    handed: tuple[float, float] | None = None
    bodies: "list[Body]" = dataclasses.field(default_factory=list)
    checkpoint: JaxprEqn | None = None


class Body(NamedTuple):
    """A program that was walked: its arguments, results and operations."""

    arguments: Sequence[Value]
    results: list[Value]
    visits: list[Visit]


# Splits: the leading atoms of parameter dims that can be split over an axis.


@dataclasses.dataclass(eq=False)
class Split:
    """A split: some leading atoms, in all dims that they lead.

    - `number`: the index of the split, in the order in which splits first appear in the
        parameters.
    - `leaves`: for each parameter that is split, the dim.
    - `borders`: for dims that consist of several pieces, each led by the atoms of the
        split, the leading atoms of the whole dim, if it is also split (evenly, across
        the borders of pieces). `crossed` are the parameters among `leaves` with such a
        dim.
    - `sent`: bytes that a device sends in a step because of the split, event by event.
    - `unsent`: bytes that are not sent over the batch axes, because the arrays that are
        split have smaller gradients.
    - `work`: bytes of weights, times the number of their uses, that the other devices
        process.
    - `freed`: bytes of parameters that are no longer on a device.
    """

    number: int
    atoms: tuple[Atom, ...]
    leaves: dict[int, int] = dataclasses.field(default_factory=dict)
    borders: dict[Atom, None] = dataclasses.field(default_factory=dict)
    crossed: set[int] = dataclasses.field(default_factory=set)
    sent: list[tuple[Event, float]] = dataclasses.field(default_factory=list)
    unsent: float = 0.0
    work: float = 0.0
    freed: float = 0.0

    def num_bytes(self, *, merged: bool) -> float:
        """All bytes sent; `merged` as in [`total_bytes`][]."""
        return total_bytes(self.sent, merged=merged)


def total_bytes(sent: Iterable[tuple[Event, float]], *, merged: bool) -> float:
    """Bytes sent. An array that is gathered whole for several operations counts once.

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


def leading_atoms(
    dim: Dim, size: int, *, pinned: bool = False
) -> tuple[Atom, ...] | None:
    """The leading atoms of `dim` that make `size` shards; `None` if the dim does not
    divide into these."""
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
    """Every way to split dims of parameters; then again with the parameters that
    consist of several pieces."""
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
            divides = size_of(dim) % tensor == 0
            if border is None or border.pin or clean is None or not divides:
                continue
            if clean.number not in crossing:
                number = len(found) + len(crossing)
                crossing[clean.number] = Split(number, clean.atoms, dict(clean.leaves))
            split = crossing[clean.number]
            if leaf not in split.crossed:
                split.leaves[leaf] = i
                split.borders[border] = None
                split.crossed.add(leaf)
    return [*found.values(), *crossing.values()]


class Leads:
    """The splits, and the batch, that lead a dim. An array can be split only along a
    dim that a split or the batch leads."""

    def __init__(self, splits: Sequence[Split], rows: Sequence[Value], num_shards: int):
        self.splits = splits
        self.of_atom: dict[Atom, list[int]] = {}
        self._of_border: dict[tuple[Atom, ...], list[int]] = {}
        for split in splits:
            for atom in split.atoms:
                self.of_atom.setdefault(atom, []).append(split.number)
            for border in split.borders:
                self._of_border.setdefault((border, split.atoms[0]), []).append(
                    split.number
                )
        leading = [
            leading_atoms(row.dims[0], num_shards, pinned=True) or () for row in rows
        ]
        self._batch = {atom for atoms in leading for atom in atoms}
        # After the walk, a dim no longer changes.
        self._atoms = functools.cache(resolve)
        self._of_dim = functools.cache(self._of_one)

    def _of_one(self, dim: Dim) -> list[int]:
        atoms = self._atoms(dim)
        return [*self.of_atom.get(atoms[0], ()), *self._of_border.get(atoms[:2], ())]

    def of(self, dims: Iterable[Dim]) -> list[int]:
        """The indices of the splits that lead one of `dims`, either evenly or in whole
        pieces."""
        return list(dict.fromkeys(n for dim in dims if dim for n in self._of_dim(dim)))

    def splitting(self, dims: Sequence[Dim]) -> list[int]:
        """The indices of the splits that an array with these dims can have with all
        their atoms."""
        return [
            n
            for n in self.of(dims)
            if len(self.splits[n].atoms) == 1 or self.cover(self.splits[n], dims)
        ]

    def num_pieces(self, split: Split, dims: Iterable[Dim]) -> int:
        """Count the pieces that an even split of one of `dims` crosses."""
        for dim in dims:
            atoms = self._atoms(dim)
            if (
                len(atoms) > 1
                and atoms[0] in split.borders
                and atoms[1] is split.atoms[0]
            ):
                return atoms[0].size
        return 0

    def cover(self, split: Split, dims: Iterable[Dim]) -> bool:
        """True if all atoms of the split are still in front of `dims`, which can then
        be split as before."""
        left = list(split.atoms)
        for dim in dims:
            for atom in self._atoms(dim):
                if atom not in left:
                    break
                left.remove(atom)
        return not left

    def over_batch(self, event: Event) -> bool:
        """True for an event that happens because the batch is split."""
        return self.has_batch(event.dims) and not self.has_batch(event.unless)

    def has_batch(self, dims: Iterable[Dim]) -> bool:
        return any(self._atoms(dim)[0] in self._batch for dim in dims if dim)

    def doubled(self, dims: Iterable[Dim]) -> list[int]:
        """The indices of the splits that lead two dims with the same atom."""
        found = [(n, dim) for dim in dims for n in self.of([dim])]
        leads = [
            (n, self._atoms(dim)[bool(self.num_pieces(self.splits[n], [dim]))])
            for n, dim in found
        ]
        return list(
            dict.fromkeys(pair[0] for i, pair in enumerate(leads) if pair in leads[:i])
        )
