"""`communication`: compiled programs whose collectives are known in closed form, totals, and the table."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx._compiled.communication import Collective, Communication, Total, communication
from redco_eqx._sharding.mesh import AXES, make_mesh


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache() -> Iterator[None]:
    """A program of the cache has the lines of the test that compiled it first."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


X = jnp.ones((8, 8, 8))  # f32, of which each of 2x2x2 devices holds f32[4,4,4]: 256 bytes

LINEAR = eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(fsdp=2, tensor=2)


def compiled(f: Any, mesh: Mesh, *args: Any) -> jax.stages.Compiled:
    """`f` on the parts that the devices hold."""
    spec = P(*AXES)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*(args or (X,))).compile()


def only(found: Communication) -> Collective:
    assert len(found) == 1, found
    return found.collectives[0]


@pytest.mark.parametrize(
    "axes",
    [("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"), AXES],
    ids="-".join,
)
def test_axes_of_an_all_reduce(mesh: Mesh, axes: tuple[str, ...]) -> None:
    found = only(communication(compiled(lambda x: lax.psum(x, axes), mesh), mesh))
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", axes, 2 ** len(axes))
    assert (found.shapes, found.result_bytes) == (("f32[4,4,4]",), 256)
    assert (found.loops, found.count) == ((), 1)
    assert found.operation.endswith("/psum")


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("kind", "f", "result_bytes", "sent_bytes"),
    [
        ("all-reduce", lax.psum, 256, 256),
        ("all-gather", partial(lax.all_gather, tiled=True), 512, 256),
        ("reduce-scatter", partial(lax.psum_scatter, tiled=True), 128, 128),
        ("all-to-all", partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True), 256, 128),
        ("collective-permute", partial(lax.ppermute, perm=[(0, 1), (1, 0)]), 256, 256),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds(mesh: Mesh, axis: str, kind: str, f: Any, result_bytes: int, sent_bytes: int) -> None:
    found = only(communication(compiled(lambda x: f(x, axis), mesh), mesh))
    assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 2)
    assert (found.result_bytes, found.sent_bytes) == (result_bytes, sent_bytes)


def test_devices_are_positions_in_the_mesh() -> None:
    # Were they ids, the groups of "fsdp" would differ along other axes of this mesh.
    devices = np.array(jax.devices())[[3, 0, 6, 1, 7, 5, 2, 4]].reshape(2, 2, 2)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    for axis in AXES:
        program = compiled(partial(lax.psum, axis_name=axis), mesh)
        assert only(communication(program, mesh)).axes == (axis,)


def test_a_ring_around_two_axes(mesh: Mesh) -> None:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    program = compiled(lambda x: lax.ppermute(x, ("data", "tensor"), ring), mesh)
    assert only(communication(program, mesh)).axes == ("data", "tensor")


def test_part_of_an_axis() -> None:
    mesh = make_mesh(tensor=4)
    program = compiled(lambda x: lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]), mesh)
    found = only(communication(program, mesh))
    assert (found.axes, found.group_size) == (("part of tensor",), 2)


def test_axes_of_size_one_are_silent() -> None:
    mesh = make_mesh(tensor=4)
    assert len(communication(compiled(lambda x: lax.psum(x, "fsdp"), mesh), mesh)) == 0
    found = only(communication(compiled(lambda x: lax.psum(x, ("data", "fsdp")), mesh), mesh))
    assert found.axes == ("data",)


def test_combined_results_are_added(mesh: Mesh) -> None:
    def f(x: Any) -> Any:
        a, b = lax.psum((x.sum(0), x[0, :2].astype(jnp.float32)), "fsdp")
        return x + a.sum() + b.sum()

    found = communication(compiled(f, mesh), mesh)
    assert found.total.result_bytes == 4 * 4 * 4 + 2 * 4 * 4
    assert set(only(found).shapes) == {"f32[4,4]", "f32[2,4]"}


