"""Put a chosen layout of values into the program, as sharding constraints where the
layout changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from redco_eqx._base.jaxprs import (
    JAX_CHECKPOINTS,
    Operand,
    shape_of,
)
from redco_eqx._base.rewriting import Rewriter, in_bodies
from redco_eqx._base.tree import is_key
from redco_eqx._base.warn import warn
from redco_eqx._dataflow.choice import PENDING, WHOLE, State, Strategy
from redco_eqx._dataflow.engine import Analysis, laid_out_values, weigh
from redco_eqx._dataflow.solution import Solution
from redco_eqx._dataflow.tracing import TracedStep
from redco_eqx._dataflow.values import Body, Value, Visit
from redco_eqx._sharding.constraint import sharding_constraint
from redco_eqx._sharding.mesh import (
    STORED,
    ShardingWarning,
    axis_size,
    num_batch_shards,
    row_axes,
)


def lay_out(
    traced: TracedStep, mesh: Mesh | AbstractMesh, dims: Mapping[str, int | None]
) -> Jaxpr | None:
    """Lay out each value in the program of a step. `tensor` splits the `dims` of
    parameters, by path.

    Warns with `ShardingWarning` and returns `None` if the activations are better left
    to the compiler, see [`laid_out_values`][].
    """
    tensor = axis_size(mesh, "tensor")
    try:
        analysis = weigh(traced, tensor=tensor, num_shards=num_batch_shards(mesh))
        solution = laid_out_values(_with_layout(analysis, dims), mesh).solution
    except Exception as error:
        # A reason not to, or a program of a newer JAX.
        warn(
            f"split_activations: the activations are left to the compiler: {error}.",
            ShardingWarning,
        )
        return None
    assert solution is not None
    constraints = _Constraints(solution, mesh)
    return constraints.program(traced.jaxpr, analysis.walk.bodies[-1])


def _with_layout(analysis: Analysis, dims: Mapping[str, int | None]) -> Analysis:
    """The analysis with a layout that splits these `dims`.

    Raises `ValueError` if the program cannot follow a split.
    """
    found = analysis.laid_out(dims)
    if found is not None:
        return found
    for path, dim in dims.items():
        if analysis.laid_out({path: dim}) is None:
            raise ValueError(
                f"tensor splits dim {dim} of {path}, which cannot be split where the "
                "program uses it"
            )
    raise AssertionError("a layout is known if the split of each array is")


class _Constraints:
    """The sharding constraints that put a solution into a program, and into the
    programs inside it."""

    def __init__(self, solution: Solution, mesh: Mesh | AbstractMesh):
        self.values = solution.values
        self.state = solution.state
        self.mesh = mesh
        self.strategies: dict[int, Strategy] = {}
        # Those of values that enter or leave a body, by the operation that has the body
        # and the value.
        self.handed: dict[tuple[int, int], Strategy] = {}
        for operation, strategy in zip(self.values.operations, solution.strategies):
            visit = operation.visit
            if visit is None:
                continue
            if visit.handed:
                self.handed[id(visit.equation), id(visit.operands[0])] = strategy
            else:
                self.strategies[id(visit)] = strategy
        self._axes = tuple(axis for axis in row_axes(mesh) if mesh.shape[axis] > 1)

    def program(
        self, jaxpr: Jaxpr, found: Body, *, around: Visit | None = None
    ) -> Jaxpr:
        """Constrain a program as `found` says. The program is the body of the operation
        `around`."""
        return _ConstrainedProgram(self, jaxpr, found, around).write()

    def put(
        self,
        new: Rewriter,
        operand: Operand,
        value: Value,
        state: State,
        *,
        is_sum: bool = False,
    ) -> Operand:
        """Write a constraint of `operand` into the new program, and return its
        result."""
        # `jax.new_ref` makes something other than an array, which is written in place.
        is_array = isinstance(operand.aval, ShapedArray) and not is_key(operand.aval)
        if isinstance(operand, Literal) or not is_array or not any(shape_of(operand)):
            return operand
        if state == PENDING:
            return operand
        sharding = NamedSharding(self.mesh, self._spec(value, state, is_sum=is_sum))
        return new.apply(lambda x: sharding_constraint(x, sharding), operand)

    def _spec(self, value: Value, state: State, *, is_sum: bool) -> PartitionSpec:
        """The layout of a value. `state` is that of its group. If it `is_sum`, it was
        pending until now."""
        # Leave gradients of weights open, because the gathers say which other axes
        # split them. But sum them over all axes at once: a compiler that makes no
        # reduce-scatters would sum whole arrays for each axis.
        is_gradient = value.is_data and not self.values.batch_dims(value)
        is_free = "fsdp" in self._axes and is_gradient and not is_sum
        entries: list[Any] = [()] * len(value.dims)
        for dim in self.values.batch_dims(value):
            entries[dim] = self._axes
        dim = self.values.dim_of(value, state)
        if dim is not None:
            entries[dim] = (*entries[dim], "tensor")
        other = PartitionSpec.UNCONSTRAINED if is_free else None
        return PartitionSpec(*(e[0] if len(e) == 1 else e or other for e in entries))

    def is_stored(self, equation: JaxprEqn, value: Value) -> bool:
        """True if the result of an operation may be a weight that is not gathered yet,
        or a gradient that is stored like one."""
        if "fsdp" in self._axes and not value.is_data:
            return True
        sharding = equation.params.get("sharding")
        return STORED in tuple(getattr(sharding, "spec", ()))


class _ConstrainedProgram:
    """One program with its constraints."""

    def __init__(
        self,
        constraints: _Constraints,
        jaxpr: Jaxpr,
        found: Body,
        around: Visit | None,
    ):
        self._constraints = constraints
        self._values = constraints.values
        self._jaxpr = jaxpr
        self._found = found
        self._around = around
        self._new = Rewriter(jaxpr)
        # The results of constraints to another layout than a value's own, which several
        # operations may take.
        self._taken: dict[tuple[Var, State], Operand] = {}

    def write(self) -> Jaxpr:
        """Write the program with its constraints."""
        self._constrain_arguments()
        visits = {id(visit.equation): visit for visit in self._found.visits}
        for equation in self._jaxpr.eqns:
            visit = visits.get(id(equation))
            if visit is None:
                # No result depends on it, but it may print or write.
                operands = [self._new.read(atom) for atom in equation.invars]
                self._new.write(equation, operands)
            else:
                self._write_visit(visit)
        return self._new.program(self._results())

    def _constrain_arguments(self) -> None:
        outside: Sequence[Value]
        around = self._around
        if around is not None and around.equation.primitive.name not in JAX_CHECKPOINTS:
            # They are operands of the operation, so they are laid out already. But XLA
            # may give another layout to what passes the barrier of a checkpoint.
            outside = around.operands
        else:
            outside = [x for x in self._found.arguments if not x.is_data]
        known = {id(x) for x in outside}
        for var, value in zip(self._jaxpr.invars, self._found.arguments):
            if id(value) not in known and any(value.dims):
                own = self._constraints.state(value)
                self._new.replace(var, self._put(var, value, own))

    def _write_visit(self, visit: Visit) -> None:
        """Write an operation, with constraints of its operands and results."""
        equation = visit.equation
        gives: Sequence[State] = [None] * len(visit.results)
        operands = [self._new.read(atom) for atom in equation.invars]
        strategy = self._constraints.strategies.get(id(visit))
        if strategy is not None:
            taken = iter(strategy.takes)
            for i, (atom, value) in enumerate(zip(equation.invars, visit.operands)):
                if any(value.dims):
                    operands[i] = self._take(atom, value, next(taken))
            gives = strategy.gives
        elif visit.bodies:
            operands = self._hand(visit, equation.invars, visit.operands)
            equation = self._with_constrained_bodies(visit)
        self._new.write(equation, operands)
        is_call = visit.bodies and equation.primitive.name not in (
            "scan",
            "while",
            "cond",
        )
        if is_call:
            return  # its body has constrained the results
        for var, value, given in zip(equation.outvars, visit.results, gives):
            if any(value.dims):
                self._constrain_result(equation, var, value, given)

    def _constrain_result(
        self, equation: JaxprEqn, var: Var, value: Value, given: State
    ) -> None:
        """Constrain a result that the operation gives in the state `given`."""
        own = self._constraints.state(value)
        result: Operand = var
        if given is not None:
            given = self._values.slot(value, given)
        # With a constraint to another split right here, the partitioner would change
        # the operands instead. So first say how the operation gives its result.
        if given is not None and given != own and own != PENDING:
            is_sum = given == PENDING
            result = self._put(result, value, WHOLE if is_sum else given, is_sum=is_sum)
        if not self._constraints.is_stored(equation, value):
            result = self._put(result, value, own)
        self._new.replace(var, result)

    def _put(
        self, operand: Operand, value: Value, state: State, *, is_sum: bool = False
    ) -> Operand:
        return self._constraints.put(self._new, operand, value, state, is_sum=is_sum)

    def _take(self, atom: Operand, value: Value, taken: State) -> Operand:
        """Return an operand in the layout in which an operation takes it."""
        now = self._new.read(atom)
        wanted = self._values.slot(value, taken)
        if isinstance(atom, Literal):
            return now
        if wanted in (self._constraints.state(value), PENDING):
            return now
        if (atom, wanted) not in self._taken:
            self._taken[atom, wanted] = self._put(now, value, wanted)
        return self._taken[atom, wanted]

    def _hand(
        self, around: Visit | None, atoms: Sequence[Operand], values: Sequence[Value]
    ) -> list[Operand]:
        """Return the atoms that enter or leave the bodies of an operation, in the
        layouts that the bodies use."""
        handed = [self._new.read(atom) for atom in atoms]
        if around is None:
            return handed
        for i, (atom, value) in enumerate(zip(atoms, values)):
            key = (id(around.equation), id(value))
            strategy = self._constraints.handed.get(key)
            if strategy is not None:
                handed[i] = self._take(atom, value, strategy.takes[0])
        return handed

    def _results(self) -> list[Operand]:
        """Return the results of the program."""
        around = self._around
        outvars = self._jaxpr.outvars
        if around is None or around.equation.primitive.name != "cond":
            return self._hand(around, outvars, self._found.results)
        # All branches need the same layout, or XLA rejects the program.
        results = [self._new.read(atom) for atom in outvars]
        for i, value in enumerate(around.results):
            if any(value.dims):
                own = self._constraints.state(value)
                results[i] = self._put(results[i], value, own)
        return results

    def _with_constrained_bodies(self, visit: Visit) -> JaxprEqn:
        """Return the operation, with constraints in its bodies."""
        equation = visit.equation
        if equation.primitive.name == "custom_linear_solve":
            return equation
        bodies = iter(visit.bodies)
        # Of branches by platform, the walk has seen only the default, which names none.
        platforms = iter(equation.params.get("branches_platforms") or ())

        def constrain(inner: Jaxpr) -> Jaxpr:
            if next(platforms, None):
                return inner
            found = next(bodies, None)
            if found is None:
                return inner
            return self._constraints.program(inner, found, around=visit)

        return in_bodies(equation, constrain)
