"""The roles of a model's arrays on a `tensor` axis, from the traced program."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from jax.sharding import AbstractMesh, Mesh

from redco_eqx._base.compiler import merges
from redco_eqx._base.policy import MEMORY
from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.operations import rule_of
from redco_eqx._dataflow.reasons import Reasons
from redco_eqx._dataflow.search import (
    SplitOfEach,
    as_layout,
    choose,
    freed_bytes,
    improve,
)
from redco_eqx._dataflow.simulation import Sent, simulate
from redco_eqx._dataflow.tracing import STATE, TracedStep
from redco_eqx._dataflow.values import (
    Dim,
    Split,
    Use,
    Value,
    leading_atoms,
    pin,
    resolve,
    total_bytes,
    unify,
)
from redco_eqx._dataflow.walk import Costs, Walk, count, unknown

if TYPE_CHECKING:
    # The layout of all values is imported where it is asked for: most layouts are of
    # the parameters alone.
    from redco_eqx._dataflow.solution import Solution

SCANNED = "scanned over"

RoleOf: TypeAlias = tuple[str, str, int | None, int]
"""`(role, reason, dim, stack)` of an array.

If `tensor` splits `dim`, `role` is `column`, `row`, `vocabulary`, `expert` or
`follows`. Otherwise, it is `whole`, `vector` or `buffer`. The first `stack` dims number
the layers of a scan, so no axis may split them."""

HeldBytes: TypeAlias = Callable[[str, int | None, int, bool], float]
"""`(path, dim, stack, is_buffer) -> bytes`: the bytes of an array on one device if
`tensor` splits this dim, or none. `stack` is the number of leading dims that number
layers of a scan."""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The results of a walk through a program, and a layout of its parameters.

    - `layout`: the index of the split for each parameter that is split, by the
        parameter's index.
    - `solution`: the layout of the activations beside it, if the program lays these
        out.
    """

    traced: TracedStep
    walk: Walk
    costs: Costs
    layout: SplitOfEach
    solution: "Solution | None" = None

    @functools.cached_property
    def simulated(self) -> Sent:
        """The bytes that a device sends in a step."""
        return simulate(self.costs, self.walk, self.layout)

    def sent(self, *, merged: bool) -> tuple[float, float]:
        """Bytes that a device sends over `tensor`, and for sums over the batch axes."""
        if self.solution is not None:
            return self.solution.sent
        sent = self.simulated
        over_batch = self.costs.leads.over_batch
        batch = total_bytes(
            [pair for pair in sent.events if over_batch(pair[0])], merged=merged
        )
        return sent.num_bytes(merged=merged) - batch, batch

    def laid_out(self, dims: Mapping[str, int | None]) -> "Analysis | None":
        """The analysis with a layout that splits these dims, by path, or `None` if its
        cost is not known."""
        layout = as_layout(self.costs, self.traced.by_leaf(dims))
        if layout is None:
            return None
        if layout == self.layout:
            return self  # which may have been simulated already
        return dataclasses.replace(self, layout=layout)

    def score(self, layout: SplitOfEach) -> float:
        """Score a layout, in bytes, with the weighting that the choice of splits
        uses."""
        work = (1 - 1 / self.costs.tensor) * sum(
            self.costs.work[leaf] for leaf in layout
        )
        gained = self.costs.worth_of_work(work) + MEMORY * freed_bytes(
            self.costs, layout
        )
        return gained - simulate(self.costs, self.walk, layout).num_bytes(merged=True)

    def dim_of(self, leaf: int) -> int | None:
        """The dim of a parameter that is split, or `None`."""
        number = self.layout.get(leaf)
        return None if number is None else self.costs.splits[number].leaves[leaf]

    def roles(self) -> dict[str, RoleOf]:
        """The role of each array that the program takes, by path."""
        return {path: self.role(i) for i, path in enumerate(self.traced.paths)}

    def clean_dims(self, parts: int) -> dict[str, list[int]]:
        """For each array, the dims that divide into `parts` without a part across the
        border of two pieces."""
        return {
            path: [
                i
                for i, dim in enumerate(value.dims)
                if leading_atoms(dim, parts, pinned=True)
            ]
            for path, value in zip(self.traced.paths, self.walk.parameters)
        }

    def role(self, leaf: int) -> RoleOf:
        """The role of an array that the program takes."""
        value = self.walk.parameters[leaf]
        number = self.layout.get(leaf)
        stack = _num_scanned(value)
        if number is not None:
            split = self.costs.splits[number]
            dim = split.leaves[leaf]
            reason = self._reasons.why_split(split, value.dims[dim], leaf)
            return (
                self._name_of(leaf, value.dims[dim]),
                f"dim {dim}, {reason}",
                dim,
                stack,
            )
        if self.traced.fixed[leaf]:
            return "buffer", self.traced.fixed[leaf], None, stack
        name = "whole" if len(value.dims) - stack > 1 else "vector"
        return name, self._reasons.why_whole(leaf, value.dims), None, stack

    @functools.cached_property
    def _reasons(self) -> Reasons:
        return Reasons(
            self.costs,
            self.layout,
            self.traced.paths,
            self.simulated,
            self.traced.splits,
        )

    @functools.cached_property
    def _uses(self) -> dict[int, list[Use]]:
        """The uses of each parameter, in the order of the program."""
        found: dict[int, list[Use]] = {}
        for use in self.walk.uses:
            found.setdefault(use.weight, []).append(use)
        return found

    def _name_of(self, leaf: int, dim: Dim) -> str:
        """Name the split of `dim` by the first operation that applies the parameter to
        data."""
        lead = set(resolve(dim))
        for use in self._uses.get(leaf, ()):
            for own, role in zip(use.dims, use.roles):
                if role and own and resolve(own)[0] in lead:
                    return role
        return "follows"


