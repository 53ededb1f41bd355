"""Both ends of a language model with a split vocabulary: the lookup and the
cross-entropy."""

import functools
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num, PyTree

from redco_eqx._base.protocols import Mean
from redco_eqx._base.tree import is_array
from redco_eqx._parallel.linear import (
    Layer,
    SplitLayer,
    apply,
    check_sequence,
    split_layer,
)
from redco_eqx._sharding.mesh import (
    axes_of,
    axis_size,
    batch_axes,
    tensor_size,
    traced_mesh,
)


@jax.named_scope("redco_eqx.embed")
def embed(
    table: Float[Array, "rows size"],
    ids: Int[Array, "*batch"],
    *,
    sequence_parallel: bool = False,
) -> Float[Array, "*batch size"]:
    """Look up rows of an embedding table that is split over its rows (the vocabulary).

    The result equals `jnp.take(table, ids, axis=0)`. On every mesh, a negative id
    counts from the end, and an id outside the table gives NaN.

    Over `tensor`, each shard looks up the rows that it holds, and one all-reduce of the
    size of the result adds these up. Over `fsdp`, the width of the table is gathered,
    and the gradient is reduced and scattered. Without this block, the compiler would
    gather the batch. Use plain indexing for a table that is not split, such as one of
    positions.

    ```python
    x = rx.layers.embed(table, tokens)
    ```

    **Arguments:**

    - `table`: one row per token.
    - `ids`: `(batch, length)`. For any other rank (as under a `vmap`), the compiler
        decides the layout.
    - `sequence_parallel`: splits the result over `tensor` along dim 1. It is then
        reduced and scattered instead of reduced. If the rows of the table do not divide
        evenly over `tensor`, the result is whole.

    **Raises:**

    `ValueError` if the length does not divide evenly under `sequence_parallel`.
    """
    mesh = traced_mesh(table, ids)
    if sequence_parallel and tensor_size(mesh) > 1:
        check_sequence("embed", ids[..., None], mesh)
    rows = None
    if mesh is not None and ids.ndim == 2:
        rows = batch_axes(mesh, ids.shape[0])
    is_cut = tensor_size(mesh) > 1 and table.shape[0] % tensor_size(mesh) == 0
    sequence_parallel = sequence_parallel and is_cut
    if mesh is None:
        return jnp.take(table, ids, axis=0)
    is_split = is_cut or axis_size(mesh, "fsdp") > 1
    if not sequence_parallel and not (rows and is_split):
        return jnp.take(table, ids, axis=0)
    spec = PartitionSpec("tensor") if is_cut else PartitionSpec()
    of_result = PartitionSpec(rows)
    if sequence_parallel:
        of_result = PartitionSpec(rows, "tensor")

    def on_shard(table: Array, ids: Array) -> Array:
        # Sums the gradient over the devices once, at the end.
        table = _vary(table, spec, rows or ())
        if not is_cut:
            return jnp.take(table, ids, axis=0)
        ids = _wide(ids)
        ids = jnp.where(ids < 0, ids + table.shape[0] * tensor_size(mesh), ids)
        own, is_read = _own_rows(ids, table.shape[0], "tensor")
        found = jnp.where(is_read[..., None], jnp.take(table, own, axis=0), 0)
        if sequence_parallel:
            return jax.lax.psum_scatter(
                found, "tensor", scatter_dimension=1, tiled=True
            )
        return jax.lax.psum(found, "tensor")

    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(spec, PartitionSpec(rows)),
        out_specs=of_result,
    )(table, ids)


Head: TypeAlias = Float[Array, "rows size"] | Layer
"""A table or a layer that turns hidden states into logits."""


