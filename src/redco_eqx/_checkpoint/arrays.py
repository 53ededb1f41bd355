"""The arrays of a state: their names in a checkpoint, and the form in which it holds
them.

Their checksums (see `array_checksums`) are computed on the devices that have the
arrays, before a checkpoint is written and after it is read. So they cover the whole
path through host, network and disk. They cost one pass over device memory, instead of
reading the files a second time.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from redco_eqx._base.tree import AnyArray, from_arrays, is_key, to_arrays
from redco_eqx._checkpoint.checkpoint_info import ArrayInfo
from redco_eqx._step.state import TrainState

MODEL = ("model/", "model_state/")

_PREFIXES = {
    "params": "model",
    "frozen": "model",
    "model_state": "model_state",
    "opt_state": "optimizer",
}


def to_names(state: TrainState) -> dict[str, AnyArray]:
    """Return every array by its name in a checkpoint: `model/<path>`, trainable or not,
    `model_state/<path>`, `optimizer/<path>`, `step`, `key`."""
    names: dict[str, AnyArray] = {}
    for field, prefix in _PREFIXES.items():
        names |= {
            f"{prefix}/{path}": x
            for path, x in to_arrays(getattr(state, field)).items()
        }
    return {**names, "step": state.step, "key": state.key}


def from_names(like: TrainState, arrays: Mapping[str, AnyArray]) -> TrainState:
    """Return `like` with these arrays: the inverse of `to_names`."""
    parts: dict[str, Any] = {"step": arrays["step"], "key": arrays["key"]}
    for field, prefix in _PREFIXES.items():
        own = getattr(like, field)
        parts[field] = from_arrays(
            own, {path: arrays[f"{prefix}/{path}"] for path in to_arrays(own)}
        )
    return dataclasses.replace(like, **parts)


def as_saved(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Return the arrays in the form in which they are saved: keys as their data, and
    without empty arrays."""
    saved = {}
    for name, x in arrays.items():
        if x.size > 0:
            saved[name] = jax.random.key_data(x) if is_key(x) else x
    return saved


def info_of(x: AnyArray, checksum: str = "") -> ArrayInfo:
    """Describe an array for the record."""
    impl = None
    if isinstance(x, jax.Array) and is_key(x):
        impl = str(jax.random.key_impl(x))
    return ArrayInfo(str(x.dtype), tuple(x.shape), checksum, impl)
