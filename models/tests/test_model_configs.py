"""`config.json` of every family: read, written, and refused where logits would be
wrong."""

import json
from operator import attrgetter
from typing import Any

import pytest
from helpers import assert_refused
from tiny_models import CONFIGS, LLAMA3

from redco_eqx_models import GPT2Config, GPTJConfig, LlamaConfig
from redco_eqx_models._blocks.positions import Rope
from redco_eqx_models._families.registry import FAMILIES, PARTS, read_family

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}


def test_what_is_written_is_read_again():
    for name, raw in CONFIGS.items():
        config, _ = read_family({**raw, "eos_token_id": [2, 3], "prefix": "</s>"})
        entries = json.loads(json.dumps(config.to_json()))
        assert entries["prefix"] == "</s>", name
        assert entries["eos_token_id"] == [2, 3], name
        assert read_family(entries)[0].to_json() == config.to_json(), name
        hash(config)
        if "_class_name" in raw:
            assert raw.items() <= entries.items()
            assert "_diffusers_version" in entries
            assert not {"model_type", "architectures"} & entries.keys()
        else:
            assert entries["model_type"] == raw["model_type"], name


def test_an_empty_file_is_the_familys_default():
    for model_type in FAMILIES:
        config, _ = read_family({"model_type": model_type})
        assert (
            config.head_size * getattr(config, "num_attention_heads", config.num_layers)
            > 0
        )
        assert config == FAMILIES[model_type][0](), model_type


def test_a_misspelt_entry_is_not_taken_for_one_that_is_left_out():
    config = GPT2Config(n_embd=24)
    assert config.entry("hidden_size") == config.entry("n_embd") == 24
    assert config.entry("sliding_window", None) is None
    with pytest.raises(AttributeError, match="hiden_size"):
        config.entry("hiden_size")


def test_both_spellings_of_rope_are_one():
    old = {"rope_theta": 500, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 500}}
    rope = Rope.from_json(old)
    assert rope == Rope.from_json(new) == Rope.from_json(rope.to_json())
    assert Rope.from_json({"rope_scaling": None}) == Rope()


def rope(kind="llama", /, **entries):
    return {"model_type": kind, "rope_parameters": entries}


def changed(name, **changes):
    return {**CONFIGS[name], **changes}


LINEAR = {"rope_type": "linear", "factor": 8.0}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [  # a file, and what it means
    (
        {"model_type": "smollm3", "rope_scaling": YARN},
        {"rope.theta": 2e6, "rope.rope_type": "yarn"},
    ),
    (rope("smollm3", **YARN), {"rope.theta": 2e6, "rope.rope_type": "yarn"}),
    (
        {**rope(**LINEAR, rope_theta=9), "rope_scaling": YARN},
        {"rope.theta": 1e4, "rope.rope_type": "yarn"},
    ),
    (
        {
            "model_type": "llama",
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "factor": 2},
        },
        {"rope.original_max_position_embeddings": 64, "rope.factor": 2.0},
    ),
    (
        {"model_type": "gpt_neox", "rotary_emb_base": 500},
        {"rope.theta": 500.0, "rope.partial_rotary_factor": 0.25},
    ),
    (
        {"model_type": "gemma3_text", "rope_scaling": LINEAR},
        {"rope.full.theta": 1e6, "rope.full.factor": 8.0, "rope.near": Rope()},
    ),
    (
        {"model_type": "gemma2", "hidden_act": "relu"},
        {"hidden_activation": "gelu_pytorch_tanh"},
    ),
    (
        {"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 8},
        {"n_embd": 64, "n_head": 8},
    ),
    ({"model_type": "gpt2", "hidden_size": 64, "n_embd": 96}, {"n_embd": 96}),
    (
        {"model_type": "gpt2", "resid_pdrop": 0, "initializer_range": 1},
        {"resid_pdrop": 0.0, "initializer_range": 1.0},
    ),
]


def test_what_a_file_means():
    for raw, expected in READ:
        config, _ = read_family(raw)
        for name, value in expected.items():
            found = attrgetter(name)(config)
            assert (found, type(found)) == (value, type(value)), (raw, name)
        assert (
            raw["model_type"] == "gpt_neox"
            or not config.aliases.keys() & config.to_json().keys()
        )