def walk_through(traced: TracedStep) -> Walk:
    """Walk through a program."""
    walk = Walk(rule_of)
    values = [unknown(var.aval) for var in traced.jaxpr.invars]
    num_arrays = len(traced.paths)
    walk.parameters = values[:num_arrays]
    rows = values[num_arrays:][: traced.num_batch]
    for i, value in enumerate(walk.parameters):
        value.weights = (i,)
        value.is_learned = True
    for value in rows:
        value.is_data = True
    # Not a scalar that all examples share.
    walk.rows = [value for value in rows if value.dims]
    for value in walk.rows:
        unify(walk.rows[0].dims[0], value.dims[0])
        pin(value.dims[0], "the batch")
    results = walk.run(traced.jaxpr, values)
    walk.add_up()
    walk.gradients = [
        None if number is None else results[number] for number in traced.trained
    ]
    for value, gradient in zip(walk.parameters, walk.gradients):
        for dim, of_gradient in zip(value.dims, gradient.dims if gradient else ()):
            unify(dim, of_gradient)
    _pin_joined(walk.pieces)
    return walk


def _pin_joined(pieces: list[tuple[Dim, bool]]) -> None:
    """Pin the dims that count the pieces that a concatenation puts together.

    XLA does not give each device pieces of its own. It splits all pieces inside, and
    with them the arrays that they were computed from: in a residual network those of
    all layers before, which are gathered for each product again. What was cut into
    pieces first (a fused projection, whose gradient is put together) is not meant.
    """
    known = set[int]()
    for dim, is_joined in pieces:
        for atom in resolve(dim):
            if is_joined and id(atom) not in known:
                pin((atom,), "pieces of a concatenation")
            known.add(id(atom))


def weigh(
    traced: TracedStep,
    *,
    tensor: int,
    num_shards: int,
    held: HeldBytes | None = None,
    recomputes: bool = False,
) -> Analysis:
    """Walk through a program, and weigh every split over `tensor` devices, with a batch
    in `num_shards` parts.

    `held` (see [`HeldBytes`][]): by default only `tensor` splits the arrays on devices.
    `recomputes`: see [`Costs`][].
    """
    walk = walk_through(traced)

    @functools.cache
    def held_of(leaf: int, dim: int | None) -> float:
        value = walk.parameters[leaf]
        if held is None:
            return value.num_bytes / (1 if dim is None else tensor)
        return held(
            traced.paths[leaf], dim, _num_scanned(value), bool(traced.fixed[leaf])
        )

    splittable = [
        () if reason == STATE else x.dims
        for x, reason in zip(walk.parameters, traced.fixed)
    ]
    return Analysis(
        traced,
        walk,
        count(walk, splittable, tensor, num_shards, held_of, recomputes),
        {},
    )


