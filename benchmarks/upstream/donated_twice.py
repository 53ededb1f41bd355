"""An array that was donated, passed to a compiled program again, ends the process.

- Symptom: a segmentation fault on CPU, or a wrong array, instead of an error.
- Expected: an error that says that the array has been deleted.
- Seen with: jaxlib 0.10.2 and 0.11.0.
- Mended in: 0.11.2
- Ends with: Buffer has been deleted or donated
- Upstream: openxla/xla#22604.
- Here: `check_alive` before each step in `_step/steps.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

whole = NamedSharding(mesh, P())


def step(x):
    return x + 1


compiled = (
    jax.jit(step, donate_argnums=0).lower(jax.device_put(jnp.ones(8), whole)).compile()
)
x = jax.device_put(jnp.ones(8), whole)
y = compiled(x)
try:
    compiled(x)
except (RuntimeError, ValueError) as error:
    print("refused:", error)
else:
    raise SystemExit("no error")
