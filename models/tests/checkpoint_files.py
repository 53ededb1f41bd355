"""Checkpoint directories by hand, from the description of the format, and what is
expected of their models."""

import json
from typing import Any

import numpy as np
import tiny_models
from safetensors.numpy import save_file

import redco_eqx as rx
from redco_eqx._base.tree import to_arrays
from redco_eqx_models._files.names import entries_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# So that some arrays are above the size at which fsdp splits.
SIZE, VOCABULARY, LAYERS = 64, 128, 2

CONFIGS = {
    **{family: tiny_models.CONFIGS[family] for family in ("opt_125m", "gptj")},
    "gpt2": {
        **tiny_models.CONFIGS["gpt2"],
        "n_embd": SIZE,
        "vocab_size": VOCABULARY,
        "n_positions": 8,
    },
    "llama": {
        **tiny_models.CONFIGS["llama"],
        "hidden_size": SIZE,
        "vocab_size": VOCABULARY,
    },
}


def shapes_of(family, **entries):
    """Keys and shapes of a file."""
    model = tiny_models.shapes({**CONFIGS[family], **entries})
    return {key: entry.file_shape for entry in entries_of(model) for key in entry.keys}


def make_arrays(family, dtype=np.float32, seed=0, **entries):
    rng = np.random.default_rng(seed)
    shapes = shapes_of(family, **entries)
    return {
        key: rng.standard_normal(shape, np.float32).astype(dtype)
        for key, shape in shapes.items()
    }


def write(directory, family, arrays, *, num_files: int = 1, **entries: Any):
    """A checkpoint by hand."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIGS[family], **entries}))
    if num_files == 1:
        save_file(arrays, directory / SINGLE, metadata={"format": "pt"})
        return directory
    weight_map = {}
    for i in range(num_files):
        keys = list(arrays)[i::num_files]
        name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(
            {key: arrays[key] for key in keys},
            directory / name,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(keys, name)
    (directory / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def edit_json(file, **entries):
    """Gives a file other entries; returns what it was."""
    text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), **entries}))
    return text


def in_file_form(model):
    """A model's arrays as files have them: a layer of a stack by itself, fused matrices
    as one."""
    (stack,) = model.stacks
    arrays = {}
    for path, x in to_arrays(model).items():
        layer = path.removeprefix(f"{stack}.")
        if layer == path or layer[0].isdigit():
            parts = {path: np.asarray(x)}
        else:
            parts = {f"{stack}.{i}.{layer}": y for i, y in enumerate(np.asarray(x))}
        for key, y in parts.items():
            arrays[key] = y.reshape(*y.shape[:-2], 3 * SIZE) if "c_attn" in key else y
    return arrays


def on_all():
    """A mesh that splits everything."""
    return rx.make_mesh(tensor=2, fsdp=2, data=2)
