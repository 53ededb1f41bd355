"""Plain text in WikiText's format (Merity et al. 2016): articles under headings, one
paragraph a line."""

import pathlib
import re

# ` = Title = ` begins an article; ` = = Section = = ` is within one.
_TITLE = re.compile(r"^ ?= (?!=)[^\n]*(?<!=) = ?$", re.MULTILINE)
_NAMES = {"train": ("train",), "held out": ("valid", "validation", "test")}


def articles(directory: str) -> tuple[list[str], list[str]]:
    """Return the training articles and the held-out articles of a directory. A text
    without headings is one article.

    Its files are those of WikiText, `wiki.train.tokens` and `wiki.valid.tokens` (or
    `.raw`), or `train.txt` and `valid.txt`, or tables of lines as .parquet with a
    column `text`. Raises `ValueError` if one is missing.
    """
    train, held_out = (
        _split("".join(map(_read, _files(directory, names))))
        for names in _NAMES.values()
    )
    return train, held_out


def _files(directory: str, names: tuple[str, ...]) -> list[pathlib.Path]:
    for name in names:
        patterns = (f"wiki.{name}.*", f"{name}.txt", f"{name}*.parquet")
        for pattern in patterns:
            if found := sorted(pathlib.Path(directory).glob(pattern)):
                return found
    raise ValueError(
        f"{directory}: there is no {' or '.join(names)} in it, as "
        f"wiki.{names[0]}.tokens, {names[0]}.txt or {names[0]}.parquet."
    )


def _read(file: pathlib.Path) -> str:
    if file.suffix != ".parquet":
        return file.read_text("utf-8")
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    if "text" not in table.column_names:
        raise ValueError(
            f"{file}: no column 'text' among {', '.join(table.column_names)}."
        )
    return "".join(table.column("text").to_pylist())


def _split(text: str) -> list[str]:
    begins = [match.start() for match in _TITLE.finditer(text)] or [0]
    pieces = [
        text[begin:end].strip() for begin, end in zip(begins, [*begins[1:], len(text)])
    ]
    return [piece for piece in pieces if piece]
