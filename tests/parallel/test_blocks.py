"""The building blocks one by one, and together: what they give.

`test_steps_of_models.py` counts what they send; that a result is right shows nothing about a layout.
"""

import functools
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from helpers import assert_refused, filled, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._parallel.scan import check_remat

SIZE, LENGTH, BATCH = 64, 16, 8
SPLIT = {"sequence_parallel": True}


def stream() -> Any:
    return jnp.asarray(np.random.default_rng(9).normal(size=(BATCH, LENGTH, SIZE)), jnp.float32)


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
    rng, mesh = np.random.default_rng(3), mesh_of("data2xtensor4")

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    layers = {
        "kernel": Kernel(normal(SIZE, SIZE), normal(SIZE)),
        "lora": LoRA(Kernel(normal(SIZE, SIZE), normal(SIZE)), normal(SIZE, 4), normal(4, SIZE)),
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
    for case, found in all_ways(jax.device_put(arrays, NamedSharding(mesh, PartitionSpec())), x).items():
        expected = layers[case.partition(",")[0]](np.asarray(stream()))
        for got in found:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=case)


def test_heads_that_do_not_divide_stay_whole():
    mesh, layer = mesh_of("data2xtensor4"), eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(0))
    placed = jax.device_put((stream(), layer), NamedSharding(mesh, PartitionSpec()))
    for unit, is_split in ((16, True), (32, False)):  # 4 heads, or 2
        (y,) = jax.jit(lambda x, layer, unit=unit: rx.layers.column(x, layer, unit=unit))(*placed)
        assert (y.sharding.shard_shape(y.shape)[-1] < SIZE) == is_split, unit


def test_what_differs_between_layers_and_what_they_carry_go_along():
    """The result is that of a loop written by hand; only the carry has its leading dim."""
    rng = np.random.default_rng(0)
    weights, biases = rng.normal(size=(3, 4, 4)).astype(np.float32), np.ones((3, 4), np.float32)
    shifts, x, sums = (a.astype(np.float32) for a in (np.arange(3), np.ones((8, 4)), np.zeros((5, 8))))
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
            return rx.layers.scan_layers(apply, stack, (x[None], sums[:, :1]), batched=(False, None))[0][0]

        run = functools.partial(rx.layers.scan_layers, apply, batched=(True, None))
        scanned, listed = (run(given, (x, sums)) for given in (stack, layers))
        return [scanned, listed, (jax.vmap(one_example)(x), expected_sums)]

    for found in all_ways(jax.tree.map(jnp.asarray, stack), x, sums):
        for one, other in zip(found, (expected, expected_sums), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)  # float32; sums in another order


def test_bad_input_is_refused_by_name():
    x, mesh, layer = stream(), mesh_of("tensor8"), eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(0))
    placed = jax.device_put(x[:, :12], rx.batch_sharding(mesh))
    there = jax.device_put(layer, NamedSharding(mesh, PartitionSpec()))
    stack = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
    blocks: Any = rx.layers
    cases: list[tuple[Any, str]] = [
        # By `scan_layers`, whose annotation is checked before it here.
        (lambda: check_remat("half"), r"remat='half'.*'none', 'full', 'row_out'"),
        (lambda: blocks.scan_layers(max, stack, x), "layers.b has 3 layers, but layers.w has 2"),
        (lambda: blocks.scan_layers(max, [], x), "layers has no layers"),
        (lambda: blocks.scan_layers(max, [there], placed, **SPLIT), r"dim 1.*tensor=8.*\(8, 12, 64\)"),
        (lambda: blocks.column(placed, there, **SPLIT), r"column: sequence_parallel.*\(8, 12, 64\)"),
        (lambda: blocks.row(placed, there, **SPLIT), r"row: sequence_parallel.*\(8, 12, 64\)"),
        (lambda: blocks.row([x], [layer, layer]), "row: 1 inputs for 2 layers"),
        (
            lambda: blocks.cross_entropy(x, x[0], jnp.zeros((BATCH, LENGTH), int), num_chunks=3),
            "num_chunks=3 does not divide the length, 16",
        ),
    ]
    assert_refused(lambda call: call(), cases)


# Together: gradients, and gradients of these, on meshes and on one device in float64.


@cache
def make_model(seed: int = 0, **options: Any) -> Any:
    """A Gemma 2, whose scores have a cap: JAX's own attention takes its softmax in float32. Over 8 shards its 4
    heads of keys and values stay whole. Arrays of other seeds serve as directions."""
    options_of: Any = {"attn_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 2}
    model = tiny_models.abstract("gemma2", stacked=True, **options_of)
    return tiny_models.restack(filled(model, jnp.float64, seed), **options)


def loss_of(model: Any, tokens: Any, *, num_chunks: int = 1) -> Any:
    hidden, _ = model.hidden_states(tokens[:, :-1])
    split = {"sequence_parallel": model.sequence_parallel}
    return rx.layers.cross_entropy(hidden, model.head, tokens[:, 1:], num_chunks=num_chunks, **split).value


def adapted_loss(model: Any, batch: Any, **options: Any) -> Any:
    """The loss on the second half of a task after one step of SGD on the first, as in MAML."""
    gradient = eqx.filter_grad(loss_of)(model, batch[:, 0], **options)
    adapted = eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, gradient))
    return loss_of(adapted, batch[:, 1], **options)


@eqx.filter_jit
def hessian_product(model: Any, direction: Any, tokens: Any) -> Any:
    """Forward over reverse: the derivative of the gradient along a direction."""
    gradient = eqx.filter_grad(lambda model: loss_of(model, tokens))
    return eqx.filter_jvp(gradient, (model,), (eqx.filter(direction, eqx.is_inexact_array),))[1]


def tasks() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (BATCH, 2, LENGTH + 1)).astype(np.int32)


OPTIMIZER = optax.sgd(1.0)


def meta_step(state: Any, batch: Any, shardings: Any = None, **options: Any) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return adapted_loss(model, batch, **options)

    return rx.train_step(state, batch, loss_fn=loss_fn, optimizer=OPTIMIZER, shardings=shardings)[0].params


def assert_close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(y)) > 1e-3  # there is something to be wrong
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_the_product_of_the_hessian_with_a_direction() -> None:
    on, split = mesh_of("2x2x2"), {"remat": "full", **SPLIT}
    model, direction = (make_model(seed, **split) for seed in (0, 1))
    model, direction = (eqx.filter_shard(x, rx.shard_rules(x, on)) for x in (model, direction))
    tokens = jax.device_put(tasks()[:, 0], rx.batch_sharding(on))
    found = hessian_product(model, direction, tokens)
    assert_close(found, hessian_product(make_model(), make_model(1), tasks()[:, 0]))


@cache
def expected() -> Any:
    """The parameters after a meta-step on one device."""
    return jax.jit(meta_step)(rx.init_state(make_model(), OPTIMIZER, key=jax.random.key(0)), tasks())


WAYS = [("tensor8", SPLIT, 1), ("2x2x2", {"remat": "row_out"}, 2)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("mesh", "options", "num_chunks"), WAYS)
def test_a_step_of_meta_learning(mesh: str, options: dict[str, Any], num_chunks: int) -> None:
    on, model = mesh_of(mesh), make_model(**options)
    shardings = rx.shard_rules(model, on)
    state = rx.init_state(eqx.filter_shard(model, shardings), OPTIMIZER, key=jax.random.key(0))
    batch = jax.device_put(tasks(), NamedSharding(on, PartitionSpec(("data", "fsdp"))))
    step = jax.jit(functools.partial(meta_step, shardings=shardings, num_chunks=num_chunks))
    assert_close(step(state, batch), expected())
