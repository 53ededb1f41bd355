"""Checkpoint directories: what is read, by whom, and that a save cannot break the one before it.

The arrays of a model are compared with what `safetensors` itself reads or wrote, key by key.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_two_processes
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import redco_eqx as rx
from redco_eqx._tree import to_arrays, to_paths
from redco_eqx.models import load_pretrained, save_pretrained
from redco_eqx.models._files.safetensors import Stored

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


# What is read


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", CONFIGS)
def test_arrays_are_those_of_the_file(tmp_path, family, mesh, stacked):
    arrays = make_arrays(family)
    write(tmp_path, family, arrays, num_files=3 if mesh == "tensor" else 1)
    model = load_pretrained(tmp_path, MESHES[mesh](), stacked=stacked)
    assert_same(in_file_form(model), arrays)
    where = {x.sharding.mesh for x in to_arrays(model).values()}
    assert len(where) == 1
    expected = rx.shard_rules(model, where.pop())
    placed = {path: x.sharding for path, x in to_arrays(model).items()}
    assert placed == to_paths(expected, lambda x: x is not None)
    if mesh != "one device":
        assert any(not x.is_fully_replicated for x in to_arrays(model).values())


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("wanted", [None, jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float32], ids=str)
def test_dtypes(tmp_path, stored, wanted, stacked):
    arrays = make_arrays("gpt2", stored)
    write(tmp_path, "gpt2", arrays)
    model = load_pretrained(tmp_path, rx.make_mesh(tensor=4, data=1), dtype=wanted, stacked=stacked)
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
    overrides = [("model.embed_tokens.weight", P(None, "tensor"))]
    model = load_pretrained(tmp_path, rx.make_mesh(tensor=4, data=1), overrides=overrides)
    assert model.model.embed_tokens.weight.sharding.spec == P(None, "tensor")
    assert_same(in_file_form(model), make_arrays("llama"))


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


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bytes_read_for_each_device(tmp_path, reads, family, mesh, stacked):
    arrays = make_arrays(family, jnp.bfloat16)
    write(tmp_path, family, arrays)
    # A conversion happens slice by slice, after reading.
    model = load_pretrained(tmp_path, MESHES[mesh](), stacked=stacked, dtype=jnp.float32)
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


# Older spellings


def gpt2_as_first_published(arrays):
    old = {key.removeprefix("transformer."): x for key, x in arrays.items()}
    for i in range(LAYERS):
        old[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.uint8))
        old[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return old


OLD = {
    "bare gpt2 with masks": ("gpt2", gpt2_as_first_published),
    "gamma and beta": (
        "gpt2",
        lambda arrays: {
            re.sub(r"(ln_\w+)\.bias", r"\1.beta", re.sub(r"(ln_\w+)\.weight", r"\1.gamma", key)): x
            for key, x in arrays.items()
        },
    ),
    "bare opt": ("opt", lambda arrays: {key.removeprefix("model."): x for key, x in arrays.items()}),
    "bare llama": (
        "llama",
        lambda arrays: (
            {key.removeprefix("model."): x for key, x in arrays.items()}
            | {f"layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for i in range(LAYERS)}
        ),
    ),
    "gptj with masks": (
        "gptj",
        lambda arrays: arrays | {"transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), bool)},
    ),
    "tied gpt2 with a head alone": (
        "gpt2",
        lambda arrays: {key.replace("transformer.wte", "lm_head"): x for key, x in arrays.items()},
    ),
    "opt with a version": (
        "opt",
        lambda arrays: arrays | {"model.decoder.version": np.array([3.0], np.float32)},
    ),
    "tied gpt2 with a head": (
        "gpt2",
        lambda arrays: arrays | {"lm_head.weight": arrays["transformer.wte.weight"].copy()},
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_older_spellings(tmp_path, case):
    family, respell = OLD[case]
    arrays = make_arrays(family)
    old = respell(arrays)
    assert old.keys() != arrays.keys()
    model = load_pretrained(write(tmp_path / "old", family, old))
    assert_same(in_file_form(model), arrays)
    save_pretrained(model, tmp_path / "new")
    assert load_file(tmp_path / "new" / SINGLE).keys() == arrays.keys()


# What is written


def random_bits(dtype):
    """Every pattern of bits may come, also of NaN and infinity."""
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    integers = np.dtype(f"u{kind.itemsize}")
    return {
        key: rng.integers(0, 2 ** (8 * kind.itemsize), shape, integers).view(kind)
        for key, shape in shapes_of("gpt2").items()
    }


@pytest.mark.parametrize(
    ("dtype", "mesh", "stacked"),
    [
        (jnp.bfloat16, "one device", False),
        (jnp.bfloat16, "all", True),
        (np.float16, "one device", True),
        (np.float32, "tensor", False),
    ],
    ids=str,
)
def test_round_trip_keeps_every_bit(tmp_path, dtype, mesh, stacked):
    arrays = random_bits(dtype)
    write(tmp_path / "old", "gpt2", arrays)
    model = load_pretrained(tmp_path / "old", MESHES[mesh](), stacked=stacked)
    save_pretrained(model, tmp_path / "new")
    assert_same(load_file(tmp_path / "new" / SINGLE), arrays)
    again = load_pretrained(tmp_path / "new")
    assert_same(in_file_form(again), arrays)
    name = np.dtype(dtype).name
    entries = json.loads((tmp_path / "new" / "config.json").read_text())
    assert entries.items() >= {"model_type": "gpt2", "dtype": name, "torch_dtype": name}.items()
    assert again.config.n_embd == SIZE


def test_layout_and_layers_do_not_show_in_the_files(tmp_path):
    write(tmp_path / "old", "llama", make_arrays("llama"))
    written = []
    for i, (mesh, stacked) in enumerate(itertools.product(MESHES.values(), [False, True])):
        model = load_pretrained(tmp_path / "old", mesh(), stacked=stacked)
        save_pretrained(model, tmp_path / str(i), max_shard_bytes=60_000)
        written.append({file.name: file.read_bytes() for file in (tmp_path / str(i)).iterdir()})
    assert len(written[0]) > 4
    assert all(files == written[0] for files in written)


@pytest.mark.parametrize("limit", [1, 20_000, 100_000, 10**9])
def test_files_up_to_a_size(tmp_path, limit):
    arrays = make_arrays("gpt2")
    arrays |= {key: x.astype(jnp.bfloat16) for key, x in arrays.items() if "mlp" in key}
    model = load_pretrained(write(tmp_path / "old", "gpt2", arrays))
    save_pretrained(model, tmp_path / "new", max_shard_bytes=limit)
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    num_bytes = sum(x.nbytes for x in arrays.values())
    found = {}
    for file in files:
        with safe_open(file, "np") as f:
            assert f.metadata() == {"format": "pt"}
        contents = load_file(file)
        assert len(contents) == 1 or sum(x.nbytes for x in contents.values()) <= limit
        assert not found.keys() & contents.keys()
        found |= contents
        if limit != 10**9:
            weight_map = json.loads((tmp_path / "new" / INDEX).read_text())["weight_map"]
            assert {key for key, name in weight_map.items() if name == file.name} == contents.keys()
    assert_same(found, arrays)
    names = [file.name for file in files]
    if limit == 10**9:
        assert names == [SINGLE]
        assert not (tmp_path / "new" / INDEX).exists()
    else:
        assert names == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert json.loads((tmp_path / "new" / INDEX).read_text())["metadata"] == {"total_size": num_bytes}
        assert len(files) == len(arrays) if limit == 1 else 1 < len(files) < len(arrays)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "float32"


def test_what_is_refused_to_write(tmp_path):
    model = load_pretrained(write(tmp_path / "old", "gpt2", make_arrays("gpt2")))
    target = tmp_path / "new"
    with pytest.raises(TypeError, match=r"got a dict|model\.Model"):
        save_pretrained(cast(Any, {}), target)
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_pretrained(model, target, max_shard_bytes=0)
    abstract = eqx.filter_eval_shape(lambda x: x, model)
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is abstract"):
        save_pretrained(abstract, target)
    whole = jax.tree.map(lambda x: x.astype(int) if eqx.is_array(x) else x, model)
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is int32"):
        save_pretrained(whole, target)
    model.transformer.wpe.weight.delete()
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight has been deleted"):
        save_pretrained(model, target)
    assert not target.exists()
    target.write_text("a file")
    with pytest.raises(FileExistsError):
        save_pretrained(load_pretrained(tmp_path / "old"), target)


# A save that is interrupted


class Killed(BaseException):
    """Not an Exception: nothing in the library may catch it, as nothing catches SIGKILL."""


@contextlib.contextmanager
def failing(monkeypatch, at, error, once):
    """From the `at`-th call on (or in that alone), what changes a directory raises instead."""
    calls = []

    def call(original, *args, **kwargs):
        calls.append(args)
        if len(calls) == at or (len(calls) > at and not once):
            raise error("here it stops")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, functools.partial(call, getattr(os, name)))
        yield calls


def foreign(directory):
    """What another reader of the format sees: the single file, else what the index names."""
    if (directory / SINGLE).exists():
        return load_file(directory / SINGLE)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    contents = {name: load_file(directory / name) for name in set(weight_map.values())}
    return {key: contents[name][key] for key, name in weight_map.items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)


def entries(config):
    return {name: x for name, x in vars(config).items() if name != "rest"}


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory):
    """Two models of one configuration, and one of another that has the same arrays as the second."""
    models = []
    for seed, epsilon in ((0, 1e-5), (1, 1e-5), (1, 0.5)):
        directory = tmp_path_factory.mktemp("made")
        arrays = make_arrays("gpt2", seed=seed, num_layers=1)
        write(directory, "gpt2", arrays, n_layer=1, layer_norm_epsilon=epsilon)
        models.append(load_pretrained(directory))
    return models


ONE, SEVERAL, MORE = 10**9, 140_000, 100_000


@pytest.mark.parametrize(
    ("before", "after"), [(ONE, ONE), (ONE, SEVERAL), (SEVERAL, ONE), (SEVERAL, SEVERAL), (SEVERAL, MORE)]
)
@pytest.mark.parametrize(
    ("config", "error"), [("same config", Killed), ("changed config", Killed), ("changed config", OSError)]
)
def test_interrupted_save_leaves_one_whole(tmp_path, monkeypatch, old_and_new, before, after, config, error):
    old, new = old_and_new[0], old_and_new[1 if config == "same config" else 2]
    wanted = {"old": in_file_form(old), "new": in_file_form(new)}
    configs = {"old": old.config, "new": new.config}
    seen, at, num_calls = [], 0, 0
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # counted below; the disk is not what is tested
    save_pretrained(old, tmp_path / "old", max_shard_bytes=before)
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    for at in itertools.count(1):
        directory = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", directory)
        with failing(monkeypatch, at, error, once=error is OSError) as made:
            stopped = False
            try:
                save_pretrained(new, directory, max_shard_bytes=after)
            except error:
                stopped = True
        num_calls = len(made)
        model = load_pretrained(directory)
        (which,) = [name for name, arrays in wanted.items() if same(in_file_form(model), arrays)]
        assert entries(model.config) == entries(configs[which])
        assert same(foreign(directory), wanted[which])
        seen.append(which)
        # Whatever was left, the next save ends with its own files alone.
        save_pretrained(old, directory, max_shard_bytes=after)
        left = {file.name for file in directory.iterdir()}
        shards = {name for name in left if re.fullmatch(r"model(-2)?-\d{5}-of-\d{5}\.safetensors", name)}
        assert left - shards == {"config.json", "tokenizer.json", SINGLE if after == ONE else INDEX}
        assert len(shards) == {ONE: 0, SEVERAL: 2, MORE: 3}[after]
        assert same(foreign(directory), wanted["old"])
        assert (directory / "config.json").read_bytes() == (tmp_path / "old" / "config.json").read_bytes()
        if not stopped:
            break
    assert num_calls < at
    assert (seen[0], seen[-1]) == ("old", "new")
    assert seen == sorted(seen, reverse=True)  # once the new one is in force it stays so


# Bad input


def damage(name):
    def with_name(function):
        DAMAGES[name] = function
        return function

    return with_name


DAMAGES = {}


def edit_json(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@damage("no directory")
def _(directory, arrays):
    return directory / "elsewhere", FileNotFoundError, "elsewhere is not a directory here.*snapshot_download"


@damage("no config")
def _(directory, arrays):
    (directory / "config.json").unlink()
    return directory, FileNotFoundError, "has no config.json"


@damage("config not JSON")
def _(directory, arrays):
    (directory / "config.json").write_text("{'model_type': 'gpt2'}")
    return directory, ValueError, r"config\.json is not JSON: .*line 1"


@damage("config not an object")
def _(directory, arrays):
    (directory / "config.json").write_text("[1]")
    return directory, ValueError, r"config\.json must be a JSON object, but is a list"


@damage("unknown model_type")
def _(directory, arrays):
    edit_json(directory / "config.json", model_type="bloom")
    known = "gpt2, gptj, llama, mistral, opt, qwen2, qwen3"
    return directory, ValueError, f"model_type='bloom' is not known, only {known}"


@damage("unsupported entry")
def _(directory, arrays):
    edit_json(directory / "config.json", scale_attn_by_inverse_layer_idx=True)
    return directory, ValueError, "scale_attn_by_inverse_layer_idx=True is not supported"


@damage("quantized")
def _(directory, arrays):
    edit_json(directory / "config.json", quantization_config={"bits": 4})
    return directory, ValueError, "quantization_config is not supported"


@damage("no weights")
def _(directory, arrays):
    (directory / SINGLE).unlink()
    return directory, FileNotFoundError, r"neither model\.safetensors nor model\.safetensors\.index\.json"


@damage("only a pickle")
def _(directory, arrays):
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    return directory, ValueError, r"only as a pickle, pytorch_model\.bin.*could run any code"


@damage("missing keys")
def _(directory, arrays):
    del arrays["transformer.wpe.weight"], arrays["transformer.h.1.attn.c_attn.bias"]
    write(directory, "gpt2", arrays)
    return (
        directory,
        ValueError,
        (
            r"GPT2LMHeadModel.*\n  2 missing: transformer\.wpe\.weight \[8, 64\], "
            r"transformer\.h\.1\.attn\.c_attn\.bias \[192\]$"
        ),
    )


@damage("many missing keys")
def _(directory, arrays):
    write(directory, "gpt2", {"transformer.wte.weight": arrays["transformer.wte.weight"]})
    return directory, ValueError, r"\n  27 missing: ([\w.]+ \[[\d, ]+\], ){10}and 17 more$"


@damage("unexpected keys")
def _(directory, arrays):
    write(directory, "gpt2", {**arrays, "adapter.weight": np.zeros((2, 3), np.float32)})
    return directory, ValueError, r"\n  1 unexpected: adapter\.weight \[2, 3\]$"


@damage("a layer too many")
def _(directory, arrays):
    edit_json(directory / "config.json", n_layer=1)
    return directory, ValueError, r"\n  12 unexpected: transformer\.h\.1\."


@damage("wrong shape")
def _(directory, arrays):
    arrays["transformer.h.0.attn.c_attn.weight"] = np.zeros((3 * SIZE, SIZE), np.float32)
    write(directory, "gpt2", arrays)
    return (
        directory,
        ValueError,
        (
            r"\n  1 of a wrong shape: transformer\.h\.0\.attn\.c_attn\.weight \[192, 64\] instead "
            r"of \[64, 192\] in model\.safetensors$"
        ),
    )


@damage("integers")
def _(directory, arrays):
    arrays["transformer.wpe.weight"] = np.zeros((8, SIZE), np.int8)
    write(directory, "gpt2", arrays)
    return directory, ValueError, r"\n  1 of an unsupported dtype: transformer\.wpe\.weight I8$"


@damage("float64")
def _(directory, arrays):
    arrays["transformer.wpe.weight"] = np.zeros((8, SIZE))
    write(directory, "gpt2", arrays)
    return directory, ValueError, r"transformer\.wpe\.weight is float64 in .*dtype=jnp\.float32"


@damage("twice")
def _(directory, arrays):
    write(directory, "gpt2", {**arrays, "wpe.weight": arrays["transformer.wpe.weight"]})
    return (
        directory,
        ValueError,
        (r"1 there twice: transformer\.wpe\.weight as (transformer\.)?wpe\.weight and as "),
    )


@damage("a tied head that differs")
def _(directory, arrays):
    head = arrays["transformer.wte.weight"].copy()
    head[-1, -1] += 1
    write(directory, "gpt2", {**arrays, "lm_head.weight": head})
    return directory, ValueError, r"config\.json ties it to: lm_head\.weight and transformer\.wte\.weight$"


@damage("cut short")
def _(directory, arrays):
    whole = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(whole[:-100])
    return (
        directory,
        ValueError,
        rf"model\.safetensors is not a whole safetensors file, {len(whole) - 100} bytes",
    )


@damage("empty")
def _(directory, arrays):
    (directory / SINGLE).write_bytes(b"")
    return directory, ValueError, r"model\.safetensors is not a whole safetensors file, 0 bytes"


@damage("corrupted header")
def _(directory, arrays):
    whole = bytearray((directory / SINGLE).read_bytes())
    whole[20:40] = b"\xff" * 20
    (directory / SINGLE).write_bytes(whole)
    return directory, ValueError, r"model\.safetensors is not a whole safetensors file"


@damage("index names an absent file")
def _(directory, arrays):
    write(directory, "gpt2", arrays, num_files=3)
    (directory / SINGLE).unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()
    return directory, FileNotFoundError, r"index\.json names model-00002-of-00003\.safetensors, but there is no"


@damage("index names a key that is not there")
def _(directory, arrays):
    write(directory, "gpt2", arrays, num_files=3)
    (directory / SINGLE).unlink()
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    assert weight_map["transformer.wte.weight"] == "model-00001-of-00003.safetensors"
    weight_map["transformer.wte.weight"] = "model-00002-of-00003.safetensors"
    edit_json(directory / INDEX, weight_map=weight_map)
    return (
        directory,
        ValueError,
        r"without them: transformer\.wte\.weight \(model-00002-of-00003\.safetensors\)",
    )


@damage("index leads out of the directory")
def _(directory, arrays):
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    return (
        directory,
        ValueError,
        r"index\.json puts a into '\.\./b\.safetensors', which is not the name of a file",
    )


@damage("index without a map")
def _(directory, arrays):
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text("{}")
    return directory, ValueError, r"index\.json has no weight_map"


@damage("index not JSON")
def _(directory, arrays):
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text("{")
    return directory, ValueError, r"index\.json is not JSON"


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", DAMAGES)
def test_bad_checkpoints(tmp_path, name, stacked):
    arrays = make_arrays("gpt2")
    write(tmp_path, "gpt2", arrays)
    directory, error, message = DAMAGES[name](tmp_path, arrays)
    with pytest.raises(error, match=f"(?s){message}"):
        load_pretrained(directory, stacked=stacked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": jnp.int32}, "dtype=int32, but it must be one of float16, bfloat16"),
        ({"dtype": "halves"}, "dtype='halves' is not a dtype"),
        ({"dtype": np.float64}, "dtype=float64 needs"),
        ({"overrides": [("transformer.h.9.*", P())]}, "matches no array"),
        ({"overrides": [("transformer.wte.weight", P("rows"))]}, "no axis 'rows'"),
    ],
)
def test_bad_arguments_before_anything_is_read(tmp_path, arguments, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"]}))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path, **arguments)


def test_without_safetensors(tmp_path, monkeypatch):
    write(tmp_path, "gpt2", make_arrays("gpt2"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "redco_eqx\[hf\]"'):
        load_pretrained(tmp_path)


# Several processes


def test_two_processes(tmp_path):
    arrays = make_arrays("gpt2")
    write(tmp_path / "old", "gpt2", arrays, num_files=2)
    run_two_processes(pathlib.Path(__file__).with_name("_two_process_pretrained.py"), tmp_path, str(tmp_path))
    for form in ("list", "stacked"):
        assert_same(load_file(tmp_path / form / SINGLE), arrays)
        results = [json.loads((tmp_path / f"{form}{i}.json").read_text()) for i in range(2)]
        whole = sum(x.nbytes for x in arrays.values())
        for result in results:
            assert result["read"] == result["held"] < 0.6 * whole
    errors = [(tmp_path / f"error{i}.txt").read_text() for i in range(2)]
    assert "FileExistsError" in errors[0]
    assert "RuntimeError('save_pretrained: process 0 could not write" in errors[1]
