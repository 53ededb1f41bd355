"""LLaMA-, GPT-2-, GPT-J- and OPT-shaped language models in plain Equinox, for the benchmarks.

Their leaves have the names of Hugging Face's checkpoint files, so the rules meet them as a user's model
would show them. Nothing in here knows of devices or meshes. A model maps the tokens of one sequence to the
logits of each next token; `jax.vmap(model)` takes a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

Tokens = Int[Array, " length"]
Hidden = Float[Array, "length dim"]
Heads = Float[Array, "length heads head_dim"]
Logits = Float[Array, "length vocabulary"]


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batch; by default those of the peer's measurement.

    The MLP is `4 * dim` wide; LLaMA's gated one `8/3 * dim`, rounded up to a multiple of 16 (688 of 256).
    """

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    vocabulary: int = 1024
    length: int = 128
    batch_size: int = 8

    @property
    def gated_width(self) -> int:
        return 16 * math.ceil(8 * self.dim / 3 / 16)


def loss_fn(model: Any, batch: dict[str, Int[Array, "batch length+1"]], key: PRNGKeyArray) -> Float[Array, ""]:
    """Mean next-token cross entropy."""
    logits = jax.vmap(model)(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def attend(
    query: Hidden, key: Hidden, value: Hidden, num_heads: int, rotate: Callable[[Heads], Heads] | None = None
) -> Hidden:
    """Causal attention with softmax."""
    query, key, value = (x.reshape(len(x), num_heads, -1) for x in (query, key, value))
    if rotate is not None:
        query, key = rotate(query), rotate(key)
    scores = jnp.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


def rotate_halves(x: Heads) -> Heads:
    """LLaMA's rotary positions: feature i is paired with feature i + head_dim / 2."""
    sin, cos = _angles(len(x), x.shape[-1])
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_neighbours(x: Heads) -> Heads:
    """GPT-J's: of neighbours, and on the first quarter of the features (64 of 256 in its checkpoint)."""
    rotary, rest = x[..., : x.shape[-1] // 4], x[..., x.shape[-1] // 4 :]
    sin, cos = _angles(len(x), rotary.shape[-1])
    a, b = rotary[..., ::2], rotary[..., 1::2]
    rotary = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotary.shape)
    return jnp.concatenate([rotary, rest], axis=-1)


def _angles(length: int, num_features: int) -> tuple[Array, Array]:
    frequencies = 10000.0 ** (-jnp.arange(0, num_features, 2) / num_features)
    angles = jnp.arange(length)[:, None, None] * frequencies
    return jnp.sin(angles), jnp.cos(angles)


# LLaMA ---------------------------------------------------------------------------------------------------


class LlamaAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            eqx.nn.Linear(sizes.dim, sizes.dim, use_bias=False, key=k) for k in jax.random.split(key, 4)
        )
        self.num_heads = sizes.num_heads

    def __call__(self, x: Hidden) -> Hidden:
        query, key, value = jax.vmap(self.q_proj)(x), jax.vmap(self.k_proj)(x), jax.vmap(self.v_proj)(x)
        return jax.vmap(self.o_proj)(attend(query, key, value, self.num_heads, rotate_halves))


class LlamaMLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = eqx.nn.Linear(sizes.dim, sizes.gated_width, use_bias=False, key=gate_key)
        self.up_proj = eqx.nn.Linear(sizes.dim, sizes.gated_width, use_bias=False, key=up_key)
        self.down_proj = eqx.nn.Linear(sizes.gated_width, sizes.dim, use_bias=False, key=down_key)

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(eqx.Module):
    self_attn: LlamaAttention
    mlp: LlamaMLP
    input_layernorm: eqx.nn.RMSNorm
    post_attention_layernorm: eqx.nn.RMSNorm

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.self_attn = LlamaAttention(sizes, key=attention_key)
        self.mlp = LlamaMLP(sizes, key=mlp_key)
        self.input_layernorm = eqx.nn.RMSNorm(sizes.dim, use_bias=False)
        self.post_attention_layernorm = eqx.nn.RMSNorm(sizes.dim, use_bias=False)

    def __call__(self, x: Hidden) -> Hidden:
        x = x + self.self_attn(jax.vmap(self.input_layernorm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.post_attention_layernorm)(x))


class LlamaModel(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[LlamaLayer]
    norm: eqx.nn.RMSNorm

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        embedding_key, *layer_keys = jax.random.split(key, 1 + sizes.num_layers)
        self.embed_tokens = eqx.nn.Embedding(sizes.vocabulary, sizes.dim, key=embedding_key)
        self.layers = [LlamaLayer(sizes, key=k) for k in layer_keys]
        self.norm = eqx.nn.RMSNorm(sizes.dim, use_bias=False)

    def __call__(self, tokens: Tokens) -> Hidden:
        x = jax.vmap(self.embed_tokens)(tokens)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.norm)(x)


