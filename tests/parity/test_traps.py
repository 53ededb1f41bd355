"""Negative controls: each mistake that is easy to make changes the logits by more than the tolerance."""

import dataclasses
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison import (
    TOLERANCE,
    distance,
    encoder_inputs,
    logits,
    output,
    positions,
    reconfigured,
    texts,
    torch_logits,
    torch_output,
)
from references import ENCODERS, REFERENCES
from safetensors.numpy import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

from redco_eqx import from_arrays, to_arrays
from redco_eqx.models import BertConfig, Embedding, RobertaConfig, load_pretrained, split_heads
from redco_eqx.models._blocks.context import Context
from redco_eqx.models._blocks.relative_bias import relative_bias
from redco_eqx.models._blocks.rope import Rope, rotate
from redco_eqx.models._families import bart, bert, gptj, llama, opt, t5

FAR = 3 * TOLERANCE  # the two forms of gelu differ by 7 times the tolerance, all else by far more


def configured(**changes):
    return lambda model, patch: reconfigured(model, dataclasses.replace(model.config, **changes))


def default_rope(model, patch):
    return reconfigured(model, dataclasses.replace(model.config, rope=Rope()))


def unscaled_rope(model, patch):
    rope = Rope(theta=model.config.rope.theta)
    return reconfigured(model, dataclasses.replace(model.config, rope=rope))


def rope(**changes):
    def change(model, patch):
        new = dataclasses.replace(model.config.rope, **changes)
        return reconfigured(model, dataclasses.replace(model.config, rope=new))

    return change


def by_head(self, q, k):
    """Each head by itself, as Qwen3 does."""

    def one(norm, x):
        heads = x.reshape(*x.shape[:-1], -1, self.config.head_size)
        heads = heads / jnp.sqrt(jnp.mean(heads**2, axis=-1, keepdims=True) + norm.eps)
        return heads.reshape(x.shape) * norm.weight

    return one(self.q_norm, q), one(self.k_norm, k)


def changed(where, change):
    """Each of the arrays that `where` picks in a layer, changed."""

    def change_all(model, patch):
        return eqx.tree_at(lambda m: [where(layer) for layer in m.layers], model, replace_fn=change)

    return change_all


def swapped_kv_heads(model, patch):
    def swap(weight):
        return jnp.concatenate(jnp.split(weight, 2)[::-1])

    return eqx.tree_at(
        lambda m: [getattr(x.self_attn, n).weight for x in m.layers for n in ("k_proj", "v_proj")],
        model,
        replace_fn=swap,
    )


def patched(module, name, value):
    def patch_it(model, patch):
        patch.setattr(module, name, value)
        return model

    return patch_it


def sequential(self, x, context, cache, key):
    """The MLP reads what attention has written."""
    attn, mlp, normed = self.attn, self.mlp, self.ln_1(x)
    q, k, v = attn.q_proj(normed), attn.k_proj(normed), attn.v_proj(normed)
    heads, cache = attn.heads(q, k, v, context, cache, key)
    x = x + attn.out_proj(heads)
    return x + mlp.fc_out(mlp.activate(mlp.fc_in(self.ln_1(x)))), cache


def neighbours(x, positions, frequencies):
    return rotate(x, positions, frequencies, interleaved=True)


def halves(x, positions, frequencies, *, interleaved):
    return rotate(x, positions, frequencies)


