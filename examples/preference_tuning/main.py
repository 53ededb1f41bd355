"""Preference tuning (DPO, Rafailov et al. 2023) of a small language model with LoRA.

    # a small LLaMA, made here of the standard library's code
    python examples/preference_tuning/main.py
    python examples/preference_tuning/main.py --model llama-7b --data pairs.json

The model first learns to write the signature that belongs to a docstring. Then it
writes several signatures for each docstring, and Python's compiler judges them: of a
pair, the chosen one compiles, and the rejected one does not. The model learns to prefer
the first. The reference model of the method is the model itself without its branches,
so no second copy of the weights is needed.

`--data` is a JSON list of objects with `instruction`, `chosen` and `rejected`.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import code_data
import common
from language_modeling.main import RATES, load_or_make, tune
from lora.main import TARGETS, adapt

BETA = 0.1
"""The strength with which DPO holds the model near its reference."""


def compiles(signature: str) -> bool:
    """Tell if a signature is right Python."""
    try:
        compile(f"{signature}\n    pass", "signature", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def write(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], args: Any, seed: int
) -> list[str | None]:
    """Let the model write an answer for each row, by sampling. An answer that did not
    end in time is `None`."""
    prompts = tokenizer(
        [code_data.prompt(row) for row in rows],
        padding="max_length",
        padding_side="left",
        max_length=args.length,
        return_tensors="np",
    )
    examples = [
        {"inputs": inputs, "mask": mask}
        for inputs, mask in zip(prompts["input_ids"], prompts["attention_mask"])
    ]

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return models.generate(
            model,
            batch["inputs"],
            attention_mask=batch["mask"],
            max_new_tokens=args.max_new_tokens,
            temperature=1.0,
            key=key,
        )

    state = rx.init_state(model, key=jax.random.key(seed))
    tokens = rx.predict(
        state,
        examples,
        collate_fn=collate_fn,
        predict_fn=predict_fn,
        batch_size=8 * args.batch_size,
    )
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return [
        tokenizer.decode(row, skip_special_tokens=True) if row[-1] in ends else None
        for row in np.stack(list(tokens))
    ]


def make_pairs(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], args: Any, seed: int
) -> list[dict[str, str]]:
    """For each row, let the model write `args.samples` answers. Pair each that
    compiles with one that does not, while there are both."""
    repeated = [row for row in rows for _ in range(args.samples)]
    answers = write(model, tokenizer, repeated, args, seed)
    pairs = []
    for i, row in enumerate(rows):
        own = answers[i * args.samples : (i + 1) * args.samples]
        written = [answer for answer in own if answer is not None]
        chosen = [answer for answer in written if compiles(answer)]
        rejected = [answer for answer in written if not compiles(answer)]
        pairs += [
            {"instruction": row["instruction"], "chosen": right, "rejected": wrong}
            for right, wrong in zip(chosen, rejected)
        ]
    return pairs


def share_right(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], args: Any, seed: int
) -> float:
    """Return the share of sampled answers that end in time and compile."""
    repeated = [row for row in rows for _ in range(args.samples)]
    answers = write(model, tokenizer, repeated, args, seed)
    right = [answer is not None and compiles(answer) for answer in answers]
    return float(np.mean(right))


def encode_pairs(
    tokenizer: Any, pairs: list[dict[str, str]], length: int
) -> list[dict[str, np.ndarray]]:
    """Encode pairs, and leave out those that do not fit into `length` tokens."""
    examples = []
    for pair in pairs:
        example = {}
        for kind in ("chosen", "rejected"):
            row = {"instruction": pair["instruction"], "output": pair[kind]}
            whole = code_data.encode(tokenizer, [row], 4 * length)[:1]
            if whole and not whole[0]["answer"][length:].any():
                example[kind] = whole[0]["tokens"][:length]
                example[f"{kind}_answer"] = whole[0]["answer"][:length]
        if len(example) == 4:
            examples.append(example)
    return examples


def collate_fn(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack each array of the examples."""
    return {name: np.stack([x[name] for x in examples]) for name in examples[0]}