@jax.named_scope("redco_eqx.cross_entropy")
def cross_entropy(
    hidden: Float[Array, "*batch length size"],
    head: Head,
    labels: Int[Array, "*batch length"],
    *,
    weights: Num[Array, "*batch length"] | None = None,
    ignore_label: int = -100,
    num_chunks: int = 1,
    sequence_parallel: bool | None = False,
) -> Mean:
    """Apply the head, and compute the mean cross-entropy of `labels` under
    `softmax(head(hidden))`, in float32.

    Over `tensor`, the logits stay split over the vocabulary. The forward pass reduces
    three numbers for each token. The backward pass has one all-reduce of the size of
    `hidden`. Neither the batch nor the logits are gathered. Over `fsdp`, the head is
    gathered once, and its gradient is reduced and scattered once, for any number of
    chunks.

    ```python
    # The table is also the head.
    loss = rx.layers.cross_entropy(x[:, :-1], table, tokens[:, 1:])
    ```

    **Arguments:**

    - `hidden`: `(batch, length, size)`, the input of the head. For any other rank (as
        under a `vmap`), the compiler decides the layout.
    - `head`: a Linear-like module, or an array with one row per token (the table of a
        tied embedding).
    - `labels`: the correct next token at each position. A label that is negative or
        beyond the vocabulary gives NaN.
    - `weights`: the weight of each token; 1 by default. A token with weight 0 adds
        nothing to the loss or to the gradients of `hidden` and `head`, whatever its
        label, even if its hidden state or logits are NaN.
    - `ignore_label`: tokens with this label have weight 0.
    - `num_chunks`: the number of parts that the length is divided into. Logits exist
        for one part at a time, forward and backward, so they take proportionally less
        memory. The cost is one more application of the head.
    - `sequence_parallel`: pass true if `hidden` is split over `tensor` along dim 1.
        `hidden` is gathered here, and its gradient is reduced and scattered. `None`
        means false.

    **Returns:**

    `Mean(total, weight)`, whose `value` is the loss.

    **Raises:**

    `ValueError` if the shapes do not fit, or if the length is not divisible by
    `num_chunks`, or by `tensor` under `sequence_parallel`.
    """
    given = {"labels": labels, "weights": labels if weights is None else weights}
    for name, x in given.items():
        if x.shape != hidden.shape[:-1]:
            raise ValueError(
                f"cross_entropy: {name} has shape {tuple(x.shape)}, but hidden has "
                f"shape {tuple(hidden.shape)}. Pass one number for each token."
            )
    if num_chunks < 1 or hidden.shape[-2] % num_chunks:
        raise ValueError(
            f"cross_entropy: num_chunks={num_chunks} does not divide the length, "
            f"{hidden.shape[-2]}."
        )
    counted = (labels != ignore_label).astype(jnp.float32)
    weights = counted if weights is None else counted * weights
    mesh = traced_mesh(head, hidden)
    sequence_parallel = bool(sequence_parallel) and tensor_size(mesh) > 1
    if sequence_parallel:
        check_sequence("cross_entropy", hidden, mesh)
    split = _split_head(head, tensor_size(mesh))
    rows = None
    if mesh is not None and mesh.size > 1 and hidden.ndim == 3:
        rows = batch_axes(mesh, hidden.shape[0])
    if rows is None or split is None:
        whole_head = functools.partial(apply, head)
        sums = _chunked(hidden, whole_head, labels, weights, num_chunks, None)
        return Mean(*sums)
    is_cut = any(map(axes_of, jax.tree.leaves(split.specs)))
    axis = "tensor" if is_cut else None
    axes = (*rows, "tensor") if is_cut else rows
    # A whole head takes whole sequences.
    sequence_parallel = sequence_parallel and is_cut
    of_hidden = PartitionSpec(rows)
    if sequence_parallel:
        of_hidden = PartitionSpec(rows, "tensor")

    def on_shard(
        hidden: Array, labels: Array, weights: Array, arrays: PyTree[Array]
    ) -> tuple[Array, Array]:
        # Vary from here on, so that gradients add up over the chunks first, and then
        # once over the devices.
        arrays = jax.tree.map(lambda x, spec: _vary(x, spec, axes), arrays, split.specs)
        if sequence_parallel:
            hidden = jax.lax.all_gather(hidden, "tensor", axis=1, tiled=True)
        hidden = _vary(hidden, of_hidden, axes)
        own_head = functools.partial(split.apply, arrays)
        sums = _chunked(hidden, own_head, labels, weights, num_chunks, axis)
        return jax.lax.psum(sums, rows)

    total, weight = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(of_hidden, PartitionSpec(rows), PartitionSpec(rows), split.specs),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )(hidden, labels, weights, split.arrays)
    return Mean(total, weight)


def _chunked(
    hidden: Float[Array, "*batch length size"],
    head: Layer,
    labels: Int[Array, "*batch length"],
    weights: Num[Array, "*batch length"],
    num_chunks: int,
    axis: str | None,
) -> tuple[Float[Array, ""], Num[Array, ""]]:
    """Return the weighted sum of the cross-entropy, and the sum of the weights."""

    def total_of(hidden: Array, labels: Array, weights: Array) -> Array:
        losses = _cross_entropy(hidden, head, labels, weights != 0, axis)
        return jnp.sum(weights * losses)

    if num_chunks == 1:
        return total_of(hidden, labels, weights), jnp.sum(weights)
    parts = (
        rearrange(hidden, "... (n t) d -> n ... t d", n=num_chunks),
        *(
            rearrange(x, "... (n t) -> n ... t", n=num_chunks)
            for x in (labels, weights)
        ),
    )
    # Logits are computed again in the backward pass, but not the sums over the shards.
    policy = jax.checkpoint_policies.save_only_these_names("reduced")
    # Inside a loop, the compiler cannot merge anything with the forward pass.
    one = jax.checkpoint(total_of, policy=policy, prevent_cse=False)
    totals = jax.lax.map(lambda part: one(*part), parts)
    return jnp.sum(totals), jnp.sum(weights)


