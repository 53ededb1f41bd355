"""Policies of `jax.checkpoint`: what a backward pass keeps, and what it computes again."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

Policy: TypeAlias = Callable[..., bool]
"""`(primitive, *types of its operands, **params) -> whether its results are kept`."""


def only_real(policy: Policy) -> Policy:
    """`policy`, but complex values are computed again: JAX rounds what is kept, and cannot round those."""
    # `reduce_precision`, since jax-ml/jax#22244. Needed by JAX 0.10.2 and 0.12.0; no upstream issue known.

    def keep(primitive: Primitive, *operands: ShapedArray, **params: object) -> bool:
        is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in operands)
        return False if is_complex else policy(primitive, *operands, **params)

    return keep


keep_nothing = jax.checkpoint_policies.nothing_saveable
keep_row_out = only_real(jax.checkpoint_policies.save_only_these_names("row_out"))


@only_real
def keep_products(primitive: Primitive, *_: ShapedArray, **__: object) -> bool:
    """Results of matrix products and convolutions: not gathered weights, nor what is cheap to compute again."""
    return primitive.name in ("dot_general", "conv_general_dilated")


def keep_products_and_row_out(primitive: Primitive, *operands: ShapedArray, **params: object) -> bool:
    """The results of matrix products, and what [`row`][] returns."""
    return keep_products(primitive, *operands, **params) or keep_row_out(primitive, *operands, **params)
