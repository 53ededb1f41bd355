"""Low-rank adaptation (LoRA, Hu et al. 2021): small branches beside projections,
trained instead of these."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.layers import Linear
from redco_eqx_models._leaves import path_of

M = TypeVar("M", bound=eqx.Module)


class LoRA(eqx.Module):
    """A projection with a branch beside it: `base(x) + scale * lora_b @ lora_a @ x`.

    The branch is computed in the wider of the dtypes; the output has that of the base.

    The sharding rules recognise it: the factor that shares the split dim of the base is
    split in the same way, and the other one is replicated. In stacked layers, all
    arrays have an additional leading dim.

    - `base`: the projection.
    - `lora_a`: `(rank, in)`.
    - `lora_b`: `(out, rank)`.
    - `scale`: the factor on the branch: `alpha / rank` of the paper's section 4.1.
    """

    base: Linear
    lora_a: Float[Array, "*layers rank in"]
    lora_b: Float[Array, "*layers out rank"]
    scale: float = eqx.field(static=True)

    @property
    def out_features(self) -> int:
        """The size of the output, as that of the projection."""
        return self.base.out_features

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Apply the projection to the last dim."""
        # First to `rank` features, and then back. The product of the two factors would
        # be as large as the weight.
        low = jnp.einsum("...i,ri->...r", x, self.lora_a)
        branch = jnp.einsum("...r,or->...o", low, self.lora_b)
        output = self.base(x)
        return (output + self.scale * branch).astype(output.dtype)

    def merge(self, *, wide: bool = False) -> Linear:
        """Return the projection alone, with the branch added to its weight; in the
        wider of the dtypes if `wide`."""
        # `@` also multiplies stacked layers, one by one.
        weight = self.base.weight + self.scale * self.lora_b @ self.lora_a
        if not wide:
            weight = weight.astype(self.base.weight.dtype)
        return eqx.tree_at(lambda base: base.weight, self.base, weight)


def add_lora(
    model: M, *, targets: Iterable[str], rank: int, scale: float, key: Key
) -> M:
    """Add a LoRA branch to each of the chosen projections. The model's outputs do not
    change.

    The branches are new arrays without a layout.
    `eqx.filter_shard(adapted, rx.shard_rules(adapted, mesh))` places them on the
    model's devices. To train only the branches: `rx.init_state(adapted, optimizer,
    key=key, trainable=lora_spec(adapted))`.

    **Arguments:**

    - `model`: any model with [`Linear`][] layers, in a list or stacked.
    - `targets`: names of projections, such as `q_proj`, or whole paths.
    - `rank`: the rank of the branches.
    - `scale`: the factor on the branches; `alpha / rank` in other libraries.
    - `key`: for the first factors. The second factors are zeros.

    **Returns:** The model with the branches added. Its other leaves are the same arrays
    as before.

    **Raises:** `ValueError` if `rank` or `scale` is not positive, a name matches no
    projection, or the model has no Linear layers (GPT-2); `TypeError` if `targets` is
    one string.
    """
    if rank < 1:
        raise ValueError(f"add_lora: rank={rank}, but it must be positive.")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"add_lora: scale={scale}, but it must be positive and finite."
        )
    numbers = itertools.count()

    def branch(path: str, base: Linear) -> LoRA:
        *stack, num_out, num_in = base.weight.shape
        dtype = base.weight.dtype
        own = jax.random.fold_in(key, next(numbers))
        # Hu et al. 2021, section 4.1: random numbers in the first factor, and zeros in
        # the second, so that the branch is 0 at first.
        first = jax.random.normal(own, (*stack, rank, num_in), dtype) / num_in**0.5
        second = jnp.zeros((*stack, num_out, rank), dtype)
        return LoRA(base, first, second, float(scale))

    return beside(model, targets, branch)


def beside(
    model: M, targets: Iterable[str], branch: Callable[[str, Linear], LoRA]
) -> M:
    """Return the model with `branch(path, projection)` in place of each projection of
    these names or paths."""
    if isinstance(targets, str):
        raise TypeError(
            f"LoRA: targets={targets!r}, but it must be a list of names, such as "
            "['q_proj', 'v_proj']."
        )
    targets = set(targets)
    found = set[str]()
    others = set[str]()

    def one(keypath: KeyPath, node: PyTree) -> PyTree:
        if not isinstance(node, Linear):
            return node
        path = path_of(keypath)
        name = path.rpartition(".")[2]
        others.add(name)
        if not targets.intersection((path, name)):
            return node
        found.update((path, name))
        return branch(path, node)

    # A projection that has a branch is a leaf too, so that its base gets no second one.
    adapted = jax.tree_util.tree_map_with_path(
        one, model, is_leaf=lambda x: isinstance(x, Linear | LoRA)
    )
    if not others:
        raise ValueError(
            f"LoRA: {type(model).__name__} has no layers that take a branch. These are "
            "Linear; GPT-2, for example, has Conv1D layers instead. Train another "
            "model, or a part of this one: see `trainable` of init_state."
        )
    if missing := sorted(targets - found):
        raise ValueError(
            f"LoRA: the model has no projections named {missing}, only "
            f"{', '.join(sorted(others))}."
        )
    return adapted


def lora_spec(model: PyTree) -> PyTree:
    """Return a tree of booleans: true for the factors of the branches, false for every
    other leaf.

    Use it for `trainable` of `init_state`, or as a filter specification of Equinox.
    """

    def is_factor(keypath: KeyPath, _: PyTree) -> bool:
        return path_of(keypath).rpartition(".")[2] in ("lora_a", "lora_b")

    return jax.tree_util.tree_map_with_path(is_factor, model)


def merge_lora(model: M) -> M:
    """Return the model with its branches merged into its weights. The model has the
    same type and shapes as before `add_lora`.
    """

    def is_branch(node: PyTree) -> bool:
        return isinstance(node, LoRA)

    def merged(node: PyTree) -> PyTree:
        if is_branch(node):
            return node.merge()
        return node

    return jax.tree.map(merged, model, is_leaf=is_branch)
