"""The building blocks: equal to the plain operations in value and gradient, at the communication they state.

Layouts are held by counts of the compiled program; that a result is right shows nothing about a layout.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MESHES, filled
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._compiled.communication import Collective, Communication, communication
from redco_eqx._compiled.hlo import num_elements
from redco_eqx._parallel.scan import check_remat
from redco_eqx.models import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

SIZE, LENGTH, BATCH = 64, 16, 8
KINDS = ("all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


@cache
def mesh_of(name: str) -> Mesh:
    return rx.make_mesh(**{**MESHES, "fsdp2xtensor4": {"fsdp": 2, "tensor": 4}}[name])


def counted(compiled: Any, mesh: Mesh, *, larger_than: int = 0) -> Counter:
    """`{(kind, axes): number of arrays}` of more than so many elements on a device, loops multiplied out."""
    counts: Counter = Counter()
    for c in communication(compiled, mesh):
        for shape in c.shapes:
            if num_elements(shape) > larger_than:
                counts[c.kind, c.axes] += c.count
    return counts


def gathered_bytes(found: Iterable[Collective], axis: str) -> int:
    return sum(c.total_bytes for c in found if c.kind == "all-gather" and c.axes == (axis,))


# Blocks of a layer: attention with a small number of key/value heads, and a gated MLP.


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __call__(self, x: Any, plain: bool, parallel: bool) -> Any:
        siblings = (self.query, self.key, self.value)
        if plain:
            q, k, v = (per_token(layer)(x) for layer in siblings)
        else:
            q, k, v = rx.layers.column(x, *siblings, unit=8, sequence_parallel=parallel)
        heads = (y.reshape(*y.shape[:-1], -1, 8) for y in (q, k, v))
        y = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(q.shape)
        if plain:
            return per_token(self.output)(y)
        return rx.layers.row(y, self.output, unit=8, sequence_parallel=parallel)


class Layer(eqx.Module):
    attention: Attention
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x: Any, plain: bool = False, parallel: bool = False) -> Any:
        x = x + self.attention(x, plain, parallel)
        if plain:
            return x + per_token(self.down)(jax.nn.silu(per_token(self.gate)(x)) * per_token(self.up)(x))
        gate, up = rx.layers.column(x, self.gate, self.up, sequence_parallel=parallel)
        return x + rx.layers.row(jax.nn.silu(gate) * up, self.down, sequence_parallel=parallel)


def per_token(layer: Any) -> Any:
    return lambda x: layer(x) if x.ndim == 1 else jax.vmap(per_token(layer))(x)


def make_layer(kv_heads: int = 8) -> Layer:
    def linear(i: int, o: int) -> Any:
        return eqx.filter_eval_shape(lambda: eqx.nn.Linear(i, o, key=jax.random.key(0)))

    kv = 8 * kv_heads
    attention = Attention(linear(SIZE, SIZE), linear(SIZE, kv), linear(SIZE, kv), linear(SIZE, SIZE), 8)
    return Layer(attention, linear(SIZE, 128), linear(SIZE, 128), linear(128, SIZE))


@cache
def layers_of(stacked: bool, kv_heads: int) -> Any:
    layers = [filled(make_layer(kv_heads), jnp.float32, seed) for seed in range(2)]
    return jax.tree.map(lambda *x: jnp.stack(x), *layers) if stacked else layers


def stream() -> Any:
    return jnp.asarray(np.random.default_rng(9).normal(size=(BATCH, LENGTH, SIZE)), jnp.float32)


@cache
def reference(kv_heads: int) -> Any:
    """Loss, and its gradient by the layers (a list) and by the stream, of plain layers on one device."""

    def loss(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = layer(x, plain=True)
        return jnp.mean(x**2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(layers_of(False, kv_heads), stream())


def run(
    mesh: Mesh, *, stacked: bool = True, kv_heads: int = 8, parallel: bool = False, vmapped: bool = False,
    remat: Any = "none",
) -> tuple[Any, Any]:  # fmt: skip
    """The compiled gradient of the blocks on a mesh, and what it gives."""
    layers, x = layers_of(stacked, kv_heads), stream()
    shardings = rx.shard_rules(layers, mesh)
    rows = rx.batch_sharding(mesh)

    def loss(layers: Any, x: Any) -> Any:
        def through(x: Any) -> Any:
            return rx.layers.scan_layers(
                lambda layer, x: layer(x, parallel=parallel),
                layers,
                x,
                remat=remat,
                batched=not vmapped,
                sequence_parallel=parallel,
            )

        return jnp.mean((jax.vmap(through) if vmapped else through)(x) ** 2)

    gradient = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1)),
        in_shardings=(shardings, rows),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), (shardings, rows)),
    )
    placed = jax.device_put((layers, x), (shardings, rows))
    compiled = gradient.lower(*placed).compile()
    return compiled, compiled(*placed)


def assert_is_reference(result: Any, *, stacked: bool, kv_heads: int) -> None:
    value, (by_layers, by_x) = reference(kv_heads)
    if stacked:
        by_layers = jax.tree.map(lambda *x: np.stack(x), *by_layers)
    for got, expected in zip(jax.tree.leaves(result), jax.tree.leaves((value, (by_layers, by_x))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)


CASES = {
    "one": {},
    "data8": {"vmapped": True},
    "tensor8": {"remat": "row_out"},
    "fsdp8": {"remat": "full"},
    "fsdp2xtensor4": {"stacked": False, "remat": "row_out"},
    "data2xtensor4": {"vmapped": True, "stacked": False},
    "2x2x2": {"remat": "full", "parallel": True},
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_equal_plain_layers(name):
    case = {"stacked": True, **CASES[name]}
    _, result = run(mesh_of(name), **case)
    assert_is_reference(result, stacked=case["stacked"], kv_heads=8)


@pytest.mark.parametrize("parallel", [False, True])
def test_key_and_value_heads_that_do_not_divide_stay_whole(parallel):
    # 2 heads on 4 shards: `unit` tells, and the widths (16) would not.
    _, result = run(mesh_of("data2xtensor4"), kv_heads=2, parallel=parallel)
    assert_is_reference(result, stacked=True, kv_heads=2)


# column and row, one by one.


def siblings() -> list[Any]:
    shape = eqx.filter_eval_shape(lambda: eqx.nn.Linear(SIZE, 128, key=jax.random.key(0)))
    return [filled(shape, jnp.float32, seed) for seed in range(3)]


def input_gradient(apply: Any, *arrays: Any, specs: Any) -> tuple[Counter, Any]:
    """Large collectives on data 2 x tensor 4 of the gradient by the first array, and its values."""
    mesh = mesh_of("data2xtensor4")

    def loss(*arrays: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(apply(*arrays)))

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    # Only the input's gradient, as it came: what is asked of the weights is another matter.
    gradient = jax.jit(jax.value_and_grad(loss), in_shardings=shardings, out_shardings=(None, shardings[0]))
    placed = jax.device_put(arrays, shardings)
    compiled = gradient.lower(*placed).compile()
    return counted(compiled, mesh, larger_than=BATCH * LENGTH), compiled(*placed)


ROWS, COLUMN, ROW = PartitionSpec("data"), PartitionSpec("tensor"), PartitionSpec(None, "tensor")


def split_as(layers: list[Any], weight: PartitionSpec, bias: PartitionSpec) -> list[Any]:
    return [jax.tree.map(lambda a: weight if a.ndim == 2 else bias, layer) for layer in layers]


def test_siblings_share_one_reduction_backward():
    layers = siblings()
    specs = (ROWS, split_as(layers, COLUMN, COLUMN))
    counts, result = input_gradient(
        lambda x, layers: rx.layers.column(x, *layers), stream(), layers, specs=specs
    )
    assert counts == {("all-reduce", ("tensor",)): 1}

    def apart(x: Any, layers: Any) -> Any:
        return [per_token(layer)(x) for layer in layers]

    plain, expected = input_gradient(apart, stream(), layers, specs=specs)
    assert plain["all-reduce", ("tensor",)] >= 1  # three on CPU, where nothing merges them
    np.testing.assert_allclose(result[1], expected[1], rtol=1e-4, atol=1e-5)


def test_two_rows_side_by_side_share_one_reduction_forward():
    def linear(seed: int) -> Any:
        shape = eqx.filter_eval_shape(lambda: eqx.nn.Linear(128, SIZE, key=jax.random.key(0)))
        return filled(shape, jnp.float32, seed)

    layers = [linear(0), linear(1)]
    xs = [jnp.tile(stream(), 2), jnp.tile(stream(), 2) + 1]
    wide = PartitionSpec("data", None, "tensor")
    specs = ([wide, wide], split_as(layers, ROW, PartitionSpec()))
    counts, result = input_gradient(lambda xs, layers: rx.layers.row(xs, layers), xs, layers, specs=specs)
    assert counts == {("all-reduce", ("tensor",)): 1}
    expected = jax.value_and_grad(
        lambda xs: jnp.sum(jnp.sin(per_token(layers[0])(xs[0]) + per_token(layers[1])(xs[1])))
    )(xs)
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


class Kernel(eqx.Module):
    """Stored (in, out)."""

    kernel: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel + self.bias


class LoRA(eqx.Module):
    base: Kernel
    lora_a: Any
    lora_b: Any

    def __call__(self, x: Any) -> Any:
        return self.base(x) + x @ self.lora_a @ self.lora_b


class Scaled(eqx.Module):
    """Has an array that the rules do not know."""

    weight: Any
    scale: Any

    def __call__(self, x: Any) -> Any:
        return (x @ self.weight.T) * self.scale


def other_layers() -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    kernel = Kernel(normal(SIZE, SIZE), normal(SIZE))
    return {
        "kernel": kernel,
        "lora": LoRA(kernel, normal(SIZE, 4), normal(4, SIZE)),
        "scaled": Scaled(normal(SIZE, SIZE), normal(SIZE)),
        "indivisible": Kernel(normal(SIZE, SIZE - 2), normal(SIZE - 2)),
        "function": jnp.sin,
    }


@pytest.mark.parametrize("name", list(other_layers()))
@pytest.mark.parametrize("parallel", [False, True])
def test_any_layer_gives_what_it_gives_alone(name, parallel):
    layer, mesh = other_layers()[name], mesh_of("data2xtensor4")
    x = jax.device_put(stream(), rx.batch_sharding(mesh))
    arrays, static = eqx.partition(layer, eqx.is_array)
    arrays = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def both(arrays: Any, x: Any) -> Any:
        layer = eqx.combine(arrays, static)
        (column,) = rx.layers.column(x, layer, sequence_parallel=parallel)
        return column, rx.layers.row(x, layer, sequence_parallel=parallel)

    for got in both(arrays, x):
        np.testing.assert_allclose(got, layer(stream()), rtol=1e-4, atol=1e-4)


# Both ends of a language model.

ROWS_OF_TABLE = 128


def ends(tied: bool) -> dict[str, Any]:
    shape = eqx.filter_eval_shape(
        lambda: {
            "embedding": eqx.nn.Embedding(ROWS_OF_TABLE, SIZE, key=jax.random.key(0)),
            "lm_head": None if tied else eqx.nn.Linear(SIZE, ROWS_OF_TABLE, key=jax.random.key(0)),
        }
    )
    return filled(shape, jnp.float32, 5)


@cache
def tokens() -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    ids, labels = rng.integers(0, ROWS_OF_TABLE, (2, BATCH, LENGTH)).astype(np.int32)
    labels[0, :5] = labels[3, 2] = -100
    return jnp.asarray(ids), jnp.asarray(labels)


def plain_loss(model: dict[str, Any], ids: Any, labels: Any) -> Any:
    hidden = jnp.tanh(model["embedding"].weight[ids])
    head = model["lm_head"]
    logits = hidden @ model["embedding"].weight.T if head is None else per_token(head)(hidden)
    counts = labels != -100
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.sum(each * counts) / jnp.sum(counts)


@pytest.mark.parametrize(
    ("name", "tied", "num_chunks", "parallel"),
    [
        ("one", False, 4, False),
        ("data8", True, 1, False),
        ("tensor8", False, 1, True),
        ("fsdp8", True, 4, False),
        ("fsdp8", False, 1, False),
        ("data2xtensor4", False, 4, False),
        ("2x2x2", True, 1, False),
        ("2x2x2", False, 4, False),
        ("2x2x2", False, 1, True),
    ],
)
def test_lookup_and_cross_entropy_over_a_split_vocabulary(name, tied, num_chunks, parallel):
    mesh, model = mesh_of(name), ends(tied)
    shardings, rows = rx.shard_rules(model, mesh), rx.batch_sharding(mesh)

    def loss(model: dict[str, Any], ids: Any, labels: Any) -> Any:
        table = model["embedding"].weight
        hidden = jnp.tanh(rx.layers.embed(table, ids, sequence_parallel=parallel))
        head = table if model["lm_head"] is None else model["lm_head"]
        return rx.layers.cross_entropy(
            hidden, head, labels, num_chunks=num_chunks, sequence_parallel=parallel
        ).value

    gradient = jax.jit(
        jax.value_and_grad(loss),
        in_shardings=(shardings, rows, rows),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings),
    )
    placed = jax.device_put((model, *tokens()), (shardings, rows, rows))
    compiled = gradient.lower(*placed).compile()
    expected = jax.value_and_grad(plain_loss)(model, *tokens())
    for got, wanted in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)

    found = communication(compiled, mesh)
    assert not [c for c in found if c.kind in KINDS]
    # Neither the batch nor the logits are gathered: over fsdp each table once, and over tensor the stream.
    assert {c.axes for c in found if c.kind == "all-gather"} <= {("fsdp",), ("tensor",)}
    tables = (1 if tied else 2) * 4 * ROWS_OF_TABLE * SIZE // mesh.shape["tensor"]
    assert gathered_bytes(found, "fsdp") == (tables if mesh.shape["fsdp"] > 1 else 0)
    stream_bytes = 4 * BATCH * LENGTH * SIZE // (mesh.shape["data"] * mesh.shape["fsdp"])
    # The lookup's gradient and the head's input.
    assert gathered_bytes(found, "tensor") == (2 * stream_bytes if parallel else 0)
    large = [
        c for c in found if c.axes == ("tensor",) and c.kind == "all-reduce" and c.result_bytes >= stream_bytes
    ]
    assert sum(c.count for c in large) == (2 if mesh.shape["tensor"] > 1 and not parallel else 0)


def test_labels_weigh_what_they_are_given():
    model, (ids, labels) = ends(tied=True), tokens()
    table, weights = model["embedding"].weight, jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3
    mean = rx.layers.cross_entropy(jnp.tanh(table[ids]), table, labels, weights=weights)
    logits = jnp.tanh(table[ids]) @ table.T
    counted = weights * (labels != -100)
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(mean.total, jnp.sum(each * counted), rtol=1e-5)
    assert mean.weight == jnp.sum(counted)


# Our models.

MODELS: dict[str, Any] = {
    "llama": lambda **more: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ROWS_OF_TABLE, hidden_size=SIZE, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=8, max_position_embeddings=LENGTH,
        ),
        **more,
    ),
    "gpt2": lambda **more: GPT2LMHeadModel(
        GPT2Config(vocab_size=ROWS_OF_TABLE, n_embd=SIZE, n_layer=2, n_head=8, n_positions=LENGTH), **more
    ),
    "gptj": lambda **more: GPTJForCausalLM(
        GPTJConfig(
            vocab_size=ROWS_OF_TABLE, n_embd=SIZE, n_layer=2, n_head=8, n_positions=LENGTH, rotary_dim=4
        ),
        **more,
    ),
    "opt": lambda **more: OPTForCausalLM(
        OPTConfig(
            vocab_size=ROWS_OF_TABLE, hidden_size=SIZE, word_embed_proj_dim=SIZE, ffn_dim=256,
            num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=LENGTH,
        ),
        **more,
    ),
}  # fmt: skip


def model_loss(model: Any, batch: Any, key: Any) -> Any:
    hidden, _ = model.hidden_states(batch["ids"])
    return rx.layers.cross_entropy(
        hidden, model.head, batch["labels"], sequence_parallel=model.sequence_parallel
    )


@cache
def step_of(
    name: str, mesh_name: str, *, train: bool = True, **more: Any
) -> tuple[Any, Communication, dict[str, Any]]:
    """Mesh, collectives and abstract arrays of one step of a model, compiled and not run."""
    mesh = mesh_of(mesh_name)
    model = eqx.filter_eval_shape(lambda key: MODELS[name](**more, key=key), jax.random.key(0))
    shardings = rx.shard_rules(model, mesh)
    model = jax.tree.map(
        lambda x, s: x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model, shardings
    )
    optimizer = optax.sgd(1e-3)
    state = rx.init_state(model, optimizer, key=jax.random.key(0))
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=rx.batch_sharding(mesh))
    batch = {"ids": ids, "labels": ids}
    if train:
        step = functools.partial(rx.train_step, loss_fn=model_loss, optimizer=optimizer, shardings=shardings)
    else:
        step = functools.partial(rx.eval_step, loss_fn=model_loss, shardings=shardings)
    return mesh, communication(jax.jit(step).lower(state, batch).compile(), mesh), rx.to_arrays(model)


def over_tensor(mesh: Mesh, found: Iterable[Collective]) -> Counter:
    """Arrays that cross the tensor axis (alone or with others), larger than one number for each token."""
    counts: Counter = Counter()
    for c in found:
        for shape in c.shapes if any("tensor" in axis for axis in c.axes) else ():
            if num_elements(shape) > BATCH * LENGTH:
                counts[c.kind, c.axes] += c.count
    return counts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("mesh_name", "stacked"), [("data2xtensor4", True), ("data2xtensor4", False), ("2x2x2", True)]
)
def test_each_layer_reduces_twice_forward_and_twice_backward(name, mesh_name, stacked):
    mesh, found, _ = step_of(name, mesh_name, stacked=stacked, remat="row_out")
    per_layer = 1 if name == "gptj" else 2  # attention and MLP side by side share them
    # And once for the lookup, and once for the gradient of what the head reads. No weight is gathered.
    assert over_tensor(mesh, found) == {("all-reduce", ("tensor",)): 2 * (2 * per_layer) + 2}
    assert not [c for c in found if c.kind in KINDS]
    assert {c.axes for c in found if c.kind == "all-gather"} <= {("fsdp",)}


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_reduces_twice_a_layer(name):
    mesh, found, _ = step_of(name, "data2xtensor4", train=False, stacked=True)
    per_layer = 1 if name == "gptj" else 2
    assert over_tensor(mesh, found) == {("all-reduce", ("tensor",)): 2 * per_layer + 1}


def test_full_rematerialisation_repeats_only_what_row_out_keeps():
    mesh, found, _ = step_of("llama", "data2xtensor4", stacked=True, remat="full")
    # The last layer's MLP need not be repeated: nothing after it is needed backward.
    assert over_tensor(mesh, found) == {("all-reduce", ("tensor",)): 2 * (4 + 1) + 2}


@pytest.mark.parametrize("remat", ["none", "full", "row_out"])
@pytest.mark.parametrize("mesh_name", ["fsdp8", "2x2x2"])
@pytest.mark.parametrize("stacked", [False, True])
def test_fsdp_gathers_each_layer_forward_and_again_backward(mesh_name, stacked, remat):
    mesh, found, arrays = step_of("llama", mesh_name, stacked=stacked, remat=remat)
    layers = [x for path, x in arrays.items() if path.startswith("model.layers")]
    others = [x for path, x in arrays.items() if not path.startswith("model.layers")]

    def whole(xs: list[Any]) -> int:
        split = [x for x in xs if any(entry == "fsdp" for entry in x.sharding.spec)]
        return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in split) * mesh.shape["fsdp"]

    # Whatever is kept of the activations, weights are not (ZeRO-3); the lookup and the head need theirs once.
    assert gathered_bytes(found, "fsdp") == 2 * whole(layers) + whole(others)
    # Gradients are summed over each axis once, whether scattered (as TPUs do) or not.
    sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter") and "fsdp" in c.axes]
    parts = sum(c.total_bytes * (mesh.shape["fsdp"] if c.kind == "reduce-scatter" else 1) for c in sums)
    assert whole(layers + others) <= parts <= 1.05 * whole(layers + others)


def test_fsdp_and_tensor_add_up():
    _, both, _ = step_of("llama", "2x2x2", stacked=True, remat="row_out")
    tensor, alone, _ = step_of("llama", "data2xtensor4", stacked=True, remat="row_out")
    assert over_tensor(mesh_of("2x2x2"), both) == over_tensor(tensor, alone)


def only_streams(c: Collective) -> Collective:
    """Keep only the arrays (batch, length, size) of a combined collective."""
    shapes = tuple(shape for shape in c.shapes if shape.count(",") == 2)
    return dataclasses.replace(c, shapes=shapes, result_bytes=4 * sum(map(num_elements, shapes)))


@pytest.mark.parametrize(
    ("name", "mesh_name"), [*((name, "data2xtensor4") for name in MODELS), ("llama", "2x2x2")]
)
def test_a_stream_split_along_the_tokens_moves_the_same_bytes(name, mesh_name):
    def sent(parallel: bool) -> int:
        _, found, _ = step_of(name, mesh_name, stacked=True, remat="none", sequence_parallel=parallel)
        assert not [c for c in found if c.kind in KINDS]
        streams = [c for c in map(only_streams, found) if c.axes == ("tensor",) and c.result_bytes]
        assert {c.kind for c in streams} == ({"all-gather", "reduce-scatter"} if parallel else {"all-reduce"})
        return sum(c.sent_bytes for c in streams)

    if mesh_name == "data2xtensor4":  # with fsdp the gathers before the products are done again backward
        assert sent(True) == sent(False)
    else:
        assert sent(False) <= sent(True) <= 1.5 * sent(False)


def test_a_model_with_a_split_stream_computes_the_same():
    ids, labels = tokens()
    results = []
    for name, more in {"one": {}, "2x2x2": {"sequence_parallel": True, "remat": "row_out"}}.items():
        mesh = mesh_of(name)
        model = MODELS["gptj"](stacked=True, **more, key=jax.random.key(2))
        shardings, rows = rx.shard_rules(model, mesh), rx.batch_sharding(mesh)
        model = eqx.filter_shard(model, shardings)
        batch = {"ids": jax.device_put(ids, rows), "labels": jax.device_put(labels, rows)}
        gradient = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, b: model_loss(m, b, None).value))
        results.append(jax.tree.leaves(gradient(model, batch)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["one", "2x2x2"])
@pytest.mark.parametrize("stacked", [False, True])
def test_what_differs_between_layers_and_what_they_carry_go_along(stacked, name):
    """The result is that of a loop written by hand; only the carry has its leading dim."""
    keys = jax.random.split(jax.random.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(keys)
    layers = [jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, stack) for i in range(3)]
    x, sums, shifts = jnp.ones((8, 4)), jnp.zeros((5, 8)), jnp.arange(3.0)

    def apply(given: Any, flow: Any) -> Any:
        x, sums = flow
        x = jax.vmap(given["layer"])(x) + given["shift"]
        return x, jnp.roll(sums, 1, axis=0).at[0].set(x.sum(1))

    expected, expected_sums = x, sums
    for layer, shift in zip(layers, shifts, strict=True):
        expected = expected @ layer.weight.T + layer.bias + shift
        expected_sums = jnp.concatenate([expected.sum(1)[None], expected_sums[:-1]])
    given = {"layer": stack, "shift": shifts} if stacked else [
        {"layer": layer, "shift": shift} for layer, shift in zip(layers, shifts)
    ]  # fmt: skip
    x = jax.device_put(x, rx.batch_sharding(mesh_of(name)))
    scan = jax.jit(lambda x, sums: rx.layers.scan_layers(apply, given, (x, sums), batched=(True, None)))
    for one, other in zip(scan(x, sums), (expected, expected_sums), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)  # float32; sums in another order


# Bad input.


def test_bad_input_is_refused_by_name():
    layers, x, mesh = layers_of(True, 8), stream(), mesh_of("tensor8")
    placed = jax.device_put(x[:, :12], rx.batch_sharding(mesh))
    layer = filled(make_layer(), jnp.float32, 0)
    on_mesh = jax.device_put(layer, NamedSharding(mesh, PartitionSpec()))

    def apply(layer: Any, x: Any) -> Any:
        return layer(x)

    with pytest.raises(ValueError, match=r"remat='half'.*'none', 'full', 'row_out'"):
        check_remat("half")  # by `scan_layers`, whose annotation is checked before it here
    uneven = eqx.tree_at(lambda stack: stack.down.bias, layers, jnp.zeros((3, SIZE)))
    with pytest.raises(ValueError, match=r"has 2 layers, but layers.down.bias has 3"):
        rx.layers.scan_layers(apply, uneven, x)
    with pytest.raises(ValueError, match=r"dim 1.*tensor=8.*\(8, 12, 64\)"):
        rx.layers.scan_layers(apply, [on_mesh], placed, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"column: sequence_parallel.*\(8, 12, 64\)"):
        rx.layers.column(placed, on_mesh.up, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"row: sequence_parallel.*\(8, 12, 64\)"):
        rx.layers.row(placed, on_mesh.attention.output, sequence_parallel=True)
    with pytest.raises(ValueError, match="row: 1 inputs for 2 layers"):
        rx.layers.row([x], [layer.up, layer.gate])
    table = jnp.zeros((ROWS_OF_TABLE, SIZE))
    with pytest.raises(ValueError, match="num_chunks=3 does not divide the length, 16"):
        rx.layers.cross_entropy(x, table, jnp.zeros((8, 16), jnp.int32), num_chunks=3)
