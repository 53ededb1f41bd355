"""The choice of attention for a program: cuDNN's where it is for a GPU that can, and
nowhere else.

The output of the GPU compiler is tested in `tests/aot`; the values, only on a GPU.
"""

import functools
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)

import redco_eqx as rx
from redco_eqx_models._blocks.attention import attend, flash_attention

HAS_CUDNN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def on(mesh, *, heads=8, kv_heads=8, rows=8, size=64, dtype=jnp.bfloat16):
    place = NamedSharding(mesh, PartitionSpec())
    query = jax.ShapeDtypeStruct((rows, 16, heads, size), dtype, sharding=place)
    key = jax.ShapeDtypeStruct((rows, 16, kv_heads, size), dtype, sharding=place)
    return query, key, key


def gpus(kind="NVIDIA H100 80GB HBM3", platform="gpu", **sizes):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
    axes = {"data": 1, "fsdp": 1, "tensor": 1, **sizes}
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        (AxisType.Auto,) * len(axes),
        abstract_device=device,
    )


def is_flash(mesh, **sizes):
    found = []

    def trace(query, key, value):
        found.append(flash_attention(query, key, value, causal=True, scale=None))
        return query

    jax.eval_shape(trace, *on(mesh, **sizes))
    return found[0] is not None


def test_for_a_cpu_the_program_is_the_one_it_was():
    def lowered(implementation):
        run = functools.partial(attend, implementation=implementation)
        return jax.jit(run).lower(*on(mesh_of("data2xtensor4"))).as_text()

    assert lowered(None).replace("attend", "") == lowered("xla").replace("attend", "")


def test_for_a_gpu_it_is_cudnns_where_that_is_installed_and_takes_it():
    for mesh, sizes, is_taken in (
        (gpus(), {}, True),
        (gpus(data=2, tensor=4), {}, True),
        (gpus(fsdp=4, tensor=2), {"kv_heads": 2}, True),
        (gpus(), {"dtype": jnp.float16}, True),
        (gpus(), {"dtype": jnp.float32}, False),
        (gpus(), {"size": 20}, False),  # of heads: not a multiple of 8
        (gpus(tensor=4), {"kv_heads": 2}, False),
        (gpus(data=4, fsdp=4), {}, False),  # 8 rows
        (gpus("Tesla V100-SXM2-16GB"), {"dtype": jnp.float16}, False),
        (gpus("TPU v5e", platform="tpu"), {}, False),
        (gpus(sequence=2), {}, False),  # an axis that is not of this library
    ):
        assert is_flash(mesh, **sizes) == (is_taken and HAS_CUDNN), (mesh, sizes)


def test_a_mask_a_bias_and_dropout_are_left_to_the_compiler():
    mask = jax.ShapeDtypeStruct((8, 1, 16, 16), bool)
    bias = jax.ShapeDtypeStruct((8, 8, 16, 16), jnp.bfloat16)
    dropout = {"dropout": eqx.nn.Dropout(0.1), "dropout_key": jax.random.key(0)}
    for options in ({}, {"mask": mask}, {"bias": bias}, dropout):
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
