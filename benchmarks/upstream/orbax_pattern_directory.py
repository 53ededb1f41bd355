"""Orbax cannot read what it saved in a directory whose name is a pattern (`run[1]`).

- Symptom: the save logs that it skips a merge, and ends well, but the restore finds no
  arrays. The files of each process are listed with the whole path as a pattern.
- Expected: the array is saved and restored.
- Seen with: orbax-checkpoint 0.12.8, JAX 0.10.2.
- Ends with: NOT_FOUND|FileNotFound
- Upstream: no issue known.
- Here: `_checkpoint/handlers.py`, which merges the files in such a directory.
"""

import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "run[1]" / "arrays"
    arrays = {"x": jnp.arange(4.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, arrays)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(path)
    np.testing.assert_array_equal(found["x"], arrays["x"])
