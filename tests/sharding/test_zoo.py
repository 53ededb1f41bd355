"""The zoo itself: its goldens cover every leaf and could be laid out, and its losses reach every parameter.

By tracing alone, in seconds. That the goldens are good layouts, and that no gradient is zero in value, is for
`python -m zoo._verify`, which compiles and runs every entry.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from zoo import BY_NAME, ZOO, Entry, arrays, golden, goldens

TENSOR = 4

each_entry = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)


def is_abstract(x):
    return isinstance(x, jax.ShapeDtypeStruct)


def test_names_are_unique():
    assert len(BY_NAME) == len(ZOO)


@each_entry
def test_golden_covers_every_leaf_and_divides(entry: Entry):
    model = eqx.filter_eval_shape(entry.make, jax.random.key(0))
    leaves = arrays(model)
    used = {golden(entry, path)[0] for path in leaves}
    assert used == set(entry.specs), "patterns that match no leaf, or never first"
    for path, spec in goldens(entry, model).items():
        if spec is ...:
            continue
        shape = leaves[path].shape
        assert len(spec) <= len(shape), path
        assert set(spec) <= {None, "tensor"}, path
        assert spec.count("tensor") <= 1, path
        for size, axis in zip(shape, spec):
            assert axis is None or size % TENSOR == 0, f"{path}: {size} does not divide"
        floating = jnp.issubdtype(leaves[path].dtype, jnp.inexact)
        assert floating or spec == (), f"{path} is not floating"


@each_entry
def test_loss_reaches_every_parameter(entry: Entry):
    model, batch = eqx.filter_eval_shape(entry.make, jax.random.key(0)), entry.inputs(4)
    assert all(isinstance(x, np.ndarray) and len(x) == 4 for x in jax.tree.leaves(batch))
    params, rest = eqx.partition(model, lambda x: is_abstract(x) and jnp.issubdtype(x.dtype, jnp.inexact))
    buffers, static = eqx.partition(rest, is_abstract)

    def gradients(params, buffers, batch):
        return jax.grad(lambda p: entry.loss(eqx.combine(p, buffers, static), batch))(params)

    jaxpr = jax.make_jaxpr(gradients)(params, buffers, batch).jaxpr
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not isinstance(x, Literal) and x in reached for x in equation.invars):
            reached.update(equation.outvars)
    for path, gradient in zip(arrays(params), jaxpr.outvars, strict=True):
        assert not isinstance(gradient, Literal), f"{path} has no gradient"
        assert gradient in reached, f"{path} has a gradient of zeros"
