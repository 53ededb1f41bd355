"""`scan_layers`: apply layers one after another, with little communication and
memory."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._base.tree import describe, is_array, leaves_with_paths
from redco_eqx._parallel.linear import check_sequence, marked
from redco_eqx._sharding.mesh import (
    axis_size,
    batch_axes,
    tensor_size,
    traced_mesh,
)

# Policies of `jax.checkpoint`: they decide which values a backward pass keeps, and
# which it computes again.


Policy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`, as in `jax.checkpoint_policies`:
`(primitive, *types of its operands, **params)` returns true if the results are
kept. To move them to the host instead, it returns an `Offloadable`."""

Remat: TypeAlias = Literal["none", "full", "products", "row_out"] | Policy
"""The activations that a backward pass keeps, as for [`scan_layers`][]: a name, or a
policy of `jax.checkpoint`."""

_NAMES = ("none", "full", "products", "row_out")


def only_real(policy: Policy) -> Policy:
    """Return `policy`, except that complex values are computed again: JAX rounds kept
    values, but cannot round these."""
    # `reduce_precision`, since jax-ml/jax#22244. Needed by JAX 0.10.2 and 0.12.0; no
    # upstream issue known.

    def keep(primitive: Primitive, *operands: ShapedArray, **params: object) -> Any:
        is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in operands)
        return not is_complex and policy(primitive, *operands, **params)

    return keep


def also_by(policy: Policy, other: Policy) -> Policy:
    """Return a policy that keeps values that either of two keeps. The first must return
    a `bool`."""
    # `jax.checkpoint_policies.save_from_both_policies` raises `ValueError` for a policy
    # that offloads (JAX 0.10.2, no upstream issue known).

    def keep(primitive: Primitive, *operands: ShapedArray, **params: object) -> Any:
        is_kept = policy(primitive, *operands, **params)
        return is_kept or other(primitive, *operands, **params)

    return keep


_PRODUCTS = (
    "conv_general_dilated",
    "dot_general",
    "ragged_dot_general",
    "scaled_matmul_wrapper",
    # Attention by cuDNN.
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_fp8_fwd_wrapper",
    # Attention on a TPU, or a kernel of the user. Besides the output of attention, this
    # keeps the sums of its softmax. If only the output had a name, the backward pass
    # would run the kernel again for these sums.
    "pallas_call",
)
"""The operations that are worth their memory, by the names of their primitives."""

keep_row_out = only_real(jax.checkpoint_policies.save_only_these_names("row_out"))


@only_real
def keep_products(primitive: Primitive, *_: ShapedArray, **__: object) -> bool:
    """Keep the results of matrix products, convolutions and kernels, but no gathered
    weights and no cheap results."""
    return primitive.name in _PRODUCTS


_REARRANGE = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "pcast",
    "pvary",
    "reshape",
    "squeeze",
    "transpose",
)
"""Operations that compute nothing, by the names of their primitives."""


@only_real
def keep_computed(primitive: Primitive, *_: ShapedArray, **__: object) -> bool:
    """Keep all results but those that only rearrange numbers.

    Without a policy, the gradient of a scan keeps the matrices of each layer as a
    `shard_map` marks and transposes them, next to the stack itself.
    """
    return primitive.name not in _REARRANGE


keep_products_and_row_out = also_by(keep_products, keep_row_out)
"""Keeps the results of matrix products, and the outputs of [`row`][]."""


X = TypeVar("X")