class Llama(eqx.Module):
    """RMSNorm, rotary positions, a gated MLP, and a head of its own."""

    model: LlamaModel
    lm_head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        model_key, head_key = jax.random.split(key)
        self.model = LlamaModel(sizes, key=model_key)
        self.lm_head = eqx.nn.Linear(sizes.dim, sizes.vocabulary, use_bias=False, key=head_key)

    def __call__(self, tokens: Tokens) -> Logits:
        return jax.vmap(self.lm_head)(self.model(tokens))


# GPT-2 ---------------------------------------------------------------------------------------------------


class GPT2Attention(eqx.Module):
    c_attn: eqx.nn.Linear
    c_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        attention_key, projection_key = jax.random.split(key)
        self.c_attn = eqx.nn.Linear(sizes.dim, 3 * sizes.dim, key=attention_key)
        self.c_proj = eqx.nn.Linear(sizes.dim, sizes.dim, key=projection_key)
        self.num_heads = sizes.num_heads

    def __call__(self, x: Hidden) -> Hidden:
        query, key, value = jnp.split(jax.vmap(self.c_attn)(x), 3, axis=-1)
        return jax.vmap(self.c_proj)(attend(query, key, value, self.num_heads))


class GPT2MLP(eqx.Module):
    c_fc: eqx.nn.Linear
    c_proj: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.c_fc = eqx.nn.Linear(sizes.dim, 4 * sizes.dim, key=in_key)
        self.c_proj = eqx.nn.Linear(4 * sizes.dim, sizes.dim, key=out_key)

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        return self.c_proj(jax.nn.gelu(self.c_fc(x)))


class GPT2Block(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GPT2Attention
    ln_2: eqx.nn.LayerNorm
    mlp: GPT2MLP

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.ln_1, self.ln_2 = eqx.nn.LayerNorm(sizes.dim), eqx.nn.LayerNorm(sizes.dim)
        self.attn = GPT2Attention(sizes, key=attention_key)
        self.mlp = GPT2MLP(sizes, key=mlp_key)

    def __call__(self, x: Hidden) -> Hidden:
        x = x + self.attn(jax.vmap(self.ln_1)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.ln_2)(x))


class GPT2(eqx.Module):
    """Learned positions, query, key and value in one matrix, and the embedding as head."""

    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: list[GPT2Block]
    ln_f: eqx.nn.LayerNorm

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        token_key, position_key, *layer_keys = jax.random.split(key, 2 + sizes.num_layers)
        self.wte = eqx.nn.Embedding(sizes.vocabulary, sizes.dim, key=token_key)
        self.wpe = eqx.nn.Embedding(sizes.length, sizes.dim, key=position_key)
        self.h = [GPT2Block(sizes, key=k) for k in layer_keys]
        self.ln_f = eqx.nn.LayerNorm(sizes.dim)

    def __call__(self, tokens: Tokens) -> Logits:
        x = jax.vmap(self.wte)(tokens) + jax.vmap(self.wpe)(jnp.arange(len(tokens)))
        for block in self.h:
            x = block(x)
        return jax.vmap(self.ln_f)(x) @ self.wte.weight.T


# GPT-J ---------------------------------------------------------------------------------------------------


class GPTJAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            eqx.nn.Linear(sizes.dim, sizes.dim, use_bias=False, key=k) for k in jax.random.split(key, 4)
        )
        self.num_heads = sizes.num_heads

    def __call__(self, x: Hidden) -> Hidden:
        query, key, value = jax.vmap(self.q_proj)(x), jax.vmap(self.k_proj)(x), jax.vmap(self.v_proj)(x)
        return jax.vmap(self.out_proj)(attend(query, key, value, self.num_heads, rotate_neighbours))


class GPTJMLP(eqx.Module):
    fc_in: eqx.nn.Linear
    fc_out: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.fc_in = eqx.nn.Linear(sizes.dim, 4 * sizes.dim, key=in_key)
        self.fc_out = eqx.nn.Linear(4 * sizes.dim, sizes.dim, key=out_key)

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        return self.fc_out(jax.nn.gelu(self.fc_in(x)))


