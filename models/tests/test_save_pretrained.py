"""`save_pretrained`: every bit comes back, and a save that is interrupted leaves one
checkpoint whole."""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import tracemalloc
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import (
    INDEX,
    SINGLE,
    in_file_form,
    make_arrays,
    on_all,
    shapes_of,
    write,
)
from fit_helpers import assert_identical, assert_same, bits, raised
from helpers import in_long
from hosts import harness
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, IMAGES, make

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx._base.tree import to_arrays
from redco_eqx._sharding.mesh import replicated
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._files.directory import file_in_force


def layers_of(raw: Any) -> list[tuple[Any, str]]:
    """`[(where, entry)]` of the entries of a configuration, and its parts, that number
    layers."""
    parts = [
        (raw, x)
        for x in raw
        if "layer" in x and type(raw[x]) is int and x != "no_rope_layer_interval"
    ]
    return parts + [
        found
        for part in raw.values()
        if isinstance(part, dict)
        for found in layers_of(part)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_comes_back_bit_for_bit_and_only_with_its_number_of_layers(
    name, tmp_path
):
    model = make(name)
    save_pretrained(model, tmp_path)
    weights = "diffusion_pytorch_model.safetensors" if name in IMAGES else SINGLE
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", weights}
    assert_identical(to_arrays(load_pretrained(tmp_path)), to_arrays(model))
    text = (tmp_path / "config.json").read_text()
    for i in range(len(layers_of(json.loads(text)))):
        for number in (7, 10**9):
            raw = json.loads(text)
            where, entry = layers_of(raw)[i]
            where[entry] = number
            (tmp_path / "config.json").write_text(json.dumps(raw))
            message = (
                rf"config\.json in .*{number}( layers at|, the files have at most)"
            )
            raised(ValueError, load_pretrained, tmp_path, match=message)


def test_every_bit_comes_back_whatever_the_layout(tmp_path):
    """Every pattern of bits may come, also of NaN and infinity. Layout and layers do
    not show in the files."""
    for kind in map(np.dtype, (jnp.bfloat16, np.float16, np.float32)):
        rng = np.random.default_rng(1)
        integers = np.dtype(f"u{kind.itemsize}")
        arrays = {
            key: rng.integers(0, 2 ** (8 * kind.itemsize), shape, integers).view(kind)
            for key, shape in shapes_of("gpt2").items()
        }
        write(tmp_path / "old", "gpt2", arrays)
        model = load_pretrained(tmp_path / "old", stacked=kind == np.float16)
        save_pretrained(model, tmp_path / kind.name)
        assert_same(load_file(tmp_path / kind.name / SINGLE), arrays)
        raw = json.loads((tmp_path / kind.name / "config.json").read_text())
        assert (
            raw.items()
            >= {
                "model_type": "gpt2",
                "dtype": kind.name,
                "torch_dtype": kind.name,
            }.items()
        )
    written = []
    for split in (False, True):
        model = load_pretrained(
            tmp_path / "old", on_all() if split else None, stacked=split
        )
        save_pretrained(model, tmp_path / str(split), max_shard_bytes=60_000)
        written.append(
            {file.name: file.read_bytes() for file in (tmp_path / str(split)).iterdir()}
        )
    assert len(written[0]) > 4
    assert written[0] == written[1]


def test_files_up_to_a_size(tmp_path):
    arrays = make_arrays("gpt2")
    arrays |= {key: x.astype(jnp.bfloat16) for key, x in arrays.items() if "mlp" in key}
    model = load_pretrained(write(tmp_path / "old", "gpt2", arrays))
    for limit in (1, 20_000, 10**9):
        directory = tmp_path / str(limit)
        save_pretrained(model, directory, max_shard_bytes=limit)
        files = sorted(directory.glob("*.safetensors"))
        for file in files:
            with safe_open(file, "np") as f:
                assert f.metadata() == {"format": "pt"}
        contents = {file.name: load_file(file) for file in files}
        assert_same(
            {key: x for found in contents.values() for key, x in found.items()}, arrays
        )
        assert sum(map(len, contents.values())) == len(arrays)
        for found in contents.values():
            assert len(found) == 1 or sum(x.nbytes for x in found.values()) <= limit
        if limit == 10**9:
            assert ([*contents], (directory / INDEX).exists()) == ([SINGLE], False)
        else:
            num = len(files)
            index = json.loads((directory / INDEX).read_text())
            assert [*contents] == [
                f"model-{i + 1:05d}-of-{num:05d}.safetensors" for i in range(num)
            ]
            assert index["weight_map"] == {
                key: name for name, found in contents.items() for key in found
            }
            assert index["metadata"] == {
                "total_size": sum(x.nbytes for x in arrays.values())
            }
            assert num == len(arrays) if limit == 1 else 1 < num < len(arrays)
        assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"


class Scaled(eqx.Module):
    inner: Any


@pytest.fixture(scope="module")
def a_llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return load_pretrained(
        write(directory, "llama", make_arrays("llama")), stacked=True
    )


def test_something_else_than_a_model_is_refused(tmp_path):
    target = tmp_path / "new"
    raised(
        TypeError,
        save_pretrained,
        cast(Any, {}),
        target,
        match=r"got a dict|model\.Model",
    )
    assert not target.exists()


def test_shards_of_no_size_are_refused(a_llama, tmp_path):
    target = tmp_path / "new"
    raised(
        ValueError,
        save_pretrained,
        a_llama,
        target,
        max_shard_bytes=0,
        match="max_shard_bytes=0",
    )
    assert not target.exists()


def with_deleted_norm(model):
    deleted = jnp.ones(64)
    deleted.delete()
    return eqx.tree_at(lambda m: m.model.norm.weight, model, deleted)


UNWRITABLE = {
    "abstract": (
        lambda model: eqx.filter_eval_shape(lambda x: x, model),
        "model.embed_tokens.weight is abstract",
    ),
    "integers": (
        lambda model: eqx.tree_at(
            lambda m: m.model.norm.weight, model, jnp.ones(64, int)
        ),
        "model.norm.weight is int32",
    ),
    "missing": (
        lambda model: eqx.tree_at(lambda m: m.lm_head, model, None),
        "1 missing: lm_head.weight",
    ),
    "another shape": (
        lambda model: eqx.tree_at(lambda m: m.model.norm.weight, model, jnp.ones(3)),
        "of a wrong shape: model.norm.weight [3] instead of [64]",
    ),
    "another path": (
        lambda model: eqx.tree_at(lambda m: m.model.norm, model, replace_fn=Scaled),
        "1 unknown: model.norm.inner.weight",
    ),
    "deleted": (with_deleted_norm, "model.norm.weight has been deleted"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_arrays_that_are_not_those_of_the_family_are_refused(a_llama, tmp_path, case):
    change, message = UNWRITABLE[case]
    target = tmp_path / "new"
    raised(
        ValueError, save_pretrained, change(a_llama), target, match=re.escape(message)
    )
    assert not target.exists()


def test_a_file_in_place_of_the_directory_is_refused(a_llama, tmp_path):
    target = tmp_path / "new"
    target.write_text("a file")
    raised(FileExistsError, save_pretrained, a_llama, target)
    assert target.read_text() == "a file"


class Killed(BaseException):
    """Not an Exception: nothing in the library may catch it, as nothing catches
    SIGKILL."""


@contextlib.contextmanager
def failing(monkeypatch, at, error, once):
    """From the `at`-th call on (or in that alone), what changes a directory raises
    instead."""
    calls = []

    def call(original, *args, **kwargs):
        # The next writer takes over what is left of it.
        if args and str(args[0]).endswith(".writer.json"):
            return original(*args, **kwargs)
        calls.append(args)
        if len(calls) == at or (len(calls) > at and not once):
            raise error("here it stops")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, functools.partial(call, getattr(os, name)))
        yield calls


def foreign(directory):
    """Return the arrays that another reader sees: those of the single file, else of the
    files in the index."""
    if (directory / SINGLE).exists():
        return load_file(directory / SINGLE)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    contents = {name: load_file(directory / name) for name in set(weight_map.values())}
    return {key: contents[name][key] for key, name in weight_map.items()}


def entries(config):
    return {
        name: x for name, x in vars(config).items() if name not in ("rest", "source")
    }


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory):
    """Two models of one configuration, and one of another that has the same arrays as
    the second."""
    found = []
    for seed, epsilon in ((0, 1e-5), (1, 1e-5), (1, 0.5)):
        directory = tmp_path_factory.mktemp("made")
        arrays = make_arrays("gpt2", seed=seed, n_layer=1)
        write(directory, "gpt2", arrays, n_layer=1, layer_norm_epsilon=epsilon)
        found.append(load_pretrained(directory))
    return found


ONE = 10**9
SEVERAL = 140_000
MORE = 100_000


SAVES = [
    (ONE, SEVERAL, "changed config", Killed),
    (SEVERAL, ONE, "changed config", OSError),
    (SEVERAL, SEVERAL, "changed config", Killed),
    *in_long((SEVERAL, MORE, "changed config", Killed)),
    *in_long((ONE, ONE, "changed config", OSError), (ONE, ONE, "same config", Killed)),
    *in_long(
        (ONE, SEVERAL, "same config", Killed), (SEVERAL, MORE, "same config", OSError)
    ),
]


@pytest.mark.parametrize(("before", "after", "config", "error"), SAVES)
def test_interrupted_save_leaves_one_whole(
    tmp_path, monkeypatch, old_and_new, before, after, config, error
):
    old, new = old_and_new[0], old_and_new[1 if config == "same config" else 2]
    both = {"old": old, "new": new}
    wanted = {name: in_file_form(one) for name, one in both.items()}
    seen = []
    at = 0
    num_calls = 0
    # Counted below; the disk is not what is tested.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
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
        (which,) = [
            name
            for name, arrays in wanted.items()
            if bits(in_file_form(model)) == bits(arrays)
        ]
        assert entries(model.config) == entries(both[which].config)
        assert_same(foreign(directory), wanted[which])
        seen.append(which)
        # Whatever was left, the next save ends with its own files alone.
        save_pretrained(old, directory, max_shard_bytes=after)
        left = {file.name for file in directory.iterdir()}
        shards = {
            name
            for name in left
            if re.fullmatch(r"model(-2)?-\d{5}-of-\d{5}\.safetensors", name)
        }
        assert left - shards == {
            "config.json",
            "tokenizer.json",
            SINGLE if after == ONE else INDEX,
        }
        assert len(shards) == {ONE: 0, SEVERAL: 2, MORE: 3}[after]
        assert_same(foreign(directory), wanted["old"])
        assert (directory / "config.json").read_bytes() == (
            tmp_path / "old" / "config.json"
        ).read_bytes()
        if not stopped:
            break
    assert num_calls < at
    assert (seen[0], seen[-1]) == ("old", "new")
    # Once the new one is in force it stays so.
    assert seen == sorted(seen, reverse=True)


def test_projections_that_files_hold_as_one(tmp_path):
    """The same in any layout; `tests/parity` holds the names and the order of all."""
    model = make("phi3")
    save_pretrained(model, tmp_path / "old")
    found = load_pretrained(tmp_path / "old", on_all(), stacked=True)
    save_pretrained(found, tmp_path / "new")
    assert_same(
        load_file(tmp_path / "new" / SINGLE), load_file(tmp_path / "old" / SINGLE)
    )
    assert_same(in_file_form(found), in_file_form(model))


def test_what_lies_beside_the_weights_is_carried_over(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, "gpt2", make_arrays("gpt2"), eos_token_id=3)
    generation = {"eos_token_id": [5, 6], "temperature": 0.6}
    beside = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "LICENSE": "mine",
    }
    beside["generation_config.json"] = json.dumps(generation)
    stale = (
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "x.gguf",
        "pytorch_model.bin.index.json",
        ".hidden",
    )
    for name, text in {**beside, **dict.fromkeys(stale, "stale")}.items():
        (old / name).write_text(text)
    (old / "onnx").mkdir()
    new.mkdir()
    (new / "LICENSE").write_text("another")
    model = load_pretrained(old)
    assert model.config.generation_tokens["eos_token_id"] == [5, 6]
    state = rx.init_state(model, optax.sgd(0.1), key=jax.random.key(0))
    save_pretrained(load_pretrained(old), tmp_path / "same")
    model = load_pretrained(tmp_path / "same")
    save_pretrained(state.model, new)
    assert {file.name for file in new.iterdir()} == {*beside, SINGLE, "config.json"}
    assert (new / "LICENSE").read_text() == "another"
    assert json.loads((new / "generation_config.json").read_text()) == generation
    assert load_pretrained(new).config == model.config  # wherever they come from
    save_pretrained(
        load_pretrained(write(tmp_path / "plain", "gpt2", make_arrays("gpt2"))), new
    )
    assert not (new / "generation_config.json").exists()  # it was that of another model
    shutil.rmtree(old)
    save_pretrained(state.model, tmp_path / "newer")  # what is gone is not missed
    assert load_pretrained(tmp_path / "newer").config == model.config


