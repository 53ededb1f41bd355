"""Text that is not from here: XLA's other forms of collectives, in the words of the TPU
and GPU compilers."""

import pytest
from jax.sharding import AbstractMesh
from test_communication import only

from redco_eqx._compiled.communication import communication
from redco_eqx._sharding.mesh import AXES, AXIS_TYPES

CUBE = AbstractMesh((2, 2, 2), AXES, AXIS_TYPES)


def module(entry: str, *computations: str, num_partitions: int = 8) -> str:
    parts = "\n\n".join(computations)
    header = f"HloModule jit_f, is_scheduled=true, num_partitions={num_partitions}"
    entry = f"  %p = f32[4]{{0}} parameter(0)\n{entry}"
    return f"{header}\n\n{parts}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{entry}\n}}\n"


def reduce(shape: str = "f32[4]{0}", groups: str = "[4,2]<=[8]", more: str = "") -> str:
    return (
        f"  ROOT %r = {shape} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        f"to_apply=%add{more}"
    )


FORMS: list[tuple[str, tuple[str, ...]]] = [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
    ("{{4,0},{1,5},{2,6},{3,7}}", ("data",)),
    ("{{0,1,4,5},{2,3,6,7}}", ("data", "tensor")),
    ("{}", AXES),
    ("{{0,3},{1,2},{4,7},{5,6}}", ("part of fsdp,tensor",)),
    ("{{0,1,2},{4,5,6,7}}", ("part of fsdp,tensor",)),
    ("{{0,1},{2},{3}}", ("part of tensor",)),
    ("[4,2]<=[8]", ("tensor",)),
    ("[2,4]<=[8]", ("fsdp", "tensor")),
    ("[4,2]<=[4,2]T(1,0)", ("fsdp",)),
    ("[4,2]<=[2,4]T(1,0)", ("data",)),
    ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
    ("mesh['a'=4,'b'=1,'c'=2] {'a'}", ("data", "fsdp")),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("data", "tensor")),
    ("mesh['a'=8] {'a':(1)2}", ("data",)),
    ("mesh['a'=8] {'a':(2)2}", ("fsdp",)),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "tensor")),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tensor",)),
    ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("fsdp",)),
    ("mesh[a=4,b=2], device_ids=(0,2,4,6,1,3,5,7) {a:(2)2}", ("data",)),
]


@pytest.mark.parametrize(("groups", "axes"), FORMS, ids=[form for form, _ in FORMS])
def test_forms_of_replica_groups(groups: str, axes: tuple[str, ...]) -> None:
    assert only(communication(module(reduce(groups=groups)), CUBE)).axes == axes


@pytest.mark.parametrize(
    "groups",
    [
        "{{0},{1},{2},{3}}",
        "[8,1]<=[8]",
        "mesh['a'=8,'b'=1] {'b'}",
        "mesh['a'=8] {}",
    ],
)
def test_groups_of_one_device_are_left_out(groups: str) -> None:
    assert len(communication(module(reduce(groups=groups)), CUBE)) == 0


def test_a_permute_to_oneself_is_left_out() -> None:
    line = (
        "  %r = f32[4]{0} collective-permute(%p), channel_id=1, "
        "source_target_pairs={{0,0},{1,1}}"
    )
    assert len(communication(module(line), CUBE)) == 0
    assert only(communication(module(line.replace("{1,1}", "{1,5}")), CUBE)).axes == (
        "data",
    )


PLAIN = "channel_id=1, replica_groups=[4,2]<=[8]"
G = f"{PLAIN}, dimensions={{0}}"


PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
TILED = "{1,0:T(8,128)(2,1)"
# A kind, the shapes of its results, and the start of its asynchronous form.
STARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "all-reduce": (
        ("f32[8]", "bf16[2,3]"),
        f"(f32[8]{{0}}, bf16[2,3]{{1,0}}) all-reduce-start(%p, %q), {G}, to_apply=%add",
    ),
    "all-gather": (
        ("bf16[8,128]", "f32[6]"),
        f"((bf16[4,128]{TILED}S(1)}}, f32[3]{{0}}), (bf16[8,128]{TILED}}}, "
        f"f32[6]{{0}})) all-gather-start(bf16[4,128] %p, f32[3] %q),\n  {G}",
    ),
    "reduce-scatter": (
        ("f32[2]",),
        f"((f32[4]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {G}, to_apply=%add",
    ),
    "collective-permute": (
        ("f32[4]",),
        "(f32[4]{0}, f32[4]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), " + PAIRS,
    ),
}


@pytest.mark.parametrize("kind", STARTS)
def test_asynchronous_forms_count_once(kind: str) -> None:
    shapes, start = STARTS[kind]
    text = module(f"  %s = {start}\n  ROOT %d = f32[4]{{0}} {kind}-done(%s)")
    found = only(communication(text, CUBE))
    assert (found.kind, found.axes, found.shapes) == (kind, ("tensor",), shapes)


