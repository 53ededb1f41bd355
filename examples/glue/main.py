"""BERT or RoBERTa on tables in GLUE's format: classification and regression of texts
and of pairs of texts.

    # docstrings, by a small BERT that learns to fill gaps in them first
    python examples/glue/main.py
    python examples/glue/main.py --model roberta-large --task classification --data \\
        SST2 --text sentence
    python examples/glue/main.py --model roberta-large --task regression --data STSB \\
        --text sentence1 sentence2 --label score

A directory of data contains `train` and `dev` (or `validation`, or `test`), as .tsv,
.csv, .jsonl or .parquet with named columns. The program prints each score beside that
of a linear model on word counts.
"""

import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import transformers
from jaxtyping import Array, Float

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import table_data

FAMILIES = {
    "bert": (models.BertConfig, models.BertForSequenceClassification),
    "roberta": (models.RobertaConfig, models.RobertaForSequenceClassification),
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PROBLEMS = {"classification": "single_label_classification", "regression": "regression"}


def encode(
    tokenizer: Any, texts: list[tuple[str, ...]], length: int
) -> list[dict[str, np.ndarray]]:
    """Return the model's inputs for each text, or each pair of texts."""
    options = {
        "padding": "max_length",
        "truncation": True,
        "max_length": length,
        "return_tensors": "np",
    }
    given = tokenizer(*map(list, zip(*texts)), **options)
    return [dict(zip(given, values)) for values in zip(*given.values())]


def collate_fn(examples: Any) -> Any:
    """Collate examples into a batch: the model's inputs, with or without the
    targets."""
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)


def predict_fn(model: Any, batch: Any, key: Any) -> Float[Array, "batch num_outputs"]:
    """Return the logits of the classes, or the value of a regression."""
    return model(**batch[0], key=key)


def loss_fn(model: Any, batch: Any, key: Any) -> Array:
    """Return the cross-entropy, or the squared error."""
    outputs, y = predict_fn(model, batch, key), batch[1]
    if y.dtype == jnp.float32:
        return jnp.mean((outputs[:, 0] - y) ** 2)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def fit(
    args: Any,
    name: str,
    model: Any,
    train: Any,
    loss_fn: Any,
    evaluation: Any,
    **options: Any,
) -> Any:
    """Return the state after training, and the numbers of the run."""
    num_epochs, rate = options["num_epochs"], options["rate"]
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=num_epochs
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, num_steps // 10, num_steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )
    return rx.fit(
        rx.init_state(model, optimizer, key=jax.random.key(args.seed + 1)),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=args.batch_size,
        num_epochs=num_epochs,
        evaluation=evaluation,
        checkpoints=args.checkpoints and args.checkpoints / name,
    )


