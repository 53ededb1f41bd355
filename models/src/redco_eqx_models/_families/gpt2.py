"""GPT-2 (Radford et al. 2019) and GPT-J (Wang and Komatsuzaki 2021)."""

import dataclasses
from typing import ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import Scoring, split_heads
from redco_eqx_models._blocks.config import Config
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    Ids,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.decoder import DecoderLM, make_head
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    make_linears,
)
from redco_eqx_models._blocks.model import Options, make_layers
from redco_eqx_models._blocks.multihead import MultiHeadAttention
from redco_eqx_models._blocks.positions import Rope, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """The entries of GPT-2 and GPT-J: `n_embd` features, and `n_inner` (4 times as
    many) inside the MLP."""

    aliases = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }

    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    tie_word_embeddings: bool = True

    @property
    def inner(self) -> int:
        """Features inside the MLP."""
        # Files have null for this, and transformers then multiplies by 4.
        return self.n_inner or 4 * self.n_embd


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(GPTConfig):
    """GPT-2, small to XL.

    - `add_cross_attention`: true for the decoder of a `VisionEncoderDecoderModel`.
    """

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    has_positions = True
    only = {"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False}

    vocab_size: int = 50257
    scale_attn_weights: bool = True
    add_cross_attention: bool = False


class Conv1D(eqx.Module):
    """A `Linear` whose weight is stored as `(in, out)`.

    If `out_features` is `(parts, size)`, several projections share the matrix but stay
    separate, so that each can be split over the `tensor` axis by itself; in a file the
    two dims are one.
    """

    weight: Float[Array, "in *out"]
    bias: Float[Array, "*out"]
    in_features: int = eqx.field(static=True)
    out_features: int | tuple[int, int] = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, int],
        *,
        std: float,
        key: Key,
    ):
        # The weight is the transpose of a Linear's, as in `Conv1D` of transformers'
        # `pytorch_utils`, which is not a convolution.
        out = out_features if isinstance(out_features, tuple) else (out_features,)
        self.weight = std * jax.random.normal(key, (in_features, *out))
        self.bias = jnp.zeros(out)
        self.in_features = in_features
        self.out_features = out_features

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch_and_out"]:
        return jnp.tensordot(x, self.weight, axes=1) + self.bias


class GPT2Attention(eqx.Module):
    """Multi-head attention over the tokens themselves or, with `q_attn`, over an
    encoder's output. One matrix makes query, key and value, or the last two.
    """

    q_attn: Conv1D | None
    c_attn: Conv1D
    c_proj: Conv1D
    attn_dropout: eqx.nn.Dropout
    resid_dropout: eqx.nn.Dropout
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, is_cross: bool = False, key: Key):
        size = config.n_embd
        std = config.initializer_range
        attn_key, proj_key, query_key = jax.random.split(key, 3)
        # In files, the outputs for query, key and value lie side by side.
        self.c_attn = Conv1D(size, (2 if is_cross else 3, size), std=std, key=attn_key)
        self.q_attn = None
        if is_cross:
            self.q_attn = Conv1D(size, size, std=std, key=query_key)
        # Radford et al. 2019, section 2.3: smaller by the root of the number of
        # branches that add to the stream, which are two for each layer.
        self.c_proj = Conv1D(
            size, size, std=std / (2 * config.n_layer) ** 0.5, key=proj_key
        )
        self.attn_dropout = eqx.nn.Dropout(config.attn_pdrop)
        self.resid_dropout = eqx.nn.Dropout(config.resid_pdrop)
        self.config = config

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        attn_key, resid_key = split_key(key, 2)
        size = self.config.head_size
        scale = None if self.config.scale_attn_weights else 1.0
        scoring = Scoring(scale=scale, dropout=self.attn_dropout, dropout_key=attn_key)
        if self.q_attn is None:
            (qkv,) = context.column(x, self.c_attn, unit=size)
            q, k, v = (split_heads(qkv[:, :, i], size) for i in range(3))
            heads, cache = context.attend(q, k, v, cache, **scoring)
        else:
            (q,) = context.column(x, self.q_attn, unit=size)
            q = split_heads(q, size)
            heads = context.cross_attend(q, **scoring)
        output = context.row(heads, self.c_proj, unit=size)
        return dropout(self.resid_dropout, output, resid_key), cache


