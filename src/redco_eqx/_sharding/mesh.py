"""The device mesh, and the layout of a batch on it."""

import contextlib
import contextvars
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from redco_eqx._base.protocols import check_integers, check_positive
from redco_eqx._base.tree import is_key

# Threads for the virtual devices of a CPU.


def give_threads() -> None:
    """Give JAX's CPU client, if it does not exist yet, three threads per virtual
    device.

    By default, the client has one thread per virtual device, or one per core if there
    are more cores. A collective keeps its thread until all devices have reached it, and
    XLA runs independent collectives in any order. So some devices may wait in one
    collective and the others in another, with no thread left to finish either. After 40
    seconds, the process is aborted. A scan over layers alongside the gradient of a
    table is enough to cause this. Three threads per device are enough for three
    collectives at a time; more threads only cost time.

    A value that is already set in the environment is kept. jaxlib 0.10.2 needs this;
    with 0.12.0, the test program ran with one thread per device. No upstream issue is
    known.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    # The older way to set the number, which JAX still accepts.
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    configured = getattr(jax.config, "jax_num_cpu_devices", -1)
    num_devices = max([configured, *map(int, counts)])
    if num_devices > 1:  # XLA reads this when it makes the client
        num_threads = max(3 * num_devices, os.cpu_count() or 1)
        os.environ.setdefault("PJRT_NPROC", str(num_threads))


A = ParamSpec("A")
R = TypeVar("R")

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# From JAX 0.12 on, an `AbstractMesh` has Explicit axes unless it says otherwise.
AXIS_TYPES = (AxisType.Auto,) * len(AXES)


class ShardingWarning(UserWarning):
    """Warns that much of a model, a large array that no rule could split, or a batch is
    whole on every device.

    It also warns if the path rules had to guess.
    """


def make_mesh(
    *,
    tensor: int = 1,
    fsdp: int = 1,
    data: int = -1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Create a mesh with axes `("data", "fsdp", "tensor")`, all of `AxisType.Auto`.

    ```python
    mesh = rx.make_mesh()          # all devices for data
    mesh = rx.make_mesh(tensor=4)  # each layer over four devices, batches over the rest
    mesh = rx.make_mesh(data=2, fsdp=2, tensor=2)
    ```

    On virtual CPU devices, call this function before anything else uses JAX. It then
    gives the devices enough threads, so that they do not wait for one another forever
    (it sets `PJRT_NPROC` in the environment, unless it is already set).

    **Arguments:**

    - `tensor`: the number of devices over which each layer's matrices are split
        (Megatron).
    - `fsdp`: the number of devices over which parameters and optimizer state are split,
        and gathered for use (ZeRO). Each of these devices takes a different part of the
        batch.
    - `data`: the number of replicas; -1 takes all remaining devices.
    - `devices`: the devices to use, by default `jax.devices()`. If you set `data` and
        fewer devices are needed, the first ones are used (with one process only).

    **Raises:**

    `TypeError` or `ValueError` if the sizes are not positive, need more devices than
    there are, or do not divide their number.
    """
    give_threads()
    devices = list(jax.devices() if devices is None else devices)
    check_integers("make_mesh", tensor=tensor, fsdp=fsdp, data=data)
    check_positive(
        "make_mesh", tensor=tensor, fsdp=fsdp, data=None if data == -1 else data
    )
    inner = fsdp * tensor
    found = "there are none"
    if devices:
        found = f"there are {len(devices)} ({devices[0].platform})"
    num_needed = f"a multiple of {inner}" if data == -1 else data * inner
    if data == -1 and len(devices) % inner == 0:
        data = len(devices) // inner
    # With several processes, those left out may be a whole process.
    leaves_some_out = jax.process_count() > 1 and data * inner < len(devices)
    if not 0 < data * inner <= len(devices) or leaves_some_out:
        raise ValueError(
            f"make_mesh: data={data}, fsdp={fsdp}, tensor={tensor} needs {num_needed} "
            f"devices, but {found}. With several processes, use all devices, or pass "
            "devices=. To make virtual devices on CPU, call "
            'jax.config.update("jax_num_cpu_devices", N) before the first use of JAX.'
        )
    devices = devices[: data * inner]
    # Do not use `jax.make_mesh`, which refuses shapes that split a torus axis, such as
    # (1, 8, 8) on 4 x 4 x 4.
    grid = mesh_utils.create_device_mesh(
        (data, fsdp, tensor), devices, allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=AXIS_TYPES)


