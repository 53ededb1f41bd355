"""The weight gradient of a pointwise convolution, for each of some batches, is wrong.

- Symptom: with the batches split over an axis, the results of a `vmap` of the gradient
  are wrong. `vmap` makes groups of the batches.
- Expected: the gradients on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: Not equal to tolerance
- Upstream: no issue known.
- Here: `replace_convolution` in `_step/workarounds.py`, and for the gradients of data
  shards `replace_mapped_convolution`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

rng = np.random.default_rng(0)
batches = jnp.asarray(rng.normal(size=(8, 8, 8, 4, 4)), jnp.float32)  # of NCHW
kernel = jnp.asarray(rng.normal(size=(8, 8, 1, 1)), jnp.float32)


def loss(kernel, x):
    return jnp.mean(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME") ** 2)


gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))
expected = gradients(kernel, batches)
split = jax.device_put(batches, NamedSharding(mesh, P("data")))
whole = jax.device_put(kernel, NamedSharding(mesh, P()))
np.testing.assert_allclose(gradients(whole, split), expected, rtol=1e-4, atol=1e-5)
