"""Chains: the matrices of a module that follow one another, and how consecutive ones are split.

A column split keeps its output split and needs a whole input; a row split takes a split input and sums
its output. Of all ways to split every link, the one that sends the fewest bytes is taken: for a widening
and a narrowing Linear that is Megatron's column then row.
"""

import dataclasses
import re
from collections import Counter
from typing import NamedTuple

from redco_eqx._sharding.matrices import Matrix, Node


def named(names: str, name: str) -> bool:
    """True if a field's name is one of `names`, alone or as in `to_q`, `wq`, `q_proj`, `c_proj`, `fc_out`."""
    return re.fullmatch(rf"(to_|w_?|c_|attn_|{_KIND}_)?({names})(_?{_KIND})?", name) is not None


_KIND = r"(proj(ection)?|lin(ear)?|fc|dense|layer|conv|map)"
_LAST = r"o|out|output|down|merge|second|last|dec\w*|proj"  # what comes last in a module
_NUMBERED = re.compile(r"(.*?)(\d+)")
_SERIES = re.compile(rf"{_KIND}_?")


@dataclasses.dataclass(eq=False)
class Link:
    """One step of a chain: a matrix, or parallel siblings of one shape that read the same input.

    - `is_last`: whether its name says that nothing in its module follows it.
    - `is_known`: whether its place in the chain is known by more than the order in which fields are written.
    """

    in_size: int
    out_size: int
    members: list[Matrix]
    is_last: bool = False
    is_known: bool = True

    def feeds(self, after: "Link") -> bool:
        """True if the output fits the other's input, whole or as the two halves of a fused gate."""
        return self.out_size in (after.in_size, 2 * after.in_size)


def is_guess(chain: list[Link]) -> bool:
    """True if no name says which of its matrices follow one another: they could be an attention as well."""
    unknown = [matrix for link in chain if not link.is_known for matrix in link.members]
    return len(unknown) > 1 and not any(link.is_last for link in chain)


def find_chains(scope: Node, matrices: list[Matrix]) -> list[list[Link]]:
    """The chains that the matrices of one module make; one that feeds no other is a chain of its own.

    In a list each follows the one before. Where the shapes of fields allow both ways, what its name calls last
    comes last; several siblings come first, then the one that widens, then the one that is written first (dict
    keys are sorted, so order says least).
    """
    is_list = isinstance(scope.value, list | tuple)
    links = _links(scope, matrices, is_list)
    place = {link: i for i, link in enumerate(links)}
    rank = {a: (not a.is_last, len(a.members), a.out_size, -place[a]) for a in links}
    left = list(links)

    def next_of(a: Link) -> Link | None:
        """The next one behind `a` that it comes before, or else the first; in a list only the very next."""
        if is_list:
            return next((b for b in links[place[a] + 1 : place[a] + 2] if a.feeds(b)), None)
        others = [b for b in left if place[b] > place[a]] + [b for b in left if place[b] < place[a]]
        return next((b for b in others if a.feeds(b) and (not b.feeds(a) or rank[a] > rank[b])), None)

    chains: list[list[Link]] = []
    for link in links:
        after = link if link in left and next_of(link) is not None else None
        chain: list[Link] = []
        while after is not None:
            left.remove(after)
            chain.append(after)
            after = next_of(after)
        chains += [chain] if chain else []
    return [*chains, *([link] for link in left)]


def _links(scope: Node, matrices: list[Matrix], is_list: bool) -> list[Link]:
    """Matrices as links. Those of one shape are parallel siblings, one link (gate and up), if they are fields
    or in one element of a list; but square ones, which could follow one another, are not if their names say so:
    by numbers, or by a name that comes last.
    """
    paths = [matrix.name_in(scope) for matrix in matrices]
    numbers = [_NUMBERED.fullmatch(path[-1]) for path in paths]
    series = Counter(n[1] for n in numbers if n)
    runs = Counter((n[1], m.in_size, m.out_size) for n, m in zip(numbers, matrices) if n)
    links: dict[tuple[object, ...], Link] = {}
    for matrix, path, number in zip(matrices, paths, numbers):
        name, shape = path[-1], (matrix.in_size, matrix.out_size)
        is_last, is_square = named(_LAST, name), matrix.in_size == matrix.out_size
        is_alone = is_square and (is_last or (number is not None and runs[number[1], *shape] > 1))
        # Two or three of a kind (`conv1`, `conv2`) are consecutive; four could be an attention.
        is_series = number is not None and _SERIES.fullmatch(number[1]) and 1 < series[number[1]] < 4
        key = (path[0] if is_list else "", *shape, name if is_alone else "")
        link = links.setdefault(key, Link(*shape, [], is_last))
        says_last = any(named(_LAST, part) for part in path)  # BERT's is at `output.dense`
        link.is_known = is_list or not is_square or says_last or bool(is_series)
        link.members.append(matrix)
    return list(links.values())


class LinkSplit(NamedTuple):
    """`name` is `column`, `row` or `whole`."""

    name: str
    reason: str


def alternate(chain: list[Link], size: int) -> list[LinkSplit]:
    """Split the links of a chain (two or more) over `size` shards.

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
    return [LinkSplit(name, _reason(chain, names, i, size)) for i, name in enumerate(names)]


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
