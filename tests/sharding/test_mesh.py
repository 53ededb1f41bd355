"""`make_mesh`, `batch_sharding`, and the meshes that are refused."""

import math
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import batch_sharding, make_mesh
from redco_eqx._sharding.mesh import (
    AXES,
    axis_size,
    check_mesh,
    num_batch_shards,
    one_device_mesh,
    put_global,
    replicated,
)

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
        assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()[: math.prod(shape)]}, sizes
        check_mesh(mesh)


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[2:6]
    mesh = make_mesh(tensor=2, devices=devices)
    assert mesh.devices.shape == (2, 1, 2)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    one = make_mesh(data=1, devices=devices)
    assert one.devices.item() == devices[0]
    assert one_device_mesh(devices[0]) == one


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"tensor": 0}, "tensor=0"),
    ({"fsdp": -2}, "fsdp=-2"),
    ({"data": 0}, "data=0"),
    ({"data": -2}, "data=-2"),
    ({"tensor": 16}, "tensor=16 needs 16 devices, but there are 8"),
    ({"data": 4, "tensor": 4}, "data=4, fsdp=1, tensor=4 needs 16 devices, but there are 8"),
    ({"tensor": 3}, r"fsdp \* tensor = 3 must divide the number of devices, but there are 8"),
    ({"tensor": 3, "fsdp": 2}, r"fsdp \* tensor = 6 must divide"),
    ({"devices": []}, "there are none"),
    ({"tensor": 9}, r"jax\.config\.update.*jax_num_cpu_devices"),
]


def test_sizes_that_do_not_fit_are_refused():
    for sizes, message in UNFIT:
        with pytest.raises(ValueError, match=message):
            make_mesh(**sizes)


# Which meshes are taken.


@pytest.mark.parametrize("kind", ["concrete", "abstract"])
def test_explicit_axes_are_refused_with_the_fix(kind):
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=types)
    mesh = mesh if kind == "concrete" else mesh.abstract_mesh
    with pytest.raises(ValueError, match=r"mesh axes \('tensor',\) are not of AxisType.Auto") as error:
        check_mesh(mesh)
    if isinstance(mesh, Mesh):
        assert "make_mesh(mesh=mesh)" in str(error.value)
        check_mesh(make_mesh(mesh=mesh))
    else:
        assert "axis_types=(AxisType.Auto,) * number_of_axes" in str(error.value)
    with pytest.raises(ValueError, match=r"AxisType\.Auto"):
        batch_sharding(mesh)


@pytest.mark.parametrize("axes", [("x",), ("dp", "tp")])
def test_foreign_axes_are_refused_with_the_fix(axes):
    mesh = jax.make_mesh((8,) + (1,) * (len(axes) - 1), axes, axis_types=(AxisType.Auto,) * len(axes))
    with pytest.raises(ValueError, match=r"at least one of \('data', 'fsdp', 'tensor'\) is needed") as error:
        check_mesh(mesh)
    assert repr(axes) in str(error.value)
    names = {("x",): '("data",)', ("dp", "tp"): '("data", "tensor")'}[axes]
    assert f"make_mesh(mesh=mesh, names={names})" in str(error.value)


@pytest.mark.parametrize(
    ("axes", "spec", "shards"),
    [
        (("data",), P(("data",)), 4),
        (("tensor",), P(None), 1),
        (("fsdp", "other"), P(("fsdp",)), 4),
        (("tensor", "data"), P(("data",)), 2),
    ],
)
def test_some_of_the_axes_are_enough(axes, spec, shards):
    mesh = AbstractMesh((4, 2)[: len(axes)], axes, axis_types=(AxisType.Auto,) * len(axes))
    check_mesh(mesh)
    assert num_batch_shards(mesh) == shards
    assert batch_sharding(mesh).spec == spec


# Sizes of axes.


def test_a_missing_axis_is_of_size_one():
    mesh = jax.make_mesh((2, 4), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    assert axis_size(mesh, None) == 1
    assert axis_size(mesh, ()) == 1
    assert axis_size(mesh, "tensor") == 1
    assert axis_size(mesh, "data") == 2
    assert axis_size(mesh, ("data", "fsdp")) == 2
    assert axis_size(mesh, ("data", "other", "tensor")) == 8
    assert axis_size(mesh.abstract_mesh, ("data", "other")) == 8


# How a batch lies.


@pytest.mark.parametrize("name", ["one", "fsdp8", "2x2x2", "data2xtensor4"])
def test_a_batch_is_split_over_data_and_fsdp_only(name):
    mesh = helpers.mesh_of(name)
    shards = num_batch_shards(mesh)
    assert shards * mesh.shape["tensor"] == mesh.size
    x = jax.device_put(np.arange(16 * 3).reshape(16, 3), batch_sharding(mesh))
    assert {shard.data.shape for shard in x.addressable_shards} == {(16 // shards, 3)}
    assert len({shard.index[0].start for shard in x.addressable_shards}) == shards


# Placing.


def test_put_keeps_values_and_takes_keys():
    mesh = make_mesh(tensor=2, fsdp=2)
    x, key = np.arange(64.0, dtype=np.float32).reshape(8, 8), jax.random.key(3)
    for spec in (P(), P("tensor"), P(None, ("data", "fsdp"))):
        for value in (x, jnp.asarray(x)):
            result = put_global(value, NamedSharding(mesh, spec))
            assert result.sharding == NamedSharding(mesh, spec)
            np.testing.assert_array_equal(result, x)
    result = put_global(key, replicated(mesh))
    assert len(result.devices()) == 8
    helpers.assert_identical(result, key)


# A mesh of the user's own.


@pytest.mark.parametrize(
    ("shape", "axes", "names", "expected"),
    [
        ((8,), ("data",), None, (8, 1, 1)),
        ((2, 4), ("dp", "tp"), ("data", "tensor"), (2, 1, 4)),
        ((4, 2), ("tp", "dp"), ("tensor", "data"), (2, 1, 4)),
        ((2, 2, 2), ("pod", "model", "dp"), ("data", "tensor", "data"), (4, 1, 2)),
        ((2, 4), ("x", "y"), ("fsdp", "fsdp"), (1, 8, 1)),
    ],
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_ones_own_keeps_each_device_in_its_place(shape, axes, names, expected, kind):
    own = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    mesh = make_mesh(mesh=own, names=names)
    check_mesh(mesh)
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, expected))
    for place, device in np.ndenumerate(own.devices):
        # Where it lies along each axis: axes of one name count together, the first of them slowest.
        along = dict.fromkeys(AXES, 0)
        for axis, index, size in zip(names or axes, place, shape):
            along[axis] = along[axis] * size + index
        assert mesh.devices[tuple(along.values())] == device


def test_what_is_no_name_of_an_axis_is_refused():
    own = jax.make_mesh((2, 4), ("dp", "tp"))
    for names in (None, ("data",), ("data", "tp"), ("data", "tensor", "fsdp")):
        with pytest.raises(ValueError, match=r"has axes \('dp', 'tp'\), each of which needs one of the names"):
            make_mesh(mesh=own, names=names)
    with pytest.raises(ValueError, match=r"Leave out tensor, fsdp, data, devices"):
        make_mesh(mesh=own, names=("data", "tensor"), tensor=4)
    with pytest.raises(ValueError, match=r"but mesh= is missing"):
        make_mesh(names=("data", "tensor"))
