"""Handwritten digits, the kind of thing that a docstring describes (module, class, function), its length.

    python examples/classification_regression/main.py                          # all three tasks
    python examples/classification_regression/main.py --task digits --data MNIST_DIRECTORY
    python examples/classification_regression/main.py --task classification --data SST_DIRECTORY --text sentence
    python examples/classification_regression/main.py --task regression --data STS_DIRECTORY \\
        --text sentence1 sentence2 --label score

A directory of text has `train` and `dev` (or `validation`, or `test`) in it, as .tsv, .csv or .parquet with
named columns. Each score stands beside that of a linear model on the same examples: on pixels, or on counts
of words.
"""

import ast
import csv
import itertools
import pathlib
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data

EPOCHS = {"digits": 20, "classification": 6, "regression": 6}
VOCABULARY, LENGTH = 32768, 64  # buckets that words and pairs are hashed to (0: nothing), words of a text
KINDS: dict[Any, int] = {ast.Module: 0, ast.ClassDef: 1, ast.FunctionDef: 2, ast.AsyncFunctionDef: 2}

# ------------------------------------------------------------------------------------- the models


class TextModel(eqx.Module):
    """The mean over words and pairs of them, as in fastText (Joulin et al. 2016), and two Linear layers."""

    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, num_outputs: int, *, key: Any):
        embedding_key, up_key, head_key = jax.random.split(key, 3)
        weight = 0.1 * jax.random.normal(embedding_key, (VOCABULARY, 64))
        self.embedding = eqx.nn.Embedding(weight=weight)
        self.norm = eqx.nn.LayerNorm(64)
        self.up = eqx.nn.Linear(64, 64, key=up_key)
        self.head = eqx.nn.Linear(64, num_outputs, key=head_key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, tokens: Array, *, key: Any) -> Float[Array, " num_outputs"]:
        """For one text."""
        keys = jax.random.split(key)
        total = jnp.sum(jax.vmap(self.embedding)(tokens) * (tokens != 0)[:, None], axis=0)
        x = self.dropout(self.norm(total), key=keys[0])  # after a norm, a sum is as good as the mean
        return self.head(self.dropout(jax.nn.relu(self.up(x)), key=keys[1]))


def image_model(size: int, num_outputs: int, *, key: Any) -> eqx.nn.Sequential:
    """Two convolutions and a Linear layer."""
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


# --------------------------------------------------------------------------- the three functions


def encode(x: Any) -> np.ndarray:
    """An image with its one channel, or the hashed words of a text and pairs of neighbours."""
    if not isinstance(x, str):
        return x[None]
    words = ["^", *re.findall(r"\w+|[^\w ]", x.lower())][:LENGTH]  # so that the first word makes a pair, too
    features = [*words, *(" ".join(pair) for pair in itertools.pairwise(words))]
    tokens = [1 + zlib.crc32(feature.encode()) % (VOCABULARY - 1) for feature in features]
    return np.pad(np.array(tokens, np.int32), (0, 2 * LENGTH - len(tokens)))


