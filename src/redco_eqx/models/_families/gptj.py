"""GPT-J (Wang and Komatsuzaki 2021)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Unpack

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config, Json
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.decoder import DecoderLM
from redco_eqx.models._blocks.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, dropout, split_key
from redco_eqx.models._blocks.model import Options, make_layers
from redco_eqx.models._blocks.rope import Rope, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(Config):
    """GPT-J. The first `rotary_dim` features of each head turn with the position."""

    model_type: ClassVar[str] = "gptj"
    architecture: ClassVar[str] = "GPTJForCausalLM"
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    only: ClassVar[Mapping[str, Json]] = {"tie_word_embeddings": False}

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    rotary_dim: int = 64
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_size:
            raise ValueError(
                f"GPTJConfig: rotary_dim={self.rotary_dim}, but it must be even and at most the size of a "
                f"head, {self.head_size}."
            )


class GPTJAttention(eqx.Module):
    """Multi-head attention with rotary positions, in pairs of neighbouring features, in a part of each head."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear
    attn_dropout: eqx.nn.Dropout
    config: GPTJConfig = eqx.field(static=True)

    def __init__(self, config: GPTJConfig, *, key: Key):
        size, std = config.n_embd, config.initializer_range
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        self.q_proj = Linear(size, size, use_bias=False, std=std, key=q_key)
        self.k_proj = Linear(size, size, use_bias=False, std=std, key=k_key)
        self.v_proj = Linear(size, size, use_bias=False, std=std, key=v_key)
        self.out_proj = Linear(size, size, use_bias=False, std=std, key=out_key)
        self.attn_dropout = eqx.nn.Dropout(config.attn_pdrop)
        self.config = config

    def heads(
        self, q: Array, k: Array, v: Array, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        """Return the input of `out_proj`, from the outputs of `q_proj`, `k_proj` and `v_proj`."""
        q, k, v = (split_heads(x, self.config.head_size) for x in (q, k, v))
        frequencies = Rope().frequencies(self.config.rotary_dim)
        q, k = (rotate(x, context.positions, frequencies, interleaved=True) for x in (q, k))
        return context.attend(q, k, v, cache, dropout=self.attn_dropout, dropout_key=key)


class GPTJMLP(eqx.Module):
    """Two projections with an activation between them."""

    fc_in: Linear
    fc_out: Linear
    activation_function: str = eqx.field(static=True)

    def __init__(self, config: GPTJConfig, *, key: Key):
        size, inner, std = config.n_embd, config.n_inner or 4 * config.n_embd, config.initializer_range
        in_key, out_key = jax.random.split(key)
        self.fc_in = Linear(size, inner, std=std, key=in_key)
        self.fc_out = Linear(inner, size, std=std, key=out_key)
        self.activation_function = config.activation_function

    def activate(self, x: Float[Array, "b t inner"]) -> Float[Array, "b t inner"]:
        """Return the input of `fc_out`, from the output of `fc_in`."""
        return ACTIVATIONS[self.activation_function](x)


class GPTJBlock(eqx.Module):
    """Attention and MLP in parallel: both read the same normalised stream, and both are added to it.

    So the four projections that read it share one reduction backward, and the two that close them one forward.
    """

    ln_1: LayerNorm
    attn: GPTJAttention
    mlp: GPTJMLP
    resid_dropout: eqx.nn.Dropout

    def __init__(self, config: GPTJConfig, *, key: Key):
        attn_key, mlp_key = jax.random.split(key)
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPTJAttention(config, key=attn_key)
        self.mlp = GPTJMLP(config, key=mlp_key)
        self.resid_dropout = eqx.nn.Dropout(config.resid_pdrop)

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        heads_key, attn_key, mlp_key = split_key(key, 3)
        attn, mlp, unit = self.attn, self.mlp, self.attn.config.head_size
        projections = attn.q_proj, attn.k_proj, attn.v_proj, mlp.fc_in
        q, k, v, hidden = context.column(self.ln_1(x), *projections, unit=unit)
        heads, cache = attn.heads(q, k, v, context, cache, heads_key)
        branches = [(heads, attn.out_proj), (mlp.activate(hidden), mlp.fc_out)]
        return context.add(x, branches, self.resid_dropout, (attn_key, mlp_key), unit=unit), cache


class GPTJModel(eqx.Module):
    """The model without its head."""

    wte: Embedding
    drop: eqx.nn.Dropout
    h: PyTree
    ln_f: LayerNorm

    def __init__(self, config: GPTJConfig, *, stacked: bool, key: Key):
        token_key, layers_key = jax.random.split(key)
        self.wte = Embedding(config.vocab_size, config.n_embd, std=config.initializer_range, key=token_key)
        self.drop = eqx.nn.Dropout(config.embd_pdrop)
        self.h = make_layers(GPTJBlock, config, stacked=stacked, key=layers_key)
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


class GPTJForCausalLM(DecoderLM):
    """GPT-J with its head, which has a bias."""

    transformer: GPTJModel
    lm_head: Linear
    config: GPTJConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("transformer.h",)
    vocabulary: ClassVar[tuple[str, ...]] = (r"\.wte$", r"^lm_head$")
    prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\battn\.(masked_)?bias$",)

    def __init__(self, config: GPTJConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.transformer = GPTJModel(config, stacked=stacked, key=model_key)
        self.lm_head = Linear(config.n_embd, config.vocab_size, std=config.initializer_range, key=head_key)

    def embed(self, input_ids: Int[Array, "b t"], context: Context, key: Key | None) -> Hidden:
        return dropout(self.transformer.drop, context.embed(self.transformer.wte, input_ids), key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.transformer.ln_f(x)
