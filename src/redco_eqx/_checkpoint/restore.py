"""Reading a checkpoint onto any mesh, and verifying it."""

import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from redco_eqx._checkpoint.checksum import digests
from redco_eqx._checkpoint.directory import entries, local, orbax_checkpoint, read_record
from redco_eqx._checkpoint.names import MODEL, choose, from_names, stored_target, to_names
from redco_eqx._checkpoint.record import CheckpointError, CheckpointInfo
from redco_eqx._distributed.consensus import from_first, together
from redco_eqx._sharding.mesh import put_global
from redco_eqx._step.state import TrainState
from redco_eqx._tree import first_few, lack_of_value


def restore(
    directory: str | os.PathLike[str],
    like: TrainState,
    *,
    step: int | None = None,
    only: Literal["model"] | None = None,
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> TrainState:
    """Reads a checkpoint into a state like `like`: its shapes, dtypes, mesh and layout, whatever the mesh on
    which it was saved. Every array is verified, bit for bit.

    **Main arguments:**

    - `directory`: as for `save`.
    - `like`: a state from `init_state`; its arrays may be abstract (`jax.ShapeDtypeStruct` with a sharding).
        It is not changed.
    - `step`: which checkpoint; by default the newest. If the newest is damaged, it is named in a warning and
        the one before is taken.

    **Other arguments:**

    - `only`: `"model"` reads the model alone: optimizer, step and key stay those of `like`.
    - `new`: globs of names, such as `model/head.*`, that keep the value of `like` if the checkpoint has none of
        this shape and dtype.
    - `unused`: globs of names of the checkpoint that are left aside.

    **Returns:** The state.

    **Raises:**

    - `ValueError`: state and checkpoint differ: each name with both shapes and dtypes; a glob matches nothing.
    - `FileNotFoundError`: there is no (such) checkpoint.
    - `CheckpointError`: it is damaged, or all are.
    - `ImportError` if Orbax is not installed.
    """
    orbax_checkpoint()
    directory = local(directory)
    paths = from_first(lambda: [path.name for s, _, path in reversed(entries(directory)) if step in (None, s)])
    if not paths:
        steps = sorted({s for s, _, _ in entries(directory)})
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"restore: {directory} has {wanted}; it has {steps or 'none'}.")

    def load(path: pathlib.Path) -> TrainState:
        info = together(lambda: read_record(path), CheckpointError)
        return read(info, like, select(info, like, only=only, new=new, unused=unused))

    return first_good([directory / name for name in paths], load)[0]


def first_good(
    paths: Sequence[pathlib.Path], load: Callable[[pathlib.Path], Any]
) -> tuple[Any, list[pathlib.Path]]:
    """`load(path)` of the first that is not damaged, and those that are, each named in a warning.

    Raises `CheckpointError` if all are damaged.
    """
    problems: list[str] = []
    for index, path in enumerate(paths):
        try:
            return load(path), list(paths[:index])
        except CheckpointError as error:
            problems.append(str(error))
            if path is not paths[-1]:
                warnings.warn(f"{error}. The one before it is used.", stacklevel=3)
    raise CheckpointError("no checkpoint can be restored:\n  " + "\n  ".join(problems))


def select(
    info: CheckpointInfo,
    like: TrainState,
    *,
    only: str | None = None,
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> list[str]:
    """The names to read. Raises `ValueError` if state and checkpoint differ more than the arguments allow."""
    own = to_names(like)
    wanted, found = (
        {name: x for name, x in names.items() if only is None or name.startswith(MODEL)}
        for names in (own, info.arrays)
    )
    names, problems = choose(wanted, found, new=new, unused=unused)
    if problems:
        found = first_few(problems, most=20, separator="\n  ")
        raise ValueError(f"the state does not fit the checkpoint {info.path}.\n  {found}")
    for name, x in own.items():
        if name not in names and lack_of_value(x):
            raise ValueError(
                f"restore: {name} is not read, but is abstract or deleted in `like`, so it has no value."
            )
    return names


def read(info: CheckpointInfo, like: TrainState, names: Sequence[str]) -> TrainState:
    """`like` with these arrays of a checkpoint. A collective call. Raises `CheckpointError` for damage."""
    own = to_names(like)
    targets = {name: stored_target(own[name], info.arrays[name]) for name in names}
    some = {name: target for name, target in targets.items() if target.size > 0}
    stored = together(lambda: _read_arrays(info.path, some), CheckpointError)
    checksums, _ = digests(stored)
    damaged = [name for name in stored if checksums[name] != info.arrays[name].checksum]
    if damaged:
        raise CheckpointError(
            f"{info.path} is damaged: the checksum of {first_few(damaged, most=1)} is not the one that was "
            "written"
        )
    for name in names:
        x = stored[name] if name in stored else _empty(targets[name])
        impl = info.arrays[name].key_impl
        own[name] = x if impl is None else jax.random.wrap_key_data(x, impl=impl)
    return from_names(like, own)


def _read_arrays(path: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    if not targets:
        return {}
    import orbax.checkpoint as ocp
    from etils import epath

    # The handler by itself: a checkpointer would wait for the other processes even where one has failed.
    arguments = ocp.args.PyTreeRestore(
        item=targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=True,
    )
    try:
        return ocp.PyTreeCheckpointHandler().restore(epath.Path(path / "arrays"), args=arguments)
    except Exception as error:  # of many kinds, according to what is damaged
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _empty(target: jax.ShapeDtypeStruct) -> Any:
    return put_global(jnp.zeros(target.shape, target.dtype), target.sharding)  # pyright: ignore[reportArgumentType]
