"""A pad with elements between others, into a dim that is split, gives wrong shapes.

- Symptom: where the operand is whole and the result is split, the parts of the result
  have the wrong shape: 7 elements instead of 8.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: could not broadcast input array|Shape mismatch
- Upstream: no issue known.
- Here: `replace_pad` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def spread(x):
    return jax.lax.pad(x, 1.0, [(0, 1, 1)])


x = jnp.arange(16.0)
whole = NamedSharding(mesh, P())
split = NamedSharding(mesh, P("tensor"))
found = jax.jit(spread, in_shardings=whole, out_shardings=split)(x)
np.testing.assert_array_equal(found, spread(x))
