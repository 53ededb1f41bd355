"""Atoms: what is the same index stays one, and no factor is lost; the layouts of the
zoo depend on the rest."""

from redco_eqx._dataflow.values import new_dim, pin, resolve, unify


def test_a_pin_goes_to_every_factor_and_stays():
    dim = new_dim(12)
    other = (*new_dim(3), *new_dim(4))
    pin(dim, "the batch")
    assert unify(other, dim)
    assert [atom.pin for atom in resolve(other)] == ["the batch"] * 2
    pin(dim, "another")
    assert {atom.pin for atom in resolve(dim)} == {"the batch"}


def test_dims_of_size_1_have_no_index():
    assert new_dim(1) == new_dim(0) == ()
    assert unify((), ())
    assert not unify((), new_dim(4))
