"""`train_step(reduce_once=True)`: gradients of all microbatches are summed over `data`
once. `gradients` compares generated programs; here are its contract and its cost."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import Normed
from helpers import KEY, assert_close, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx

# The gradient itself, in the place of a state: old less new parameters would round it.
GRADIENT = optax.trace(0.0)
WIDTH = 64


def mean_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def weighted_loss(model: Any, batch: Any, key: Any) -> Any:
    """Rows with a negative first number do not count, so parts have other weights."""
    counts = batch[:, 0] > 0
    errors = jnp.mean(jax.vmap(model)(batch) ** 2, axis=1)
    return rx.Mean(jnp.sum(errors * counts), jnp.sum(counts)), {
        "rows": rx.Mean(jnp.sum(counts), 1.0)
    }


def make(key: Any) -> Any:
    return eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 2, key=key)


def run(
    mesh: Any, loss_fn: Any, batch: Any, *, model: Any = make, **options: Any
) -> tuple[Any, Any, Any]:
    """Return the new state of one step, its metrics, and the compiled step."""
    state = rx.init_state(rx.init_model(model, mesh, key=KEY), GRADIENT, key=KEY)
    step = partial(
        rx.train_step,
        loss_fn=loss_fn,
        optimizer=GRADIENT,
        shardings=state.shardings,
        **options,
    )
    batch = jax.device_put(batch, rx.batch_sharding(mesh))
    compiled = rx.jit_step(step, donate=False).lower(state, batch).compile()
    new, metrics = compiled(state, batch)
    return new, metrics, compiled


def rows(number: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(number, WIDTH)).astype(np.float32)


LOSSES = {"mean": mean_loss, "weighted": weighted_loss}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["data8", "data2xtensor4", "2x2x2"])
def test_result_is_that_of_the_whole_batch(name: str, loss: str):
    mesh = mesh_of(name)
    whole, metrics, _ = run(mesh, LOSSES[loss], rows())
    for number in (1, 4):
        once, found, _ = run(
            mesh, LOSSES[loss], rows(), num_microbatches=number, reduce_once=True
        )
        # Float32 sums in another order.
        assert_close(once.opt_state.trace, whole.opt_state.trace, rtol=1e-4, atol=1e-6)
        if loss == "mean":
            assert_close(found["loss"].value, metrics["loss"].value, rtol=1e-6)
        else:
            assert_close(found["loss"], metrics["loss"], rtol=1e-6)
            # One for each part.
            assert found["rows"].weight == number * mesh.shape["data"]


@pytest.mark.parametrize("name", ["data8", "data2xtensor4"])
@pytest.mark.parametrize("splits", [False, True])
def test_microbatches_send_no_more_than_the_whole_batch(name: str, splits: bool):
    mesh = mesh_of(name)
    loss_fn: Any = rx.split_activations(mean_loss) if splits else mean_loss
    sent = {}
    memory = {}
    for kind, options in {
        "whole": {},
        "each": {"num_microbatches": 4},
        "once": {"num_microbatches": 4, "reduce_once": True},
    }.items():
        _, _, compiled = run(mesh, loss_fn, rows(), **options)
        sent[kind] = rx.communication(compiled, mesh).total.sent_bytes
        memory[kind] = compiled.memory_analysis().temp_size_in_bytes
    assert sent["once"] <= 1.02 * sent["whole"] < sent["each"]
    assert memory["once"] <= memory["each"]


def test_fsdp_still_reduces_scattered_gradients_of_each_microbatch():
    """Only `data` waits: whole gradients would take the memory that `fsdp` saves."""
    mesh = mesh_of("2x2x2")
    _, _, each = run(mesh, mean_loss, rows(), num_microbatches=4)
    _, _, once = run(mesh, mean_loss, rows(), num_microbatches=4, reduce_once=True)
    by_axes = [rx.communication(x, mesh).by_axes for x in (each, once)]
    data = [
        sum(total.sent_bytes for axes, total in found.items() if "data" in axes)
        for found in by_axes
    ]
    assert 3 * data[1] <= data[0]
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (each, once)]
    assert sizes[1] <= 1.05 * sizes[0]


class Blocks(eqx.Module):
    """A table that is also the head, and a stack of MLPs."""

    table: Any
    mlps: Any

    def __init__(self, *, key: Any):
        table_key, *keys = jax.random.split(key, 4)
        self.table = 0.1 * jax.random.normal(table_key, (64, 32))

        def mlp(key: Any) -> Any:
            return eqx.nn.MLP(32, 32, 64, 1, key=key)

        self.mlps = eqx.filter_vmap(mlp)(jnp.stack(keys))


def loss_of_blocks(sequence_parallel: bool, num_chunks: int) -> Any:
    option: dict[str, Any] = {"sequence_parallel": sequence_parallel}

    def block(mlp: Any, x: Any) -> Any:
        (hidden,) = rx.layers.column(x, mlp.layers[0], **option)
        return x + rx.layers.row(jax.nn.gelu(hidden), mlp.layers[1], **option)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        x = rx.layers.embed(model.table, batch[:, :-1], **option)
        x = rx.layers.scan_layers(block, model.mlps, x, remat="row_out", **option)
        return rx.layers.cross_entropy(
            x, model.table, batch[:, 1:], num_chunks=num_chunks, **option
        )

    return loss_fn


@pytest.mark.parametrize("name", ["data2xtensor4", "2x2x2"])
@pytest.mark.parametrize(("sequence_parallel", "chunks"), [(False, 2), (True, 1)])
def test_blocks_map_their_own_shards(name: str, sequence_parallel: bool, chunks: int):
    """They hold a `shard_map` over rows, which leaves out the axis of the map."""
    mesh = mesh_of(name)
    ids = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)
    sent = {}
    grads = {}
    for kind, options in {
        "each": {"num_microbatches": 2},
        "once": {"num_microbatches": 2, "reduce_once": True},
    }.items():
        new, _, compiled = run(
            mesh,
            loss_of_blocks(sequence_parallel, chunks),
            ids,
            model=lambda key: Blocks(key=key),
            **options,
        )
        sent[kind] = rx.communication(compiled, mesh).total.sent_bytes
        grads[kind] = new.opt_state.trace
    assert_close(grads["once"], grads["each"], rtol=1e-4, atol=1e-6)
    assert sent["once"] < sent["each"]


def test_each_shard_draws_its_own_random_numbers():
    mesh = mesh_of("data8")

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        drawn = jax.random.uniform(key)
        return jnp.mean(model(batch[0])), {"x": drawn, "square": drawn**2}

    _, metrics, _ = run(mesh, loss_fn, rows(), num_microbatches=2, reduce_once=True)
    mean = float(metrics["x"].value)
    # With one key for all shards, the variance would be that of two numbers.
    keys = [
        jax.random.fold_in(jax.random.fold_in(key, i), shard)
        for key in [jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)]
        for i in range(2)
        for shard in range(8)
    ]
    expected = [float(jax.random.uniform(key)) for key in keys]
    assert len(set(expected)) == 16
    np.testing.assert_allclose(mean, np.mean(expected), rtol=1e-6)
    np.testing.assert_allclose(
        metrics["square"].value, np.mean(np.square(expected)), rtol=1e-6
    )


def test_a_line_search_sees_the_same_loss():
    mesh = mesh_of("data8")
    optimizer = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    )
    state = rx.init_state(rx.init_model(make, mesh, key=KEY), optimizer, key=KEY)
    losses = []
    for reduce_once in (False, True):
        step = partial(
            rx.train_step,
            loss_fn=mean_loss,
            optimizer=optimizer,
            shardings=state.shardings,
            num_microbatches=2,
            reduce_once=reduce_once,
        )
        new, _ = rx.jit_step(step, donate=False)(state, rows())
        losses.append(new.params)
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)


def test_without_data_shards_nothing_changes():
    """The same program, not only the same numbers."""
    state = rx.init_state(make(KEY), GRADIENT, key=KEY)
    texts = []
    for reduce_once in (False, True):
        step = partial(
            rx.train_step,
            loss_fn=mean_loss,
            optimizer=GRADIENT,
            num_microbatches=2,
            reduce_once=reduce_once,
        )
        texts.append(str(jax.make_jaxpr(step)(state, rows())))
    assert texts[0] == texts[1]


# What is refused.


def over_data(model: Any, batch: Any, key: Any) -> Any:
    rows_over_data = NamedSharding(mesh_of("data8"), PartitionSpec("data"))
    return mean_loss(
        model, jax.lax.with_sharding_constraint(batch, rows_over_data), key
    )


def mapped_by_hand(model: Any, batch: Any, key: Any) -> Any:
    spec = PartitionSpec("data")
    twice = jax.shard_map(
        lambda x: 2 * x, mesh=mesh_of("data8"), in_specs=spec, out_specs=spec
    )
    return mean_loss(model, twice(batch), key)


def unmappable(model: Any, batch: Any, key: Any) -> Any:
    shape = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    read = jax.pure_callback(lambda x: x, shape, jax.lax.stop_gradient(batch))
    return mean_loss(model, batch + read, key)


REFUSED = {
    "constraint": (over_data, r"test_reduce_once.*lays out an array over 'data'"),
    "shard_map": (mapped_by_hand, r"test_reduce_once.*lays out an array over 'data'"),
    "no_rule": (unmappable, "cannot be mapped"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_cannot_be_mapped_are_refused(name: str):
    loss_fn, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        run(mesh_of("data8"), loss_fn, rows(), reduce_once=True)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide into 4 microbatches on 8 data"):
        run(
            mesh_of("data8"),
            mean_loss,
            rows(16),
            num_microbatches=4,
            reduce_once=True,
        )


def test_models_with_a_state_are_refused():
    pair: Any = eqx.nn.make_with_state(Normed)(KEY)
    state = rx.init_state(pair, GRADIENT, key=KEY)
    with pytest.raises(ValueError, match=r"reduce_once=True, but the model has a st"):
        rx.train_step(
            state,
            rows(),
            loss_fn=lambda m, b, k: (0.0, {}, m[1]),
            optimizer=GRADIENT,
            reduce_once=True,
        )
