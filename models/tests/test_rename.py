"""`rename`: weights whose keys begin otherwise than the model's, and the error that
names the beginning."""

import re

import numpy as np
import pytest
from checkpoint_files import INDEX, SINGLE, make_arrays, write
from fit_helpers import assert_identical, raised
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, make

from redco_eqx._base.tree import to_arrays
from redco_eqx_models import load_pretrained, save_pretrained

BEGINNINGS = [
    "_orig_mod.",
    "module.",
    "language_model.",
    "model.language_model.",
    "module._orig_mod.",
]


def begin_with(directory, beginning, **more):
    """Give all keys of a directory this beginning, beside more arrays."""
    (file,) = directory.glob("*.safetensors")
    arrays = {beginning + key: x for key, x in load_file(file).items()}
    save_file(arrays | more, file, metadata={"format": "pt"})
    return directory


def remedy(error):
    """The argument that a message states."""
    (text,) = re.findall(r"Pass rename=(\{.*\})\.$", str(error))
    return eval(text, {})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_remedy_of_the_message_loads_every_family(tmp_path, name):
    model = make(name)
    save_pretrained(model, tmp_path)
    begin_with(tmp_path, "_orig_mod.")
    match = (
        r"keys begin with '_orig_mod\.', as torch\.compile writes them\. Pass rename="
    )
    error = raised(ValueError, load_pretrained, tmp_path, match=match)
    assert remedy(error) == {"_orig_mod.": ""}
    assert_identical(
        to_arrays(load_pretrained(tmp_path, rename=remedy(error))), to_arrays(model)
    )


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_load_that_renames_is_one_of_the_plain_files(tmp_path, beginning, stacked):
    plain = load_pretrained(
        write(tmp_path, "llama", make_arrays("llama")), stacked=stacked
    )
    begin_with(tmp_path, beginning)
    error = raised(
        ValueError,
        load_pretrained,
        tmp_path,
        stacked=stacked,
        match=re.escape(f"begin with {beginning!r}"),
    )
    # It is not to blame.
    assert "config.json" not in str(error).replace(str(tmp_path), "")
    assert remedy(error) == {beginning: ""}
    found = load_pretrained(tmp_path, stacked=stacked, rename={beginning: ""})
    assert_identical(to_arrays(found), to_arrays(plain))


def test_the_bare_model_without_its_own_beginning_keeps_its_remedy(tmp_path):
    """Files of the bare model load without `rename`, and so does the remedy for a
    wrapped one."""
    arrays = {
        key.removeprefix("transformer."): x for key, x in make_arrays("gpt2").items()
    }
    plain = load_pretrained(write(tmp_path, "gpt2", arrays))
    begin_with(tmp_path, "module.")
    error = raised(
        ValueError,
        load_pretrained,
        tmp_path,
        match=r"as DataParallel writes them\. Pass rename=",
    )
    assert_identical(
        to_arrays(load_pretrained(tmp_path, rename=remedy(error))), to_arrays(plain)
    )


def test_a_part_of_a_larger_model(tmp_path):
    plain = load_pretrained(write(tmp_path, "llama", make_arrays("llama")))
    tower = {
        f"vision_tower.layers.{i}.{x}.weight": np.ones((2, 2), "f4")
        for i in range(9)
        for x in "ab"
    }
    tower |= {
        "vision_tower.norm.weight": np.ones(2, "f4"),
        "projector": np.ones(2, "f4"),
    }
    begin_with(tmp_path, "language_model.", **tower)
    error = raised(
        ValueError,
        load_pretrained,
        tmp_path,
        match=r"begin with 'language_model\.'\. Pass rename=",
    )
    assert remedy(error) == {
        "language_model.": "",
        "projector": None,
        "vision_tower.": None,
    }
    assert_identical(
        to_arrays(load_pretrained(tmp_path, rename=remedy(error))), to_arrays(plain)
    )


def test_several_files_and_a_new_beginning(tmp_path):
    arrays = make_arrays("gpt2")
    plain = load_pretrained(write(tmp_path, "gpt2", arrays))
    (tmp_path / SINGLE).unlink()
    other = {key.replace("transformer.", "gpt.", 1): x for key, x in arrays.items()}
    write(tmp_path, "gpt2", other, num_files=2)
    assert (tmp_path / INDEX).exists()
    found = load_pretrained(tmp_path, rename={"gpt.": "transformer."})
    assert_identical(to_arrays(found), to_arrays(plain))


def test_the_longer_beginning_counts(tmp_path):
    arrays = make_arrays("gpt2")
    plain = load_pretrained(write(tmp_path, "gpt2", arrays))
    write(tmp_path, "gpt2", {**arrays, "transformer.extra.weight": np.ones(2, "f4")})
    rename = {"transformer.": "transformer.", "transformer.extra.": None}
    assert_identical(
        to_arrays(load_pretrained(tmp_path, rename=rename)), to_arrays(plain)
    )


TABLE, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
BAD = {
    "matches nothing": (
        {"module.": ""},
        r"rename has 'module\.', but no key in .* begins with it",
    ),
    "hidden by a longer one": (
        {"transformer.": "transformer.", "t": "t"},
        r"rename has 't', but no key in .* begin with a longer one",
    ),
    "two keys become one": (
        {TABLE: POSITIONS},
        rf"makes .* and .* one key, {POSITIONS}\. Leave one",
    ),
}


@pytest.mark.parametrize(("rename", "message"), BAD.values(), ids=list(BAD))
def test_a_bad_rename_is_refused_by_name(tmp_path, rename, message):
    write(tmp_path, "gpt2", make_arrays("gpt2"))
    raised(ValueError, load_pretrained, tmp_path, rename=rename, match=message)


def test_no_hint_without_a_common_beginning(tmp_path):
    arrays = {
        f"{chr(97 + i % 26)}{i}": x for i, x in enumerate(make_arrays("gpt2").values())
    }
    write(tmp_path, "gpt2", arrays)
    error = raised(ValueError, load_pretrained, tmp_path)
    assert "rename" not in str(error)