class GPT2MLP(eqx.Module):
    """Two projections with an activation between them."""

    c_fc: Conv1D
    c_proj: Conv1D


class GPT2Block(eqx.Module):
    """Attention, cross-attention if there is an encoder, and MLP, each with a norm
    before it, added to the stream.
    """

    ln_1: LayerNorm
    attn: GPT2Attention
    ln_cross_attn: LayerNorm | None
    crossattention: GPT2Attention | None
    ln_2: LayerNorm
    mlp: GPT2MLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPT2Config, *, key: Key):
        attn_key, mlp_key, cross_key = jax.random.split(key, 3)
        fc_key, proj_key = jax.random.split(mlp_key)
        size = config.n_embd
        inner = config.inner
        std = config.initializer_range
        self.ln_1, self.ln_2 = (
            LayerNorm(size, eps=config.layer_norm_epsilon) for _ in range(2)
        )
        self.attn = GPT2Attention(config, key=attn_key)
        self.ln_cross_attn = self.crossattention = None
        if config.add_cross_attention:
            self.ln_cross_attn = LayerNorm(size, eps=config.layer_norm_epsilon)
            self.crossattention = GPT2Attention(config, is_cross=True, key=cross_key)
        self.mlp = GPT2MLP(
            Conv1D(size, inner, std=std, key=fc_key),
            Conv1D(inner, size, std=std / (2 * config.n_layer) ** 0.5, key=proj_key),
        )
        self.dropout = eqx.nn.Dropout(config.resid_pdrop)

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        attn_key, mlp_key, cross_key = split_key(key, 3)
        attended, cache = self.attn(self.ln_1(x), context, cache, attn_key)
        x = x + attended
        if self.crossattention is not None and self.ln_cross_attn is not None:
            # Its keys and values are in the context's memory, not in the cache.
            y = self.ln_cross_attn(x)
            attended, _ = self.crossattention(y, context, None, cross_key)
            x = x + attended
        activation = self.attn.config.activation_function
        y = context.mlp(self.ln_2(x), self.mlp.c_fc, activation, self.mlp.c_proj)
        return x + dropout(self.dropout, y, mlp_key), cache


class GPTModel(eqx.Module):
    """The model without its head. Only GPT-2 has a table of positions."""

    wte: Embedding
    wpe: Embedding | None
    drop: eqx.nn.Dropout
    h: PyTree
    ln_f: LayerNorm

    def __init__(
        self,
        config: GPTConfig,
        make_block: type[eqx.Module],
        *,
        stacked: bool,
        key: Key,
    ):
        token_key, position_key, layers_key = jax.random.split(key, 3)
        size = config.n_embd
        std = config.initializer_range
        self.wte = Embedding(config.vocab_size, size, std=std, key=token_key)
        self.wpe = None
        if config.has_positions:
            self.wpe = Embedding(config.n_positions, size, std=std, key=position_key)
        self.drop = eqx.nn.Dropout(config.embd_pdrop)
        self.h = make_layers(make_block, config, stacked=stacked, key=layers_key)
        self.ln_f = LayerNorm(size, eps=config.layer_norm_epsilon)