def test_a_wrapped_asynchronous_form_counts_once() -> None:
    lines = """
  %s = ((u32[4]{0}), u32[2]{0}, s32[]) async-start(%p), calls=%wrapped
  %u = ((u32[4]{0}), u32[2]{0}, s32[]) async-update(%s), calls=%wrapped
  ROOT %d = u32[2]{0} async-done(%u), calls=%wrapped"""
    wrapped = f"""%wrapped (x: u32[4]) -> u32[2] {{
  %x = u32[4]{{0}} parameter(0)
  ROOT %rs = u32[2]{{0}} reduce-scatter(%x), {G}, to_apply=%add
}}, execution_thread="parallel" """
    found = only(communication(module(lines, wrapped), CUBE))
    assert (found.kind, found.axes, found.shapes) == (
        "reduce-scatter",
        ("tensor",),
        ("u32[2]",),
    )


def test_calls_are_followed_each_time() -> None:
    inner = f"""%inner (x: f32[4]) -> f32[4] {{
  ROOT %r = f32[4]{{0}} all-reduce(%x), {G}, to_apply=%add
}}"""
    outer = """%outer (x: f32[4]) -> f32[4] {
  %a = f32[4]{0} fusion(%x), kind=kCustom, calls=%inner
  ROOT %b = f32[4]{0} custom-call(%a), custom_call_target="x", called_computations={%inner}
}"""  # noqa: E501
    entry = """
  %a = f32[4]{0} call(%p), to_apply=%outer
  %b = f32[4]{0} call(%a), to_apply=%outer
  %c = pred[] constant(true)
  ROOT %d = f32[4]{0} conditional(%c, %b, %b), true_computation=%inner, false_computation=%outer"""  # noqa: E501
    assert [
        c.conditional for c in communication(module(entry, inner, outer), CUBE)
    ] == [False] * 4 + [True] * 2


LOOP = "(s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)})"


CARRIED = f"""  %c = {LOOP} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %n = s32[]{{:T(128)}} get-tuple-element(%c), index=2"""


