"""`config.json` of every family: read, written, and refused where logits would be
wrong."""

import json
from operator import attrgetter

import pytest
from tiny_models import CONFIGS, LLAMA3

from redco_eqx_models import GPT2Config, GPTJConfig, LlamaConfig
from redco_eqx_models._blocks.positions import Rope
from redco_eqx_models._families.registry import FAMILIES, PARTS, read_family

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_again(name):
    raw = CONFIGS[name]
    config, _ = read_family({**raw, "eos_token_id": [2, 3], "prefix": "</s>"})
    entries = json.loads(json.dumps(config.to_json()))
    assert entries["prefix"] == "</s>"
    assert entries["eos_token_id"] == [2, 3]
    assert read_family(entries)[0].to_json() == config.to_json()
    hash(config)
    if "_class_name" in raw:
        assert raw.items() <= entries.items()
        assert "_diffusers_version" in entries
        assert not {"model_type", "architectures"} & entries.keys()
    else:
        assert entries["model_type"] == raw["model_type"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_empty_file_is_the_familys_default(model_type):
    config, _ = read_family({"model_type": model_type})
    num_heads = getattr(config, "num_attention_heads", config.num_layers)
    assert config.head_size * num_heads > 0
    assert config == FAMILIES[model_type][0]()


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
READ = [  # a file, and what it means
    pytest.param(
        {"model_type": "smollm3", "rope_scaling": YARN},
        {"rope.theta": 2e6, "rope.rope_type": "yarn"},
        id="smollm3-rope_scaling",
    ),
    pytest.param(
        rope("smollm3", **YARN),
        {"rope.theta": 2e6, "rope.rope_type": "yarn"},
        id="smollm3-rope_parameters",
    ),
    pytest.param(
        {**rope(**LINEAR, rope_theta=9), "rope_scaling": YARN},
        {"rope.theta": 1e4, "rope.rope_type": "yarn"},
        id="llama-rope_parameters_and_rope_scaling",
    ),
    pytest.param(
        {
            "model_type": "llama",
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "factor": 2},
        },
        {"rope.original_max_position_embeddings": 64, "rope.factor": 2.0},
        id="llama-rope_scaling-yarn",
    ),
    pytest.param(
        {"model_type": "gpt_neox", "rotary_emb_base": 500},
        {"rope.theta": 500.0, "rope.partial_rotary_factor": 0.25},
        id="gpt_neox-rotary_emb_base",
    ),
    pytest.param(
        {"model_type": "gemma3_text", "rope_scaling": LINEAR},
        {"rope.full.theta": 1e6, "rope.full.factor": 8.0, "rope.near": Rope()},
        id="gemma3_text-rope_scaling",
    ),
    pytest.param(
        {"model_type": "gemma2", "hidden_act": "relu"},
        {"hidden_activation": "gelu_pytorch_tanh"},
        id="gemma2-hidden_act",
    ),
    pytest.param(
        {"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 8},
        {"n_embd": 64, "n_head": 8},
        id="gpt2-other_names",
    ),
    pytest.param(
        {"model_type": "gpt2", "hidden_size": 64, "n_embd": 96},
        {"n_embd": 96},
        id="gpt2-both_names",
    ),
    pytest.param(
        {"model_type": "gpt2", "resid_pdrop": 0, "initializer_range": 1},
        {"resid_pdrop": 0.0, "initializer_range": 1.0},
        id="gpt2-ints_for_floats",
    ),
]


@pytest.mark.parametrize(("raw", "expected"), READ)
def test_what_a_file_means(raw, expected):
    config, _ = read_family(raw)
    for name, value in expected.items():
        found = attrgetter(name)(config)
        assert (found, type(found)) == (value, type(value)), name
    assert (
        raw["model_type"] == "gpt_neox"
        or not config.aliases.keys() & config.to_json().keys()
    )


REPLACED = [
    # A file, entries that replace some of its own, and what the file would have to say
    # instead.
    pytest.param(
        {"model_type": "gpt2", "n_head": 4},
        {"num_attention_heads": 8},
        {"n_head": 8},
        id="gpt2-n_head",
    ),
    pytest.param(
        rope(**LINEAR, rope_theta=5),
        {"rope_theta": 9},
        {"rope_parameters": {**LINEAR, "rope_theta": 9}},
        id="llama-rope_theta",
    ),
    pytest.param(
        rope(rope_theta=5),
        {"rope_scaling": LINEAR},
        {"rope_parameters": {**LINEAR, "rope_theta": 5}},
        id="llama-rope_scaling",
    ),
    pytest.param(
        {"model_type": "llama", "rope_theta": 5, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": None},
        id="llama-rope_parameters",
    ),
    pytest.param(
        rope("gpt_neox", partial_rotary_factor=0.5),
        {"rotary_pct": 1.0},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
        id="gpt_neox-rotary_pct",
    ),
    pytest.param(
        rope("gemma3_text", full_attention={"rope_theta": 5}),
        {"rope_theta": 9, "rope_local_base_freq": 8},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 9},
                "sliding_attention": {"rope_theta": 8},
            }
        },
        id="gemma3_text-rope_theta",
    ),
    *(
        pytest.param(
            rope("gemma3_text", full_attention={**LINEAR, "rope_theta": 5}),
            {"rope_scaling": x},
            {"rope_parameters": {"full_attention": {"rope_theta": 5, **(x or {})}}},
            id=f"gemma3_text-rope_scaling-{'linear' if x else x}",
        )
        for x in (YARN | LINEAR, None)
    ),
    pytest.param(
        {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 26},
        {"sliding_window_pattern": 3},
        {"layer_types": None, "sliding_window_pattern": 3},
        id="gemma3_text-sliding_window_pattern",
    ),
    pytest.param(
        {"model_type": "smollm3", "no_rope_layers": [1] * 36},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": None, "no_rope_layer_interval": 3},
        id="smollm3-no_rope_layer_interval",
    ),
    pytest.param(
        changed("bert_labels", num_labels=None, id2label={"0": "a", "1": "b"}),
        {"num_labels": 2},
        {},
        id="bert_labels-num_labels-same",
    ),
    pytest.param(
        changed("bert_labels", id2label={"0": "a"}),
        {"num_labels": 3},
        {"id2label": None, "num_labels": 3},
        id="bert_labels-num_labels-other",
    ),
    pytest.param(
        changed("bert_labels"),
        {"id2label": {"0": "a"}, "problem_type": "regression"},
        {"num_labels": None, "id2label": {"0": "a"}, "problem_type": "regression"},
        id="bert_labels-id2label",
    ),
    pytest.param(
        {"model_type": "clip", "text_config": {"hidden_act": "relu"}},
        {"hidden_act": "gelu"},
        {"text_config": None, "text_config_dict": {"hidden_act": "gelu"}},
        id="clip-hidden_act",
    ),
]


