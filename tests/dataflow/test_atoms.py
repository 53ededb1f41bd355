"""Atoms: what is the same index stays one, and no factor is lost."""

import math

from hypothesis import given
from hypothesis import strategies as st

from redco_eqx._dataflow.values import Atom, new_dim, pin, resolve, unify

factors = st.lists(st.sampled_from([2, 3, 4, 5, 6, 8, 12]), min_size=1, max_size=4)


def dim_of(sizes):
    return tuple(Atom(size) for size in sizes)


def sizes_of(dim):
    return [atom.size for atom in resolve(dim)]


def pattern(*dims):
    """Number the atoms of some dims in order of appearance; equal atoms have equal numbers."""
    numbers = {}
    return [[(numbers.setdefault(atom, len(numbers)), atom.size) for atom in resolve(dim)] for dim in dims]


@given(factors, factors)
def test_unification_commutes_and_preserves_products(first, second):
    a, b, c, d = dim_of(first), dim_of(second), dim_of(first), dim_of(second)
    fits = unify(a, b)
    assert fits == unify(d, c)
    assert pattern(a, b) == pattern(c, d)
    assert math.prod(sizes_of(a)) == math.prod(first)
    assert math.prod(sizes_of(b)) == math.prod(second)
    assert all(size > 1 for size in (*sizes_of(a), *sizes_of(b)))
    assert unify(a, b) == fits
    assert pattern(a, b) == pattern(c, d), "the second time changes nothing"


@given(st.permutations([2, 3, 4, 6]), st.permutations([2, 3, 4, 6]))
def test_what_is_unified_is_the_leading_factors_and_what_is_left_has_no_common_divisor(first, second):
    a, b = dim_of(first), dim_of(second)
    fits = unify(a, b)
    shared = [x for x, y in zip(resolve(a), resolve(b)) if x is y]
    rest = resolve(a)[len(shared) :], resolve(b)[len(shared) :]
    assert resolve(a)[: len(shared)] == resolve(b)[: len(shared)] == tuple(shared)
    assert fits == (not any(rest))
    if not fits:
        assert math.gcd(rest[0][0].size, rest[1][0].size) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_unification_is_an_equivalence_whatever_the_order(pairs):
    forward, backward = ([new_dim(12) for _ in range(6)] for _ in range(2))
    for i, j in pairs:
        unify(forward[i], forward[j])
    for i, j in reversed(pairs):
        unify(backward[j], backward[i])
    assert pattern(*forward) == pattern(*backward)


def test_a_fused_dim_becomes_pieces_heads_and_head_size():
    fused, heads = new_dim(96), (*new_dim(8), *new_dim(4))
    assert unify(fused, (*new_dim(3), *heads))
    assert sizes_of(fused) == [3, 8, 4]
    assert resolve(fused)[1:] == resolve(heads)


def test_a_pin_goes_to_every_factor_and_stays():
    dim, other = new_dim(12), (*new_dim(3), *new_dim(4))
    pin(dim, "the batch")
    assert unify(other, dim)
    assert [atom.pin for atom in resolve(other)] == ["the batch"] * 2
    pin(dim, "another")
    assert {atom.pin for atom in resolve(dim)} == {"the batch"}


def test_dims_of_size_1_have_no_index():
    assert new_dim(1) == new_dim(0) == ()
    assert unify((), ())
    assert not unify((), new_dim(4))
