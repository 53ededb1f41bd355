"""`load_pretrained`: arrays, dtypes and layout are those of the files, of which no byte is read twice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import LAYERS, SINGLE, assert_same, in_file_form, make_arrays, write
from helpers import filled, in_long
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from tiny_models import shapes

import redco_eqx as rx
from redco_eqx._base.tree import to_arrays, to_paths
from redco_eqx.models import load_pretrained, save_pretrained
from redco_eqx.models._files.safetensors import Stored


@pytest.fixture
def reads(monkeypatch):
    """`[(key, index, bytes)]` of everything read from files."""
    log, read = [], Stored.read

    def counting(self, index):
        array = read(self, index)
        log.append((self.key, index, array.nbytes))
        return array

    monkeypatch.setattr(Stored, "read", counting)
    return log


@pytest.mark.parametrize(
    ("family", "axes", "stacked"),
    [
        ("gpt2", {"tensor": 2, "fsdp": 2}, True),
        ("llama", {"tensor": 4, "data": 1}, False),
        ("llama", None, True),
        *in_long(("gpt2", {"tensor": 4, "data": 1}, False), ("llama", {"tensor": 2, "fsdp": 2}, True)),
    ],
)
def test_arrays_are_those_of_the_file_and_each_device_reads_its_part(tmp_path, reads, family, axes, stacked):
    arrays = make_arrays(family, jnp.bfloat16)
    write(tmp_path, family, arrays, num_files=3 if stacked else 1)
    # A conversion happens slice by slice, after reading.
    mesh = None if axes is None else rx.make_mesh(**axes)
    model = load_pretrained(tmp_path, mesh, stacked=stacked, dtype=jnp.float32)
    assert_same(in_file_form(model), {key: x.astype(jnp.float32) for key, x in arrays.items()})
    where = {x.sharding.mesh for x in to_arrays(model).values()}
    assert len(where) == 1
    expected = rx.shard_rules(model, where.pop())
    placed = {path: x.sharding for path, x in to_arrays(model).items()}
    assert placed == to_paths(expected, lambda x: x is not None)
    assert mesh is None or any(not x.is_fully_replicated for x in placed.values())
    # Every number is read once, however many devices hold it.
    times = {key: np.zeros(x.shape, int) for key, x in arrays.items()}
    for key, index, num_bytes in reads:
        times[key][index] += 1
        assert num_bytes == times[key][index].size * 2
    assert all((x == 1).all() for x in times.values())
    # What is read for a device is what it holds, and each read is for one slice of it.
    for device in jax.devices():
        held = needed = 0
        marks = {key: np.zeros(x.shape, bool) for key, x in arrays.items()}
        for path, x in to_arrays(model).items():
            for shard in x.addressable_shards:
                if shard.device == device:
                    held += shard.data.size * 2
                    _mark(model, path, x.shape, shard.index, marks)
        for key, index, num_bytes in reads:
            if marks[key][index].any():
                assert marks[key][index].all()
                needed += num_bytes
        assert needed == held


def _mark(model, path, shape, index, marks):
    """Sets what a slice of a leaf is in files."""
    leaf = np.zeros(shape, bool)
    leaf[index] = True
    (stack,) = model.stacks
    layer = path.removeprefix(f"{stack}.")
    alone = layer == path or layer[0].isdigit()
    for key, x in [(path, leaf)] if alone else [(f"{stack}.{i}.{layer}", y) for i, y in enumerate(leaf)]:
        marks[key] |= x.reshape(marks[key].shape)


def test_dtypes(tmp_path):
    kinds: tuple[Any, ...] = (np.float16, jnp.bfloat16, np.float32)
    for stored in kinds:
        arrays = make_arrays("gpt2", stored)
        write(tmp_path, "gpt2", arrays)
        for wanted in (None, jnp.float32, jnp.bfloat16, jnp.float16):
            model = load_pretrained(tmp_path, dtype=wanted, stacked=wanted is not None)
            assert_same(in_file_form(model), {key: x.astype(wanted or stored) for key, x in arrays.items()})


def test_each_array_keeps_its_dtype(tmp_path):
    arrays = make_arrays("llama", jnp.bfloat16)
    norms = {key: x.astype(np.float32) for key, x in arrays.items() if "norm" in key}
    write(tmp_path, "llama", {**arrays, **norms})
    assert_same(in_file_form(load_pretrained(tmp_path)), {**arrays, **norms})
    # One layer of a stack cannot differ from another: the dtype that holds both.
    first = {k: x for k, x in norms.items() if "layers.1" not in k}
    write(tmp_path, "llama", {**arrays, **first})
    stacked = in_file_form(load_pretrained(tmp_path, stacked=True))
    changed = {k: arrays[k].astype(np.float32) for k in norms if "layers.1" in k}
    assert_same(stacked, {**arrays, **first, **changed})


def test_options_reach_the_model(tmp_path):
    write(tmp_path, "llama", make_arrays("llama"))
    with jax.default_device(jax.devices()[3]):
        model = load_pretrained(tmp_path, stacked=True, remat="full", attention="xla")
    assert (model.remat, model.attention) == ("full", "xla")
    assert {d for x in to_arrays(model).values() for d in x.devices()} == {jax.devices()[3]}
    assert load_pretrained(tmp_path, sequence_parallel=True).sequence_parallel
    overrides = [("model.embed_tokens.weight", P(None, "fsdp"))]
    model = load_pretrained(tmp_path, rx.make_mesh(fsdp=4, data=1), overrides=overrides)
    assert model.model.embed_tokens.weight.sharding.spec == P(None, "fsdp")


# Older spellings.


def as_first_published(arrays):
    """GPT-2's, bare and with masks."""
    old = {key.removeprefix("transformer."): x for key, x in arrays.items()}
    for i in range(LAYERS):
        old[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.uint8))
        old[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return old


def with_gamma(arrays):
    pattern = r"(ln_\w+)\.(weight|bias)"
    return {
        re.sub(pattern, lambda m: f"{m[1]}.{'gamma' if m[2] == 'weight' else 'beta'}", key): x
        for key, x in arrays.items()
    }


def bare(arrays):
    return {key.removeprefix("model."): x for key, x in arrays.items()}


OLD = [
    ("gpt2", as_first_published),
    ("gpt2", with_gamma),
    ("gpt2", lambda arrays: {key.replace("transformer.wte", "lm_head"): x for key, x in arrays.items()}),
    ("gpt2", lambda arrays: arrays | {"lm_head.weight": arrays["transformer.wte.weight"].copy()}),
    ("llama", bare),
    ("llama", lambda arrays: bare(arrays) | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}),
    ("opt_125m", bare),
    ("opt_125m", lambda arrays: arrays | {"model.decoder.version": np.array([3.0], np.float32)}),
    ("gptj", lambda arrays: arrays | {"transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), bool)}),
]


def test_older_spellings(tmp_path):
    for i, (family, respell) in enumerate(OLD):
        arrays = make_arrays(family)
        old = respell(arrays)
        assert old.keys() != arrays.keys()
        save_pretrained(load_pretrained(write(tmp_path / f"old{i}", family, old)), tmp_path / f"new{i}")
        assert_same(load_file(tmp_path / f"new{i}" / SINGLE), arrays)


def test_the_layout_is_that_of_the_program_where_names_and_shapes_say_too_little(tmp_path, recwarn):
    """A RoBERTa whose hidden layer is as wide as the stream: any matrix could follow any other."""
    raw = {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 64, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 1,
        "max_position_embeddings": 40,
    }  # fmt: skip
    save_pretrained(filled(shapes(raw), jnp.float32, 0), tmp_path)
    mesh = rx.make_mesh(tensor=4)
    model = load_pretrained(tmp_path, mesh)
    assert not [x for x in recwarn if issubclass(x.category, rx.errors.ShardingWarning)]
    layer = "roberta.encoder.layer.1."
    specs = {path: x.sharding.spec for path, x in to_arrays(model).items()}
    assert specs[layer + "intermediate.dense.weight"] == P("tensor")
    assert specs[layer + "output.dense.weight"] == P(None, "tensor")
    with pytest.warns(rx.errors.ShardingWarning, match="order alone"):
        rx.shard_rules(model, mesh)
