"""Each message of the library that docs/pages/errors.md quotes is one that the source emits, or could."""

import ast
import re
from collections.abc import Iterator

from pages import PAGES, ROOT

NODES = [list(ast.walk(ast.parse(path.read_text()))) for path in sorted((ROOT / "src").rglob("*.py"))]
CLASSES = {node.name for nodes in NODES for node in nodes if isinstance(node, ast.ClassDef)}
HOLE = "\0"


def literals(nodes: list[ast.AST]) -> Iterator[str]:
    """Every text in a module but its docstrings; what an f-string fills in is a hole."""
    bare = {node.value for node in nodes if isinstance(node, ast.Expr)}
    without = bare | {x for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(x.value) if isinstance(x, ast.Constant) else HOLE for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in without:
            yield node.value


LITERALS = {text for nodes in NODES for text in literals(nodes)}


def is_emitted(quoted: str) -> bool:
    """Return true if the class is the library's, and one text has all words, in order; `...` is any words."""
    name, rest = re.fullmatch(r"(?:([A-Z]\w+)(?:: |$))?(.*)", quoted).groups()  # pyright: ignore
    pattern = ".*".join(re.escape(part.strip()) for part in rest.split("..."))
    is_said = rest == "" or any(re.search(pattern, text, re.DOTALL) for text in LITERALS)
    return is_said and (name is None or name in CLASSES)


def test_the_messages_that_the_page_quotes_are_emitted() -> None:
    # What JAX says stands in a table of its own.
    text = (PAGES / "errors.md").read_text().partition("from JAX itself")[0]
    quoted = re.findall(r"^\| `(.+?)` +\|", text, re.MULTILINE)
    assert len(quoted) > 12
    assert [message for message in quoted if not is_emitted(message)] == []
    for wrong in (
        "CheckpointErr: ... is damaged",  # no such class
        "the mesh has axes ('dp', 'tp')",  # a value in a hole
        "which creates one ... is the function",  # another order
        "Every text in a module",  # words of no message
    ):
        assert not is_emitted(wrong)
