"""What the cache saves in generation, and what stacked layers save in compile time.

    python benchmarks/generation.py

1. Greedy `generate`, which keeps keys and values, over a loop that runs the model on the whole text again for
   each token. Both are compiled once, at static shapes, and give the same tokens.
   Predicted: the loop without a cache does as many times the work as the text has places, so the ratio grows
   with the text, and stays below the number of places by what a step costs whatever its size.
   Outcome: 5.0, 7.6, 10.2 times the rate at 64, 128, 256 places, the same tokens. It grows, and is far below
   the number of places: a step of one token is mostly overhead at this size.
2. Seconds to trace and compile one `train_step` with AdamW, layers as a list and stacked for `lax.scan`.
   Predicted: in proportion to depth for the list, and constant for the stack.
   Outcome: list 2.7, 3.7, 6.9 s at 4, 16, 32 layers, stack 2.3, 2.1, 2.0 s. The stack is constant; the list
   grows on top of some 2 s.

One device, float32. Only the ratios within one run mean something.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key
from workloads import Sizes, family_case, lower_step, table

import redco_eqx as rx
from redco_eqx.models import LlamaConfig, LlamaForCausalLM, generate

Tokens = Int[Array, "batch num"]


def make_model(dim: int, num_layers: int, *, key: Key[Array, ""]) -> LlamaForCausalLM:
    """Its layers are stacked."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=dim,
        intermediate_size=8 * dim // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=dim // 16,
        initializer_range=dim**-0.5,  # large, so that texts differ
        eos_token_id=None,
    )
    return LlamaForCausalLM(config, stacked=True, key=key)


@eqx.filter_jit
def generate_uncached(model: LlamaForCausalLM, input_ids: Tokens, num: int) -> Tokens:
    """`generate`, greedy, by one pass over the whole text for each token. What follows the text is of no
    account to a causal model."""
    length = input_ids.shape[1]

    def body(end: Array, text: Array) -> Array:
        hidden, _ = model.hidden_states(text)
        logits = model.logits(jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False))
        return text.at[:, end].set(jnp.argmax(logits, axis=-1).astype(text.dtype))

    return jax.lax.fori_loop(length, length + num, body, jnp.pad(input_ids, [(0, 0), (0, num)]))[:, length:]


def seconds(function: Callable[[], Tokens], rounds: int) -> tuple[float, Tokens]:
    """The median time of a call once it is compiled, and what it gives."""
    output = jax.block_until_ready(function())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times), output


def report_generation(
    lengths: Sequence[int], rounds: int, *, batch_size: int, dim: int, num_layers: int
) -> None:
    """Table 1."""
    model = make_model(dim, num_layers, key=jax.random.key(0))
    rows = [["new tokens", "cached tokens/s", "uncached tokens/s", "ratio", "same tokens"]]
    for num in lengths:
        prompt = jax.random.randint(jax.random.key(1), (batch_size, 16), 0, 1024)
        cached, first = seconds(functools.partial(generate, model, prompt, max_new_tokens=num), rounds)
        uncached, second = seconds(functools.partial(generate_uncached, model, prompt, num), rounds)
        rates = [batch_size * num / cached, batch_size * num / uncached]
        same = float(jnp.mean(first == second))
        rows.append([str(num), *[f"{r:,.0f}" for r in rates], f"{rates[0] / rates[1]:.1f}", f"{same:.1%}"])
    print(
        f"Greedy, LLaMA of {num_layers} layers, dim {dim}, batch {batch_size}, prompt 16\n\n{table(rows, 0)}\n"
    )


def compile_seconds(num_layers: int, *, dim: int, stacked: bool) -> tuple[float, float]:
    """To trace (and lower), and to compile, one train step. No array is made."""
    sizes = Sizes(dim=dim, num_layers=num_layers, num_heads=dim // 16, length=64)
    case = family_case("LLaMA", sizes, stacked=stacked)
    start = time.perf_counter()
    lowered = lower_step(case, rx.make_mesh())
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def report_compilation(depths: Sequence[int], *, dim: int) -> None:
    """Table 2."""
    compile_seconds(1, dim=dim, stacked=True)  # what is slow only once
    rows = [["layers", "list: trace s", "compile s", "stacked: trace s", "compile s", "ratio"]]
    for depth in depths:
        times = [
            *compile_seconds(depth, dim=dim, stacked=False),
            *compile_seconds(depth, dim=dim, stacked=True),
        ]
        ratio = sum(times[:2]) / sum(times[2:])
        rows.append([str(depth), *[f"{t:.1f}" for t in times], f"{ratio:.1f}"])
    print(
        f"One train step of a LLaMA, dim {dim}, batch 8 x 64, from function to executable\n\n{table(rows, 0)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[48, 112, 240])
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    report_generation(args.lengths, args.rounds, batch_size=4, dim=128, num_layers=4)
    report_compilation(args.depths, dim=64)
