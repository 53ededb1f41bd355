"""The building blocks one by one: what they give. That a result is right shows nothing
about a layout."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._parallel.scan import check_remat

SIZE, LENGTH, BATCH = 64, 16, 8
SPLIT = {"sequence_parallel": True}


def stream() -> Any:
    return jnp.asarray(
        np.random.default_rng(9).normal(size=(BATCH, LENGTH, SIZE)), jnp.float32
    )


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


def test_any_layer_gives_what_it_gives_alone():
    rng = np.random.default_rng(3)
    mesh = mesh_of("data2xtensor4")

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    layers = {
        "kernel": Kernel(normal(SIZE, SIZE), normal(SIZE)),
        "lora": LoRA(
            Kernel(normal(SIZE, SIZE), normal(SIZE)), normal(SIZE, 4), normal(4, SIZE)
        ),
        "scaled": Scaled(normal(SIZE, SIZE), normal(SIZE)),
        "indivisible": Kernel(normal(SIZE, SIZE - 2), normal(SIZE - 2)),
        "function": jnp.sin,
    }
    arrays, static = eqx.partition(layers, eqx.is_array_like)

    def ways(layer: Any, x: Any, **options: Any) -> Any:
        twice = jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, layer)
        together = rx.layers.row([x, x + 1], [layer, twice], **options)
        siblings = rx.layers.column(x, layer, layer, **options)
        return *siblings, rx.layers.row(x, layer, **options), together - twice(x + 1)

    @jax.jit
    def all_ways(arrays: Any, x: Any) -> dict[str, Any]:
        return {
            f"{name}, {parallel=}": ways(layer, x, sequence_parallel=parallel)
            for name, layer in eqx.combine(arrays, static).items()
            for parallel in (False, True)
        }

    x = jax.device_put(stream(), rx.batch_sharding(mesh))
    for case, found in all_ways(
        jax.device_put(arrays, NamedSharding(mesh, PartitionSpec())), x
    ).items():
        expected = layers[case.partition(",")[0]](np.asarray(stream()))
        for got in found:
            np.testing.assert_allclose(
                got, expected, rtol=1e-4, atol=1e-4, err_msg=case
            )


def test_heads_that_do_not_divide_stay_whole():
    mesh = mesh_of("data2xtensor4")
    layer = eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(0))
    placed = jax.device_put((stream(), layer), NamedSharding(mesh, PartitionSpec()))
    for unit, is_split in ((16, True), (32, False)):  # 4 heads, or 2
        (y,) = jax.jit(
            lambda x, layer, unit=unit: rx.layers.column(x, layer, unit=unit)
        )(*placed)
        assert (y.sharding.shard_shape(y.shape)[-1] < SIZE) == is_split, unit


def test_what_differs_between_layers_and_what_they_carry_go_along():
    """The result is that of a loop written by hand; only the carry has its leading
    dim."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 4, 4)).astype(np.float32)
    biases = np.ones((3, 4), np.float32)
    shifts, x, sums = (
        a.astype(np.float32) for a in (np.arange(3), np.ones((8, 4)), np.zeros((5, 8)))
    )
    stack = {"w": weights, "b": biases, "shift": shifts}
    layers = [jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), stack) for i in range(3)]

    def apply(layer: Any, flow: Any) -> Any:
        x, sums = flow
        x = x @ layer["w"] + layer["b"] + layer["shift"]
        return x, jnp.roll(sums, 1, axis=0).at[0].set(x.sum(1))

    expected, expected_sums = x, sums
    for w, b, shift in zip(*stack.values()):
        expected = expected @ w + b + shift
        expected_sums = np.concatenate([expected.sum(1)[None], expected_sums[:-1]])
    x = jax.device_put(x, rx.batch_sharding(mesh_of("2x2x2")))

    @jax.jit
    def all_ways(stack: Any, x: Any, sums: Any) -> Any:
        def one_example(x: Any) -> Any:
            return rx.layers.scan_layers(
                apply, stack, (x[None], sums[:, :1]), batched=(False, None)
            )[0][0]

        run = functools.partial(rx.layers.scan_layers, apply, batched=(True, None))
        scanned, listed = (run(given, (x, sums)) for given in (stack, layers))
        return [scanned, listed, (jax.vmap(one_example)(x), expected_sums)]

    for found in all_ways(jax.tree.map(jnp.asarray, stack), x, sums):
        for one, other in zip(found, (expected, expected_sums), strict=True):
            # Float32; sums in another order.
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@functools.cache
def on_eight() -> Any:
    """A stream whose length `tensor` does not divide, and a layer, both placed."""
    mesh = mesh_of("tensor8")
    layer = eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(0))
    placed = jax.device_put(stream()[:, :12], rx.batch_sharding(mesh))
    return placed, jax.device_put(layer, NamedSharding(mesh, PartitionSpec()))


BLOCKS: Any = rx.layers
REFUSED: dict[str, tuple[Any, str]] = {
    # By `scan_layers`, whose annotation is checked before it here.
    "scan_layers-remat-half": (
        lambda: check_remat("half"),
        r"remat='half'.*'none', 'full', 'products', 'row_out'",
    ),
    "scan_layers-layers-of_unequal_number": (
        lambda: BLOCKS.scan_layers(
            max, {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, stream()
        ),
        "layers.b has 3 layers, but layers.w has 2",
    ),
    "scan_layers-layers-empty": (
        lambda: BLOCKS.scan_layers(max, [], stream()),
        "layers has no layers",
    ),
    "scan_layers-x-indivisible": (
        lambda: BLOCKS.scan_layers(max, [on_eight()[1]], on_eight()[0], **SPLIT),
        r"dim 1.*tensor=8.*\(8, 12, 64\)",
    ),
    "column-x-indivisible": (
        lambda: BLOCKS.column(*on_eight(), **SPLIT),
        r"column: sequence_parallel.*\(8, 12, 64\)",
    ),
    "row-x-indivisible": (
        lambda: BLOCKS.row(*on_eight(), **SPLIT),
        r"row: sequence_parallel.*\(8, 12, 64\)",
    ),
    "row-x-fewer_than_layers": (
        lambda: BLOCKS.row([stream()], [on_eight()[1]] * 2),
        "row: 1 inputs for 2 layers",
    ),
    "cross_entropy-num_chunks-indivisible": (
        lambda: BLOCKS.cross_entropy(
            stream(), stream()[0], jnp.zeros((BATCH, LENGTH), int), num_chunks=3
        ),
        "num_chunks=3 does not divide the length, 16",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=list(REFUSED))
def test_bad_input_is_refused_by_name(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()