TRAPS = {
    "gpt2": {
        "query, key, value in another order": changed(
            lambda layer: layer.attn.c_attn.weight, lambda w: jnp.roll(w, 1, axis=1)
        ),
        "Conv1D taken for (out, in)": changed(lambda layer: layer.attn.c_proj.weight, jnp.transpose),
        "exact gelu": configured(activation_function="gelu"),
        "another epsilon": configured(layer_norm_epsilon=1e-5),
    },
    "gpt2_unscaled_untied": {
        "scaled scores": configured(scale_attn_weights=True),
        "approximate gelu": configured(activation_function="gelu_new"),
    },
    "gptj": {
        "rotary halves, not neighbours": patched(gptj, "rotate", halves),
        "rotary over the whole head": configured(rotary_dim=8),
        "MLP after attention": patched(gptj.GPTJBlock, "__call__", sequential),
        "head without bias": lambda model, patch: eqx.tree_at(
            lambda m: m.lm_head.bias, model, replace_fn=jnp.zeros_like
        ),
    },
    "opt_125m": {
        "positions from row 0": patched(opt, "POSITION_OFFSET", 0),
        "gelu": configured(activation_function="gelu"),
        "no final norm": lambda model, patch: eqx.tree_at(
            lambda m: m.model.decoder.final_layer_norm, model, replace=None
        ),
    },
    "opt_350m": {
        "normalised before": configured(do_layer_norm_before=True, _remove_final_layer_norm=True),
    },
    "llama": {
        "default theta": default_rope,
        "rotary neighbours, not halves": patched(llama, "rotate", neighbours),
        "another epsilon": configured(rms_norm_eps=1e-6),
    },
    "llama_gqa": {"heads of keys and values swapped": swapped_kv_heads},
    "llama_llama3": {"no scaling": unscaled_rope},
    "llama_linear": {"no scaling": unscaled_rope},
    "llama_yarn": {"no scaling": unscaled_rope, "scores not multiplied": rope(attention_factor=1.0)},
    "llama_yarn_scaled": {
        "no scaling": unscaled_rope,
        "scores by the factor alone": rope(mscale=None),
        "another first pair": rope(beta_fast=32.0),
        "another last pair": rope(beta_slow=1.0),
    },
    "phi3": {
        "gate and up exchanged": lambda model, patch: eqx.tree_at(
            lambda m: [w for x in m.layers for w in (x.mlp.gate_proj, x.mlp.up_proj)],
            model,
            [w for x in model.layers for w in (x.mlp.up_proj, x.mlp.gate_proj)],
        ),
        "no window": configured(sliding_window=None),
    },
    "smollm3": {
        "positions in all layers": configured(no_rope_layers=(1, 1, 1)),
        "positions in the wrong layer": configured(no_rope_layers=(0, 1, 1)),
    },
    "olmo2": {
        "queries normalised by head": patched(llama.LlamaAttention, "_normalised", by_head),
        "queries not normalised": lambda model, patch: eqx.tree_at(
            lambda m: [x.self_attn.q_norm for x in m.layers], model, replace_fn=lambda norm: None
        ),
    },
    "llama_bias": {
        "no bias of the output": changed(lambda layer: layer.self_attn.o_proj.bias, jnp.zeros_like),
        "no bias in the MLP": changed(lambda layer: layer.mlp.up_proj.bias, jnp.zeros_like),
    },
    "mistral": {
        "no window": configured(sliding_window=None),
        "a window wider by one": configured(sliding_window=8),
    },
    "qwen2": {"no bias": changed(lambda layer: layer.self_attn.q_proj.bias, jnp.zeros_like)},
    "qwen3": {
        "queries not normalised": lambda model, patch: eqx.tree_at(
            lambda m: [x.self_attn.q_norm for x in m.layers] + [x.self_attn.k_norm for x in m.layers],
            model,
            replace_fn=lambda norm: None,
        ),
    },
}


@pytest.mark.parametrize(("name", "trap"), [(name, trap) for name in TRAPS for trap in TRAPS[name]])
def test_a_mistake_is_seen(name, trap, directory, reference, monkeypatch):
    ids, _ = texts()
    expected = torch_logits(reference(name), ids, counts_positions=True)
    model = load_pretrained(directory(name))
    assert distance(logits(model, ids), expected) <= TOLERANCE
    wrong = TRAPS[name][trap](model, monkeypatch)
    assert distance(logits(wrong, ids), expected) > FAR


