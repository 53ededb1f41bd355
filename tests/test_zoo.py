"""The zoo itself: its goldens cover every leaf and could be laid out, and its losses train every parameter.

That the goldens are good layouts is for `python -m zoo._verify`, which compiles them.
"""

from fnmatch import fnmatchcase

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import BY_NAME, ZOO, Entry, arrays, golden, goldens

TENSOR = 4
KEY_BIASES = ("*.k_proj.bias", "*.key.bias", "*.key_proj.bias")  # a shift of all keys changes no softmax

each_entry = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)


def test_names_are_unique():
    assert len(BY_NAME) == len(ZOO)


@each_entry
def test_golden_covers_every_leaf_and_divides(entry: Entry):
    model = eqx.filter_eval_shape(entry.make, jax.random.key(0))
    leaves = arrays(model)
    assert set(goldens(entry, model)) == set(leaves)
    used = {golden(entry, path)[0] for path in leaves}
    assert used == set(entry.specs), "patterns that match no leaf, or never first"
    for path, spec in goldens(entry, model).items():
        if spec is ...:
            continue
        shape = leaves[path].shape
        assert len(spec) <= len(shape), path
        assert spec.count("tensor") <= 1, path
        for size, axis in zip(shape, spec):
            assert axis in (None, "tensor"), path
            assert axis is None or size % TENSOR == 0, f"{path}: {size} does not divide"
        floating = jnp.issubdtype(leaves[path].dtype, jnp.inexact)
        assert floating or spec == (), f"{path} is not floating"


@each_entry
def test_abstract_leaves_equal_concrete_ones(entry: Entry):
    abstract = arrays(eqx.filter_eval_shape(entry.make, jax.random.key(0)))
    concrete = arrays(entry.make(jax.random.key(0)))
    assert {k: v.shape for k, v in abstract.items()} == {k: v.shape for k, v in concrete.items()}


@each_entry
def test_loss_trains_every_parameter(entry: Entry):
    model, batch = entry.make(jax.random.key(0)), entry.inputs(4)
    assert all(isinstance(x, np.ndarray) and len(x) == 4 for x in jax.tree.leaves(batch))
    params, rest = eqx.partition(
        model, lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    )

    @eqx.filter_jit
    def loss_and_gradients(params, batch):
        return jax.value_and_grad(lambda p: entry.loss(eqx.combine(p, rest), batch))(params)

    loss, gradients = loss_and_gradients(params, batch)
    assert loss.shape == ()
    assert jnp.isfinite(loss)
    for path, gradient in arrays(gradients).items():
        largest = float(jnp.abs(gradient).max())
        assert np.isfinite(largest), path
        assert largest > 1e-7 or any(fnmatchcase(path, p) for p in KEY_BIASES), path
