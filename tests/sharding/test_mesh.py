"""`make_mesh`, `batch_sharding`, and the meshes that are refused."""

import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx import batch_sharding, make_mesh
from redco_eqx._sharding import mesh as meshes
from redco_eqx._sharding.mesh import AXES, check_mesh

SIZES = [
    pytest.param({}, (8, 1, 1), id="none"),
    pytest.param({"fsdp": 8}, (1, 8, 1), id="fsdp"),
    pytest.param({"tensor": 4}, (2, 1, 4), id="tensor"),
    pytest.param({"tensor": 2, "fsdp": 2, "data": 2}, (2, 2, 2), id="all"),
    pytest.param({"data": 1}, (1, 1, 1), id="data"),
    pytest.param({"tensor": 3, "data": 2}, (2, 1, 3), id="less_than_all_devices"),
]


@pytest.mark.parametrize(("sizes", "shape"), SIZES)
def test_sizes(sizes: dict[str, Any], shape: tuple[int, ...]):
    mesh = make_mesh(**sizes)
    assert mesh.devices.shape == shape
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    # The first devices, each once.
    assert {d.id for d in mesh.devices.flat} == {
        d.id for d in jax.devices()[: math.prod(shape)]
    }
    check_mesh(mesh)


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[2:6]
    mesh = make_mesh(tensor=2, devices=devices)
    assert mesh.devices.shape == (2, 1, 2)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    one = make_mesh(data=1, devices=devices)
    assert one.devices.item() == devices[0]
    assert meshes.one_device_mesh(devices[0]) == one


UNFIT = [
    pytest.param({"tensor": 0}, "tensor=0", id="zero"),
    pytest.param({"data": -2}, "data=-2", id="negative"),
    pytest.param(
        {"tensor": 16},
        "tensor=16 needs a multiple of 16 devices, but there are 8",
        id="too_large",
    ),
    pytest.param(
        {"data": 4, "tensor": 4},
        "data=4, fsdp=1, tensor=4 needs 16 devices, but there are 8",
        id="two_too_large",
    ),
    pytest.param(
        {"tensor": 3},
        "tensor=3 needs a multiple of 3 devices, but there are 8",
        id="indivisible",
    ),
    pytest.param({"devices": []}, "there are none", id="no_devices"),
    pytest.param(
        {"tensor": 9}, r"jax\.config\.update.*jax_num_cpu_devices", id="how_to_get_more"
    ),
]


@pytest.mark.parametrize(("arguments", "message"), UNFIT)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_mesh(**arguments)


# Which meshes are taken.


def own_mesh(shape, axes, kind=AxisType.Auto):
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def explicit_mesh():
    return jax.make_mesh(
        (2, 4), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )


@pytest.mark.parametrize("is_abstract", [False, True], ids=["devices", "abstract"])
def test_the_fix_of_explicit_axes_is_taken(is_abstract):
    explicit = explicit_mesh()
    mesh = explicit.abstract_mesh if is_abstract else explicit
    with pytest.raises(ValueError, match="Explicit by default") as error:
        check_mesh(mesh)
    _, _, remedy = str(error.value).partition("Use ")
    fixed = eval(remedy.removesuffix("."), {"jax": jax, "mesh": mesh})
    check_mesh(fixed)
    assert fixed.shape == mesh.shape


OF_EXPLICIT = "mesh axes ('tensor',) are not of AxisType.Auto"
OF_FOREIGN = f"at least one of {AXES} is needed"
# Makes a mesh; words of its refusal.
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "explicit": (explicit_mesh, (OF_EXPLICIT, "Mesh(mesh.devices, mesh.axis_names)")),
    "abstract_and_explicit": (
        lambda: explicit_mesh().abstract_mesh,
        (OF_EXPLICIT, "axis_types=(jax.sharding.AxisType.Auto,) * 2"),
    ),
    "one_other_name": (
        lambda: own_mesh((8,), ("x",)),
        (OF_FOREIGN, "('x',)", "Mesh(mesh.devices, "),
    ),
    "two_other_names": (
        lambda: own_mesh((8, 1), ("dp", "tp")),
        (OF_FOREIGN, "('dp', 'tp')", 'Mesh(mesh.devices, ("data", "tensor"))'),
    ),
}


