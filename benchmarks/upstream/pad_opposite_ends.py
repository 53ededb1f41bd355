"""A pad that cuts one end and extends the other, into a dim that is split, gives zeros.

- Symptom: where the operand is whole and the result is split, all values are wrong.
- Expected: the result on one device.
- Seen with: jaxlib 0.10.2 and 0.12.0, on CPU.
- Ends with: Not equal|Arrays are not equal
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


def shifted(x):
    return jax.lax.pad(x, 1.0, [(-2, 2, 0)])


x = jnp.arange(16.0)
whole = NamedSharding(mesh, P())
split = NamedSharding(mesh, P("tensor"))
found = jax.jit(shifted, in_shardings=whole, out_shardings=split)(x)
np.testing.assert_array_equal(found, shifted(x))
