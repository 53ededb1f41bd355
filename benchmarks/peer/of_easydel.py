"""EasyDeL 0.3.0: its LLaMA in the layout of its own rules over fsdp, in a plain step,
with JAX 0.9.

Its GPT-2 fails at other widths than 768, and it has neither T5 nor BART. On data 2 x
tensor 4 what leaves its step is laid out otherwise than what enters it, so that a
compiled step cannot be repeated.
"""

import comparison
import easydel  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from flax import nnx  # pyright: ignore[reportMissingImports]

PEER, MESH = "EasyDeL 0.3.0", "fsdp 8"


def one(name: str) -> None:
    config = easydel.LlamaConfig(
        vocab_size=comparison.VOCABULARY,
        hidden_size=comparison.DIM,
        intermediate_size=comparison.LLAMA_MLP,
        num_hidden_layers=comparison.LAYERS,
        num_attention_heads=comparison.HEADS,
        num_key_value_heads=comparison.HEADS,
        max_position_embeddings=comparison.LENGTH,
        sharding_axis_dims=(1, 8, 1, 1, 1),  # dp, fsdp, ep, tp, sp
        attn_mechanism="vanilla",
        attn_dtype=jnp.float32,
    )
    with config.mesh:
        plain = easydel.LlamaForCausalLM(
            config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
        )
        graph, params, rest = nnx.split(plain.shard_model(), nnx.Param, ...)
        optimizer = optax.adamw(comparison.LEARNING_RATE)
        opt_state = jax.jit(optimizer.init)(params)

        def loss(params, batch):
            logits = nnx.merge(graph, params, rest)(input_ids=batch[:, :-1]).logits
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch[:, 1:]
            ).mean()

        def step(params, opt_state, batch):
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        rows = jax.NamedSharding(config.mesh, jax.P(("dp", "fsdp")))
        comparison.measure(
            PEER,
            name,
            MESH,
            jax.jit(step, donate_argnums=(0, 1)),
            (
                params,
                opt_state,
                jax.device_put(comparison.tokens(comparison.LENGTH + 1), rows),
            ),
            lambda output, given: (*output[:2], given[2]),
            lambda output: output[2],
        )


if __name__ == "__main__":
    comparison.each(PEER, MESH, one, models=["LLaMA"])