def log_probabilities(
    model: Any, tokens: Int[Array, "batch length"], answer: Bool[Array, "batch length"]
) -> Float[Array, " batch"]:
    """Return the logarithm of the probability of each answer, given its prompt."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return -jnp.sum(losses * answer[:, 1:], axis=-1)


def preference(model: Any, batch: Any) -> Float[Array, " batch"]:
    """Return by how much the model finds the chosen answer likelier than the rejected
    one, as a difference of logarithms."""
    chosen = log_probabilities(model, batch["chosen"], batch["chosen_answer"])
    rejected = log_probabilities(model, batch["rejected"], batch["rejected_answer"])
    return chosen - rejected


def without_branches(model: Any) -> Any:
    """Return the model as it was before LoRA: the factors of a branch are 0."""
    spec = models.lora_spec(model)
    return jax.tree.map(
        lambda x, is_factor: jnp.zeros_like(x) if is_factor else x, model, spec
    )


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    """Return the loss of DPO (equation 7 of the paper) and its metrics."""
    ours = preference(model, batch)
    reference = preference(without_branches(model), batch)
    reward = BETA * (ours - jax.lax.stop_gradient(reference))
    metrics = {
        "margin": jnp.mean(reward),
        "ranked by reward": jnp.mean(reward > 0),
        "ranked by likelihood": jnp.mean(ours > 0),
    }
    return -jnp.mean(jax.nn.log_sigmoid(reward)), metrics


def base(args: Any, mesh: Any) -> tuple[Any, Any, list[list[dict[str, str]]]]:
    """Return the model to start from, its tokenizer, and the rows to write answers for:
    training rows, and held-out ones, whose prompts have at most `args.length` tokens.

    Without `--model`, the model is trained here.
    """
    texts = code_data.modules(10 if args.quick else 3)
    rows = [code_data.signatures(part) for part in texts]
    model, tokenizer = load_or_make(args, mesh, texts[0])
    if not args.model:
        for task, parts in (("code", texts), ("instructions", rows)):
            own = {"epochs": 1, "rate": RATES[task]}
            options = argparse.Namespace(**{**vars(args), **own})
            windows = (code_data.encode(tokenizer, x, args.length) for x in parts)
            model = tune(options, task, model, *windows)[0].model

    def fits(row: dict[str, str]) -> bool:
        return len(tokenizer(code_data.prompt(row))["input_ids"]) <= args.length

    return model, tokenizer, [[row for row in part if fits(row)] for part in rows]


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Return three results for held-out rows, each after the training and before: the
    share of pairs that the rewards rank right (before: that the likelihoods do), the
    margin of the rewards, and the share of new answers that compile.
    """
    parser = common.flags(__doc__, batch_size=16, epochs=2)
    parser.add_argument(
        "--model", help="directory of a checkpoint; by default, a new model"
    )
    parser.add_argument(
        "--data", help="JSON list of objects with instruction, chosen and rejected"
    )
    parser.add_argument(
        "--samples", type=int, default=4, help="answers for each prompt (%(default)s)"
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the branches")
    parser.add_argument(
        "--rate", type=float, default=3e-4, help="learning rate (%(default)s)"
    )
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, default=32, help="tokens of an answer"
    )
    args, mesh = common.start(parser, argv)
    given = args.data and code_data.read_records(
        args.data,
        frozenset({"instruction", "chosen", "rejected"}),
        "instruction, chosen and rejected",
    )
    model, tokenizer, rows = base(args, mesh)
    train_pairs, test_pairs = given or [
        make_pairs(model, tokenizer, part, args, seed=args.seed + i)
        for i, part in enumerate(rows)
    ]
    length = args.length + args.max_new_tokens
    train = encode_pairs(tokenizer, train_pairs, length)
    test = encode_pairs(tokenizer, test_pairs, length)
    if len(train) < args.batch_size or not test:
        raise ValueError(
            f"{len(train)} pairs for training and {len(test)} held-out ones, of at "
            f"most {length} tokens, do not suffice for --batch-size {args.batch_size}."
        )
    compiled_before = None
    if not args.data:
        compiled_before = share_right(model, tokenizer, rows[1], args, args.seed + 2)

    batch = collate_fn(train[: args.batch_size])
    key = jax.random.key(args.seed + 2)
    adapted = adapt(
        model,
        mesh,
        targets=TARGETS,
        rank=args.rank,
        scale=2.0,
        key=key,
        loss_fn=loss_fn,
        batch=batch,
    )
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=args.epochs
    )
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, num_steps // 20, num_steps, args.rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = rx.init_state(
        adapted, optimizer, key=key, trainable=models.lora_spec(adapted)
    )
    functions: Any = {
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": args.batch_size,
    }
    before = rx.evaluate(state, test, **functions)
    state, history = rx.fit(
        state,
        train,
        **functions,
        optimizer=optimizer,
        num_epochs=args.epochs,
        evaluation=rx.Evaluation(test, every_steps=num_steps // 5 + 1),
        checkpoints=args.checkpoints and args.checkpoints / "preferences",
        log_every=20,
    )
    results: dict[str, tuple[Any, float]] = {
        "ranked right": (
            history["eval/ranked by reward"],
            before["ranked by likelihood"],
        ),
        "margin": (history["eval/margin"], before["margin"]),
    }
    if compiled_before is not None:
        after = share_right(state.model, tokenizer, rows[1], args, args.seed + 2)
        results["compiles"] = after, compiled_before
    for name, (reached, first) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.4f}, and {first:.4f} before")
    if args.output:
        models.save_lora(state.model, args.output / "branches")
        tokenizer.save_pretrained(args.output)
    return results


if __name__ == "__main__":
    common.run(main)
