"""Mixtral (Jiang et al. 2024) and Qwen3-MoE: a LLaMA with a router and experts instead
of the MLP."""

import dataclasses
from typing import ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks.context import Context, Hidden, Ids
from redco_eqx_models._blocks.decoder import Reading
from redco_eqx_models._blocks.experts import ExpertMatrix, mix_experts, routing_sums
from redco_eqx_models._blocks.layers import ACTIVATIONS, Linear
from redco_eqx_models._blocks.model import Options
from redco_eqx_models._blocks.positions import Rope
from redco_eqx_models._families.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(LlamaConfig):
    """Models in which each token goes to `num_experts_per_tok` of `num_experts`
    MLPs."""

    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    """The projections of an expert: the gate, the one beside it, and the one that
    closes them."""

    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        num = self.num_experts_per_tok
        most = self.entry("num_experts")
        if num > most:
            raise self.error(
                f"num_experts_per_tok={num}, but there are only {most} experts."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(SparseConfig):
    """Mixtral, 8x7B and 8x22B."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    aliases = {"num_experts": "num_local_experts"}
    only = {"router_jitter_noise": 0.0}
    mlp_name = "block_sparse_moe"
    projections = ("w1", "w3", "w2")

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    rope: Rope = dataclasses.field(default_factory=lambda: Rope(theta=1000000.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseConfig):
    """Qwen3-MoE, with experts in all layers.

    - `norm_topk_prob`: true if the weights of a token's experts add up to 1, as they do
        in Mixtral.
    """

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    aliases = {"num_local_experts": "num_experts"}
    only = {
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    qk_norm = "head"

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class SparseMLP(eqx.Module):
    """A router, and experts by the names of their projections."""

    gate: Linear
    experts: dict[str, ExpertMatrix]
    config: SparseConfig = eqx.field(static=True)

    def __init__(self, config: SparseConfig, *, key: Key):
        num = config.entry("num_experts")
        size = config.hidden_size
        std = config.initializer_range
        # In Qwen3-MoE, `intermediate_size` is the width of MLPs without experts.
        inner = config.entry("moe_intermediate_size", config.intermediate_size)
        router_key, *keys = jax.random.split(key, 4)
        self.gate = Linear(size, num, use_bias=False, std=std, key=router_key)
        kinds = ((size, inner, "column"), (size, inner, "column"), (inner, size, "row"))
        self.experts = {
            name: ExpertMatrix(num, into, out, split=split, std=std, key=key)
            for name, (into, out, split), key in zip(config.projections, kinds, keys)
        }
        self.config = config

    def __call__(
        self, x: Hidden, context: Context
    ) -> tuple[Hidden, Float[Array, "2 experts"]]:
        """Return the output, and the sums of `routing_sums`."""
        config = self.config
        scores = self.gate(x)
        # As in transformers: the product in the dtype of the stream, the softmax over
        # all experts in float32, and only then the choice.
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        probabilities = jax.nn.softmax(scores, axis=-1)
        output, chosen = mix_experts(
            x,
            probabilities,
            *(self.experts[name] for name in config.projections),
            num_chosen=config.num_experts_per_tok,
            normalise=config.entry("norm_topk_prob", True),
            activation=ACTIVATIONS[config.hidden_act],
            sequence_parallel=context.sequence_parallel,
        )
        return output, routing_sums(probabilities, chosen, context.real)


class MixtralForCausalLM(LlamaForCausalLM):
    """A Mixtral or a Qwen3-MoE, by its configuration."""

    inner_stacks = ("block_sparse_moe.experts", "mlp.experts")
    mlp = SparseMLP

    def __init__(
        self,
        config: SparseConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, stacked=stacked, key=key, **options)

    def hidden_states_and_balance(
        self, input_ids: Ids, **reading: Unpack[Reading]
    ) -> tuple[Hidden, Float[Array, ""]]:
        """Return the input of the head, and the auxiliary loss that balances the
        experts (Fedus et al. 2022, Switch Transformer, section 2.2), over all layers
        and all tokens that are not padding. Multiply it by the `router_aux_loss_coef`
        of the published model (0.001 to 0.02), and add it to the loss.

        Arguments as for calling the model.
        """
        num = self.config.entry("num_experts")
        sums = jnp.zeros((2, num), jnp.float32)
        hidden, _, (times, probabilities) = self._run(
            input_ids, None, sums=sums, **reading
        )
        # Each token of each layer adds 1 to the sum of all probabilities. As in
        # `load_balancing_loss_func` of transformers, a token counts once for each of
        # its experts, so a balanced router has a loss of `num_experts_per_tok`.
        num_tokens = jnp.sum(probabilities)
        return hidden, num * jnp.sum(times * probabilities) / num_tokens**2
