"""The TPU compiler's output for a train step: communication and memory, without a
device.

FSDP is measured with products in float32, which makes bytes and memory those of the
parameters. At the default precision this compiler turns weights into bfloat16 first:
half the bytes to gather, and a copy in bfloat16 of each device's part, which it keeps
throughout a scan.
"""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import layouts
import optax
import pytest
import quickstart
import topology
import workloads
from jax.sharding import PartitionSpec
from steps_for_tpus import assert_sends_the_least, compiled, num_bytes
from zoo import BY_NAME

import redco_eqx as rx
from redco_eqx._compiled.communication import attention_of, communication


def test_a_users_own_model_sends_as_predicted_four_activations_a_layer_and_gradients():
    # The quickstart's, plain eqx.nn, with no building block.
    case, mesh, found, _ = compiled(workloads.quickstart_case(), "v4:2x2x2", 1, 4)
    assert_sends_the_least(case, mesh, found, 0.94)


# Of the zoo, with what is predicted, in parts of what is sent. Pieces of fused weights
# this compiler moves across borders with less; the sums of a low-rank branch and of its
# base it does not add first.
ZOO = {
    "t5": 1.0,
    "gate_narrow": 1.0,
    "conv2d": 1.0,
    "moe_mixtral": 1.0,
    "fused_qkv": 1.106,
    "lora": 0.741,
}


@pytest.mark.parametrize("name", ZOO)
def test_predictions_for_the_zoo(name):
    entry = BY_NAME[name]
    mesh = topology.mesh("v4:2x2x2", tensor=4)
    model, batch = eqx.filter_eval_shape(entry.make, jax.random.key(0)), entry.inputs(8)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return entry.loss(model, batch)

    explanation = rx.explain(model, mesh, loss_fn=loss, batch=batch)
    assert explanation.communication is not None
    specs = {path: d.spec for path, d in explanation.decisions.items()}
    sent = layouts.compiled_bytes(model, loss, batch, specs, mesh, topology.OPTIONS)
    # Arrays of some hundred bytes, which this compiler sends as it finds best: a tenth.
    assert explanation.communication.num_bytes == pytest.approx(
        ZOO[name] * sent, rel=0.1
    )
    assert explanation.communication.at_least <= sent


def test_fsdp_of_a_users_own_layers_moves_and_keeps_what_zero_3_does():
    # Plain eqx.nn in a Python loop, with no building block: the quickstart's, made
    # wide.
    def make_model(key: Any) -> Any:
        return quickstart.Transformer(dim=768, num_heads=6, num_layers=8, key=key)

    case = dataclasses.replace(workloads.quickstart_case(), make_model=make_model)
    mesh = topology.mesh("v5e:2x4", fsdp=8)
    with jax.default_matmul_precision("float32"):
        program = workloads.lower_step(case, mesh).compile(
            compiler_options=topology.OPTIONS
        )
    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    parameters, layer = num_bytes(model), num_bytes(model.layers[0])
    sent = sum(c.sent_bytes for c in communication(program, mesh)) / (
        (1 - 1 / mesh.size) * parameters
    )
    assert 2.85 <= sent <= 3.15
    # With 8 layers one whole layer is a quarter of what is split.
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.peak_memory_in_bytes <= 4 * parameters / mesh.size + layer


