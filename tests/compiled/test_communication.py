"""`communication`: compiled programs whose collectives are known in closed form,
totals, and the table."""

import dataclasses
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

from redco_eqx._compiled.communication import (
    Collective,
    Communication,
    Total,
    communication,
)
from redco_eqx._sharding.mesh import AXES, make_mesh


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache() -> Iterator[None]:
    """A program of the cache has the lines of the test that compiled it first."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


MESH = make_mesh(fsdp=2, tensor=2)
# f32, of which each of 2x2x2 devices holds f32[4,4,4]: 256 bytes.
X = jnp.ones((8, 8, 8))
LINEAR = eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0))


def compiled(f: Any, mesh: Mesh = MESH) -> jax.stages.Compiled:
    """`f` on the parts that the devices hold."""
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES), check_vma=False
    )
    return jax.jit(mapped).lower(X).compile()


def only(found: Communication) -> Collective:
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    "order", [list(range(8)), [3, 0, 6, 1, 7, 5, 2, 4]], ids=["sorted", "mixed"]
)
def test_kinds_axes_and_bytes(order: list[int]) -> None:
    """Devices are positions in the mesh: were they ids, groups would differ along other
    axes if mixed."""
    mesh = Mesh(
        np.array(jax.devices())[order].reshape(2, 2, 2),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
    )
    ring = [(i, (i + 1) % 4) for i in range(4)]
    swap = [(0, 1), (1, 0)]
    transpose = partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True)
    cases: list[tuple[Any, Any, str, int, int]] = [
        (lax.psum, ("data",), "all-reduce", 256, 256),
        (lax.psum, ("data", "tensor"), "all-reduce", 256, 384),
        (lax.psum, AXES, "all-reduce", 256, 448),
        (partial(lax.all_gather, tiled=True), ("fsdp",), "all-gather", 512, 256),
        (partial(lax.psum_scatter, tiled=True), ("fsdp",), "reduce-scatter", 128, 128),
        (transpose, ("tensor",), "all-to-all", 256, 128),
        (partial(lax.ppermute, perm=swap), ("tensor",), "collective-permute", 256, 256),
        (
            partial(lax.ppermute, perm=ring),
            ("data", "tensor"),
            "collective-permute",
            256,
            256,
        ),
    ]
    for f, axes, kind, result_bytes, sent_bytes in cases:
        found = only(
            communication(compiled(lambda x, f=f, axes=axes: f(x, axes), mesh), mesh)
        )
        group_size = 2 ** len(axes) if kind != "collective-permute" else 2
        assert (found.kind, found.axes, found.group_size) == (kind, axes, group_size)
        assert (found.result_bytes, found.sent_bytes) == (result_bytes, sent_bytes), (
            kind,
            axes,
        )
        assert (found.loops, found.count) == ((), 1)


def test_axes_of_size_one() -> None:
    mesh = make_mesh(tensor=4)
    found = only(
        communication(compiled(lambda x: lax.psum(x, ("data", "fsdp")), mesh), mesh)
    )
    assert found.axes == ("data",)
    found = communication(compiled(lambda x: lax.psum(x, "fsdp"), mesh), mesh)
    assert (found.counts, found.total) == ({}, Total(0, 0, 0, ""))
    assert str(found).splitlines()[1].split() == ["total", "0", "0.000", "0.000"]


def repeat(n: int, f: Any) -> Any:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=n)[0]


def reduce(x: Any) -> Any:
    return jnp.sin(lax.psum(x, "tensor"))


def test_loops_multiply() -> None:
    def until(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 5, reduce, x)

    cases = [
        (repeat(5, reduce), [(5,)], 5, ""),
        (lambda x: reduce(repeat(3, repeat(4, reduce))(x)), [(), (3, 4)], 13, ""),
        (lambda x: lax.fori_loop(2, 9, lambda i, x: reduce(x), x), [(7,)], 7, ""),
        # A loop of unknown length is a lower bound.
        (until, [(None,)], 1, ">="),
        (repeat(3, until), [(3, None)], 3, ">="),
    ]
    for f, loops, count, bound in cases:
        program = compiled(f)
        found = communication(program, MESH)
        assert sorted(c.loops for c in found) == loops
        total = Total(count, count * 256, count * 256, bound)
        assert (found.counts, found.total) == (
            {("all-reduce", ("tensor",)): count},
            total,
        )
        # The text and an abstract mesh will do.
        assert communication(program.as_text() or "", MESH.abstract_mesh) == found


# Source lines.


def line_of(function: Any, offset: int) -> str:
    return f"{__file__}:{inspect.unwrap(function).__code__.co_firstlineno + offset}"


def test_the_source_of_a_librarys_layer_is_where_it_is_called_backward_too() -> None:
    mesh = make_mesh(tensor=4)
    x, weight = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((6, 32), P("data")), ((32, 32), P(None, "tensor")))
    )

    def loss(weight: Any, x: Any) -> Any:
        layer = eqx.tree_at(lambda layer: layer.weight, LINEAR, weight)
        return jnp.sin(jax.vmap(layer)(x)).sum()

    gradient = jax.jit(
        jax.grad(loss, argnums=(0, 1)), out_shardings=(weight.sharding, x.sharding)
    )
    found = communication(gradient.lower(weight, x).compile(), mesh)
    # The gather is of the input's gradient, which was asked for whole: the compiler
    # adds it, and names no line.
    assert {(c.kind, c.axes, c.is_backward): c.source for c in found} == {
        ("all-reduce", ("tensor",), False): line_of(loss, 2),
        ("all-reduce", ("data",), True): line_of(loss, 2),
        ("all-gather", ("tensor",), True): line_of(loss, 2),
    }


NO_PROGRAMS: dict[str, tuple[Any, type[Exception], str]] = {
    "for_one_device": (
        lambda jitted: jitted.lower(X).compile(),
        ValueError,
        r"for 1 device\(s\), but the mesh has 8",
    ),
    "jitted": (
        lambda jitted: jitted,
        TypeError,
        r"is a .*, but must be what Lowered.compile",
    ),
    "lowered": (
        lambda jitted: jitted.lower(X),
        TypeError,
        r"is a Lowered, but must be what Lowered.compile",
    ),
}


@pytest.mark.parametrize("name", NO_PROGRAMS)
def test_what_is_not_a_program_for_the_mesh_is_refused(name: str) -> None:
    make, error, message = NO_PROGRAMS[name]
    program = make(jax.jit(jnp.sin))
    with pytest.raises(error, match=message):
        # Past the check of types that only tests have.
        inspect.unwrap(communication)(program, MESH)


# Totals and the table.


ONE = Collective(
    "", (), 4, ("f32[256,1024]",), 2**20, (), False, "jit(f)/x", "/home/me/train.py:12"
)


def collective(kind: str, *axes: str, **changes: Any) -> Collective:
    return dataclasses.replace(ONE, kind=kind, axes=axes, **changes)


def test_totals_and_table() -> None:
    collectives = (
        collective("all-gather", "fsdp", loops=(3,), source="/home/me/model.py:5"),
        collective("all-reduce", "tensor", loops=(3, 4)),
        collective("all-reduce", "tensor"),
        collective("all-reduce", "tensor", operation="jit(f)/transpose(jvp())/x"),
        collective("all-reduce", "data", "fsdp", result_bytes=4, source=""),
    )
    found = Communication(collectives)
    kinds = ("all-reduce", "all-gather", "all-reduce")
    counts = zip(kinds, (("tensor",), ("fsdp",), ("data", "fsdp")), (14, 3, 1))
    assert list(found.counts.items()) == [
        ((kind, axes), count) for kind, axes, count in counts
    ]
    of_axes = [(axes, total.count) for axes, total in found.by_axes.items()]
    assert of_axes == [(("tensor",), 14), (("fsdp",), 3), (("data", "fsdp"), 1)]
    assert found.total == Total(
        18, 17 * 2**20 + 4, 14 * 2**20 * 6 // 4 + 3 * 2**20 * 3 // 4 + 6, ""
    )
    assert str(found).splitlines() == [
        "kind        axes       count     MiB  MiB sent  source",
        "all-reduce  tensor        13  13.000    19.500  train.py:12",
        "all-gather  fsdp           3   3.000     2.250  model.py:5",
        "all-reduce  tensor         1   1.000     1.500  train.py:12 (backward)",
        "all-reduce  data,fsdp      1   0.000     0.000",
        "total                     18  17.000    23.250",
    ]


def test_the_table_says_what_is_not_exact() -> None:
    for changes, bound, notes in (
        ([{}, {}], "", []),
        ([{}, {"loops": (2, None)}], ">=", [">="]),
        ([{}, {"conditional": True}], "<=", ["<="]),
        ([{"loops": (None,)}, {"conditional": True}], "~", [">=", "<="]),
    ):
        found = Communication(
            collective("all-reduce", "tensor", **change) for change in changes
        )
        assert found.by_axes[("tensor",)].bound == found.total.bound == bound
        _, row, total, *said = str(found).splitlines()
        assert row.split()[2] == total.split()[1] == f"{bound}{found.total.count}"
        assert [line.split()[0] for line in said] == notes, changes