REPLACED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # A file, entries that replace some of its own, and what the file would have to say
    # instead.
    ({"model_type": "gpt2", "n_head": 4}, {"num_attention_heads": 8}, {"n_head": 8}),
    (
        rope(**LINEAR, rope_theta=5),
        {"rope_theta": 9},
        {"rope_parameters": {**LINEAR, "rope_theta": 9}},
    ),
    (
        rope(rope_theta=5),
        {"rope_scaling": LINEAR},
        {"rope_parameters": {**LINEAR, "rope_theta": 5}},
    ),
    (
        {"model_type": "llama", "rope_theta": 5, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": None},
    ),
    (
        rope("gpt_neox", partial_rotary_factor=0.5),
        {"rotary_pct": 1.0},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
    ),
    (
        rope("gemma3_text", full_attention={"rope_theta": 5}),
        {"rope_theta": 9, "rope_local_base_freq": 8},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 9},
                "sliding_attention": {"rope_theta": 8},
            }
        },
    ),
    *(
        (
            rope("gemma3_text", full_attention={**LINEAR, "rope_theta": 5}),
            {"rope_scaling": x},
            {"rope_parameters": {"full_attention": {"rope_theta": 5, **(x or {})}}},
        )
        for x in (YARN | LINEAR, None)
    ),
    (
        {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 26},
        {"sliding_window_pattern": 3},
        {"layer_types": None, "sliding_window_pattern": 3},
    ),
    (
        {"model_type": "smollm3", "no_rope_layers": [1] * 36},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": None, "no_rope_layer_interval": 3},
    ),
    (
        changed("bert_labels", num_labels=None, id2label={"0": "a", "1": "b"}),
        {"num_labels": 2},
        {},
    ),
    (
        changed("bert_labels", id2label={"0": "a"}),
        {"num_labels": 3},
        {"id2label": None, "num_labels": 3},
    ),
    (
        changed("bert_labels"),
        {"id2label": {"0": "a"}, "problem_type": "regression"},
        {"num_labels": None, "id2label": {"0": "a"}, "problem_type": "regression"},
    ),
    (
        {"model_type": "clip", "text_config": {"hidden_act": "relu"}},
        {"hidden_act": "gelu"},
        {"text_config": None, "text_config_dict": {"hidden_act": "gelu"}},
    ),
]


def test_entries_replace_those_of_the_file_under_all_their_names():
    for raw, entries, instead in REPLACED:
        assert read_family(raw, None, entries) == read_family({**raw, **instead}), (
            raw,
            entries,
        )
    bad = (
        {"model_type": "gpt2"},
        None,
        {"hiden_size": 8},
        "GPT2Config does not read hiden_size",
    )
    assert_refused(read_family, [bad], begin="entries: ")


