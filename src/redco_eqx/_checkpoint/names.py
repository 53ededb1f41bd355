"""A state as the flat dictionary that a checkpoint holds, and what of it to read back."""

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from jaxtyping import PyTree

from redco_eqx._checkpoint.record import ArrayInfo
from redco_eqx._step.state import TrainState
from redco_eqx._tree import is_key, leaves_with_paths, to_arrays
from redco_eqx._types import AnyArray

MODEL = ("model/", "model_state/")


def to_names(state: TrainState) -> dict[str, AnyArray]:
    """Every array by its name in a checkpoint: `model/<path>`, trainable or not, `model_state/<path>`,
    `optimizer/<path>`, `step`, `key`."""
    return {
        **{f"model/{path}": x for path, x in state.params.items()},
        **{f"model/{path}": x for path, x in state.frozen.items()},
        **{f"model_state/{path}": x for path, x in state.model_state.items()},
        **{f"optimizer/{path}": x for path, x in to_arrays(state.opt_state).items()},
        "step": state.step,
        "key": state.key,
    }


def from_names(like: TrainState, arrays: Mapping[str, AnyArray]) -> TrainState:
    """The inverse of `to_names`: `like` with these arrays."""

    def part(prefix: str, own: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return {path: arrays[f"{prefix}/{path}"] for path in own}

    opt_leaves = [arrays[f"optimizer/{path}"] for path, _ in leaves_with_paths(like.opt_state)]
    return dataclasses.replace(
        like,
        params=part("model", like.params),
        frozen=part("model", like.frozen),
        model_state=part("model_state", like.model_state),
        opt_state=jax.tree.unflatten(jax.tree.structure(like.opt_state), opt_leaves),
        step=arrays["step"],
        key=arrays["key"],
    )


def storable(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """The arrays as they are stored: of keys their data, and none that is empty."""
    return {name: jax.random.key_data(x) if is_key(x) else x for name, x in arrays.items() if x.size > 0}


def info_of(x: AnyArray, checksum: str = "") -> ArrayInfo:
    """Describe an array for the record."""
    impl = str(jax.random.key_impl(x)) if isinstance(x, jax.Array) and is_key(x) else None
    return ArrayInfo(str(x.dtype), tuple(x.shape), checksum, impl)


def rename(names: Iterable[str], paths: Mapping[str, str]) -> dict[str, str]:
    """`{name in the checkpoint: name in the state}`, where paths of the model or their beginnings have changed.

    What the optimizer keeps of a leaf has the leaf's path at the end of its own, and is renamed with it.

    Raises `ValueError` for a path that is in no name, or two names that become one.
    """
    leaves, used = {}, set()
    names = list(names)
    for name in names:
        path = name.partition("/")[2]
        for old in _beginnings(path) if name.startswith(MODEL) else ():
            if old in paths:
                leaves[path] = paths[old] + path[len(old) :]
                used.add(old)
                break
    if len(used) < len(paths):
        raise ValueError(
            f"restore: renamed: {next(old for old in paths if old not in used)!r} is no path of the model in "
            f"the checkpoint, whose names are such as {', '.join(names[:3])}."
        )
    renamed = {}
    for name in names:
        room, _, path = name.partition("/")
        end = next((end for end in _ends(path) if end in leaves), None)
        is_whole = end == path or room == "optimizer"
        renamed[name] = name if end is None or not is_whole else name[: -len(end)] + leaves[end]
    twice = [name for name, count in Counter(renamed.values()).items() if count > 1]
    if twice:
        raise ValueError(f"restore: by `renamed` two arrays of the checkpoint become {twice[0]}.")
    return renamed


def _beginnings(path: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _ends(path: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    while path:
        yield path
        path = path.partition(".")[2]


def choose_entries(
    wanted: Mapping[str, AnyArray],
    found: Mapping[str, ArrayInfo],
    *,
    new: Sequence[str],
    unused: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Choose the names to read. Reports differences of state and checkpoint beyond what `new` and `unused`
    allow.

    **Arguments:**

    - `wanted`: the arrays of the state.
    - `found`: those of the checkpoint.
    - `new`: globs of names that keep the state's value where the checkpoint has none that fits.
    - `unused`: globs of names in the checkpoint that are left aside.

    Raises `ValueError` for a glob that matches no name.
    """
    for argument, patterns, names in (("new", new, wanted), ("unused", unused, found)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                where = "state" if argument == "new" else "checkpoint"
                raise ValueError(
                    f"restore: {argument}={pattern!r} matches no name of the {where}, which are such as "
                    f"{', '.join(list(names)[:3])}."
                )
    names, problems = [], []
    for name, x in wanted.items():
        own, other = info_of(x), found.get(name)
        if other is not None and (own.dtype, own.shape) == (other.dtype, other.shape):
            names.append(name)
        elif not _matches(name, new):
            problems.append(f"{name}: {own} in the state, {other or 'missing'} in the checkpoint")
    problems += [
        f"{name}: missing in the state, {info} in the checkpoint"
        for name, info in found.items()
        if name not in wanted and not _matches(name, unused)
    ]
    return names, problems


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def stored_target(x: AnyArray, info: ArrayInfo) -> jax.ShapeDtypeStruct:
    """Lay out the stored form of `x`, a leaf of the state to be restored."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    data: PyTree = (
        jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype)) if info.key_impl else x
    )
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
