"""Atoms: what is the same index stays one, and no factor is lost; the layouts of the zoo depend on the rest."""

from redco_eqx._dataflow.values import new_dim, pin, resolve, unify


def test_a_fused_dim_becomes_pieces_heads_and_head_size():
    fused, heads = new_dim(96), (*new_dim(8), *new_dim(4))
    assert unify(fused, (*new_dim(3), *heads))
    assert [atom.size for atom in resolve(fused)] == [3, 8, 4]
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
