"""`top_k` along a whole dim gathers the rows.

- Symptom: the compiled program gathers the batch.
- Expected: each device takes the largest of its own rows, without a collective.
- Seen with: jaxlib 0.10.2 and 0.12.0.
- Ends with: gathers the rows
- Upstream: no issue known.
- Here: `largest` in `_generate/sampling.py` of redco_eqx_models.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def largest(x):
    return jax.lax.top_k(x, 4)


batch = NamedSharding(mesh, P("data"))
x = jax.device_put(jnp.ones((8, 64)), batch)
text = jax.jit(largest, out_shardings=batch).lower(x).compile().as_text()
assert "all-gather" not in str(text), "gathers the rows"