def test_links_are_copied_only_from_the_checkpoint_and_the_hubs_cache(tmp_path):
    """As `huggingface_hub` has it: the names in a snapshot link to blobs."""
    repository, secret = tmp_path / "models--me--gpt2", tmp_path / "secret.json"
    snapshot = repository / "snapshots" / "0f"
    blob = repository / "blobs" / ("0a" * 20)
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
            ValueError,
            match=rf"{name} is a link to .*secret\.json, but only links to files",
        ):
            save_pretrained(model, tmp_path / "newer")
        assert not (tmp_path / "newer").exists()
        (snapshot / name).unlink()
    # What is meant can be put right in the same process.
    save_pretrained(model, tmp_path / "newer")


def test_the_home_directory_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_pretrained(
        load_pretrained(write(tmp_path / "old", "gpt2", make_arrays("gpt2"))), "~/new"
    )
    load_pretrained("~/new")
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new"}


def test_a_tag_of_another_form_is_not_taken_for_a_part_of_a_name(tmp_path):
    file = tmp_path / "file" / SINGLE
    arrays = make_arrays("gpt2")
    write(tmp_path / "file", "gpt2", arrays)
    index = write(tmp_path / "index", "gpt2", arrays, num_files=2) / INDEX
    raw = json.loads(index.read_text())
    for tag in ("../../evil", "0123456789abcdef/..", "0123456789ABCDEF", 7, ["a"]):
        save_file(arrays, file, metadata={"format": "pt", "config": str(tag)})
        index.write_text(json.dumps({**raw, "metadata": {"config": tag}}))
        for directory in (file.parent, index.parent):
            waiting = directory / f"config.json.{tag}.part"
            os.makedirs(waiting.parent, exist_ok=True)
            if not waiting.is_dir():
                waiting.write_text("{}")
            assert (
                file_in_force("load", directory, "config.json")
                == directory / "config.json"
            ), tag
            load_pretrained(directory)


