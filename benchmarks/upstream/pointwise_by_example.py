"""A pointwise convolution with a kernel for each example has wrong values.

- Symptom: with the examples and their kernels split over an axis, the results of a
  `vmap` of the convolution are wrong. `vmap` makes groups of the examples.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
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
x = jnp.asarray(rng.normal(size=(8, 8, 4, 4)), jnp.float32)  # NCHW
kernels = jnp.asarray(rng.normal(size=(8, 8, 8, 1, 1)), jnp.float32)


def of_example(kernel, x):
    return jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME")[0]


expected = jax.jit(jax.vmap(of_example))(kernels, x)
split = NamedSharding(mesh, P("data"))
found = jax.jit(jax.vmap(of_example))(*jax.device_put((kernels, x), split))
np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
