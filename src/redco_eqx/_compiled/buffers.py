"""The largest values that a compiled program computes: what takes the memory besides its arguments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from redco_eqx._compiled.hlo import Program, instruction
from redco_eqx._compiled.shapes import arrays, num_bytes

# What makes no buffer of its own.
_VIEWS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
_BODIES = ("body", "branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Buffer:
    """A value on one device.

    - `num_bytes`: its size. `shape`: as `"f32[8,128]"`.
    - `source`: the line that asked for it, `"/home/me/train.py:12"`; empty where the text does not tell.
    """

    num_bytes: int
    shape: str
    source: str


def largest_buffers(program: Program, *, most: int = 5) -> list[Buffer]:
    """The values of most bytes, those of one shape and line once. Not all of them exist at the same time."""
    found = dict.fromkeys(_buffers(program, program.entry))
    return sorted(found, key=lambda b: (-b.num_bytes, b.shape, b.source))[:most]


def _buffers(program: Program, computation: str) -> Iterator[Buffer]:
    for line in program.computations[computation].values():
        x = instruction(line)
        if x.opcode in _VIEWS:
            bodies = [body for key in _BODIES for body in x.names(key)]
            bodies += x.names("to_apply") if x.opcode == "call" else []
            for body in bodies:
                yield from _buffers(program, body)
            continue
        frame = re.search(r"\bstack_frame_id=(\d+)", x.line)
        source = program.sources.get(int(frame[1]), "") if frame else ""
        for shape in arrays(x.shape):
            yield Buffer(num_bytes(shape), shape, source)