REFUSED = [
    (
        {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope type 'yarn'",
    ),
    (
        rope(rope_type="mrope", factor=2.0),
        "rope type 'mrope' is not supported, only default, linear, llama3",
    ),
    (
        rope(full_attention={"rope_type": "default"}),
        "rope_parameters=.* another for each kind of layer",
    ),
    *(
        ({"model_type": kind, "rope_scaling": "x"}, "rope_scaling='x'")
        for kind in ("llama", "gemma3_text")
    ),
    (
        rope(rope_type="linear", factor="2"),
        "factor='2', but it must be a positive number",
    ),
    (
        {"model_type": "mistral", "rope_theta": 0},
        "rope_theta=0, but it must be a positive",
    ),
    (
        rope(rope_type="llama3", factor=2),
        "needs low_freq_factor, high_freq_factor, original_max_position_emb",
    ),
    (rope(partial_rotary_factor=0.5), "partial_rotary_factor is not supported"),
    (
        {"model_type": "gpt2", "activation_function": "mish"},
        "activation_function='mish'",
    ),
    ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "n_embd=30 .* n_head=4"),
    ({"model_type": "gptj", "n_head": 0}, "n_head=0, but it must be positive"),
    (
        {"model_type": "llama", "rms_norm_eps": float("nan")},
        "rms_norm_eps=nan, but it must be finite",
    ),
    (
        {"model_type": "llama", "eos_token_id": ["2"]},
        r"eos_token_id=\['2'\].* be: int or list of int or null",
    ),
    (
        changed("llama", num_key_value_heads=3),
        "num_attention_heads=8 .* num_key_value_heads=3",
    ),
    (
        {"model_type": "gpt_neox", "rotary_pct": 1.5},
        "partial_rotary_factor must be at most 1",
    ),
    (
        {"model_type": "gemma2", "layer_types": ["full_attention"]},
        "layer_types=.* for each of the 26 layers",
    ),
    (rope("gemma3_text", rope_theta=1.0), "must have only full_attention, sl"),
    (
        {"model_type": "gemma3_text", "rope_scaling": YARN},
        "rope_type='yarn'.* must turn whole heads",
    ),
    (
        {"model_type": "mixtral", "num_local_experts": 1},
        "num_experts_per_tok=2, but there are only 1 experts",
    ),
    ({"model_type": "gptj", "rotary_dim": 5}, "rotary_dim=5, but it must be even"),
    ({"model_type": "gptj", "rotary_dim": 512}, "at most the size of a head, 256"),
    ({"model_type": "gpt2", "n_layer": "12"}, "n_layer='12', but it must be: int"),
    ({"model_type": "gpt2", "n_embd": True}, "n_embd=True, but it must be: int"),
    # With an encoder.
    (
        changed("t5", feed_forward_proj="gated-step"),
        "feed_forward_proj='gated-step' is not supported",
    ),
    (
        changed("t5", dense_act_fn="silu"),
        "{'dense_act_fn': 'silu'}, but feed_forward_proj='relu' means",
    ),
    (
        changed("smollm3", layer_types=["sliding_attention"] * 2),
        "layer_types=.* must be full_attention for",
    ),
    (
        changed("bart", decoder_attention_heads=5),
        "d_model=32 is not a .* of decoder_attention_heads=5",
    ),
    (
        changed("bert_labels", num_labels=0),
        r"num_labels=0, but it must be an integer from 1 to 2\*\*20",
    ),
    (
        changed("bert_labels", id2label={"1": "a"}, num_labels=None),
        "must name the labels from 0 on",
    ),
    (changed("roberta_masked", pad_token_id=None), "pad_token_id is None"),
    (
        changed("vit_labels", patch_size=3),
        "image_size=8 is not a multiple of patch_size=3",
    ),
    (
        changed("vit_gpt2", decoder={"model_type": "bert"}),
        "decoder: model_type='bert' is not supported",
    ),
    (
        changed("vit_gpt2", encoder=None),
        "encoder: model_type=None is not supported, only 'vit'",
    ),
    # Of images.
    ({"_class_name": "UNet1DModel"}, "_class_name='UNet1DModel' is not known"),
    (
        changed("unet", down_block_types=["Attn"] * 2),
        "down_.*be 2 .* of DownBlock2D, CrossAttnDownBlock2D",
    ),
    (
        changed("vae", block_out_channels=[32, 64, 64]),
        "down_block_types=.* it must be 3",
    ),
    (
        changed("unet", norm_num_groups=5),
        "16 of block_out_channels .*norm_num_groups=5",
    ),
    (changed("unet", attention_head_dim=[4, 7]), "the number of heads.* 32 .* of 7"),
    (
        changed("unet", attention_head_dim=[4, 8, 8]),
        "has 3 numbers, but there are 2 stages",
    ),
    (changed("unet", up_block_types=[1, 2]), r"up_block_types=\[1, 2\].* list of str"),
    (changed("unet", freq_shift=-1), "freq_shift=-1, but it must be 0 or more"),
    *(
        (
            {name: kind, entry: "something else"},
            f"{entry}='something else' is not supported",
        )
        for name, families in (("model_type", FAMILIES), ("_class_name", PARTS))
        for kind, (config, *_) in families.items()
        for entry in config.only
    ),
]


def test_what_is_not_supported_is_refused():
    assert_refused(read_family, REFUSED, begin=r"^(config\.json|\w+Config): .*")


def test_a_configuration_made_by_hand_is_checked_too():
    cases = (
        (
            GPT2Config,
            {"n_embd": 30, "n_head": 4},
            "GPT2Config: n_embd=30 is not a multiple of n_head=4",
        ),
        (
            LlamaConfig,
            {"hidden_act": "mish"},
            "LlamaConfig: hidden_act='mish' is not supported",
        ),
        (GPTJConfig, {"rotary_dim": 7}, "GPTJConfig: rotary_dim=7"),
    )
    assert_refused(lambda kind, entries: kind(**entries), cases)
