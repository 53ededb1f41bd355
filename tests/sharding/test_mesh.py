"""`make_mesh`, `batch_sharding`, and the meshes that are refused."""

import math
from typing import Any

import jax
import pytest
from helpers import assert_refused
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from redco_eqx import batch_sharding, make_mesh
from redco_eqx._sharding import mesh as meshes
from redco_eqx._sharding.mesh import AXES, check_mesh

SIZES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (8, 1, 1)),
    ({"fsdp": 8}, (1, 8, 1)),
    ({"tensor": 4}, (2, 1, 4)),
    ({"tensor": 2, "fsdp": 2, "data": 2}, (2, 2, 2)),
    ({"data": 1}, (1, 1, 1)),
    ({"tensor": 3, "data": 2}, (2, 1, 3)),
]


def test_sizes():
    for sizes, shape in SIZES:
        mesh = make_mesh(**sizes)
        assert mesh.devices.shape == shape, sizes
        assert mesh.axis_names == AXES
        assert set(mesh.axis_types) == {AxisType.Auto}
        # The first devices, each once.
        assert {d.id for d in mesh.devices.flat} == {
            d.id for d in jax.devices()[: math.prod(shape)]
        }, sizes
        check_mesh(mesh)


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[2:6]
    mesh = make_mesh(tensor=2, devices=devices)
    assert mesh.devices.shape == (2, 1, 2)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    one = make_mesh(data=1, devices=devices)
    assert one.devices.item() == devices[0]
    assert meshes.one_device_mesh(devices[0]) == one


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"tensor": 0}, "tensor=0"),
    ({"data": -2}, "data=-2"),
    ({"tensor": 16}, "tensor=16 needs a multiple of 16 devices, but there are 8"),
    (
        {"data": 4, "tensor": 4},
        "data=4, fsdp=1, tensor=4 needs 16 devices, but there are 8",
    ),
    ({"tensor": 3}, "tensor=3 needs a multiple of 3 devices, but there are 8"),
    ({"devices": []}, "there are none"),
    ({"tensor": 9}, r"jax\.config\.update.*jax_num_cpu_devices"),
]


def test_sizes_that_do_not_fit_and_what_is_no_name_of_an_axis_are_refused():
    assert_refused(lambda arguments: make_mesh(**arguments), UNFIT)


# Which meshes are taken.


def own_mesh(shape, axes, kind=AxisType.Auto):
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def test_meshes_that_are_refused_are_so_with_the_fix():
    explicit = jax.make_mesh(
        (2, 4), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )
    check_mesh(Mesh(explicit.devices, explicit.axis_names))
    of_explicit = "mesh axes ('tensor',) are not of AxisType.Auto"
    of_foreign = f"at least one of {AXES} is needed"
    for mesh, *words in (
        (explicit, of_explicit, "Mesh(mesh.devices, mesh.axis_names)"),
        (
            explicit.abstract_mesh,
            of_explicit,
            "axis_types=(AxisType.Auto,) * number_of_axes",
        ),
        (own_mesh((8,), ("x",)), of_foreign, "('x',)", "Mesh(mesh.devices, "),
        (
            own_mesh((8, 1), ("dp", "tp")),
            of_foreign,
            "('dp', 'tp')",
            'Mesh(mesh.devices, ("data", "tensor"))',
        ),
    ):
        for refuses in (check_mesh, batch_sharding):
            with pytest.raises(ValueError, match="mesh") as error:
                refuses(mesh)
            assert [word for word in words if word not in str(error.value)] == [], mesh


def test_some_of_the_axes_are_enough():
    for axes, spec, shards in (
        (("data",), P(("data",)), 4),
        (("tensor",), P(None), 1),
        (("fsdp", "other"), P(("fsdp",)), 4),
        (("tensor", "data"), P(("data",)), 2),
        (("data", "fsdp"), P(("data", "fsdp")), 8),
    ):
        mesh = AbstractMesh(
            (4, 2)[: len(axes)], axes, axis_types=(AxisType.Auto,) * len(axes)
        )
        check_mesh(mesh)
        assert meshes.num_batch_shards(mesh) == shards, axes
        assert batch_sharding(mesh).spec == spec, axes


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
