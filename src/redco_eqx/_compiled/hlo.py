"""The text of a compiled program (optimized HLO): its computations, and their instructions."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from redco_eqx._compiled.sources import source_lines


@dataclass(frozen=True)
class Instruction:
    """One line of the text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names without "%"; of a constant its value, of a parameter its number
    attributes: str  # with strings emptied: what they say is not an attribute
    line: str

    def names(self, attribute: str) -> list[str]:
        """The names in `attribute=%name` or `attribute={%name, %name}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


@dataclass(frozen=True)
class Program:
    """The text, cut into the lines of its instructions, which are parsed when they are wanted."""

    computations: dict[str, dict[str, str]]  # name -> {instruction's name: its line}
    roots: dict[str, str]
    entry: str
    num_devices: int | None  # None if the text has no header
    sources: dict[int, str]  # id of a stack frame -> "file.py:12"


_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_DEFINITION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def parse(text: str) -> Program:
    """The program in a text. Raises `ValueError` if it is not the optimized HLO of one program."""
    computations: dict[str, dict[str, str]] = {}
    roots: dict[str, str] = {}
    entries: list[str] = []
    num_devices = current = name = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            sizes = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", line)
            num_devices = math.prod(map(int, sizes))
        elif current is None:
            if start := _COMPUTATION.match(line):
                current, name = start[2], None
                computations[current] = {}
                entries += [current] if start[1] else []
        elif line.lstrip().startswith("}"):
            roots.setdefault(current, name or "")
            current = None
        elif definition := _DEFINITION.match(line):
            name = definition[2]
            computations[current][name] = line
            if definition[1]:
                roots[current] = definition[2]
        elif name is not None:
            computations[current][name] += " " + line.strip()
    if len(entries) != 1:
        raise ValueError(
            f"communication: the text has {len(entries)} ENTRY computations, but one is expected. Pass the "
            "program that jit_step(step).lower(state, batch).compile() returns, or its as_text()."
        )
    return Program(computations, roots, entries[0], num_devices, source_lines(text))


@lru_cache(maxsize=1024)
def instruction(line: str) -> Instruction:
    """What a line of the text says."""
    definition = _DEFINITION.match(line)
    assert definition is not None  # lines are stored by it
    rest = re.sub(r"/\*index=\d+\*/", "", definition[3])
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest.partition("(")[0]
    if not re.fullmatch(r"[\w\-]+", opcode):
        raise ValueError(f"communication: this is not understood as an instruction: {line.strip()[:300]}")
    end = _closing(rest, len(opcode))
    # An operand comes with or without its shape and "%".
    operands = [x.split()[-1].lstrip("%") for x in split_commas(rest[len(opcode) + 1 : end - 1])]
    attributes = _STRING.sub('""', rest[end:])
    return Instruction(definition[2], shape, opcode, tuple(operands), attributes, line)


def _closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.end()
    return len(text)


def split_commas(text: str) -> list[str]:
    """The parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"[()\[\]{},]", text):
        if mark[0] != ",":
            depth += 1 if mark[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part for part in [*parts, text[start:]] if part.strip()]