def check_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raise `TypeError` or `ValueError` if `mesh` is not a mesh, or not one for the
    layout of a model."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, but is a {type(mesh).__name__}. Use "
            "make_mesh(tensor=...). The model comes before the mesh."
        )
    if not any(axis in mesh.shape for axis in AXES):
        raise ValueError(
            f"mesh has axes {tuple(mesh.axis_names)}, but at least one of {AXES} is "
            f"needed. Use {_with_known_names(mesh)}, with such a name for each of your "
            "axes."
        )
    types = zip(mesh.axis_names, mesh.axis_types)
    explicit = [axis for axis, kind in types if kind != AxisType.Auto]
    if explicit:
        remedy = "jax.sharding.Mesh(mesh.devices, mesh.axis_names)"
        if isinstance(mesh, AbstractMesh):
            remedy = (
                f"jax.sharding.AbstractMesh({mesh.axis_sizes}, {mesh.axis_names}, "
                f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})"
            )
        raise ValueError(
            f"mesh axes {tuple(explicit)} are not of AxisType.Auto (jax.make_mesh, and "
            "AbstractMesh from JAX 0.12 on, make them Explicit by default), but here "
            f"the compiler propagates layouts. Use {remedy}."
        )


def check_axis_names(
    where: str, mesh: Mesh | AbstractMesh, specs: Iterable[PartitionSpec]
) -> None:
    """Raise `ValueError` if the mesh has an axis with several devices that is neither
    one of `AXES` nor in one of the specs: every array would be whole on each device
    along it.
    """
    known = {*AXES, *(axis for spec in specs for axis in axes_of(spec))}
    foreign = [
        axis for axis, size in mesh.shape.items() if size > 1 and axis not in known
    ]
    if foreign:
        axis = foreign[0]
        raise ValueError(
            f"{where}: mesh axis {axis!r} of size {mesh.shape[axis]} is none of "
            f"{AXES}, and no array is split over it, so each would be copied along it. "
            f"Use {_with_known_names(mesh)}. If the axis has a purpose of its own, "
            f"name it in overrides: [(pattern, PartitionSpec({axis!r}))]."
        )


FOR_TENSOR = ("model", "mp", "tp", "mdl")
"""Common names for the axis that is `tensor` here."""


def _with_known_names(mesh: Mesh | AbstractMesh) -> str:
    """The line of code that gives the axes of this mesh names of `AXES`, and makes them
    Auto."""
    free = [axis for axis in ("data", "tensor", "fsdp") if axis not in mesh.shape]
    foreign = [axis for axis in mesh.axis_names if axis not in AXES]
    if len(foreign) > len(free):
        return f"a mesh of at most the axes {AXES}, as by make_mesh"
    names = {axis: axis for axis in mesh.axis_names}
    # Those whose names tell what they are for come first.
    for axis in sorted(foreign, key=lambda axis: axis not in FOR_TENSOR):
        new = "tensor" if axis in FOR_TENSOR and "tensor" in free else free[0]
        free.remove(new)
        names[axis] = new
    quoted = ", ".join(f'"{axis}"' for axis in names.values())
    comma = "," if len(names) == 1 else ""
    return f"jax.sharding.Mesh(mesh.devices, ({quoted}{comma}))"


