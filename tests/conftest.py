"""Eight virtual CPU devices for every test, and float32 matmuls that do not depend on the machine."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
