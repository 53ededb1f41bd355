"""Train a language model on code, then on instructions with answers. transformers opens
the result.

    # a small LLaMA, made here of the standard library
    python examples/language_modeling/main.py
    python examples/language_modeling/main.py --model llama-7b --data alpaca.json \\
        --tasks instructions
    # plain text instead of code
    python examples/language_modeling/main.py --text wikitext-2

The first command learns to write signatures from docstrings. `--model` takes LLaMA,
GPT-J, OPT and GPT-2.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import code_data
import common
import text_data
from language_modeling import generate
from language_modeling.generate import collate_fn

# Learning rates; a later task continues.
RATES = {"code": 5e-3, "text": 5e-3, "instructions": 1e-3}


def load_or_make(args: Any, mesh: Any, texts: list[str]) -> tuple[Any, Any]:
    """Load the model and tokenizer from a directory, or make new ones for these
    texts."""
    if args.model:
        # For large ones.
        model = models.load_pretrained(args.model, mesh, stacked=True, remat="full")
        return model, code_data.load_tokenizer(args.model)
    size = 64 if args.quick else 128
    config = models.LlamaConfig(
        vocab_size=8 * size,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.06,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    key, rows = (
        jax.random.key(args.seed),
        np.zeros((args.batch_size, args.length), np.int32),
    )
    program: Any = {
        "loss_fn": loss_fn,
        "batch": {"tokens": rows, "answer": rows, "num_bytes": rows[:, 0]},
    }
    model = rx.init_model(
        lambda key: models.LlamaForCausalLM(config, key=key), mesh, key=key, **program
    )
    return model, code_data.make_tokenizer(texts, 8 * size)


def loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
    """Return bits per byte of the answers."""
    nats = generate.loss_fn(model, batch, key)
    return rx.Mean(nats.total / jnp.log(2), batch["num_bytes"].sum())


def tune(
    args: Any, name: str, model: Any, train: Any, test: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the trained state, and the bits per byte of `test` before, during and
    after, and by a bigram."""
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=args.epochs
    )
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, num_steps // 20, num_steps, args.rate / 10
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)
    )
    state = rx.init_state(
        model, optimizer, key=jax.random.key(args.seed + 1), **options
    )
    functions = {
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": args.batch_size,
    }
    before = rx.evaluate(state, test, **functions)["loss"]
    state, history = rx.fit(
        state,
        train,
        **functions,
        optimizer=optimizer,
        num_epochs=args.epochs,
        evaluation=rx.Evaluation(test, every_steps=num_steps // 5 + 1),
        checkpoints=args.checkpoints and args.checkpoints / name,
        log_every=100,
    )
    scores = [before, *history["eval/loss"]]
    return state, (scores, code_data.bigram_bits(train, test, model.config.vocab_size))


def infer(
    args: Any, task: str, model: Any, tokenizer: Any, rows: list[Any]
) -> dict[str, Any]:
    """Run `generate` on the model's directory. Return its results, and beam search
    texts for these rows."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(args.output or temporary, task)
        models.save_pretrained(model, directory)
        tokenizer.save_pretrained(directory)
        prompts = directory / "prompts.json"
        prompts.write_text(json.dumps(rows))
        flags = ["--model", directory, "--prompts", prompts, "--length", args.length]
        flags += ["--num-beams", 4, "--tensor", args.tensor, "--fsdp", args.fsdp]
        flags += ["--devices", args.devices]
        return generate.main([str(flag) for flag in flags])


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return each task's bits per byte of held-out text: before, during and after, and
    by a bigram."""
    parser = common.flags(__doc__, batch_size=8, epochs=1)
    parser.add_argument(
        "--model", help="directory of a checkpoint; by default, a new model"
    )
    parser.add_argument(
        "--data",
        help="JSON list of objects with instruction, output and optionally input",
    )
    parser.add_argument(
        "--text", help="directory in WikiText's format, instead of code"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=RATES, help="by default, all tasks that have data"
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="learning rate (checkpoint: 2e-5; else 5e-3, then 1e-3)",
    )
    parser.add_argument("--length", type=int, default=128, help="tokens per example")
    args, mesh = common.start(parser, argv)
    rates = (
        dict.fromkeys(RATES, args.rate or 2e-5) if args.rate or args.model else RATES
    )
    records = args.data and code_data.read_records(args.data)
    texts = (
        text_data.articles(args.text)
        if args.text
        else code_data.modules(10 if args.quick else 3)
    )
    model, tokenizer = load_or_make(args, mesh, texts[0])
    parts: dict[str, Any] = {"text" if args.text else "code": texts}
    if records or not args.text:
        parts["instructions"] = records or [
            code_data.signatures(part) for part in texts
        ]
    results = {}
    for task in args.tasks or parts:
        if task not in parts:
            raise ValueError(
                f"--tasks {task}: there is no data for it; with --text it is "
                f"{', '.join(parts)}."
            )
        args.rate = rates[task]
        train, test = (
            code_data.encode(tokenizer, part, args.length) for part in parts[task]
        )
        state, results[task] = tune(args, task, model, train, test)
        model, (before, *_, after), bigram = state.model, *results[task]
        print(
            f"{task}: {before:.3f} to {after:.3f} bits per byte of {len(test)} "
            "held-out examples; ",
            end="",
        )
        print(f"{bigram:.3f} by a bigram")
        rows = parts[task][1][:: len(parts[task][1]) // 16 + 1]
        found = infer(args, task, model, tokenizer, rows)
        test = code_data.encode(tokenizer, rows, args.length)
        bits = code_data.bigram_bits(train, test, model.config.vocab_size) * sum(
            x["num_bytes"] for x in test
        )
        alone = 2 ** float(bits / sum(x["answer"].sum() for x in test))
        results[f"{task}, inference"] = found["perplexity"], alone
    return results


if __name__ == "__main__":
    common.run(main)
