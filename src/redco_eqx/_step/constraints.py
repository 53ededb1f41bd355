"""Put a chosen layout of values into the program, as sharding constraints where the
layout changes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from redco_eqx._base.compiler import merges
from redco_eqx._base.jaxprs import (
    CHECKPOINTS,
    Operand,
    abstract,
    in_body,
    shape_of,
    type_of,
)
from redco_eqx._base.tree import is_key
from redco_eqx._base.warn import warn
from redco_eqx._dataflow.choice import PENDING, WHOLE, State, Values
from redco_eqx._dataflow.engine import walk_through
from redco_eqx._dataflow.solution import Solution, solve
from redco_eqx._dataflow.tracing import TracedStep
from redco_eqx._dataflow.values import Body, Step, Value
from redco_eqx._sharding.constraint import sharding_constraint
from redco_eqx._sharding.mesh import (
    BATCH_AXES,
    STORED,
    ShardingWarning,
    axis_size,
    num_batch_shards,
)


def lay_out(
    traced: TracedStep, mesh: Mesh | AbstractMesh, dims: Mapping[str, int | None]
) -> Jaxpr:
    """Lay out each value in the program of a step. `tensor` splits the `dims` of
    parameters, by path."""
    try:
        walk = walk_through(traced)
        values = Values(
            walk, axis_size(mesh, "tensor"), num_batch_shards(mesh), merges(mesh)
        )
        solution = solve(
            values, {i: dims.get(path) for i, path in enumerate(traced.paths)}
        )
    except Exception as error:
        # No solution, or a program of a newer JAX: it runs unchanged.
        warn(f"the activations are left to the compiler: {error}.", ShardingWarning)
        return traced.jaxpr
    return _Constraints(solution, mesh).program(traced.jaxpr, walk.bodies[-1])


class _Constraints:
    """The sharding constraints that put a solution into a program."""

    def __init__(self, solution: Solution, mesh: Mesh | AbstractMesh):
        self.values = solution.values
        self.state = solution.state
        self.mesh = mesh
        pairs = [
            (o.step, s)
            for o, s in zip(self.values.operations, solution.strategies)
            if o.step
        ]
        self._of_step = {id(step): s for step, s in pairs if not step.handed}
        # The strategies of values that enter or leave a body, by the operation that has
        # the body.
        self._handed = {
            (id(step.equation), id(step.operands[0])): s
            for step, s in pairs
            if step.handed
        }
        self._axes = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)

    def spec(
        self, value: Value, state: State, *, is_sum: bool = False
    ) -> PartitionSpec:
        """The layout of a value. `state` is that of its group. If it `is_sum`, it was
        pending until now."""
        # Leave gradients of weights open, because the gathers say which other axes
        # split them. But sum them over all axes at once: a compiler that makes no
        # reduce-scatters would sum whole arrays for each axis.
        is_free = (
            "fsdp" in self._axes
            and value.is_data
            and not self.values.batch_dims(value)
            and not is_sum
        )
        entries: list[Any] = [()] * len(value.dims)
        for dim in self.values.batch_dims(value):
            entries[dim] = self._axes
        dim = self.values.dim_of(value, state)
        if dim is not None:
            entries[dim] = (*entries[dim], "tensor")
        other = PartitionSpec.UNCONSTRAINED if is_free else None
        return PartitionSpec(*(e[0] if len(e) == 1 else e or other for e in entries))

    def program(
        self, jaxpr: Jaxpr, found: Body, *, around: Step | None = None
    ) -> Jaxpr:
        """Constrain a program as `found` says. The program is the body of the operation
        `around`."""
        names: dict[Var, Operand] = {}
        changed: dict[tuple[Var, State], Operand] = {}
        equations: list[JaxprEqn] = []

        def read(atom: Operand) -> Operand:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        put = functools.partial(self._put, equations)

        def take(atom: Operand, value: Value, taken: State) -> Operand:
            now = read(atom)
            wanted = self.values.slot(value, taken)
            if isinstance(atom, Literal) or wanted in (self.state(value), PENDING):
                return now
            key = (atom, wanted)
            if key not in changed:
                changed[key] = put(now, value, wanted)
            return changed[key]

        def hand(
            around: Step | None, atoms: Sequence[Operand], values: Sequence[Value]
        ) -> list[Operand]:
            """Map the atoms that enter or leave the bodies of an operation to those
            that the bodies use."""
            handed = [read(atom) for atom in atoms]
            for i, (atom, value) in enumerate(zip(atoms, values)):
                strategy = (
                    None
                    if around is None
                    else self._handed.get((id(around.equation), id(value)))
                )
                if strategy is not None:
                    handed[i] = take(atom, value, strategy.takes[0])
            return handed

        def leave() -> list[Operand]:
            """Return the results. All branches need the same layout, or XLA rejects the
            program."""
            if around is None or around.equation.primitive.name != "cond":
                return hand(around, jaxpr.outvars, found.results)
            pairs = zip(jaxpr.outvars, around.results)
            return [
                put(read(x), value, self.state(value)) if any(value.dims) else read(x)
                for x, value in pairs
            ]

        # XLA may give another layout to what passes the barrier of a checkpoint.
        outside = [x for x in found.arguments if not x.is_data]
        if around is not None and around.equation.primitive.name not in CHECKPOINTS:
            outside = around.operands
        known = {id(x) for x in outside}  # already laid out
        for var, value in zip(jaxpr.invars, found.arguments):
            if id(value) not in known and any(value.dims):
                names[var] = put(var, value, self.state(value))
        visits = {id(visit.equation): visit for visit in found.steps}
        for equation in jaxpr.eqns:
            visit = visits.get(id(equation))
            if visit is None:  # no result depends on this, but it may print or write
                equations.append(
                    equation.replace(invars=[read(atom) for atom in equation.invars])
                )
                continue
            operands = [read(atom) for atom in visit.equation.invars]
            gives: Sequence[State] = [None] * len(visit.results)
            if id(visit) in self._of_step:
                strategy = self._of_step[id(visit)]
                taken = iter(strategy.takes)
                for i, (atom, value) in enumerate(
                    zip(visit.equation.invars, visit.operands)
                ):
                    if any(value.dims):
                        operands[i] = take(atom, value, next(taken))
                gives = strategy.gives
            elif visit.bodies:
                operands = hand(visit, equation.invars, visit.operands)
                equation = self._inside(visit)
            equations.append(equation.replace(invars=operands))
            if visit.bodies and visit.equation.primitive.name not in (
                "scan",
                "while",
                "cond",
            ):
                continue  # the body of a call has constrained the results
            for var, value, given in zip(visit.equation.outvars, visit.results, gives):
                if not any(value.dims):
                    continue
                own = self.state(value)
                out = var
                given = given if given is None else self.values.slot(value, given)
                # With a constraint to another split right here, the partitioner would
                # change the operands instead.
                if given is not None and given != own and own != PENDING:
                    is_sum = given == PENDING
                    out = put(out, value, WHOLE if is_sum else given, is_sum=is_sum)
                # This may be a weight that is not gathered yet, or a gradient that is
                # stored like one.
                is_stored = "fsdp" in self._axes and not value.is_data
                is_stored |= STORED in tuple(
                    getattr(equation.params.get("sharding"), "spec", ())
                )
                names[var] = out if is_stored else put(out, value, own)
        return jaxpr.replace(eqns=equations, outvars=leave())

    def _put(
        self,
        equations: list[JaxprEqn],
        atom: Operand,
        value: Value,
        state: State,
        *,
        is_sum: bool = False,
    ) -> Operand:
        """Add a constraint of `atom` to `equations`, and return its result."""
        # `jax.new_ref` makes something other than an array, which is written in place.
        is_array = isinstance(atom.aval, ShapedArray) and not is_key(atom.aval)
        if (
            isinstance(atom, Literal)
            or state == PENDING
            or not is_array
            or not any(shape_of(atom))
        ):
            return atom
        sharding = NamedSharding(self.mesh, self.spec(value, state, is_sum=is_sum))
        one = jax.make_jaxpr(lambda x: sharding_constraint(x, sharding))(
            abstract(type_of(atom))
        )
        equations.append(one.jaxpr.eqns[0].replace(invars=[atom]))
        return one.jaxpr.outvars[0]

    def _inside(self, visit: Step) -> JaxprEqn:
        """The operation, with constraints in its bodies."""
        equation = visit.equation
        if equation.primitive.name == "custom_linear_solve":
            return equation
        params = dict(equation.params)
        bodies = list(visit.bodies)

        def inside(program: Any) -> Any:
            found = bodies.pop(0)
            return in_body(program, lambda x: self.program(x, found, around=visit))

        for key, value in equation.params.items():
            if bodies and isinstance(value, Jaxpr | ClosedJaxpr):
                params[key] = inside(value)
            elif (
                bodies
                and isinstance(value, tuple)
                and value
                and isinstance(value[0], ClosedJaxpr)
            ):
                # Of branches by platform, the walk has seen only the default.
                pairs = zip(
                    value, params.get("branches_platforms") or [None] * len(value)
                )
                params[key] = tuple(x if names else inside(x) for x, names in pairs)
        return equation.replace(params=params)
