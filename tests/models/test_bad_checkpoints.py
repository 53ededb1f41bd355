"""What `load_pretrained` refuses, and how it says so."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import CONFIGS, INDEX, SINGLE, SIZE, make_arrays, write
from jax.sharding import PartitionSpec as P

from redco_eqx.models import load_pretrained


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
