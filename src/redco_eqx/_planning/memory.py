"""The cost of a step on a device: operations, bytes that it sends, and memory."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from redco_eqx._base.jaxprs import shape_of
from redco_eqx._base.tree import is_array
from redco_eqx._compiled.communication import ring_bytes
from redco_eqx._dataflow.choice import scatters
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.values import ENDS, total_bytes
from redco_eqx._sharding.mesh import axis_size, num_batch_shards, stored_axes
from redco_eqx._sharding.rules import Decision
from redco_eqx._step.state import TrainState

# The number of floating-point operations in a traced program.


def num_flops(program: Jaxpr) -> float:
    """Counts the floating-point operations of all products of matrices and convolutions: two for each pair of
    numbers that is multiplied.

    The body of a scan counts as often as it runs, that of a `while` once; of a conditional, the branch with the
    most operations counts. Elementwise work, solvers and kernels are not counted.
    """
    return sum((_of(equation) for equation in program.eqns), 0.0)


def _of(equation: JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    inside = [num_flops(program) for program in jaxprs_in_params(params)]
    if name == "cond":
        return max(inside)
    if name == "scan":
        return sum(inside) * params["length"]
    depth = _depth(equation)
    return sum(inside, 2.0 * math.prod(shape_of(equation.outvars[0])) * depth if depth else 0.0)


def _depth(equation: JaxprEqn) -> float:
    """Counts the products that are summed for each number of the result: 0 if it is not a sum of products."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel = shape_of(equation.invars[1])
        return math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    if name not in ("dot_general", "ragged_dot_general"):
        return 0.0
    ragged = params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    depth = float(math.prod(shape_of(equation.invars[0])[dim] for dim in contracted))
    # If the sum is within each group, the groups are the first dim of the result.
    is_by_group = ragged is not None and set(ragged.lhs_ragged_dimensions) & set(contracted)
    return depth / shape_of(equation.outvars[0])[0] if is_by_group else depth


# The bytes that a device sends in a step, by the ring algorithm, as `communication` counts those of a compiled
# step.


def predicted_bytes(
    analysis: Analysis, decisions: Mapping[str, Decision], mesh: Mesh, num_microbatches: int
) -> float:
    """Predicts the bytes that a device sends in a step with the layout of `analysis`, in the dtypes of the
    program.

    What is sent over `tensor` is a part of the rows. Gradients are summed over the batch axes, and weights that
    are stored split are gathered, for each microbatch; but if no weight is, the compilers for TPU and GPU sum
    gradients once.
    """
    sent, merged = analysis.sent(analysis.layout), scatters(mesh)

    def total(over_batch: bool, group_size: int) -> float:
        sizes = []
        for event, size in sent.events:
            if analysis.costs.leads.over_batch(event) == over_batch:
                kind = "all-reduce" if event.kind in ("sum", "lookup") else "all-gather"
                sizes.append((event, ring_bytes(kind, size, group_size)))
        return total_bytes(sizes, merged=merged)

    tensor = axis_size(mesh, "tensor")
    once = total(False, tensor) + ring_bytes("all-gather", sent.moved, tensor)
    each = total(True, num_batch_shards(mesh)) + _stored_bytes(analysis, decisions, mesh, merged)
    return once + each * (num_microbatches if axis_size(mesh, "fsdp") > 1 or not merged else 1)


def _stored_bytes(analysis: Analysis, decisions: Mapping[str, Decision], mesh: Mesh, merged: bool) -> float:
    """Bytes that are sent because arrays are stored split, beside the all-reduces of their gradients.

    An array is gathered for the loss, and again for the gradient if that uses it. A gradient that is scattered
    sends half as much as one that is summed whole. The blocks in `ENDS` gather once, and scatter with every
    compiler: together that is an all-reduce.
    """
    uses = defaultdict[int, list[tuple[str, float]]](list)
    for step in analysis.walk.steps:
        if any(x.is_data for x in step.results):
            for x in step.operands:
                for leaf in x.weights:
                    uses[leaf].append((step.block, float(x.num_bytes * step.times)))
    total = 0.0
    for leaf, path in enumerate(analysis.traced.paths):
        num_parts = axis_size(mesh, stored_axes(decisions[path].spec))
        if num_parts == 1 or all(block in ENDS for block, _ in uses[leaf]):
            continue
        of_tensor = analysis.costs.tensor if leaf in analysis.layout else 1
        # An array that is used in each step of a loop is gathered once.
        whole = decisions[path].bytes_per_device * num_parts
        size = min(whole, max(size for _, size in uses[leaf]) / of_tensor)
        is_scattered = merged and analysis.traced.trained[leaf] is not None
        total += (min(2, len(uses[leaf])) - is_scattered) * ring_bytes("all-gather", size, num_parts)
    return total


# The memory of a device while it takes a step.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    - `parameters`: the arrays of the model, including those that are not trained.
    - `optimizer_state`: the optimizer's state.
    - `batch`: the batch.
    - `gradients`: the gradients of all trained parameters at once. They are a part of `temporaries` if none is
        used up before the last is computed.
    - `peak`: the most at any time. `None` if the step was not compiled, or if the compiler reports only that it
        is too much.
    """

    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    peak: int | None = None

    @property
    def arguments(self) -> int:
        """Bytes that are in memory before and after a step: no program needs less."""
        return self.parameters + self.optimizer_state + self.batch

    @property
    def temporaries(self) -> int | None:
        """Bytes that the program needs besides its arguments."""
        return None if self.peak is None else max(0, self.peak - self.arguments)


def memory_of(state: TrainState, batch: PyTree) -> Memory:
    """Adds up the bytes of the arguments of a step, which may be abstract."""
    return Memory(
        parameters=_bytes((state.params, state.frozen, state.model_state)),
        optimizer_state=_bytes(state.opt_state),
        batch=_bytes(batch),
        gradients=_bytes(state.params),
    )


# The TPU compiler calls everything in memory at the peak "temporaries", including the arguments.
_PEAKS = (r"Used ([\d.]+)([KMGT])\w* of", r"temporaries \(([\d.]+)([KMGT])\w*\)")


def peak_by_message(message: str) -> int | None:
    """Reads the peak from the message of a compiler that ran out of memory."""
    found = next(filter(None, (re.search(pattern, message) for pattern in _PEAKS)), None)
    return None if found is None else int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))


def largest_arrays(state: TrainState, *, most: int = 5) -> Mapping[str, int]:
    """Lists the largest arrays of a state on one device, `{path: bytes}`."""
    arrays = {**state.params, **state.frozen, **state.model_state}
    sizes = {path: _bytes(x) for path, x in arrays.items()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:most])


def _bytes(tree: PyTree) -> int:
    """Adds up the bytes of all arrays, on one device."""
    total = 0
    for x in filter(is_array, jax.tree.leaves(tree)):
        shape = x.sharding.shard_shape(x.shape) if isinstance(x.sharding, NamedSharding) else x.shape
        total += math.prod(shape) * x.dtype.itemsize
    return total
