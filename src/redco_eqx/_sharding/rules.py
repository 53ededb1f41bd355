"""`explain`: a layout for a model, with reasons. `shard_rules`: only the layout.

The layout comes from the program that uses the model, or else from paths, types and
shapes. Both functions accept abstract models (`eqx.filter_eval_shape`) and an
`AbstractMesh`. They place no arrays.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._base.captured import check_captured
from redco_eqx._base.policy import (
    FSDP_MIN_SIZE,
    LARGE_BYTES,
    LARGE_SHARE,
    STORED_BYTES,
)
from redco_eqx._base.tree import AnyArray, describe, first_few, is_array, to_arrays
from redco_eqx._base.warn import warn
from redco_eqx._sharding.explanation import Decision, Explanation
from redco_eqx._sharding.mesh import (
    STORED,
    ShardingWarning,
    axes_of,
    axis_size,
    check_axis_names,
    check_mesh,
    in_own_context,
    misfit,
    num_batch_shards,
    tensor_dim,
    trimmed,
)
from redco_eqx._sharding.roles import Role, tensor_roles

if TYPE_CHECKING:
    # Imported at run time only if there is a program, because most layouts need none.
    from redco_eqx._dataflow.engine import Analysis
    from redco_eqx._dataflow.tracing import TracedStep

Overrides: TypeAlias = Sequence[tuple[str, PartitionSpec]]
"""Pairs of a glob over paths and a spec. The first pair that matches a leaf decides."""
Chosen: TypeAlias = Mapping[str, tuple[str, PartitionSpec]]


def shard_rules(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    overrides: Overrides = (),
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
) -> PyTree[NamedSharding | None]:
    """Choose a layout for `model` on `mesh`: a tree like the model, with a
    `NamedSharding` per array.

    With `loss_fn` and `batch`, the traced program decides which dims the `tensor` axis
    splits, whatever the names are: among all splits that do not clash, those that send
    the least for the work that they divide. An operation without a rule takes its
    operands whole. Without a program, two rules decide by names, types and shapes
    (RedCoast, section 3.1): consecutive Linear layers alternate between column and row
    splits, and an attention's output projection is split opposite to its query, key and
    value. Embeddings and heads are split over the vocabulary.

    The `fsdp` axis then splits the largest remaining dim of every matrix. Arrays of at
    least 4 MiB that `tensor` cannot split (because heads or a vocabulary do not divide
    evenly) are stored split over `("fsdp", "tensor")`. The steps gather them for use,
    as they gather arrays that `fsdp` splits. To place a model, call
    `eqx.filter_shard(model, result)`.

    ```python
    shardings = rx.shard_rules(model, mesh)  # by two rules
    # Or by the program:
    shardings = rx.shard_rules(model, mesh, loss_fn=loss_fn, batch=batch)
    model = eqx.filter_shard(model, shardings)
    ```

    **Arguments:**

    - `model`: any PyTree; its arrays may be abstract (`jax.ShapeDtypeStruct`).
    - `mesh`: from `make_mesh`, or any mesh of Auto axes, some of them named `data`,
        `fsdp`, `tensor`.
    - `overrides`: pairs `(pattern, PartitionSpec)`. A pattern is a glob over the whole
        path of a leaf (`layers.*.mlp.up.weight`; `*` also matches dots). The first
        pattern that matches an array decides. For an entry `("fsdp", "tensor")`, both
        axes are gathered for use; for `("tensor", "fsdp")`, only `fsdp` is.
    - `loss_fn`: a function of `(model, batch, key)`: the loss to train, or a predict
        function.
    - `batch`: a batch for `loss_fn`, of real or abstract arrays. Only shapes and dtypes
        count, and the sizes hardly matter. Pass a model with an `eqx.nn.State` as the
        pair `(model, state)`.

    **Returns:**

    A tree with the structure of `model`: `NamedSharding` where it has an array, `None`
    elsewhere.

    **Raises:**

    `ValueError` in these cases: an axis of the mesh is not Auto; an axis with several
    devices is none of `data`, `fsdp` and `tensor`, and no override names it; an
    override matches nothing, names an axis that the mesh does not have, repeats one,
    has more dims than the array, or does not divide it; only one of `loss_fn` and
    `batch` is given, or they do not run on abstract arrays; a function in the model
    holds an array (in a closure, for example).

    Warns with `ShardingWarning` if the path rules decided, but names and shapes do not
    tell how the program uses an array of at least 4,096 elements: four or more square
    matrices without names that say their order; a query, key and value fused in one
    dim; a matrix without a partner; a stack that may be an ensemble; an array that no
    rule matches. It also warns, once, if more than 5% of the model is replicated for
    any reason, or if an array over 1 MiB is replicated because no rule matches it or
    its dims do not divide evenly. The warnings list the arrays.
    """
    explanation = explain(
        model, mesh, overrides=overrides, loss_fn=loss_fn, batch=batch
    )
    _warn(explanation.decisions, mesh)
    return explanation.shardings


@in_own_context
def explain(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    overrides: Overrides = (),
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
) -> Explanation:
    """Explain the layout that `shard_rules` chooses: the role of each array, and the
    reason for it.

    The arguments and errors are as for `shard_rules`.
    `print(explain(model, mesh))` shows a table, in which layers with the same layout
    share a row (`layers.[0-11].mlp.up.weight`). With a program, lines below say what a
    device sends in a step, what it would send with [`split_activations`][], if that is
    more than 10% less, and what it would send and hold with all arrays whole over
    `tensor`.

    ```python
    explanation = rx.explain(model, mesh, loss_fn=loss_fn, batch=batch)
    print(explanation)
    print(explanation.decisions["layers.0.weight"].reason)
    model = eqx.filter_shard(model, explanation.shardings)
    ```
    """
    check_arguments(model, mesh, overrides)
    chosen = match_overrides(model, mesh, overrides)
    # The explanation must not hold the memory of the model.
    model = jax.tree.map(_without_values, model)
    analysis = analysis_of(model, mesh, loss_fn, batch, chosen)
    return explain_by(analysis, model, mesh, chosen)


def _without_values(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x


def check_arguments(
    model: PyTree, mesh: Mesh | AbstractMesh, overrides: Overrides
) -> None:
    """Raise `TypeError` or `ValueError` if an argument is not a model, a mesh, or a
    list of overrides."""
    check_mesh(mesh)
    if hasattr(model, "opt_state"):
        raise TypeError(
            f"shard_rules: model is a {type(model).__name__}. Pass the model in it: "
            "state.model."
        )
    if isinstance(model, type):
        raise TypeError(
            f"shard_rules: model is the class {model.__name__}, not one of its "
            "instances."
        )
    check_captured("shard_rules", model)
    for pair in overrides:
        match pair:
            case (str(), PartitionSpec() as spec) if (
                PartitionSpec.UNCONSTRAINED not in tuple(spec)
            ):
                continue
        raise TypeError(
            "overrides must be pairs, [(pattern, PartitionSpec), ...], but has "
            f"{pair!r}. For a dict, pass "
            "list(overrides.items()). For a spec of axes, use "
            'jax.sharding.PartitionSpec("tensor").'
        )


def analysis_of(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    loss_fn: Callable[..., Any] | None,
    batch: PyTree,
    chosen: Chosen = MappingProxyType({}),
) -> "Analysis | None":
    """Analyse the program, if there is one, and decide the layout of the arrays that
    `chosen` does not contain.

    Warns and returns `None` for a program that cannot be read, such as one from a JAX
    version newer than this library: the path rules are then better than no layout.
    """
    if loss_fn is None and batch is None:
        return None
    if loss_fn is None or batch is None:
        given, missing = "loss_fn", "batch"
        if loss_fn is None:
            given, missing = missing, given
        raise ValueError(
            f"shard_rules: {given} is given, but not {missing}. Pass both to let the "
            "traced program decide. Pass neither to let the path rules decide, by "
            "names and shapes."
        )
    from redco_eqx._dataflow.tracing import trace_step

    traced = trace_step(loss_fn, model, batch)
    try:
        return analyse(traced, model, mesh, chosen)
    except Exception as error:
        why = f"({type(error).__name__}: {error}, with JAX {jax.__version__})"
        text = (
            f"shard_rules: the program could not be read {why}. Names and shapes "
            "decide. Please report this."
        )
        warn(text, ShardingWarning)
        return None


def analyse(
    traced: "TracedStep",
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    chosen: Chosen = MappingProxyType({}),
) -> "Analysis":
    """Weigh every split in the traced program of a model, and choose a layout of the
    parameters."""
    from redco_eqx._dataflow.engine import choose_layout, weigh

    tensor = axis_size(mesh, "tensor")
    arrays = to_arrays(model)

    def held(path: str, dim: int | None, stack: int, is_buffer: bool) -> float:
        x = arrays[path]
        if path in chosen:
            _, spec = chosen[path]
        else:
            role = Role("buffer" if is_buffer else "whole", "", dim, stack)
            spec, *_ = _spec(x, role, mesh)
        return float(_shard_bytes(x, spec, mesh))

    # With arrays split over `fsdp`, the steps recompute all but products, see
    # `gather_where_used`.
    recomputes = axis_size(mesh, "fsdp") > 1
    num_shards = num_batch_shards(mesh)
    analysis = weigh(
        traced, tensor=tensor, num_shards=num_shards, held=held, recomputes=recomputes
    )
    given = {
        path: role.dim
        for path, role in tensor_roles(model, tensor).items()
        if role.dim is not None
    }
    fixed = {path: tensor_dim(spec) for path, (_, spec) in chosen.items()}
    return choose_layout(analysis, given=given, fixed=fixed)


def explain_by(
    analysis: "Analysis | None",
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    chosen: Chosen = MappingProxyType({}),
) -> Explanation:
    """The layout from the analysis of a program, or from the path rules if there is no
    analysis.

    The analysis uses only the `tensor` axis of the mesh.
    """
    arrays = to_arrays(model)
    if analysis is None:
        roles = tensor_roles(model, axis_size(mesh, "tensor"))
        clean = {}
    else:
        roles = dict.fromkeys(
            arrays, Role("buffer", "a NumPy array: a constant of the program")
        )
        roles |= {path: Role(*found) for path, found in analysis.roles().items()}
        clean = analysis.clean_dims(axis_size(mesh, "fsdp"))
    decisions = {}
    for path, x in arrays.items():
        spec, role, reason = _spec(x, roles[path], mesh, clean.get(path, ()))
        if path in chosen:
            pattern, spec = chosen[path]
            role = "override"
            reason = f"override {pattern!r}"
        is_guess = roles[path].is_guess and path not in chosen
        num_bytes = _shard_bytes(x, spec, mesh)
        decisions[path] = Decision(
            path, tuple(x.shape), x.dtype, spec, role, reason, num_bytes, is_guess
        )
    # `to_arrays` has the arrays in the order of `jax.tree.map`.
    in_order = iter(decisions.values())

    def sharding_of(leaf: Any) -> NamedSharding | None:
        if not is_array(leaf):
            return None
        return NamedSharding(mesh, next(in_order).spec)

    shardings = jax.tree.map(sharding_of, model)
    return Explanation(decisions, shardings, mesh, analysis)


def _spec(
    x: AnyArray, role: Role, mesh: Mesh | AbstractMesh, clean: Sequence[int] = ()
) -> tuple[PartitionSpec, str, str]:
    tensor = axis_size(mesh, "tensor")
    fsdp = axis_size(mesh, "fsdp")
    shape = tuple(x.shape)
    itemsize = getattr(x.dtype, "itemsize", 4)
    num_bytes = math.prod(shape[role.stack :]) * itemsize  # of one layer
    entries: list[str | tuple[str, ...] | None] = [None] * len(shape)
    reason = role.reason
    if role.dim is not None and tensor > 1:
        entries[role.dim] = "tensor"
    # A dim that counts layers stays whole, because a scan takes one layer at a time.
    dims = [
        d
        for d in range(role.stack, len(shape))
        if entries[d] is None and shape[d] % fsdp == 0
    ]
    # A part of a fused weight that crosses the border of two pieces would be moved at
    # each gather and sum.
    dims.sort(key=lambda d: (d not in clean, -shape[d]))
    is_matrix = len(shape) - role.stack >= 2 and math.prod(shape) >= FSDP_MIN_SIZE
    # If there are many integers, they are packed or quantised weights; otherwise they
    # are indices.
    are_many_integers = (
        jnp.issubdtype(x.dtype, jnp.integer) and num_bytes >= LARGE_BYTES
    )
    is_weight = role.name != "buffer" or are_many_integers
    # An array that `tensor` cannot split for use still takes memory, so store it split.
    has_both_axes = tensor > 1 and "fsdp" in mesh.shape
    is_large_whole = role.dim is None and num_bytes >= STORED_BYTES
    over_both = []
    if has_both_axes and is_large_whole:
        over_both = [d for d in dims if shape[d] % (fsdp * tensor) == 0]
    if is_matrix and is_weight and over_both:
        entries[over_both[0]] = STORED
        reason += f"; stored split over {' and '.join(STORED)}, gathered for use"
    elif is_matrix and is_weight and fsdp > 1 and dims:
        entries[dims[0]] = "fsdp"
    elif is_matrix and is_weight and fsdp > 1:
        reason += f"; no dim is divisible by fsdp={fsdp}"
    return trimmed(PartitionSpec(*entries)), role.name, reason


def _shard_bytes(x: AnyArray, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    num_bytes = math.prod(x.shape) * getattr(x.dtype, "itemsize", 4)
    return num_bytes // axis_size(mesh, axes_of(spec))


def match_overrides(
    model: PyTree, mesh: Mesh | AbstractMesh, overrides: Overrides
) -> Chosen:
    """The first pattern that matches, with its spec, by path. Raises `ValueError` as
    `shard_rules` does."""
    arrays = to_arrays(model)
    chosen: dict[str, tuple[str, PartitionSpec]] = {}
    for pattern, spec in overrides:
        paths = [path for path in arrays if fnmatch.fnmatchcase(path, pattern)]
        if not paths:
            raise ValueError(
                f"overrides: the pattern {pattern!r} matches no array. A pattern "
                f"matches a whole path; paths are: {first_few(list(arrays), most=5)}."
            )
        for path in paths:
            if problem := misfit(arrays[path].shape, spec, mesh):
                raise ValueError(
                    f"overrides: {spec} of the pattern {pattern!r} does not fit "
                    f"{path}, {describe(arrays[path])}: {problem}"
                )
            chosen.setdefault(path, (pattern, spec))
    check_axis_names("shard_rules", mesh, [spec for _, spec in overrides])
    return chosen


def _warn(decisions: dict[str, Decision], mesh: Mesh | AbstractMesh) -> None:
    if axis_size(mesh, ("tensor", "fsdp")) == 1:
        return
    messages = []
    whole = [
        d
        for d in decisions.values()
        if d.role != "override" and axis_size(mesh, axes_of(d.spec)) == 1
    ]
    whole.sort(key=lambda d: -d.bytes_per_device)
    replicated = sum(d.bytes_per_device for d in whole)
    total = sum(
        d.bytes_per_device * axis_size(mesh, axes_of(d.spec))
        for d in decisions.values()
    )
    is_much = replicated > LARGE_SHARE * total and replicated >= LARGE_BYTES
    # Other roles that keep an array whole, such as a norm, do so on purpose.
    has_large = any(
        d.role == "whole" and d.bytes_per_device >= LARGE_BYTES for d in whole
    )
    if is_much or has_large:
        lines = [
            f"{d.path}: {describe(d)}, {d.bytes_per_device / 2**20:.1f} MiB on every "
            f"device: {d.reason}"
            for d in whole
        ]
        listed = first_few(lines, separator="\n  ")
        messages.append(
            f"shard_rules: {replicated / 2**20:.1f} of {total / 2**20:.1f} MiB are "
            "replicated, split over neither tensor nor fsdp. The largest of "
            f"{len(whole)} such arrays:\n  {listed}"
        )
    guesses = [
        d
        for d in decisions.values()
        if d.is_guess
        and math.prod(d.shape) >= FSDP_MIN_SIZE
        and not (messages and d.role == "whole")  # named above
    ]
    if guesses and axis_size(mesh, "tensor") > 1:
        lines = [f"{d.path}: {d.reason}" for d in guesses]
        listed = first_few(lines, separator="\n  ")
        messages.append(
            "shard_rules: names and shapes do not tell how the program uses these "
            "arrays, so another layout may send several times less. Pass loss_fn and "
            f"batch to let the traced program decide:\n  {listed}"
        )
    for message in messages:
        warn(message, ShardingWarning)
