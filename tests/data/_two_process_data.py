"""One of the two processes of `test_data.py::test_two_processes`; arguments: port, process, directory.

Process 1 makes its first batch only after process 0 has made its last, so a collective in `batches` would
wait forever. At the end process 1 has one example less.
"""

import json
import pathlib
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from redco_eqx._data.batches import batches  # noqa: E402
from redco_eqx._sharding.mesh import make_mesh, replicated  # noqa: E402

NUM_EXAMPLES, BATCH_SIZE = 29, 8
process, directory = int(sys.argv[2]), pathlib.Path(sys.argv[3])
devices = jax.devices()
meshes = {
    "data": make_mesh(),
    "tensor": make_mesh(tensor=8),
    "mixed": make_mesh(tensor=2, fsdp=2),
    "interleaved": make_mesh(devices=[devices[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]),
}
results = {}
for name, mesh in meshes.items():
    seen = []

    def collate(examples, seen=seen):
        seen.append([int(x) for x in examples])
        return {
            "x": np.asarray(examples),
            "wide": np.stack([np.full(3, x, np.float32) for x in examples]),
        }

    key = jax.jit(lambda: jax.random.key(5), out_shardings=replicated(mesh))()
    done = directory / f"{name}.done"
    while process == 1 and not done.exists():
        time.sleep(0.01)
    made = list(
        batches(
            np.arange(NUM_EXAMPLES),
            collate,
            batch_size=BATCH_SIZE,
            mesh=mesh,
            key=key,
            epoch=2,
            remainder="split",
        )
    )
    done.touch()
    gathered = [multihost_utils.process_allgather(batch, tiled=True) for batch in made]
    results[name] = {"seen": seen, "batches": jax.tree.map(lambda x: x.tolist(), gathered)}
opened = directory / "opened"
while process == 1 and not opened.exists():
    time.sleep(0.01)
try:
    batches(np.arange(NUM_EXAMPLES - process), np.asarray, batch_size=BATCH_SIZE, mesh=meshes["data"])
    results["refused"] = None
except ValueError as error:
    results["refused"] = str(error)
opened.touch()
(directory / f"{process}.json").write_text(json.dumps(results))
