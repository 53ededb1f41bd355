"""Which matrices of a module follow one another, found by position, shape and name."""

import re
from collections import Counter

from redco_eqx._sharding.chains import Link
from redco_eqx._sharding.nodes import Matrix, Node

_SIBLINGS = (frozenset({"gate", "up"}), frozenset({"wi_0", "wi_1"}), frozenset({"w1", "w3"}))
_KIND = r"(proj(ection)?|lin(ear)?|fc|dense|layer|conv|map)"
_NUMBERED = re.compile(r"(.*?)(\d+)")
# What comes last in a module, by its name.
_LAST = re.compile(rf"(to_|w_?|c_|{_KIND}_)?(o|out|output|down|merge|second|last|dec\w*|proj)(_?{_KIND})?")


def find_chains(scope: Node, matrices: list[Matrix]) -> list[list[Link]]:
    """The chains that the matrices of one module make; one that feeds no other is a chain of its own."""
    if isinstance(scope.value, list | tuple):
        return _by_position(_elements(scope, matrices))
    return _by_shape(_links(scope, matrices))


def _elements(scope: Node, matrices: list[Matrix]) -> list[Link]:
    """Matrices of a list as links. Those of one shape in one element are parallel siblings; square ones, which
    could follow one another, are not taken for such.
    """
    links: dict[tuple[object, ...], Link] = {}
    for i, matrix in enumerate(matrices):
        shape = (matrix.in_size, matrix.out_size)
        key = (i,) if matrix.in_size == matrix.out_size else (matrix.name_in(scope)[0], *shape)
        links.setdefault(key, Link(*shape, [])).members.append(matrix)
    return list(links.values())


def _by_position(links: list[Link]) -> list[list[Link]]:
    """Each link follows the one before it, if that feeds it."""
    chains: list[list[Link]] = []
    for link in links:
        if chains and chains[-1][-1].feeds(link):
            chains[-1].append(link)
        else:
            chains.append([link])
    return chains


def _links(scope: Node, matrices: list[Matrix]) -> list[Link]:
    """Matrices as links. Those of one shape are parallel siblings, one link (gate and up); but square ones,
    which could follow one another, are not if their names say so: by numbers, or by a name that comes last.
    """
    names = _names(scope, matrices)
    stems = [re.sub(rf"_?{_KIND}$", "", name) for name in names]
    siblings = frozenset().union(*(known for known in _SIBLINGS if known <= {*stems}))
    numbers = [_NUMBERED.fullmatch(name) for name in names]
    runs = Counter((n[1], m.in_size, m.out_size) for n, m in zip(numbers, matrices) if n)
    links: dict[tuple[object, ...], Link] = {}
    in_run: dict[tuple[str, int], list[tuple[int, tuple[object, ...]]]] = {}
    for matrix, name, stem, number in zip(matrices, names, stems, numbers):
        shape = (matrix.in_size, matrix.out_size)
        key: tuple[object, ...] = shape
        is_last = _LAST.fullmatch(name) is not None
        if matrix.in_size == matrix.out_size and stem not in siblings:
            if number and runs[number[1], *shape] > 1:
                key = (*shape, name)
                in_run.setdefault((number[1], matrix.in_size), []).append((int(number[2]), key))
            elif is_last:
                key = (*shape, name)
        link = links.setdefault(key, Link(*shape, [], is_last))
        link.members.append(matrix)
    # In a dict `layer10` stands before `layer2`.
    order = {key: key for key in links}
    for run in in_run.values():
        order |= dict(zip((key for _, key in run), (key for _, key in sorted(run))))
    return [links[order[key]] for key in links]


def _names(scope: Node, matrices: list[Matrix]) -> list[str]:
    """What each is called in the module: by the last part of its path, or the first where that says nothing."""
    parts = [matrix.name_in(scope) for matrix in matrices]
    counts = Counter(path[-1] for path in parts)
    return [(path[-1] if counts[path[-1]] == 1 else path[0]).lower() for path in parts]


def _by_shape(links: list[Link]) -> list[list[Link]]:
    """The chains that links make whose order is not known.

    Where the shapes allow both ways, what its name calls last comes last; several siblings come first, then the
    one that widens, then the one that is written first (dict keys are sorted, so order says least).
    """
    place = {id(link): i for i, link in enumerate(links)}
    rank = {id(a): (not a.is_last, len(a.members), a.out_size, -place[id(a)]) for a in links}
    left: dict[int, dict[int, Link]] = {}  # by the size of the input, and in place
    for link in links:
        left.setdefault(link.in_size, {})[id(link)] = link

    def first_fed(a: Link, size: int, *, later: bool) -> Link | None:
        """The first of those left with this input that `a` comes before, behind it or anywhere."""
        fed = (
            b for b in left.get(size, {}).values() if b is not a and (not later or place[id(b)] > place[id(a)])
        )
        return next((b for b in fed if not b.feeds(a) or rank[id(a)] > rank[id(b)]), None)

    def next_of(a: Link) -> Link | None:
        """The next one behind `a` that it comes before, or else the first."""
        fed = [first_fed(a, size, later=True) or first_fed(a, size, later=False) for size in a.fed_sizes]
        found = [b for b in fed if b is not None]
        return min(found, key=lambda b: (place[id(b)] < place[id(a)], place[id(b)]), default=None)

    chains: list[list[Link]] = []
    for link in links:
        after = next_of(link) if id(link) in left[link.in_size] else None
        if after is None:
            continue
        chain = [link]
        del left[link.in_size][id(link)]
        while after is not None:
            chain.append(after)
            del left[after.in_size][id(after)]
            after = next_of(after)
        chains.append(chain)
    return [*chains, *([link] for link in links if id(link) in left[link.in_size])]