def fill_gaps(
    args: Any, mesh: Any, texts: list[tuple[str, ...]], directory: str
) -> None:
    """Train a small BERT to fill gaps in the texts, and save it with its tokenizer."""
    words, lines = tokenizers.BertWordPieceTokenizer(), list(map("\n".join, texts))
    # Pass the pieces in a fixed order, because the trainer's own order, and so its
    # words, differ in each process.
    pieces = sorted(
        {f"##{letter}" for letter in "".join(lines).lower() if not letter.isspace()}
    )
    words.train_from_iterator(
        lines, 4096, show_progress=False, special_tokens=[*SPECIAL, *pieces]
    )
    tokenizer: Any = transformers.BertTokenizer(vocab=words.get_vocab())
    size = 64 if args.quick else 128
    config = models.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * size,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=args.length,
        initializer_range=0.05,
    )

    def masked_loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
        mask_key, key = jax.random.split(key)
        tokens, real = batch["input_ids"], batch["attention_mask"]
        masked = jax.random.bernoulli(mask_key, 0.2, tokens.shape) & (real == 1)
        given = jnp.where(masked, tokenizer.mask_token_id, tokens)
        # Each epoch has new masks, so dropout would only slow it down.
        steady = eqx.nn.inference_mode(model)
        hidden = steady.hidden_states(given, attention_mask=real, key=key)
        # The head is the most expensive part.
        weights, places = jax.lax.top_k(masked * 1.0, args.length // 4)
        hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
        tokens = jnp.take_along_axis(tokens, places, axis=1)
        return rx.layers.cross_entropy(hidden, model.head, tokens, weights=weights)

    key = jax.random.key(args.seed)
    model = rx.init_model(
        lambda key: models.BertForMaskedLM(config, key=key), mesh, key=key
    )
    examples = encode(tokenizer, texts, args.length)
    evaluation = rx.Evaluation(examples[:: len(examples) // 256 + 1])
    epochs = 2 if args.quick else 20
    state, _ = fit(
        args,
        "gaps",
        model,
        examples,
        masked_loss_fn,
        evaluation,
        num_epochs=epochs,
        rate=1e-3,
    )
    models.save_pretrained(state.model, directory)
    tokenizer.save_pretrained(directory)


def learn(task: str, args: Any, mesh: Any, directory: str) -> tuple[list[float], float]:
    """Return the held-out score after each epoch, and the score of a linear model."""
    train, held_out = table_data.read(task, args)
    reference = table_data.linear_score(train, held_out)
    if not pathlib.Path(directory, "config.json").exists():
        fill_gaps(args, mesh, [x for x, _ in train], directory)
    kind = transformers.AutoConfig.from_pretrained(directory).model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"--model {directory}: a {kind} has no classifier here, only "
            f"{' and '.join(FAMILIES)}."
        )
    num_labels = 1 if task == "regression" else 1 + max(y for _, y in train)
    entries = {"num_labels": num_labels, "problem_type": PROBLEMS[task]}
    key = jax.random.key(args.seed + 2)
    model = models.load_pretrained(
        directory, mesh, family=FAMILIES[kind], entries=entries, key=key
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    train, held_out = (
        list(
            zip(
                encode(tokenizer, [x for x, _ in part], args.length),
                [y for _, y in part],
            )
        )
        for part in (train, held_out)
    )
    print(f"{task}: {len(train)} examples, {len(held_out)} held out")
    evaluation = rx.Evaluation(
        held_out,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=args.batch_size,
        predict_fn=predict_fn,
        metric_fn=table_data.metric_fn,
        predictions_directory=args.output and args.output / task,
    )
    rates = {"num_epochs": args.epochs, "rate": args.rate}
    state, history = fit(args, task, model, train, loss_fn, evaluation, **rates)
    if args.output:
        models.save_pretrained(state.model, args.output / task)
        tokenizer.save_pretrained(args.output / task)
    return history["eval/score"], reference


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return each task's score after each epoch, and the score of a linear model."""
    parser = common.flags(__doc__, batch_size=32, epochs=4)
    table_data.add_flags(parser)
    parser.add_argument(
        "--task",
        choices=PROBLEMS,
        nargs="+",
        default=PROBLEMS,
        help="tasks to train (both)",
    )
    parser.add_argument(
        "--model", help="directory of a BERT or RoBERTa; by default, a new one"
    )
    parser.add_argument(
        "--rate", type=float, help="learning rate (checkpoint: 2e-5, new model: 3e-4)"
    )
    parser.add_argument(
        "--length", type=int, default=64, help="tokens per text or pair"
    )
    args, mesh = common.start(parser, argv)
    args.rate = args.rate or (2e-5 if args.model else 3e-4)
    with tempfile.TemporaryDirectory() as directory:
        results = {
            task: learn(task, args, mesh, args.model or directory) for task in args.task
        }
    for task, (scores, reference) in results.items():
        print(f"{task}: {scores[-1]:.3f}, and {reference:.3f} by a linear model")
    return results


if __name__ == "__main__":
    common.run(main)
