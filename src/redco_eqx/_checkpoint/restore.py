"""Read a checkpoint onto any mesh, and verify it."""

import fnmatch
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeVar, cast

import jax
import jax.numpy as jnp

from redco_eqx._base.tree import AnyArray, first_few, is_key, lack_of_value
from redco_eqx._base.warn import warn
from redco_eqx._checkpoint.arrays import MODEL, from_names, info_of, to_names
from redco_eqx._checkpoint.checkpoint_info import (
    ArrayInfo,
    CheckpointInfo,
    entries,
    in_brief,
    is_damage,
    local,
    orbax_checkpoint,
    read_record,
    unreadable,
)
from redco_eqx._checkpoint.run_record import (
    CheckpointError,
    CheckpointFormatError,
    DamagedError,
)
from redco_eqx._distributed.consensus import from_first, together
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._sharding.pieces import array_checksums
from redco_eqx._step.state import TrainState, check_is_one_state

T = TypeVar("T")


@in_own_context
def restore(
    directory: str | os.PathLike[str],
    like: TrainState,
    *,
    step: int | None = None,
    only: Literal["model"] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> TrainState:
    """Read a checkpoint into a state with the shapes, dtypes, mesh and layout of
    `like`. The checkpoint may have been saved on any mesh. Every array is verified bit
    for bit.

    ```python
    rx.save("run", state)
    other = rx.init_model(make_model, rx.make_mesh(fsdp=8), key=jax.random.key(0))
    like = rx.init_state(other, optimizer, key=jax.random.key(1))  # on another mesh
    state = rx.restore("run", like=like)
    ```

    **Main arguments:**

    - `directory`: as for `save`.
    - `like`: a state from `init_state`, which is not changed. Its arrays may be
        abstract (`jax.ShapeDtypeStruct` with a sharding).
    - `step`: the step of the checkpoint to read; by default, the newest. If the newest
        is damaged, a warning names it, and the previous one is read.

    **Other arguments:**

    - `only`: `"model"` reads only the model. The optimizer's state, the step and the
        key stay those of `like`.
    - `renamed`: `{path in the checkpoint's model: path in that of like}`, for leaves or
        for everything below a path, such as `{"encoder": "backbone.encoder"}`. The
        optimizer's arrays for these leaves are renamed, too.
    - `new`: globs of names, such as `model/head.*`. These arrays keep their value in
        `like` if the checkpoint has no array with this shape and dtype.
    - `unused`: globs of names in the checkpoint to ignore.

    **Returns:** The state.

    **Raises:**

    - `ValueError`: the state and the checkpoint differ. The message lists each name
        with both shapes and dtypes.
    - `FileNotFoundError`: there is no checkpoint, or none for this step.
    - `CheckpointError`: all checkpoints, or all for this step, are damaged. Or the
        operating system cannot read one, which may be whole: then no older one is read
        instead.
    - `ImportError` if Orbax is not installed.
    """
    orbax_checkpoint()
    directory = local(directory)
    check_is_one_state(like, "restore: like")
    if only not in (None, "model"):
        raise ValueError(
            f'restore: only={only!r}, but it must be "model", or None for all.'
        )
    # Process 0 lists them for all, so that all read the same.
    names = from_first(lambda: _names_of(directory, step))
    if not names:
        raise FileNotFoundError(f"restore: {directory} {_lack(directory, step)}")

    def load(path: pathlib.Path) -> TrainState:
        info = load_alike(lambda: read_record(path))
        chosen = select(info, like, only=only, renamed=renamed, new=new, unused=unused)
        return read(info, like, chosen)

    state, _ = first_good([directory / name for name in names], load)
    return state


def _names_of(directory: pathlib.Path, step: int | None) -> list[str]:
    """List the directories of the checkpoints of this step, or of all steps, the newest
    first."""
    newest_first = reversed(entries(directory))
    return [path.name for s, _, path in newest_first if step in (None, s)]


def _lack(directory: pathlib.Path, step: int | None) -> str:
    """Explain why there is no checkpoint, or none of this step."""
    if not directory.is_dir():
        return (
            "does not exist. Pass the directory that you passed to save or to "
            "fit(checkpoints=)."
        )
    if (directory / "record").is_dir():
        return (
            "is itself a checkpoint. Pass the directory that contains it, "
            f"{directory.parent}, and step=."
        )
    steps = sorted({s for s, _, _ in entries(directory)})
    if not steps:
        return "has no checkpoint: it is empty. Pass the directory of a run."
    return f"has no checkpoint of step {step!r}, only of {steps}."


def first_good(
    paths: Sequence[pathlib.Path], load: Callable[[pathlib.Path], T]
) -> tuple[T, list[pathlib.Path]]:
    """Return `load(path)` for the first path that is not damaged, and the damaged paths
    before it. Warns about each of these.

    Raises `CheckpointError` if all are damaged, or if one cannot be read.
    """
    problems: list[str] = []
    for index, path in enumerate(paths):
        try:
            return load(path), list(paths[:index])
        except DamagedError as error:
            problems.append(str(error))
            if path is not paths[-1]:
                warn(f"{error}. The checkpoint before it is used instead.")
    raise CheckpointError("no checkpoint can be restored:\n  " + "\n  ".join(problems))


def load_alike(load: Callable[[], T]) -> T:
    """Return `load()`. If it fails on one process, raise the same kind of error on all,
    so that all take the same checkpoint. A checkpoint that one process cannot read does
    not count as damaged."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = load()
    except (CheckpointError, CheckpointFormatError) as error:
        problem = error

    def fail_with(
        kind: type[Exception], besides: tuple[type[Exception], ...] = ()
    ) -> None:
        """Raise the problem of any process, if it is of this kind, on all."""

        def fail() -> None:
            if isinstance(problem, kind) and not isinstance(problem, besides):
                raise problem

        together(fail, kind)

    # Each process makes all three calls, because a call waits for all processes. A
    # damaged checkpoint comes last: the older one that is then read must not replace
    # one that only this process cannot read.
    fail_with(CheckpointError, besides=(DamagedError,))
    fail_with(CheckpointFormatError)
    fail_with(DamagedError)
    return cast(T, result)


def select(
    info: CheckpointInfo,
    like: TrainState,
    *,
    only: str | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> dict[str, str]:
    """Choose the arrays to read: `{name in the state: name in the checkpoint}`.

    Raises `ValueError` if state and checkpoint differ more than the arguments allow.
    """
    own = to_names(like)
    names_of = rename(info.arrays, renamed)
    prefixes = ("",) if only is None else MODEL
    found = {
        names_of[name]: x
        for name, x in info.arrays.items()
        if name.startswith(prefixes)
    }
    wanted = {name: info_of(x) for name, x in own.items() if name.startswith(prefixes)}
    names = set()
    problems = []
    for name in {**wanted, **found}:
        mine = wanted.get(name)
        other = found.get(name)
        if mine and other and _is_alike(mine, other):
            names.add(name)
            continue
        allowed = new if mine else unused
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
            problem = (
                f"{name}: {mine or 'missing'} in the state, {other or 'missing'} in "
                "the checkpoint"
            )
            if mine and other and _became_whole_number(mine, other):
                problem += " (write the number with a point, such as 1.0)"
            problems.append(problem)
    if problems:
        listed = first_few(problems, most=20, separator="\n  ")
        raise ValueError(
            f"the state does not fit the checkpoint {info.path}.\n  {listed}\nA run "
            "continues only with the model and the optimizer that it began with. To "
            "begin another run, "
            'pass another directory, and read with `restore`: only="model", '
            'renamed={"old.path": "new.path"}, new=["model/head.*"], '
            'unused=["optimizer/*"].'
        )
    for name, x in own.items():
        if name not in names and (lack := lack_of_value(x)):
            raise ValueError(
                f"restore: {name} is not read from the checkpoint, but in `like` it "
                f"{lack}."
            )
    return {new_name: name for name, new_name in names_of.items() if new_name in names}


def _became_whole_number(mine: ArrayInfo, other: ArrayInfo) -> bool:
    """True if a scalar is an integer in the state, and none in the checkpoint."""
    if mine.shape != () or other.shape != ():
        return False
    integers = ("int", "uint")
    return mine.dtype.startswith(integers) and not other.dtype.startswith(integers)


def _is_alike(one: ArrayInfo, other: ArrayInfo) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def read(
    info: CheckpointInfo, like: TrainState, names: Mapping[str, str]
) -> TrainState:
    """Return `like` with the arrays of a checkpoint. `names` is the result of `select`.

    All processes must call it. Raises `DamagedError` if the checkpoint is damaged, and
    `CheckpointError` if it cannot be read.
    """
    own = to_names(like)
    targets: dict[str, jax.ShapeDtypeStruct] = {}
    empty: dict[str, jax.ShapeDtypeStruct] = {}
    for name, saved_name in names.items():
        x = own[name]
        data = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
        # An array of NumPy has no sharding.
        sharding = getattr(x, "sharding", None) or _on_one_device()
        target = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
        if target.size > 0:
            targets[saved_name] = target
        else:
            empty[saved_name] = target
        _check_key(info, saved_name, target, x)
    arrays = load_alike(lambda: _read_arrays(info.path, targets))
    checksums, _ = array_checksums(arrays)
    damaged = [name for name in arrays if checksums[name] != info.arrays[name].checksum]
    if damaged:
        raise DamagedError(
            f"{info.path} is damaged: the checksum of {first_few(damaged, most=1)} is "
            "not the one that was written"
        )
    # An empty array is not saved.
    arrays |= {
        saved_name: jnp.zeros(x.shape, x.dtype, device=x.sharding)
        for saved_name, x in empty.items()
    }
    for name, saved_name in names.items():
        x = arrays[saved_name]
        impl = info.arrays[saved_name].key_impl
        own[name] = x if impl is None else jax.random.wrap_key_data(x, impl=impl)
    return from_names(like, own)


def _check_key(
    info: CheckpointInfo, saved_name: str, data: jax.ShapeDtypeStruct, like: AnyArray
) -> None:
    """Raise `CheckpointFormatError` if the numbers of an array would not become keys
    like those of `like`."""
    impl = info.arrays[saved_name].key_impl
    found = data.dtype
    problem = ""
    if impl is not None:
        try:
            found = jax.eval_shape(
                lambda numbers: jax.random.wrap_key_data(numbers, impl=impl), data
            ).dtype
        except (ValueError, TypeError) as error:
            problem = f" ({error})"
    if found != like.dtype or problem:
        raise CheckpointFormatError(
            f"{info.path} has {saved_name} as {info.arrays[saved_name]} of the kind "
            f"{impl!r}, which does not make {like.dtype}{problem}. It is unchanged. "
            "Register that kind of key, or read it with the version that wrote it: "
            f"{info.versions}"
        )


def read_back(written: CheckpointInfo) -> None:
    """Read the record of a checkpoint that was just written, and its smallest array,
    which is the step. Only one process needs to call it.

    Raises `CheckpointError` if they cannot be read, or are not those that were written.
    """
    target = jax.ShapeDtypeStruct((), jnp.int32, sharding=_on_one_device())
    try:
        record = read_record(written.path)
        arrays = _read_arrays(written.path, {"step": target})
        step = int(jax.device_get(arrays["step"]))
    except (CheckpointError, CheckpointFormatError) as error:
        raise CheckpointError(
            f"{written.path} was written, but cannot be read back: {error}"
        ) from error
    if (record.arrays, step) != (written.arrays, written.step):
        raise CheckpointError(
            f"{written.path} was written, but holds something else: step {step}, not "
            f"{written.step}, with {len(record.arrays)} arrays, not "
            f"{len(written.arrays)}. Does another program write there?"
        )


def _on_one_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _read_arrays(
    path: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, AnyArray]:
    """Read arrays of a checkpoint. Raises as `read` does."""
    if not targets:
        return {}
    try:
        return _read_by_orbax(path, targets)
    except Exception as error:  # the kind of error depends on the damage
        _raise_unless_damage(path, error)
    # The kind of a failure cannot always be told, so look again before it counts as
    # damage.
    try:
        return _read_by_orbax(path, targets)
    except Exception as error:
        _raise_unless_damage(path, error)
        raise DamagedError(f"{path} is damaged: {in_brief(error)}") from error


def _read_by_orbax(
    path: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, AnyArray]:
    import orbax.checkpoint as ocp

    from redco_eqx._checkpoint.handlers import LiteralPath

    # Use only the handler: a checkpointer would wait for the other processes even if
    # one of them has failed.
    arguments = ocp.args.PyTreeRestore(
        item=targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=True,
    )
    return ocp.PyTreeCheckpointHandler().restore(
        LiteralPath(path / "arrays"), args=arguments
    )


def _raise_unless_damage(path: pathlib.Path, error: Exception) -> None:
    """Raise an error if the failure to read says nothing about the checkpoint."""
    if not is_damage(error):
        raise unreadable(path, error) from error
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        raise error
    try:  # the libraries do not always name the cause, but the operating system does
        _open_all(path / "arrays")
    except OSError as cause:
        if not is_damage(cause):
            raise unreadable(path, cause) from error


def _open_all(directory: pathlib.Path) -> None:
    """Open every file below a directory and read its first byte. Raises `OSError` if
    that fails."""

    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(directory, onerror=fail):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                file.read(1)


def rename(names: Collection[str], paths: Mapping[str, str]) -> dict[str, str]:
    """Return `{name in the checkpoint: name in the state}`. `paths` has the changed
    paths of the model, or their beginnings.

    The name of an optimizer's array ends with the path of its leaf, and is renamed with
    it.

    Raises `ValueError` if two names become one, or a path is not in the checkpoint.
    """
    leaves = {}
    matched = set()
    for name in names:
        if not name.startswith(MODEL):
            continue
        _, _, path = name.partition("/")
        leaves[path] = path
        for old in sorted(paths, key=len):  # if several match, the longest counts
            if f"{path}.".startswith(f"{old}."):
                leaves[path] = paths[old] + path[len(old) :]
                matched.add(old)
    if matched != {*paths}:
        raise ValueError(
            f"restore: `renamed` has {first_few(sorted({*paths} - matched))}, but no "
            "path of the model in the checkpoint is or begins with it."
        )
    renamed = {}
    for name in names:
        prefix, _, path = name.partition("/")
        parts = path.split(".")
        # `0.mu.layers.0.weight` ends with the path of a leaf.
        num_ends = len(parts) if prefix == "optimizer" else 1
        ends = [".".join(parts[i:]) for i in range(num_ends)]
        end = next((x for x in ends if x in leaves), "")  # the longest one
        renamed[name] = name.removesuffix(end) + leaves.get(end, "")
    counts = Counter(renamed.values())
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "restore: `renamed` gives two arrays of the checkpoint the name "
            f"{twice[0]}."
        )
    return renamed
