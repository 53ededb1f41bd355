"""`attention`: equal to attention written out in float64, on every mesh and by every
implementation that runs here, with memory that grows with the length alone."""

import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_long, mesh_of, mesh_on
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._compiled.communication import attention_of
from redco_eqx._parallel import attention as blocks
from redco_eqx._parallel import kernels
from redco_eqx._parallel.kernels import Call, kernel_for
from redco_eqx._sharding.mesh import mapped_over
from redco_eqx.layers import attention

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 4, 37, 4, 2, 8


@pytest.fixture
def small_blocks(monkeypatch: Any) -> None:
    """Blocks of 8 queries, so that a text of 37 tokens has five."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", 8 * LENGTH)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 8)


def given(length: int = LENGTH, source: int | None = None, seed: int = 0) -> Any:
    source = length if source is None else source
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (ROWS, length, HEADS, SIZE)),
        jax.random.normal(keys[1], (ROWS, source, KV_HEADS, SIZE)),
        jax.random.normal(keys[2], (ROWS, source, KV_HEADS, SIZE)),
    )


SLOPES = jnp.asarray([0.5, 0.25, 0.125, 0.0625])


def alibi(query_positions: Any, key_positions: Any, heads: Any) -> Any:
    distance = jnp.abs(query_positions[:, None] - key_positions)
    return -SLOPES[heads][None, :, None, None] * distance


def hidden_pairs(query_positions: Any, key_positions: Any, heads: Any) -> Any:
    """Hide every third key, and all keys from query 5."""
    hidden = (key_positions % 3 == 0) | (query_positions[:, None] == 5)
    return jnp.where(hidden, -jnp.inf, 0.0)[None, None]


def segments(length: int = LENGTH) -> Any:
    """Texts with padding on the left, on the right, on both sides, and none."""
    place = np.arange(length)
    rows = [
        np.where(place < 5, 0, 1 + (place > 20)),
        np.where(place > 30, 0, 1 + (place > 7) + (place > 8)),
        np.where((place < 3) | (place > 33), 0, 1),
        np.ones(length),
    ]
    return jnp.asarray(np.stack(rows), jnp.int32)


def by_hand(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool,
    window: int | None = None,
    segments: Any = None,
    bias: Any = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Any:
    """Attention of one row and head, over all of them, in the dtype that comes in."""
    length, source = query.shape[1], key.shape[1]
    group = query.shape[2] // key.shape[2]
    place = jnp.arange(length)[:, None]
    other = jnp.arange(source)
    seen = jnp.ones((length, source), bool)
    if causal:
        seen = seen & (other <= place)
    if window is not None:
        seen = seen & (other > place - window) & (other < place + window)
    if callable(bias):
        bias = bias(jnp.arange(length), jnp.arange(source), jnp.arange(query.shape[2]))
    if bias is None:
        bias = jnp.zeros((1, 1, 1, 1))
    if segments is None:
        segments = jnp.zeros((query.shape[0], length)), jnp.zeros((1, source))
    if not isinstance(segments, tuple):
        segments = (segments, segments)

    def one(b: Any, h: Any) -> Any:
        scores = query[b, :, h] @ key[b, :, h // group].T
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        keys = segments[1][b % len(segments[1])]
        own = bias[b * bias.shape[0] // query.shape[0], h % bias.shape[1]]
        is_seen = seen & (segments[0][b][:, None] == keys) & (own > -jnp.inf)
        scores = scores + jnp.where(own > -jnp.inf, own, 0)
        parts = jnp.where(is_seen, jnp.exp(scores), 0)
        total = jnp.sum(parts, axis=-1, keepdims=True)
        weights = jnp.where(total > 0, parts / jnp.where(total > 0, total, 1), 0)
        return weights @ value[b, :, h // group]

    heads = jax.vmap(one, in_axes=(None, 0), out_axes=1)
    each = jax.vmap(heads, in_axes=(0, None))
    return each(jnp.arange(query.shape[0]), jnp.arange(query.shape[2]))


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "whole": {"causal": False},
    "window": {"causal": True, "window": 5},
    "window of one": {"causal": True, "window": 1},
    "window to both sides": {"causal": False, "window": 5},
    "window of all": {"causal": True, "window": 100},
    "texts": {"causal": True, "segments": segments()},
    "texts, not causal": {"causal": False, "segments": segments()},
    "texts and window": {"causal": True, "segments": segments(), "window": 6},
    "cap": {"causal": True, "cap": 0.7},
    "scale": {"causal": False, "scale": 0.9},
    "bias function": {"causal": True, "bias": alibi},
    "bias that hides": {"causal": False, "bias": hidden_pairs},
    "bias array": {
        "causal": False,
        "bias": alibi(jnp.arange(LENGTH), jnp.arange(LENGTH), jnp.arange(HEADS)),
    },
    "bias of rows": {
        "causal": True,
        "bias": jax.random.normal(jax.random.key(9), (2, HEADS, LENGTH, LENGTH)),
    },
    "all": {
        "causal": True,
        "segments": segments(),
        "window": 9,
        "cap": 2.0,
        "scale": 0.5,
        "bias": alibi,
    },
}


def with_gradients(function: Any, arrays: Any, mesh: Any = None) -> Any:
    """Heads, and the gradients of a loss of them."""

    def loss(arrays: Any) -> Any:
        heads = function(*arrays)
        return jnp.sum(jnp.sin(heads)), heads

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


@functools.cache
def exact(name: str) -> Any:
    whole = [np.asarray(x) for x in given()]
    with jax.enable_x64(True):
        options = {}
        for key, x in CASES[name].items():
            is_floating = isinstance(x, jax.Array) and x.dtype == jnp.float32
            options[key] = x.astype(jnp.float64) if is_floating else x
        arrays = [jnp.asarray(x, jnp.float64) for x in whole]
        found = with_gradients(lambda *x: by_hand(*x, **options), arrays)
        return jax.tree.map(np.asarray, found)


def assert_close(found: Any, wanted: Any, atol: float = 3e-5) -> None:
    (_, heads), gradients = found
    (_, exact_heads), exact_gradients = wanted
    np.testing.assert_allclose(heads, exact_heads, atol=atol, rtol=0)
    for x, y in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_all_queries_at_once(name: str) -> None:
    function = functools.partial(attention, **CASES[name])
    assert_close(with_gradients(function, given()), exact(name))


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_queries(name: str, small_blocks: None) -> None:
    function = functools.partial(attention, **CASES[name])
    found = with_gradients(function, given())
    assert "scan" in str(jax.make_jaxpr(function)(*given()))
    assert_close(found, exact(name))


@pytest.mark.parametrize(
    "mesh", ["data2xtensor4", "2x2x2", *in_long("one", "tensor8", "fsdp8")]
)
@pytest.mark.parametrize("name", ["texts and window", "bias function", "whole"])
def test_each_mesh(name: str, mesh: str, small_blocks: None) -> None:
    # 4 rows, 4 heads and 2 key/value heads divide over some of these meshes alone.
    on = mesh_of(mesh)
    place = NamedSharding(on, PartitionSpec())
    arrays = jax.device_put(given(), place)
    function = functools.partial(attention, **CASES[name])
    assert_close(with_gradients(function, arrays), exact(name))


TAKEN_BY_SPLASH = [
    name for name in CASES if "bias" not in name and name not in ("all", "scale")
]


def call_of(**options: Any) -> Call:
    """The call of one of the cases, without checks."""
    pair = options.get("segments")
    if pair is not None and not isinstance(pair, tuple):
        pair = (pair, pair)
    return Call(
        causal=options["causal"],
        window=options.get("window"),
        has_window=None,
        segments=pair,
        is_one_text=not isinstance(options.get("segments"), tuple),
        has_bias=False,
        cap=options.get("cap"),
        scale=SIZE**-0.5,
        has_dropout=False,
    )


def by_splash(**options: Any) -> Any:
    call = call_of(**options)
    return lambda *arrays: kernels.splash(
        *arrays, *(call.segments or ()), call=call, interpret=True
    )


@pytest.mark.parametrize("name", TAKEN_BY_SPLASH)
def test_the_kernel_for_tpus(name: str) -> None:
    assert_close(with_gradients(by_splash(**CASES[name]), given()), exact(name))


@pytest.mark.parametrize("way", ["xla", "splash"])
def test_keys_of_other_tokens(way: str) -> None:
    # Row 3 has padding alone: its queries see nothing, and give zeros.
    own = jnp.ones((ROWS, 9), jnp.int32)
    others = jnp.asarray(np.arange(21) < np.asarray([[21], [13], [1], [0]]), jnp.int32)
    options: dict[str, Any] = {"causal": False, "segments": (own, others)}
    function = functools.partial(attention, **options)
    if way == "splash":
        function = by_splash(**options)
    arrays = given(9, 21)
    wanted = with_gradients(functools.partial(by_hand, **options), arrays)
    found = with_gradients(function, arrays)
    assert not np.any(found[0][1][3])
    assert_close(found, wanted)


@pytest.mark.parametrize("window", [140, *in_long(None)])
def test_blocks_of_many_keys_to_the_kernel_for_tpus(window: int | None) -> None:
    # 300 tokens are three blocks of 128: some are visible, some hidden, some mixed.
    arrays = [x[:1] for x in given(300)]
    options: dict[str, Any] = {"causal": True, "window": window}
    wanted = with_gradients(functools.partial(by_hand, **options), arrays)
    assert_close(with_gradients(by_splash(**options), arrays), wanted, atol=2e-4)


@pytest.mark.parametrize("has_window", [True, False])
def test_a_window_that_some_layers_have(has_window: bool, small_blocks: None) -> None:
    name = "window" if has_window else "causal"
    found = with_gradients(
        lambda *x: attention(
            *x, causal=True, window=5, has_window=jnp.asarray(has_window)
        ),
        given(),
    )
    assert_close(found, exact(name))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_good_in_blocks(dtype: Any, monkeypatch: Any) -> None:
    # Gradients of keys add up over the blocks in float32.
    arrays = [x.astype(dtype) for x in given(256)]

    def run(*arrays: Any) -> Any:
        return attention(*arrays, causal=False)

    wide = [x.astype(jnp.float32) for x in arrays]
    (_, _), wanted = with_gradients(run, wide)
    (_, _), once = with_gradients(run, arrays)
    monkeypatch.setattr(blocks, "MOST_PAIRS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 2)
    (_, _), found = with_gradients(run, arrays)

    def away(some: Any) -> float:
        return max(
            float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))
            for x, y in zip(some, wanted)
        )

    assert found[1].dtype == dtype
    assert away(found) < 1.5 * away(once)


def test_second_derivatives(small_blocks: None) -> None:
    def loss(function: Any, query: Any) -> Any:
        _, key, value = given()
        return jnp.sum(jnp.sin(function(query, key, value, causal=True)))

    def twice(function: Any) -> Any:
        query = given()[0]
        gradient = jax.grad(functools.partial(loss, function))
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (x,))[1])(query)

    np.testing.assert_allclose(twice(attention), twice(by_hand), atol=1e-4)


# Dropout.


def dropped(mesh: Any = None, key: Any = None, **options: Any) -> Any:
    # With values that are the identity, the result is the probabilities.
    query, keys, _ = given(16)
    value = jnp.broadcast_to(jnp.eye(16)[None, :, None], (ROWS, 16, KV_HEADS, 16))
    arrays = (query, keys, value)
    if mesh is not None:
        arrays = jax.device_put(arrays, NamedSharding(mesh_of(mesh), PartitionSpec()))
    key = jax.random.key(0) if key is None else key
    run = functools.partial(attention, causal=False, dropout_key=key, **options)
    return np.asarray(jax.jit(run)(*arrays))


def test_dropout_keeps_some_probabilities_and_enlarges_them() -> None:
    whole = dropped()
    some = dropped(dropout=0.25)
    kept = some != 0
    np.testing.assert_allclose(some[kept], whole[kept] / 0.75, rtol=1e-5)
    # 4096 probabilities: three standard deviations are 0.02.
    assert abs(kept.mean() - 0.75) < 0.021
    # No two rows, heads or queries have the same.
    assert len(np.unique(kept.reshape(-1, 16), axis=0)) > 0.85 * ROWS * 16 * HEADS


@pytest.mark.parametrize("mesh", ["data2xtensor4", "2x2x2"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_is_the_same_on_each_mesh(mesh: str, impl: str) -> None:
    key = jax.random.key(1, impl=impl)
    one = dropped(key=key, dropout=0.5)
    other = dropped(mesh, key=key, dropout=0.5)
    np.testing.assert_array_equal(one != 0, other != 0)


def test_dropout_does_not_depend_on_the_block(monkeypatch: Any) -> None:
    one = dropped(dropout=0.5)
    monkeypatch.setattr(blocks, "MOST_PAIRS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 4)
    np.testing.assert_array_equal(one != 0, dropped(dropout=0.5) != 0)


# Memory and communication.


def compiled(length: int, mesh: Any, **options: Any) -> Any:
    spec = PartitionSpec(("data", "fsdp"), None, "tensor")
    place = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((4, length, 4, 8), jnp.float32, sharding=place)

    def loss(*arrays: Any) -> Any:
        return jnp.sum(attention(*arrays, **options) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bias": {"causal": True, "bias": alibi},
    "dropout": {"causal": True, "dropout": 0.1, "dropout_key": jax.random.key(0)},
    "window": {"causal": True, "window": 64},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_memory_grows_with_the_length(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "MOST_PAIRS", 128 * 128)
    mesh = mesh_of("2x2x2")
    sizes = []
    for length in (512, 1024):
        program = compiled(length, mesh, **OPTIONS[name])
        sizes.append(program.memory_analysis().temp_size_in_bytes)
        assert f"{length},{length}]" not in program.as_text()
    # Twice the length takes twice the memory, not four times.
    assert sizes[1] < 2.2 * sizes[0]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_long", [False, True])
def test_nothing_is_communicated(name: str, is_long: bool, monkeypatch: Any) -> None:
    if is_long:
        monkeypatch.setattr(blocks, "MOST_PAIRS", 64 * 64)
        monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 32)
    mesh = mesh_of("2x2x2")
    program = compiled(192, mesh, **OPTIONS[name])
    assert ("while(" in program.as_text()) or not is_long
    assert not rx.communication(program, mesh)
    # The name that `fit` prints.
    assert attention_of(program.as_text()) == "xla"


def test_the_rule_for_blocks() -> None:
    sizes = {n: blocks.block_size(n, n) for n in (64, 1024, 1025, 4096, 32768, 131072)}
    assert sizes == {64: 64, 1024: 1024, 1025: 896, 4096: 256, 32768: 128, 131072: 128}


# The choice of a kernel.


def chosen(mesh: Any, implementation: Any = None, **options: Any) -> Any:
    """The kernel for a call with these sizes and options."""
    sizes = {"length": 1024, "heads": 8, "kv_heads": 8, "dtype": jnp.bfloat16}
    for name in sizes:
        sizes[name] = options.pop(name, sizes[name])
    source = options.pop("source", sizes["length"])
    place = NamedSharding(mesh, PartitionSpec())
    shape = (8, sizes["length"], sizes["heads"], 64)
    query = jax.ShapeDtypeStruct(shape, sizes["dtype"], sharding=place)
    shape = (8, source, sizes["kv_heads"], 64)
    key = jax.ShapeDtypeStruct(shape, sizes["dtype"], sharding=place)
    call = dataclasses.replace(call_of(causal=options.pop("causal", True)), **options)
    found = []

    def trace(query: Any, key: Any) -> Any:
        found.append(kernel_for(query, key, key, call, implementation))
        return query

    eqx.filter_eval_shape(trace, query, key)
    return found[0]


def test_a_map_over_data_shards_leaves_the_kernel() -> None:
    """As `reduce_once` maps a loss: its axis splits none of the rows."""
    mesh = mesh_on("tpu", "TPU v5 lite", data=3)
    assert chosen(mesh) is None
    with mapped_over("data"):
        assert chosen(mesh) == "splash"


PAIR = (jnp.ones((8, 1024), jnp.int32),) * 2

ON_TPU: dict[str, tuple[dict[str, Any], bool]] = {
    "causal": ({}, True),
    "float32": ({"dtype": jnp.float32}, True),
    "float16": ({"dtype": jnp.float16}, False),
    "texts": ({"segments": PAIR}, True),
    "window and cap": ({"window": 16, "cap": 50.0}, True),
    "short": ({"length": 256}, False),
    "bias": ({"has_bias": True}, False),
    "dropout": ({"has_dropout": True}, False),
    "pair of texts": (
        {"segments": PAIR, "is_one_text": False, "causal": False},
        True,
    ),
}


@pytest.mark.parametrize("name", ON_TPU)
def test_what_tpus_take(name: str) -> None:
    options, is_taken = ON_TPU[name]
    mesh = mesh_on("tpu", "TPU v5 lite")
    assert chosen(mesh, **options) == ("splash" if is_taken else None)


@pytest.mark.parametrize(
    ("sizes", "options", "is_taken"),
    [
        ({"data": 2, "tensor": 4}, {}, True),
        ({"fsdp": 8}, {}, True),
        ({"tensor": 4}, {"kv_heads": 2}, False),
        ({"data": 4, "fsdp": 4}, {}, False),
        ({"sequence": 2}, {}, False),
    ],
)
def test_meshes_of_tpus_that_divide(sizes: Any, options: Any, is_taken: bool) -> None:
    mesh = mesh_on("tpu", "TPU v5 lite", **sizes)
    assert chosen(mesh, **options) == ("splash" if is_taken else None)


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_other_platforms_have_no_kernel(platform: str) -> None:
    assert chosen(mesh_on(platform, "some")) is None


def test_xla_by_name_takes_no_kernel() -> None:
    assert chosen(mesh_on("tpu", "TPU v5 lite"), "xla") is None


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "splash on a CPU": ("splash", {}, "for TPUs, and the program is for cpu"),
    "cudnn on a CPU": ("cudnn", {}, "for GPUs, and the program is for cpu"),
    "no such": ("flash", {}, "must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("annotations_unchecked")
def test_a_kernel_that_cannot_run_is_refused_by_name(name: str) -> None:
    implementation, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attention(*given(), causal=True, implementation=implementation, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"has_bias": True}, "takes no bias"),
        ({"has_dropout": True}, "no dropout"),
        ({"dtype": jnp.float16}, "not float16"),
        ({"segments": PAIR, "is_one_text": False}, "no pair of segments"),
    ],
)
def test_a_kernel_for_tpus_is_refused_with_the_reason(
    options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(mesh_on("tpu", "TPU v5 lite"), "splash", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"has_bias": True}, "takes no bias"),
        ({"has_dropout": True}, "no dropout"),
        ({"segments": PAIR}, "takes no segments"),
        ({"cap": 50.0}, "has no cap"),
        ({"window": 16, "causal": False}, "windows for causal attention alone"),
        ({"dtype": jnp.float32}, "not float32"),
        ({"source": 512, "causal": False}, "1024 queries, but 512 keys"),
    ],
)
def test_a_kernel_for_gpus_is_refused_with_the_reason(
    options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(mesh_on("gpu", "NVIDIA H100 80GB HBM3"), "cudnn", **options)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [("gpu", "NVIDIA H100 80GB HBM3", "cudnn"), ("tpu", "TPU v5 lite", "splash")],
)
def test_a_kernel_on_a_mesh_that_does_not_divide_is_refused(
    platform: str, kind: str, name: str
) -> None:
    mesh = mesh_on(platform, kind, tensor=4)
    with pytest.raises(ValueError, match="8 rows and 2 key/value heads do not divide"):
        chosen(mesh, name, kv_heads=2)


def test_a_kernel_that_is_named_takes_short_texts() -> None:
    assert chosen(mesh_on("tpu", "TPU v5 lite"), "splash", length=64) == "splash"


def test_a_second_derivative_of_a_kernel_says_what_to_do() -> None:
    once = kernels._differentiable_once(by_splash(causal=True), "splash")
    query, key, value = given()

    def loss(query: Any) -> Any:
        return jnp.sum(jnp.sin(once(query, key, value)))

    wanted = jax.grad(lambda q: jnp.sum(jnp.sin(by_hand(q, key, value, causal=True))))
    gradient = jax.grad(loss)
    np.testing.assert_allclose(gradient(query), wanted(query), atol=3e-5)
    with pytest.raises(ValueError, match="Pass implementation='xla'"):
        jax.jvp(gradient, (query,), (query,))
    with pytest.raises(ValueError, match="Pass implementation='xla'"):
        jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(query)


# Bad input.

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "window 0": ({"window": 0}, "window=0, but it must be a positive int"),
    "window -1": ({"window": -1}, "window=-1"),
    "window of a float": ({"window": 2.0}, "window=2.0"),
    "has_window alone": ({"has_window": jnp.asarray(True)}, "without a window"),
    "segments of another shape": (
        {"segments": jnp.ones((ROWS, 5), jnp.int32)},
        r"int32\[4, 5\], but it must be integers of shape \(4, 37\)",
    ),
    "segments of floats": (
        {"segments": jnp.ones((ROWS, LENGTH))},
        "must be integers",
    ),
    "three segments": ({"segments": (segments(),) * 3}, "a tuple of 3"),
    "dropout without a key": ({"dropout": 0.1}, "without a dropout_key"),
    "dropout of 1": (
        {"dropout": 1.0, "dropout_key": jax.random.key(0)},
        "less than 1",
    ),
    "bias of another shape": ({"bias": jnp.zeros((1, HEADS, 5, 5))}, "bias has shape"),
    "bias of other rows": (
        {"bias": jnp.zeros((3, HEADS, LENGTH, LENGTH))},
        "n divides 4 rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("annotations_unchecked")
def test_bad_arguments(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        attention(*given(), causal=True, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k[0], v[0]), "a single text is query"),
        (lambda q, k, v: (q, k[:, :5], v), "key and value must have the same"),
        (lambda q, k, v: (q[:2], k, v), "same number of rows"),
        (lambda q, k, v: (q[:, :, :3], k, v), "multiple of those of key, 2"),
        (lambda q, k, v: (q, k[:, :5], v[:, :5]), "37 queries and 5 keys"),
    ],
)
@pytest.mark.usefixtures("annotations_unchecked")
def test_shapes_that_do_not_fit(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*change(*given()), causal=True)


def test_no_rows_have_no_heads() -> None:
    arrays = [x[:0] for x in given()]
    bias = jnp.zeros((0, HEADS, LENGTH, LENGTH))
    heads = attention(*arrays, causal=True, bias=bias)
    assert heads.shape == (0, LENGTH, HEADS, SIZE)


def test_the_gradients_of_a_table_behind_a_bias(small_blocks: None) -> None:
    """T5's bias: an array that the function closes over is trained."""
    table = jax.random.normal(jax.random.key(3), (10, HEADS))

    def bias(table: Any) -> Any:
        def of(query_positions: Any, key_positions: Any, heads: Any) -> Any:
            distance = jnp.abs(query_positions[:, None] - key_positions)
            return jnp.moveaxis(table[jnp.minimum(distance, 9)][..., heads], -1, 0)[
                None
            ]

        return of

    def loss(function: Any, table: Any) -> Any:
        heads = function(*given(), causal=True, bias=bias(table))
        return jnp.sum(jnp.sin(heads))

    found = jax.jit(jax.grad(functools.partial(loss, attention)))(table)
    wanted = jax.grad(functools.partial(loss, by_hand))(table)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert math.isfinite(float(jnp.sum(found)))