def test_models_of_images_have_files_of_their_own(tmp_path):
    """Those of a model of text beside them are not touched, and not taken."""
    stem = "diffusion_pytorch_model.safetensors"
    model = make("vae")
    save_pretrained(make("vae", norm_num_groups=4), tmp_path, max_shard_bytes=2**14)
    files = set(
        json.loads((tmp_path / f"{stem}.index.json").read_text())["weight_map"].values()
    )
    assert len(files) > 1
    assert all(
        re.fullmatch(r"diffusion_pytorch_model-\d{5}-of-\d{5}\.safetensors", file)
        for file in files
    )
    (tmp_path / SINGLE).write_bytes(b"of something else")
    save_pretrained(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", stem, SINGLE}
    assert load_pretrained(tmp_path).config.norm_num_groups == 8
    assert (tmp_path / SINGLE).read_bytes() == b"of something else"
    with pytest.raises(
        ValueError,
        match="_class_name='AutoencoderKL' is not known, only UNet2DConditionModel",
    ):
        load_pretrained(
            tmp_path, family=(models.UNet2DConditionConfig, models.UNet2DConditionModel)
        )
    (tmp_path / stem).rename(tmp_path / SINGLE)
    message = (
        "neither diffusion_pytorch_model.safetensors nor .* rename it to "
        "diffusion_pytorch_model"
    )
    raised(FileNotFoundError, load_pretrained, tmp_path, match=message)
    (tmp_path / SINGLE).rename(tmp_path / "diffusion_pytorch_model.bin")
    raised(ValueError, load_pretrained, tmp_path, match=r"only as a pickle.* diffusers")


def test_neither_loading_nor_saving_holds_the_model(tmp_path):
    """The host reads and writes some slices at a time, beside the arrays, which may lie
    in its memory."""
    big = make("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    save_pretrained(big, tmp_path / "old")
    size = (tmp_path / "old" / SINGLE).stat().st_size
    mesh = rx.make_mesh(fsdp=8)
    tracemalloc.start()
    model = load_pretrained(tmp_path / "old", mesh)
    held, loading = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    save_pretrained(model, tmp_path / "new")
    saving = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert loading < 0.2 * size
    assert saving < 0.2 * size


def test_two_processes(tmp_path):
    arrays = make_arrays("gpt2")
    write(tmp_path / "old", "gpt2", arrays, num_files=2)
    program = pathlib.Path(__file__).with_name("_two_process_pretrained.py")
    processes = harness.start_loopback(
        tmp_path, program=program, num_devices=2, JAX_ENABLE_X64=0
    )
    assert processes.leave(120)[0] == [0, 0], processes.text()
    for form in ("list", "stacked"):
        assert_same(load_file(tmp_path / form / SINGLE), arrays)
        results = [
            json.loads((tmp_path / f"{form}{i}.json").read_text()) for i in range(2)
        ]
        for result in results:
            assert (
                result["read"]
                == result["held"]
                < 0.6 * sum(x.nbytes for x in arrays.values())
            )
    errors = [(tmp_path / f"error{i}.txt").read_text() for i in range(2)]
    assert "FileExistsError" in errors[0]
    assert "RuntimeError('save_pretrained: process 0 could not write" in errors[1]


# The card.


def test_a_card_of_a_history_is_read_by_the_hub(tmp_path):
    rows = tuple(
        {"step": step, "train/loss": 1.0 / step, "train/epoch": step / 10}
        for step in (10, 20)
    )
    history = rx.types.History(rows, ({"step": 15, "eval/loss": 0.5},))
    model = make("llama", num_hidden_layers=1)
    padded = models.pad_vocabulary(model, 5)
    mesh = rx.make_mesh(tensor=2)
    padded = jax.tree.map(
        lambda x: jax.device_put(x, replicated(mesh)) if eqx.is_array(x) else x, padded
    )
    save_pretrained(padded, tmp_path / "small", card=history)
    card = ModelCard.load(tmp_path / "small" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "tags": ["redco_eqx"],
    }
    num_parameters = sum(x.size for x in to_arrays(model).values())
    versions = (
        f"redco_eqx {importlib.metadata.version('redco_eqx')} and jax {jax.__version__}"
    )
    title, about, *table = [line for line in card.text.splitlines() if line]
    assert title == "# small"
    assert about == (
        f"`LlamaForCausalLM`, {num_parameters:,} parameters in float32, trained to "
        f"step 20 with {versions} on data=4 x fsdp=1 x tensor=2."
    )
    cells = [[x.strip(" `") for x in line.strip("|").split("|")] for line in table[2:]]
    assert cells == [
        ["train/loss", "20", "0.05"],
        ["train/epoch", "20", "2"],
        ["eval/loss", "15", "0.5"],
    ]
    save_pretrained(model, tmp_path / "small", card="Mine")
    save_pretrained(model, tmp_path / "small")
    assert (tmp_path / "small" / "README.md").read_text() == "Mine"
    save_pretrained(make("vae"), tmp_path, card=rx.types.History())  # without numbers
    assert (
        ModelCard.load(tmp_path / "README.md").data.to_dict()["library_name"]
        == "diffusers"
    )
