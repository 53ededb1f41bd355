"""A program that saves its model to one directory over and over;
`test_model_directories.py` starts several.

Its arguments: the directory to save to, that of its model, the function that saves, and
how often it does.
"""

import sys

import jax

import redco_eqx_models as models

target, own, kind, times = sys.argv[1:]
model = models.load_pretrained(own)
if kind == "save_lora":
    scale = 1 + int(own[-1])
    key = jax.random.key(scale)
    model = models.add_lora(model, targets=("q_proj",), rank=2, scale=scale, key=key)
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(times)):
    if kind == "save_lora":
        models.save_lora(model, target)
    else:
        models.save_pretrained(
            model, target, max_shard_bytes=10**9 if i % 2 else 20_000
        )