@pytest.mark.parametrize("name", ["gpt2", "opt_125m", "llama"])
def test_a_mask_left_out_is_seen(name, directory, reference):
    ids, mask = texts("left")
    counts = REFERENCES[name].counts_positions
    expected = torch_logits(reference(name), ids, mask, counts_positions=counts)
    model = load_pretrained(directory(name))
    assert mask is not None
    wrong = logits(model, ids, positions=jnp.asarray(positions(mask)))
    assert distance(wrong, expected, mask) > FAR


@pytest.mark.parametrize("name", ["gpt2", "opt_125m"])  # rotary positions are relative
def test_positions_that_count_padding_are_seen(name, directory, reference):
    ids, mask = texts("left")
    counts = REFERENCES[name].counts_positions
    expected = torch_logits(reference(name), ids, mask, counts_positions=counts)
    wrong = jnp.asarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    model = load_pretrained(directory(name))
    assert distance(logits(model, ids, mask, positions=wrong), expected, mask) > FAR


# Encoders and encoder-decoders.


def rebuilt(model, **changes):
    """The arrays of `model` in a model that is made anew, of a configuration with changes."""
    config = dataclasses.replace(model.config, **changes)
    shape = eqx.filter_eval_shape(lambda key: type(model)(config, key=key), jax.random.key(0))
    return from_arrays(shape, to_arrays(model))


def remade(**changes):
    return lambda model, patch: rebuilt(model, **changes)


def patched_and_rebuilt(owner, name, value):
    def patch_it(model, patch):
        patch.setattr(owner, name, value)
        return rebuilt(model)

    return patch_it


def scaled(self, *args, scale=None, **options):
    return attend(self, *args, **options)


def one_sided(*args, bidirectional, **options):
    return relative_bias(*args, bidirectional=False, **options)


def without_bias(*args, **options):
    return 0 * relative_bias(*args, **options)


def norm_of_the_part(x, y, norm, layer, key):
    return x + norm(y)


def without_norm(x, y, norm, layer, key):
    return x + y


def crossed(self, x, context, key):
    """Cross-attention over the tokens themselves."""
    (q,) = context.column(x, self.q)
    k, v = self.k(x), self.v(x)
    q, k, v = (split_heads(y, self.config.d_kv) for y in (q, k, v))
    return self.o(dataclasses.replace(context, bias=None).attend(q, k, v, None, scale=1.0)[0])


