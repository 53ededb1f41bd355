"""BERT, T5 and BART: encoders, cross-attention, heads that are not vocabularies."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._entry import (
    COL,
    HEADS,
    LAYERS,
    ROW,
    SEQ,
    VOCAB,
    VOCABULARY,
    WHOLE,
    D,
    Entry,
    F,
    attend,
    cross_entropy,
    each,
    linear,
    rms_norm,
    seq2seq_inputs,
    seq2seq_loss,
    tokens,
)
from .decoders import OPT_LAYER_SPECS, SelfAttention

# BERT


class BertSelfAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    num_attention_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.query, self.key, self.value = linear(D, D, k1), linear(D, D, k2), linear(D, D, k3)
        self.num_attention_heads = HEADS

    def __call__(self, x):
        q, k, v = each(self.query, x), each(self.key, x), each(self.value, x)
        return attend(q, k, v, self.num_attention_heads)


class BertOutput(eqx.Module):
    """`BertSelfOutput` and `BertOutput`: a projection, the residual, and the norm after it."""

    dense: eqx.nn.Linear
    LayerNorm: eqx.nn.LayerNorm

    def __init__(self, num_in, key):
        self.dense, self.LayerNorm = linear(num_in, D, key), eqx.nn.LayerNorm(D)

    def __call__(self, x, residual):
        return each(self.LayerNorm, each(self.dense, x) + residual)


class BertAttention(eqx.Module):
    self: BertSelfAttention
    output: BertOutput

    def __init__(this, key):  # pyright: ignore[reportSelfClsParameterName]
        k1, k2 = jax.random.split(key)
        this.self, this.output = BertSelfAttention(k1), BertOutput(D, k2)

    def __call__(this, x):  # pyright: ignore[reportSelfClsParameterName]
        return this.output(this.self(x), x)


class BertIntermediate(eqx.Module):
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.dense = linear(D, F, key)

    def __call__(self, x):
        return jax.nn.gelu(each(self.dense, x))


class BertLayer(eqx.Module):
    attention: BertAttention
    intermediate: BertIntermediate
    output: BertOutput

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.attention = BertAttention(k1)
        self.intermediate, self.output = BertIntermediate(k2), BertOutput(F, k3)

    def __call__(self, x):
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class BertEmbeddings(eqx.Module):
    word_embeddings: eqx.nn.Embedding
    position_embeddings: eqx.nn.Embedding
    token_type_embeddings: eqx.nn.Embedding
    LayerNorm: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.word_embeddings = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.position_embeddings = eqx.nn.Embedding(16, D, key=k2)
        self.token_type_embeddings = eqx.nn.Embedding(2, D, key=k3)
        self.LayerNorm = eqx.nn.LayerNorm(D)

    def __call__(self, ids, types):
        x = each(self.word_embeddings, ids) + each(self.token_type_embeddings, types)
        return each(self.LayerNorm, x + each(self.position_embeddings, jnp.arange(len(ids))))


class BertEncoder(eqx.Module):
    layer: list[BertLayer]

    def __init__(self, key):
        self.layer = [BertLayer(k) for k in jax.random.split(key, LAYERS)]


class BertPooler(eqx.Module):
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.dense = linear(D, D, key)

    def __call__(self, x):
        return jnp.tanh(self.dense(x[0]))


class Bert(eqx.Module):
    embeddings: BertEmbeddings
    encoder: BertEncoder
    pooler: BertPooler
    classifier: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embeddings, self.encoder, self.pooler = BertEmbeddings(k1), BertEncoder(k2), BertPooler(k3)
        self.classifier = linear(D, 2, k4)

    def __call__(self, ids, types):
        x = self.embeddings(ids, types)
        for layer in self.encoder.layer:
            x = layer(x)
        return self.classifier(self.pooler(x))


def bert_inputs(batch_size):
    ids = tokens(batch_size, seq=SEQ - 1)["tokens"]
    types = (np.arange(SEQ) >= SEQ // 2).astype(np.int32)
    labels = np.arange(batch_size, dtype=np.int32) % 2
    return {"tokens": ids, "types": np.tile(types, (batch_size, 1)), "labels": labels}


def bert_loss(model, batch):
    return cross_entropy(jax.vmap(model)(batch["tokens"], batch["types"]), batch["labels"])


BERT_SPECS = {
    "embeddings.word_embeddings.weight": VOCABULARY,
    "embeddings.*": WHOLE,
    "encoder.layer.*.attention.self.query.*": COL,
    "encoder.layer.*.attention.self.key.*": COL,
    "encoder.layer.*.attention.self.value.*": COL,
    "encoder.layer.*.attention.output.dense.weight": ROW,
    "encoder.layer.*.attention.output.dense.bias": WHOLE,
    "encoder.layer.*.intermediate.dense.*": COL,
    "encoder.layer.*.output.dense.weight": ROW,
    "encoder.layer.*.output.dense.bias": WHOLE,
    "encoder.layer.*.LayerNorm.*": WHOLE,
    "pooler.dense.*": COL,
    "classifier.weight": ROW,
    "classifier.bias": WHOLE,
}

# T5

BUCKETS = 8


class T5Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    relative_attention_bias: Any  # in the first block only
    n_heads: int = eqx.field(static=True)

    def __init__(self, key, *, has_bias=False):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        self.q, self.k = linear(D, D, k1, bias=False), linear(D, D, k2, bias=False)
        self.v, self.o = linear(D, D, k3, bias=False), linear(D, D, k4, bias=False)
        self.relative_attention_bias = eqx.nn.Embedding(BUCKETS, HEADS, key=k5) if has_bias else None
        self.n_heads = HEADS

    def position_bias(self, num_queries, num_keys):
        distance = jnp.abs(jnp.arange(num_queries)[:, None] - jnp.arange(num_keys))
        table = self.relative_attention_bias.weight[jnp.minimum(distance, BUCKETS - 1)]
        return jnp.transpose(table, (2, 0, 1))

    def __call__(self, x, source=None, *, causal=False, bias=None):
        source = x if source is None else source
        q, k, v = each(self.q, x), each(self.k, source), each(self.v, source)
        out = attend(q, k, v, self.n_heads, causal=causal, bias=bias, scale=False)
        return each(self.o, out)


class T5SelfAttention(eqx.Module):
    SelfAttention: T5Attention
    layer_norm: eqx.nn.RMSNorm

    def __init__(self, key, has_bias):
        self.SelfAttention, self.layer_norm = T5Attention(key, has_bias=has_bias), rms_norm()

    def __call__(self, x, *, causal, bias):
        return x + self.SelfAttention(each(self.layer_norm, x), causal=causal, bias=bias)


class T5CrossAttention(eqx.Module):
    EncDecAttention: T5Attention
    layer_norm: eqx.nn.RMSNorm

    def __init__(self, key):
        self.EncDecAttention, self.layer_norm = T5Attention(key), rms_norm()

    def __call__(self, x, source):
        return x + self.EncDecAttention(each(self.layer_norm, x), source)


class T5Dense(eqx.Module):
    wi: eqx.nn.Linear
    wo: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.wi, self.wo = linear(D, F, k1, bias=False), linear(F, D, k2, bias=False)

    def __call__(self, x):
        return each(self.wo, jax.nn.relu(each(self.wi, x)))


class T5FeedForward(eqx.Module):
    DenseReluDense: T5Dense
    layer_norm: eqx.nn.RMSNorm

    def __init__(self, key):
        self.DenseReluDense, self.layer_norm = T5Dense(key), rms_norm()

    def __call__(self, x):
        return x + self.DenseReluDense(each(self.layer_norm, x))


class T5Block(eqx.Module):
    layer: list[Any]

    def __init__(self, key, *, has_bias, is_decoder):
        k1, k2, k3 = jax.random.split(key, 3)
        cross = [T5CrossAttention(k2)] if is_decoder else []
        self.layer = [T5SelfAttention(k1, has_bias), *cross, T5FeedForward(k3)]

    def __call__(self, x, source=None, *, bias):
        x = self.layer[0](x, causal=source is not None, bias=bias)
        if source is not None:
            x = self.layer[1](x, source)
        return self.layer[-1](x)


class T5Stack(eqx.Module):
    block: list[T5Block]
    final_layer_norm: eqx.nn.RMSNorm

    def __init__(self, key, *, is_decoder):
        keys = jax.random.split(key, LAYERS)
        self.block = [T5Block(k, has_bias=i == 0, is_decoder=is_decoder) for i, k in enumerate(keys)]
        self.final_layer_norm = rms_norm()

    def __call__(self, x, source=None):
        bias = self.block[0].layer[0].SelfAttention.position_bias(len(x), len(x))
        for block in self.block:
            x = block(x, source, bias=bias)
        return each(self.final_layer_norm, x)


class T5(eqx.Module):
    shared: eqx.nn.Embedding
    encoder: T5Stack
    decoder: T5Stack

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.shared = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.encoder, self.decoder = T5Stack(k2, is_decoder=False), T5Stack(k3, is_decoder=True)

    @property
    def lm_head(self):
        return self.shared.weight

    def __call__(self, source, ids):
        source = self.encoder(each(self.shared, source))
        return self.decoder(each(self.shared, ids), source) * D**-0.5 @ self.lm_head.T


T5_SPECS = {
    "shared.weight": VOCABULARY,
    "*.relative_attention_bias.weight": WHOLE,
    "*Attention.[qkv].weight": COL,
    "*.SelfAttention.o.weight": ROW,
    "decoder.block.*.layer.1.EncDecAttention.o.weight": ROW,
    "encoder.block.*.layer.1.DenseReluDense.wi.weight": COL,
    "encoder.block.*.layer.1.DenseReluDense.wo.weight": ROW,
    "decoder.block.*.layer.2.DenseReluDense.wi.weight": COL,
    "decoder.block.*.layer.2.DenseReluDense.wo.weight": ROW,
    "*layer_norm.weight": WHOLE,
}

# BART


class BartEncoderLayer(eqx.Module):
    self_attn: SelfAttention
    self_attn_layer_norm: eqx.nn.LayerNorm
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    final_layer_norm: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.self_attn, self.fc1, self.fc2 = SelfAttention(k1), linear(D, F, k2), linear(F, D, k3)
        self.self_attn_layer_norm, self.final_layer_norm = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)

    def __call__(self, x):
        x = each(self.self_attn_layer_norm, x + self.self_attn(x))
        return each(self.final_layer_norm, x + each(self.fc2, jax.nn.gelu(each(self.fc1, x))))


class BartDecoderLayer(eqx.Module):
    self_attn: SelfAttention
    self_attn_layer_norm: eqx.nn.LayerNorm
    encoder_attn: SelfAttention
    encoder_attn_layer_norm: eqx.nn.LayerNorm
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    final_layer_norm: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.self_attn, self.encoder_attn = SelfAttention(k1), SelfAttention(k2)
        self.fc1, self.fc2 = linear(D, F, k3), linear(F, D, k4)
        self.self_attn_layer_norm = eqx.nn.LayerNorm(D)
        self.encoder_attn_layer_norm = eqx.nn.LayerNorm(D)
        self.final_layer_norm = eqx.nn.LayerNorm(D)

    def __call__(self, x, source):
        x = each(self.self_attn_layer_norm, x + self.self_attn(x, causal=True))
        x = each(self.encoder_attn_layer_norm, x + self.encoder_attn(x, source))
        return each(self.final_layer_norm, x + each(self.fc2, jax.nn.gelu(each(self.fc1, x))))


class BartStack(eqx.Module):
    embed_positions: eqx.nn.Embedding
    layernorm_embedding: eqx.nn.LayerNorm
    layers: list[Any]
    offset: int = 2

    def __init__(self, key, make):
        k1, *keys = jax.random.split(key, 1 + LAYERS)
        self.embed_positions = eqx.nn.Embedding(16 + self.offset, D, key=k1)
        self.layernorm_embedding = eqx.nn.LayerNorm(D)
        self.layers = [make(k) for k in keys]

    def __call__(self, x, *source):
        x = x + each(self.embed_positions, jnp.arange(len(x)) + self.offset)
        x = each(self.layernorm_embedding, x)
        for layer in self.layers:
            x = layer(x, *source)
        return x


class Bart(eqx.Module):
    shared: eqx.nn.Embedding
    encoder: BartStack
    decoder: BartStack
    final_logits_bias: np.ndarray

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.shared = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.encoder, self.decoder = BartStack(k2, BartEncoderLayer), BartStack(k3, BartDecoderLayer)
        self.final_logits_bias = np.zeros((1, VOCAB), np.float32)

    @property
    def lm_head(self):
        return self.shared.weight

    def __call__(self, source, ids):
        source = self.encoder(each(self.shared, source))
        return self.decoder(each(self.shared, ids), source) @ self.lm_head.T + self.final_logits_bias


BART_SPECS = {
    "shared.weight": VOCABULARY,
    "*.embed_positions.weight": WHOLE,
    "*.layernorm_embedding.*": WHOLE,
    "final_logits_bias": WHOLE,
    **OPT_LAYER_SPECS,
}

ENTRIES = [
    Entry(
        "bert",
        Bert,
        bert_inputs,
        bert_loss,
        BERT_SPECS,
        1 + 2 * LAYERS,
        "`attention.output.dense` and `output.dense` lie in one block, the projection outside the module "
        "that holds q, k and v; pooler and classifier are consecutive in the root block: a pair",
    ),
    Entry(
        "t5",
        T5,
        seq2seq_inputs,
        seq2seq_loss,
        T5_SPECS,
        2 + 5 * LAYERS,
        "two lookups, two all-reduces per encoder layer, three per decoder layer; the table of relative "
        "positions is (buckets, heads) and an eqx.nn.Embedding, yet no vocabulary",
    ),
    Entry(
        "bart",
        Bart,
        seq2seq_inputs,
        seq2seq_loss,
        BART_SPECS,
        2 + 5 * LAYERS,
        "final_logits_bias is a buffer, a NumPy array: whole although it has the vocabulary's size",
    ),
]