class GPT2LMHeadModel(DecoderLM):
    """GPT-2 with its head, which is the embedding table unless the configuration unties
    them."""

    transformer: GPTModel
    lm_head: Linear | None
    config: GPTConfig = eqx.field(static=True)

    stacks = ("transformer.h",)
    vocabulary = (r"\.wte$", r"^lm_head$")
    fused = (r"\.c_attn\.(weight|bias)$",)
    prefixes = ("transformer.",)
    # The causal mask, which old versions of transformers saved as a buffer. The bias of
    # the projection is `attn.c_attn.bias`.
    ignored = (r"\battn\.(masked_)?bias$",)
    tied = {"lm_head.weight": "transformer.wte.weight"}
    block: ClassVar[type[eqx.Module]] = GPT2Block
    """The class of its layers."""
    head_bias: ClassVar[bool] = False
    """True if the head has a bias."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        std = config.initializer_range
        bias = self.head_bias
        self.transformer = GPTModel(config, self.block, stacked=stacked, key=model_key)
        self.lm_head = make_head(
            config, config.n_embd, use_bias=bias, std=std, key=head_key
        )

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        body = self.transformer
        x = context.embed(body.wte, input_ids)
        if body.wpe is not None:
            x = x + body.wpe(context.positions)
        return dropout(body.drop, x, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.transformer.ln_f(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(GPTConfig):
    """GPT-J. The first `rotary_dim` features of each head turn with the position."""

    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    # The head has a bias of its own, so it is more than the table.
    only = {"tie_word_embeddings": False}

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    rotary_dim: int = 64
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_size:
            expected = f"even and at most the size of a head, {self.head_size}"
            raise self.error(
                f"rotary_dim={self.rotary_dim}, but it must be {expected}."
            )


class GPTJMLP(eqx.Module):
    """Two projections with an activation between them."""

    fc_in: Linear
    fc_out: Linear


class GPTJBlock(eqx.Module):
    """Attention and MLP in parallel: both read the same normalised stream, and both are
    added to it.

    The four projections that read it therefore share one reduction in the backward
    pass, and the two output projections share one in the forward pass. Rotary position
    embeddings rotate pairs of neighbouring features.
    """

    ln_1: LayerNorm
    attn: MultiHeadAttention
    mlp: GPTJMLP
    resid_dropout: eqx.nn.Dropout
    config: GPTJConfig = eqx.field(static=True)

    def __init__(self, config: GPTJConfig, *, key: Key):
        attn_key, mlp_key = jax.random.split(key)
        size = config.n_embd
        inner = config.inner
        std = config.initializer_range
        self.ln_1 = LayerNorm(size, eps=config.layer_norm_epsilon)
        # The projections of the attention have no biases, but those of the MLP do.
        self.attn = MultiHeadAttention(
            size,
            config.n_head,
            use_bias=False,
            dropout=config.attn_pdrop,
            std=std,
            key=attn_key,
        )
        self.mlp = GPTJMLP(
            *make_linears(mlp_key, (size, inner), (inner, size), std=std)
        )
        self.resid_dropout = eqx.nn.Dropout(config.resid_pdrop)
        self.config = config

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        heads_key, *keys = split_key(key, 3)
        *projections, close = self.attn.projections
        unit = self.config.head_size
        # The base is 10,000 in `create_sinusoidal_positions` of transformers' GPT-J,
        # whatever the configuration.
        frequencies = Rope().frequencies(self.config.rotary_dim)
        *qkv, hidden = context.column(
            self.ln_1(x), *projections, self.mlp.fc_in, unit=unit
        )
        q, k, v = (split_heads(y, unit) for y in qkv)
        q, k = (
            rotate(y, context.positions, frequencies, interleaved=True) for y in (q, k)
        )
        heads, cache = context.attend(
            q, k, v, cache, dropout=self.attn.dropout, dropout_key=heads_key
        )
        hidden = ACTIVATIONS[self.config.activation_function](hidden)
        branches = [(heads, close), (hidden, self.mlp.fc_out)]
        return context.add(x, branches, self.resid_dropout, keys, unit=unit), cache


class GPTJForCausalLM(GPT2LMHeadModel):
    """GPT-J with its head, which has a bias. The rest is as in GPT-2."""

    tied = {}
    block = GPTJBlock
    head_bias = True

    def __init__(
        self,
        config: GPTJConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, stacked=stacked, key=key, **options)