def _num_scanned(value: Value) -> int:
    """Count the leading dims that number layers of a scan."""
    is_scanned = [bool(dim) and resolve(dim)[0].pin == SCANNED for dim in value.dims]
    return (*is_scanned, False).index(False)


def choose_layout(
    analysis: Analysis,
    *,
    given: Mapping[str, int],
    fixed: Mapping[str, int | None],
) -> Analysis:
    """The analysis with the layout that is worth the most.

    **Arguments:**

    - `given`: a layout to compare with, as the dim that is split, by path.
    - `fixed`: decisions that are fixed for some arrays: the dim that is split, or
        `None`. The others are chosen to match.
    """
    costs = analysis.costs
    paths = analysis.traced.paths
    decided = analysis.traced.by_leaf(fixed)
    split_so = as_layout(costs, decided) or {}

    def laid_out(splits: Sequence[Split]) -> SplitOfEach:
        chosen = {
            leaf: split.number
            for split in splits
            for leaf in split.leaves
            if leaf not in decided
        }
        return {**chosen, **split_so}

    whole = {leaf for leaf, dim in decided.items() if dim is None}
    options: list[dict[str, Collection[int]]] = [{}]
    if decided:  # follow the decided splits, or keep away from them
        options.append({"forced": set(split_so.values())})
        options.append(
            {"barred": {s.number for s in costs.splits if whole.intersection(s.leaves)}}
        )
    layouts = [laid_out(choose(costs, **option)) for option in options]
    layout = layouts[0] if len(layouts) == 1 else max(layouts, key=analysis.score)
    other = as_layout(costs, analysis.traced.by_leaf({**given, **fixed}))
    layout = improve(
        layout, other, paths, len(analysis.walk.visits), decided, analysis.score
    )
    return dataclasses.replace(analysis, layout=layout)


def with_activations(
    analysis: Analysis, mesh: Mesh | AbstractMesh, *, is_quick: bool = False
) -> Analysis | None:
    """The analysis with a layout of all values, or `None` if a step leaves the
    activations to the compiler. See [`laid_out_values`][]."""
    try:
        return laid_out_values(analysis, mesh, is_quick=is_quick)
    except ValueError:
        return None


MOST_SENT = 1.02
"""The bytes that a step may send with a layout of all values, by the prediction,
compared with the bytes that it sends without it. Predictions are this exact."""


def laid_out_values(
    analysis: Analysis, mesh: Mesh | AbstractMesh, *, is_quick: bool = False
) -> Analysis:
    """The analysis with the layout of all values that sends the least, in which the
    parameters keep theirs. `is_quick`: see [`solve`][].

    Raises `ValueError`, with the reason, if the activations are better left to the
    compiler: there is no such layout, it sends more than the layout of the parameters
    alone, or what is sent is not known.
    """
    from redco_eqx._dataflow.choice import Values
    from redco_eqx._dataflow.solution import solve

    costs = analysis.costs
    if costs.tensor == 1:
        raise ValueError("tensor has one device")
    if analysis.walk.opaque_in_loops:
        names = ", ".join(analysis.walk.opaque_in_loops)
        raise ValueError(
            f"a loop repeats {names}, about which nothing is known, so that what a "
            "step would send cannot be predicted"
        )
    is_merged = merges(mesh)
    values = Values(analysis.walk, costs.tensor, costs.num_shards, is_merged)
    dims = {leaf: analysis.dim_of(leaf) for leaf in range(len(analysis.traced.paths))}
    solution = solve(values, dims, is_quick=is_quick)
    split = dataclasses.replace(analysis, solution=solution)
    more, plain = (sum(x.sent(merged=is_merged)) for x in (split, analysis))
    if more > MOST_SENT * plain:
        raise ValueError(
            f"with activations split, a device would send {size_text(more)} in a "
            f"step, instead of {size_text(plain)}"
        )
    return split
