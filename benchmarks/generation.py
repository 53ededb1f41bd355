"""The time that the cache saves in generation, and the compile time that stacked layers
save.

    python benchmarks/generation.py
    # which must be installed, with torch
    taskset -c 0 python benchmarks/generation.py --transformers

1. Greedy `generate`, which keeps keys and values, over a loop that runs the model on
   the whole text again for each token. Both are compiled once, at static shapes, and
   give the same tokens. Predicted: for a text of n places the loop without a cache does
   n times the work. So the ratio grows with the text, and stays below the number of
   places because of the fixed cost of a step. Outcome: 8.2, 13.5, 20.4 times the rate
   at 64, 128, 256 places on one core, the same tokens. It grows, and is far below the
   number of places: a step of one token is mostly overhead at this size.
2. The same for `beam_search` with 4 beams, over a loop that runs the model on the whole
   text of each beam. Predicted: at least as much as for greedy search, where the cache
   is read for each text, not for each beam. Outcome: 9.0, 14.8, 24.1 times at 64, 128,
   256 places on one core, the same tokens.
3. Seconds to trace and compile one `train_step` with AdamW, layers as a list and
   stacked for `lax.scan`. Predicted: in proportion to depth for the list, and constant
   for the stack. Outcome: list 2.7, 3.7, 6.9 s at 4, 16, 32 layers, stack 2.3, 2.1, 2.0
   s. The stack is constant; the list grows, from a base of some 2 s.
4. The time for a token with stacked layers, over that with the same layers in a list,
   in pairs of calls. And the seconds of processor for the first call, most of which
   compiles it. Predicted: 1.0, because stacked layers are taken apart before the first
   token. Outcome: 1.03 to 1.08 at 8 layers of width 512, 0.96 to 1.04 at 24 of width
   64, on one core that others used too, the same tokens. With a scan in the loop it was
   1.7 to 1.9 and 0.6 to 0.9: small layers are faster in a scan. The first call takes 4
   s (list 4) and 6 to 7 s (list 5 to 7), where the scan took 2.6 and 2.2 s. At width
   512 the layers have 96 MiB; the temporaries are 109 MiB (list 3, a scan in the loop
   15).
5. With `--transformers`, only this: greedy search and 4 beams over `generate` of
   transformers, with its cache, on the same weights in one process: a LLaMA, and a T5
   whose source is as long as its text. Compiled before, and on one core if the process
   may use only one. Predicted: about 2, as was measured for greedy search with 125
   million parameters; more for beams, since transformers reorders its cache at every
   step. Outcome: 1.2 and 1.3 times for greedy search with the LLaMA and the T5, 1.3 and
   1.1 with 4 beams, on one core, the same tokens. This is less than predicted, and not
   more for beams: their choice takes 0.2 ms of a step; products with weights take the
   rest.

One device, float32. Only the ratios within one run are meaningful.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key
from workloads import Sizes, family_case, lower_step, table

import redco_eqx as rx
from redco_eqx_models import (
    LlamaConfig,
    LlamaForCausalLM,
    beam_search,
    generate,
    load_pretrained,
)
from redco_eqx_models._blocks.model import unstack

Tokens = Int[Array, "batch num"]


def make_model(dim: int, num_layers: int, *, key: Key[Array, ""]) -> LlamaForCausalLM:
    """Make a model with stacked layers."""
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
    """Do the same as greedy `generate`, by one pass over the whole text for each token.
    A causal model ignores everything after the text."""
    length = input_ids.shape[1]

    def body(end: Array, text: Array) -> Array:
        hidden, _ = model.hidden_states(text)
        logits = model.logits(
            jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False)
        )
        return text.at[:, end].set(jnp.argmax(logits, axis=-1).astype(text.dtype))

    return jax.lax.fori_loop(
        length, length + num, body, jnp.pad(input_ids, [(0, 0), (0, num)])
    )[:, length:]


@eqx.filter_jit
def beam_search_uncached(
    model: LlamaForCausalLM, input_ids: Tokens, num: int, num_beams: int
) -> Tokens:
    """Return the best text of a `beam_search` that no token ends, by one pass over the
    whole text of each beam for each token."""
    size, length = input_ids.shape

    def body(end: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        text, scores = carry
        hidden, _ = model.hidden_states(text.reshape(size * num_beams, -1))
        logits = model.logits(
            jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False)
        )
        scores = scores[..., None] + jax.nn.log_softmax(logits).reshape(
            size, num_beams, -1
        )
        scores, places = jax.lax.top_k(scores.reshape(size, -1), num_beams)
        parents, tokens = jnp.divmod(places, logits.shape[-1])
        text = jnp.take_along_axis(text, parents[..., None], axis=1)
        return text.at[:, :, end].set(tokens), scores

    text = jnp.repeat(
        jnp.pad(input_ids, [(0, 0), (0, num)])[:, None], num_beams, axis=1
    )
    scores = jnp.zeros((size, num_beams)).at[:, 1:].set(-jnp.inf)
    text, _ = jax.lax.fori_loop(length, length + num, body, (text, scores))
    return text[:, 0, length:]


def seconds(
    functions: Sequence[Callable[[], Tokens]], rounds: int
) -> tuple[list[float], list[Tokens]]:
    """Return the median time of a call of each function after it is compiled, and their
    results. The functions are called in turn, so that other work of the machine slows
    all of them."""
    outputs = [jax.block_until_ready(function()) for function in functions]
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times):
            start = time.perf_counter()
            jax.block_until_ready(function())
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times], outputs


def report_generation(
    lengths: Sequence[int],
    rounds: int,
    *,
    num_beams: int,
    batch_size: int,
    dim: int,
    num_layers: int,
) -> None:
    """Print table 1 (one beam) or 2."""
    model = make_model(dim, num_layers, key=jax.random.key(0))
    rows = [
        ["new tokens", "cached tokens/s", "uncached tokens/s", "ratio", "same tokens"]
    ]
    for num in lengths:
        prompt = jax.random.randint(jax.random.key(1), (batch_size, 16), 0, 1024)
        if num_beams == 1:
            ours = functools.partial(generate, model, prompt, max_new_tokens=num)
            other = functools.partial(generate_uncached, model, prompt, num)
        else:
            ours = functools.partial(
                best_of, model, prompt, max_new_tokens=num, num_beams=num_beams
            )
            other = functools.partial(
                beam_search_uncached, model, prompt, num, num_beams
            )
        times, (first, second) = seconds([ours, other], rounds)
        rates = [batch_size * num / x for x in times]
        same = float(jnp.mean(first == second))
        rows.append(
            [
                str(num),
                *[f"{r:,.0f}" for r in rates],
                f"{rates[0] / rates[1]:.1f}",
                f"{same:.1%}",
            ]
        )
    name = "Greedy" if num_beams == 1 else f"{num_beams} beams"
    print(
        f"{name}, LLaMA of {num_layers} layers, dim {dim}, batch {batch_size}, prompt "
        f"16\n\n{table(rows, 0)}\n"
    )


def report_stacked(sizes: Sequence[tuple[int, int]], rounds: int) -> None:
    """Print table 4."""
    rows = [["dim", "layers", "ratio", "first call s", "of the list", "same tokens"]]
    for dim, num_layers in sizes:
        stacked = make_model(dim, num_layers, key=jax.random.key(0))
        apart = eqx.tree_at(
            lambda model: model.model.layers, stacked, unstack(stacked.model.layers)
        )
        prompt = jax.random.randint(jax.random.key(1), (1, 16), 0, 1024)
        calls = [
            functools.partial(generate, x, prompt, max_new_tokens=64)
            for x in (stacked, apart)
        ]
        first = []
        for call in calls:
            start = time.process_time()
            jax.block_until_ready(call())
            first.append(time.process_time() - start)
        pairs = [seconds(calls, 1) for _ in range(rounds)]
        ratio = statistics.median(own / other for (own, other), _ in pairs)
        same = float(jnp.mean(jnp.equal(*pairs[0][1])))
        rows.append(
            [
                str(dim),
                str(num_layers),
                f"{ratio:.2f}",
                *[f"{x:.1f}" for x in first],
                f"{same:.1%}",
            ]
        )
    print(
        "A token of a LLaMA with stacked layers over one with a list, batch "
        f"1\n\n{table(rows, 0)}\n"
    )


def best_of(*args: Any, **options: Any) -> Tokens:
    """Return the best text of a beam search."""
    return beam_search(*args, **options).tokens[:, 0]


def report_against_transformers(
    num: int, rounds: int, *, num_beams: int, batch_size: int, dim: int, num_layers: int
) -> None:
    """Print table 5."""
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    llama: dict[str, Any] = {
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": dim // 64,
        "initializer_range": 2 * dim**-0.5,
    }
    t5: dict[str, Any] = {
        "d_model": dim,
        "d_ff": 4 * dim,
        "num_layers": num_layers,
        "num_heads": dim // 64,
        "initializer_factor": 2.0,
        "decoder_start_token_id": 0,
    }
    kinds: dict[str, Any] = {
        "LLaMA": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(vocab_size=8192, **llama),
            32,
        ),
        "T5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(vocab_size=8192, **t5),
            num,
        ),
    }
    rows = [["model", "beams", "tokens/s", "transformers", "ratio", "same tokens"]]
    for name, (kind, config, length) in kinds.items():
        there = kind(config).eval()
        with tempfile.TemporaryDirectory() as directory:
            there.save_pretrained(directory)
            model = load_pretrained(directory, stacked=True)
        prompt = jax.random.randint(jax.random.key(1), (batch_size, length), 3, 8192)
        given = torch.asarray(prompt.tolist())
        num_before = length if name == "LLaMA" else 1
        for beams in (1, num_beams):
            options: dict[str, Any] = {"max_new_tokens": num, "eos_token_id": ()}
            ours = functools.partial(generate, model, prompt, **options)
            if beams > 1:
                ours = functools.partial(
                    best_of, model, prompt, num_beams=beams, **options
                )

            def theirs(
                there: Any = there, given: Any = given, beams: int = beams
            ) -> Any:
                return there.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=num,
                    do_sample=False,
                    num_beams=beams,
                    eos_token_id=None,
                    pad_token_id=0,
                )

            times, (first, second) = seconds([ours, theirs], rounds)
            same = float(
                jnp.mean(first == jnp.asarray(second[:, num_before:].tolist()))
            )
            rates = [batch_size * num / x for x in times]
            ratio = f"{rates[0] / rates[1]:.1f}"
            rows.append(
                [name, str(beams), *[f"{r:,.1f}" for r in rates], ratio, f"{same:.1%}"]
            )
    print(
        f"{num_layers} layers, dim {dim}, batch {batch_size}, {num} new "
        f"tokens\n\n{table(rows, 1)}\n"
    )


def compile_seconds(num_layers: int, *, dim: int, stacked: bool) -> tuple[float, float]:
    """Return the seconds to trace (and lower), and to compile, one train step. No array
    is made."""
    sizes = Sizes(dim=dim, num_layers=num_layers, num_heads=dim // 16, length=64)
    case = family_case("LLaMA", sizes, stacked=stacked)
    start = time.perf_counter()
    lowered = lower_step(case, rx.make_mesh())
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def report_compilation(depths: Sequence[int], *, dim: int) -> None:
    """Print table 3."""
    compile_seconds(1, dim=dim, stacked=True)  # some work is slow only the first time
    rows = [
        [
            "layers",
            "list: trace s",
            "compile s",
            "stacked: trace s",
            "compile s",
            "ratio",
        ]
    ]
    for depth in depths:
        times = [
            *compile_seconds(depth, dim=dim, stacked=False),
            *compile_seconds(depth, dim=dim, stacked=True),
        ]
        ratio = sum(times[:2]) / sum(times[2:])
        rows.append([str(depth), *[f"{t:.1f}" for t in times], f"{ratio:.1f}"])
    print(
        f"One train step of a LLaMA, dim {dim}, batch 8 x 64, from function to "
        f"executable\n\n{table(rows, 0)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[48, 112, 240])
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    if args.transformers:
        report_against_transformers(
            32, args.rounds, num_beams=4, batch_size=2, dim=512, num_layers=8
        )
    else:
        for num_beams in (1, 4):
            report_generation(
                args.lengths,
                args.rounds,
                num_beams=num_beams,
                batch_size=4,
                dim=128,
                num_layers=4,
            )
        report_stacked([(512, 8), (64, 24)], args.rounds)
        report_compilation(args.depths, dim=64)
