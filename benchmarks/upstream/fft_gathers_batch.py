"""A Fourier transform over a whole dim gathers a batch that is split.

- Symptom: the compiled program gathers the batch.
- Expected: each device transforms its own rows; the program has no collective.
- Seen with: jaxlib 0.10.2.
- Mended in: 0.12.0
- Ends with: gathers the batch
- Upstream: openxla/xla#24.
- Here: `replace_fft` in `_step/workarounds.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

batch = NamedSharding(mesh, P("data"))
x = jax.device_put(jnp.ones((8, 16), jnp.complex64), batch)
text = jax.jit(jnp.fft.fft, out_shardings=batch).lower(x).compile().as_text()
assert "all-gather" not in str(text), "gathers the batch"