attend = Context.attend
ENCODER_TRAPS = {
    "t5": {
        "scaled scores": patched(Context, "attend", scaled),
        "an encoder that looks back only": patched(t5, "relative_bias", one_sided),
        "no relative positions": patched(t5, "relative_bias", without_bias),
        "a head that reads without scale": remade(scale_decoder_outputs=False),
        "cross-attention that does not cross": patched(t5.T5Attention, "over_memory", crossed),
        "another epsilon": remade(layer_norm_epsilon=1e-6),
    },
    "t5_gated_untied": {
        "a head that reads with scale": remade(scale_decoder_outputs=True),
        "exact gelu": patched_and_rebuilt(t5.T5Config, "activation", property(lambda self: "gelu")),
        "fewer distances apart": remade(relative_attention_max_distance=6),
    },
    "bart": {
        "positions from row 0": patched(bart, "POSITION_OFFSET", 0),
        "the part normalised, not the sum": patched(bart, "add_and_norm", norm_of_the_part),
        "not normalised": patched(bart, "add_and_norm", without_norm),
        "no bias of the logits": lambda model, patch: eqx.tree_at(
            lambda m: m.final_logits_bias, model, replace_fn=np.zeros_like
        ),
        "approximate gelu": remade(activation_function="gelu_new"),
    },
    "bart_scaled": {"embeddings without scale": remade(scale_embedding=False)},
    "bert": {
        "positions of RoBERTa": patched_and_rebuilt(BertConfig, "position_offset", property(lambda self: 2)),
        "the part normalised, not the sum": patched(bert, "add_and_norm", norm_of_the_part),
        "another epsilon": remade(layer_norm_eps=1e-12),
    },
    "bert_masked": {"approximate gelu": remade(hidden_act="gelu_new")},
    "roberta": {"positions from row 0": patched_and_rebuilt(
        RobertaConfig, "position_offset", property(lambda self: 0)
    )},
    "roberta_masked": {"no bias of the head": lambda model, patch: eqx.tree_at(
        lambda m: m.lm_head.bias, model, replace_fn=jnp.zeros_like
    )},
    "vit_labels": {"patches turned": lambda model, patch: eqx.tree_at(
        lambda m: m.vit.embeddings.patch_embeddings.projection.weight,
        model,
        replace_fn=lambda w: jnp.swapaxes(w, 2, 3),
    )},
    "vit_gpt2": {
        "keys taken for values": lambda model, patch: eqx.tree_at(
            lambda m: [x.crossattention.c_attn.weight for x in m.layers],
            model,
            replace_fn=lambda w: jnp.roll(w, 1, axis=1),
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "trap"), [(name, trap) for name in ENCODER_TRAPS for trap in ENCODER_TRAPS[name]]
)
def test_a_mistake_of_an_encoder_is_seen(name, trap, directory, reference, monkeypatch):
    inputs = encoder_inputs(ENCODERS[name])
    with torch.no_grad():
        expected = torch_output(reference(name), inputs).numpy()
    wrong = ENCODER_TRAPS[name][trap](load_pretrained(directory(name)), monkeypatch)
    assert distance(output(wrong, inputs), expected) > FAR


def test_segments_left_out_are_seen(directory, reference):
    inputs = encoder_inputs(ENCODERS["bert"])
    with torch.no_grad():
        expected = torch_output(reference("bert"), inputs).numpy()
    del inputs["token_type_ids"]
    assert distance(output(load_pretrained(directory("bert")), inputs), expected) > FAR


@pytest.mark.parametrize(("weight", "bias"), [("gamma", "beta"), ("beta", "gamma")])
def test_norms_are_found_by_their_old_spellings(weight, bias, directory, reference, tmp_path):
    # As in files of BERT that were converted from TensorFlow; the two exchanged are not the same.
    shutil.copy(directory("bert_masked") / "config.json", tmp_path)
    arrays = load_file(directory("bert_masked") / "model.safetensors")
    spelled = {}
    for key, x in arrays.items():
        if "LayerNorm" in key:
            key = key.replace("LayerNorm.weight", f"LayerNorm.{weight}").replace(
                "LayerNorm.bias", f"LayerNorm.{bias}"
            )
        spelled[key] = x
    save_file(spelled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inputs = encoder_inputs(ENCODERS["bert_masked"])
    with torch.no_grad():
        expected = torch_output(reference("bert_masked"), inputs).numpy()
    found = distance(output(load_pretrained(tmp_path), inputs), expected)
    assert found <= TOLERANCE if weight == "gamma" else found > FAR


@pytest.mark.parametrize("sizes", [(32, 128), (8, 12), (16, 100)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_distance_has_the_bucket_that_it_has_there(sizes, bidirectional):
    num_buckets, farthest = sizes
    table = Embedding(num_buckets, num_buckets, key=jax.random.key(0))
    table = eqx.tree_at(lambda t: t.weight, table, jnp.eye(num_buckets))
    key = jnp.arange(401)[None]
    found = relative_bias(table, key[:, 200:201], key, bidirectional=bidirectional, max_distance=farthest)
    expected = T5Attention._relative_position_bucket(
        torch.arange(401)[None] - 200,
        bidirectional=bidirectional, num_buckets=num_buckets, max_distance=farthest,
    )  # fmt: skip
    np.testing.assert_array_equal(np.argmax(found[0, :, 0], axis=0), expected[0].numpy())
