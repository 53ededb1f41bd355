"""Text that needs no download: the standard library's code, and its docstrings with
their signatures."""

import ast
import collections
import json
import math
import pathlib
import sysconfig
from itertools import compress, pairwise
from typing import Any

import numpy as np
import tokenizers
import transformers

SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
}


def hold_out(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Hold out every twentieth row. Return the other rows, and the held-out ones."""
    return [row for i, row in enumerate(rows) if i % 20], rows[::20]


def modules(every: int) -> tuple[list[str], list[str]]:
    """Return the text of one in `every` modules of the standard library: training
    texts, and held-out ones."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if SKIPPED.isdisjoint(f.relative_to(root).parts)
    ]
    return hold_out(
        [file.read_text("utf-8", errors="replace") for file in files[::every]]
    )


def signatures(texts: list[str]) -> list[dict[str, str]]:
    """Pair the first paragraph of each docstring with the signature of its function."""
    pairs = {
        (
            " ".join(docstring.split("\n\n")[0].split()),
            f"def {node.name}({ast.unparse(node.args)}):",
        )
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node))
    }
    return [
        {"instruction": docstring, "output": signature}
        for docstring, signature in sorted(pairs)
    ]


def read_records(
    path: str,
    fields: frozenset[str] = frozenset({"instruction", "output"}),
    form: str = "instruction, output and perhaps input",
) -> tuple[list[Any], list[Any]]:
    """Read the rows of an Alpaca-style file. Raises `ValueError`, which gives the
    `form` of a row in words, if a row lacks one of the `fields`."""
    try:
        rows = json.loads(pathlib.Path(path).read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(
            f"{path}: a list of objects was expected, not {type(rows).__name__}."
        )
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not fields <= row.keys():
            raise ValueError(f"{path}: row {i} needs {form}; it is {row!r:.80}")
    return hold_out(rows)


def make_tokenizer(texts: list[str], size: int) -> Any:
    """Train a byte-level BPE on the texts, and return it as a tokenizer of
    transformers."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, size, special_tokens=list(special.values()), show_progress=False
    )
    whole = tokenizers.Tokenizer.from_str(bpe.to_str())
    begin = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    whole.post_processor = begin  # for prompts; `encode` leaves it out
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **special)


def load_tokenizer(directory: str) -> Any:
    """Load the tokenizer in a directory. Raises `ValueError` if it cannot pad or end a
    text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    if tokenizer.pad_token is None or tokenizer.eos_token is None:
        raise ValueError(
            f"{directory}: the tokenizer lacks a pad_token or an eos_token. Set it."
        )
    return tokenizer


def prompt(row: Any) -> str:
    """Return the text before an answer."""
    asked = f"### Instruction:\n{row['instruction']}\n{row.get('input', '')}".rstrip()
    return f"{asked}\n\n### Response:\n"


def encode(tokenizer: Any, rows: list[Any], length: int) -> list[dict[str, np.ndarray]]:
    """Encode texts in windows of `length` tokens, or instructions with answers, cut and
    padded to it."""
    # `prompt` and `answer` mark their tokens, and `num_bytes` is the length of the
    # answer's text.
    examples, places = [], np.arange(length)
    for row in rows:
        asked, answer = (
            ("", row) if isinstance(row, str) else (prompt(row), row["output"])
        )
        head, tail = (
            tokenizer.encode(text, add_special_tokens=False) for text in (asked, answer)
        )
        head, tail = (
            [tokenizer.bos_token_id or tokenizer.eos_token_id, *head],
            [*tail, tokenizer.eos_token_id],
        )
        room = max(length - len(head), 0)
        # Of windows; an answer keeps only the first.
        ends = range(room, len(tail) + room, room or 1)
        for end in ends if not asked else ends[: room > 0]:
            tokens = [*head, *tail[end - room : end]]
            given = (len(head) <= places) & (places < len(tokens))
            size = np.float32(len(answer.encode()) * given.sum() / len(tail))
            filled = np.array(
                tokens + [tokenizer.pad_token_id] * (length - len(tokens)), np.int32
            )
            masks = {"prompt": places < len(head), "answer": given}
            examples.append({"tokens": filled, "num_bytes": size, **masks})
    return examples


def bigram_bits(train: list[Any], test: list[Any], num_tokens: int) -> float:
    """Return the bits per byte of a bigram model, which predicts each token from the
    one before it."""

    def pairs(part: list[Any]) -> list[tuple[int, int]]:
        return [
            p
            for x in part
            for p in compress(pairwise(x["tokens"].tolist()), x["answer"][1:])
        ]

    seen = pairs(train)
    counts, before, after = map(
        collections.Counter, (seen, (a for a, _ in seen), (b for _, b in seen))
    )
    bits = 0.0
    for a, b in pairs(test):
        alone = (after[b] + 1) / (len(seen) + num_tokens)
        bits -= math.log2((counts[a, b] + 5 * alone) / (before[a] + 5))
    return bits / float(sum(x["num_bytes"] for x in test))
