"""Checkpoints that `load_pretrained` refuses, and its messages."""

import json
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_encoder_models
import test_models
import test_unet_and_autoencoder
from checkpoint_files import INDEX, SINGLE, SIZE, make_arrays, write
from jax.sharding import PartitionSpec as P

from redco_eqx._base.tree import is_array
from redco_eqx.models import load_pretrained, save_pretrained
from redco_eqx.models._families.registry import read_family
from redco_eqx.models._files.safetensors import Stored

# Each takes the directory of a whole GPT-2 in one file, and its arrays, and damages them.


def edit_json(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def text(name, content):
    return lambda directory, arrays: (directory / name).write_text(content)


def entries(**entries):
    return lambda directory, arrays: edit_json(directory / "config.json", **entries)


def arrays_with(**changes):
    return lambda directory, arrays: write(directory, "gpt2", {**arrays, **changes})


def only_index(content):
    def apply(directory, arrays):
        (directory / SINGLE).unlink()
        (directory / INDEX).write_text(content)

    return apply


def without_two_keys(directory, arrays):
    del arrays["transformer.wpe.weight"], arrays["transformer.h.1.attn.c_attn.bias"]
    write(directory, "gpt2", arrays)


def one_key(directory, arrays):
    write(directory, "gpt2", {"transformer.h.1.ln_1.bias": arrays["transformer.h.1.ln_1.bias"]})


def position_table_twice(directory, arrays):
    write(directory, "gpt2", {**arrays, "wpe.weight": arrays["transformer.wpe.weight"]})


def another_head(directory, arrays):
    head = arrays["transformer.wte.weight"].copy()
    head[-1, -1] += 1
    write(directory, "gpt2", {**arrays, "lm_head.weight": head})


def cut_short(directory, arrays):
    (directory / SINGLE).write_bytes((directory / SINGLE).read_bytes()[:-100])


def corrupted_header(directory, arrays):
    whole = bytearray((directory / SINGLE).read_bytes())
    whole[20:40] = b"\xff" * 20
    (directory / SINGLE).write_bytes(whole)


def absent_file(directory, arrays):
    write(directory, "gpt2", arrays, num_files=3)
    (directory / SINGLE).unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()


def key_in_another_file(directory, arrays):
    write(directory, "gpt2", arrays, num_files=3)
    (directory / SINGLE).unlink()
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    assert weight_map["transformer.wte.weight"] == "model-00001-of-00003.safetensors"
    weight_map["transformer.wte.weight"] = "model-00002-of-00003.safetensors"
    edit_json(directory / INDEX, weight_map=weight_map)


NOT_WHOLE = r"model\.safetensors is not a whole safetensors file"
DAMAGES: dict[str, tuple[Any, type[Exception], str]] = {
    "no directory": (
        lambda directory, arrays: directory.rename(directory.with_name("elsewhere")),
        FileNotFoundError,
        "is not a directory here.*snapshot_download",
    ),
    "no config": (
        lambda directory, arrays: (directory / "config.json").unlink(),
        FileNotFoundError,
        "has no config.json",
    ),
    "config not JSON": (
        text("config.json", "{'model_type': 'gpt2'}"),
        ValueError,
        r"config\.json is not JSON: .*line 1",
    ),
    "config not an object": (
        text("config.json", "[1]"),
        ValueError,
        r"config\.json must be a JSON object, but is a list",
    ),
    "unknown model_type": (
        entries(model_type="bloom"),
        ValueError,
        r"model_type='bloom' is not known, only .*gpt2.*qwen3.*\. Pass family=",
    ),
    "model_type of which parts are lacking": (
        entries(model_type="gemma2"),
        ValueError,
        r"model_type='gemma2' is not supported: it needs a window in every second layer.*\. Pass family=",
    ),
    "experts": (
        entries(model_type="mixtral"),
        ValueError,
        r"model_type='mixtral' is not supported: it needs routers and experts",
    ),
    "model_type not a string": (
        entries(model_type=["gpt2"]),
        ValueError,
        r"model_type=\['gpt2'\] is not known",
    ),
    "unsupported entry": (
        entries(scale_attn_by_inverse_layer_idx=True),
        ValueError,
        "scale_attn_by_inverse_layer_idx=True is not supported",
    ),
    "quantized": (entries(quantization_config={"bits": 4}), ValueError, "quantization_config is not supported"),
    "no weights": (
        lambda directory, arrays: (directory / SINGLE).unlink(),
        FileNotFoundError,
        r"neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "only a pickle": (
        lambda directory, arrays: (directory / SINGLE).rename(directory / "pytorch_model.bin"),
        ValueError,
        r"only as a pickle, pytorch_model\.bin.*could run any code",
    ),
    "missing keys": (
        without_two_keys,
        ValueError,
        r"GPT2LMHeadModel.*\n  2 missing: transformer\.wpe\.weight \[8, 64\], "
        r"transformer\.h\.1\.attn\.c_attn\.bias \[192\]$",
    ),
    "many missing keys": (
        one_key,
        ValueError,
        r"\n  27 missing: ([\w.]+ \[[\d, ]+\], ){10}and 17 more$",
    ),
    "unexpected keys": (
        arrays_with(**{"adapter.weight": np.zeros((2, 3), np.float32)}),
        ValueError,
        r"\n  1 unexpected: adapter\.weight \[2, 3\]$",
    ),
    **{
        f"{number} layers": (
            entries(n_layer=number),
            ValueError,
            rf"config\.json in .* it has {number} layers at transformer\.h, the files have 2\. Take both from",
        )
        for number in (1, 3, 10**9)
    },
    "no layer in the files": (
        lambda directory, arrays: write(
            directory, "gpt2", {"transformer.wte.weight": arrays["transformer.wte.weight"]}
        ),
        ValueError,
        r"it has 2 layers at transformer\.h, the files have 0",
    ),
    "a size beyond all": (
        entries(vocab_size=10**12),
        ValueError,
        r"config\.json: vocab_size=1000000000000, but it must be positive, and less than 2\*\*30",
    ),
    "a large size": (
        entries(n_embd=2**29),
        ValueError,
        r"c_attn\.bias \[192\] instead of \[1610612736\]",
    ),
    "labels beyond all": (
        lambda directory, arrays: edit_json(directory / "config.json", model_type="vit", num_labels=10**9),
        ValueError,
        r"num_labels=1000000000, but it must be an integer from 1 to 2\*\*20",
    ),
    "wrong shape": (
        arrays_with(**{"transformer.h.0.attn.c_attn.weight": np.zeros((3 * SIZE, SIZE), np.float32)}),
        ValueError,
        r"\n  1 of a wrong shape: transformer\.h\.0\.attn\.c_attn\.weight \[192, 64\] instead "
        r"of \[64, 192\] in model\.safetensors$",
    ),
    "integers": (
        arrays_with(**{"transformer.wpe.weight": np.zeros((8, SIZE), np.int8)}),
        ValueError,
        r"\n  1 of an unsupported dtype: transformer\.wpe\.weight I8$",
    ),
    "float64": (
        arrays_with(**{"transformer.wpe.weight": np.zeros((8, SIZE))}),
        ValueError,
        r"transformer\.wpe\.weight is float64 in .*dtype=jnp\.float32",
    ),
    "twice": (
        position_table_twice,
        ValueError,
        r"1 there twice: transformer\.wpe\.weight as (transformer\.)?wpe\.weight and as ",
    ),
    "a tied head that differs": (
        another_head,
        ValueError,
        r"config\.json ties it to: lm_head\.weight and transformer\.wte\.weight$",
    ),
    "cut short": (cut_short, ValueError, rf"{NOT_WHOLE}, \d+ bytes"),
    "empty": (
        lambda directory, arrays: (directory / SINGLE).write_bytes(b""),
        ValueError,
        f"{NOT_WHOLE}, 0 bytes",
    ),
    "corrupted header": (corrupted_header, ValueError, NOT_WHOLE),
    "deeply nested config": (
        text("config.json", "[" * 100_000),
        ValueError,
        r"config\.json is not JSON",
    ),
    "deeply nested index": (only_index("[" * 100_000), ValueError, r"index\.json is not JSON"),
    "end tokens in words": (
        text("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ValueError,
        r"generation_config\.json: eos_token_id=\['</s>'\], but it must be: int or list of int or null",
    ),
    "only a GGUF": (
        lambda directory, arrays: (directory / SINGLE).rename(directory / "gpt2.Q4_K_M.gguf"),
        ValueError,
        r"only as gpt2\.Q4_K_M\.gguf, a format of llama\.cpp",
    ),
    "only a variant": (
        lambda directory, arrays: (directory / SINGLE).rename(directory / "model.fp16.safetensors"),
        FileNotFoundError,
        r"but model\.fp16\.safetensors\. If that is the variant you want, rename it to model\.safetensors",
    ),
    "index names an absent file": (
        absent_file,
        FileNotFoundError,
        r"index\.json names model-00002-of-00003\.safetensors, but there is no",
    ),
    "index names a key that is not there": (
        key_in_another_file,
        ValueError,
        r"without them: transformer\.wte\.weight \(model-00002-of-00003\.safetensors\)",
    ),
    "index leads out of the directory": (
        only_index(json.dumps({"weight_map": {"a": "../b.safetensors"}})),
        ValueError,
        r"index\.json puts a into '\.\./b\.safetensors', which is not the name of a file",
    ),
    "index without a map": (only_index("{}"), ValueError, r"index\.json has no weight_map"),
    "index not JSON": (only_index("{"), ValueError, r"index\.json is not JSON"),
}


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", DAMAGES)
def test_bad_checkpoints(tmp_path, name, stacked):
    arrays, directory = make_arrays("gpt2"), tmp_path / "gpt2"
    apply, error, message = DAMAGES[name]
    apply(write(directory, "gpt2", arrays), arrays)
    with pytest.raises(error, match=f"(?s){message}"):
        load_pretrained(directory, stacked=stacked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": jnp.int32}, "dtype=int32, but it must be one of float16, bfloat16"),
        ({"dtype": "halves"}, "dtype='halves' is not a dtype"),
        ({"dtype": np.float64}, "dtype=float64 needs"),
        ({"overrides": [("transformer.h.9.*", P())]}, "matches no array"),
        ({"overrides": [("transformer.wte.weight", P("rows"))]}, "axis: rows .* is not found in mesh"),
    ],
)
def test_bad_arguments_before_anything_is_read(tmp_path, arguments, message, monkeypatch):
    write(tmp_path, "gpt2", make_arrays("gpt2"))
    monkeypatch.setattr(Stored, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path, **arguments)


def layers_of(raw):
    """`[(where, entry)]` of the entries of a configuration, and its parts, that number layers."""
    parts = [(raw, name) for name in raw if "layer" in name and type(raw[name]) is int]
    return parts + [found for part in raw.values() if isinstance(part, dict) for found in layers_of(part)]


FAMILIES = {
    **{name: test_models.CONFIGS[name] for name in ("gptj", "opt_350m", "llama", "smollm3")},
    **{
        name: test_encoder_models.CONFIGS[name]
        for name in ("t5", "bart", "bert_masked", "vit_labels", "vit_gpt2")
    },
    "clip": {**test_encoder_models.CONFIGS["bert"], "model_type": "clip_text_model"},
    "unet": {**test_unet_and_autoencoder.UNET, "transformer_layers_per_block": 1},
    "vae": {**test_unet_and_autoencoder.VAE, "layers_per_block": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_number_of_layers_that_the_files_contradict(tmp_path, name):
    config, kind = read_family(json.loads(json.dumps(FAMILIES[name])))
    model = eqx.filter_eval_shape(lambda key: kind(config, key=key), jax.random.key(0))
    save_pretrained(jax.tree.map(lambda x: jnp.zeros(x.shape) if is_array(x) else x, model), tmp_path)
    load_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    named = [entry for _, entry in layers_of(json.loads(text)) if entry != "no_rope_layer_interval"]
    assert named
    for i, entry in enumerate(named):
        for number in (7, 10**9):
            raw = json.loads(text)
            where = [where for where, entry in layers_of(raw) if entry != "no_rope_layer_interval"][i]
            where[entry] = number
            (tmp_path / "config.json").write_text(json.dumps(raw))
            with pytest.raises(
                ValueError, match=rf"config\.json in .*{number}( layers at|, the files have at most)"
            ):
                load_pretrained(tmp_path)


def test_without_safetensors(tmp_path, monkeypatch):
    write(tmp_path, "gpt2", make_arrays("gpt2"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "redco_eqx\[hf\]"'):
        load_pretrained(tmp_path)
