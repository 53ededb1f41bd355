"""A Fourier transform of complex numbers over the split leading dim ends the process.

- Symptom: the partitioner aborts in `fft_handler.cc`.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2.
- Mended in: 0.11.0
- Ends with: fft_handler
- Upstream: openxla/xla#45402.
- Here: `replace_fft` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8, 8)), jnp.complex64)


def transformed(x):
    return jnp.fft.fft(x, axis=0)


split = jax.device_put(x, NamedSharding(mesh, P("data")))
found = jax.jit(transformed)(split)
np.testing.assert_allclose(found, transformed(x), rtol=1e-4, atol=1e-4)