def abstract(shape: tuple[int, ...], mesh: Mesh, *spec: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("order", [list(range(8)), [3, 0, 6, 1, 7, 5, 2, 4]], ids=["sorted", "mixed"])
def test_row_parallel_matmul_is_one_all_reduce(order: list[int]) -> None:
    mesh = make_mesh(tensor=4, devices=[jax.devices()[i] for i in order])
    x = abstract((6, 32), mesh, "data")
    up, down = abstract((64, 32), mesh, "tensor"), abstract((32, 64), mesh, None, "tensor")
    program = jax.jit(lambda x, up, down: jnp.tanh(x @ up.T) @ down.T, out_shardings=x.sharding)
    found = only(communication(program.lower(x, up, down).compile(), mesh))
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", ("tensor",), 4)
    assert (found.shapes, found.result_bytes, found.count) == (("f32[3,32]",), 3 * 32 * 4, 1)


def test_scan_over_layers() -> None:
    mesh = make_mesh(tensor=4)
    x = abstract((6, 32), mesh, "data")
    up = abstract((5, 64, 32), mesh, None, "tensor")
    down = abstract((5, 32, 64), mesh, None, None, "tensor")

    def f(x: Any, weights: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w[0].T) @ w[1].T, None

        return lax.scan(layer, x, weights)[0]

    program = jax.jit(f, out_shardings=x.sharding).lower(x, (up, down)).compile()
    found = communication(program, mesh)
    assert found.counts == {("all-reduce", ("tensor",)): 5}
    assert only(found).loops == (5,)
    assert only(found).total_bytes == 5 * 3 * 32 * 4


def repeat(n: int, f: Any) -> Any:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=n)[0]


def reduce(x: Any) -> Any:
    return jnp.sin(lax.psum(x, "tensor"))


def test_loops_multiply(mesh: Mesh) -> None:
    found = only(communication(compiled(repeat(5, reduce), mesh), mesh))
    assert (found.loops, found.count, found.total_bytes) == ((5,), 5, 5 * 256)
    found = communication(compiled(lambda x: reduce(repeat(3, repeat(4, reduce))(x)), mesh), mesh)
    assert sorted(c.loops for c in found) == [(), (3, 4)]
    assert found.counts == {("all-reduce", ("tensor",)): 13}
    found = only(communication(compiled(lambda x: lax.fori_loop(2, 9, lambda i, x: reduce(x), x), mesh), mesh))
    assert found.loops == (7,)


def test_a_loop_of_unknown_length_is_a_lower_bound(mesh: Mesh) -> None:
    def until(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 5, reduce, x)

    found = communication(compiled(until, mesh), mesh)
    assert (only(found).loops, found.total.count, found.total.bound) == ((None,), 1, ">=")
    found = communication(compiled(repeat(3, until), mesh), mesh)
    assert (only(found).loops, found.total.count, found.total.bound) == ((3, None), 3, ">=")


def test_the_branch_with_the_most_bytes_is_an_upper_bound(mesh: Mesh) -> None:
    def f(x: Any) -> Any:
        def small(x: Any) -> Any:
            return x + lax.psum(lax.psum(x[0, 0], "data"), "fsdp")

        return lax.cond(x[0, 0, 0] > 0, small, reduce, x)

    found = communication(compiled(f, mesh), mesh)
    assert (only(found).axes, only(found).conditional) == (("tensor",), True)
    assert (found.total.count, found.total.bound) == (1, "<=")
    found = communication(compiled(repeat(6, f), mesh), mesh)
    assert (only(found).axes, only(found).loops, found.total.bound) == (("tensor",), (6,), "<=")


def test_the_text_and_an_abstract_mesh_will_do(mesh: Mesh) -> None:
    program = compiled(repeat(5, reduce), mesh)
    text = program.as_text()
    assert text is not None
    found = communication(program, mesh)
    assert communication(text, mesh.abstract_mesh) == found
    assert only(found).count == 5


# Source lines.


def line_of(function: Any, offset: int) -> str:
    return f"{__file__}:{inspect.unwrap(function).__code__.co_firstlineno + offset}"


def test_the_source_is_the_line_that_asks(mesh: Mesh) -> None:
    assert only(communication(compiled(repeat(5, reduce), mesh), mesh)).source == line_of(reduce, 1)


def test_the_source_of_a_librarys_layer_is_where_it_is_called_backward_too() -> None:
    mesh = make_mesh(tensor=4)
    x = abstract((6, 32), mesh, "data")
    weight = abstract((32, 32), mesh, None, "tensor")

    def loss(weight: Any, x: Any) -> Any:
        layer = eqx.tree_at(lambda layer: layer.weight, LINEAR, weight)
        return jnp.sin(jax.vmap(layer)(x)).sum()

    shardings = (weight.sharding, x.sharding)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=shardings)
    found = communication(gradient.lower(weight, x).compile(), mesh)
    # The gather is of the input's gradient, which was asked for whole: the compiler adds it, and names no line.
    assert {(c.kind, c.axes, c.is_backward): c.source for c in found} == {
        ("all-reduce", ("tensor",), False): line_of(loss, 2),
        ("all-reduce", ("data",), True): line_of(loss, 2),
        ("all-gather", ("tensor",), True): line_of(loss, 2),
    }


