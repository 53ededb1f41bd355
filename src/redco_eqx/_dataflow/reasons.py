"""The reasons for a layout that comes from a program, in words and numbers."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.search import without_numbers, worth
from redco_eqx._dataflow.simulation import Sent
from redco_eqx._dataflow.values import (
    Dim,
    Event,
    Split,
    leading_atoms,
    resolve,
    short_line,
    size_of,
    total_bytes,
)
from redco_eqx._dataflow.walk import Costs

_KINDS = {
    "sum": "sum",
    "lookup": "lookup",
    "whole": "whole operand",
    "reshard": "change of layout",
    "merge": "change of layout",
    "twice": "second use of one index",
}


def factors(dim: Dim) -> str:
    """`32 (8 x 4)`: the size of a dim, and the factors that the walk found in it."""
    sizes = [str(atom.size) for atom in resolve(dim)]
    return (
        f"{size_of(dim)} ({' x '.join(sizes)})" if len(sizes) > 1 else str(size_of(dim))
    )


def why_indivisible(dim: Dim, tensor: int) -> str:
    """Explain why the leading factors of a dim do not make `tensor` equal parts."""
    if size_of(dim) % tensor:
        return f"is not divisible by {tensor}"
    left = tensor
    leading = []
    for atom in resolve(dim):
        if atom.pin:
            return f"has a factor, {atom.size}, that is {atom.pin}"
        leading.append(str(atom.size))
        common = math.gcd(atom.size, left)
        if common == 1 or common not in (atom.size, left):
            break
        left //= common
    # An even split would cross the borders of the pieces that the program uses apart.
    if len(leading) == 1:
        return (
            f"has the leading factor {leading[0]}, which is not divisible by {tensor}"
        )
    return (
        f"has the leading factors {' x '.join(leading)}, which are not divisible by "
        f"{tensor}"
    )


def largest_sends(sent: Sequence[tuple[Event, float]]) -> str:
    """Name the source of most bytes: `4.1 KiB in 2 operations for the sum of
    dot_general at model.py:41`."""
    groups: dict[tuple[str, str, str], list[tuple[Event, float]]] = {}
    for event, size in sent:
        key = (event.kind, event.equation.primitive.name, short_line(event.equation))
        groups.setdefault(key, []).append((event, size))
    if not groups:
        return "nothing"
    totals = {key: total_bytes(found, merged=True) for key, found in groups.items()}
    kind, name, place = key = max(groups, key=lambda key: totals[key])
    several = f"in {len(groups[key])} operations " if len(groups[key]) > 1 else ""
    return (
        f"{size_text(totals[key])} {several}for the {_KINDS[kind]} of {name} at {place}"
    )


class Reasons:
    """The reasons for the layout of each parameter.

    One split may be that of every layer, and a model may have as many splits as layers.
    So what all arrays of a split share is written once, and nothing looks through all
    splits, or all arrays, for each array.
    """

    def __init__(
        self,
        costs: Costs,
        layout: Mapping[int, int],
        paths: Sequence[str],
        sent: Sent,
        splits_activations: bool,
    ):
        self._costs = costs
        self._layout = layout
        self._paths = paths
        self._simulated = sent
        self._splits_activations = splits_activations
        self._chosen = Counter(layout.values())
        self._place = {leaf: place for place, leaf in enumerate(layout)}
        # The first split of each dim of a parameter that crosses no borders there.
        self._splits: dict[tuple[int, int], Split] = {}
        for split in costs.splits:
            for leaf, dim in split.leaves.items():
                if leaf not in split.crossed:
                    self._splits.setdefault((leaf, dim), split)
        self._clashing: dict[int, set[int]] = defaultdict(set)
        for group in costs.clashes:
            for number in group:
                self._clashing[number].update(group)
        self._sent = functools.cache(self._sent_by)
        self._worth = functools.cache(lambda n: worth(costs, costs.splits[n]))

    def why_split(self, split: Split, dim: Dim, leaf: int) -> str:
        """Explain why a parameter is split."""
        sent, largest = self._sent(split.number)
        others = self._chosen[split.number] - 1
        shared = ""
        if others:
            shared = f", with {others} other array{'s' if others > 1 else ''}"
        text = f"{factors(dim)} is split{shared}: {sent} a step"
        if self._splits_activations:
            text += " before activations are split"
        if largest:
            text += f", {largest}"
        if leaf in split.crossed:
            pieces = resolve(dim)[0].size
            text += (
                f". It holds {pieces} pieces, whose borders an even split crosses: "
                "keep them on a leading dim"
            )
        return text

    def why_whole(self, leaf: int, dims: Sequence[Dim]) -> str:
        """Explain, dim by dim, why a parameter is not split."""
        tensor = self._costs.tensor
        if tensor == 1:
            return "tensor has one device"
        reasons = []
        for i, dim in enumerate(dims):
            atoms = resolve(dim)
            if not atoms:
                continue
            if atoms[0].pin:
                reasons.append(f"dim {i} is {atoms[0].pin}")
            elif leading_atoms(dim, tensor) is None:
                why = why_indivisible(dim, tensor)
                reasons.append(f"dim {i}, {factors(dim)}, {why}")
            elif (leaf, i) in self._splits:
                why = self._why_not(self._splits[leaf, i], leaf)
                reasons.append(f"dim {i}, {factors(dim)}, {why}")
        return "; ".join(reasons) or "a scalar"

    def _why_not(self, split: Split, leaf: int) -> str:
        if split.number in self._chosen:
            return "is split elsewhere, but this array is better left whole"
        sent, largest = self._sent(split.number)
        nearest = None
        if self._worth(split.number) > 0:
            nearest = self._nearest(leaf, self._clashing[split.number])
        if nearest is None:
            return f"would send {sent} a step, {largest}"
        dim = self._costs.splits[self._layout[nearest]].leaves[nearest]
        # Without the number of the layer, similar layers share one reason.
        return f"clashes with dim {dim} of {without_numbers(self._paths[nearest])}"

    def _nearest(self, leaf: int, numbers: set[int]) -> int | None:
        """The parameter nearest to this one, by index, that has one of these splits. It
        is searched from here outwards, because most are in the same layer."""
        if numbers.isdisjoint(self._chosen):
            return None
        for distance in range(1, len(self._paths)):
            near = (leaf - distance, leaf + distance)
            found = [x for x in near if self._layout.get(x) in numbers]
            if found:
                return min(found, key=self._place.__getitem__)
        return None

    def _sent_by(self, number: int) -> tuple[str, str]:
        """The bytes that a split sends in a step, and the source of most of them.

        Those of a chosen split are a part of the total for the layout, in which splits
        meet. Those of another split are what it would send alone.
        """
        split = self._costs.splits[number]
        if number not in self._chosen:
            sent = size_text(split.num_bytes(merged=True))
            return sent, largest_sends(split.sent)
        events = self._simulated.of_split[number]
        moved = self._simulated.moved_by[number]
        sent = size_text(total_bytes(events, merged=True) + moved)
        if events:
            return sent, largest_sends(events)
        if moved:
            return sent, "for changes between splits"
        return sent, ""
