"""Building blocks for layers, each with its communication over the `tensor` axis stated."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from redco_eqx._tree import is_array, leaves_with_paths

Remat: TypeAlias = Literal["none", "full", "row_out"]


def column(
    x: Float[Array, "*batch in"], *layers: Callable[[Array], Array]
) -> tuple[Float[Array, "*batch _"], ...]:
    """Sibling projections of one input: query, key and value, or gate and up.

    Column-split layers communicate nothing forward; backward the gradient of `x` is summed over the shards.
    """
    return tuple(layer(x) for layer in layers)


def row(x: Float[Array, "*batch in"], layer: Callable[[Array], Array]) -> Float[Array, "*batch out"]:
    """The projection that closes a column split: its output is summed over the shards, once forward.

    The output is named `row_out`, so that the rematerialisation policy of that name keeps it: recomputing it
    would communicate again.
    """
    return checkpoint_name(layer(x), "row_out")


def scan_layers(
    layer_fn: Callable[..., Any],
    layers: PyTree | Sequence[Any],
    x: Any,
    *,
    inputs: PyTree = None,
    remat: Remat = "none",
) -> Any:
    """Applies layers one after another: `x = layer_fn(layer, x)`.

    **Arguments:**

    - `layer_fn`: `(layer, x) -> x`; with `inputs`, `(layer, x, input) -> (x, output)`.
    - `layers`: a list of layers, which is unrolled; or one layer whose arrays have a leading dim that numbers
        the layers (as `eqx.filter_vmap` makes it), which is scanned: compile time does not grow with depth.
    - `x`: what flows through, a PyTree of arrays.
    - `inputs`: arrays whose leading dim numbers the layers: keys, or caches.
    - `remat`: what the backward pass recomputes. `none` keeps all activations; `full` keeps only `x` at each
        layer; `row_out` keeps also what [`row`][] returns, so that no collective is repeated.

    **Returns:**

    `x`; with `inputs`, the pair of `x` and the outputs, stacked.

    **Raises:**

    `ValueError` if `remat` is not known, or the arrays of `layers` or `inputs` differ in their leading dim.
    """
    check_remat(remat)
    num_layers = _num_layers(layers, inputs)
    is_list = isinstance(layers, list | tuple)

    def apply(layer: Any, x: Any, given: Any) -> tuple[Any, Any]:
        return (layer_fn(layer, x), None) if inputs is None else layer_fn(layer, x, given)

    if remat != "none":
        policy = jax.checkpoint_policies.save_only_these_names("row_out") if remat == "row_out" else None
        # Inside a scan nothing can be merged with the forward pass, so nothing has to be kept apart.
        apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=is_list)

    if is_list:
        outputs = []
        for i in range(num_layers):
            x, output = apply(layers[i], x, jax.tree.map(lambda a, i=i: a[i], inputs))
            outputs.append(output)
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)
    else:
        arrays, static = eqx.partition(layers, eqx.is_array)

        def body(x: Any, piece: tuple[Any, Any]) -> tuple[Any, Any]:
            return apply(eqx.combine(piece[0], static), x, piece[1])

        x, stacked = jax.lax.scan(body, x, (arrays, inputs))
    return x if inputs is None else (x, stacked)


def check_remat(remat: str) -> None:
    """Refuses, by `ValueError`, a rematerialisation policy that does not exist."""
    if remat not in get_args(Remat):
        raise ValueError(f"remat={remat!r}, but it must be one of {get_args(Remat)}.")


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
