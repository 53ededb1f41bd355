"""Checkpoint directories by hand, from the description of the format, and what is expected of their models."""

import json
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import redco_eqx as rx
from redco_eqx._base.tree import to_arrays

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZE, VOCABULARY, LAYERS = 64, 128, 2  # so that some arrays are above the size at which fsdp splits

CONFIGS = {
    "gpt2": {"n_embd": SIZE, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 8},
    "gptj": {
        "n_embd": SIZE, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 8,
        "rotary_dim": 4,
    },
    "llama": {
        "hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCABULARY, "intermediate_size": 96,
    },
    "opt": {
        "hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCABULARY,
        "ffn_dim": 96, "max_position_embeddings": 8, "word_embed_proj_dim": SIZE,
    },
}  # fmt: skip


def shapes_of(family, num_layers=LAYERS):
    """Keys and shapes of a file, written from the format's description."""
    D, V = SIZE, VOCABULARY

    def linear(name, out, size, bias=True):
        return {f"{name}.weight": (out, size), **({f"{name}.bias": (out,)} if bias else {})}

    def norm(name):
        return {f"{name}.weight": (D,), f"{name}.bias": (D,)}

    shapes = {}
    if family == "gpt2":
        shapes |= {
            "transformer.wte.weight": (V, D),
            "transformer.wpe.weight": (8, D),
            **norm("transformer.ln_f"),
        }
        for i in range(num_layers):
            h = f"transformer.h.{i}"
            shapes |= {**norm(f"{h}.ln_1"), **norm(f"{h}.ln_2")}
            for name, size, out in (
                ("attn.c_attn", D, 3 * D), ("attn.c_proj", D, D),
                ("mlp.c_fc", D, 4 * D), ("mlp.c_proj", 4 * D, D),
            ):  # fmt: skip
                shapes |= {f"{h}.{name}.weight": (size, out), f"{h}.{name}.bias": (out,)}
    if family == "gptj":
        shapes |= {"transformer.wte.weight": (V, D), **norm("transformer.ln_f"), **linear("lm_head", V, D)}
        for i in range(num_layers):
            h = f"transformer.h.{i}"
            shapes |= {**norm(f"{h}.ln_1"), **linear(f"{h}.mlp.fc_in", 4 * D, D)}
            shapes |= linear(f"{h}.mlp.fc_out", D, 4 * D)
            for name in "qkv":
                shapes |= linear(f"{h}.attn.{name}_proj", D, D, bias=False)
            shapes |= linear(f"{h}.attn.out_proj", D, D, bias=False)
    if family == "llama":
        shapes |= {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
        for i in range(num_layers):
            h = f"model.layers.{i}"
            shapes |= {f"{h}.input_layernorm.weight": (D,), f"{h}.post_attention_layernorm.weight": (D,)}
            for name, out, size in (
                ("self_attn.q_proj", D, D), ("self_attn.k_proj", D // 2, D), ("self_attn.v_proj", D // 2, D),
                ("self_attn.o_proj", D, D), ("mlp.gate_proj", 96, D), ("mlp.up_proj", 96, D),
                ("mlp.down_proj", D, 96),
            ):  # fmt: skip
                shapes |= linear(f"{h}.{name}", out, size, bias=False)
    if family == "opt":
        d = "model.decoder"
        shapes |= {f"{d}.embed_tokens.weight": (V, D), f"{d}.embed_positions.weight": (10, D)}
        shapes |= norm(f"{d}.final_layer_norm")
        for i in range(num_layers):
            h = f"{d}.layers.{i}"
            shapes |= {**norm(f"{h}.self_attn_layer_norm"), **norm(f"{h}.final_layer_norm")}
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes |= linear(f"{h}.self_attn.{name}", D, D)
            shapes |= {**linear(f"{h}.fc1", 96, D), **linear(f"{h}.fc2", D, 96)}
    return shapes


def make_arrays(family, dtype=np.float32, seed=0, num_layers=LAYERS):
    rng = np.random.default_rng(seed)
    shapes = shapes_of(family, num_layers)
    return {key: rng.standard_normal(shape, np.float32).astype(dtype) for key, shape in shapes.items()}


def write(directory, family, arrays, *, num_files: int = 1, **entries: Any):
    """A checkpoint by hand."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": family, **CONFIGS[family], **entries}))
    if num_files == 1:
        save_file(arrays, directory / SINGLE, metadata={"format": "pt"})
        return directory
    weight_map = {}
    for i in range(num_files):
        keys = list(arrays)[i::num_files]
        name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({key: arrays[key] for key in keys}, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def in_file_form(model):
    """A model's arrays as files have them: a layer of a stack by itself, fused matrices as one."""
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


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert (found[key].dtype, found[key].shape) == (x.dtype, x.shape), key
        assert found[key].tobytes() == x.tobytes(), key


MESHES = {
    "one device": lambda: None,
    "tensor": lambda: rx.make_mesh(tensor=4, data=1),
    "all": lambda: rx.make_mesh(tensor=2, fsdp=2, data=2),
}
