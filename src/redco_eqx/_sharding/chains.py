"""Alternating splits for a chain of consecutive matrices.

A column split keeps its output split and needs a whole input; a row split takes a split input and sums
its output. Of all ways to split every link, the one that sends the fewest bytes is taken: for a widening
and a narrowing Linear that is Megatron's column then row.
"""

import dataclasses
from typing import NamedTuple

from redco_eqx._sharding.nodes import Matrix


@dataclasses.dataclass(eq=False)
class Link:
    """One step of a chain: a matrix, or parallel siblings of one shape that read the same input.

    - `is_last`: whether its name says that nothing in its module follows it.
    """

    in_size: int
    out_size: int
    members: list[Matrix]
    is_last: bool = False

    @property
    def fed_sizes(self) -> tuple[int, ...]:
        """The inputs that the output fits, whole or as the two halves of a fused gate."""
        half = (self.out_size // 2,) if self.out_size % 2 == 0 else ()
        return (self.out_size, *half)

    def feeds(self, after: "Link") -> bool:
        """Whether the output fits the other's input."""
        return after.in_size in self.fed_sizes


class Split(NamedTuple):
    """`name` is `column`, `row` or `whole`."""

    name: str
    reason: str


def alternate(chain: list[Link], size: int) -> list[Split]:
    """How each link of a chain (two or more) is split over `size` shards.

    Costs count the features of every activation that a collective returns, forward and backward.
    """
    # What the links that are left cost depends on one thing alone of those before: whether the activation
    # between them is split. So for each of the two only the best way there is kept, and each way is extended by
    # each split of the next link:
    #
    #   link     needs its input    leaves its output    communicates
    #   whole    whole              whole                nothing
    #   column   whole              split                the input's gradient, summed: in_size
    #   row      split              whole                its output, summed: out_size; of an input that came
    #                                                    whole and is cut here, the gradient, gathered: in_size
    #
    # A split activation that the next link needs whole is gathered, and its gradient summed: 2 * in_size.
    #
    # best[is the activation split]: (links left whole, cost, splits), compared in this order.
    best: dict[bool, tuple[int, int, list[str]]] = {False: (0, 0, [])}
    for index, link in enumerate(chain):
        paired = any(b.in_size % size == 0 for b in chain[max(index, 1) : index + 2])
        options: dict[bool, tuple[int, int, list[str]]] = {}
        for is_split, (whole, cost, names) in best.items():
            gather = 2 * link.in_size if is_split else 0
            # Only what could be a column counts as left whole: a few outputs are not worth a reduction.
            left = whole + (link.out_size % size == 0)
            candidates = [("whole", False, left, cost + gather)]
            if paired and link.out_size % size == 0:
                candidates.append(("column", True, whole, cost + gather + link.in_size))
            if paired and link.in_size % size == 0:
                back = 0 if is_split else link.in_size
                candidates.append(("row", False, whole, cost + link.out_size + back))
            for name, after, *score in candidates:
                option = (score[0], score[1], [*names, name])
                if after not in options or option < options[after]:
                    options[after] = option
        best = options
    last = chain[-1].out_size
    finished = [(w, c + (last if is_split else 0), names) for is_split, (w, c, names) in best.items()]
    _, _, names = min(finished)
    return [Split(name, _reason(chain, names, i, size)) for i, name in enumerate(names)]


def _reason(chain: list[Link], names: list[str], i: int, size: int) -> str:
    link = chain[i]
    after = chain[i + 1] if i + 1 < len(chain) else None
    before = chain[i - 1] if i else None
    if names[i] == "column":
        if after is not None and link.out_size == 2 * after.in_size and link.members[0].parts == 1:
            return "opens a pair: a fused gate, whose halves an even split crosses (costs permutes)"
        if after is not None and names[i + 1] == "row":
            several = f", with {len(link.members) - 1} sibling" if len(link.members) > 1 else ""
            return f"opens a pair: its {link.out_size} outputs stay split{several}"
        return "last of an odd chain: its output is gathered where it is used"
    if names[i] == "row":
        if before is not None and names[i - 1] == "column":
            return f"closes a pair: its {link.out_size} outputs are summed"
        return f"unpaired: its input is cut, its {link.out_size} outputs are summed"
    if before is not None and names[i - 1] == "row":
        return f"its {link.out_size} outputs do not divide by tensor={size}, and its input is whole"
    width = after.in_size if after is not None else link.in_size
    return f"the width {width} between consecutive Linears does not divide by tensor={size}"
