"""What a run began with, in a few numbers: its key and its parameters.

The same state made on another mesh, or by another compiler, may differ in its last bits. So the parameters are
not known by their bits but by sums, which are compared with a tolerance.
"""

import json
import pathlib
import secrets
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from redco_eqx._checkpoint.checksum import Starts, indices, mix, summed
from redco_eqx._checkpoint.names import to_names
from redco_eqx._checkpoint.record import Origin
from redco_eqx._step.state import TrainState

BEGUN = "begun.json"
"""In a directory of checkpoints, of which run it is before the first of them is whole."""

_NUM_SUMS = 4
_NUM_SAMPLES = 2**16
_TOLERANCE = 1e-2


def origin_of(state: TrainState) -> Origin:
    """The fingerprint of a state. A collective call on several processes; costs one pass over the model.

    Of each floating array `x` of the model some elements are drawn, and `sum(sign * x) / norm(x)` is taken over
    them, with signs and draw fixed by the element's index. It is of order 1 for any random array, and 1e-6
    exact. `parameters` are four such sums, over all arrays.
    """
    model = {
        name: x
        for name, x in to_names(state).items()
        if name.startswith("model/") and jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0
    }
    total = np.zeros(_NUM_SUMS)
    for name, (*sums, square) in zip(model, summed(_projections, model).tolist()):
        signs = 1 - 2 * ((zlib.crc32(name.encode()) >> np.arange(_NUM_SUMS)) & 1)
        total += signs * np.asarray(sums) / np.sqrt(square or 1.0)
    # Of a copy: JAX 0.11 on CPU donates no array that was read.
    data = np.asarray(jnp.copy(jax.random.key_data(state.key)).addressable_data(0))
    return {"key": data.tobytes().hex(), "parameters": total.tolist()}


def what_differs(one: Origin | None, other: Origin | None) -> list[str]:
    """`key`, `initial parameters`, or both, where two fingerprints differ; nothing if one is not known."""
    if one is None or other is None:
        return []
    far = np.abs(np.subtract(one["parameters"], other["parameters"])) > _TOLERANCE
    found = {"key": one["key"] != other["key"], "initial parameters": bool(np.any(far))}
    return [what for what, differs in found.items() if differs]


def begun(directory: pathlib.Path, begin: int, origin: Origin) -> tuple[str, bool]:
    """The id of the run that begins here, and whether it has begun before: it was killed before its first save.

    On process 0 alone. The id is kept in the directory.
    """
    file = directory / BEGUN
    try:
        before = json.loads(file.read_text())
        if before["begin"] == begin and not what_differs(before["origin"], origin):
            return before["id"], True
    except (OSError, ValueError, TypeError, KeyError):
        pass  # there is none, or not a whole one
    run = {"begin": begin, "origin": origin, "id": new_id()}
    partial = file.with_name(f"{BEGUN}.tmp")
    partial.write_text(json.dumps(run))
    partial.replace(file)
    return run["id"], False


def new_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(4)


def _projections(x: Array, starts: Starts, shape: tuple[int, ...]) -> Float[Array, "n"]:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    x = x.astype(jnp.float32)
    hashes = mix(indices(x.shape, starts, shape))
    # Few enough that float32 adds them well in any order, however large the array is.
    size = max(1, int(np.prod(shape, dtype=np.float64)))
    is_drawn = mix(hashes) <= jnp.uint32(int(min(1, _NUM_SAMPLES / size) * (2**32 - 1)))
    x = jnp.where(is_drawn & jnp.isfinite(x), x, 0)
    signs = [jnp.where((hashes >> i) & 1, -1, 1) for i in range(_NUM_SUMS)]
    return jnp.stack([*(jnp.sum(sign * x) for sign in signs), jnp.sum(x * x)])