def loop(
    start: str = "constant(0)",
    step: str = "constant(1)",
    test: str = "compare(%i, %limit), direction=LT",
    trips: str = "",
    after: str = "add(%i, %step)",
) -> str:
    """A program whose loop has an all-reduce in its body and another in its
    condition."""
    body = f"""%body (c: {LOOP}) -> {LOOP} {{
{CARRIED}
  %step = s32[]{{:T(128)}} {step}
  %next = s32[]{{:T(128)}} {after}, backend_config={{"flag_configs":[]}}
  %r = f32[4]{{0}} all-reduce(%x), {PLAIN}, to_apply=%add
  ROOT %out = {LOOP} tuple(%next, %r, %n)
}}"""
    compare = """%fused_compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}"""
    condition = f"""%condition (c: {LOOP}) -> pred[] {{
{CARRIED}
  %limit = s32[]{{:T(128)}} constant(10)
  %y = f32[2]{{0}} reduce-scatter(%x), {PLAIN}, to_apply=%add
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


LESS = "compare(%i, %limit), direction=LT"
NOT = "compare(%i, %limit), direction=NE"
FROM_30 = "constant(30)"
TRIPS: list[tuple[dict[str, str], int | None]] = [
    ({}, 10),
    ({"step": "constant(3)"}, 4),
    ({"test": LESS.replace("LT", "LE")}, 11),
    ({"test": "compare(%limit, %i), direction=GT"}, 10),
    ({"test": "compare(s32[]{:T(128)} %i, s32[]{:T(128)} %limit), direction=LT"}, 10),
    ({"test": NOT, "step": "constant(2)"}, 5),
    ({"test": NOT, "step": "constant(3)"}, None),
    ({"start": FROM_30, "step": "constant(-2)", "test": LESS.replace("LT", "GE")}, 11),
    (
        {
            "start": FROM_30,
            "after": "subtract(%i, %step)",
            "test": LESS.replace("LT", "GT"),
        },
        20,
    ),
    ({"test": "fusion(%i, %limit), kind=kLoop, calls=%fused_compare"}, 10),
    ({"test": "compare(%i, %n), direction=LT"}, 7),
    ({"start": "get-tuple-element(%p), index=0"}, None),
    ({"after": "multiply(%i, %step)"}, None),
    ({"test": "compare(%i, %x), direction=LT"}, None),
    ({"test": LESS.replace("LT", "EQ")}, 0),
    ({"trips": ', backend_config={"known_trip_count":{"n":"12"},"x":[]}'}, 12),
    ({"trips": r', backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"'}, 12),
]


def test_trip_counts_without_annotation() -> None:
    for parts, trips in TRIPS:
        body, condition = communication(loop(**parts), CUBE)
        assert (body.kind, body.loops) == ("all-reduce", (trips,)), parts
        # The condition is tested once more than the body is run.
        assert condition.kind == "reduce-scatter"
        assert condition.loops == (None if trips is None else trips + 1,), parts


def test_tpu_reduce_scatter_fusion() -> None:
    fused = """%all-reduce-scatter.clone.1 (input.5: f32[2048,2048]) -> f32[256,2048] {
  %input.5 = f32[2048,2048]{1,0:T(8,128)} parameter(0)
  %all-reduce.17 = f32[2048,2048]{1,0:T(8,128)} all-reduce(%input.5), channel_id=7,
    replica_groups=[4,2]<=[4,2]T(1,0), to_apply=%add
  ROOT %slice = f32[256,2048]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.17, %i, %z)
}"""
    entry = (
        "  ROOT %fusion.98 = f32[256,2048]{1,0:T(8,128)S(1)} fusion(%p), kind=kCustom, "
        'calls=%all-reduce-scatter.clone.1, metadata={op_name="jit(f)/dot_general" '
        'stack_frame_id=3}, backend_config={"debug":"\\nall-reduce-scatter ND: (x, '
        'all-reduce(%q), to_apply=%nothing"}'
    )
    found = only(communication(module(entry, fused), CUBE))
    assert (found.kind, found.axes) == ("reduce-scatter", ("fsdp",))
    assert (found.shapes, found.operation) == (("f32[256,2048]",), "jit(f)/dot_general")
    assert (found.result_bytes, found.sent_bytes) == (2**21, 2**21)


def test_metadata_of_a_tpu_kernel_takes_several_lines() -> None:
    """As that of splash attention: a line of it begins like the end of a
    computation."""
    kernel = (
        '  %k = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
        "frontend_attributes={kernel_metadata={\n"
        '"xprof_metadata":"{\\"block_q\\": 512}"\n'
        '}}, metadata={op_name="pallas_call"}\n'
    )
    found = communication(module(kernel + reduce()), CUBE)
    assert only(found).axes == ("tensor",)


def test_tpu_collective_fused_with_other_work_counts_once() -> None:
    gather = (
        "bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=4, "
        "replica_groups=[4,2]<=[8], "
        'dimensions={0}, frontend_attributes={chain_id="0"}'
    )
    results = "(bf16[4,128], bf16[8,128], u32[])"
    start = f"""%fused_computation.1 (x: bf16[4,128]) -> {results} {{
  %ag.1 = {gather}
  ROOT %cc = {results} custom-call(%ag.1),
    custom_call_target="AsyncCollectiveStart"
}}"""
    work = f"""%async_collective_fusion.2 (x: bf16[4,128]) -> {results} {{
  %ag.2 = {gather}
  ROOT %tuple = {results} tuple(%x, %ag.2, %y)
}}"""
    done = f"""%fused_computation.3 (x: bf16[4,128]) -> bf16[8,128] {{
  %ag.3 = {gather}
  ROOT %cc = bf16[8,128] custom-call(%x, %ag.3), custom_call_target="AsyncCollectiveDone"
}}"""  # noqa: E501
    other = gather.replace(', frontend_attributes={chain_id="0"}', "").replace(
        "[8]", "[4,2]T(1,0)"
    )
    entry = f"""
  %s = {results} fusion(%p), kind=kCustom, calls=%fused_computation.1
  %w = {results} fusion(%s), kind=kOutput, calls=%async_collective_fusion.2
  %o = {other}
  ROOT %d = bf16[8,128] fusion(%w), kind=kCustom, calls=%fused_computation.3"""
    assert [c.axes for c in communication(module(entry, start, work, done), CUBE)] == [
        ("tensor",),
        ("fsdp",),
    ]


BYTES = {
    "pred[3,5]": 15,
    "s4[3,5]": 8,
    "u4[4]{0:E(4)}": 2,
    "f4e2m1fn[6]": 3,
    "f8e8m0fnu[7]": 7,
    "bf16[7,1]": 14,
    "u32[]": 4,
    "f32[<=8,2]": 64,
    "f64[7]": 56,
    "c128[7]": 112,
    "(f32[2]{0}, token[], bf16[0,3])": 8,
}


@pytest.mark.parametrize("shape", BYTES)
def test_bytes_of_dtypes(shape: str) -> None:
    found = only(communication(module(reduce(shape)), CUBE))
    assert found.result_bytes == BYTES[shape]


def test_names_without_percent_sign_and_operation() -> None:
    text = f"""
