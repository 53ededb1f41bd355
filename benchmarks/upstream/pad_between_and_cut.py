"""A pad that cuts both ends and has elements between others ends the process.

- Symptom: the partitioner aborts where the result is split.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: get_first_valid_element_offset_on_dilated_shard
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
    return jax.lax.pad(x, 1.0, [(-2, -3, 3)])


x = jnp.arange(32.0)
split = NamedSharding(mesh, P("tensor"))
found = jax.jit(spread, out_shardings=split)(x)
np.testing.assert_array_equal(found, spread(x))
