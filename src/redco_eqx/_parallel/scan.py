"""`scan_layers`: layers one after another, with what each layer needs to communicate little and keep little."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._parallel.linear import Remat, check_sequence
from redco_eqx._parallel.mesh import batch_axes, mesh_of, tensor_size
from redco_eqx._parallel.remat import Policy, keep_nothing, keep_products_and_row_out, keep_row_out
from redco_eqx._sharding.mesh import axis_size
from redco_eqx._tree import is_array, leaves_with_paths


def scan_layers(
    layer_fn: Callable[..., Any],
    layers: PyTree | Sequence[Any],
    x: Any,
    *,
    inputs: PyTree = None,
    carry: PyTree = None,
    remat: Remat = "none",
    batched: bool = True,
    sequence_parallel: bool = False,
) -> Any:
    """Applies layers one after another: `x = layer_fn(layer, x)`.

    Between layers `x` is held split over the batch and whole over its features, so that the compiler moves
    weights, which are small, and not activations. Under `train_step`, `eval_step` and `predict_step` weights
    that are split over `fsdp` are gathered when their layer begins, forward and again backward, and gradients
    are reduced and scattered: three times the bytes of the weights, and no more than one layer is whole at a
    time (ZeRO-3). Without a step, what is gathered when is left to the compiler, which gathers a stack whole.
    Over `tensor` nothing is communicated here; [`column`][] and [`row`][] say what the layers do.

    **Arguments:**

    - `layer_fn`: `(layer, x) -> x`; with `inputs`, `(layer, x, input) -> (x, output)`; with `carry`, `(layer,
        x, carry) -> (x, carry)`; with both, `(layer, x, input, carry) -> (x, output, carry)`.
    - `layers`: a list of layers, which is unrolled; or one layer whose arrays have a leading dim that numbers
        the layers (as `eqx.filter_vmap` makes it), which is scanned: compile time does not grow with depth. For
        a single layer in a loop of your own pass a list of one.
    - `x`: what flows through, a PyTree of arrays.
    - `inputs`: arrays whose leading dim numbers the layers, such as keys.
    - `carry`: arrays that go from layer to layer beside `x` and are laid out as they please. What each layer
        changes a part of, such as a cache of all layers, is changed in place here, and copied by `inputs`.
    - `remat`: what the backward pass recomputes. `none` keeps all activations (under `fsdp`: the results of
        matrix products, for what is between them is cheap, and gathered weights are not to be kept); `full`
        keeps only `x` at each layer; `row_out` keeps also what `row` returns, so that no sum over `tensor` is
        repeated.
    - `batched`: whether the leading dim of `x` is the batch. Pass `False` under a `vmap` over examples.
    - `sequence_parallel`: between layers `x` is also split over `tensor`, along its dim 1, `(batch, length,
        features)`: activations that are kept take that much less memory. Give it to `column` and `row` too.
    **Returns:**

    `x`, then with `inputs` the outputs, stacked, and with `carry` that of the last layer.

    **Raises:**

    `ValueError` if `remat` is not known, the arrays of `layers` or `inputs` differ in their leading dim, or the
    length does not divide under `sequence_parallel`.
    """
    check_remat(remat)
    num_layers = _num_layers(layers, inputs)
    is_list = isinstance(layers, list | tuple)
    mesh = mesh_of(layers, x)
    hold = _hold(x, mesh, batched, sequence_parallel)
    policy = _policy(remat, mesh is not None and axis_size(mesh, "fsdp") > 1)
    has_inputs, has_carry = inputs is not None, carry is not None

    def apply(layer: Any, x: Any, given: Any, carry: Any) -> tuple[Any, Any, Any]:
        further = [extra for extra, there in ((given, has_inputs), (carry, has_carry)) if there]
        returned = layer_fn(layer, hold(x), *further)
        x, *rest = returned if further else (returned,)
        return hold(x), rest[0] if has_inputs else None, rest[-1] if has_carry else None

    if policy is not None:
        # Inside a scan nothing can be merged with the forward pass, so nothing has to be kept apart.
        apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=is_list)
    if is_list:
        outputs = []
        for i in range(num_layers):
            x, output, carry = apply(layers[i], x, jax.tree.map(lambda a, i=i: a[i], inputs), carry)
            outputs.append(output)
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
    else:
        arrays, static = eqx.partition(layers, eqx.is_array)

        def body(flow: tuple[Any, Any], piece: tuple[Any, Any]) -> tuple[Any, Any]:
            x, output, carry = apply(eqx.combine(piece[0], static), flow[0], piece[1], flow[1])
            return (x, carry), output

        (x, carry), stacked = jax.lax.scan(body, (x, carry), (arrays, inputs))
    results = (x, *([stacked] if has_inputs else []), *([carry] if has_carry else []))
    return results if len(results) > 1 else x


def check_remat(remat: str) -> None:
    """Refuses, by `ValueError`, a rematerialisation policy that does not exist."""
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r}, but it must be one of {get_args(Remat)}.")


def _policy(remat: Remat, has_fsdp: bool) -> Policy | None:
    if remat == "full":
        return keep_nothing
    if remat == "row_out":
        return keep_row_out
    # Weights that were gathered count as activations: what is kept has to be named otherwise.
    return keep_products_and_row_out if has_fsdp else None


def _hold(x: Any, mesh: AbstractMesh | None, batched: bool, sequence_parallel: bool) -> Callable[[Any], Any]:
    """The constraint between layers."""
    if mesh is None or mesh.size == 1:
        return lambda x: x

    def one(x: Any) -> Any:
        if not is_array(x) or x.ndim < 2:
            return x
        first = batch_axes(mesh, x.shape[0]) if batched else None
        entries = (first, "tensor") if sequence_parallel and tensor_size(mesh) > 1 else (first,)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    if sequence_parallel and tensor_size(mesh) > 1:
        for leaf in jax.tree.leaves(x):
            check_sequence("scan_layers", leaf, mesh)
    return lambda x: jax.tree.map(one, x)


def _num_layers(layers: PyTree | Sequence[Any], inputs: PyTree) -> int:
    """How many layers there are. Raises `ValueError` where arrays disagree."""
    is_list = isinstance(layers, list | tuple)
    sizes = {"layers": len(layers)} if is_list else {}
    given = {"inputs": inputs} if is_list else {"layers": layers, "inputs": inputs}
    for path, x in leaves_with_paths(given):
        if is_array(x):
            sizes[path] = x.shape[0] if x.ndim else 0
    if not sizes or min(sizes.values()) == 0:
        empty = next((path for path, size in sizes.items() if size == 0), "layers")
        raise ValueError(f"scan_layers: {empty} numbers no layers. Pass a list of layers, or a stack of them.")
    first = next(iter(sizes))
    for path, size in sizes.items():
        if size != sizes[first]:
            raise ValueError(
                f"scan_layers: {first} has {sizes[first]} layers, but {path} has {size}. The leading dim of "
                "every array numbers the layers."
            )
    return sizes[first]