def _cross_entropy(
    hidden: Float[Array, "*tokens size"],
    head: Layer,
    labels: Int[Array, "*tokens"],
    counts: Bool[Array, "*tokens"],
    axis: str | None,
) -> Float[Array, "*tokens"]:
    """Return the cross-entropy of each token, which is finite for a token that does not
    count.

    With `axis`, the head gives the logits of this shard.
    """
    # Replace a token that does not count only if it is not finite, because at weight 0,
    # the derivative with respect to the weight is still the token's cross-entropy. A
    # NaN would stay NaN when it is multiplied by 0 backward.
    is_safe = counts | (
        jnp.max(jnp.abs(jax.lax.stop_gradient(hidden)), axis=-1) < jnp.inf
    )
    logits = head(jnp.where(is_safe[..., None], hidden, 0))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greatest = jnp.max(jax.lax.stop_gradient(logits), axis=-1)
    # On this shard: not every backend's `pmax` keeps a NaN.
    is_safe = counts | (greatest < jnp.inf)
    if axis is not None:
        greatest = checkpoint_name(jax.lax.pmax(greatest, axis), "reduced")
    is_finite = counts | jnp.isfinite(greatest)
    logits = jnp.where((is_safe & is_finite)[..., None], logits, 0)
    greatest = jnp.where(is_finite, greatest, 0)
    sums = jnp.sum(jnp.exp(logits - greatest[..., None]), axis=-1)
    own, is_read = _own_rows(_wide(labels), logits.shape[-1], axis, counts)
    found = jnp.take_along_axis(logits, own[..., None], axis=-1)[..., 0]
    picked = jnp.where(is_read, found, 0)
    if axis is not None:
        sums = checkpoint_name(jax.lax.psum(sums, axis), "reduced")
        picked = checkpoint_name(jax.lax.psum(picked, axis), "reduced")
    each = jnp.log(sums) + greatest - picked
    return jnp.where(counts | jnp.isfinite(each), each, 0)


def _wide(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Cast ids to a dtype that can hold the size of a vocabulary."""
    return ids.astype(jnp.promote_types(ids.dtype, jnp.int32))


def _own_rows(
    ids: Int[Array, "*batch"],
    num_rows: int,
    axis: str | None,
    counts: Bool[Array, "*batch"] | bool = True,
) -> tuple[Int[Array, "*batch"], Bool[Array, "*batch"]]:
    """Return, for each id, the row to look up on this shard, and whether its value
    counts.

    Each shard has `num_rows` rows of the vocabulary. An id that `counts` and is on no
    shard gets a row outside the table, where the lookup fills in NaN. This shows the
    wrong id.
    """
    size = num_rows
    own = ids
    if axis is not None:
        size = num_rows * jax.lax.axis_size(axis)
        own = ids - jax.lax.axis_index(axis) * num_rows
    is_here = (own >= 0) & (own < num_rows)
    is_wrong = counts & ((ids < 0) | (ids >= size))
    # A lookup cuts ids to 32 bits, and counts negative ones from the end.
    outside = jnp.clip(ids, num_rows - 2**31, 2**31 - 1) - num_rows * (ids < 0)
    return jnp.where(is_here, own, jnp.where(is_wrong, outside, 0)), is_here | is_wrong


def _split_head(head: Head, num_shards: int) -> SplitLayer | None:
    """Cut a head over its outputs (the vocabulary). Return it whole for one shard, or
    if these do not divide evenly, and `None` for a layer that cannot be cut for another
    reason."""
    arrays, static = eqx.partition(head, is_array)
    sizes = [x.shape[0] for x in jax.tree.leaves(arrays) if x.ndim > 1]
    # Anything with several matrices is left to `split_layer`.
    divides = len(sizes) != 1 or sizes[0] % num_shards == 0
    is_whole = num_shards == 1 or not divides
    if callable(head) and not is_whole:
        return split_layer(head, "column", num_shards, 1)
    spec = PartitionSpec() if is_whole else PartitionSpec("tensor")
    return SplitLayer(arrays, static, jax.tree.map(lambda _: spec, arrays))


def _vary(x: Array, spec: PartitionSpec, axes: tuple[str, ...]) -> Array:
    """Mark an array that came in with `spec` as different on each device along all of
    `axes`."""
    # An array already differs along the axes that split it.
    others = tuple(axis for axis in axes if axis not in axes_of(spec))
    return jax.lax.pcast(x, others, to="varying")
