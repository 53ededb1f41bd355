"""The cost of a step on a device: operations and memory."""

import dataclasses
import math
import re

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from redco_eqx._base.jaxprs import shape_of
from redco_eqx._base.tree import is_array
from redco_eqx._sharding.mesh import axis_size
from redco_eqx._step.state import TrainState

# The number of floating-point operations in a traced program.


def num_flops(program: Jaxpr, *, recomputed: bool = True) -> float:
    """Count the floating-point operations of all matrix products and convolutions, on
    all devices: two for each pair of numbers that is multiplied.

    The body of a scan counts for each of its runs, and the body of a `while` once. For
    a conditional, the branch with the most operations counts. Elementwise work, solvers
    and kernels do not count, and without `recomputed`, neither do operations that a
    `jax.checkpoint` repeats.
    """
    return sum((_flops_of(equation, recomputed) for equation in program.eqns), 0.0)


def _flops_of(equation: JaxprEqn, recomputed: bool) -> float:
    name = equation.primitive.name
    params = equation.params
    # JAX puts this name around operations that a `jax.checkpoint` repeats.
    is_repeated = "rematted_computation" in str(equation.source_info.name_stack)
    if is_repeated and not recomputed:
        return 0.0
    inside = [
        num_flops(program, recomputed=recomputed)
        for program in jaxprs_in_params(params)
    ]
    if name == "cond":
        return max(inside)
    if name == "scan":
        return sum(inside) * params["length"]
    if name == "shard_map":
        # The body is what one device computes. Axes that it leaves to the compiler do
        # not split its shapes.
        axes = sorted(params["newly_manual_axes"])
        return sum(inside) * axis_size(params["mesh"], axes)
    depth = _depth(equation)
    if not depth:
        return sum(inside, 0.0)
    num_results = math.prod(shape_of(equation.outvars[0]))
    return sum(inside, 2.0 * num_results * depth)


def _depth(equation: JaxprEqn) -> float:
    """Count the products that are summed for each number of the result (0 if it is not
    a sum of products)."""
    name = equation.primitive.name
    params = equation.params
    if name == "conv_general_dilated":
        # A number of the result sums over the kernel of one output. The first entry of
        # `rhs_spec` is the dim of outputs.
        kernel = shape_of(equation.invars[1])
        return math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    if name not in ("dot_general", "ragged_dot_general"):
        return 0.0
    ragged = params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        (contracted, _), _ = params["dimension_numbers"]
    else:
        (contracted, _), _ = ragged.dot_dimension_numbers
    depth = float(math.prod(shape_of(equation.invars[0])[dim] for dim in contracted))
    if ragged is not None and set(ragged.lhs_ragged_dimensions) & set(contracted):
        # The sum is within each group, and the groups are the first dim of the result.
        return depth / shape_of(equation.outvars[0])[0]
    return depth


# The memory of a device during a step.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    - `parameters`: the arrays of the model, including those that are not trained.
    - `optimizer_state`: the optimizer's state.
    - `batch`: the batch.
    - `gradients`: the gradients of all trained parameters together. They are part of
        `temporaries` if none is used up before the last is computed.
    - `peak`: the most memory at any time. `None` if the step was not compiled, or if
        the compiler reports only that it is too much.
    """

    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    peak: int | None = None

    @property
    def arguments(self) -> int:
        """Bytes that are in memory before and after a step. No program needs less."""
        return self.parameters + self.optimizer_state + self.batch

    @property
    def temporaries(self) -> int | None:
        """Bytes that the program needs besides its arguments."""
        return None if self.peak is None else max(0, self.peak - self.arguments)


def memory_of(state: TrainState, batch: PyTree) -> Memory:
    """Add up the bytes of the arguments of a step, which may be abstract."""
    return Memory(
        parameters=_bytes((state.params, state.frozen, state.model_state)),
        optimizer_state=_bytes(state.opt_state),
        batch=_bytes(batch),
        gradients=_bytes(state.params),
    )


# The TPU compiler calls everything in memory at the peak "temporaries", including the
# arguments.
_PEAKS = (r"Used ([\d.]+)([KMGT])\w* of", r"temporaries \(([\d.]+)([KMGT])\w*\)")
_LIMITS = (
    r"Used [\d.]+\w* of ([\d.]+)([KMGT])",
    r"exceeds available HBM \(([\d.]+)([KMGT])",
)


def peak_by_message(message: str) -> int | None:
    """Read the peak from the message of a compiler that ran out of memory."""
    return _first_size(_PEAKS, message)


def limit_by_message(message: str) -> int | None:
    """Read what a device has from the message of a compiler that ran out of memory."""
    return _first_size(_LIMITS, message)


def _first_size(patterns: tuple[str, ...], message: str) -> int | None:
    """Return the bytes that the first matching pattern finds."""
    for pattern in patterns:
        if found := re.search(pattern, message):
            number, unit = found.groups()
            return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))
    return None


def _bytes(tree: PyTree) -> int:
    """Add up the bytes of all arrays, on one device."""
    total = 0
    for x in filter(is_array, jax.tree.leaves(tree)):
        shape = x.shape
        if isinstance(x.sharding, NamedSharding):
            shape = x.sharding.shard_shape(shape)
        total += math.prod(shape) * x.dtype.itemsize
    return total
