"""How each leaf of a model is made: which values of the traced program are computed where.

Small values (keys, scalars) are computed as they come. What is made of them element by element is computed with
the leaf's sharding, each shard where it lies. The rest is computed on one device.
"""

import dataclasses
import math
from typing import Any, Literal, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from redco_eqx._birth.flat import FlatProgram, cut_out, variables
from redco_eqx._birth.unstack import ELEMENTWISE, draws_by_counter, one_layer
from redco_eqx._program.atoms import is_key, shape_of

# Up to this many elements a value is small.
SMALL = 1024

Way: TypeAlias = Literal["given", "spread", "whole", "layers"]


@dataclasses.dataclass(frozen=True)
class Birth:
    """How one leaf is made.

    - `way`: `"given"`: it is known once the small values are. `"spread"`: by a program that makes each shard
        where it lies. `"whole"`: by a program on one device. `"layers"`: by such a program for each layer.
    - `program`: makes `leaf`, or one layer of it, of a shape `(1, ...)`.
    - `inputs`: the variables that it takes; all of them are known before.
    - `per_layer`: for each input, whether it has an entry for each layer, of which the program takes one.
    """

    leaf: Var
    way: Way
    program: Jaxpr
    inputs: list[Var]
    per_layer: list[bool]


def plan(program: FlatProgram) -> list[Birth]:
    """How each output of `program`, which has no effects, is made."""
    ways = _ways(program)
    births = []
    for leaf in program.outputs:
        cut = cut_out(program, leaf, lambda var: ways[var] == "given")
        birth = Birth(leaf, ways[leaf], cut, cut.invars, [False] * len(cut.invars))
        layer = one_layer(cut) if birth.way == "whole" else None
        if layer is not None:
            birth = dataclasses.replace(birth, way="layers", program=layer[0], per_layer=layer[1])
        births.append(birth)
    return births


def _ways(program: FlatProgram) -> dict[Var, Way]:
    """How each value of the program is to be made, were it a leaf."""
    ways: dict[Var, Way] = dict.fromkeys(program.values, "given")
    small = {var for var in program.values if is_small(var)}
    for equation in program.equations:
        inputs = variables(equation.invars)
        drawn = equation.primitive.name == "random_bits" or any(ways[var] == "spread" for var in inputs)
        spreads = _is_elementwise(equation) and all(var in small or ways[var] == "spread" for var in inputs)
        if small.issuperset(inputs) and all(is_small(var) for var in equation.outvars):
            small.update(equation.outvars)
            # What is drawn is fused, however small, to be rounded as in the initialiser's own `jit`.
            way = "spread" if spreads and drawn else "given"
        else:
            way = "spread" if spreads else "whole"
        ways.update(dict.fromkeys(equation.outvars, way))
    return ways


def is_small(var: Var) -> bool:
    """Whether a value is computed as it comes, on one device, unless it is drawn."""
    return is_key(var) or math.prod(shape_of(var)) <= SMALL


def _is_elementwise(equation: JaxprEqn) -> bool:
    """Whether a shard of the result is made of the same shard of the operands, or of none."""
    name, result = equation.primitive.name, equation.outvars[0]
    if name == "random_bits":
        config: Any = jax.config
        return draws_by_counter(equation) and config.jax_threefry_partitionable
    if name == "reshape":
        before, after = shape_of(equation.invars[0]), shape_of(result)
        return [n for n in before if n != 1] == [n for n in after if n != 1]
    return name in ELEMENTWISE and not is_key(result)
