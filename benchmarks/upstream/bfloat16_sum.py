"""A bfloat16 sum in a `shard_map` over some of the axes ends the process on CPU.

- Symptom: the compiler aborts: "Invalid binary instruction opcode copy".
- Expected: the sum.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: Invalid binary instruction opcode copy
- Upstream: no issue known.
- Here: `_in_float32_on_cpu` in `_parallel/linear.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def total(x):
    return jax.lax.psum(x, "tensor")


mapped = jax.shard_map(
    total, mesh=mesh, in_specs=P("tensor"), out_specs=P(), axis_names={"tensor"}
)
x = jax.device_put(
    jnp.ones((8, 8), jnp.bfloat16), NamedSharding(mesh, P("tensor", "data"))
)
np.testing.assert_array_equal(jax.jit(mapped)(x), np.full((2, 8), 4.0))
