"""The choice of attention in models: the kernel of the platform where one fits, and
nowhere else.

The output of the GPU compiler is tested in `tests/aot`; the values of cuDNN, only on a
GPU. `tests/parallel/test_attention_block.py` tests the block that computes it.
"""

import functools
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_long, mesh_of, mesh_on
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import abstract, inputs, make

import redco_eqx as rx
from redco_eqx._parallel import attention as blocks
from redco_eqx._parallel import kernels
from redco_eqx_models._blocks import positions as positions_of
from redco_eqx_models._blocks.attention import attend

HAS_CUDNN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def on(mesh, *, heads=8, kv_heads=8, rows=8, size=64, dtype=jnp.bfloat16):
    place = NamedSharding(mesh, PartitionSpec())
    query = jax.ShapeDtypeStruct((rows, 16, heads, size), dtype, sharding=place)
    key = jax.ShapeDtypeStruct((rows, 16, kv_heads, size), dtype, sharding=place)
    return query, key, key


def gpus(kind="NVIDIA H100 80GB HBM3", **sizes):
    return mesh_on("gpu", kind, **sizes)


def is_flash(mesh, **sizes):
    program = str(jax.make_jaxpr(attend)(*on(mesh, **sizes)))
    return "dot_product_attention_fwd" in program


def test_for_a_cpu_the_program_is_the_one_it_was():
    def lowered(implementation):
        run = functools.partial(attend, implementation=implementation)
        return jax.jit(run).lower(*on(mesh_of("data2xtensor4"))).as_text()

    assert lowered(None).replace("attend", "") == lowered("xla").replace("attend", "")


@pytest.mark.parametrize(
    ("mesh", "sizes", "is_taken"),
    [
        (gpus(), {}, True),
        (gpus(data=2, tensor=4), {}, True),
        (gpus(fsdp=4, tensor=2), {"kv_heads": 2}, True),
        (gpus(), {"dtype": jnp.float16}, True),
        (gpus(), {"dtype": jnp.float32}, False),
        (gpus(), {"size": 20}, False),  # of heads: not a multiple of 8
        (gpus(tensor=4), {"kv_heads": 2}, False),
        (gpus(data=4, fsdp=4), {}, False),  # 8 rows
        (gpus("Tesla V100-SXM2-16GB"), {"dtype": jnp.float16}, False),
        (gpus(sequence=2), {}, False),  # an axis that is not of this library
    ],
)
def test_for_a_gpu_it_is_cudnns_where_that_is_installed_and_takes_it(
    mesh, sizes, is_taken
):
    assert is_flash(mesh, **sizes) == (is_taken and HAS_CUDNN)


def test_a_mask_a_bias_and_dropout_are_left_to_the_compiler():
    mask = jax.ShapeDtypeStruct((8, 1, 16, 16), bool)
    bias = jax.ShapeDtypeStruct((8, 8, 16, 16), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    dropout = {"dropout": eqx.nn.Dropout(0.1), "dropout_key": jax.random.key(0)}
    for options in (
        {},
        {"mask": mask},
        {"bias": bias},
        {"segments": segments},
        dropout,
    ):
        arrays, static = eqx.partition(
            options, lambda x: isinstance(x, jax.ShapeDtypeStruct)
        )

        def run(arrays, *heads, static=static):
            return attend(*heads, **eqx.combine(arrays, static))

        program = str(jax.make_jaxpr(run)(arrays, *on(gpus())))
        assert ("dot_product_attention_fwd" in program) == (
            not options and HAS_CUDNN
        ), options


def test_gradients_of_each_example_are_taken():
    def loss(query, key, value):
        # Of a loss that is linear in what attention gives, JAX 0.10 has no gradient of
        # each example.
        return jnp.sum(
            attend(query[None], key[None], value[None]).astype(jnp.float32) ** 2
        )

    per_example = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))
    shapes = [x.shape for x in jax.eval_shape(per_example, *on(gpus(), kv_heads=2))]
    assert shapes == [(8, 16, 8, 64), (8, 16, 2, 64), (8, 16, 2, 64)]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs cuDNN")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_on_a_gpu_it_is_the_same_function(causal, kv_heads):
    shapes = on(rx.make_mesh(data=1, devices=jax.devices()[:1]), kv_heads=kv_heads)
    given = [
        jax.device_put(jax.random.normal(key, x.shape, x.dtype), x.sharding)
        for key, x in zip(jax.random.split(jax.random.key(0), 3), shapes)
    ]

    def loss(implementation, *given):
        given = (
            [x.astype(jnp.float32) for x in given]
            if implementation == "float32"
            else given
        )
        name = "xla" if implementation == "float32" else implementation
        heads = attend(*given, causal=causal, implementation=name)
        return jnp.sum(heads.astype(jnp.float32) ** 2)

    def gradients(implementation):
        return jax.jit(
            jax.grad(functools.partial(loss, implementation), argnums=(0, 1, 2))
        )(*given)

    def away(some, exact):
        some, exact = (
            jnp.concatenate([x.astype(jnp.float32).ravel() for x in y])
            for y in (some, exact)
        )
        return float(jnp.linalg.norm(some - exact) / jnp.linalg.norm(exact))

    exact = gradients("float32")
    assert away(gradients(None), exact) < max(0.01, 2 * away(gradients("xla"), exact))


