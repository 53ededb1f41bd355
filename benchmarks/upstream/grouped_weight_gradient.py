"""The weight gradient of a grouped convolution is summed over mesh axes that do not
split the batch.

- Symptom: with the batch split over `data` and whole over `tensor`, the gradient of the
  kernel is too large by the size of `tensor`.
- Expected: the gradient on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU, and in programs of the TPU compiler.
- Ends with: Not equal to tolerance
- Upstream: no issue known.
- Here: `replace_convolution` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(8, 8, 8, 8)), jnp.float32)  # NCHW
kernel = jnp.asarray(rng.normal(size=(8, 1, 3, 3)), jnp.float32)


def loss(kernel, x):
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=8)
    return jnp.mean(y**2)


expected = jax.jit(jax.grad(loss))(kernel, x)
split = jax.device_put(x, NamedSharding(mesh, P("data")))
whole = jax.device_put(kernel, NamedSharding(mesh, P()))
found = jax.jit(jax.grad(loss))(whole, split)
np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
