"""Leaves by name: the path of a leaf, shardings by path, and a list of names for
messages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

# A type checker sees a JAX array. At run time, also what may stand for one: a model may
# be abstract.
if TYPE_CHECKING:
    AnyArray: TypeAlias = jax.Array
else:
    AnyArray: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def path_of(keypath: KeyPath) -> str:
    """Return a JAX key path in the form `layers.0.weight`, as `redco_eqx.to_arrays`
    does."""
    return jax.tree_util.keystr(keypath, simple=True, separator=".")


def shardings_by_path(shardings: PyTree) -> dict[str, NamedSharding]:
    """Return what `shard_rules` returns as `{path: sharding}`."""
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {
        path_of(keypath): x for keypath, x in leaves if isinstance(x, NamedSharding)
    }


def first_few(names: Sequence[str], *, most: int = 10) -> str:
    """Join names for messages: `a, b, c`, or the first ones and a count:
    `a, b, and 7 more`."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"and {len(names) - most} more")
    return ", ".join(shown)
