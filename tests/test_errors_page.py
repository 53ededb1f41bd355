"""Each message of the library that docs/pages/errors.md quotes is one that the source
emits, or could."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from pages import PAGES, ROOT

PACKAGES = {"redco_eqx": ROOT / "src", "redco_eqx_models": ROOT / "models" / "src"}
HOLE = "\0"


def literals(nodes: list[ast.AST]) -> Iterator[str]:
    """Every text in a module but its docstrings; what an f-string fills in is a
    hole."""
    bare = {node.value for node in nodes if isinstance(node, ast.Expr)}
    without = bare | {
        x for node in nodes if isinstance(node, ast.JoinedStr) for x in node.values
    }
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(x.value) if isinstance(x, ast.Constant) else HOLE
                for x in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in without
        ):
            yield node.value


class Source:
    """The texts and the classes in the source of a package."""

    def __init__(self, package: str):
        paths = sorted(PACKAGES[package].rglob("*.py"))
        modules = [list(ast.walk(ast.parse(path.read_text()))) for path in paths]
        self.texts = {text for nodes in modules for text in literals(nodes)}
        self.classes = {
            x.name for nodes in modules for x in nodes if isinstance(x, ast.ClassDef)
        }


@functools.cache
def source_of(package: str) -> Source:
    return Source(package)


def is_emitted(quoted: str, source: Source) -> bool:
    """Return true if the class is the package's, and one text has all words, in order;
    `...` is any words."""
    name, rest = re.fullmatch(r"(?:([A-Z]\w+)(?:: |$))?(.*)", quoted).groups()  # pyright: ignore
    pattern = ".*".join(re.escape(part.strip()) for part in rest.split("..."))
    is_said = rest == "" or any(
        re.search(pattern, text, re.DOTALL) for text in source.texts
    )
    return is_said and (name is None or name in source.classes)


def quoted(package: str) -> list[str]:
    """The messages in the section of a package."""
    page = (PAGES / "errors.md").read_text()
    section = page.split(f"\n## Messages of {package}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.+?)` +\|", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("package", "message"),
    [(package, message) for package in PACKAGES for message in quoted(package)],
)
def test_a_message_that_the_page_quotes_is_emitted(package: str, message: str) -> None:
    assert is_emitted(message, source_of(package))


@pytest.mark.parametrize(
    ("package", "at_least"), [("redco_eqx", 12), ("redco_eqx_models", 8)]
)
def test_the_page_quotes_the_messages_of_each_package(
    package: str, at_least: int
) -> None:
    assert len(quoted(package)) >= at_least


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "wrong",
    [
        "CheckpointErr: ... is damaged",  # no such class
        "the mesh has axes ('dp', 'tp')",  # a value in a hole
        "which creates one ... is the function",  # another order
        "The texts and the classes in the source",  # words of no message
    ],
)
def test_a_message_that_nothing_emits_is_found(package: str, wrong: str) -> None:
    assert not is_emitted(wrong, source_of(package))


def test_a_message_stands_in_one_section() -> None:
    page = (PAGES / "errors.md").read_text()
    everywhere = re.findall(
        r"^\| `(.+?)` +\|", page.partition("## Messages of JAX")[0], re.MULTILINE
    )
    assert everywhere == [
        message for package in PACKAGES for message in quoted(package)
    ]
