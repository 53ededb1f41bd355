"""What a device holds while it takes a step."""

import dataclasses
import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from redco_eqx._compiled.cost import peak_bytes
from redco_eqx._step.state import TrainState
from redco_eqx._tree import is_array


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    - `parameters`: of the model, with what is not trained. `optimizer_state`, `batch`: of these.
    - `gradients`: of all trained parameters at once: a part of `temporaries`, if none is used up before the
        last is there.
    - `temporaries`: what the program needs besides its arguments.
    - `peak`: the most at any time. `None`, as `temporaries` are, if the compiler says no more than that it is
        too much.
    """

    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    temporaries: int | None
    peak: int | None


def held(state: TrainState, batch: PyTree) -> Memory:
    """What the arguments of a step take, abstract ones too."""
    return Memory(
        parameters=_bytes((state.params, state.frozen, state.model_state)),
        optimizer_state=_bytes(state.opt_state),
        batch=_bytes(batch),
        gradients=_bytes(state.params),
        temporaries=None,
        peak=None,
    )


def needed(before: Memory, compiled: jax.stages.Compiled) -> Memory:
    """The same with what the compiled program needs besides."""
    peak = peak_bytes(compiled)
    return dataclasses.replace(before, temporaries=peak - arguments(before), peak=peak)


# The compiler for TPUs says "temporaries" of all that is there at the peak, the arguments included.
_FOR_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMGT])\w*\)")


def refused(before: Memory, message: str) -> Memory:
    """The same from the message of a compiler that found no room."""
    found = re.search(r"Used ([\d.]+)([KMGT])\w* of", message) or _FOR_TEMPORARIES.search(message)
    if found:
        peak = int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))
        return dataclasses.replace(before, temporaries=max(0, peak - arguments(before)), peak=peak)
    return before


def arguments(memory: Memory) -> int:
    """What is there before and after a step."""
    return memory.parameters + memory.optimizer_state + memory.batch


def largest_arrays(state: TrainState, *, most: int = 5) -> Mapping[str, int]:
    """The largest arrays of a state on one device, `{path: bytes}`."""
    arrays = {**state.params, **state.frozen, **state.model_state}
    sizes = {path: _bytes(x) for path, x in arrays.items()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:most])


def _bytes(tree: PyTree) -> int:
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if is_array(x))


def _shard_bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.sharding.shard_shape(x.shape) if isinstance(x.sharding, NamedSharding) else x.shape
    return math.prod(shape) * x.dtype.itemsize
