"""Checkpoints that `load_pretrained` refuses, and its messages."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import INDEX, SINGLE, SIZE, edit_json, make_arrays, write
from fit_helpers import raised
from jax.sharding import PartitionSpec as P

from redco_eqx_models import load_pretrained
from redco_eqx_models._families.registry import LACKING as LACKS
from redco_eqx_models._files.safetensors import Stored

# Each takes the directory of a whole GPT-2 in one file, and its arrays, and damages
# them.


def text(name, content):
    return lambda directory, arrays: (directory / name).write_text(content)


def entries(**entries):
    return lambda directory, arrays: edit_json(directory / "config.json", **entries)


def renamed(name):
    return lambda directory, arrays: (directory / SINGLE).rename(directory / name)


def removed(name):
    return lambda directory, arrays: (directory / name).unlink()


def of_bytes(change):
    return lambda directory, arrays: (directory / SINGLE).write_bytes(
        change((directory / SINGLE).read_bytes())
    )


def of_arrays(change):
    return lambda directory, arrays: write(directory, "gpt2", change(arrays))


def arrays_with(key, x):
    return of_arrays(lambda arrays: {**arrays, key: x})


def only_index(content):
    return lambda directory, arrays: (
        (directory / SINGLE).rename(directory / INDEX).write_text(content)
    )


def in_three(change):
    """As three files, of which the second is given, and the index."""

    def apply(directory, arrays):
        write(directory, "gpt2", arrays, num_files=3)
        (directory / SINGLE).unlink()
        change(directory / "model-00002-of-00003.safetensors", directory / INDEX)

    return apply


def table_in(file, index):
    weight_map = json.loads(index.read_text())["weight_map"]
    assert weight_map[TABLE] == "model-00001-of-00003.safetensors"
    edit_json(index, weight_map={**weight_map, TABLE: file.name})


def another_head(arrays):
    head = arrays[TABLE].copy()
    head[-1, -1] += 1
    return {**arrays, "lm_head.weight": head}


TABLE = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
BIAS = "transformer.h.1.ln_1.bias"
TWO = {POSITIONS, "transformer.h.1.attn.c_attn.bias"}
LAYERS = r"config\.json in .* it has {} layers at transformer\.h, the files have {}"
INDEX_OUTSIDE = json.dumps({"weight_map": {"a": "../b.safetensors"}})
# A damage and its message.
DAMAGES = [
    # The configuration.
    pytest.param(
        text("config.json", "{'model_type': 'gpt2'}"),
        r"config\.json is not JSON: .*line 1",
        id="config-not_json",
    ),
    pytest.param(
        text("config.json", "[1]"),
        r"config\.json must be a JSON object, but is a list",
        id="config-list",
    ),
    pytest.param(
        text("config.json", "[" * 100_000),
        r"config\.json is not JSON",
        id="config-too_deep",
    ),
    pytest.param(
        entries(model_type="bloom"),
        r"model_type='bloom' is not known, only .*gpt2.*qwen3.*\. Pass family=",
        id="model_type-unknown",
    ),
    *(
        pytest.param(
            entries(model_type=kind),
            f"'{kind}' is not supported: it needs .*family=",
            id=f"model_type-{kind}",
        )
        for kind in LACKS
    ),
    pytest.param(
        entries(model_type=["gpt2"]),
        r"model_type=\['gpt2'\] is not known",
        id="model_type-list",
    ),
    pytest.param(
        entries(quantization_config={"bits": 4}),
        "quantization_config is not supported",
        id="quantization_config",
    ),
    pytest.param(
        entries(n_layer=1),
        LAYERS.format(1, 2) + r"\. Take both from",
        id="n_layer-too_few",
    ),
    pytest.param(entries(n_layer=3), LAYERS.format(3, 2), id="n_layer-too_many"),
    pytest.param(
        of_arrays(lambda arrays: {TABLE: arrays[TABLE]}),
        LAYERS.format(2, 0),
        id="arrays-without_layers",
    ),
    pytest.param(
        entries(vocab_size=10**12),
        r"vocab_size=10*, but it must be positive, and less than 2\*\*30",
        id="vocab_size-too_large",
    ),
    pytest.param(
        entries(n_embd=2**29),
        r"c_attn\.bias \[192\] instead of \[1610612736\]",
        id="n_embd-too_large",
    ),
    pytest.param(
        entries(model_type="vit", num_labels=10**9),
        r"num_labels=10*, but it must be an integer from 1 to 2",
        id="num_labels-too_large",
    ),
    pytest.param(
        text("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        r"generation_config\.json: eos_token_id=\['</s>'\], but it must be: "
        r"int or list of int or null",
        id="eos_token_id-str",
    ),
    # The files.
    pytest.param(
        renamed("pytorch_model.bin"),
        r"only as a pickle, pytorch_model\.bin.*could run any code",
        id="only_a_pickle",
    ),
    pytest.param(
        renamed("gpt2.Q4_K_M.gguf"),
        r"only as gpt2\.Q4_K_M\.gguf, a format of llama\.cpp",
        id="only_gguf",
    ),
    pytest.param(
        of_bytes(lambda x: x[:-100]),
        r"model\.safetensors is not a whole safetensors file, \d+ bytes",
        id="file-cut",
    ),
    pytest.param(
        of_bytes(lambda x: b""),
        r"model\.safetensors is not a whole safetensors file, 0 bytes",
        id="file-empty",
    ),
    pytest.param(
        of_bytes(lambda x: x[:20] + b"\xff" * 20 + x[40:]),
        r"model\.safetensors is not a whole safetensors file",
        id="file-bad_header",
    ),
    pytest.param(
        in_three(table_in),
        r"without them: transformer\.wte\.weight \(model-00002-of-00003\.safetensors\)",
        id="index-wrong_file",
    ),
    pytest.param(
        only_index(INDEX_OUTSIDE),
        r"index\.json puts a into '\.\./b\.safetensors', which is not the name of",
        id="index-outside",
    ),
    pytest.param(only_index("{}"), r"index\.json has no weight_map", id="index-empty"),
    # The arrays.
    pytest.param(
        of_arrays(
            lambda arrays: {key: x for key, x in arrays.items() if key not in TWO}
        ),
        r"GPT2LMHeadModel.*\n  2 missing: transformer\.wpe\.weight \[8, 64\], "
        r"transformer\.h\.1\.attn\.c_attn\.bias \[192\]$",
        id="arrays-two_missing",
    ),
    pytest.param(
        of_arrays(lambda arrays: {BIAS: arrays[BIAS]}),
        r"\n  27 missing: ([\w.]+ \[[\d, ]+\], ){10}and 17 more$",
        id="arrays-many_missing",
    ),
    pytest.param(
        arrays_with("more.weight", np.zeros((2, 3), "f4")),
        r"\n  1 unexpected: more\.weight \[2, 3\]$",
        id="arrays-unexpected",
    ),
    pytest.param(
        arrays_with(
            "transformer.h.0.attn.c_attn.weight", np.zeros((3 * SIZE, SIZE), np.float32)
        ),
        r"\n  1 of a wrong shape: .*0\.attn\.c_attn\.weight \[192, 64\] "
        r"instead of \[64, 192\] in model\.safet",
        id="array-of_another_shape",
    ),
    pytest.param(
        arrays_with(POSITIONS, np.zeros((8, SIZE), "i1")),
        r"\n  1 of an unsupported dtype: .*\.wpe\.weight I8$",
        id="array-int8",
    ),
    pytest.param(
        arrays_with(POSITIONS, np.zeros((8, SIZE), "f8")),
        r"\.wpe\.weight is float64 in .*dtype=jnp\.float32",
        id="array-float64",
    ),
    pytest.param(
        of_arrays(lambda arrays: {**arrays, "wpe.weight": arrays[POSITIONS]}),
        r"1 there twice: transformer\.wpe\.weight as "
        r"(transformer\.)?wpe\.weight and as ",
        id="array-twice",
    ),
    pytest.param(
        of_arrays(another_head),
        r"config\.json ties it to: lm_head\.weight and transformer\.wte\.weight$",
        id="head-not_tied",
    ),
]
LACKING = [
    pytest.param(
        lambda directory, arrays: shutil.rmtree(directory),
        "is not a directory.*snapshot_download",
        id="directory",
    ),
    pytest.param(removed("config.json"), "has no config.json", id="config"),
    pytest.param(
        removed(SINGLE),
        r"neither model\.safetensors nor model\.safetensors\.index\.json",
        id="weights",
    ),
    pytest.param(
        renamed("model.fp16.safetensors"),
        r"but model\.fp16\.safetensors\. If .*rename it to model\.safetensors",
        id="name_of_the_file",
    ),
    pytest.param(
        in_three(lambda file, _: file.unlink()),
        r"index\.json names model-00002-of-00003\.safetensors, but",
        id="second_file",
    ),
]


def assert_load_raises(error, damage, message, directory, stacked):
    arrays = make_arrays("gpt2")
    damage(write(directory, "gpt2", arrays), arrays)
    raised(error, load_pretrained, directory, stacked=stacked, match=f"(?s){message}")


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage, message, tmp_path, stacked):
    assert_load_raises(ValueError, damage, message, tmp_path, stacked)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize(("damage", "message"), LACKING)
def test_a_checkpoint_that_lacks_a_file_is_refused(damage, message, tmp_path, stacked):
    directory = tmp_path / "model"
    assert_load_raises(FileNotFoundError, damage, message, directory, stacked)


BAD_ARGUMENTS = [
    pytest.param(
        {"dtype": jnp.int32},
        "dtype=int32, but it must be one of float16, bfloat16",
        id="dtype-int",
    ),
    pytest.param(
        {"dtype": "halves"}, "dtype='halves' is not a dtype", id="dtype-unknown"
    ),
    pytest.param({"dtype": np.float64}, "dtype=float64 needs", id="dtype-float64"),
    pytest.param(
        {"overrides": [("transformer.h.9.*", P())]},
        "matches no array",
        id="overrides-no_match",
    ),
    pytest.param(
        {"overrides": [("transformer.wte.weight", P("rows"))]},
        "axis: rows .* is not found in mesh",
        id="overrides-unknown_axis",
    ),
    pytest.param(
        {"pad_vocabulary_to": 0},
        "pad_vocabulary: multiple=0, but it must be positive",
        id="pad_vocabulary_to-zero",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_before_anything_is_read(
    arguments, message, tmp_path, monkeypatch
):
    write(tmp_path, "gpt2", make_arrays("gpt2"))
    monkeypatch.setattr(Stored, "read", lambda *_: pytest.fail("a weight was read"))
    raised(ValueError, load_pretrained, tmp_path, match=message, **arguments)
