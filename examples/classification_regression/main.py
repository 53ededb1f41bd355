"""Classification of digits, and of docstrings by kind (module, class, function);
regression on their length.

    python examples/classification_regression/main.py  # all three tasks
    python examples/classification_regression/main.py --task digits --data \\
        MNIST_DIRECTORY
    python examples/classification_regression/main.py --task classification --data \\
        SST_DIRECTORY --text sentence
    python examples/classification_regression/main.py --task regression --data \\
        STS_DIRECTORY \\
        --text sentence1 sentence2 --label score

A directory of text contains `train` and `dev` (or `validation`, or `test`), as .tsv,
.csv, .jsonl or .parquet with named columns. The program prints each score beside that
of a linear model on the same examples (on pixels, or on word counts).
"""

import itertools
import pathlib
import re
import sys
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data
import table_data

EPOCHS = {"digits": 20, "classification": 6, "regression": 6}
# Hash buckets of words and pairs (0: nothing), words of a text.
VOCABULARY, LENGTH = 32768, 64

# -------------------------------------------------------------------------------------
# the models


class TextModel(eqx.Module):
    """A mean over words and pairs of words, as in fastText (Joulin et al. 2016), and
    two Linear layers."""

    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, num_outputs: int, *, key: Any):
        embedding_key, up_key, head_key = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(
            weight=0.1 * jax.random.normal(embedding_key, (VOCABULARY, 64))
        )
        self.norm = eqx.nn.LayerNorm(64)
        self.up = eqx.nn.Linear(64, 64, key=up_key)
        self.head = eqx.nn.Linear(64, num_outputs, key=head_key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, tokens: Array, *, key: Any) -> Float[Array, " num_outputs"]:
        """Return the outputs for one text."""
        keys = jax.random.split(key)
        total = jnp.sum(
            jax.vmap(self.embedding)(tokens) * (tokens != 0)[:, None], axis=0
        )
        # After a norm, a sum is as good as the mean.
        x = self.dropout(self.norm(total), key=keys[0])
        return self.head(self.dropout(jax.nn.relu(self.up(x)), key=keys[1]))


def image_model(size: int, num_outputs: int, *, key: Any) -> eqx.nn.Sequential:
    """Make two convolutions and a Linear layer."""
    keys = jax.random.split(key, 3)
    layers = [
        eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.MaxPool2d(2, 2),
        eqx.nn.Dropout(0.5),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(64 * (size // 2) ** 2, num_outputs, key=keys[2]),
    ]
    return eqx.nn.Sequential(layers)


# --------------------------------------------------------------------------- the three
# functions


def encode(x: Any) -> np.ndarray:
    """Return an image with a channel dim, or the hashed words and pairs of neighbouring
    words of a text."""
    if isinstance(x, np.ndarray):
        return x[None]
    # `^` gives the first word a pair, too.
    words = ["^", *re.findall(r"\w+|[^\w ]", "\n".join(x).lower())][:LENGTH]
    features = [*words, *map(" ".join, itertools.pairwise(words))]
    tokens = [
        1 + zlib.crc32(feature.encode()) % (VOCABULARY - 1) for feature in features
    ]
    return np.pad(np.array(tokens, np.int32), (0, 2 * LENGTH - len(tokens)))


def collate_fn(examples: Sequence[tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Collate examples into a batch of NumPy arrays."""
    return {
        "x": np.stack([encode(x) for x, _ in examples]),
        "y": np.array([y for _, y in examples]),
    }


def predict_fn(model: Any, batch: Any, key: Any) -> Float[Array, "batch num_outputs"]:
    """Return the logits of the classes, or the value of a regression."""
    keys = jax.random.split(key, len(batch["y"]))
    return jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)


def loss_fn(model: Any, batch: Any, key: Any) -> Array:
    """Return the cross-entropy, or the squared error."""
    outputs, y = predict_fn(model, batch, key), batch["y"]
    if y.dtype == jnp.float32:
        return jnp.mean((outputs[:, 0] - y) ** 2)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


# -----------------------------------------------------------------------------------
# the program


def learn(task: str, args: Any, mesh: Any) -> tuple[list[float], float]:
    """Return the held-out score after each epoch, and the score of a linear model."""
    is_digits = task == "digits"
    train, held_out = (
        digits_data.digits(args.data) if is_digits else table_data.read(task, args)
    )
    num_outputs = 1 if task == "regression" else 1 + max(y for _, y in train)
    make_model: Any = partial(image_model, len(train[0][0])) if is_digits else TextModel
    model_key, state_key = jax.random.split(jax.random.key(args.seed))
    program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[: args.batch_size])}
    model = rx.init_model(
        lambda key: make_model(num_outputs, key=key), mesh, key=model_key, **program
    )
    functions = {
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": args.batch_size,
    }
    scoring: Any = {"predict_fn": predict_fn, "metric_fn": table_data.metric_fn}
    predictions = args.output and args.output / task
    evaluation = rx.Evaluation(
        held_out, **functions, **scoring, predictions_directory=predictions
    )
    num_epochs = args.epochs or EPOCHS[task]
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=num_epochs
    )
    optimizer = optax.adamw(
        optax.cosine_decay_schedule(3e-3, num_steps), weight_decay=0.05
    )
    print(f"{task}: {len(train)} examples, {len(held_out)} held out")
    _, history = rx.fit(
        rx.init_state(model, optimizer, key=state_key),
        train,
        **functions,
        optimizer=optimizer,
        num_epochs=num_epochs,
        evaluation=evaluation,
        checkpoints=args.checkpoints and args.checkpoints / task,
    )
    return history["eval/score"], table_data.linear_score(train, held_out)


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return each task's score after each epoch, and the score of a linear model."""
    parser = common.flags(__doc__, batch_size=32, epochs=None)
    parser.add_argument(
        "--task", choices=EPOCHS, nargs="+", default=EPOCHS, help="tasks to train (all)"
    )
    table_data.add_flags(parser)
    args, mesh = common.start(parser, argv)
    results = {task: learn(task, args, mesh) for task in args.task}
    for task, (scores, reference) in results.items():
        print(f"{task}: {scores[-1]:.3f}, and {reference:.3f} by a linear model")
    return results


if __name__ == "__main__":
    common.run(main)
