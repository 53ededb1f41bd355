"""What a program says about a layout, in words and numbers for a reader."""

from collections.abc import Mapping, Sequence

from redco_eqx._dataflow.atoms import Dim, resolve
from redco_eqx._dataflow.choice import worth
from redco_eqx._dataflow.costs import Costs
from redco_eqx._dataflow.source import short_line
from redco_eqx._dataflow.splits import Split, leading_atoms, total_bytes
from redco_eqx._dataflow.values import Event


def megabytes(num_bytes: float) -> str:
    """`1.2 MB`: of bytes that are sent, as networks are measured."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def factors(dim: Dim) -> str:
    """`32 (8 x 4)`: the size of a dim, and the factors that it was found to have."""
    atoms = resolve(dim)
    size = 1
    for atom in atoms:
        size *= atom.size
    return str(size) if len(atoms) < 2 else f"{size} ({' x '.join(str(atom.size) for atom in atoms)})"


def largest(sent: Sequence[tuple[Event, float]]) -> str:
    """Where most is sent: `4.1 kB in 2 operations for the sum of dot_general at model.py:41`."""
    groups: dict[tuple[str, str, str], list[tuple[Event, float]]] = {}
    for event, size in sent:
        key = (event.kind, event.equation.primitive.name, short_line(event.equation))
        groups.setdefault(key, []).append((event, size))
    if not groups:
        return "nothing"
    totals = {key: total_bytes(found, merged=True) for key, found in groups.items()}
    kind, name, place = key = max(groups, key=lambda key: totals[key])
    several = f"in {len(groups[key])} operations " if len(groups[key]) > 1 else ""
    return f"{megabytes(totals[key])} {several}for the {_KINDS[kind]} of {name} at {place}"


_KINDS = {
    "sum": "sum",
    "lookup": "lookup",
    "whole": "whole operand",
    "reshard": "change of layout",
    "merge": "change of layout",
    "twice": "second use of one index",
}


def why_split(split: Split, dim: Dim, leaf: int) -> str:
    """Of a parameter that is split."""
    size = factors(dim)
    sent = megabytes(split.num_bytes(merged=True))
    others = len(split.leaves) - 1
    shared = f", with {others} other array{'s' if others > 1 else ''}" if others else ""
    text = f"{size} is split{shared}: {sent} a step"
    if split.sent:
        text += f", {largest(split.sent)}"
    if leaf in split.crossed:
        pieces = resolve(dim)[0].size
        text += f". It holds {pieces} pieces, whose borders an even split crosses: keep them on a leading dim"
    return text


def why_whole(
    leaf: int, dims: Sequence[Dim], costs: Costs, layout: Mapping[int, int], paths: Sequence[str]
) -> str:
    """Of a parameter that is not split: a reason for each dim."""
    reasons = []
    for i, dim in enumerate(dims):
        atoms = resolve(dim)
        if not atoms:
            continue
        if atoms[0].pin:
            reasons.append(f"dim {i} is {atoms[0].pin}")
        elif leading_atoms(dim, costs.tensor) is None:
            reasons.append(f"dim {i}, {factors(dim)}, does not divide by {costs.tensor}")
        else:
            options = [s for s in costs.splits if s.leaves.get(leaf) == i and leaf not in s.crossed]
            reasons += [
                f"dim {i}, {factors(dim)}, {_why_not(s, leaf, costs, layout, paths)}" for s in options[:1]
            ]
    return "; ".join(reasons) or "a scalar"


def _why_not(split: Split, leaf: int, costs: Costs, layout: Mapping[int, int], paths: Sequence[str]) -> str:
    if split.number in layout.values():
        return "is split elsewhere, but this array is better whole"
    if worth(costs, split) > 0:
        clashing = {n for group in costs.clashes if split.number in group for n in group}
        others = [(paths[other], number) for other, number in layout.items() if number in clashing]
        if others:
            # The nearest one, without the number of its layer: so alike layers have one reason.
            nearest, number = max(others, key=lambda other: _num_shared(other[0], paths[leaf]))
            parts, shared = nearest.split("."), _num_shared(nearest, paths[leaf])
            if shared and not parts[shared - 1].isdigit():
                shared -= 1
            dim = costs.splits[number].leaves[paths.index(nearest)]
            return f"clashes with dim {dim} of {'.'.join(parts[shared:])}"
    return f"would send {megabytes(split.num_bytes(merged=True))} a step, {largest(split.sent)}"


def _num_shared(first: str, second: str) -> int:
    """How many parts of two paths are the same, from the beginning."""
    pairs = list(zip(first.split("."), second.split(".")))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