@pytest.mark.parametrize("refuses", [check_mesh, batch_sharding])
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=list(REFUSED))
def test_meshes_that_are_refused_are_so_with_the_fix(make, words, refuses):
    with pytest.raises(ValueError, match="mesh") as error:
        refuses(make())
    assert [word for word in words if word not in str(error.value)] == []


# The axes of a mesh, and the names that they get.
RENAMED = {
    ("data", "model"): ("data", "tensor"),
    ("model", "data"): ("tensor", "data"),
    ("x", "tensor"): ("data", "tensor"),
    ("mp", "dp", "fsdp"): ("tensor", "data", "fsdp"),
    ("fsdp", "other"): ("fsdp", "data"),
}
MODEL = eqx.nn.MLP(16, 16, 32, depth=2, key=jax.random.key(0))
REFUSE: dict[str, Callable[..., Any]] = {
    "shard_rules": lambda mesh, **options: rx.shard_rules(MODEL, mesh, **options),
    "explain": lambda mesh, **options: rx.explain(MODEL, mesh, **options),
    "init_model": lambda mesh, **options: rx.init_model(
        lambda key: MODEL, mesh, key=jax.random.key(0), **options
    ),
}


@pytest.mark.parametrize("axes", RENAMED, ids="-".join)
@pytest.mark.parametrize("function", REFUSE)
def test_an_axis_along_which_all_would_be_copied_is_refused_with_the_fix(
    function: str, axes: tuple[str, ...]
):
    mesh = own_mesh((2,) * len(axes), axes)
    with pytest.raises(ValueError, match="is none of") as error:
        REFUSE[function](mesh)
    (line,) = re.findall(r"Use (jax\.sharding\.Mesh\(.*?\)\))\.", str(error.value))
    fixed = eval(line)
    assert fixed.axis_names == RENAMED[axes]
    assert (fixed.devices == mesh.devices).all()
    rx.shard_rules(MODEL, fixed)


def test_more_axes_than_there_are_names_cannot_all_be_renamed():
    mesh = own_mesh((2, 2, 2, 1), ("pipe", "table", "tensor", "data"))
    with pytest.raises(ValueError, match=r"Use a mesh of at most the axes \('data'"):
        rx.shard_rules(MODEL, mesh)


@pytest.mark.parametrize("function", REFUSE)
def test_an_axis_of_ones_own_is_taken_if_an_override_names_it(function: str):
    mesh = own_mesh((2, 2, 2), ("data", "tensor", "table"))
    with pytest.raises(ValueError, match=r"mesh axis 'table' of size 2"):
        REFUSE[function](mesh, overrides=[("layers.0.weight", P("tensor"))])
    REFUSE[function](mesh, overrides=[("layers.0.weight", P("tensor", "table"))])


def test_an_axis_of_one_device_may_have_any_name():
    mesh = own_mesh((2, 4, 1), ("data", "tensor", "table"))
    assert rx.shard_rules(MODEL, mesh).layers[0].weight.spec == P("tensor")


@pytest.mark.parametrize(
    ("axes", "spec", "shards"),
    [
        (("data",), P(("data",)), 4),
        (("tensor",), P(None), 1),
        (("fsdp", "other"), P(("fsdp",)), 4),
        (("tensor", "data"), P(("data",)), 2),
        (("data", "fsdp"), P(("data", "fsdp")), 8),
    ],
    ids=["data", "tensor", "fsdp_and_other", "tensor_and_data", "data_and_fsdp"],
)
def test_some_of_the_axes_are_enough(axes, spec, shards):
    mesh = AbstractMesh(
        (4, 2)[: len(axes)], axes, axis_types=(AxisType.Auto,) * len(axes)
    )
    check_mesh(mesh)
    assert meshes.num_batch_shards(mesh) == shards
    assert batch_sharding(mesh).spec == spec


# Sizes of axes.


def test_a_missing_axis_is_of_size_one():
    mesh = own_mesh((2, 4), ("data", "other"))
    sizes = {
        None: 1,
        (): 1,
        "tensor": 1,
        "data": 2,
        ("data", "fsdp"): 2,
        ("data", "other", "tensor"): 8,
    }
    assert {axes: meshes.axis_size(mesh, axes) for axes in sizes} == sizes
    assert {axes: meshes.axis_size(mesh.abstract_mesh, axes) for axes in sizes} == sizes