def test_the_gradient_of_a_depthwise_convolution_is_summed_over_the_batch_alone():
    """Left to itself, this compiler sums it over all eight devices, four of which have
    the same examples."""

    def make_model(key: Any) -> Any:
        keys = jax.random.split(key)
        return [
            eqx.nn.Conv2d(32, 32, 3, padding=1, groups=32, use_bias=False, key=keys[0]),
            eqx.nn.Conv2d(32, 8, 1, use_bias=False, key=keys[1]),
        ]

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(lambda x: model[1](jnp.sin(model[0](x))))(batch) ** 2)

    mesh = topology.mesh("v4:2x2x2", tensor=4)
    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    shardings = rx.shard_rules(model, mesh, overrides=[("*", PartitionSpec())])
    model = jax.tree.map(
        lambda x, s: (
            x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        ),
        model,
        shardings,
    )
    optimizer = optax.sgd(0.1)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    whole = jax.NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state
    )
    batch = jax.ShapeDtypeStruct(
        (16, 32, 8, 8), jnp.float32, sharding=rx.batch_sharding(mesh)
    )
    step = partial(
        rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings
    )
    found = communication(
        jax.jit(step).lower(state, batch).compile(compiler_options=topology.OPTIONS),
        mesh,
    )
    assert {(c.kind, c.axes) for c in found} == {("all-reduce", ("data",))}


@pytest.mark.parametrize("name", ["v4:4x4x4", "v5e:4x4", "v6e:2x4"])
def test_a_mesh_of_any_sizes_is_made_of_a_pod(name: str) -> None:
    found = topology.devices(name)
    for tensor in (2**k for k in range(len(found).bit_length())):
        for fsdp in (2**k for k in range((len(found) // tensor).bit_length())):
            mesh = rx.make_mesh(tensor=tensor, fsdp=fsdp, devices=found)
            assert mesh.shape == {
                "data": len(found) // tensor // fsdp,
                "fsdp": fsdp,
                "tensor": tensor,
            }
            assert set(mesh.devices.flat) == set(found)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_frozen_arrays_that_are_not_donated_take_no_memory_more(axes):
    """A deep frozen trunk with a head that is trained, 32 MiB of parameters."""
    mesh = topology.mesh("v5e:2x4", **axes)
    model = eqx.filter_eval_shape(
        lambda key: eqx.nn.MLP(512, 512, 1024, depth=8, key=key), jax.random.key(0)
    )
    model = jax.tree.map(
        lambda x, sharding: (
            x
            if sharding is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        ),
        model,
        rx.shard_rules(model, mesh),
    )
    trainable = jax.tree.map(lambda _: False, model)
    trainable = eqx.tree_at(lambda m: m.layers[-1].weight, trainable, True)
    optimizer = optax.adam(1e-3)
    state = rx.init_state(model, optimizer, key=jax.random.key(0), trainable=trainable)
    rows = rx.batch_sharding(mesh)
    batch = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=rows)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    step = partial(
        rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=state.shardings
    )
    sizes = {}
    for name, lowered in {
        "ours": rx.jit_step(step).lower(state, batch),
        "all donated": jax.jit(step, donate_argnums=0).lower(state, batch),
    }.items():
        stats = lowered.compile().memory_analysis()
        assert stats is not None
        sizes[name] = (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
        )
    assert sizes["ours"] <= sizes["all donated"]


@pytest.mark.parametrize(
    ("length", "window", "implementation", "most"),
    [
        # MiB of temporaries on a device, for 8 heads of 128 in bfloat16.
        (4096, None, "splash", 64),
        (4096, 1024, "splash", 64),
        (4096, None, "xla", 192),
    ],
)
def test_attention_stores_no_scores_of_all_pairs(
    length: int, window: int | None, implementation: str, most: float
) -> None:
    """Nor does it send anything, forward or backward."""
    mesh = topology.mesh("v5e:2x4", tensor=4)
    heads = jax.sharding.NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    x = jax.ShapeDtypeStruct((2, length, 32, 128), jnp.bfloat16, sharding=heads)

    def loss(query: Any, key: Any, value: Any) -> Any:
        out = rx.layers.attention(
            query,
            key,
            value,
            causal=True,
            window=window,
            implementation=None if implementation == "splash" else "xla",
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    step = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=heads)
    program = step.lower(x, x, x).compile(compiler_options=topology.OPTIONS)
    text = program.as_text()
    assert text is not None
    assert attention_of(text) == implementation
    assert f"{length},{length}]" not in text
    assert not communication(program, mesh)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes / 2**20 < most
