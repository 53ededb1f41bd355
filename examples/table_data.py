"""Texts with a label or a number: tables in GLUE's format, or docstrings, which need no
download."""

import ast
import csv
import json
import pathlib
import sysconfig
import zlib
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline

KINDS: dict[Any, int] = {
    ast.Module: 0,
    ast.ClassDef: 1,
    ast.FunctionDef: 2,
    ast.AsyncFunctionDef: 2,
}


def add_flags(parser: Any) -> None:
    """Add the flags for the directory of a table, and for its columns."""
    parser.add_argument("--data", help="directory with your own data")
    parser.add_argument(
        "--text", nargs="+", default=["sentence"], help="columns of the text"
    )
    parser.add_argument(
        "--label", default="label", help="column of the class or number"
    )
    parser.add_argument(
        "--columns", nargs="+", help="names of all columns, if the first line has none"
    )


def docstrings(column: str, every: int) -> list[list[Any]]:
    """Return docstrings of the standard library (one file in `every`), each with its
    kind or the log of its length.
    """
    root, rows = pathlib.Path(sysconfig.get_path("stdlib")), {}
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if {"site-packages", "test", "tests"}.isdisjoint(f.parts)
    ]
    for file in files[::every]:
        nodes: Any = ast.walk(ast.parse(file.read_bytes()))
        for node in nodes:
            if (
                type(node) in KINDS
                and len(node.body) > 1
                and (text := ast.get_docstring(node))
            ):
                num_lines = node.body[-1].end_lineno - node.body[0].end_lineno
                rows[(text,)] = (
                    KINDS[type(node)]
                    if column == "kind"
                    else np.float32(np.log1p(num_lines))
                )
    held_out = {x for x in rows if zlib.crc32(x[0].encode()) % 5 == 0}
    return [
        [row for row in rows.items() if (row[0] in held_out) == held]
        for held in (False, True)
    ]


def table(args: Any, *splits: str) -> list[tuple[tuple[str, ...], Any]]:
    """Return the texts of each row with its label, from the first of the splits that
    exists."""
    files = [
        file
        for split in splits
        for file in sorted(pathlib.Path(args.data).glob(f"{split}.*"))
    ]
    if not files:
        raise ValueError(
            f"--data {args.data}: no {' or '.join(splits)} as .tsv, .csv, .jsonl or "
            ".parquet."
        )
    if files[0].suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(files[0]).to_pylist()
    elif files[0].suffix == ".jsonl":
        rows = [json.loads(line) for line in files[0].read_text("utf-8").splitlines()]
    else:
        tabs: Any = (
            {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
            if files[0].suffix == ".tsv"
            else {}
        )
        with files[0].open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines, args.columns, **tabs))
    for column in (*args.text, args.label):
        if not rows or column not in rows[0]:
            raise ValueError(
                f"{files[0]}: no column {column!r} among "
                f"{', '.join(rows[0] if rows else [])}."
            )
    for i, row in enumerate(rows):
        if None in (row.get(column) for column in (*args.text, args.label)):
            raise ValueError(
                f"{files[0]}: row {i} lacks a text or its {args.label}: {row!r:.80}"
            )
    return [
        (tuple(row[column] for column in args.text), row[args.label]) for row in rows
    ]


def read(task: str, args: Any) -> list[list[Any]]:
    """Return pairs of texts and their class or standardised number: a training set, and
    a held-out set."""
    if args.data is None:
        parts = docstrings(
            "kind" if task == "classification" else "length", 5 if args.quick else 1
        )
    else:
        parts = [table(args, "train"), table(args, "dev", "validation", "test")]
    labels = [[y for _, y in part] for part in parts]
    if task == "classification":
        classes = sorted(set(labels[0]))
        if unknown := set(labels[1]).difference(classes):
            raise ValueError(
                f"--label {args.label}: {min(unknown)!r} is not among those to train "
                "on."
            )
        return [[(x, classes.index(y)) for x, y in part] for part in parts]
    try:
        numbers = [np.array(part, np.float32) for part in labels]
    except ValueError as error:
        raise ValueError(
            f"--label {args.label}: {str(error).split(': ')[-1]} is not a number."
        ) from None
    mean, deviation = np.mean(numbers[0]), np.std(numbers[0])
    return [
        [(x, (y - mean) / deviation) for (x, _), y in zip(*pair)]
        for pair in zip(parts, numbers)
    ]


def metric_fn(examples: list[Any], outputs: list[Any]) -> dict[str, float]:
    """Return the accuracy, or for a regression R^2, the share of the variance that the
    model explains."""
    y, found = np.array([y for _, y in examples]), np.stack(outputs)
    if y.dtype == np.float32:
        return {"score": float(1 - np.mean((found[:, 0] - y) ** 2) / np.var(y))}
    return {"score": float(np.mean(found.argmax(axis=1) == y))}


def linear_score(train: list[Any], held_out: list[Any]) -> float:
    """Return the score of a linear model on word counts, or on pixels, with the best of
    several penalties.

    The model is fitted to convergence in float64, because the result of an early stop
    in float32 depends on the processor.
    """
    is_text, is_class = isinstance(train[0][0], tuple), isinstance(train[0][1], int)
    read_x: Any = "\n".join if is_text else lambda image: np.ravel(image).astype(float)
    pairs = [
        ([read_x(x) for x, _ in part], [y for _, y in part])
        for part in (train, held_out)
    ]
    ridges = [Ridge(10.0**n, tol=1e-8) for n in range(5)]
    models = [LogisticRegression(max_iter=10_000, tol=1e-6)] if is_class else ridges
    vectorizer = [CountVectorizer()] if is_text else []
    return max(
        float(make_pipeline(*vectorizer, x).fit(*pairs[0]).score(*pairs[1]))
        for x in models
    )