def axes_in(entry: Any) -> tuple[str, ...]:
    """The axes in one entry of a spec; none in one that leaves the dim open."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def axis_size(mesh: Mesh | AbstractMesh, axes: str | Sequence[str] | None) -> int:
    """The number of shards that an entry of a spec makes. An axis that the mesh lacks
    counts as size 1."""
    return math.prod(mesh.shape.get(name, 1) for name in axes_in(axes))


def tensor_size(mesh: AbstractMesh | None) -> int:
    """The number of shards over `tensor`; 1 without a mesh."""
    return 1 if mesh is None else axis_size(mesh, "tensor")


def misfit(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> str:
    """Describe why a spec does not fit arrays of this shape; empty if it fits."""
    if len(spec) > len(shape):
        return f"the spec has {len(spec)} entries for {len(shape)} dims."
    try:
        NamedSharding(mesh, spec)
    except Exception as error:  # for a repeated axis JAX raises no ValueError
        return str(error)
    for dim, (size, axes) in enumerate(zip(shape, spec)):
        if size % axis_size(mesh, axes):
            return (
                f"dim {dim} of size {size} does not divide into "
                f"{axis_size(mesh, axes)} parts."
            )
    return ""


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a batch: its leading dim is split over `("data", "fsdp")`,
    and its other dims are whole.

    ```python
    batch = jax.device_put(batch, rx.batch_sharding(mesh))
    ```
    """
    check_mesh(mesh)
    return NamedSharding(mesh, PartitionSpec(row_axes(mesh) or None))


# The axes over which the program that is being traced will be mapped.
_mapped: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "redco_eqx_mapped_axes", default=()
)


@contextlib.contextmanager
def mapped_over(axis: str) -> Iterator[None]:
    """Trace a program that the caller then maps by `vmap(spmd_axis_name=axis)`.

    Inside, this axis does not split the rows of a batch: the program sees those of one
    shard. JAX refuses to map a `shard_map` whose specs name the axis.
    """
    token = _mapped.set((*_mapped.get(), axis))
    try:
        yield
    finally:
        _mapped.reset(token)


def mapped_axes() -> tuple[str, ...]:
    """The axes of the [`mapped_over`][]s around the current trace."""
    return _mapped.get()


def row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of the mesh that split the rows of a batch."""
    free = (axis for axis in BATCH_AXES if axis not in mapped_axes())
    return tuple(axis for axis in free if axis in mesh.shape)


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which the leading dim of a batch is split."""
    return axis_size(mesh, row_axes(mesh))


def batch_axes(mesh: Mesh | AbstractMesh, num_rows: int) -> tuple[str, ...] | None:
    """The axes that split a batch of this size: all batch axes, or `None` if they do
    not divide it."""
    axes = row_axes(mesh)
    if not axes or num_rows % axis_size(mesh, axes):
        return None
    return axes


def axes_of(spec: PartitionSpec) -> list[str]:
    """Every axis that a spec names."""
    names: list[str] = []
    for entry in spec:
        names += axes_in(entry)
    return names


STORED = ("fsdp", "tensor")
"""An entry of a spec: the dim is split over both axes where the array is stored, and
whole for use.

If `tensor` is alone in an entry, or before `fsdp`, it splits the array for use. Only
this library gives the order this meaning. In JAX, it is an order of devices.
"""


def stored_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes that split an array only where it is stored: `fsdp`, and any `tensor`
    after it in an entry."""
    if STORED in tuple(spec):
        return STORED
    if "fsdp" in axes_of(spec):
        return ("fsdp",)
    return ()


def as_stored(
    spec: PartitionSpec, is_stored: bool, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Restore the spec of an array that a program returned, with the entry that says
    whether `tensor` splits it for use.

    If there are several devices along `fsdp`, the spec already says this.
    """
    if axis_size(mesh, "fsdp") > 1:
        return spec
    tensor = STORED if is_stored else "tensor"
    return PartitionSpec(
        *(tensor if entry in (STORED, "tensor") else entry for entry in spec)
    )


def for_use(spec: PartitionSpec) -> PartitionSpec:
    """The spec of an array that is gathered over its `stored_axes`."""
    stored = stored_axes(spec)
    entries = []
    for entry in spec:
        entries.append(tuple(axis for axis in axes_in(entry) if axis not in stored))
    return PartitionSpec(*entries)


def tensor_dim(spec: PartitionSpec) -> int | None:
    """The dim that `tensor` splits for use; `None` if it splits none."""
    for dim, entry in enumerate(for_use(spec)):
        if "tensor" in axes_in(entry):
            return dim
    return None