HloModule hand_written, num_partitions=8
ENTRY main {{
  p = f32[4] parameter(0)
  ROOT my.reduce = f32[4] all-reduce(f32[4] p), {G}, to_apply=add
}}"""
    assert only(communication(text, CUBE)).operation == "my.reduce"
    quoted = text.replace("to_apply=add", r'metadata={op_name="f(\"a\")/psum"}')
    assert only(communication(quoted, CUBE)).operation == r"f(\"a\")/psum"


ERRORS = [
    pytest.param(
        module("  %p = f32[4] parameter(0)", num_partitions=4),
        r"for 4 device\(s\).*has 8",
        id="other_number_of_devices",
    ),
    pytest.param(
        "module @jit_f { func.func public @main() }", "0 ENTRY", id="no_program"
    ),
    pytest.param(module(reduce("q7[4]")), "width of dtype 'q7'", id="unknown_dtype"),
    pytest.param(
        module(reduce(groups="<0,1>")),
        "groups of this.*all-reduce",
        id="unknown_groups",
    ),
    pytest.param(
        module(reduce(groups="{{0,9}}")),
        "index 9 is out of bounds",
        id="index_out_of_bounds",
    ),
    pytest.param(
        module(reduce("f32 [4]", "{}")),
        "cannot read this line.*all-reduce",
        id="unreadable_line",
    ),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        communication(text, CUBE)


# Frames from the innermost to the outermost, and what is named of them.
OF_A_STEP = {
    "split_activations": (
        ["_sharding/constraint.py", "_step/constraints.py", "_step/steps.py"],
        "redco_eqx: split_activations",
    ),
    "a workaround": (
        ["_base/rewriting.py", "_step/workarounds.py", "_step/passes.py"],
        "redco_eqx: workaround for XLA",
    ),
    "stored weights": (["_step/gather.py"], "redco_eqx: gather of stored weights"),
    "the optimizer": (["_step/optimizer.py"], "redco_eqx: update"),
    "the rest of a step": (["_step/layout.py"], "redco_eqx: train_step"),
    "a layer of the library": (["_parallel/linear.py"], "/home/me/train.py:7"),
    "a constraint in a layer": (
        ["_sharding/constraint.py", "_parallel/linear.py"],
        "/home/me/train.py:7",
    ),
}


@pytest.mark.parametrize("case", OF_A_STEP)
def test_what_a_step_adds_is_named_and_not_its_own_file(case: str) -> None:
    files, source = OF_A_STEP[case]
    names = [f"/venv/site-packages/redco_eqx/{file}" for file in files]
    names.append("/home/me/train.py")
    numbers = range(1, len(names) + 1)
    tables = ["FileNames", *(f'{i} "{name}"' for i, name in zip(numbers, names))]
    tables += ["", "FunctionNames", '1 "step"', "", "FileLocations"]
    place = "function_name_id=1 line=7 end_line=7 column=2 end_column=9"
    tables += [f"{i} {{file_name_id={i} {place}}}" for i in numbers]
    # Each frame is called by the next one; the last one by none.
    tables += ["", "StackFrames"]
    frame = "{{file_location_id={} parent_frame_id={}}}"
    parents = [*numbers[1:], 0]
    tables += [f"{i} {frame.format(i, above)}" for i, above in zip(numbers, parents)]
    one = reduce(more=', metadata={op_name="x" stack_frame_id=1}')
    header, _, rest = module(one).partition("\n\n")
    text = "\n".join([header, "", *tables, "", rest])
    assert [c.source for c in communication(text, CUBE)] == [source]


@pytest.mark.parametrize("outermost", [0, 1], ids=["parents from 0", "parents from 1"])
def test_sources_by_either_numbering_of_frames(outermost: int) -> None:
    packages = "/venv/lib/python3.11/site-packages"
    tables = f"""
FileNames
1 "/home/me/train.py"
2 "{packages}/equinox/nn/_linear.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=94 end_line=94 column=2 end_column=9}}
3 {{file_name_id=1 function_name_id=1 line=30 end_line=30 column=2 end_column=9}}

StackFrames
1 {{file_location_id=3 parent_frame_id={outermost}}}
2 {{file_location_id=1 parent_frame_id={1 + outermost}}}
3 {{file_location_id=2 parent_frame_id={2 + outermost}}}
4 {{file_location_id=2 parent_frame_id={outermost}}}
"""
    metadata = ', metadata={{op_name="x" stack_frame_id={}}}'
    lines = [
        reduce(more=metadata.format(i)).replace("ROOT %r", f"%r{i}") for i in (1, 3, 4)
    ]
    header, _, rest = module("\n".join([*lines, reduce()])).partition("\n\n")
    assert [c.source for c in communication(f"{header}\n{tables}\n{rest}", CUBE)] == [
        "/home/me/train.py:30",
        "/home/me/train.py:12",
        f"{packages}/equinox/nn/_linear.py:94",  # nothing but libraries
        "",
    ]
