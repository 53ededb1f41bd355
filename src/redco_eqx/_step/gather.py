"""FSDP: gather parameters that are stored split, where they are first used.

They are gathered over `fsdp`, and over both axes if the spec splits a dim by an entry
`("fsdp", "tensor")`.

If the first use is in the body of a `lax.scan` over a stack of layers, of a
`jax.checkpoint`, or of a `shard_map`, the gather is put into that body. So at most one
layer of a scan is whole, and `jax.checkpoint` gathers again for the gradient instead of
keeping the gathered weights. Gathered weights that are to be kept have the name `KEPT`,
and `jax.checkpoint` keeps values of this name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._base.compiler import merges
from redco_eqx._base.jaxprs import (
    ELEMENTWISE,
    JAX_CHECKPOINTS,
    Operand,
    Program,
    body,
    shape_of,
    type_of,
)
from redco_eqx._base.rewriting import Rewriter, in_bodies, traced
from redco_eqx._parallel.scan import Policy, also_by, keep_products, only_real
from redco_eqx._sharding.mesh import STORED, axes_of, axis_size, for_use, stored_axes

# Gathering one parameter that is split where it is stored.


def is_split(sharding: NamedSharding) -> bool:
    """True if an array with this layout is split over more devices when stored than
    when used."""
    return axis_size(sharding.mesh, stored_axes(sharding.spec)) > 1


KEPT = "redco_eqx.gathered"
"""The name of gathered weights that are kept from forward to backward."""

_keep_gathered = only_real(jax.checkpoint_policies.save_only_these_names(KEPT))


def over_fsdp_alone(sharding: NamedSharding) -> NamedSharding:
    """The layout of an array that is gathered over `tensor` if it is stored over both
    axes."""
    entries = ("fsdp" if entry == STORED else entry for entry in sharding.spec)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def gather_for_use(
    x: Array,
    sharding: NamedSharding,
    to: NamedSharding | None = None,
    *,
    keep: bool = False,
) -> Array:
    """Gather `x`, which has this sharding, for use: one all-gather forward, one
    reduce-scatter backward.

    A plain constraint would be enough for the forward pass, but its transpose is
    itself, so the gradient would be summed whole. `to` is the layout to gather to, if
    it is not that of an array in use.
    """
    whole = to or NamedSharding(sharding.mesh, for_use(sharding.spec))
    summed = over_fsdp_alone(sharding)

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: Array) -> tuple[Array, None]:
        return checkpoint_name(gathered(x), KEPT) if keep else gathered(x), None

    def backward(residual: None, gradient: Array) -> tuple[Array]:
        # Along `tensor`, each device has the same gradient, and keeps a part of it.
        # Without the first constraint, the compiler would compute only that part, from
        # activations that it splits and gathers for this.
        gradient = jax.lax.with_sharding_constraint(gradient, summed)
        return (jax.lax.with_sharding_constraint(gradient, sharding),)

    gathered.defvjp(forward, backward)
    return gathered(x)


Shardings: TypeAlias = Sequence[NamedSharding | None]
"""The layout in which each of some arrays is stored; `None` for an array that is not a
weight."""


def gather_where_used(
    program: Program,
    layout: Shardings,
    *,
    reshard: bool | None = True,
    splits: bool = False,
) -> tuple[Program, Policy | None]:
    """Gather the inputs of `program` that are stored split by `layout`. The results do
    not change.

    An elementwise operation on a weight, such as a cast, reads it split, and so does a
    sum to a scalar.

    - `reshard`: the `reshard_after_forward` of `train_step`.
    - `splits`: true if the activations are laid out, too.

    **Returns:**

    The new program, and the policy of a `jax.checkpoint` to put around it; `None` if it
    needs none. It needs one if no `jax.checkpoint` in it reads weights, because it
    would otherwise keep all gathered weights for its gradient. With activations laid
    out, only scans need one: to compute an activation again also sends its changes of
    layout again.
    """
    mesh = next((s.mesh for s in layout if s is not None and is_split(s)), None)
    if mesh is None:
        return program, None
    # If a weight needs no gather, it only matters that it is a weight.
    weights = [
        s if s is None or is_split(s) else NamedSharding(s.mesh, PartitionSpec())
        for s in layout
    ]
    keep = (
        isinstance(mesh, Mesh) and not merges(mesh) if reshard is None else not reshard
    )
    gatherer = _Gatherer(keep_in_scans=reshard is False)
    jaxpr, _ = gatherer.program(program.closed.jaxpr, weights, keep)
    has_checkpoint = not gatherer.readers.isdisjoint(JAX_CHECKPOINTS)
    # A `jax.checkpoint` cannot make a `jax.new_ref`: it raises `KeyError` (JAX 0.10.2,
    # no issue known).
    has_ref = "new_ref" in gatherer.readers
    is_laid_out_without_scans = splits and "scan" not in gatherer.readers
    if reshard is False or has_checkpoint or has_ref or is_laid_out_without_scans:
        policy = None
    else:
        policy = _and_kept(keep_products)
    return program.replace(jaxpr), policy


def _and_kept(policy: Policy | None) -> Policy:
    """The policy of a `jax.checkpoint` that also keeps gathered weights of the name
    `KEPT`."""
    return also_by(_keep_gathered, policy) if policy else _keep_gathered


@dataclasses.dataclass(frozen=True)
class _Taken:
    """An operation that takes weights ungathered: the operation, its operands, and the
    weights among its results. If `halfway`, the operands are gathered over `tensor`
    alone."""

    equation: JaxprEqn
    operands: Sequence[int] = ()
    outputs: Shardings = ()
    halfway: bool = False


@dataclasses.dataclass
class _Gatherer:
    """Puts gathers into a program, and into the programs inside it.

    - `keep_in_scans`: true to keep what is gathered in the bodies of scans for the
        gradient.
    - `readers`: the kinds of operations that read weights, and `new_ref` if there is
        one beside them.
    """

    keep_in_scans: bool
    readers: set[str] = dataclasses.field(default_factory=set)

    def program(
        self,
        jaxpr: Jaxpr,
        weights: Shardings,
        keep: bool,
        *,
        whole_outputs: bool = False,
    ) -> tuple[Jaxpr, Shardings]:
        """Change a program whose inputs are these `weights` and other values.

        With `keep`, the gathered weights are kept for the gradient. Weights may also be
        results. Return the program, and the layout of these results. If nothing is
        gathered, the program is the same object.
        """
        new = Rewriter(jaxpr)
        # The weights that are not gathered yet.
        stored: dict[Var, NamedSharding] = {}
        _note(stored, jaxpr.invars, weights)
        gathered: dict[tuple[Var, bool], Operand] = {}

        def layout_of(atoms: Sequence[Operand]) -> Shardings:
            return [
                None if isinstance(atom, Literal) else stored.get(atom)
                for atom in atoms
            ]

        def whole(atom: Operand, *, halfway: bool = False) -> Operand:
            (sharding,) = layout_of([atom])
            if isinstance(atom, Literal) or sharding is None or not is_split(sharding):
                return atom
            to = over_fsdp_alone(sharding) if halfway else None
            if to == sharding:
                return atom
            if (atom, halfway) not in gathered:
                # The operation gathers the rest itself, and keeps that.
                is_kept = keep and not halfway
                gathered[atom, halfway] = new.apply(
                    lambda x: gather_for_use(x, sharding, to, keep=is_kept), atom
                )
            return gathered[atom, halfway]

        for equation in jaxpr.eqns:
            inputs = layout_of(equation.invars)
            kind = equation.primitive.name
            reads_weights = any(inputs)
            if reads_weights or kind == "new_ref":
                self.readers.add(kind)
            taken = _Taken(equation)
            if reads_weights:
                taken = self.take(equation, inputs, keep)
            operands = []
            for i, atom in enumerate(equation.invars):
                is_taken = i in taken.operands
                if is_taken and not taken.halfway:
                    operands.append(atom)
                else:
                    operands.append(whole(atom, halfway=is_taken))
            new.write(taken.equation, operands)
            _note(stored, equation.outvars, taken.outputs)
        results: Sequence[Operand] = jaxpr.outvars
        if whole_outputs:
            results = [whole(atom) for atom in results]
        return new.program(results), layout_of(results)

    def take(self, equation: JaxprEqn, inputs: Shardings, keep: bool) -> _Taken:
        """Choose the operands that `equation` can take ungathered (by default,
        none)."""
        kind = equation.primitive.name
        has_scalar_results = not any(shape_of(out) for out in equation.outvars)
        if has_scalar_results and "jaxpr" not in equation.params:
            # For example, a sum of squares. Each device sums its part.
            return _Taken(equation, range(len(inputs)))
        if kind in ("scan", "jit", "pjit", *JAX_CHECKPOINTS):
            return self._take_inside(equation, inputs, keep)
        if kind == "shard_map":
            return _take_in_shard_map(equation, inputs, keep)
        if kind in _THROUGH:
            return _THROUGH[kind](equation, inputs)
        return _Taken(equation)

    def _take_inside(self, equation: JaxprEqn, inputs: Shardings, keep: bool) -> _Taken:
        """Gather in the body of a scan, a `jit` or a `jax.checkpoint`."""
        kind = equation.primitive.name
        if kind == "scan":
            inputs = _in_one_step(equation, inputs)
            keep = self.keep_in_scans
        # The results of a `jit` may still be weights. A scan would stack them, and a
        # checkpoint keep them.
        whole_outputs = kind not in ("jit", "pjit")
        outputs: Shardings = ()

        def gather(inner: Jaxpr) -> Jaxpr:
            nonlocal outputs
            inner, outputs = self.program(
                inner, inputs, keep, whole_outputs=whole_outputs
            )
            return inner

        new = in_bodies(equation, gather)
        if kind in JAX_CHECKPOINTS and new is not equation:
            policy = _and_kept(equation.params["policy"])
            new = new.replace(params=new.params | {"policy": policy})
        taken = [i for i, sharding in enumerate(inputs) if sharding is not None]
        return _Taken(new, taken, outputs)


def _note(
    stored: dict[Var, NamedSharding], variables: Sequence[Var], weights: Shardings
) -> None:
    """Add those of the variables that are weights."""
    for var, sharding in zip(variables, weights):
        if sharding is not None:
            stored[var] = sharding


def _in_one_step(scan: JaxprEqn, inputs: Shardings) -> Shardings:
    """The layout of one layer of each stack, or `None` for a value that all steps of
    the scan share."""

    def one(
        sharding: NamedSharding | None, outer: Operand, inner: Operand
    ) -> NamedSharding | None:
        is_stack = len(shape_of(inner)) < len(shape_of(outer))
        if sharding is None or not is_stack or any(sharding.spec[:1]):
            return None
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    return [
        one(*triple)
        for triple in zip(inputs, scan.invars, body(scan.params["jaxpr"]).invars)
    ]


# Operations that leave a weight split.


def _number_by_number(equation: JaxprEqn, inputs: Shardings) -> _Taken:
    """An elementwise operation. If all arrays among the operands have the same split,
    so do the results."""
    arrays = [i for i, atom in enumerate(equation.invars) if shape_of(atom)]
    specs = {inputs[i] for i in arrays}
    shapes = {shape_of(atom) for atom in (*equation.invars, *equation.outvars)} - {()}
    if len(specs) > 1 or None in specs or len(shapes) > 1:
        return _Taken(equation)
    return _Taken(equation, arrays, [*specs] * len(equation.outvars))


def _part_of_it(equation: JaxprEqn, inputs: Shardings) -> _Taken:
    """A slice that does not cut a split dim, or an array from which dims of size 1 are
    removed."""
    sharding = inputs[0]
    before = shape_of(equation.invars[0])
    after = shape_of(equation.outvars[0])
    if sharding is None:
        return _Taken(equation)
    left = [
        dim
        for dim in range(len(before))
        if dim not in equation.params.get("dimensions", ())
    ]
    spec = [*sharding.spec, *[None] * len(before)]
    if any(
        spec[dim] is not None and before[dim] != size for dim, size in zip(left, after)
    ):
        return _Taken(equation)
    part = PartitionSpec(*(spec[dim] for dim in left))
    return _Taken(equation, [0], [NamedSharding(sharding.mesh, part)])


_THROUGH: dict[str, Callable[[JaxprEqn, Shardings], _Taken]] = {
    **dict.fromkeys((*ELEMENTWISE, "name"), _number_by_number),
    **dict.fromkeys(("slice", "dynamic_slice", "squeeze"), _part_of_it),
}


# In the body of a shard_map, a constraint would have no effect, so the gather is
# written out there.


def _take_in_shard_map(equation: JaxprEqn, inputs: Shardings, keep: bool) -> _Taken:
    """Take operands of a `shard_map` ungathered, if the body first casts them to vary
    along `fsdp`.

    Such a body sums the operand's gradient over `fsdp` at the cast. A gather in place
    of the cast gives the same value. The transpose of the gather, a reduce-scatter,
    leaves each device with its part of the gradient.
    """
    inside = equation.params["jaxpr"]
    specs = list(equation.params["in_specs"])
    invars = list(inside.invars)
    equations = list(inside.eqns)
    taken = []
    for i, sharding in enumerate(inputs):
        uses = [e for e in equations if sharding is not None and invars[i] in e.invars]
        is_cast = (
            len(uses) == 1
            and uses[0].primitive.name == "pvary"
            and "fsdp" in uses[0].params["axes"]
        )
        if sharding is None or invars[i] in inside.outvars or not is_cast:
            continue
        split = _join(
            specs[i], over_fsdp_alone(sharding).spec, type_of(equation.invars[i]).ndim
        )
        if split is None:
            continue
        (use,) = uses
        inner = _cast_and_gather(
            equation.invars[i], equation.params["mesh"], split, use.params["axes"], keep
        )
        at = equations.index(use)
        last = inner.eqns[-1].replace(outvars=use.outvars)
        equations[at : at + 1] = [*inner.eqns[:-1], last]
        invars[i] = inner.invars[0]
        specs[i] = split
        taken.append(i)
    changed = {
        "jaxpr": inside.replace(invars=invars, eqns=equations),
        "in_specs": tuple(specs),
    }
    return _Taken(
        equation.replace(params=equation.params | changed), taken, halfway=True
    )


def _join(spec: PartitionSpec, split: PartitionSpec, ndim: int) -> PartitionSpec | None:
    """`spec` with `fsdp` where `split` has it, or `None` if the two do not fit
    together."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    for dim, entry in enumerate(split):
        if entry == "fsdp" and entries[dim] is None:
            entries[dim] = "fsdp"
            return PartitionSpec(*entries)
    return None


def _cast_and_gather(
    operand: Operand,
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
    axes: Sequence[str],
    keep: bool,
) -> Jaxpr:
    """The body of a `shard_map` that casts its operand to vary over `axes` and then
    gathers it.

    The cast comes first, so that the gradient is summed over the other axes in parts.
    """
    dim = list(spec).index("fsdp")
    rest = tuple(axis for axis in axes if axis != "fsdp")

    def whole(x: Array) -> Array:
        x = jax.lax.pcast(x, rest, to="varying") if rest else x
        x = jax.lax.all_gather(x, "fsdp", axis=dim, tiled=True)
        return checkpoint_name(x, KEPT) if keep else x

    # Only the body of the mapped function is used, but `out_specs` must still name the
    # axes along which it varies.
    out = PartitionSpec((*axes_of(spec), *rest))
    mapped = jax.shard_map(whole, mesh=mesh, in_specs=(spec,), out_specs=out)
    return traced(mapped, operand).eqns[0].params["jaxpr"]
