"""`jax.checkpoint` cannot keep complex numbers.

- Symptom: a policy that keeps complex results raises, because kept values are rounded
  with `reduce_precision`, which takes no complex numbers.
- Expected: the gradient without a checkpoint.
- Seen with: JAX 0.10.2 and 0.12.0.
- Ends with: reduce_precision|complex
- Upstream: no issue known (since jax-ml/jax#22244).
- Here: `only_real` in `_parallel/scan.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.exp(1j * np.arange(8)), jnp.complex64)


def loss(x):
    return jnp.sum(jnp.abs(jnp.sin(x @ jnp.outer(x, x))) ** 2)


keep = jax.checkpoint_policies.everything_saveable
found = jax.jit(jax.grad(jax.checkpoint(loss, policy=keep)))(x)
np.testing.assert_allclose(found, jax.grad(loss)(x), rtol=1e-5)