def collate_fn(examples: Sequence[tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Examples to a batch of NumPy arrays."""
    return {"x": np.stack([encode(x) for x, _ in examples]), "y": np.array([y for _, y in examples])}


def predict_fn(model: Any, batch: Any, key: Any) -> Float[Array, "batch num_outputs"]:
    """The logits of the classes, or the one number of a regression."""
    keys = jax.random.split(key, len(batch["y"]))
    return jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)


def loss_fn(model: Any, batch: Any, key: Any) -> Array:
    """Cross-entropy, or the squared error."""
    outputs, y = predict_fn(model, batch, key), batch["y"]
    if y.dtype == jnp.float32:
        return jnp.mean((outputs[:, 0] - y) ** 2)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def metric_fn(examples: Sequence[tuple[Any, Any]], outputs: list[Any]) -> dict[str, float]:
    """Accuracy, or for a regression R^2, the share of the variance that is explained."""
    y, found = np.array([y for _, y in examples]), np.stack(outputs)
    if y.dtype == np.float32:
        return {"score": float(1 - np.mean((found[:, 0] - y) ** 2) / np.var(y))}
    return {"score": float(np.mean(found.argmax(axis=1) == y))}


# -------------------------------------------------------------------------------------- the data


def docstrings(column: str, every: int) -> tuple[list[Any], list[Any]]:
    """Of every so manieth file of the standard library, the docstrings, each with its kind or log of length."""
    root, rows = pathlib.Path(sysconfig.get_path("stdlib")), {}
    files = [f for f in sorted(root.rglob("*.py")) if {"site-packages", "test", "tests"}.isdisjoint(f.parts)]
    for file in files[::every]:
        nodes: Iterator[Any] = ast.walk(ast.parse(file.read_bytes()))
        for node in nodes:
            if type(node) in KINDS and len(node.body) > 1 and (text := ast.get_docstring(node)):
                num_lines = node.body[-1].end_lineno - node.body[0].end_lineno
                rows[text] = KINDS[type(node)] if column == "kind" else np.float32(np.log1p(num_lines))
    held_out = {text for text in rows if zlib.crc32(text.encode()) % 5 == 0}
    train = [row for row in rows.items() if row[0] not in held_out]
    return train, [row for row in rows.items() if row[0] in held_out]


def table(args: Any, *splits: str) -> list[tuple[str, str]]:
    """Texts (joined, if in several columns) and labels, of the first of the splits that there is."""
    files = [file for split in splits for file in sorted(pathlib.Path(args.data).glob(f"{split}.*"))]
    if not files:
        raise ValueError(
            f"--data {args.data}: there is no {' or '.join(splits)} as .tsv, .csv or .parquet in it."
        )
    if files[0].suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(files[0]).to_pylist()
    else:
        tabs: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if files[0].suffix == ".tsv" else {}
        with files[0].open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines, args.columns, **tabs))
    for column in (*args.text, args.label):
        if not rows or column not in rows[0]:
            raise ValueError(f"{files[0]}: no column {column!r} among {', '.join(rows[0] if rows else [])}.")
    for i, row in enumerate(rows):
        if None in (row[column] for column in (*args.text, args.label)):
            raise ValueError(f"{files[0]}: row {i} lacks a text or its {args.label}: {row!r:.80}")
    return [("\n".join(row[column] for column in args.text), row[args.label]) for row in rows]


def read(task: str, args: Any) -> tuple[list[Any], list[Any]]:
    """Pairs of an input and what it is or measures: to train on, and held out."""
    if task == "digits":
        return digits_data.digits(args.data)
    if args.data is None:
        return docstrings("kind" if task == "classification" else "length", 5 if args.quick else 1)
    train, held_out = table(args, "train"), table(args, "dev", "validation", "test")
    classes = sorted({y for _, y in train})

    def number(y: str) -> Any:
        try:
            return np.float32(y) if task == "regression" else classes.index(y)
        except ValueError:
            what = "a number" if task == "regression" else "among those to train on"
            raise ValueError(f"--label {args.label}: {y!r} is not {what}.") from None

    return [(x, number(y)) for x, y in train], [(x, number(y)) for x, y in held_out]


# ----------------------------------------------------------------------------------- the program


def learn(task: str, args: Any, mesh: Any) -> tuple[list[float], float]:
    """The score on held-out examples after each epoch, and that of a linear model."""
    train, held_out = read(task, args)
    if regression := task == "regression":  # in standard deviations from the mean; R^2 is the same
        mean, deviation = (f([y for _, y in train]) for f in (np.mean, np.std))
        train, held_out = ([(x, (y - mean) / deviation) for x, y in part] for part in (train, held_out))
    num_outputs = 1 if regression else 1 + max(y for _, y in train)
    flat = FunctionTransformer(lambda images: np.reshape(images, (len(images), -1)))
    # Of several penalties the one counts that is best on the held-out examples.
    linear = [Ridge(10.0**n) for n in range(5)] if regression else [LogisticRegression(max_iter=300)]
    baselines = (make_pipeline(flat if task == "digits" else CountVectorizer(), model) for model in linear)
    reference = max(float(baseline.fit(*zip(*train)).score(*zip(*held_out))) for baseline in baselines)

    def make_model(key: Any) -> Any:
        if task == "digits":
            return image_model(len(train[0][0]), num_outputs, key=key)
        return TextModel(num_outputs, key=key)

    model_key, state_key = jax.random.split(jax.random.key(args.seed))
    batch = collate_fn(train[: args.batch_size])
    model = rx.init_model(make_model, mesh, key=model_key, loss_fn=loss_fn, batch=batch)
    num_epochs = args.epochs or EPOCHS[task]
    num_steps = rx.num_train_steps(len(train), batch_size=args.batch_size, num_epochs=num_epochs)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, num_steps), weight_decay=0.05)
    scores = []
    print(f"{task}: {len(train)} examples, {len(held_out)} held out")
    state = rx.fit(
        rx.init_state(model, optimizer, key=state_key),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=args.batch_size,
        num_epochs=num_epochs,
        evaluation=rx.Evaluation(
            held_out,
            predict_fn=predict_fn,
            metric_fn=metric_fn,
            predictions_directory=args.output and args.output / task,
        ),
        checkpoints=args.checkpoints and args.checkpoints / task,
        loggers=[rx.ConsoleLogger(), lambda _, row: scores.append(row.get("eval/score"))],
    )
    if scores == []:  # its checkpoints say that the run is over
        outputs = rx.predict(
            state, held_out, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=mesh.size
        )
        scores.append(metric_fn(held_out, outputs)["score"])
    return [score for score in scores if score is not None], reference


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Each task's scores after each epoch, and that of a linear model."""
    parser = common.flags(__doc__, batch_size=32, epochs=None)
    parser.add_argument("--task", choices=EPOCHS, nargs="+", default=EPOCHS, help="all, if not given")
    parser.add_argument("--data", help="a directory in place of the data that comes along")
    parser.add_argument("--text", nargs="+", default=["sentence"], help="columns of the text")
    parser.add_argument("--label", default="label", help="column of the class or number")
    parser.add_argument("--columns", nargs="+", help="names of all columns, where the first line has none")
    args, mesh = common.start(parser, argv)
    results = {task: learn(task, args, mesh) for task in args.task}
    for task, (scores, reference) in results.items():
        print(f"{task}: {scores[-1]:.3f}, and {reference:.3f} by a linear model")
    return results


if __name__ == "__main__":
    common.run(main)
