"""`jax.checkpoint` cannot differentiate a function that makes a `jax.new_ref`.

- Symptom: the gradient raises `KeyError` (JAX 0.12 says that it is not supported).
- Expected: the gradient without a checkpoint.
- Seen with: JAX 0.10.2 and 0.12.0.
- Ends with: KeyError: Var|NotImplementedError: Mutating a reference
- Upstream: no issue known.
- Here: `gather_where_used` in `_step/gather.py`, which makes no checkpoint then.
"""

import jax
import jax.numpy as jnp
import numpy as np


def loss(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.sin(x)
    return jnp.sum(ref[...] ** 2)


x = jnp.arange(4.0)
found = jax.jit(jax.grad(jax.checkpoint(loss)))(x)
np.testing.assert_allclose(found, jax.grad(loss)(x), rtol=1e-6)
