"""`jax.nn.dot_product_attention` takes no float16 on CPU.

- Symptom: it raises, because it asks for products of float16 by the algorithm
  F16_F16_F32, which the CPU does not have. With `preferred_element_type`, the same
  products compile.
- Expected: attention, with sums in float32, as for bfloat16.
- Seen with: JAX 0.10.2 and 0.12.0, on CPU.
- Ends with: F16_F16_F32
- Upstream: no issue known.
- Here: `_attend` in `_parallel/attention.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 4, 16)), jnp.float32)


def attend(x):
    return jax.nn.dot_product_attention(x, x, x)


expected = attend(x)
found = jax.jit(attend)(x.astype(jnp.float16))
np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0.01, atol=0.01)