def scan_layers(
    layer_fn: Callable[[PyTree, X], X],
    layers: PyTree | Sequence[PyTree],
    x: X,
    *,
    remat: Remat = "none",
    batched: PyTree[bool | None] = True,
    sequence_parallel: bool = False,
) -> X:
    """Apply layers one after another: `x = layer_fn(layer, x)`.

    Between layers, `x` stays split over the batch and whole over its features, so that
    the compiler moves weights, which are small, instead of activations. Under
    `train_step`, `eval_step` and `predict_step`, weights that are split over `fsdp` are
    gathered when their layer begins, once in the forward pass and again in the backward
    pass, and gradients are reduce-scattered. This sends three times the bytes of the
    weights, and at most one layer is gathered at a time (ZeRO-3). Outside a step, the
    compiler decides when to gather, and gathers a whole stack. `scan_layers` itself
    communicates nothing over `tensor`; see [`column`][] and [`row`][] for the
    communication of the layers.

    ```python
    def block(mlp, x):
        (hidden,) = rx.layers.column(x, mlp.layers[0])
        return x + rx.layers.row(jax.nn.gelu(hidden), mlp.layers[1])

    blocks = eqx.filter_vmap(make_mlp)(jax.random.split(key, 12))  # twelve, stacked
    x = rx.layers.scan_layers(block, blocks, x, remat="row_out")
    ```

    **Arguments:**

    - `layer_fn`: `(layer, x) -> x`.
    - `layers`: a list of layers, which is unrolled, or a stack, which is scanned, so
        that compile time does not grow with depth. In a stack, all arrays have a
        leading dimension for the layers (as from `eqx.filter_vmap`). Put anything else
        that differs between layers next to the layers: `{"block": stack, "key": keys}`,
        or a list of such dicts. For a single layer in your own loop, pass a list of
        one.
    - `x`: the PyTree of arrays that flows through the layers.
    - `remat`: the activations that the backward pass keeps; it recomputes the others.
        `none` keeps all activations. `full` keeps only `x` at each layer. `row_out`
        also keeps the outputs of `row`, so that no sum over `tensor` is repeated.
        `products` also keeps the results of matrix products, convolutions and kernels
        (such as the attention of cuDNN), and so only repeats cheap operations. Under
        `fsdp`, `none` means `products`, because gathered weights must not be kept. A
        policy of `jax.checkpoint` keeps what it says, gathered weights among it:
        `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, for example, does
        not keep the scores of attention.
    - `batched`: true if the leading dimension is the batch. Pass one value for all of
        `x`, or a prefix of its tree. Pass `False` under a `vmap` over examples, and
        `None` for parts with an open layout:
        `scan_layers(fn, layers, (x, cache), batched=(True, None))`.
    - `sequence_parallel`: also splits `x` between layers over `tensor` along dim 1 of
        `(batch, length, features)`, so that kept activations take proportionally less
        memory. Also pass it to `column` and `row`.

    **Returns:**

    `x` after the last layer.

    **Raises:**

    `ValueError` if `remat` is not a known name or a function, if the arrays of `layers`
    differ in their leading dimension, or if `sequence_parallel` is set and the sequence
    length is not divisible by the size of `tensor`.
    """
    check_remat(remat)
    is_list = isinstance(layers, list | tuple)
    _check_layers(layers)
    mesh = traced_mesh(layers, x)

    def hold(x: X) -> X:
        def one(is_batched: bool | None, part: PyTree) -> PyTree:
            return jax.tree.map(
                lambda x: _held(x, mesh, is_batched, sequence_parallel), part
            )

        return jax.tree.map(one, batched, x, is_leaf=lambda b: b is None)

    policy = _policy(remat, mesh is not None and axis_size(mesh, "fsdp") > 1)
    if policy is None and sequence_parallel and tensor_size(mesh) > 1 and not is_list:
        policy = keep_computed

    def apply(layer: PyTree, x: X) -> X:
        return hold(layer_fn(layer, hold(x)))

    if policy is not None:
        # Inside a scan, the compiler cannot merge anything with the forward pass, so
        # nothing needs to prevent it.
        apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=is_list)
    if is_list:
        for layer in layers:
            x = apply(layer, x)
        return x
    arrays, static = eqx.partition(layers, eqx.is_array)

    def one_layer(x: X, own: PyTree) -> tuple[X, None]:
        return apply(eqx.combine(own, static), x), None

    x, _ = jax.lax.scan(one_layer, x, arrays)
    return x


def check_remat(remat: object) -> None:
    """Raise `ValueError` for the name of a rematerialisation policy that does not
    exist."""
    if not callable(remat) and remat not in _NAMES:
        raise ValueError(
            f"remat={remat!r}, but it must be one of {_NAMES}, or a policy such as "
            "jax.checkpoint_policies.dots_with_no_batch_dims_saveable."
        )


def _policy(remat: Remat, has_fsdp: bool) -> Policy | None:
    if callable(remat):
        return only_real(remat)
    if remat == "full":
        return jax.checkpoint_policies.nothing_saveable
    if remat == "row_out":
        return keep_row_out
    # Gathered weights count as activations, so the policy must name the values to keep.
    if remat == "products" or has_fsdp:
        return keep_products_and_row_out
    return None


def _held(
    x: PyTree,
    mesh: AbstractMesh | None,
    is_batched: bool | None,
    sequence_parallel: bool,
) -> PyTree:
    """Give an array its layout between layers. Anything else stays as it is."""
    has_features = is_array(x) and x.ndim >= 2
    is_alone = mesh is not None and mesh.size == 1
    if is_batched is None or is_alone or not has_features:
        return x
    if mesh is None:
        with jax.named_scope("redco_eqx.stream"):
            return marked(x)
    first = batch_axes(mesh, x.shape[0]) if is_batched else None
    spec = PartitionSpec(first)
    if sequence_parallel and tensor_size(mesh) > 1:
        check_sequence("scan_layers", x, mesh)
        spec = PartitionSpec(first, "tensor")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _check_layers(layers: PyTree | Sequence[PyTree]) -> None:
    """Raise `ValueError` if there are no layers, or if the arrays of a stack disagree
    on their number."""
    named = leaves_with_paths({"layers": layers})
    arrays = {path: x for path, x in named if is_array(x)}
    if isinstance(layers, list | tuple):
        sizes = {"layers": len(layers)}
    else:
        sizes = {path: x.shape[0] if x.ndim else 0 for path, x in arrays.items()}
        sizes = sizes or {"layers": 0}
    first = next(iter(sizes))
    for path, size in sizes.items():
        if size == 0:
            what = path
            if path in arrays:
                what = f"{path}, {describe(arrays[path])},"
            raise ValueError(
                f"scan_layers: {what} has no layers. Pass a list of layers, or a "
                "stack, in which the leading dim of every array is the number of "
                "layers. If it is a plain number in the model, plain jax.jit (grad, "
                "vmap) has turned it into an array: use eqx.filter_jit (filter_grad, "
                "filter_vmap), which leaves it alone."
            )
        if size != sizes[first]:
            raise ValueError(
                f"scan_layers: {first} has {sizes[first]} layers, but {path} has "
                f"{size}. The leading dim of every array must be the number of layers."
            )
