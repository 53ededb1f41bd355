"""The gradient of a Fourier transform over a split dim fails on CPU.

- Symptom: the program ends in an internal error of `fft_thunk.cc`, about the order of
  dims in memory.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: fft_thunk
- Upstream: jax-ml/jax#22484 has the same check.
- Here: `replace_fft` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 16)), jnp.float32)


def loss(x):
    return jnp.sum(jnp.abs(jnp.fft.fft(x + 1)) ** 2)


expected = jax.jit(jax.grad(loss))(x)
split = jax.device_put(x, NamedSharding(mesh, P(None, None, "tensor")))
found = jax.jit(jax.grad(loss))(split)
np.testing.assert_allclose(found, expected, rtol=1e-3, atol=0.1)
