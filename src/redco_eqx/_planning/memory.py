"""The cost of a step on a device: operations, what the forward pass leaves for the backward one, memory."""

import dataclasses
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from redco_eqx._base.jaxprs import Atom, body, called, shape_of, source_line, type_of
from redco_eqx._base.tree import is_array
from redco_eqx._compiled.hlo import Buffer
from redco_eqx._step.state import TrainState

# How many floating-point operations a traced program takes.


def num_flops(program: Jaxpr) -> float:
    """Those of all products of matrices and convolutions: two for each pair of numbers that is multiplied.

    A scan counts as often as it runs, a `while` once, of a conditional the branch with the most. Elementwise
    work, solvers and kernels are not counted.
    """
    return sum((_of(equation) for equation in program.eqns), 0.0)


def _of(equation: JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return max(num_flops(body(branch)) for branch in params["branches"])
    inside = sum((num_flops(body(x)) for x in params.values() if isinstance(x, Jaxpr | ClosedJaxpr)), 0.0)
    if name == "scan":
        return inside * params["length"]
    depth = _DEPTHS.get(name)
    if depth is None:
        return inside
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * depth(equation)


def _of_dot(equation: JaxprEqn) -> float:
    (lhs, _), _ = equation.params["dimension_numbers"]
    return float(math.prod(shape_of(equation.invars[0])[dim] for dim in lhs))


def _of_ragged_dot(equation: JaxprEqn) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = float(math.prod(shape_of(equation.invars[0])[dim] for dim in contracted))
    # What is summed within each group has the groups as the first dim of the result.
    is_by_group = set(numbers.lhs_ragged_dimensions) & set(contracted)
    return depth / shape_of(equation.outvars[0])[0] if is_by_group else depth


def _of_convolution(equation: JaxprEqn) -> float:
    kernel = shape_of(equation.invars[1])
    return math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]]


_DEPTHS = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_ragged_dot,
    "conv_general_dilated": _of_convolution,
}
"""How many products each number of the result is the sum of."""


# What a traced step remembers of its forward pass for the backward pass, before any compiler has seen it.


