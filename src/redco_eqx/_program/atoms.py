"""What the operations of a traced program read and write: variables and literals."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Literal, Var

Atom: TypeAlias = Var | Literal


def type_of(atom: Atom) -> ShapedArray:
    """Shape, dtype and sharding of a variable or literal."""
    return atom.aval  # pyright: ignore[reportReturnType] (declared as any type that JAX has)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(type_of(atom).shape)


def dtype_of(atom: Atom) -> Any:
    """The dtype of a variable or literal: one of NumPy, or that of PRNG keys."""
    return type_of(atom).dtype


def is_key(atom: Atom) -> bool:
    """Whether this is an array of PRNG keys."""
    return jnp.issubdtype(dtype_of(atom), jax.dtypes.prng_key)
