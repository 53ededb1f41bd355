"""Language models: lists and stacks of layers, groups of heads, tied heads, odd
vocabularies, T5, LoRA."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import (
    HEADS,
    LAYERS,
    SEQ,
    VOCAB,
    D,
    Entry,
    F,
    cross_entropy,
    of_rows,
    of_tokens,
    split,
    tokens,
)
from ._layers import (
    attend,
    attention,
    each,
    named,
    norm,
    repeated,
    rms_norm,
    stack,
    through,
)


def table(key: Any, num: int = VOCAB, width: int = D) -> eqx.nn.Embedding:
    return eqx.nn.Embedding(num, width, key=key)


# LLaMA: paper, Figure 8


class LlamaAttention(eqx.Module):
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    num_heads: int = eqx.field(static=True)
    num_key_value_heads: int = eqx.field(static=True)

    def __call__(self, x):
        layers = self.q_proj, self.k_proj, self.v_proj, self.o_proj
        return attention(layers, x, causal=True, rotary=True)


def llama(
    key: Any,
    *,
    num_key_value_heads: int = HEADS,
    vocab: int = VOCAB,
    is_stacked: bool = False,
) -> Any:
    k1, k2, k3 = jax.random.split(key, 3)
    own, other = (D, D), (D, num_key_value_heads * D // HEADS)
    heads: Any = {"num_heads": HEADS, "num_key_value_heads": num_key_value_heads}

    def layer(key: Any) -> Any:
        k1, k2 = jax.random.split(key)
        projections = named(
            k1, q_proj=own, k_proj=other, v_proj=other, o_proj=own, bias=False
        )
        return {
            "self_attn": LlamaAttention(**projections, **heads),
            "mlp": named(
                k2, gate_proj=(D, F), up_proj=(D, F), down_proj=(F, D), bias=False
            ),
            "input_layernorm": rms_norm(),
            "post_attention_layernorm": rms_norm(),
        }

    return {
        "embed_tokens": table(k1, vocab),
        "layers": stack(layer, k3) if is_stacked else repeated(layer, k3),
        "norm": rms_norm(),
        "lm_head": named(k2, lm_head=(D, vocab), bias=False)["lm_head"],
    }


def apply_llama(model: Any, ids: Any) -> Any:
    def block(layer, x):
        mlp = layer["mlp"]
        x = x + layer["self_attn"](each(layer["input_layernorm"], x))
        h = each(layer["post_attention_layernorm"], x)
        return x + each(
            mlp["down_proj"],
            jax.nn.silu(each(mlp["gate_proj"], h)) * each(mlp["up_proj"], h),
        )

    x = through(model["layers"], block, each(model["embed_tokens"], ids))
    return each(model["lm_head"], each(model["norm"], x))


def shared_llama(key: Any) -> Any:
    """The head is the embedding, by `eqx.nn.Shared`, and has a bias of its own."""
    model = llama(key)
    both = (model.pop("embed_tokens"), named(key, head=(D, VOCAB))["head"])
    del model["lm_head"]
    return {
        "shared": eqx.nn.Shared(
            both, lambda pair: pair[1].weight, lambda pair: pair[0].weight
        ),
        **model,
    }


def apply_shared_llama(model: Any, ids: Any) -> Any:
    embedding, head = model["shared"]()
    return apply_llama({**model, "embed_tokens": embedding, "lm_head": head}, ids)


ENDS = "embed_tokens lm_head shared.pytree.?"


def llama_specs(
    projections: str = "*[qkv]_proj", ends: str = ENDS, stacked: int = 0
) -> dict[str, Any]:
    layers = split(
        f"{projections} *gate_proj *up_proj", "*o_proj *down_proj", stacked=stacked
    )
    return layers | split(ends)


# GPT-2


def gpt2(key: Any) -> Any:
    k1, k2, *keys = jax.random.split(key, 2 + LAYERS)

    def block(key):
        layers = named(
            key, c_attn=(D, 3 * D), out=(D, D), c_fc=(D, 4 * D), c_proj=(4 * D, D)
        )
        attn = {"c_attn": layers.pop("c_attn"), "c_proj": layers.pop("out")}
        return {"ln_1": norm(), "attn": attn, "ln_2": norm(), "mlp": layers}

    return {
        "wte": table(k1),
        "wpe": table(k2, 16),
        "h": [block(k) for k in keys],
        "ln_f": norm(),
    }


def attention_of_one_matrix(qkv: Any, out: Any, x: Any, **options: Any) -> Any:
    return each(out, attend(*jnp.split(each(qkv, x), 3, axis=-1), **options))


def apply_gpt2(model: Any, ids: Any) -> Any:
    def block(layer, x):
        attn, mlp = layer["attn"], layer["mlp"]
        x = x + attention_of_one_matrix(
            attn["c_attn"], attn["c_proj"], each(layer["ln_1"], x), causal=True
        )
        return x + each(
            mlp["c_proj"], jax.nn.gelu(each(mlp["c_fc"], each(layer["ln_2"], x)))
        )

    x = each(model["wte"], ids) + each(model["wpe"], jnp.arange(len(ids)))
    return each(model["ln_f"], through(model["h"], block, x)) @ model["wte"].weight.T


# T5

BUCKETS = 8


def t5_attention(key: Any) -> dict[str, Any]:
    return named(key, **dict.fromkeys("qkvo", (D, D)), bias=False)


def t5_stack(key: Any, *, is_decoder: bool) -> Any:
    def block(key):
        k1, k2, k3 = jax.random.split(key, 3)
        cross = (
            [{"EncDecAttention": t5_attention(k2), "layer_norm": rms_norm()}]
            if is_decoder
            else []
        )
        dense = {
            "DenseReluDense": named(k3, wi=(D, F), wo=(F, D), bias=False),
            "layer_norm": rms_norm(),
        }
        return {
            "layer": [
                {"SelfAttention": t5_attention(k1), "layer_norm": rms_norm()},
                *cross,
                dense,
            ]
        }

    *keys, last = jax.random.split(key, LAYERS + 1)
    blocks = [block(k) for k in keys]
    blocks[0]["layer"][0]["SelfAttention"]["relative_attention_bias"] = table(
        last, BUCKETS, HEADS
    )
    return {"block": blocks, "final_layer_norm": rms_norm()}


def apply_t5_stack(model: Any, x: Any, source: Any = None) -> Any:
    relative = model["block"][0]["layer"][0]["SelfAttention"][
        "relative_attention_bias"
    ].weight
    distance = jnp.abs(jnp.arange(len(x))[:, None] - jnp.arange(len(x)))
    bias = jnp.transpose(relative[jnp.minimum(distance, BUCKETS - 1)], (2, 0, 1))

    def block(one, x):
        own, *crossed, dense = one["layer"]
        layers = (own["SelfAttention"][name] for name in "qkvo")
        h = each(own["layer_norm"], x)
        x = x + attention(layers, h, causal=source is not None, scale=False, bias=bias)
        for cross in crossed:
            layers = (cross["EncDecAttention"][name] for name in "qkvo")
            x = x + attention(layers, each(cross["layer_norm"], x), source, scale=False)
        h = each(dense["DenseReluDense"]["wi"], each(dense["layer_norm"], x))
        return x + each(dense["DenseReluDense"]["wo"], jax.nn.relu(h))

    return each(model["final_layer_norm"], through(model["block"], block, x))


def t5(key: Any) -> Any:
    k1, k2, k3 = jax.random.split(key, 3)
    stacks = {
        "encoder": t5_stack(k2, is_decoder=False),
        "decoder": t5_stack(k3, is_decoder=True),
    }
    return {"shared": table(k1), **stacks}


def t5_inputs(batch_size: int) -> dict[str, Any]:
    return {
        "source": tokens(batch_size, seq=SEQ - 1, seed=1)["tokens"],
        **tokens(batch_size),
    }


def t5_loss(model: Any, batch: Any) -> Any:
    def logits(source, ids):
        source = apply_t5_stack(model["encoder"], each(model["shared"], source))
        x = apply_t5_stack(model["decoder"], each(model["shared"], ids), source)
        return x * D**-0.5 @ model["shared"].weight.T

    return cross_entropy(
        jax.vmap(logits)(batch["source"], batch["tokens"][:, :-1]),
        batch["tokens"][:, 1:],
    )


# GPT-J (paper, Figure 7) with low-rank adapters on column- and row-parallel layers

RANK = 4  # divides over tensor=4, so that splitting it is a mistake one can make


class LoRALinear(eqx.Module):
    linear: Any
    lora_a: Any
    lora_b: Any

    def __call__(self, x):
        return self.linear(x) + self.lora_b(self.lora_a(x))


def adapted(base: eqx.nn.Linear, key: Any) -> LoRALinear:
    ranks: Any = {
        "lora_a": (base.in_features, RANK),
        "lora_b": (RANK, base.out_features),
    }
    return LoRALinear(base, **named(key, **ranks, bias=False))


def lora(key: Any) -> Any:
    k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
    names = "q_proj", "k_proj", "v_proj", "out_proj"

    def block(key):
        k1, k2, *keys = jax.random.split(key, 6)
        attn = named(k1, **dict.fromkeys(names, (D, D)), bias=False)
        mlp = named(k2, fc_in=(D, F), fc_out=(F, D))
        q, v, out, down = map(
            adapted,
            (attn["q_proj"], attn["v_proj"], attn["out_proj"], mlp["fc_out"]),
            keys,
        )
        attn |= {"q_proj": q, "v_proj": v, "out_proj": out}
        return {"ln_1": norm(), "attn": attn, "mlp": mlp | {"fc_out": down}}

    return {
        "wte": table(k1),
        **named(k2, lm_head=(D, VOCAB)),
        "h": [block(k) for k in keys],
        "ln_f": norm(),
    }


def apply_gptj(model: Any, ids: Any) -> Any:
    def block(layer, x):
        attn = layer["attn"]
        h = each(layer["ln_1"], x)
        layers = (attn[name] for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
        x = x + attention(layers, h, causal=True, rotary=True)
        return x + each(
            layer["mlp"]["fc_out"], jax.nn.gelu(each(layer["mlp"]["fc_in"], h))
        )

    x = through(model["h"], block, each(model["wte"], ids))
    return each(model["lm_head"], each(model["ln_f"], x))


# Attention alone: query, key and value in one matrix, and in raw arrays


def fused(key: Any) -> Any:
    return {"norm": norm(), **named(key, qkv=(D, 3 * D), proj=(D, D))}


def apply_fused(layers: Any, x: Any) -> Any:
    def block(layer, x):
        return x + attention_of_one_matrix(
            layer["qkv"], layer["proj"], each(layer["norm"], x)
        )

    return through(layers, block, x)


def einsum(key: Any) -> Any:
    """(dim, heads, head) and (heads, head, dim): no Linear to take a role from."""
    shapes = dict.fromkeys(("w_q", "w_k", "w_v"), (D, HEADS, D // HEADS)) | {
        "w_o": (HEADS, D // HEADS, D)
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.2 * jax.random.normal(k, shape)
        for (name, shape), k in zip(shapes.items(), keys)
    }


def apply_einsum(model: Any, x: Any) -> Any:
    q, k, v = (
        jnp.einsum("td,dhk->thk", x, model[name]) for name in ("w_q", "w_k", "w_v")
    )
    return x + jnp.einsum("thk,hkd->td", attend(q, k, v).reshape(q.shape), model["w_o"])


GROUPED = {heads: partial(llama, num_key_value_heads=heads) for heads in (2, 4)}
STACKED = {heads: partial(make, is_stacked=True) for heads, make in GROUPED.items()}

LORA_COLUMNS = "wte lm_head *.k_proj *.[qv]_proj.linear *.[qv]_proj.lora_b *.fc_in"
LORA_ROWS = "*.out_proj.linear *.out_proj.lora_a *.fc_out.linear *.fc_out.lora_a"

ENTRIES = [
    of_tokens("llama", llama, apply_llama, llama_specs()),
    # 2 key/value heads over 4 devices: their 8 output features divide, but not their
    # heads.
    of_tokens("llama_gqa_refused", GROUPED[2], apply_llama, llama_specs("*q_proj")),
    # 4 layers: their dim would divide; stacked norms are (layers, D), and no Linear. 4
    # key/value heads over 4 devices: k and v split like q.
    of_tokens("stacked_llama", STACKED[4], apply_llama, llama_specs(stacked=1)),
    of_tokens(
        "stacked_llama_gqa_refused",
        STACKED[2],
        apply_llama,
        llama_specs("*q_proj", stacked=1),
    ),
    # 50 words over 4 devices: table and head whole, layers as usual.
    of_tokens(
        "vocab_indivisible",
        partial(llama, vocab=50),
        apply_llama,
        llama_specs(ends=""),
        vocab=50,
    ),
    # One leaf for both; the head's bias follows the vocabulary.
    of_tokens("shared_head", shared_llama, apply_shared_llama, llama_specs()),
    # An even split of c_attn's 3 * D outputs crosses the borders of q, k and v: it
    # costs permutes. The head is tied by use, so it is no leaf; positions are whole.
    of_tokens("gpt2", gpt2, apply_gpt2, split("wte *.c_attn *.c_fc", "*.c_proj")),
    # A row-parallel adapter adds an all-reduce of `rank` numbers per token.
    of_tokens("lora", lora, apply_gptj, split(LORA_COLUMNS, LORA_ROWS)),
    # An even split of the outputs crosses the borders of q, k and v: permutes.
    of_rows(
        "fused_qkv",
        partial(repeated, fused),
        apply_fused,
        split("*.qkv", "*.proj"),
        x=(SEQ, D),
    ),
    # Raw 3-D arrays: the dim of heads is split.
    of_rows(
        "raw_einsum",
        einsum,
        apply_einsum,
        {"w_[qkv]": (None, "tensor"), "w_o": ("tensor",)},
        x=(SEQ, D),
    ),
    # Two lookups, two all-reduces per encoder layer, three per decoder layer; the table
    # of relative positions is (buckets, heads) and an eqx.nn.Embedding, yet no
    # vocabulary: whole.
    Entry("t5", t5, t5_inputs, t5_loss, split("shared *.[qkv] *.wi", "*.o *.wo")),
]
