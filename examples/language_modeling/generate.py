"""Inference: write text after the prompts in a file, greedily, by sampling, or by beam
search.

    python examples/language_modeling/generate.py --model out/instructions --prompts \\
        prompts.json --num-beams 4
    python examples/language_modeling/generate.py --model llama-7b --prompts \\
        prompts.txt --temperature 0.7 \\
        --devices 0 --tensor 8 --dtype bfloat16

The prompts are the lines of a text file, or a JSON list of texts and of objects as in
Alpaca. The program prints the model's text after each prompt, the number of tokens per
second, and the perplexity per token of the file: of its texts, or of the `output` of
its objects.
"""

import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import code_data
import common


def collate_fn(examples: Any) -> dict[str, np.ndarray]:
    """Collate examples of one length into a batch."""
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)


def loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
    """Return nats per token of the answers. Padding is on the right, where no token
    sees it."""
    hidden, _ = model.hidden_states(batch["tokens"][:, :-1], key=key)
    answer = batch["answer"][:, 1:] * 1.0
    return rx.layers.cross_entropy(
        hidden, model.head, batch["tokens"][:, 1:], weights=answer
    )


def write(
    state: Any, tokenizer: Any, prompts: list[str], mesh: Any, args: Any
) -> tuple[list[str], float]:
    """Return the model's text after each prompt, and the number of tokens per
    second."""
    tokenizer.truncation_side = "left"  # keep the end of a long prompt
    given = tokenizer(
        prompts,
        padding=True,
        truncation=True,
        max_length=args.length,
        return_tensors="np",
    )
    examples = [
        {"inputs": x, "mask": y}
        for x, y in zip(given["input_ids"], given["attention_mask"])
    ]

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        options = {
            "attention_mask": batch["mask"],
            "max_new_tokens": args.max_new_tokens,
        }
        if args.num_beams > 1:
            return models.beam_search(
                model, batch["inputs"], num_beams=args.num_beams, **options
            ).tokens[:, 0]
        return models.generate(
            model, batch["inputs"], temperature=args.temperature, key=key, **options
        )

    step = functools.partial(
        rx.predict_step, predict_fn=predict_fn, shardings=state.shardings
    )
    predict = rx.jit_step(step, donate=False)
    batches = list(
        rx.batches(
            examples, collate_fn, batch_size=args.batch_size, mesh=mesh, remainder="pad"
        )
    )
    jax.block_until_ready(predict(state, batches[0], index=0))  # compiles
    start = time.perf_counter()
    outputs = [predict(state, batch, index=i) for i, batch in enumerate(batches)]
    written = np.concatenate(outputs)[: len(prompts)]
    speed = np.sum(written != tokenizer.pad_token_id) / (time.perf_counter() - start)
    return tokenizer.batch_decode(written, skip_special_tokens=True), float(speed)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the texts, the tokens per second, and the perplexity of the file."""
    parser = common.flags(__doc__, batch_size=8, epochs=None, trains=False)
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument(
        "--prompts", required=True, type=pathlib.Path, help="text file or JSON list"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="tokens per prompt or measured text"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=48, help="tokens to write for each prompt"
    )
    parser.add_argument(
        "--num-beams", type=int, default=1, help="number of beams; 1: no search"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy"
    )
    parser.add_argument(
        "--dtype", help="such as bfloat16; by default, that of the file"
    )
    args, mesh = common.start(parser, argv)
    text = args.prompts.read_text("utf-8")
    rows = json.loads(text) if args.prompts.suffix == ".json" else text.splitlines()
    for i, row in enumerate(rows or [{}]):
        if not isinstance(row, str) and "instruction" not in row:
            raise ValueError(
                f"--prompts {args.prompts}: row {i} is neither a text nor an "
                "instruction."
            )
    prompts = [row if isinstance(row, str) else code_data.prompt(row) for row in rows]
    tokenizer = code_data.load_tokenizer(args.model)
    model = models.load_pretrained(args.model, mesh, dtype=args.dtype, stacked=True)
    state = rx.init_state(model, key=jax.random.key(args.seed))
    results: dict[str, Any] = dict(
        zip(("written", "speed"), write(state, tokenizer, prompts, mesh, args))
    )
    known = [row for row in rows if isinstance(row, str) or "output" in row]
    if examples := code_data.encode(tokenizer, known, args.length):
        functions = {
            "collate_fn": collate_fn,
            "loss_fn": loss_fn,
            "batch_size": args.batch_size,
        }
        results["perplexity"] = math.exp(
            rx.evaluate(state, examples, **functions)["loss"]
        )
    for prompt, written in zip(prompts, results["written"]):
        print(prompt, "=>", written)
    if args.output:
        (args.output / "written.json").write_text(
            json.dumps(list(zip(prompts, results["written"])), indent=1)
        )
    print(
        f"{results['speed']:.0f} tokens/s; perplexity "
        f"{results.get('perplexity', math.nan):.4g}"
    )
    return results


if __name__ == "__main__":
    common.run(main)
