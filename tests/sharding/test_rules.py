"""The layout of every model of the zoo, as written by hand; of chains, near the best;
of generated models."""

import functools
import itertools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import abstract, abstract_mesh, decide, in_long
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from zoo import BY_NAME, BY_PROGRAM_ALONE, ZOO, goldens, stack, unlike

import redco_eqx as rx
from redco_eqx._base.policy import FSDP_MIN_SIZE
from redco_eqx._sharding import matrices

TENSOR = 4
WHOLE = P()


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def linear(num_in, num_out):
    return abstract(lambda key: eqx.nn.Linear(num_in, num_out, key=key))


def warned(model, mesh, **options):
    """Return the warnings of `shard_rules`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rx.shard_rules(model, mesh, **options)
    return [str(w.message) for w in caught if w.category is rx.errors.ShardingWarning]


def test_layouts_of_the_zoo_are_the_golden_ones():
    for entry in ZOO:
        decisions = decide(abstract(entry.make), abstract_mesh(data=2, tensor=TENSOR))
        wrong = unlike({path: d.spec for path, d in decisions.items()}, goldens(entry))
        assert bool(wrong) == (entry.name in BY_PROGRAM_ALONE), (entry.name, wrong)
        assert all(d.reason and d.role for d in decisions.values()), entry.name


def test_concrete_model_gets_the_layout_of_the_abstract_one():
    """With arrays of JAX, of NumPy, keys, and leaves that are no arrays."""
    mesh = abstract_mesh(fsdp=2, tensor=TENSOR)
    for name in ("friend_buffers", "friend_actor_critic"):
        assert decide(BY_NAME[name].make(jax.random.key(0)), mesh) == decide(
            abstract(BY_NAME[name].make), mesh
        )


@pytest.mark.parametrize("tensor", [1, 3, *in_long(2, 8)])
def test_specs_are_well_formed_on_every_mesh(tensor):
    for entry in ZOO:
        mesh = abstract_mesh(fsdp=4, tensor=tensor)
        for d in decide(abstract(entry.make), mesh).values():
            check_decision(d, mesh)
            assert tensor > 1 or "tensor" not in d.spec


def check_decision(d, mesh):
    axes = [
        axis
        for entry in d.spec
        if entry
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    ]
    assert len(axes) == len(set(axes)), d
    for size, entry in zip(d.shape, d.spec):
        assert entry is None or size % mesh.shape[entry] == 0, d
    assert d.bytes_per_device * int(
        np.prod([mesh.shape[a] for a in axes], dtype=int)
    ) == (np.prod(d.shape, dtype=int) * getattr(d.dtype, "itemsize", 4))


# Widths that all divide: alternation is held by the best of all layouts.


def chain_cost(mesh, widths, specs):
    """Bytes of collectives of the gradient of a chain of Linears that reads and feeds a
    whole stream."""

    def loss(params, x):
        whole = NamedSharding(mesh, P())
        y = jax.lax.with_sharding_constraint(x * params["scale"], whole)
        for i in range(len(widths) - 1):
            y = jnp.einsum("btd,od->bto", y, params[f"w{i}"])
            y = jax.nn.gelu(y) if i < len(widths) - 2 else y
        y = jax.lax.with_sharding_constraint(y, whole)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        return jnp.mean(jnp.einsum("btd,vd->btv", y, params["next"]) ** 2)

    def array(*shape, spec=WHOLE):
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, spec)
        )

    params = {
        f"w{i}": array(o, n, spec=specs[i])
        for i, (n, o) in enumerate(itertools.pairwise(widths))
    }
    params |= {"scale": array(widths[0]), "next": array(8, widths[-1])}
    out = (NamedSharding(mesh, P()), jax.tree.map(lambda x: x.sharding, params))
    step = jax.jit(jax.value_and_grad(loss), out_shardings=out)
    compiled = step.lower(params, array(4, 16, widths[0])).compile()
    return sum(c.total_bytes for c in rx.communication(compiled, mesh))


@pytest.mark.parametrize(
    "widths",
    [
        *((96, 64, 96), (128, 32, 96, 128)),
        *in_long(((64, 64, 64, 64),), ((64, 128, 128, 64),), ((32, 96, 64, 128, 32),)),
    ],
    ids=str,
)
def test_alternation_is_within_5_percent_of_the_best_layout(widths):
    """An oracle: every way to split each Linear by column or by row, compiled."""
    mesh = rx.make_mesh(data=1, tensor=TENSOR)
    layers = [
        eqx.nn.Linear(n, o, key=jax.random.key(0))
        for n, o in itertools.pairwise(widths)
    ]
    specs = [
        d.spec
        for path, d in decide({"layers": layers}, mesh).items()
        if path.endswith("weight")
    ]
    assert all("tensor" in spec for spec in specs)
    layouts = itertools.product([P("tensor"), P(None, "tensor")], repeat=len(layers))
    costs = {layout: chain_cost(mesh, widths, layout) for layout in layouts}
    ours = costs[tuple(specs)]
    assert ours <= 1.05 * min(costs.values())
    assert ours < max(costs.values()), (
        "an oracle that cannot tell layouts apart holds nothing"
    )


# Properties of generated models.


@st.composite
def trees(draw, depth=2):
    """Nested containers of Linears, MLPs, attentions, norms and tables, abstract."""
    sizes = st.sampled_from([6, 8, 16, 32, 48])
    kind = draw(
        st.sampled_from(
            ["linear", "mlp", "mha", "norm", "table", "list", "dict", "vmapped"]
        )
    )
    key = jax.random.key(0)
    a, b, c = draw(sizes), draw(sizes), draw(sizes)
    if kind in ("list", "dict") and depth:
        items = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
        return (
            items
            if kind == "list"
            else {f"part{i}": item for i, item in enumerate(items)}
        )
    make = {
        "mlp": lambda: eqx.nn.MLP(a, b, c, draw(st.integers(1, 3)), key=key),
        "mha": lambda: eqx.nn.MultiheadAttention(4, 4 * a, key=key),
        "norm": lambda: eqx.nn.LayerNorm(a),
        "table": lambda: eqx.nn.Embedding(a, b, key=key),
        "vmapped": lambda: stack(lambda key: eqx.nn.MLP(a, a, b, 1, key=key), key, 6),
    }
    linear = lambda: eqx.nn.Linear(a, b, use_bias=draw(st.booleans()), key=key)  # noqa: E731
    return eqx.filter_eval_shape(make.get(kind, linear))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]))
def test_generated_models_are_split_wherever_they_can_be(model, tensor, fsdp):
    mesh = abstract_mesh(fsdp=fsdp, tensor=tensor)
    decisions = decide(model, mesh)
    assert list(decisions) == list(rx.to_arrays(model))
    for path, d in decisions.items():
        check_decision(d, mesh)
        # What feeds blocks from outside is whole, as their stream is.
        matrix = path.endswith("weight") and d.role not in ("norm", "position", "input")
        stack = len(d.shape) - 2
        if matrix and stack >= 0 and all(n % tensor == 0 for n in d.shape[stack:]):
            assert "tensor" in d.spec, d
        assert all(entry is None for entry in d.spec[: max(stack, 0)]), (
            "stacked dims are never split"
        )
        if matrix and stack >= 0 and np.prod(d.shape) >= FSDP_MIN_SIZE and fsdp > 1:
            free = [
                n
                for n, e in zip(d.shape[stack:], (*d.spec[stack:], None, None))
                if e in (None, "fsdp")
            ]
            assert "fsdp" in d.spec or all(n % fsdp for n in free), d


# `shard_rules`, overrides, `explain`.


@functools.cache
def small_model():
    return eqx.filter_eval_shape(
        lambda: eqx.nn.MLP(32, 32, 64, 3, key=jax.random.key(0))
    )


def test_shard_rules_is_what_explain_found_a_sharding_for_each_array_and_no_more():
    mesh = abstract_mesh(data=2, tensor=4)
    result = rx.shard_rules(small_model(), mesh)
    explanation = rx.explain(small_model(), mesh)
    assert result == explanation.shardings
    assert [x.spec for x in jax.tree.leaves(result)] == [
        d.spec for d in explanation.decisions.values()
    ]
    assert result.activation is None
    assert result.layers[0].weight == NamedSharding(mesh, P("tensor"))
    assert result.layers[1].weight == NamedSharding(mesh, P(None, "tensor"))
    assert result.layers[1].bias == NamedSharding(mesh, P())


def test_first_matching_override_decides_alone():
    mesh = abstract_mesh(data=1, fsdp=2, tensor=2)
    overrides = [
        ("layers.0.weight", P(None, "fsdp")),
        ("layers.*.weight", P(("fsdp", "tensor"))),
    ]
    decisions = decide(small_model(), mesh, overrides)
    assert decisions["layers.0.weight"].spec == P(None, "fsdp")
    assert decisions["layers.2.weight"].spec == P(("fsdp", "tensor"))
    assert decisions["layers.2.weight"].role == "override"
    assert decisions["layers.2.weight"].bytes_per_device == 64 * 64 * 4 // 4
    assert decisions["layers.0.bias"].role == "column"


BAD = [
    pytest.param(
        ("layers.9.*", P()),
        r"'layers\.9\.\*' matches no array.*layers\.0\.weight",
        id="no_match",
    ),
    pytest.param(
        ("layers.0.weight", P("model")),
        r"'layers\.0\.weight'.*axis: model.*not found in mesh.*data",
        id="unknown_axis",
    ),
    pytest.param(
        ("layers.0.weight", P("tensor", "tensor")),
        r"layers\.0\.weight.*duplicate entries for `tensor`",
        id="axis_twice",
    ),
    pytest.param(
        ("layers.0.weight", P(("fsdp", "fsdp"))),
        r"duplicate entries for `fsdp`",
        id="axis_twice_in_one_dim",
    ),
    pytest.param(
        ("layers.0.bias", P(None, "tensor")),
        r"layers\.0\.bias.*2 entries for 1 dims",
        id="too_many_entries",
    ),
    pytest.param(
        ("layers.3.weight", P("third")),
        r"dim 0 of size 32 does not divide into 3 parts",
        id="indivisible",
    ),
]


@pytest.mark.parametrize("call", [rx.shard_rules, rx.explain])
@pytest.mark.parametrize(("override", "message"), BAD)
def test_bad_overrides_are_refused_by_path_and_pattern(override, message, call):
    mesh = AbstractMesh(
        (1, 2, 2, 3),
        ("data", "fsdp", "tensor", "third"),
        axis_types=(AxisType.Auto,) * 4,
    )
    with pytest.raises(ValueError, match=message):
        call(small_model(), mesh, overrides=[override])


INT8 = [
    {"weight": shaped(2048, 2048, dtype=jnp.int8), "scale": shaped(2048)}
    for _ in range(2)
]
REPLICATED: dict[str, tuple[Any, tuple[str, ...]]] = {  # with the axes that split it
    "int8": (lambda: INT8, ("tensor", "fsdp")),
    "uint32": (
        lambda: [{"packed": shaped(2048, 256, dtype=jnp.uint32)} for _ in range(2)],
        ("fsdp",),
    ),
    "gru": (
        lambda: [eqx.nn.GRUCell(128, 192, key=jax.random.key(0)) for _ in range(8)],
        ("fsdp",),
    ),
    "unknown": (
        lambda: [{"a": shaped(16, 64, 256)}, {"b": shaped(16, 64, 256)}],
        ("fsdp",),
    ),
    "positions": (
        lambda: {"wpe": eqx.nn.Embedding(8192, 64, key=jax.random.key(0))},
        ("fsdp",),
    ),
    "norms": (lambda: [eqx.nn.LayerNorm(2**18)], ()),
    "6 heads": (
        lambda: [eqx.nn.MultiheadAttention(6, 384, key=jax.random.key(0))],
        ("fsdp",),
    ),
}


def test_much_that_is_replicated_is_never_silent():
    for (name, (make, split_over)), axis in itertools.product(
        REPLICATED.items(), ("tensor", "fsdp")
    ):
        model = eqx.filter_eval_shape(make)
        mesh = abstract_mesh(**{axis: 8})
        sizes = [
            (int(np.prod(d.shape)) * d.dtype.itemsize, d.spec)
            for d in decide(model, mesh).values()
        ]
        share = sum(n for n, spec in sizes if spec == P()) / sum(n for n, _ in sizes)
        assert (share <= 0.05) == (axis in split_over), (name, axis)
        assert len(warned(model, mesh)) == (axis not in split_over), (name, axis)


def test_the_warning_says_how_much_and_lists_the_largest():
    norm = eqx.filter_eval_shape(lambda: eqx.nn.LayerNorm(2**17))
    model = {"a": shaped(512, 8, 64), "b": shaped(8, 8), "norm": norm}
    (message,) = warned(model, abstract_mesh(tensor=4))
    assert message.startswith("shard_rules: 2.0 of 2.0 MiB are replicated")
    lines = message.splitlines()[1:]
    assert lines[0].startswith(
        "  a: float32[512,8,64], 1.0 MiB on every device: no rule matches it: pass"
    )
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "norm.weight",
        "norm.bias",
        "b",
    ]
    for mesh in (abstract_mesh(data=4), abstract_mesh(data=2)):
        assert warned(model, mesh) == []  # nothing was asked to be split
    assert (
        warned(
            model,
            abstract_mesh(tensor=4),
            overrides=[("a", P(None, "tensor")), ("norm.*", P())],
        )
        == []
    )


def test_what_tensor_cannot_split_is_stored_split():
    model = {"head": shaped(50257, 1024), "small": shaped(513, 1024)}
    assert decide(model, abstract_mesh(fsdp=2, tensor=4))["head"].spec == P(
        None, ("fsdp", "tensor")
    )
    assert decide(model, abstract_mesh(fsdp=2, tensor=4))["small"].spec == P(
        None, "fsdp"
    )
    no_fsdp = AbstractMesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    assert decide(model, no_fsdp)["head"].spec == P(), (
        "a mesh without fsdp has no name for it"
    )


def test_numbers_in_names_are_an_order():
    decisions = decide(
        {f"layer{i}": linear(16, 16) for i in range(8)}, abstract_mesh(tensor=4)
    )
    for i in range(8):
        assert decisions[f"layer{i}.weight"].role == ("column", "row")[i % 2]


def test_one_number_among_names_is_no_order():
    squares = {name: linear(16, 16) for name in ("a", "b", "c", "d8")}
    decisions = decide(squares, abstract_mesh(tensor=4))
    roles = [decisions[f"{name}.weight"].role for name in squares]
    assert roles == ["column", "row", "column", "row"]


GUESSES = [
    "w1 w2 w3 w4",
    "a b c d",
    "a b c d e",
    "r k v g cr o",
    "linear1 linear2 linear3 linear4",
    "x_gate x_main",
]
KNOWN = [
    "a b",
    "left middle right",
    "q k v o",
    "to_q to_k to_v to_out",
    "conv1 conv2",
    "fc1 fc2 fc3",
    "gate up down",
    "phi g out",
    "dense",
]


def test_square_matrices_under_names_that_say_nothing_are_a_guess_and_said_to_be():
    norm = eqx.filter_eval_shape(lambda: eqx.nn.LayerNorm(64))
    mesh = abstract_mesh(tensor=4)
    for names in GUESSES + KNOWN:
        model = {"layers": dict.fromkeys(names.split(), linear(64, 64)), "norm": norm}
        # Nothing is split over tensor.
        assert warned(model, abstract_mesh(fsdp=4)) == []
        assert warned(model, mesh, overrides=[("*.weight", P("tensor"))]) == []
        messages = warned(model, mesh)
        assert len(messages) == (names in GUESSES), names
        for message in messages:
            listed = names.split()[:5]
            assert all(f"layers.{name}.weight" in message for name in listed)
            assert "Pass loss_fn and batch" in message


def stacked(num_in, num_out, num=8):
    return abstract(
        lambda key: stack(lambda k: eqx.nn.MLP(num_in, num_out, 64, 2, key=k), key, num)
    )


# A model, the array that the path rules cannot place, and a piece of the reason.
UNPLACED = {
    "raw arrays": (
        {"p": {"w": shaped(512, 128), "a": shaped(8, 128), "b": shaped(512, 8)}},
        "p.w",
        "no rule matches it",
    ),
    "grouped convolution": (
        {"up": linear(64, 128), "conv": {"weight": shaped(1024, 1, 7)}},
        "conv.weight",
        "no rule matches it",
    ),
    "fused in one dim": (
        {"qkv": linear(64, 192), "proj": linear(64, 64)},
        "qkv.weight",
        "an even split crosses their borders",
    ),
    "without a partner": (
        {"inp": linear(64, 552), "out": linear(128, 64)},
        "inp.weight",
        "alone: its output is gathered",
    ),
    "ensemble": (
        {"critics": stacked(8, 1)},
        "critics.layers.1.weight",
        "its 8 copies may be an ensemble",
    ),
}


@pytest.mark.parametrize("name", UNPLACED)
def test_what_names_and_shapes_do_not_tell_is_said(name):
    model, path, reason = UNPLACED[name]
    (message,) = warned(model, abstract_mesh(tensor=4))
    (line,) = [x for x in message.splitlines() if x.startswith(f"  {path}: ")]
    assert reason in line
    assert "Pass loss_fn and batch" in message
    assert warned(model, abstract_mesh(fsdp=4)) == []
    assert warned(model, abstract_mesh(tensor=4), overrides=[("*", P())]) == []


PLACED = {
    "query, key and value apart": dict.fromkeys("qkvo", linear(64, 64)),
    "layers": stacked(64, 64),
    "too few members to split": stacked(8, 1, num=6),
    "one matrix": linear(64, 128),
}


@pytest.mark.parametrize("name", PLACED)
def test_nothing_is_said_of_what_they_tell(name):
    assert warned(PLACED[name], abstract_mesh(tensor=4)) == []


def test_the_only_matrix_that_can_be_an_output_projection_is_one():
    """As in windowed attention with a name of its own for it."""
    model = {"qkv": linear(64, 192), "pr": linear(64, 64)}
    decisions = decide(model, abstract_mesh(tensor=4))
    assert decisions["qkv.weight"].spec == P("tensor")
    assert decisions["pr.weight"].spec == P(None, "tensor")


def test_what_a_matrix_feeds_by_its_whole_width_comes_before_half_of_it():
    """As in a state-space layer with its projections apart: z and u are no gate of the
    projections that read the same input."""
    model = {
        "z": linear(128, 256),
        "u": linear(128, 256),
        "bc": linear(128, 32),
        "dt": linear(128, 8),
        "out": linear(256, 128),
    }
    fields = type(
        "Apart", (eqx.Module,), {"__annotations__": dict.fromkeys(model, Any)}
    )
    decisions = decide(fields(**model), abstract_mesh(tensor=4))
    for name, spec in {
        "z": P("tensor"),
        "u": P("tensor"),
        "out": P(None, "tensor"),
    }.items():
        assert decisions[f"{name}.weight"].spec == spec


# The last is split by rows.
FUSED = [
    "qkv_proj o_proj",
    "in_proj out_proj",
    "to_qkv to_out",
    "c_attn c_proj",
    "query_key_value dense",
]
LAST = [
    "g phi theta o",
    "a b c d e",
    "q k v o",
    "query_proj key_proj value_proj output_proj",
]


LISTS_OF_NAMES = [
    (listed, name)
    for listed in ("LAST_NAMES", "PARALLEL_WORDS")
    for name in getattr(matrices, listed)
]


@pytest.mark.parametrize(("listed", "name"), LISTS_OF_NAMES)
def test_each_name_that_decides_about_squares_is_needed_by_the_zoo(
    listed, name, monkeypatch
):
    others = tuple(x for x in getattr(matrices, listed) if x != name)
    monkeypatch.setattr(matrices, listed, others)
    mesh = abstract_mesh(data=2, tensor=TENSOR)
    moved = [
        entry.name
        for entry in ZOO
        if entry.name not in BY_PROGRAM_ALONE
        and unlike(
            {path: d.spec for path, d in decide(abstract(entry.make), mesh).items()},
            goldens(entry),
        )
    ]
    assert moved, f"no entry of the zoo needs {name!r} in {listed}"


def test_names_of_matrices_say_which_are_split_by_columns_and_which_by_rows():
    for names in (*FUSED, *LAST):
        *columns, row = names.split()
        model = {name: linear(32, 96 if names in FUSED else 32) for name in columns} | {
            row: linear(32, 32)
        }
        decisions = decide(model, abstract_mesh(tensor=4))
        assert all(
            decisions[f"{name}.weight"].spec == P("tensor") for name in columns
        ), names
        assert decisions[f"{row}.weight"].spec == P(None, "tensor"), names
    own = {
        "self": dict.fromkeys(("query", "key", "value"), linear(32, 32)),
        "output": linear(32, 32),
    }
    bert = {
        "attention": own,
        "intermediate": {"dense": linear(32, 64)},
        "output": {"dense": linear(64, 32)},
    }
    decisions = decide([bert], abstract_mesh(tensor=4))
    rows = {path for path, d in decisions.items() if d.spec == P(None, "tensor")}
    assert rows == {"0.attention.output.weight", "0.output.dense.weight"}


def test_explain_is_a_table_with_alike_layers_in_one_row():
    model = eqx.filter_eval_shape(
        lambda: [eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(i)) for i in range(12)]
    )
    explanation = rx.explain(model, abstract_mesh(data=2, tensor=4))
    lines = str(explanation).splitlines()
    assert len(lines) == 1 + 4 + 1
    assert lines[1].split()[:4] == [
        "[0-11].layers.0.weight",
        "float32[64,32]",
        "(tensor,",
        "-)",
    ]
    assert "2.0 KiB x12" in lines[1]
    assert lines[-1].endswith("48 arrays on data=2 x fsdp=1 x tensor=4")
    # Bytes on a device: weight, bias, weight, and a whole bias.
    one = 2048 + 64 + 2048 + 128
    assert explanation.bytes_per_device == 12 * one
    assert explanation.decisions["3.layers.1.weight"].spec == P(None, "tensor")
