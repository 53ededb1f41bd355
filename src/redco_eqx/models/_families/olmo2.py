"""OLMo 2 (OLMo team 2024): a LLaMA with norms after attention and MLP, and over all queries and keys."""

import dataclasses
from typing import ClassVar, Literal, Unpack

import equinox as eqx
import jax
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.context import Context, LayerCache
from redco_eqx.models._blocks.layers import RMSNorm
from redco_eqx.models._blocks.model import Options
from redco_eqx.models._families.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM, LlamaMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """OLMo 2, 1B to 32B."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    qk_norm: ClassVar[Literal["head", "all"] | None] = "all"

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


class Olmo2DecoderLayer(eqx.Module):
    """Attention, then MLP, each with a norm after it and added to the stream."""

    self_attn: LlamaAttention
    mlp: LlamaMLP
    post_attention_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __init__(self, config: Olmo2Config, *, key: Key):
        attention_key, mlp_key = jax.random.split(key)
        self.self_attn = LlamaAttention(config, key=attention_key)
        self.mlp = LlamaMLP(config, key=mlp_key)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: LayerCache | None, key: Key | None
    ) -> tuple[Float[Array, "b t size"], LayerCache | None]:
        attended, cache = self.self_attn(x, context, cache, key)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(x, context)), cache


class Olmo2ForCausalLM(LlamaForCausalLM):
    """An OLMo 2."""

    layer: ClassVar[type[eqx.Module]] = Olmo2DecoderLayer

    def __init__(self, config: Olmo2Config, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, stacked=stacked, key=key, **options)
