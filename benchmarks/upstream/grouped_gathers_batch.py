"""A grouped convolution with several channels for each group gathers the batch.

- Symptom: the compiled program gathers the batch, so each device computes all of it.
- Expected: each device computes its own examples; the program has no collective.
- Seen with: jaxlib 0.10.2 and 0.12.0.
- Ends with: gathers the batch
- Upstream: openxla/xla#47945.
- Here: `replace_convolution` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def convolve(kernel, x):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", feature_group_count=4
    )


batch = NamedSharding(mesh, P("data"))
x = jax.device_put(jnp.ones((8, 8, 8, 8)), batch)  # NCHW
kernel = jax.device_put(jnp.ones((8, 2, 3, 3)), NamedSharding(mesh, P()))
text = jax.jit(convolve, out_shardings=batch).lower(kernel, x).compile().as_text()
assert "all-gather" not in str(text), "gathers the batch"