_DEAR = {"dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "shard_map"}
"""Whose results take memory if they are used later. Others' may be computed again where they are read."""


@dataclasses.dataclass
class _Form:
    """A dear value, or what is made of it alone: of all forms that are used later, the largest is kept.

    - `origin`: a number for the dear value.
    - `first`, `last`: after operations `first` to `last - 1` this form is there.
    """

    buffer: Buffer
    origin: int
    first: int
    last: int


def remembered(program: Jaxpr) -> tuple[Buffer, ...]:
    """The values, whole, that are there when they take most; the largest first.

    Only results of products and loops count, each once, and what is made of one of them alone in its place.
    Split over all devices they take no more of each than the compiled step does, however that is laid out.
    """
    known: dict[int, _Form] = {}
    for now, (equation, operands, results) in enumerate(_flat(program, {}, itertools.count())):
        read = [known[x] for x in operands if x in known]
        for form in read:
            form.last = now
        origins = {form.origin for form in read}
        for number, atom in zip(results, equation.outvars):
            if not shape_of(atom):
                continue
            if equation.primitive.name in _DEAR:
                known[number] = _Form(_buffer(equation, atom), number, now, now)
            elif len(origins) == 1:
                # Padded or broadcast, it may as well be kept as it was.
                smallest = min((_buffer(equation, atom), *(form.buffer for form in read)), key=_size)
                known[number] = _Form(smallest, min(origins), now, now)
    return tuple(sorted(_most(known.values()), key=lambda b: (-b.num_bytes, b.shape, b.source)))


def _most(forms: Iterable[_Form]) -> list[Buffer]:
    """List what is kept after the operation after which most is."""
    of_origin: dict[int, list[_Form]] = {}
    for form in forms:
        if form.first < form.last:
            of_origin.setdefault(form.origin, []).append(form)
    changes: Counter[int] = Counter()  # of bytes, by operation
    for alike in of_origin.values():
        for start, end in itertools.pairwise(sorted({now for x in alike for now in (x.first, x.last)})):
            size = max((x.buffer.num_bytes for x in alike if x.first <= start < x.last), default=0)
            changes[start] += size
            changes[end] -= size
    total, most, peak = 0, 0, 0
    for now in sorted(changes):
        total += changes[now]
        if total > most:
            most, peak = total, now
    kept = [[x.buffer for x in alike if x.first <= peak < x.last] for alike in of_origin.values()]
    return [max(buffers, key=_size) for buffers in kept if buffers]


_size = operator.attrgetter("num_bytes")


def _buffer(equation: JaxprEqn, atom: Atom) -> Buffer:
    aval = type_of(atom)
    line = source_line(equation).partition(" (")[0]
    return Buffer(aval.size * aval.dtype.itemsize, aval.str_short(short_dtypes=True), line)


def _flat(
    program: Jaxpr, numbers: dict[Var, int], fresh: Iterator[int]
) -> Iterator[tuple[JaxprEqn, list[int], list[int]]]:
    """Operations in order, those of calls in their place, with numbers for what they read and make."""

    def number_of(atom: Atom) -> int:
        if not isinstance(atom, Var):
            return next(fresh)
        return numbers.setdefault(atom, next(fresh))

    for equation in program.eqns:
        operands = [number_of(atom) for atom in equation.invars]
        inner = None if equation.primitive.name in _DEAR else called(equation)
        if inner is None:
            results = [number_of(atom) for atom in equation.outvars]
            yield equation, operands, results
            continue
        inside = dict(zip(inner.invars, operands))
        yield from _flat(inner, inside, fresh)
        for atom, result in zip(equation.outvars, inner.outvars):
            numbers[atom] = inside[result] if isinstance(result, Var) else next(fresh)


# What a device holds while it takes a step.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    - `parameters`: of the model, with what is not trained. `optimizer_state`, `batch`: of these.
    - `gradients`: of all trained parameters at once: a part of `temporaries`, if none is used up before the
        last is there.
    - `peak`: the most at any time. `None` if the compiler says no more than that it is too much.
    """

    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    peak: int | None = None

    @property
    def temporaries(self) -> int | None:
        """Bytes that the program needs besides its arguments, which are there before and after a step."""
        if self.peak is None:
            return None
        return max(0, self.peak - self.parameters - self.optimizer_state - self.batch)


def memory_of(state: TrainState, batch: PyTree) -> Memory:
    """Add up the arguments of a step, abstract ones too."""
    return Memory(
        parameters=_bytes((state.params, state.frozen, state.model_state)),
        optimizer_state=_bytes(state.opt_state),
        batch=_bytes(batch),
        gradients=_bytes(state.params),
    )


# The compiler for TPUs says "temporaries" of all that is there at the peak, the arguments included.
_PEAKS = (r"Used ([\d.]+)([KMGT])\w* of", r"temporaries \(([\d.]+)([KMGT])\w*\)")


def peak_by_message(message: str) -> int | None:
    """The peak, from the message of a compiler that found no room."""
    found = next(filter(None, (re.search(pattern, message) for pattern in _PEAKS)), None)
    return None if found is None else int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))


def largest_arrays(state: TrainState, *, most: int = 5) -> Mapping[str, int]:
    """The largest arrays of a state on one device, `{path: bytes}`."""
    arrays = {**state.params, **state.frozen, **state.model_state}
    sizes = {path: _bytes(x) for path, x in arrays.items()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:most])


def _bytes(tree: PyTree) -> int:
    """Add up all arrays, on one device."""
    total = 0
    for x in filter(is_array, jax.tree.leaves(tree)):
        shape = x.sharding.shard_shape(x.shape) if isinstance(x.sharding, NamedSharding) else x.shape
        total += math.prod(shape) * x.dtype.itemsize
    return total