# Whole models.


@pytest.fixture
def small_blocks(monkeypatch):
    """Take texts of a few tokens in blocks of four."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(positions_of, "MOST_PAIRS", 1)


def value_and_gradient(name, model):
    """A loss that ignores padding, and its gradient; the first text has padding on the
    left, the second on the right."""
    given = inputs(name)
    options = {}
    real = 1
    if given[0].ndim == 2:
        place = np.arange(given[0].shape[1])
        mask = jnp.asarray(np.stack([place >= 2, place < 6]), jnp.int32)
        options["attention_mask"] = mask
        real = 1 if len(given) > 1 else mask[..., None]

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(model):
        output = model(*given, **options)
        if output.ndim == 2:
            return jnp.sum(jnp.sin(output))
        return jnp.sum(jnp.sin(output) * real)

    return run(model)


FAMILIES = ("mistral", "gemma2", "t5", "bert", *in_long("gemma3", "gpt2", "vit_gpt2"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_tokens_change_nothing(name, monkeypatch):
    model = make(name, stacked=True)
    value, gradient = value_and_gradient(name, model)
    monkeypatch.setattr(blocks, "MOST_PAIRS", 1024 * 1024)
    monkeypatch.setattr(positions_of, "MOST_PAIRS", 1024 * 1024)
    jax.clear_caches()
    wanted, of_gradient = value_and_gradient(name, model)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(of_gradient)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def program_on(mesh, name, *, masked, **changes):
    """The text of a model's program on a mesh of devices that are not there."""
    model = abstract(name, stacked=True, **changes)
    place = NamedSharding(mesh, PartitionSpec())

    def placed(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    model = jax.tree.map(placed, model)
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=place)
    mask = ids if masked else None
    arrays, static = eqx.partition(
        (model, ids, mask), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )

    def run(arrays):
        model, ids, mask = eqx.combine(arrays, static)
        given = (ids, ids) if name == "t5" else (ids,)
        return model(*given, attention_mask=mask)

    return str(jax.make_jaxpr(run)(arrays))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "bert"])
def test_on_tpus_padding_windows_and_caps_are_left_to_the_kernel(
    name, masked, monkeypatch
):
    monkeypatch.setattr(kernels, "FEWEST_TOKENS", 16)
    program = program_on(mesh_on("tpu", "TPU v5 lite"), name, masked=masked)
    assert "pallas_call" in program
    assert "softmax" not in program


def test_on_tpus_a_bias_is_left_to_the_compiler(monkeypatch):
    monkeypatch.setattr(kernels, "FEWEST_TOKENS", 16)
    mesh = mesh_on("tpu", "TPU v5 lite")
    program = program_on(mesh, "t5", masked=True)
    # Cross-attention has none.
    assert "pallas_call" in program
