"""The counter of collectives: compiled programs with known answers, and HLO text of other backends."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx._compiled.collectives import Collective, collectives, summarize
from redco_eqx._sharding.mesh import AXES, make_mesh

X = jnp.ones((8, 8, 8))  # f32, of which each of 2x2x2 devices holds f32[4,4,4]: 256 bytes


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(fsdp=2, tensor=2)


def compiled(f: Any, mesh: Mesh, *args: Any) -> jax.stages.Compiled:
    """`f` on the parts that the devices hold."""
    spec = P(*AXES)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*(args or (X,))).compile()


def only(found: list[Collective]) -> Collective:
    assert len(found) == 1, found
    return found[0]


# Compiled programs.


@pytest.mark.parametrize(
    "axes",
    [("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"), AXES],
    ids="-".join,
)
def test_axes_of_an_all_reduce(mesh: Mesh, axes: tuple[str, ...]) -> None:
    found = only(collectives(compiled(lambda x: lax.psum(x, axes), mesh), mesh))
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", axes, 2 ** len(axes))
    assert (found.shapes, found.result_bytes) == (("f32[4,4,4]",), 256)
    assert (found.loops, found.count, found.bound) == ((), 1, "")
    assert found.source.endswith("/psum")


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
    found = only(collectives(compiled(lambda x: f(x, axis), mesh), mesh))
    assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 2)
    assert (found.result_bytes, found.sent_bytes) == (result_bytes, sent_bytes)


def test_devices_are_positions_in_the_mesh() -> None:
    # Were they ids, the groups of "fsdp" would differ along other axes of this mesh.
    devices = np.array(jax.devices())[[3, 0, 6, 1, 7, 5, 2, 4]].reshape(2, 2, 2)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    for axis in AXES:
        program = compiled(partial(lax.psum, axis_name=axis), mesh)
        assert only(collectives(program, mesh)).axes == (axis,)


def test_a_ring_around_two_axes(mesh: Mesh) -> None:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    program = compiled(lambda x: lax.ppermute(x, ("data", "tensor"), ring), mesh)
    assert only(collectives(program, mesh)).axes == ("data", "tensor")


def test_part_of_an_axis() -> None:
    mesh = make_mesh(tensor=4)
    program = compiled(lambda x: lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]), mesh)
    found = only(collectives(program, mesh))
    assert (found.axes, found.group_size) == (("part of tensor",), 2)


def test_axes_of_size_one_are_silent() -> None:
    mesh = make_mesh(tensor=4)
    assert collectives(compiled(lambda x: lax.psum(x, "fsdp"), mesh), mesh) == []
    found = only(collectives(compiled(lambda x: lax.psum(x, ("data", "fsdp")), mesh), mesh))
    assert found.axes == ("data",)


def test_combined_results_are_added(mesh: Mesh) -> None:
    def f(x: Any) -> Any:
        a, b = lax.psum((x.sum(0), x[0, :2].astype(jnp.float32)), "fsdp")
        return x + a.sum() + b.sum()

    found = collectives(compiled(f, mesh), mesh)
    assert summarize(found).total.result_bytes == 4 * 4 * 4 + 2 * 4 * 4
    assert set(only(found).shapes) == {"f32[4,4]", "f32[2,4]"}


def abstract(shape: tuple[int, ...], mesh: Mesh, *spec: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("order", [list(range(8)), [3, 0, 6, 1, 7, 5, 2, 4]], ids=["sorted", "mixed"])
def test_row_parallel_matmul_is_one_all_reduce(order: list[int]) -> None:
    mesh = make_mesh(tensor=4, devices=[jax.devices()[i] for i in order])
    x = abstract((6, 32), mesh, "data")
    up, down = abstract((64, 32), mesh, "tensor"), abstract((32, 64), mesh, None, "tensor")
    program = jax.jit(lambda x, up, down: jnp.tanh(x @ up.T) @ down.T, out_shardings=x.sharding)
    found = only(collectives(program.lower(x, up, down).compile(), mesh))
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
    found = collectives(program, mesh)
    assert summarize(found).counts == {("all-reduce", ("tensor",)): 5}
    assert only(found).loops == (5,)
    assert only(found).total_bytes == 5 * 3 * 32 * 4


def repeat(n: int, f: Any) -> Any:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=n)[0]


def reduce(x: Any) -> Any:
    return jnp.sin(lax.psum(x, "tensor"))


def test_loops_multiply(mesh: Mesh) -> None:
    found = only(collectives(compiled(repeat(5, reduce), mesh), mesh))
    assert (found.loops, found.count, found.total_bytes) == ((5,), 5, 5 * 256)
    found = collectives(compiled(lambda x: reduce(repeat(3, repeat(4, reduce))(x)), mesh), mesh)
    assert sorted(c.loops for c in found) == [(), (3, 4)]
    assert summarize(found).counts == {("all-reduce", ("tensor",)): 13}
    found = only(collectives(compiled(lambda x: lax.fori_loop(2, 9, lambda i, x: reduce(x), x), mesh), mesh))
    assert found.loops == (7,)


def test_a_loop_of_unknown_length_is_a_lower_bound(mesh: Mesh) -> None:
    program = compiled(lambda x: lax.while_loop(lambda x: x.sum() < 5, reduce, x), mesh)
    found = only(collectives(program, mesh))
    assert (found.loops, found.count, found.bound) == ((None,), 1, ">=")
    program = compiled(repeat(3, lambda x: lax.while_loop(lambda x: x.sum() < 5, reduce, x)), mesh)
    found = only(collectives(program, mesh))
    assert (found.loops, found.count, found.bound) == ((3, None), 3, ">=")


def test_the_branch_with_the_most_bytes_is_an_upper_bound(mesh: Mesh) -> None:
    def f(x: Any) -> Any:
        def small(x: Any) -> Any:
            return x + lax.psum(lax.psum(x[0, 0], "data"), "fsdp")

        return lax.cond(x[0, 0, 0] > 0, small, reduce, x)

    found = only(collectives(compiled(f, mesh), mesh))
    assert (found.axes, found.conditional, found.count, found.bound) == (("tensor",), True, 1, "<=")
    found = only(collectives(compiled(repeat(6, f), mesh), mesh))
    assert (found.axes, found.loops, found.bound) == (("tensor",), (6,), "<=")


def test_the_text_and_an_abstract_mesh_will_do(mesh: Mesh) -> None:
    program = compiled(repeat(5, reduce), mesh)
    text = program.as_text()
    assert text is not None
    assert collectives(text, mesh.abstract_mesh) == collectives(program, mesh) != []


# Text that is not from here: XLA's other forms, in the words of the TPU and GPU compilers.

CUBE = AbstractMesh((2, 2, 2), AXES)


def module(entry: str, *computations: str, num_partitions: int = 8) -> str:
    parts = "\n\n".join(computations)
    header = f"HloModule jit_f, is_scheduled=true, num_partitions={num_partitions}"
    entry = f"  %p = f32[4]{{0}} parameter(0)\n{entry}"
    return f"{header}\n\n{parts}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{entry}\n}}\n"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{4,0},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("data", "tensor")),
        ("{}", AXES),
        ("{{0,1,2,3,4,5,6,7}}", AXES),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("part of fsdp,tensor",)),
        ("{{0,1},{2,3},{4,6},{5,7}}", ("part of fsdp,tensor",)),
        ("{{0,1,2},{4,5,6,7}}", ("part of fsdp,tensor",)),
        ("{{0,1},{2},{3}}", ("part of tensor",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[2,4]<=[8]", ("fsdp", "tensor")),
        ("[1,8]<=[8]", AXES),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",)),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", ("data", "fsdp")),
        ("mesh['a'=4,'b'=1,'c'=2] {'c'}", ("tensor",)),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("data", "tensor")),
        ("mesh['a'=8] {'a':(1)2}", ("data",)),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",)),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "tensor")),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tensor",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("fsdp",)),
        ("mesh[a=4,b=2], device_ids=(0,2,4,6,1,3,5,7) {a:(2)2}", ("data",)),
    ],
)
def test_forms_of_replica_groups(groups: str, axes: tuple[str, ...]) -> None:
    line = "  ROOT %r = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=%, to_apply=%add"
    assert only(collectives(module(line.replace("%,", f"{groups},")), CUBE)).axes == axes


@pytest.mark.parametrize(
    "groups", ["{{0},{1},{2},{3}}", "[8,1]<=[8]", "mesh['a'=8,'b'=1] {'b'}", "mesh['a'=8] {}"]
)
def test_groups_of_one_device_are_left_out(groups: str) -> None:
    text = module(f"  ROOT %r = f32[4]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add")
    assert collectives(text, CUBE) == []


def test_a_permute_to_oneself_is_left_out() -> None:
    line = "  %r = f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,1}}"
    assert collectives(module(line), CUBE) == []
    assert only(collectives(module(line.replace("{1,1}", "{1,5}")), CUBE)).axes == ("data",)


G = "channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}"


@pytest.mark.parametrize(
    ("kind", "shapes", "lines"),
    [
        (
            "all-reduce",
            ("f32[8,128]",),
            f"""
            %s = f32[8,128]{{1,0:T(8,128)}} all-reduce-start(%p), {G}, to_apply=%add
            ROOT %d = f32[8,128]{{1,0:T(8,128)}} all-reduce-done(%s)""",
        ),
        (
            "all-reduce",
            ("f32[8]", "bf16[2,3]"),
            f"""
            %s = (f32[8]{{0}}, bf16[2,3]{{1,0}}) all-reduce-start(%p, %q), {G}, to_apply=%add
            ROOT %d = (f32[8]{{0}}, bf16[2,3]{{1,0}}) all-reduce-done(%s)""",
        ),
        (
            "all-gather",
            ("bf16[8,128]",),
            f"""
            %s = (bf16[4,128]{{1,0:T(8,128)(2,1)S(1)}}, bf16[8,128]{{1,0:T(8,128)(2,1)}})
              all-gather-start(%p), {G}
            ROOT %d = bf16[8,128]{{1,0:T(8,128)(2,1)}} all-gather-done(%s)""",
        ),
        (
            "all-gather",
            ("f32[8]", "f32[6]"),
            f"""
            %s = ((f32[4]{{0}}, f32[3]{{0}}), (f32[8]{{0}}, f32[6]{{0}}))
              all-gather-start(f32[4] %p, f32[3] %q), {G}
            ROOT %d = (f32[8]{{0}}, f32[6]{{0}}) all-gather-done(%s)""",
        ),
        (
            "reduce-scatter",
            ("f32[2]",),
            f"""
            %s = ((f32[4]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {G}, to_apply=%add
            ROOT %d = f32[2]{{0}} reduce-scatter-done(%s)""",
        ),
        (
            "all-to-all",
            ("f32[4]",),
            f"""
            %s = ((f32[4]{{0}}), f32[4]{{0}}) all-to-all-start(%p), {G}
            ROOT %d = f32[4]{{0}} all-to-all-done(%s)""",
        ),
        (
            "collective-permute",
            ("f32[4]",),
            """
            %s = (f32[4]{0}, f32[4]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p),
              channel_id=1, source_target_pairs={{0,1},{1,0}}
            ROOT %d = f32[4]{0} collective-permute-done(%s)""",
        ),
        (
            "collective-permute",
            ("f32[4]",),
            """
            %s = (f32[4]{0}, f32[4]{0}) collective-permute-start(%p), source_target_pairs={{2,3},{6,7}}
            ROOT %d = f32[4]{0} collective-permute-done(%s)""",
        ),
        (
            "reduce-scatter",
            ("u32[2]",),
            """
            %s = ((u32[4]{0}), u32[2]{0}, s32[]) async-start(%p), calls=%wrapped
            %u = ((u32[4]{0}), u32[2]{0}, s32[]) async-update(%s), calls=%wrapped
            ROOT %d = u32[2]{0} async-done(%u), calls=%wrapped""",
        ),
    ],
)
def test_asynchronous_forms_count_once(kind: str, shapes: tuple[str, ...], lines: str) -> None:
    wrapped = f"""%wrapped (x: u32[4]) -> u32[2] {{
  %x = u32[4]{{0}} parameter(0)
  ROOT %rs = u32[2]{{0}} reduce-scatter(%x), {G}, to_apply=%add
}}, execution_thread="parallel" """
    found = only(collectives(module(lines, wrapped), CUBE))
    assert (found.kind, found.axes, found.shapes) == (kind, ("tensor",), shapes)


def test_calls_are_followed_each_time() -> None:
    inner = f"""%inner (x: f32[4]) -> f32[4] {{
  ROOT %r = f32[4]{{0}} all-reduce(%x), {G}, to_apply=%add
}}"""
    outer = """%outer (x: f32[4]) -> f32[4] {
  %a = f32[4]{0} fusion(%x), kind=kCustom, calls=%inner
  ROOT %b = f32[4]{0} custom-call(%a), custom_call_target="x", called_computations={%inner}
}"""
    entry = """
  %a = f32[4]{0} call(%p), to_apply=%outer
  %b = f32[4]{0} call(%a), to_apply=%outer
  %c = pred[] constant(true)
  ROOT %d = f32[4]{0} conditional(%c, %b, %b), true_computation=%inner, false_computation=%outer"""
    found = collectives(module(entry, inner, outer), CUBE)
    assert [c.conditional for c in found] == [False] * 4 + [True] * 2


LOOP = "(s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)})"


def loop(
    *,
    start: str = "constant(0)",
    step: str = "constant(1)",
    test: str = "",
    trips: str = "",
    after: str = "add(%i, %step)",
) -> str:
    """A program whose loop has an all-reduce in its body and another in its condition."""
    body = f"""%body (c: {LOOP}) -> {LOOP} {{
  %c = {LOOP} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %n = s32[]{{:T(128)}} get-tuple-element(%c), index=2
  %step = s32[]{{:T(128)}} {step}
  %next = s32[]{{:T(128)}} {after}, backend_config={{"flag_configs":[]}}
  %r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %out = {LOOP} tuple(%next, %r, %n)
}}"""
    test = test or "compare(%i, %limit), direction=LT"
    compare = """%fused_compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}"""
    condition = f"""%condition (c: {LOOP}) -> pred[] {{
  %c = {LOOP} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %n = s32[]{{:T(128)}} get-tuple-element(%c), index=2
  %limit = s32[]{{:T(128)}} constant(10)
  %y = f32[2]{{0}} reduce-scatter(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %test = pred[]{{:T(512)}} {test}
}}"""
    entry = f"""
  %first = s32[]{{:T(128)}} {start}
  %copy = s32[]{{:T(128)}} copy(%first)
  %seven = s32[]{{:T(128)}} constant(7)
  %before = {LOOP} tuple(%copy, %p, /*index=2*/%seven)
  %w = {LOOP} while(%before), condition=%condition, body=%body{trips}
  ROOT %result = f32[4]{{0}} get-tuple-element(%w), index=1"""
    return module(entry, compare, body, condition)


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop(), 10),
        (loop(start="constant(3)"), 7),
        (loop(step="constant(3)"), 4),
        (loop(start="constant(11)"), 0),
        (loop(test="compare(%i, %limit), direction=LE"), 11),
        (loop(test="compare(%limit, %i), direction=GT"), 10),
        (loop(test="compare(s32[]{:T(128)} %i, s32[]{:T(128)} %limit), direction=LT"), 10),
        (loop(test="compare(%i, %limit), direction=NE", step="constant(2)"), 5),
        (loop(test="compare(%i, %limit), direction=NE", step="constant(3)"), None),
        (loop(start="constant(30)", step="constant(-2)", test="compare(%i, %limit), direction=GE"), 11),
        (loop(start="constant(30)", after="subtract(%i, %step)", test="compare(%i, %limit), direction=GT"), 20),
        (loop(test="fusion(%i, %limit), kind=kLoop, calls=%fused_compare"), 10),
        (loop(test="compare(%i, %n), direction=LT"), 7),
        (loop(start="get-tuple-element(%p), index=0"), None),
        (loop(step="constant(0)"), None),
        (loop(after="add(%step, %i)"), 10),
        (loop(after="subtract(%step, %i)"), None),
        (loop(after="multiply(%i, %step)"), None),
        (loop(test="compare(%i, %x), direction=LT"), None),
        (loop(test="compare(%i, %limit), direction=EQ"), None),
        (loop(trips=', backend_config={"known_trip_count":{"n":"12"},"x":[]}'), 12),
        (loop(trips=r', backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"'), 12),
    ],
)
def test_trip_counts_without_annotation(text: str, trips: int | None) -> None:
    body, condition = collectives(text, CUBE)
    assert (body.kind, body.loops) == ("all-reduce", (trips,))
    # The condition is tested once more than the body is run.
    assert condition.kind == "reduce-scatter"
    assert condition.loops == (None if trips is None else trips + 1,)


def test_tpu_reduce_scatter_fusion() -> None:
    fused = """%all-reduce-scatter.clone.1 (input.5: f32[2048,2048]) -> f32[256,2048] {
  %input.5 = f32[2048,2048]{1,0:T(8,128)} parameter(0)
  %all-reduce.17 = f32[2048,2048]{1,0:T(8,128)} all-reduce(%input.5), channel_id=7,
    replica_groups=[4,2]<=[4,2]T(1,0), to_apply=%add
  ROOT %slice = f32[256,2048]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.17, %i, %z)
}"""
    entry = (
        "  ROOT %fusion.98 = f32[256,2048]{1,0:T(8,128)S(1)} fusion(%p), kind=kCustom, "
        'calls=%all-reduce-scatter.clone.1, metadata={op_name="jit(f)/dot_general" stack_frame_id=3}, '
        'backend_config={"debug":"\\nall-reduce-scatter ND: (x, all-reduce(%q), to_apply=%nothing"}'
    )
    found = only(collectives(module(entry, fused), CUBE))
    assert (found.kind, found.axes) == ("reduce-scatter", ("fsdp",))
    assert (found.shapes, found.source) == (("f32[256,2048]",), "jit(f)/dot_general")
    assert (found.result_bytes, found.sent_bytes) == (2**21, 2**21)


def test_tpu_collective_fused_with_other_work_counts_once() -> None:
    gather = (
        "bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=4, replica_groups=[4,2]<=[8], "
        'dimensions={0}, frontend_attributes={chain_id="0"}'
    )
    start = f"""%fused_computation.1 (x: bf16[4,128]) -> (bf16[4,128], bf16[8,128], u32[]) {{
  %ag.1 = {gather}
  ROOT %cc = (bf16[4,128], bf16[8,128], u32[]) custom-call(%ag.1),
    custom_call_target="AsyncCollectiveStart"
}}"""
    work = f"""%async_collective_fusion.2 (x: bf16[4,128]) -> (bf16[4,128], bf16[8,128], u32[]) {{
  %ag.2 = {gather}
  ROOT %tuple = (bf16[4,128], bf16[8,128], u32[]) tuple(%x, %ag.2, %y)
}}"""
    done = f"""%fused_computation.3 (x: bf16[4,128]) -> bf16[8,128] {{
  %ag.3 = {gather}
  ROOT %cc = bf16[8,128] custom-call(%x, %ag.3), custom_call_target="AsyncCollectiveDone"
}}"""
    other = gather.replace(', frontend_attributes={chain_id="0"}', "").replace("[8]", "[4,2]T(1,0)")
    entry = f"""
  %s = (bf16[4,128], bf16[8,128], u32[]) fusion(%p), kind=kCustom, calls=%fused_computation.1
  %w = (bf16[4,128], bf16[8,128], u32[]) fusion(%s), kind=kOutput, calls=%async_collective_fusion.2
  %o = {other}
  ROOT %d = bf16[8,128] fusion(%w), kind=kCustom, calls=%fused_computation.3"""
    found = collectives(module(entry, start, work, done), CUBE)
    assert [c.axes for c in found] == [("tensor",), ("fsdp",)]


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("pred[3,5]", 15),
        ("s4[3,5]", 8),
        ("u4[4]{0:E(4)}", 2),
        ("f4e2m1fn[6]", 3),
        ("s8[7]", 7),
        ("u8[7]", 7),
        ("f8e4m3fn[7]", 7),
        ("f8e5m2[7]", 7),
        ("f8e8m0fnu[7]", 7),
        ("s16[7]", 14),
        ("bf16[7,1]", 14),
        ("f16[7]", 14),
        ("u32[]", 4),
        ("f32[<=8,2]", 64),
        ("s64[7]", 56),
        ("f64[7]", 56),
        ("c64[7]", 56),
        ("c128[7]", 112),
        ("(f32[2]{0}, token[], bf16[0,3])", 8),
    ],
)
def test_bytes_of_dtypes(shape: str, num_bytes: int) -> None:
    text = module(f"  ROOT %r = {shape} all-reduce(%p), {G}, to_apply=%add")
    assert only(collectives(text, CUBE)).result_bytes == num_bytes


def test_names_without_percent_sign_and_source() -> None:
    text = f"""
HloModule hand_written, num_partitions=8
ENTRY main {{
  p = f32[4] parameter(0)
  ROOT my.reduce = f32[4] all-reduce(f32[4] p), {G}, to_apply=add
}}"""
    assert only(collectives(text, CUBE)).source == "my.reduce"
    quoted = text.replace("to_apply=add", r'metadata={op_name="f(\"a\")/psum"}')
    assert only(collectives(quoted, CUBE)).source == r"f(\"a\")/psum"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (module("  %p = f32[4] parameter(0)", num_partitions=4), r"for 4 device\(s\).*has 8"),
        ("module @jit_f { func.func public @main() }", "0 ENTRY"),
        (module(f"  %r = q7[4] all-reduce(%p), {G}"), "width of dtype 'q7'"),
        (module("  %r = f32[4] all-reduce(%p), replica_groups=<0,1>"), "groups of this.*all-reduce"),
        (module("  %r = f32[4] all-reduce(%p), replica_groups={{0,9}}"), "device 9 is not in the mesh"),
        (module("  %r = f32[4] fusion(%p), calls=%gone"), "'gone'"),
        (module("  %r = f32 [4] all-reduce(%p), replica_groups={}"), "not understood.*all-reduce"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collectives(text, CUBE)


def test_unsharded_program_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"for 1 device\(s\), but the mesh has 8"):
        collectives(jax.jit(jnp.sin).lower(X).compile(), mesh)


def collective(kind: str, *axes: str, **changes: Any) -> Collective:
    fields = {
        "group_size": 4,
        "shapes": ("f32[256,1024]",),
        "result_bytes": 2**20,
        "source": "jit(f)/x",
    }
    return Collective(kind=kind, axes=axes, **{"loops": (), "conditional": False, **fields, **changes})


def test_a_summary_adds_up_by_kind_and_axes() -> None:
    found = [
        collective("all-gather", "fsdp", loops=(3,)),
        collective("all-reduce", "tensor", loops=(3, 4), source="jit(f)/big"),
        collective("all-reduce", "tensor"),
        collective("all-reduce", "data", "fsdp", result_bytes=4),
    ]
    summary = summarize(found, largest=1)
    assert list(summary.counts.items()) == [
        (("all-reduce", ("tensor",)), 13),
        (("all-gather", ("fsdp",)), 3),
        (("all-reduce", ("data", "fsdp")), 1),
    ]
    assert summary.rows["all-reduce", ("tensor",)].result_bytes == 13 * 2**20
    assert (summary.total.count, summary.total.result_bytes) == (17, 16 * 2**20 + 4)
    assert summary.total.sent_bytes == 13 * 2**20 * 6 // 4 + 3 * 2**20 * 3 // 4 + 6
    assert str(summary).splitlines() == [
        "kind        axes       count     MiB  MiB sent",
        "all-reduce  tensor        13  13.000    19.500",
        "all-gather  fsdp           3   3.000     2.250",
        "all-reduce  data,fsdp      1   0.000     0.000",
        "total                     17  16.000    21.750",
        "12.000 MiB: 12 x all-reduce over tensor, f32[256,1024], jit(f)/big",
    ]


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ([{}, {}], ""),
        ([{}, {"loops": (2, None)}], ">="),
        ([{}, {"conditional": True}], "<="),
        ([{"loops": (None,)}, {"conditional": True}], "~"),
    ],
)
def test_a_summary_says_what_is_not_exact(changes: list[dict[str, Any]], bound: str) -> None:
    summary = summarize([collective("all-reduce", "tensor", **change) for change in changes])
    assert summary.rows["all-reduce", ("tensor",)].bound == summary.total.bound == bound
    count = summary.total.count
    assert [line.split()[-3] for line in str(summary).splitlines()[1:]] == [f"{bound}{count}"] * 2


@pytest.mark.parametrize("n", [2, 4, 8])
def test_an_all_reduce_sends_what_its_two_halves_send(n: int) -> None:
    whole = collective("all-reduce", "tensor", group_size=n)
    gather = collective("all-gather", "tensor", group_size=n)
    scatter = collective("reduce-scatter", "tensor", group_size=n, result_bytes=2**20 // n)
    assert whole.sent_bytes == gather.sent_bytes + scatter.sent_bytes


def test_an_empty_program_has_an_empty_summary(mesh: Mesh) -> None:
    summary = summarize(collectives(compiled(jnp.sin, mesh), mesh))
    assert (summary.counts, summary.total.count) == ({}, 0)
    assert str(summary).splitlines()[1].split() == ["total", "0", "0.000", "0.000"]
