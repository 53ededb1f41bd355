"""What the operations of a traced program read and write: variables and literals."""

from typing import Any

import jax
import jax.numpy as jnp

from redco_eqx._dataflow.programs import Atom, shape_of, type_of

__all__ = ["Atom", "dtype_of", "is_key", "shape_of", "type_of"]


def dtype_of(atom: Atom) -> Any:
    """The dtype of a variable or literal: one of NumPy, or that of PRNG keys."""
    return type_of(atom).dtype


def is_key(atom: Atom) -> bool:
    """Whether this is an array of PRNG keys."""
    return jnp.issubdtype(dtype_of(atom), jax.dtypes.prng_key)
