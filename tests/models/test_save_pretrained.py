"""`save_pretrained`: every bit comes back, and a save that is interrupted leaves one checkpoint whole."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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
from helpers import run_two_processes
from safetensors import safe_open
from safetensors.numpy import load_file

from redco_eqx.models import load_pretrained, save_pretrained


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
