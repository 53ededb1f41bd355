"""Branches that were trained here open in peft, and those of peft open here, with the
same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from comparison import TOLERANCE, distance, inputs_of, outputs, torch_output
from references import REFERENCES

from redco_eqx import from_arrays, to_arrays
from redco_eqx_models import add_lora, load_lora, load_pretrained, merge_lora, save_lora

LLAMA = REFERENCES["llama_linear"]
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
INPUTS = inputs_of(LLAMA)


def assert_same_logits(expected, *models):
    for found in outputs(*((model, INPUTS) for model in models)):
        assert distance(found, expected, INPUTS) <= TOLERANCE


def test_peft_opens_what_was_saved_here(directory, tmp_path):
    model = load_pretrained(directory("llama_linear"), stacked=True)
    adapted = add_lora(model, targets=TARGETS, rank=4, scale=0.5, key=jax.random.key(0))
    arrays = to_arrays(adapted)
    for path, x in arrays.items():
        if path.endswith("lora_b"):
            arrays[path] = jnp.asarray(
                np.random.default_rng(len(path)).normal(size=x.shape), x.dtype
            )
    noisy = from_arrays(adapted, arrays)
    save_lora(noisy, tmp_path)
    expected = torch_output(
        peft.PeftModel.from_pretrained(LLAMA.make(), tmp_path).eval(), INPUTS
    )
    assert distance(torch_output(LLAMA.make(), INPUTS), expected, INPUTS) > 0.1, (
        "the branches must matter"
    )
    assert_same_logits(expected, noisy, merge_lora(noisy))


def variants():
    """Return options of peft's LoRA, each with the reason for refusing it here, or
    nothing."""
    config = peft.tuners.lora.config
    taken = (
        {"target_modules": TARGETS, "use_rslora": True},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"lora_dropout": 0.3, "megatron_core": "other", "ensure_weight_tying": True},
        {"task_type": "CAUSAL_LM", "revision": "main"},
    )
    refused = (
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"use_dora": True},
        {"lora_bias": True},
        {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
        {"bias": "lora_only"},
        {"use_qalora": True, "qalora_group_size": 4},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"layer_replication": [[0, 2], [0, 2]]},
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
        {"velora_config": config.VeloraConfig()},
        {"kasa_config": config.KasaConfig()},
        {"monteclora_config": config.MontecloraConfig()},
        {"use_bdlora": config.BdLoraConfig(["q_proj"], ["v_proj"], nblocks=2)},
    )
    return [
        *((options, None) for options in taken),
        *((options, next(iter(options))) for options in refused),
    ]


def test_every_variant_has_the_same_logits_or_is_refused_by_name(directory, tmp_path):
    for i, (options, refused) in enumerate(variants()):
        # All layers have branches there.
        model = load_pretrained(directory("llama_linear"), stacked=i == 0)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            **{
                "r": 4,
                "lora_alpha": 6,
                "target_modules": ["q_proj", "v_proj"],
                **options,
            }
        )
        there = peft.get_peft_model(LLAMA.make(), config).eval()
        with torch.no_grad():
            for name, x in there.named_parameters():
                if "lora_A" in name or "lora_B" in name:  # either may begin at zero
                    x.add_(0.3 * torch.randn(x.shape))
        there.save_pretrained(tmp_path / str(i))
        if refused is None:
            assert_same_logits(
                torch_output(there, INPUTS), load_lora(model, tmp_path / str(i))
            )
        else:
            with pytest.raises(
                ValueError,
                match=rf"adapter_config\.json: {refused}=.* is not supported",
            ):
                load_lora(model, tmp_path / str(i))
