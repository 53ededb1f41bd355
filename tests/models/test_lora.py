"""LoRA: branches that start at nothing, merge into what they were beside, are all that is trained, and alone in
their files."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical
from safetensors.numpy import load_file, save_file

import redco_eqx as rx
from redco_eqx import models

KEY = jax.random.key(0)
TOKENS = jnp.arange(24).reshape(2, 12) % 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def llama(stacked: bool) -> Any:
    config = models.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    return models.LlamaForCausalLM(config, stacked=stacked, key=KEY)


def gptj(stacked: bool) -> Any:
    config = models.GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=4, n_positions=16, rotary_dim=4)
    return models.GPTJForCausalLM(config, stacked=stacked, key=KEY)


def adapt(model: Any, mesh: Any, targets: Any = ("q_proj", "v_proj")) -> Any:
    adapted = models.add_lora(model, targets=targets, rank=4, scale=2.0, key=KEY)
    return eqx.filter_shard(adapted, rx.shard_rules(adapted, mesh))


@eqx.filter_jit
def logits_of(model: Any) -> Any:
    return model(TOKENS)


def with_noise(adapted: Any) -> Any:
    """Branches as after some training."""
    state = rx.init_state(adapted, key=KEY, trainable=models.lora_spec(adapted))
    noise = {path: x + 0.1 * jax.random.normal(KEY, x.shape) for path, x in state.params.items()}
    return state.build(noise, {})


@pytest.mark.parametrize(("make", "stacked"), [(llama, True), (gptj, False)])
def test_a_branch_starts_at_nothing_and_merges_into_its_base(make, stacked):
    model, mesh = make(stacked), rx.make_mesh(tensor=4)
    expected = logits_of(model)
    adapted = adapt(model, mesh)
    np.testing.assert_allclose(logits_of(adapted), expected, atol=1e-6)

    trained = with_noise(adapted)
    logits = logits_of(trained)
    assert np.abs(logits - expected).max() > 1e-2, "the branches must matter by now"
    merged = eqx.filter_jit(models.merge_lora)(trained)
    np.testing.assert_allclose(logits_of(merged), logits, atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert {p: x.shape for p, x in rx.to_arrays(merged).items()} == {
        p: x.shape for p, x in rx.to_arrays(model).items()
    }


def test_only_the_branches_are_trained_and_kept_by_the_optimizer():
    adapted = adapt(llama(True), rx.make_mesh(tensor=2), targets=TARGETS)
    optimizer = optax.adam(1e-2)
    state = rx.init_state(adapted, optimizer, key=KEY, trainable=models.lora_spec(adapted))
    assert len(state.params) == 2 * len(TARGETS)
    assert all(path.endswith(("lora_a", "lora_b")) for path in state.params)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]
    assert len(moments) == 2 * len(state.params)

    frozen = jax.tree.map(np.asarray, state.frozen)

    def loss_fn(model, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch)[:, :-1], batch[:, 1:]).mean()

    before = jax.tree.map(np.asarray, state.params)
    state, _ = rx.fit(
        state,
        list(np.tile(np.asarray(TOKENS), (8, 1))),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=8,
        num_steps=3,
        loggers=(),
    )
    assert all((np.asarray(state.frozen[path]) == x).all() for path, x in frozen.items())
    assert all((np.asarray(state.params[path]) != x).any() for path, x in before.items())


def test_branches_are_split_with_their_bases():
    adapted = adapt(llama(False), rx.make_mesh(tensor=4), targets=("q_proj", "o_proj"))
    specs = {
        path: tuple(x.sharding.spec) for path, x in rx.to_arrays(adapted).items() if ".0.self_attn" in path
    }
    names = {path.split("self_attn.")[1]: [entry or None for entry in spec] for path, spec in specs.items()}
    split = {name: "tensor" in spec and spec.index("tensor") for name, spec in names.items()}
    assert split["q_proj.base.weight"] == 0
    assert split["q_proj.lora_a"] is False
    assert split["q_proj.lora_b"] == 0
    assert split["o_proj.base.weight"] == 1
    assert split["o_proj.lora_a"] == 1
    assert split["o_proj.lora_b"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q_proj", "c_attn")}, r"no projections named \['c_attn'\], only down_proj, .*v_proj"),
        ({"rank": 0}, "rank=0, but it must be positive"),
    ],
)
def test_what_cannot_be_added_is_refused(options, message):
    arguments: Any = {"targets": ("q_proj",), "rank": 4, "scale": 1.0, **options}
    with pytest.raises(ValueError, match=message):
        models.add_lora(llama(False), **arguments, key=KEY)


def test_a_projection_can_be_meant_by_its_path():
    adapted = models.add_lora(
        llama(False), targets=["model.layers.1.self_attn.q_proj"], rank=2, scale=1.0, key=KEY
    )
    branches = [path for path in rx.to_arrays(adapted) if "lora" in path]
    assert branches == [f"model.layers.1.self_attn.q_proj.lora_{x}" for x in "ab"]


# Files


def saved(directory: Any, stacked: bool = False, mesh: Any = None) -> Any:
    trained = with_noise(adapt(llama(stacked), mesh or rx.make_mesh(tensor=2), targets=("q_proj", "down_proj")))
    models.save_lora(trained, directory, base="base")
    return trained


def test_the_files_are_those_that_peft_writes(tmp_path):
    trained = saved(tmp_path)
    arrays = load_file(tmp_path / WEIGHTS)
    places = ("self_attn.q_proj", "mlp.down_proj")
    # The model's own first name is model.
    assert arrays.keys() == {
        f"base_model.model.model.layers.{i}.{place}.lora_{x}.weight"
        for i in range(2)
        for place in places
        for x in "AB"
    }
    weight = trained.model.layers[1].mlp.down_proj.lora_a
    np.testing.assert_array_equal(
        arrays["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"], np.asarray(weight)
    )
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config.items() >= {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base",
        "r": 4, "lora_alpha": 8.0, "bias": "none", "target_modules": ["down_proj", "q_proj"],
    }.items()  # fmt: skip
    assert {file.name for file in tmp_path.iterdir()} == {CONFIG, WEIGHTS}


@pytest.mark.parametrize(
    ("mesh", "stacked", "written"),
    [({"data": 1}, False, True), ({"tensor": 4}, True, True), ({"tensor": 2, "fsdp": 2}, True, False)],
)
def test_branches_come_back_bit_for_bit_on_any_mesh(mesh, stacked, written, tmp_path):
    saved(tmp_path, stacked=written)
    on = rx.make_mesh(**mesh)
    base = llama(stacked)
    base = eqx.filter_shard(base, rx.shard_rules(base, on))
    found = models.load_lora(base, tmp_path)
    expected = with_noise(adapt(llama(written), on, targets=("q_proj", "down_proj")))
    if stacked == written:
        assert_identical(rx.to_arrays(found), rx.to_arrays(expected))
        like = adapt(llama(stacked), on, targets=("q_proj", "down_proj"))
        for path, x in rx.to_arrays(found).items():
            assert x.sharding.is_equivalent_to(rx.to_arrays(like)[path].sharding, x.ndim), path
    models.save_lora(found, tmp_path / "again", base="base")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def edit(**entries):
    def change(directory):
        file = directory / CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


def rename(old, new):
    def change(directory):
        arrays = load_file(directory / WEIGHTS)
        save_file({key.replace(old, new): x for key, x in arrays.items()}, directory / WEIGHTS)

    return change


def test_entries_that_say_nothing_are_no_reason_to_refuse(tmp_path):
    expected = saved(tmp_path)
    edit(
        of_next_year=None, use_x=False, x_pattern={}, lora_dropout=0.1, revision="main", eva_config={"rho": 2}
    )(tmp_path)
    assert_identical(rx.to_arrays(models.load_lora(llama(False), tmp_path)), rx.to_arrays(expected))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda directory: (directory / CONFIG).unlink(), FileNotFoundError, "has no adapter_config"),
        (edit(use_dora=True), ValueError, "use_dora=True is not supported"),
        (edit(bias="all"), ValueError, "bias='all' is not supported, only 'none'.*merge_and_unload"),
        (
            edit(init_lora_weights="loftq"),
            ValueError,
            "init_lora_weights='loftq' is not supported, only True or",
        ),
        (edit(use_rslora="yes"), ValueError, "use_rslora='yes' is not supported, only True"),
        (
            edit(of_next_year={"x": 1}),
            ValueError,
            "of_next_year={'x': 1} is not supported. The logits would be",
        ),
        (edit(r=0), ValueError, "r=0, but it must be a positive integer"),
        (edit(r=2.5), ValueError, "r=2.5, but it must be a positive integer"),
        (edit(lora_alpha="8"), ValueError, "lora_alpha='8', but it must be a positive number"),
        (edit(r=2), ValueError, r"lora_A\.weight is float32\[4, 16\] instead of \[2, 16\]"),
        (rename("q_proj", "w_q"), ValueError, r"no projections named \['model\.layers\.0\.self_attn\.w_q"),
        (rename("lora_A", "lora_C"), ValueError, "are none of LoRA: base_model"),
        (rename("layers.1.mlp", "layers.7.mlp"), ValueError, r"layers\.[17]\.mlp\.down_proj"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, error, message, tmp_path):
    saved(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=message):
        models.load_lora(llama(False), tmp_path)


def test_what_is_not_of_one_kind_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="of one rank and scale, but there are: none at all"):
        models.save_lora(llama(False), tmp_path / "new")
    mixed = models.add_lora(saved(tmp_path), targets=["up_proj"], rank=2, scale=2.0, key=KEY)
    with pytest.raises(ValueError, match=r"rank 2 with scale 2\.0, rank 4 with scale 2\.0"):
        models.save_lora(mixed, tmp_path / "new")
    kind, config = models.Phi3ForCausalLM, models.Phi3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    joined = models.add_lora(kind(config, key=KEY), targets=["q_proj"], rank=2, scale=2.0, key=KEY)
    with pytest.raises(ValueError, match=r"q_proj have no place in peft's format, .* parts of qkv_proj"):
        models.save_lora(joined, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_that_was_not_merged_is_not_saved_as_a_plain_one(tmp_path):
    trained = saved(tmp_path)
    with pytest.raises(ValueError, match=r"q_proj\.lora_a.*\n.*q_proj\.weight(.|\n)*merge_lora\(model\)"):
        models.save_pretrained(trained, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    models.save_pretrained(models.merge_lora(trained), tmp_path / "new")
    found: Any = models.load_pretrained(tmp_path / "new")
    np.testing.assert_allclose(logits_of(found), logits_of(trained), atol=1e-5)