def trimmed(spec: PartitionSpec) -> PartitionSpec:
    """The canonical form of a spec, without the `None`s that compiled programs put at
    the end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def one_device_mesh(device: Any) -> Mesh:
    """The mesh of size one for a model that was never placed."""
    return Mesh(np.array([[[device]]]), AXES, axis_types=AXIS_TYPES)


def put_global(x: ArrayLike, sharding: NamedSharding) -> Array:
    """Make a global array of `x`, laid out by `sharding`.

    Every process must have the same whole `x`, or `x` must already be a global array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        # `jax.device_put` takes no keys.
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if isinstance(x, jax.Array) and is_key(x):
        # The data of keys has one more dim, which this spec leaves whole.
        data = put_global(
            jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec)
        )
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return from_callback(host.shape, sharding, lambda index: host[index])


def from_callback(
    shape: tuple[int, ...], sharding: NamedSharding, callback: Callable[[Any], Any]
) -> Array:
    """Call `jax.make_array_from_callback`, also under a transfer guard, which takes it
    for an implicit transfer."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, callback)


def in_own_context(function: Callable[A, R]) -> Callable[A, R]:
    """Run `function` as if `jax.set_mesh` had set no mesh, or the one that the function
    works on.

    The function works on the mesh among its arguments, or else on the mesh of the first
    array among them. If that mesh is set, it stays set: a loss may name its axes.
    Inside a `shard_map` nothing changes.
    """

    @functools.wraps(function)
    def call(*args: A.args, **kwargs: A.kwargs) -> R:
        with context_of(args, kwargs):
            return function(*args, **kwargs)

    return call


def _mesh_on(x: Any) -> Any:
    """Return the mesh of an array. This also works during tracing."""
    if isinstance(x, jax.Array):
        # A traced array has no `sharding`, but its type has one.
        sharding = jax.typeof(x).sharding
    else:
        sharding = getattr(x, "sharding", None)
    return getattr(sharding, "mesh", None)


def traced_mesh(*trees: PyTree) -> AbstractMesh | None:
    """The mesh of the first array that has one, if its axes are all Auto; otherwise
    `None`.

    Under a trace, an array no longer knows its spec. It does know its mesh, if it was
    committed to one (or is a `ShapeDtypeStruct` with a sharding). `None` means one
    device, or the inside of a `shard_map`.
    """
    for x in jax.tree.leaves(trees):
        if not isinstance(x, jax.Array):
            continue
        mesh: AbstractMesh = jax.typeof(x).sharding.mesh
        if mesh.empty:
            continue
        is_known = any(axis in mesh.shape for axis in AXES)
        is_auto = set(mesh.axis_types) == {AxisType.Auto}
        return mesh if is_known and is_auto else None
    return None


def _own_mesh(trees: Any) -> AbstractMesh | None:
    """The first mesh among some trees, or else the mesh of the first array that has
    one."""
    leaves = jax.tree.leaves(trees)
    own = [x for x in leaves if isinstance(x, Mesh | AbstractMesh)]
    for mesh in own or map(_mesh_on, leaves):
        if mesh is not None and not mesh.empty:
            return mesh.abstract_mesh
    return None


@contextlib.contextmanager
def context_of(*trees: Any) -> Iterator[None]:
    """Unset the current mesh while the context is active.

    The mesh stays set if it is the first mesh among `trees`, or else the mesh of the
    first array that has one. It also stays set if the arrays are on no mesh.

    Raises `ValueError` under a `jit`, because there the mesh cannot be unset.
    """
    found = jax.sharding.get_abstract_mesh()
    mesh = None
    if not found.empty and not found.manual_axes:
        mesh = _own_mesh(trees)
    if mesh is None or mesh == found:
        yield
        return
    try:
        unset: Any = jax.set_mesh(None)
    except ValueError:
        raise ValueError(
            "this jit runs under jax.set_mesh with a mesh whose axes are "
            f"{dict(found.shape)}, but the state lies on one whose axes are "
            f"{dict(mesh.shape)}. Call jit_step in place of jax.jit, or call the "
            "jitted function outside of that jax.set_mesh."
        ) from None
    with unset:
        yield
