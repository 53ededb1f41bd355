"""`save_pretrained`: every bit comes back, and a save that is interrupted leaves one checkpoint whole."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import (
    INDEX,
    MESHES,
    SINGLE,
    SIZE,
    assert_same,
    in_file_form,
    make_arrays,
    shapes_of,
    write,
)
from helpers import in_long, run_two_processes
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import redco_eqx as rx
from redco_eqx import models
from redco_eqx.models import load_pretrained, save_pretrained
from redco_eqx.models._files.directory import config_file


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
    """Return the arrays that another reader sees: those of the single file, else of the files in the index."""
    if (directory / SINGLE).exists():
        return load_file(directory / SINGLE)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    contents = {name: load_file(directory / name) for name in set(weight_map.values())}
    return {key: contents[name][key] for key, name in weight_map.items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)


def entries(config):
    return {name: x for name, x in vars(config).items() if name not in ("rest", "source")}


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
    ("before", "after", "config", "error"),
    [
        (ONE, ONE, "same config", Killed),
        (ONE, SEVERAL, "changed config", Killed),
        (SEVERAL, ONE, "changed config", OSError),
        (SEVERAL, SEVERAL, "changed config", Killed),
        (SEVERAL, MORE, "same config", OSError),
        *in_long(
            (ONE, ONE, "changed config", OSError),
            (ONE, SEVERAL, "same config", Killed),
            (SEVERAL, ONE, "same config", Killed),
            (SEVERAL, SEVERAL, "changed config", OSError),
            (SEVERAL, MORE, "changed config", Killed),
        ),
    ],
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


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("mesh", MESHES)
def test_projections_that_files_hold_as_one(tmp_path, mesh, stacked):
    """By another way to the same: the rows one under another, whatever the layout."""
    config = models.Phi3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    model = models.Phi3ForCausalLM(config, key=jax.random.key(0))
    save_pretrained(model, tmp_path / "old")
    stored = load_file(tmp_path / "old" / SINGLE)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    for name, parts in (
        (
            "self_attn.qkv_proj.weight",
            [x.weight for x in qkv],
        ),
        ("self_attn.qkv_proj.bias", [x.bias for x in qkv]),
        ("mlp.gate_up_proj.weight", [mlp.gate_proj.weight, mlp.up_proj.weight]),
    ):
        np.testing.assert_array_equal(stored[f"model.layers.1.{name}"], np.concatenate(parts))
    assert not any("q_proj" in key or "up_proj" in key.replace("gate_up_proj", "") for key in stored)
    found = load_pretrained(tmp_path / "old", MESHES[mesh](), stacked=stacked)
    save_pretrained(found, tmp_path / "new")
    assert_same(load_file(tmp_path / "new" / SINGLE), stored)
    if not stacked:
        assert_same(in_file_form(found), in_file_form(model))


def test_what_lies_beside_the_weights_is_carried_over(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, "gpt2", make_arrays("gpt2"), eos_token_id=3)
    beside = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "LICENSE": "mine",
        "generation_config.json": '{"eos_token_id": [5, 6], "temperature": 0.6}',
    }
    weights = (
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "x.gguf",
        "pytorch_model.bin.index.json",
        ".hidden",
    )
    for name, text in {**beside, **dict.fromkeys(weights, "stale")}.items():
        (old / name).write_text(text)
    (old / "onnx").mkdir()
    new.mkdir()
    (new / "LICENSE").write_text("another")
    model = load_pretrained(old)
    assert model.config.generation_tokens == {"eos_token_id": [5, 6], "pad_token_id": None}
    state, _ = rx.fit(
        rx.init_state(model, optax.sgd(0.1), key=jax.random.key(0)),
        np.zeros((8, 4), np.int32),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(model(batch) ** 2),
        optimizer=optax.sgd(0.1),
        batch_size=8,
        num_steps=1,
        loggers=(),
    )
    save_pretrained(load_pretrained(old), tmp_path / "same")
    model = load_pretrained(tmp_path / "same")
    save_pretrained(state.model, new)
    assert {file.name for file in new.iterdir()} == {*beside, SINGLE, "config.json"}
    assert (new / "LICENSE").read_text() == "another"
    assert json.loads((new / "generation_config.json").read_text()) == {
        "eos_token_id": [5, 6],
        "temperature": 0.6,
    }
    assert load_pretrained(new).config == model.config  # wherever they come from
    shutil.rmtree(old)
    save_pretrained(state.model, tmp_path / "newer")  # what is gone is not missed
    assert load_pretrained(tmp_path / "newer").config == model.config


def test_links_are_copied_only_from_the_checkpoint_and_the_hubs_cache(tmp_path):
    """As `huggingface_hub` has it: the names in a snapshot link to blobs."""
    repository, secret = tmp_path / "models--me--gpt2", tmp_path / "secret.json"
    snapshot, blob = repository / "snapshots" / "0f", repository / "blobs" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    write(snapshot, "gpt2", make_arrays("gpt2"))
    blob.parent.mkdir()
    blob.write_text('{"in": "blob"}')
    secret.write_text('{"password": 1}')
    (snapshot / "tokenizer.json").symlink_to(f"../../blobs/{blob.name}")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    save_pretrained(load_pretrained(snapshot), tmp_path / "new")
    for name in ("tokenizer.json", "vocab.json"):
        assert not (tmp_path / "new" / name).is_symlink()
        assert (tmp_path / "new" / name).read_text() == blob.read_text()
    for name in ("special_tokens.json", "generation_config.json"):
        (snapshot / name).symlink_to(secret)
        model = load_pretrained(snapshot)
        with pytest.raises(
            ValueError, match=rf"{name} is a link to .*secret\.json, but only links to files of"
        ):
            save_pretrained(model, tmp_path / "newer")
        assert not (tmp_path / "newer").exists()
        (snapshot / name).unlink()
    save_pretrained(model, tmp_path / "newer")  # what is meant can be put right in the same process


def test_the_home_directory_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = load_pretrained(write(tmp_path / "old", "gpt2", make_arrays("gpt2")))
    save_pretrained(model, "~/new")
    load_pretrained("~/new")
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new"}


@pytest.mark.parametrize("tag", ["../../evil", "0123456789abcdef/..", "0123456789ABCDEF", 7, ["a"]])
@pytest.mark.parametrize("where", ["file", "index"])
def test_a_tag_of_another_form_is_not_taken_for_a_part_of_a_name(tmp_path, tag, where):
    directory = write(tmp_path / "model", "gpt2", make_arrays("gpt2"), num_files=1 if where == "file" else 2)
    outside = tmp_path / f"config.json.{tag}.part" if isinstance(tag, str) else tmp_path / "none.part"
    outside.parent.mkdir(parents=True, exist_ok=True)
    if where == "file":
        arrays = load_file(directory / SINGLE)
        save_file(arrays, directory / SINGLE, metadata={"format": "pt", "config": str(tag)})
    else:
        index = json.loads((directory / INDEX).read_text())
        (directory / INDEX).write_text(json.dumps({**index, "metadata": {"config": tag}}))
    assert config_file(directory) == directory / "config.json"
    load_pretrained(directory)


def test_arrays_that_a_reader_would_not_find_are_refused(tmp_path):
    model = load_pretrained(write(tmp_path / "old", "llama", make_arrays("llama")), stacked=True)
    refused = [
        (lambda m: m.lm_head, None, r"1 missing: lm_head\.weight"),
        (
            lambda m: m.model.norm.weight,
            jnp.ones(3),
            r"of a wrong shape: model\.norm\.weight \[3\] instead of \[64\]",
        ),
        (lambda m: m.model.norm, Scaled(model.model.norm), r"1 unknown: model\.norm\.inner\.weight"),
    ]
    for where, value, message in refused:
        with pytest.raises(ValueError, match=message):
            save_pretrained(eqx.tree_at(where, model, value), tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Scaled(eqx.Module):
    inner: Any


MEMORY = """
import gc, os, pathlib, sys, threading, time
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
import safetensors
import redco_eqx as rx
from redco_eqx import models

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak(act):
    gc.collect()
    before, most, ended = resident(), 0, False
    def watch():
        nonlocal most
        while not ended:
            most = max(most, resident())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    result = act()
    ended = True
    thread.join()
    return result, most - before

directory = pathlib.Path(sys.argv[1])
shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 1024}
config = models.LlamaConfig(num_hidden_layers=8, **shape)
models.save_pretrained(models.LlamaForCausalLM(config, key=jax.random.key(0)), directory / "old")
size = (directory / "old" / "model.safetensors").stat().st_size
mesh = rx.make_mesh(tensor=8)
model, loading = peak(lambda: jax.block_until_ready(models.load_pretrained(directory / "old", mesh)))
_, saving = peak(lambda: models.save_pretrained(model, directory / "new"))
print(loading / size, saving / size)
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_neither_loading_nor_saving_holds_the_model_twice(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    loading, saving = map(float, run.stdout.split())
    assert loading < 1.5  # the arrays themselves are 1
    assert saving < 0.6  # an array or two, and what compiling takes


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
