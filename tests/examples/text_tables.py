"""Tables of texts in the formats that examples read, and texts whose class and score
are in their words."""

import csv
import json

import numpy as np
import pyarrow
import pyarrow.parquet

CALM, WILD = (
    text.split()
    for text in (
        "the sea is calm and the sky is clear today so we sail on",
        "storm waves broke over us all night long and we fear to sink",
    )
)


def rows(num, seed):
    """Texts whose class is in their words, and a score that counts some of them; and
    some noise."""
    random = np.random.default_rng(seed)
    for _ in range(num):
        label = random.integers(2)
        text = " ".join(
            [*random.choice((CALM, WILD)[label], 6), *random.choice(CALM + WILD, 3)]
        )
        kind = ("calm", "wild")[label]
        score = str(label * 3.0)
        yield {"first": text[:20], "second": text[20:], "kind": kind, "score": score}


def write(file, rows):
    """Writes a table in the format of the file's suffix."""
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(
                lines, rows[0], **(tabs if file.suffix == ".tsv" else {})
            )
            writer.writeheader()
            writer.writerows(rows)