@pytest.mark.parametrize(("raw", "entries", "instead"), REPLACED)
def test_entries_replace_those_of_the_file_under_all_their_names(raw, entries, instead):
    assert read_family(raw, None, entries) == read_family({**raw, **instead})


def test_an_entry_that_no_family_reads_replaces_nothing():
    with pytest.raises(
        ValueError, match="entries: GPT2Config does not read hiden_size"
    ):
        read_family({"model_type": "gpt2"}, None, {"hiden_size": 8})


REFUSED = [
    pytest.param(
        {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope type 'yarn'",
        id="llama-rope_scaling-yarn",
    ),
    pytest.param(
        rope(rope_type="mrope", factor=2.0),
        "rope type 'mrope' is not supported, only default, linear, llama3",
        id="llama-rope_parameters-mrope",
    ),
    pytest.param(
        rope(full_attention={"rope_type": "default"}),
        "rope_parameters=.* another for each kind of layer",
        id="llama-rope_parameters-of_kinds_of_layers",
    ),
    *(
        pytest.param(
            {"model_type": kind, "rope_scaling": "x"},
            "rope_scaling='x'",
            id=f"{kind}-rope_scaling-str",
        )
        for kind in ("llama", "gemma3_text")
    ),
    pytest.param(
        rope(rope_type="linear", factor="2"),
        "factor='2', but it must be a positive number",
        id="llama-rope_parameters-factor_str",
    ),
    pytest.param(
        {"model_type": "mistral", "rope_theta": 0},
        "rope_theta=0, but it must be a positive",
        id="mistral-rope_theta-zero",
    ),
    pytest.param(
        rope(rope_type="llama3", factor=2),
        "needs low_freq_factor, high_freq_factor, original_max_position_emb",
        id="llama-rope_parameters-llama3_without_frequencies",
    ),
    pytest.param(
        rope(partial_rotary_factor=0.5),
        "partial_rotary_factor is not supported",
        id="llama-rope_parameters-partial_rotary_factor",
    ),
    pytest.param(
        {"model_type": "gpt2", "activation_function": "mish"},
        "activation_function='mish'",
        id="gpt2-activation_function-mish",
    ),
    pytest.param(
        {"model_type": "gpt2", "n_embd": 30, "n_head": 4},
        "n_embd=30 .* n_head=4",
        id="gpt2-n_embd-indivisible",
    ),
    pytest.param(
        {"model_type": "gptj", "n_head": 0},
        "n_head=0, but it must be positive",
        id="gptj-n_head-zero",
    ),
    pytest.param(
        {"model_type": "llama", "rms_norm_eps": float("nan")},
        "rms_norm_eps=nan, but it must be finite",
        id="llama-rms_norm_eps-nan",
    ),
    pytest.param(
        {"model_type": "llama", "eos_token_id": ["2"]},
        r"eos_token_id=\['2'\].* be: int or list of int or null",
        id="llama-eos_token_id-str",
    ),
    pytest.param(
        changed("llama", num_key_value_heads=3),
        "num_attention_heads=8 .* num_key_value_heads=3",
        id="llama-num_key_value_heads-indivisible",
    ),
    pytest.param(
        {"model_type": "gpt_neox", "rotary_pct": 1.5},
        "partial_rotary_factor must be at most 1",
        id="gpt_neox-rotary_pct-above_one",
    ),
    pytest.param(
        {"model_type": "gemma2", "layer_types": ["full_attention"]},
        "layer_types=.* for each of the 26 layers",
        id="gemma2-layer_types-too_few",
    ),
    pytest.param(
        rope("gemma3_text", rope_theta=1.0),
        "must have only full_attention, sl",
        id="gemma3_text-rope_parameters-flat",
    ),
    pytest.param(
        {"model_type": "gemma3_text", "rope_scaling": YARN},
        "rope_type='yarn'.* must turn whole heads",
        id="gemma3_text-rope_scaling-yarn",
    ),
    pytest.param(
        {"model_type": "mixtral", "num_local_experts": 1},
        "num_experts_per_tok=2, but there are only 1 experts",
        id="mixtral-num_local_experts-too_few",
    ),
    pytest.param(
        {"model_type": "gptj", "rotary_dim": 5},
        "rotary_dim=5, but it must be even",
        id="gptj-rotary_dim-odd",
    ),
    pytest.param(
        {"model_type": "gptj", "rotary_dim": 512},
        "at most the size of a head, 256",
        id="gptj-rotary_dim-too_large",
    ),
    pytest.param(
        {"model_type": "gpt2", "n_layer": "12"},
        "n_layer='12', but it must be: int",
        id="gpt2-n_layer-str",
    ),
    pytest.param(
        {"model_type": "gpt2", "n_embd": True},
        "n_embd=True, but it must be: int",
        id="gpt2-n_embd-bool",
    ),
    # With an encoder.
    pytest.param(
        changed("t5", feed_forward_proj="gated-step"),
        "feed_forward_proj='gated-step' is not supported",
        id="t5-feed_forward_proj-unknown",
    ),
    pytest.param(
        changed("t5", dense_act_fn="silu"),
        "{'dense_act_fn': 'silu'}, but feed_forward_proj='relu' means",
        id="t5-dense_act_fn-other",
    ),
    pytest.param(
        changed("smollm3", layer_types=["sliding_attention"] * 2),
        "layer_types=.* must be full_attention for",
        id="smollm3-layer_types-sliding",
    ),
    pytest.param(
        changed("bart", decoder_attention_heads=5),
        "d_model=32 is not a .* of decoder_attention_heads=5",
        id="bart-decoder_attention_heads-indivisible",
    ),
    pytest.param(
        changed("bert_labels", num_labels=0),
        r"num_labels=0, but it must be an integer from 1 to 2\*\*20",
        id="bert_labels-num_labels-zero",
    ),
    pytest.param(
        changed("bert_labels", id2label={"1": "a"}, num_labels=None),
        "must name the labels from 0 on",
        id="bert_labels-id2label-from_one",
    ),
    pytest.param(
        changed("roberta_masked", pad_token_id=None),
        "pad_token_id is None",
        id="roberta_masked-pad_token_id-none",
    ),
    pytest.param(
        changed("vit_labels", patch_size=3),
        "image_size=8 is not a multiple of patch_size=3",
        id="vit_labels-patch_size-indivisible",
    ),
    pytest.param(
        changed("vit_gpt2", decoder={"model_type": "bert"}),
        "decoder: model_type='bert' is not supported",
        id="vit_gpt2-decoder-bert",
    ),
    pytest.param(
        changed("vit_gpt2", encoder=None),
        "encoder: model_type=None is not supported, only 'vit'",
        id="vit_gpt2-encoder-none",
    ),
    # Of images.
    pytest.param(
        {"_class_name": "UNet1DModel"},
        "_class_name='UNet1DModel' is not known",
        id="UNet1DModel",
    ),
    pytest.param(
        changed("unet", down_block_types=["Attn"] * 2),
        "down_.*be 2 .* of DownBlock2D, CrossAttnDownBlock2D",
        id="unet-down_block_types-unknown",
    ),
    pytest.param(
        changed("vae", block_out_channels=[32, 64, 64]),
        "down_block_types=.* it must be 3",
        id="vae-block_out_channels-too_many",
    ),
    pytest.param(
        changed("unet", norm_num_groups=5),
        "16 of block_out_channels .*norm_num_groups=5",
        id="unet-norm_num_groups-indivisible",
    ),
    pytest.param(
        changed("unet", attention_head_dim=[4, 7]),
        "the number of heads.* 32 .* of 7",
        id="unet-attention_head_dim-indivisible",
    ),
    pytest.param(
        changed("unet", attention_head_dim=[4, 8, 8]),
        "has 3 numbers, but there are 2 stages",
        id="unet-attention_head_dim-too_many",
    ),
    pytest.param(
        changed("unet", up_block_types=[1, 2]),
        r"up_block_types=\[1, 2\].* list of str",
        id="unet-up_block_types-ints",
    ),
    pytest.param(
        changed("unet", freq_shift=-1),
        "freq_shift=-1, but it must be 0 or more",
        id="unet-freq_shift-negative",
    ),
    *(
        pytest.param(
            {name: kind, entry: "something else"},
            f"{entry}='something else' is not supported",
            id=f"{kind}-{entry}-unsupported",
        )
        for name, families in (("model_type", FAMILIES), ("_class_name", PARTS))
        for kind, (config, *_) in families.items()
        for entry in config.only
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_what_is_not_supported_is_refused(raw, message):
    with pytest.raises(ValueError, match=rf"^(config\.json|\w+Config): .*{message}"):
        read_family(raw)


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
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
    ],
    ids=["n_embd", "hidden_act", "rotary_dim"],
)
def test_a_configuration_made_by_hand_is_checked_too(kind, entries, message):
    with pytest.raises(ValueError, match=message):
        kind(**entries)