# Refusals.


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (lambda: jax.jit(jnp.sin).lower(X).compile(), ValueError, r"for 1 device\(s\), but the mesh has 8"),
        (lambda: jax.jit(jnp.sin), TypeError, r"is a .*, but must be what Lowered.compile"),
        (
            lambda: jax.jit(jnp.sin).lower(X),
            TypeError,
            r"is a Lowered, but must be what Lowered.compile",
        ),
    ],
    ids=["of other devices", "a function", "lowered"],
)
def test_what_is_not_a_program_for_the_mesh_is_refused(
    mesh: Mesh, program: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        inspect.unwrap(communication)(program(), mesh)  # past the check of types that only tests have


# Totals and the table.


def collective(kind: str, *axes: str, **changes: Any) -> Collective:
    fields = {
        "group_size": 4,
        "shapes": ("f32[256,1024]",),
        "result_bytes": 2**20,
        "loops": (),
        "conditional": False,
        "operation": "jit(f)/x",
        "source": "/home/me/train.py:12",
    }
    return Collective(kind=kind, axes=axes, **{**fields, **changes})


def test_totals_and_table() -> None:
    found = Communication(
        (
            collective("all-gather", "fsdp", loops=(3,), source="/home/me/model.py:5"),
            collective("all-reduce", "tensor", loops=(3, 4)),
            collective("all-reduce", "tensor"),
            collective("all-reduce", "tensor", operation="jit(f)/transpose(jvp())/x"),
            collective("all-reduce", "data", "fsdp", result_bytes=4, source=""),
        )
    )
    assert list(found.counts.items()) == [
        (("all-reduce", ("tensor",)), 14),
        (("all-gather", ("fsdp",)), 3),
        (("all-reduce", ("data", "fsdp")), 1),
    ]
    assert {kind: total.result_bytes for kind, total in found.by_kind.items()} == {
        "all-reduce": 14 * 2**20 + 4,
        "all-gather": 3 * 2**20,
    }
    assert [(axes, total.count) for axes, total in found.by_axes.items()] == [
        (("tensor",), 14),
        (("fsdp",), 3),
        (("data", "fsdp"), 1),
    ]
    assert found.total == Total(18, 17 * 2**20 + 4, 14 * 2**20 * 6 // 4 + 3 * 2**20 * 3 // 4 + 6, "")
    assert str(found).splitlines() == [
        "kind        axes       count     MiB  MiB sent  source",
        "all-reduce  tensor        13  13.000    19.500  train.py:12",
        "all-gather  fsdp           3   3.000     2.250  model.py:5",
        "all-reduce  tensor         1   1.000     1.500  train.py:12 (backward)",
        "all-reduce  data,fsdp      1   0.000     0.000",
        "total                     18  17.000    23.250",
    ]


@pytest.mark.parametrize(
    ("changes", "bound", "notes"),
    [
        ([{}, {}], "", []),
        ([{}, {"loops": (2, None)}], ">=", [">="]),
        ([{}, {"conditional": True}], "<=", ["<="]),
        ([{"loops": (None,)}, {"conditional": True}], "~", [">=", "<="]),
    ],
)
def test_the_table_says_what_is_not_exact(changes: list[dict], bound: str, notes: list[str]) -> None:
    found = Communication(tuple(collective("all-reduce", "tensor", **change) for change in changes))
    assert found.by_kind["all-reduce"].bound == found.total.bound == bound
    _, row, total, *said = str(found).splitlines()
    assert row.split()[2] == total.split()[1] == f"{bound}{found.total.count}"
    assert [line.split()[0] for line in said] == notes


@pytest.mark.parametrize("n", [2, 4, 8])
def test_an_all_reduce_sends_what_its_two_halves_send(n: int) -> None:
    whole = collective("all-reduce", "tensor", group_size=n)
    gather = collective("all-gather", "tensor", group_size=n)
    scatter = collective("reduce-scatter", "tensor", group_size=n, result_bytes=2**20 // n)
    assert whole.sent_bytes == gather.sent_bytes + scatter.sent_bytes


def test_a_program_that_does_not_communicate(mesh: Mesh) -> None:
    found = communication(compiled(jnp.sin, mesh), mesh)
    assert (found.counts, found.total) == ({}, Total(0, 0, 0, ""))
    assert str(found).splitlines()[1].split() == ["total", "0", "0.000", "0.000"]
