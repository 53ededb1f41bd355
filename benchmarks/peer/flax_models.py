"""The Flax models of transformers 4, at the common sizes, with their loss."""

import importlib
from collections.abc import Callable
from typing import Any

import comparison
import jax
import jax.numpy as jnp
import optax

# Another version than elsewhere.
transformers: Any = importlib.import_module("transformers")
_clip = jnp.clip


def _clip_by_old_names(
    x: Any, low: Any = None, high: Any = None, *, a_min: Any = None, a_max: Any = None
) -> Any:
    return _clip(x, low if a_min is None else a_min, high if a_max is None else a_max)


jnp.clip = _clip_by_old_names  # Flax's T5 calls it by names that JAX has given up


def make(name: str) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
    """A model with its parameters in `model.params`; `(params, batch) -> loss`; and the
    batch."""
    by_gpt = {
        "n_embd": comparison.DIM,
        "n_layer": comparison.LAYERS,
        "n_head": comparison.HEADS,
        "n_positions": comparison.LENGTH,
    }
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    match name:
        case "GPT-2":
            config = transformers.GPT2Config(
                vocab_size=comparison.VOCABULARY, **by_gpt, **dropped
            )
            model: Any = transformers.FlaxGPT2LMHeadModel(config, seed=0)
        case "LLaMA":
            config = transformers.LlamaConfig(
                vocab_size=comparison.VOCABULARY,
                hidden_size=comparison.DIM,
                intermediate_size=comparison.LLAMA_MLP,
                num_hidden_layers=comparison.LAYERS,
                num_attention_heads=comparison.HEADS,
                max_position_embeddings=comparison.LENGTH,
            )
            model = transformers.FlaxLlamaForCausalLM(config, seed=0)
        case "GPT-J":
            rotary = comparison.DIM // comparison.HEADS // 4 * 2
            config = transformers.GPTJConfig(
                vocab_size=comparison.VOCABULARY, rotary_dim=rotary, **by_gpt, **dropped
            )
            model = transformers.FlaxGPTJForCausalLM(
                config, input_shape=(1, comparison.LENGTH), seed=0
            )
        case "OPT":
            config = transformers.OPTConfig(
                vocab_size=comparison.VOCABULARY,
                hidden_size=comparison.DIM,
                word_embed_proj_dim=comparison.DIM,
                ffn_dim=comparison.MLP,
                num_hidden_layers=comparison.LAYERS,
                num_attention_heads=comparison.HEADS,
                max_position_embeddings=comparison.LENGTH,
                dropout=0.0,
            )
            model = transformers.FlaxOPTForCausalLM(config, seed=0)
        case "T5" | "T5 v1.1":
            config = transformers.T5Config(
                vocab_size=comparison.VOCABULARY,
                d_model=comparison.DIM,
                d_kv=comparison.DIM // comparison.HEADS,
                d_ff=comparison.MLP,
                num_layers=comparison.LAYERS,
                num_heads=comparison.HEADS,
                dropout_rate=0.0,
                feed_forward_proj="relu" if name == "T5" else "gated-gelu",
                tie_word_embeddings=name == "T5",
            )
            model = transformers.FlaxT5ForConditionalGeneration(config, seed=0)
        case "BART":
            of_each = {
                f"{part}_layers": comparison.LAYERS for part in ("encoder", "decoder")
            }
            of_each |= {
                f"{part}_attention_heads": comparison.HEADS
                for part in ("encoder", "decoder")
            }
            of_each |= {
                f"{part}_ffn_dim": comparison.MLP for part in ("encoder", "decoder")
            }
            config = transformers.BartConfig(
                vocab_size=comparison.VOCABULARY,
                d_model=comparison.DIM,
                max_position_embeddings=comparison.LENGTH,
                dropout=0.0,
                **of_each,
            )
            model = transformers.FlaxBartForConditionalGeneration(config, seed=0)
        case _:
            raise ValueError(f"no model {name!r}")
    evaluating = {"deterministic": True} if name == "OPT" else {"train": False}
    is_pair = name in ("T5", "T5 v1.1", "BART")

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        given, following = batch["target"][:, :-1], batch["target"][:, 1:]
        inputs: dict[str, Any] = {"input_ids": given}
        if is_pair:
            inputs = {"input_ids": batch["source"], "decoder_input_ids": given}
        logits = model(**inputs, params=params, **evaluating).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    batch = {"target": comparison.tokens(comparison.LENGTH + 1)}
    return model, loss, {**batch, "source": comparison.tokens()} if is_pair else batch
