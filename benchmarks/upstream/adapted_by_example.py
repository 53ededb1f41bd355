"""The gradient of a grouped convolution that is adapted to each example is wrong.

- Symptom: the gradient through a step of gradient descent for each example, by a `vmap`
  over examples that are split, has wrong values. With one group the process ends:
  "free(): invalid pointer".
- Expected: the gradient on one device.
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
kernel = jnp.asarray(rng.normal(size=(8, 4, 1, 1)), jnp.float32)


def of_example(kernel, x):
    y = jax.lax.conv_general_dilated(
        x[None], kernel, (1, 1), "SAME", feature_group_count=2
    )
    return jnp.mean(y**2)


def adapted(kernel, x):
    return of_example(kernel - 0.1 * jax.grad(of_example)(kernel, x), x)


def loss(kernel, x):
    return jnp.mean(jax.vmap(adapted, in_axes=(None, 0))(kernel, x))


expected = jax.jit(jax.grad(loss))(kernel, x)
split = jax.device_put(x, NamedSharding(mesh, P("data")))
whole = jax.device_put(kernel, NamedSharding(mesh, P()))
np.testing.assert_allclose(
    jax.jit(jax.grad(loss))(whole, split), expected, rtol=1e-4, atol=1e-5
)
