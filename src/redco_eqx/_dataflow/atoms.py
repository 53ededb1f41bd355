"""Atoms: the factors of dims, found to be the same index or not.

A dim is a tuple of atoms, major to minor, whose sizes multiply to its size; a dim of size 1 has none.
Operations say which dims are the same index: their atoms are unified, and where one is a multiple of the
other, it is cut into factors. So a fused `3 * D` becomes `(3, heads, head size)` by what the program does
with it.
"""

import math
from typing import TypeAlias


class Atom:
    """One factor of dims.

    - `size`: how many values the index takes.
    - `parts`: empty, or what this atom was found to be: another atom, or several, major to minor.
    - `pin`: why it is never split by `tensor`; empty if it may be.
    """

    __slots__ = ("parts", "pin", "size")

    def __init__(self, size: int, pin: str = ""):
        self.size, self.pin = size, pin
        self.parts: tuple[Atom, ...] = ()

    def __repr__(self) -> str:
        return f"Atom({self.size}{f', {self.pin!r}' if self.pin else ''})"


Dim: TypeAlias = tuple[Atom, ...]


def new_dim(size: int) -> Dim:
    """A dim of which nothing is known. One of size 1, or 0, has no index."""
    return (Atom(size),) if size > 1 else ()


def new_dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(new_dim(size) for size in shape)


def resolve(dim: Dim) -> Dim:
    """The atoms that `dim` consists of by now."""
    for atom in dim:
        if atom.parts:
            break
    else:
        return dim
    found: list[Atom] = []
    left = list(dim[::-1])
    while left:
        atom = left.pop()
        if not atom.parts:
            found.append(atom)
            continue
        if len(atom.parts) == 1 and atom.parts[0].parts:
            atom.parts = atom.parts[0].parts  # next time the way is half as long
        left.extend(atom.parts[::-1])
    return tuple(found)


def unify(first: Dim, second: Dim) -> bool:
    """Makes two dims, or runs of dims, one and the same index, as far as their sizes allow.

    Where sizes differ, both atoms are cut at their common divisor. Returns whether all of both was unified; if
    not, what is left has no common divisor, and only the leading factors are the same.
    """
    if first is second:
        return True
    left, right = list(first[::-1]), list(second[::-1])
    while True:
        a, b = _next(left), _next(right)
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
                atom.parts = (Atom(common, atom.pin), Atom(atom.size // common, atom.pin))
            stack.append(atom)


def _next(stack: list[Atom]) -> Atom | None:
    """The next atom that is not made of others."""
    while stack:
        atom = stack.pop()
        if not atom.parts:
            return atom
        stack.extend(atom.parts[::-1])
    return None


def pin(dim: Dim, reason: str) -> None:
    """Marks the atoms of `dim` as never split; the first reason stays."""
    for atom in resolve(dim):
        atom.pin = atom.pin or reason
