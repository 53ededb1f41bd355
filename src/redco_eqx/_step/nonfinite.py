"""The source of values that are not finite: an index outside of a table, or one operation of the step."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.lax import GatherScatterMode
from jaxtyping import Array

from redco_eqx._base.jaxprs import CALLS, Atom, body, called, scan_counts, shape_of, source_line, trace
from redco_eqx._base.protocols import Batch, LossFn, Metrics
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._step.layout import on_arrays
from redco_eqx._step.state import TRAIN, TrainState, stream
from redco_eqx._step.steps import unpack_loss

# Lookups whose indices follow from the batch alone, such as the rows for its tokens.


def find_outside(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str | None:
    """An id or label of the batch that is outside of what it is looked up in, in words; or `None`.

    `loss_fn` is traced, and of it only the indices are computed that follow from the batch, one operation at a
    time. Calls, checkpoints and loops are looked into; conditions, `while` loops and `shard_map` are not. Rows
    that another process holds are not looked at, and nothing is communicated.
    """
    # One device's copies of what all have whole.
    state = dataclasses.replace(state, key=state.key.addressable_data(0), step=state.step.addressable_data(0))
    inputs = state.params, state.frozen, state.model_state, batch, stream(state, TRAIN)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)  # on no mesh
    program = trace(on_arrays(state, loss_fn), *shapes).closed
    leaves = [(path or "array", _rows_here(x)) for path, x in leaves_with_paths(batch)]
    arrays = sum(len(jax.tree.leaves(x)) for x in inputs[:3])
    known: list[Known | None] = [None] * arrays
    known += [(frozenset([i]), lambda x=x: x) for i, (_, x) in enumerate(leaves)]
    known.append((frozenset(), lambda: inputs[-1]))
    for lookup, asked, (sources, value) in _lookups(program.jaxpr, known):
        if not sources:
            continue
        numbers, shape = lookup.params["dimension_numbers"], shape_of(lookup.invars[0])
        indices = np.asarray(value())
        for place, dim in enumerate(numbers.start_index_map):
            own, size = indices[..., place], shape[dim]
            wrong = np.argwhere((own < 0) | (own > size - lookup.params["slice_sizes"][dim]))
            if len(wrong):
                row, index = int(wrong[0].flat[0]) if own.ndim else 0, int(own[tuple(wrong[0])])
                what = f"in row {row}, which is looked up among {size} at {source_line(asked)}"
                return f"the batch's {_source([leaves[i] for i in sorted(sources)], row, index, size)} {what}"
    return None


def _source(leaves: Sequence[tuple[str, np.ndarray]], row: int, index: int, size: int) -> str:
    """Say which of the leaves that an index comes from has it in its row, if one does."""
    for value in (index - size, index) if index < 0 else (index,):  # `jnp.take` has added the size
        for path, x in leaves:
            if np.issubdtype(x.dtype, np.integer) and len(x) > row and value in x[row]:
                return f"{path} has {value}"
    return f"{' and '.join(path for path, _ in leaves)} gives the index {index}"


def _rows_here(x: Any) -> np.ndarray:
    """The array with zeros for what other processes hold."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    whole = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        whole[shard.index] = shard.data
    return whole


Known: TypeAlias = tuple[frozenset[int], Callable[[], Any]]
"""The numbers of the leaves that a value comes from, and the value, computed when it is asked for."""

Lookups: TypeAlias = Generator[tuple[JaxprEqn, JaxprEqn, Known], None, list[Known | None]]
"""Lookups, each with the operation of the whole program that it is in, and its indices; then the results."""

_WITH_BODIES = (*CALLS, "scan", "while", "cond", "shard_map")
_LONGEST = 1000  # number of steps of a loop that is looked into


def _lookups(program: Jaxpr, inputs: Sequence[Known | None], around: JaxprEqn | None = None) -> Lookups:
    """Lookups that give NaN where they are outside, of those whose indices follow from known inputs."""
    known: dict[Var, Known] = {var: x for var, x in zip(program.invars, inputs) if x is not None}
    for equation in program.eqns:
        operands = [_read(atom, known) for atom in equation.invars]
        results: Sequence[Known | None] = [None] * len(equation.outvars)
        kind, asked, inner = equation.primitive.name, around or equation, called(equation)
        if kind in CALLS and inner is not None:
            results = yield from _lookups(inner, operands, asked)
        elif kind == "scan" and equation.params["length"] <= _LONGEST and any(x and x[0] for x in operands):
            results = yield from _lookups_in_scan(equation, operands, asked)
        elif kind == "gather" and equation.params["mode"] == GatherScatterMode.FILL_OR_DROP and operands[1]:
            yield equation, asked, operands[1]
        if kind not in _WITH_BODIES:
            results = _computed(equation, operands)
        known.update((var, x) for var, x in zip(equation.outvars, results) if x is not None)
    return [_read(atom, known) for atom in program.outvars]


def _lookups_in_scan(equation: JaxprEqn, operands: Sequence[Known | None], asked: JaxprEqn) -> Lookups:
    length, (num_consts, num_carry) = equation.params["length"], scan_counts(equation)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    ys: dict[int, list[Known | None]] = {}
    for i in range(length)[:: -1 if equation.params["reverse"] else 1]:
        xs = [_on([x], lambda x, i=i: x[i]) for x in operands[num_consts + num_carry :]]
        results = yield from _lookups(body(equation.params["jaxpr"]), [*consts, *carry, *xs], asked)
        carry, ys[i] = results[:num_carry], results[num_carry:]
    stacked = zip(*(ys[i] for i in range(length)))
    return [*carry, *(_on(parts, lambda *parts: jnp.stack(parts)) for parts in stacked)]


def _read(atom: Atom, known: Mapping[Var, Known]) -> Known | None:
    return (frozenset(), lambda: atom.val) if isinstance(atom, Literal) else known.get(atom)


def _on(operands: Sequence[Known | None], function: Callable[..., Any]) -> Known | None:
    """`function` of values, if all are known, computed at most once."""
    known = [x for x in operands if x is not None]
    if len(known) < len(operands):
        return None
    sources = frozenset().union(*(x[0] for x in known))
    return sources, functools.cache(lambda: function(*(x[1]() for x in known)))


def _computed(equation: JaxprEqn, operands: Sequence[Known | None]) -> list[Known | None]:
    """The results of an operation whose operands may be known."""
    made = _on(operands, functools.partial(equation.primitive.bind, **equation.params))
    if not equation.primitive.multiple_results:
        return [made]
    return [_on([made], lambda made, i=i: made[i]) for i in range(len(equation.outvars))]


# One operation at a time.


def find_nonfinite(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str:
    """The first metric, or else the first parameter by its gradient, that is not finite, in words.

    Nothing is compiled as a whole, so that under `jax_debug_nans` or `jax_debug_infs` the operation that makes
    the first such number raises `FloatingPointError`, from the line of `loss_fn` where it stands. Microbatches
    are taken as one.
    """
    key = stream(state, TRAIN)

    def loss_of(params: dict[str, Array]) -> tuple[Array, Metrics]:
        output = loss_fn(state.build(params, state.model_state), batch, key)
        loss, metrics, _ = unpack_loss(state, output, 1.0)
        return loss.value, {"loss": loss, **metrics}

    with jax.disable_jit():
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    for name, mean in metrics.items():
        if not jnp.isfinite(mean.value):
            return f"{name} is {float(mean)}"
    for path, x in grads.items():
        if not jnp.isfinite(x).all():
            return f"the gradient of {path} has {int((~jnp.isfinite(x)).sum())} such numbers of {x.size}"
    return "evaluated one operation at a time, all of it is finite"
