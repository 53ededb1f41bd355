"""One of the two processes of `test_save_pretrained.py`; its argument is a
directory."""

import json
import pathlib
import sys

import jax

from redco_eqx import initialize_distributed, make_mesh
from redco_eqx._base.tree import to_arrays
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._files.safetensors import Stored

initialize_distributed()
process, directory = jax.process_index(), pathlib.Path(sys.argv[1])
read = Stored.read
log = []


def counting(self, index):
    array = read(self, index)
    log.append(array.nbytes)
    return array


Stored.read = counting

# The split goes over all four devices, so each process needs half of what is split.
for form in ("list", "stacked"):
    log.clear()
    model = load_pretrained(
        directory / "old", make_mesh(tensor=4), stacked=form == "stacked"
    )
    held = 0
    for x in to_arrays(model).values():
        shards = {str(shard.index): shard.data.nbytes for shard in x.addressable_shards}
        held += sum(shards.values())
    (directory / f"{form}{process}.json").write_text(
        json.dumps({"read": sum(log), "held": held})
    )
    save_pretrained(model, directory / form)

if process == 0:
    (directory / "taken").write_text("a file, where the directory should be")
try:
    save_pretrained(model, directory / "taken")
except Exception as error:
    (directory / f"error{process}.txt").write_text(repr(error))
