"""A function of arrays as a program: traced once, looked at, changed, and run or differentiated."""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of PyTrees of arrays. To call it adds its operations to the trace around it.

    - `closed`: its operations; inputs and outputs are the leaves of arguments and result.
    - `results`: the structure of the result.
    """

    closed: ClosedJaxpr
    results: Any

    def __call__(self, *arguments: PyTree) -> PyTree:
        outputs = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        # A constant output is a plain number here.
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outputs]
        return jax.tree.unflatten(self.results, arrays)

    def replace(self, jaxpr: Jaxpr) -> "Program":
        """The same, of other operations."""
        return dataclasses.replace(self, closed=self.closed.replace(jaxpr=jaxpr))


def trace(function: Callable[..., PyTree], *arguments: PyTree) -> Program:
    """`function` as it is for arguments of these shapes and dtypes, which may be abstract."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Program(closed, jax.tree.structure(shapes))


def abstract(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    """What stands for an array of this type; it keeps the mesh that arrays inside a trace know."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def program_digest(closed: ClosedJaxpr) -> str:
    """A digest of a traced program, the same in each process: of its text, and of the arrays that it captured.

    The names of functions do not count, nor does a backward pass that is written by hand.
    """
    text = hashlib.sha256(re.sub(r"0x[0-9a-f]+|\bname=\S+", "", str(closed.jaxpr)).encode())
    for x in closed.consts:
        if getattr(x, "is_fully_addressable", True) and np.size(x) < 2**20:  # what is read in no time
            is_key = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
            text.update(np.asarray(jax.random.key_data(x) if is_key else x).tobytes())
    return text.hexdigest()[:16]
