"""Which matrices of a module follow one another, found by position, shape and name."""

import re

from redco_eqx._sharding.chains import Link
from redco_eqx._sharding.model_tree import Matrix, Node

_SIBLINGS = (frozenset({"gate", "up"}), frozenset({"wi_0", "wi_1"}), frozenset({"w1", "w3"}))


def find_chains(scope: Node, matrices: list[Matrix]) -> list[list[Link]]:
    """The chains that the matrices of one module make; one that feeds no other is a chain of its own."""
    in_sequence = isinstance(scope.value, list | tuple)
    return _order(_links(scope, matrices, in_sequence), in_sequence)


def _links(scope: Node, matrices: list[Matrix], in_sequence: bool) -> list[Link]:
    """Matrices as the links of a chain; parallel siblings (gate and up) are one link."""
    links: list[Link] = []
    names: dict[int, set[str]] = {}
    for matrix in matrices:
        name = re.sub(r"_?(proj|linear|fc|dense)$", "", matrix.name_in(scope)[-1].lower())
        for link in links:
            same = (link.in_size, link.out_size) == (matrix.in_size, matrix.out_size)
            square = matrix.in_size == matrix.out_size
            known = frozenset({*names[id(link)], name}) in _SIBLINGS
            if same and not in_sequence and (known or not square):
                link.members.append(matrix)
                names[id(link)].add(name)
                break
        else:
            links.append(Link(matrix.in_size, matrix.out_size, [matrix]))
            names[id(links[-1])] = {name}
    return links


def _order(links: list[Link], in_sequence: bool) -> list[list[Link]]:
    """The chains of consecutive links: by position in a sequence, otherwise by shape, then by position."""
    chains: list[list[Link]] = []
    if in_sequence:
        for link in links:
            if chains and chains[-1][-1].feeds(link):
                chains[-1].append(link)
            else:
                chains.append([link])
        return chains
    left = list(links)
    while left:
        first = next((a for a in left if any(_comes_before(a, b, links) for b in left)), left[0])
        chain = [first]
        left.remove(first)
        while True:
            after = [b for b in left if _comes_before(chain[-1], b, links)]
            if not after:
                break
            position = links.index(chain[-1])
            chain.append(min(after, key=lambda b: (links.index(b) < position, links.index(b))))
            left.remove(chain[-1])
        chains.append(chain)
    return chains


def _comes_before(a: Link, b: Link, links: list[Link]) -> bool:
    """Whether `a` feeds `b`. Where the shapes allow both ways: several siblings come first, then the one
    that widens, then the one that is written first (dict keys are sorted, so order says least)."""
    if a is b or not a.feeds(b):
        return False
    if not b.feeds(a):
        return True
    return (len(a.members), a.out_size, -links.index(a)) > (len(b.members), b.out_size, -links.index(b))
