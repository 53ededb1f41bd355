"""LoRA: branches that start at nothing, merge into what they were beside, are all that
is trained, and alone in their files."""

import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import edit_json
from fit_helpers import assert_identical, raised
from helpers import assert_same_layout
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from tiny_models import make

import redco_eqx as rx
import redco_eqx_models as models

KEY = jax.random.key(0)
TOKENS = jnp.arange(24).reshape(2, 12)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def llama(stacked: bool) -> Any:
    return make("llama", stacked=stacked, hidden_size=16, head_dim=2)


def adapt(model: Any, mesh: Any, targets: Any = ("q_proj", "v_proj")) -> Any:
    adapted = models.add_lora(model, targets=targets, rank=4, scale=2.0, key=KEY)
    return eqx.filter_shard(adapted, rx.shard_rules(adapted, mesh))


logits_of = eqx.filter_jit(lambda model: model(TOKENS))


def with_noise(adapted: Any) -> Any:
    """Branches as after some training."""
    state = rx.init_state(adapted, key=KEY, trainable=models.lora_spec(adapted))
    noise = {
        path: x + 0.1 * jax.random.normal(KEY, x.shape)
        for path, x in state.params.items()
    }
    return state.build(noise, {})


def test_a_branch_starts_at_nothing_and_merges_into_its_base(tmp_path):
    model = llama(True)
    mesh = rx.make_mesh(tensor=4)
    expected = logits_of(model)
    adapted = adapt(model, mesh)
    np.testing.assert_allclose(logits_of(adapted), expected, atol=1e-6)

    trained = with_noise(adapted)
    logits = logits_of(trained)
    assert np.abs(logits - expected).max() > 1e-2, "the branches must matter by now"
    merged = eqx.filter_jit(models.merge_lora)(trained)
    np.testing.assert_allclose(logits_of(merged), logits, atol=1e-5)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, model)

    with pytest.raises(
        ValueError,
        match=r"q_proj\.lora_a.*\n.*q_proj\.weight(.|\n)*merge_lora\(model\)",
    ):
        models.save_pretrained(trained, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    models.save_pretrained(merged, tmp_path / "new")
    assert_identical(
        rx.to_arrays(models.load_pretrained(tmp_path / "new", stacked=True)),
        rx.to_arrays(merged),
    )


def test_branches_wider_than_their_base_keep_its_dtype():
    """As peft makes them, in a scan over layers too."""
    base = make("llama", stacked=True, dtype=jnp.bfloat16, hidden_size=16, head_dim=2)
    adapted = models.add_lora(base, targets=TARGETS, rank=4, scale=2.0, key=KEY)
    wide = jax.tree.map(
        lambda x, one: 0.1 + x.astype("f4") if one else x,
        adapted,
        models.lora_spec(adapted),
    )
    logits, exact = logits_of(wide), logits_of(rx.cast(wide, jnp.float32))
    assert logits.dtype == jnp.bfloat16
    assert np.abs(logits - exact).max() < 0.1 * np.abs(logits_of(base) - exact).max()


def test_only_the_branches_are_trained_and_kept_by_the_optimizer():
    adapted = adapt(llama(True), rx.make_mesh(tensor=2), targets=TARGETS)
    state = rx.init_state(
        adapted, optax.adam(1e-2), key=KEY, trainable=models.lora_spec(adapted)
    )
    assert len(state.params) == 2 * len(TARGETS)
    assert all(path.endswith(("lora_a", "lora_b")) for path in state.params)
    assert len([x for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]) == 2 * len(
        state.params
    )


def test_branches_are_split_with_their_bases():
    adapted = adapt(llama(False), rx.make_mesh(tensor=4), targets=("q_proj", "o_proj"))
    found = {path: x.sharding.spec for path, x in rx.to_arrays(adapted).items()}
    column, row, whole = P("tensor"), P(None, "tensor"), P()
    for name, specs in (
        ("q_proj", (column, whole, column)),
        ("o_proj", (row, row, whole)),
    ):
        where = f"model.layers.0.self_attn.{name}."
        assert (
            tuple(found[where + x] for x in ("base.weight", "lora_a", "lora_b"))
            == specs
        )


def test_projections_are_meant_by_name_or_path():
    add: Any = functools.partial(models.add_lora, llama(False), scale=1.0, key=KEY)
    adapted = add(targets=["model.layers.1.self_attn.q_proj"], rank=2)
    branches = [path for path in rx.to_arrays(adapted) if "lora" in path]
    assert branches == [f"model.layers.1.self_attn.q_proj.lora_{x}" for x in "ab"]
    with pytest.raises(
        ValueError, match=r"no projections named \['c_attn'\], only down_proj, .*v_proj"
    ):
        add(targets=("q_proj", "c_attn"), rank=4)
    raised(
        ValueError,
        models.add_lora,
        make("gpt2"),
        targets=["c_attn"],
        rank=4,
        scale=1.0,
        key=KEY,
        match="GPT2LMHeadModel has no layers .* Conv1D",
    )
    raised(TypeError, add, targets="q_proj", rank=4, match="targets='q_proj'.* list of")
    raised(
        ValueError,
        add,
        targets=("q_proj",),
        rank=0,
        match="rank=0, but it must be positive",
    )
    for family, name in (("opt_125m", "q_proj"), ("llama", "lm_head")):
        noisy = with_noise(
            models.add_lora(make(family), targets=[name], rank=2, scale=2.0, key=KEY)
        )
        # A merged weight is rounded once more, by 1e-7 of a logit; the branches change
        # logits by 1e-3 or more.
        np.testing.assert_allclose(
            logits_of(noisy), logits_of(models.merge_lora(noisy)), atol=1e-6
        )


# Files


def saved(directory: Any, stacked: bool = False) -> Any:
    trained = with_noise(
        adapt(llama(stacked), rx.make_mesh(tensor=2), targets=("q_proj", "down_proj"))
    )
    models.save_lora(trained, directory, base="base")
    return trained


@pytest.mark.parametrize("stacked", [False, True])
def test_branches_come_back_bit_for_bit_on_any_mesh(stacked, tmp_path):
    """Into layers that are stacked, whether those that were written were or not."""
    written = saved(tmp_path, stacked)
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    base = eqx.filter_shard(llama(True), rx.shard_rules(llama(True), mesh))
    found = models.load_lora(base, tmp_path)
    if stacked:
        assert_identical(rx.to_arrays(found), rx.to_arrays(written))
        like = rx.to_arrays(adapt(llama(True), mesh, targets=("q_proj", "down_proj")))
        assert_same_layout(rx.to_arrays(found), like)
    models.save_lora(found, tmp_path / "again", base="base")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (
        "base",
        "CAUSAL_LM",
    )
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (
            tmp_path / name
        ).read_bytes()


def edit(**entries):
    return lambda directory: edit_json(directory / CONFIG, **entries)


def rename(old, new):
    def change(directory):
        arrays = load_file(directory / WEIGHTS)
        save_file(
            {key.replace(old, new): x for key, x in arrays.items()}, directory / WEIGHTS
        )

    return change


# A change of the files, and the message.
UNFIT = [
    pytest.param(
        edit(bias="all"),
        "bias='all' is not supported, only 'none'.*merge_and_unload",
        id="bias-all",
    ),
    pytest.param(
        edit(init_lora_weights="loftq"),
        "init_lora_weights='loftq' is not supported, only True or",
        id="init_lora_weights-loftq",
    ),
    pytest.param(
        edit(use_rslora="yes"),
        "use_rslora='yes' is not supported, only True",
        id="use_rslora-str",
    ),
    pytest.param(
        edit(of_next_year={"x": 1}),
        "of_next_year={'x': 1} is not supported. The logits would be",
        id="unknown_entry",
    ),
    pytest.param(edit(r=0), "r=0, but it must be a positive integer", id="r-zero"),
    pytest.param(edit(r=2.5), "r=2.5, but it must be a positive integer", id="r-float"),
    pytest.param(
        edit(lora_alpha="8"),
        "lora_alpha='8', but it must be a positive number",
        id="lora_alpha-str",
    ),
    pytest.param(
        edit(r=2),
        r"lora_A\.weight is float32\[4, 16\] instead of \[2, 16\]",
        id="r-of_another_size",
    ),
    pytest.param(
        rename("q_proj", "w_q"),
        r"no projections named \['model\.layers\.0\.self_attn\.w_q",
        id="unknown_projection",
    ),
    pytest.param(
        rename("lora_A", "lora_C"),
        "other keys than LoRA's: base_model",
        id="unknown_keys",
    ),
    pytest.param(
        rename("layers.1.mlp", "layers.7.mlp"),
        r"layers\.[17]\.mlp\.down_proj",
        id="unknown_layer",
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of an adapter. Not to be changed."""
    directory = tmp_path_factory.mktemp("whole")
    saved(directory)
    return directory


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_files_that_do_not_fit_are_refused(change, message, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    raised(ValueError, models.load_lora, llama(False), tmp_path, match=message)


def test_files_without_the_configuration_are_refused(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / CONFIG).unlink()
    message = "has no adapter_config"
    raised(FileNotFoundError, models.load_lora, llama(False), tmp_path, match=message)


def test_what_is_not_of_one_kind_is_not_saved(tmp_path):
    with pytest.raises(
        ValueError, match="of one rank and scale, but there are: none at all"
    ):
        models.save_lora(llama(False), tmp_path / "new")
    mixed = models.add_lora(
        saved(tmp_path), targets=["up_proj"], rank=2, scale=2.0, key=KEY
    )
    with pytest.raises(
        ValueError, match=r"rank 2 with scale 2\.0, rank 4 with scale 2\.0"
    ):
        models.save_lora(mixed, tmp_path / "new")
    joined = models.add_lora(
        make("phi3"), targets=["q_proj"], rank=2, scale=2.0, key=KEY
    )
    with pytest.raises(
        ValueError, match=r"q_proj have no place in peft's format, .* parts of qkv_proj"
    ):
        models.save_lora(joined, tmp_path / "new")
    assert not (tmp_path / "new").exists()