class GPTJBlock(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GPTJAttention
    mlp: GPTJMLP

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.ln_1 = eqx.nn.LayerNorm(sizes.dim)
        self.attn = GPTJAttention(sizes, key=attention_key)
        self.mlp = GPTJMLP(sizes, key=mlp_key)

    def __call__(self, x: Hidden) -> Hidden:
        hidden = jax.vmap(self.ln_1)(x)
        return x + self.attn(hidden) + jax.vmap(self.mlp)(hidden)


class GPTJTransformer(eqx.Module):
    wte: eqx.nn.Embedding
    h: list[GPTJBlock]
    ln_f: eqx.nn.LayerNorm

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        embedding_key, *layer_keys = jax.random.split(key, 1 + sizes.num_layers)
        self.wte = eqx.nn.Embedding(sizes.vocabulary, sizes.dim, key=embedding_key)
        self.h = [GPTJBlock(sizes, key=k) for k in layer_keys]
        self.ln_f = eqx.nn.LayerNorm(sizes.dim)

    def __call__(self, tokens: Tokens) -> Hidden:
        x = jax.vmap(self.wte)(tokens)
        for block in self.h:
            x = block(x)
        return jax.vmap(self.ln_f)(x)


class GPTJ(eqx.Module):
    """Attention and MLP side by side, rotary positions, and a head with a bias."""

    transformer: GPTJTransformer
    lm_head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        transformer_key, head_key = jax.random.split(key)
        self.transformer = GPTJTransformer(sizes, key=transformer_key)
        self.lm_head = eqx.nn.Linear(sizes.dim, sizes.vocabulary, key=head_key)

    def __call__(self, tokens: Tokens) -> Logits:
        return jax.vmap(self.lm_head)(self.transformer(tokens))


# OPT -----------------------------------------------------------------------------------------------------


class OPTAttention(eqx.Module):
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    q_proj: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            eqx.nn.Linear(sizes.dim, sizes.dim, key=k) for k in jax.random.split(key, 4)
        )
        self.num_heads = sizes.num_heads

    def __call__(self, x: Hidden) -> Hidden:
        query, key, value = jax.vmap(self.q_proj)(x), jax.vmap(self.k_proj)(x), jax.vmap(self.v_proj)(x)
        return jax.vmap(self.out_proj)(attend(query, key, value, self.num_heads))


class OPTLayer(eqx.Module):
    self_attn: OPTAttention
    self_attn_layer_norm: eqx.nn.LayerNorm
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    final_layer_norm: eqx.nn.LayerNorm

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        attention_key, in_key, out_key = jax.random.split(key, 3)
        self.self_attn = OPTAttention(sizes, key=attention_key)
        self.self_attn_layer_norm = eqx.nn.LayerNorm(sizes.dim)
        self.fc1 = eqx.nn.Linear(sizes.dim, 4 * sizes.dim, key=in_key)
        self.fc2 = eqx.nn.Linear(4 * sizes.dim, sizes.dim, key=out_key)
        self.final_layer_norm = eqx.nn.LayerNorm(sizes.dim)

    def __call__(self, x: Hidden) -> Hidden:
        x = x + self.self_attn(jax.vmap(self.self_attn_layer_norm)(x))
        hidden = jax.nn.relu(jax.vmap(self.fc1)(jax.vmap(self.final_layer_norm)(x)))
        return x + jax.vmap(self.fc2)(hidden)


class OPTDecoder(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    embed_positions: eqx.nn.Embedding
    final_layer_norm: eqx.nn.LayerNorm
    layers: list[OPTLayer]
    offset: int = eqx.field(static=True)  # the table's first rows are not for positions

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        token_key, position_key, *layer_keys = jax.random.split(key, 2 + sizes.num_layers)
        self.offset = 2
        self.embed_tokens = eqx.nn.Embedding(sizes.vocabulary, sizes.dim, key=token_key)
        self.embed_positions = eqx.nn.Embedding(sizes.length + self.offset, sizes.dim, key=position_key)
        self.final_layer_norm = eqx.nn.LayerNorm(sizes.dim)
        self.layers = [OPTLayer(sizes, key=k) for k in layer_keys]

    def __call__(self, tokens: Tokens) -> Hidden:
        positions = jnp.arange(len(tokens)) + self.offset
        x = jax.vmap(self.embed_tokens)(tokens) + jax.vmap(self.embed_positions)(positions)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.final_layer_norm)(x)


class OPTModel(eqx.Module):
    decoder: OPTDecoder


class OPT(eqx.Module):
    """Learned positions from 2 on, the MLP's matrices directly in the layer, and the embedding as head."""

    model: OPTModel

    def __init__(self, sizes: Sizes, *, key: PRNGKeyArray):
        self.model = OPTModel(OPTDecoder(sizes, key=key))

    def __call__(self, tokens: Tokens) -> Logits:
        return self.model.decoder(tokens) @ self.model.decoder.embed_tokens.weight.T


MODELS: dict[str, Callable[..., Any]] = {"LLaMA": Llama, "GPT-2": GPT2, "GPT-J": GPTJ, "OPT": OPT}
