"""Wrong numbers that others reported, as small programs: each is named by its thread,
and the page `symptoms.md` says what happened there."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx.layers import attention, scan_layers

SPLIT = ["data8", "fsdp8", "data2xtensor4"]
SGD = optax.sgd(1.0)
ORDER = (3, 0, 7, 4, 1, 6, 2, 5)
ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def mlp(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 8, 32, depth=2, key=key)


def of_rows(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.sum((jax.vmap(model)(batch) - 1.0) ** 2) / batch.shape[0]


def stepped(
    make_model: Any,
    loss_fn: Any,
    mesh: Any,
    batch: Any = ROWS,
    optimizer: optax.GradientTransformation = SGD,
    **options: Any,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Take one step. Return the change of each parameter, and the metrics."""
    model = rx.init_model(make_model, mesh, key=jax.random.key(0))
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    before = {path: np.asarray(x) for path, x in state.params.items()}

    shardings = state.shardings
    step = rx.jit_step(
        lambda state, batch: rx.train_step(
            state,
            batch,
            loss_fn=loss_fn,
            optimizer=optimizer,
            shardings=shardings,
            **options,
        )
    )
    state, metrics = step(state, batch)
    change = {path: np.asarray(x) - before[path] for path, x in state.params.items()}
    return change, {name: float(x) for name, x in metrics.items()}


def equal_to_one_device(
    name: str, make_model: Any, loss_fn: Any, **options: Any
) -> None:
    expected, of_one = stepped(make_model, loss_fn, mesh_of("one"), **options)
    found, metrics = stepped(make_model, loss_fn, mesh_of(name), **options)
    assert found.keys() == expected.keys()
    for path, change in found.items():
        scale = np.abs(expected[path]).max() + 1e-6
        np.testing.assert_allclose(
            change, expected[path], rtol=1e-4, atol=1e-5 * scale, err_msg=path
        )
    for metric, value in metrics.items():
        np.testing.assert_allclose(value, of_one[metric], rtol=1e-5, err_msg=metric)


@pytest.mark.parametrize("name", SPLIT)
def test_areal_312_clipping_counts_the_gradient_of_all_devices(name):
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    equal_to_one_device(name, mlp, of_rows, optimizer=clipped)
    change, metrics = stepped(mlp, of_rows, mesh_of(name), optimizer=clipped)
    norm = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in change.values()))
    assert metrics["grad_norm"] > 0.2
    np.testing.assert_allclose(norm, 0.1, rtol=1e-4)


@pytest.mark.parametrize("name", SPLIT)
def test_jax_39301_rolled_and_padded_rows_of_one_each(name):
    """One row on each data shard of eight."""

    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        y = jax.vmap(model)(batch)
        y = jnp.concatenate([jnp.roll(y, 1, axis=0), jnp.pad(y, ((1, 0), (0, 0)))[:-1]])
        return jnp.mean((y[:-1] * y[1:]) ** 2)

    equal_to_one_device(name, mlp, loss_fn, batch=ROWS[:8])


class Words(eqx.Module):
    table: eqx.nn.Embedding
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.table = eqx.nn.Embedding(32, 16, key=key)
        self.out = eqx.nn.Linear(16, 32, key=key)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jax.vmap(self.out)(jnp.tanh(jax.vmap(self.table)(ids)))


@pytest.mark.parametrize("name", SPLIT)
def test_xla_42481_a_table_in_which_ids_repeat(name):
    ids = np.random.default_rng(0).integers(0, 4, size=(16, 6)).astype(np.int32)

    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        logits = jax.vmap(model)(batch)
        labels = jnp.roll(batch, 1, axis=1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    equal_to_one_device(name, Words, loss_fn, batch=ids)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key: jax.Array):
        table = eqx.nn.Embedding(32, 16, key=key)
        head = eqx.nn.Linear(16, 32, use_bias=False, key=key)
        self.shared = eqx.nn.Shared(
            (table, head),
            where=lambda both: both[1].weight,
            get=lambda both: both[0].weight,
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        table, head = self.shared()
        return jax.vmap(head)(jnp.tanh(jax.vmap(table)(ids)))


@pytest.mark.parametrize("name", SPLIT)
def test_slapo_12_a_head_that_shares_its_table(name):
    ids = np.random.default_rng(0).integers(0, 32, size=(16, 6)).astype(np.int32)

    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        logits = jax.vmap(model)(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return losses.mean()

    equal_to_one_device(name, Tied, loss_fn, batch=ids)


class Dropped(eqx.Module):
    layers: eqx.nn.Linear
    is_checkpointed: bool = eqx.field(static=True)

    def __init__(self, key: jax.Array, is_checkpointed: bool):
        keys = jax.random.split(key, 3)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(keys)
        self.is_checkpointed = is_checkpointed

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(both: Any, x: jax.Array) -> jax.Array:
            x = jnp.tanh(jax.vmap(both["linear"])(x))
            return eqx.nn.Dropout(0.5)(x, key=both["key"])

        remat = "full" if self.is_checkpointed else "none"
        both = {"linear": self.layers, "key": jax.random.split(key, 3)}
        return scan_layers(layer, both, x, remat=remat)


@pytest.mark.parametrize("name", SPLIT)
def test_jax_17982_dropout_is_the_same_when_it_is_computed_again(name):
    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        return jnp.mean(model(batch, key) ** 2)

    changes = [
        stepped(lambda key, again=again: Dropped(key, again), loss_fn, mesh_of(name))[0]
        for again in (False, True)
    ]
    assert max(np.abs(x).max() for x in changes[0].values()) > 1e-3
    for path, change in changes[0].items():
        np.testing.assert_allclose(changes[1][path], change, rtol=1e-4, atol=1e-7)


class Adapted(eqx.Module):
    base: eqx.nn.Linear
    lora_a: eqx.nn.Linear
    lora_b: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.base = eqx.nn.Linear(8, 32, key=keys[0])
        self.lora_a = eqx.nn.Linear(8, 4, use_bias=False, key=keys[1])
        b = eqx.nn.Linear(4, 32, use_bias=False, key=keys[2])
        self.lora_b = eqx.tree_at(lambda b: b.weight, b, jnp.zeros((32, 4)))
        self.out = eqx.nn.Linear(32, 8, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.base(x) + self.lora_b(self.lora_a(x))))


@pytest.mark.parametrize("name", [*SPLIT, "permuted"])
def test_marin_4903_the_first_update_of_a_lora_has_the_same_sign(name):
    """Adam's first step is the sign of the gradient, at B = 0."""
    if name == "permuted":
        mesh = rx.make_mesh(tensor=4, devices=[jax.devices()[i] for i in ORDER])
    else:
        mesh = mesh_of(name)
    adam = optax.adam(1e-3)
    expected, _ = stepped(Adapted, of_rows, mesh_of("one"), optimizer=adam)
    found, _ = stepped(Adapted, of_rows, mesh, optimizer=adam)
    gradient, _ = stepped(Adapted, of_rows, mesh_of("one"))
    for path, change in expected.items():
        is_clear = np.abs(gradient[path]) > 1e-5
        assert (np.sign(found[path]) == np.sign(change))[is_clear].all(), path
    assert np.abs(found["lora_b.weight"]).min() > 9e-4


class Experts(eqx.Module):
    weights: jax.Array
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.weights = jax.random.normal(key, (4, 8, 16)) / 4
        self.out = eqx.nn.Linear(16, 8, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rows in groups of a quarter each go to an expert."""
        sizes = jnp.full(4, x.shape[0] // 4, jnp.int32)
        return jax.vmap(self.out)(jax.lax.ragged_dot(x, self.weights, sizes))


@pytest.mark.parametrize("name", SPLIT)
def test_jax_33403_experts_by_ragged_dot(name):
    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        return jnp.mean(model(batch) ** 2)

    equal_to_one_device(name, Experts, loss_fn)


class Mapped(eqx.Module):
    """A layer with a `shard_map` of its own over `tensor` alone."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    mesh: Any = eqx.field(static=True)

    def __init__(self, key: jax.Array, mesh: Any):
        self.first = eqx.nn.Linear(8, 32, use_bias=False, key=key)
        self.second = eqx.nn.Linear(32, 8, use_bias=False, key=key)
        self.mesh = mesh

    def __call__(self, x: jax.Array) -> jax.Array:
        def part(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.tanh(x @ first.T) @ second.T, "tensor")

        apply = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=(P(), P("tensor"), P(None, "tensor")),
            out_specs=P(),
            axis_names={"tensor"},
        )
        return apply(x, self.first.weight, self.second.weight)


def test_jax_38845_a_shard_map_over_some_axes_in_a_model():
    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        return jnp.mean((model(batch) - 1.0) ** 2)

    changes = []
    for name in ("one", "data2xtensor4"):
        mesh = mesh_of(name)
        change, _ = stepped(lambda key, mesh=mesh: Mapped(key, mesh), loss_fn, mesh)
        changes.append(change)
    for path, change in changes[0].items():
        np.testing.assert_allclose(changes[1][path], change, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_easydel_183_a_batch_of_one(name):
    model = rx.init_model(mlp, mesh_of(name), key=jax.random.key(0))
    state = rx.init_state(model, optax.sgd(0.1), key=jax.random.key(1))
    rows = rx.predict(
        state,
        list(ROWS[:1]),
        collate_fn=np.stack,
        predict_fn=lambda model, batch, key: jax.vmap(model)(batch),
        batch_size=8,
    )
    expected = mlp(jax.random.key(0))(ROWS[0])
    np.testing.assert_allclose(np.asarray(rows)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_mlx_lm_1413_a_microbatch_without_tokens(name):
    """The second half of the rows is padding: one microbatch has no token at all."""
    weights = np.repeat([1.0, 0.0], 8).astype(np.float32)

    def loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
        rows, weights = batch
        errors = jnp.sum((jax.vmap(model)(rows) - 1.0) ** 2, axis=1)
        return rx.Mean(jnp.sum(weights * errors), jnp.sum(weights))

    mesh = mesh_of(name)
    # A microbatch takes each second row, so that each device has rows of both.
    in_turn = np.arange(16).reshape(2, 8).T.reshape(16)
    for order in (np.arange(16), in_turn):
        batch = (ROWS, weights[order])
        expected, of_whole = stepped(mlp, loss_fn, mesh, batch=batch)
        found, metrics = stepped(mlp, loss_fn, mesh, batch=batch, num_microbatches=2)
        # Sums in float32, in another order.
        np.testing.assert_allclose(metrics["loss"], of_whole["loss"], rtol=1e-5)
        for path, change in found.items():
            np.testing.assert_allclose(
                change, expected[path], rtol=1e-4, atol=1e-6, err_msg=path
            )


class Grouped(eqx.Module):
    """Attention with fewer heads of keys and values than of queries."""

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    num_key_value_heads: int = eqx.field(static=True)

    def __init__(self, key: jax.Array, num_heads: int, num_key_value_heads: int):
        keys = jax.random.split(key, 4)
        size = 8 * num_heads
        self.q_proj = eqx.nn.Linear(8, size, key=keys[0])
        self.k_proj = eqx.nn.Linear(8, 8 * num_key_value_heads, key=keys[1])
        self.v_proj = eqx.nn.Linear(8, 8 * num_key_value_heads, key=keys[2])
        self.o_proj = eqx.nn.Linear(size, 8, key=keys[3])
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads

    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(layer: eqx.nn.Linear) -> jax.Array:
            return jax.vmap(jax.vmap(layer))(x).reshape(*x.shape[:2], -1, 8)

        found = attention(
            heads(self.q_proj), heads(self.k_proj), heads(self.v_proj), causal=True
        )
        return jax.vmap(jax.vmap(self.o_proj))(found.reshape(*x.shape[:2], -1))


@pytest.mark.parametrize("name", ["data2xtensor4", "tensor8"])
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (6, 3)], ids=str)
def test_keras_hub_1613_few_heads_of_keys_on_a_mesh_over_tensor(heads, name):
    def loss_fn(model: Any, batch: jax.Array, key: Any) -> jax.Array:
        return jnp.mean((model(batch) - 1.0) ** 2)

    rows = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)
    equal_to_one_device(name, lambda key: Grouped(key, *heads), loss_fn, batch=rows)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: jax.Array):
        self.linear = eqx.nn.Linear(8, 32, key=key)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="ema", momentum=0.9)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return self.norm(self.linear(x), state)


def make_pair(key: jax.Array) -> tuple[Normed, eqx.nn.State]:
    return eqx.nn.make_with_state(Normed)(key=key)


def of_normed(model: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = mapped(batch, state)
    return jnp.mean((y[:, ::2] - y[:, 1::2] ** 2) ** 2), state


def after_a_step(pair: Any, loss_fn: Any, mesh: Any) -> Any:
    """The pair of a model and its `eqx.nn.State` after one step."""
    shardings = rx.shard_rules(pair, mesh)
    placed = eqx.filter_shard(pair, shardings)
    state = rx.init_state(placed, SGD, key=jax.random.key(1))
    step = rx.jit_step(
        lambda state, batch: rx.train_step(
            state, batch, loss_fn=loss_fn, optimizer=SGD, shardings=shardings
        )
    )
    return step(state, ROWS)[0].model


@pytest.mark.parametrize("name", SPLIT)
def test_flax_2417_batch_norm_counts_the_rows_of_all_devices(name):
    def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
        model, state = pair
        loss, state = of_normed(model, state, batch)
        return loss, {}, state

    model, state = make_pair(jax.random.key(0))
    rows = np.asarray(jax.vmap(model.linear)(jnp.asarray(ROWS)), np.float64)
    _, state = after_a_step((model, state), loss_fn, mesh_of(name))
    # The first batch gives the running statistics.
    mean, variance = state.get(model.norm.ema_state_index)
    # Sums in float32, in another order.
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_equinox_450_an_ensemble_of_models_with_a_state(name):
    """Each member ends with the parameters and statistics that it has alone."""

    def of_all(pair: Any, batch: Any, key: Any) -> Any:
        members = eqx.if_array(0)
        each = eqx.filter_vmap(of_normed, in_axes=(members, members, None))
        losses, state = each(*pair, batch)
        return jnp.sum(losses), {}, state

    def of_one(pair: Any, batch: Any, key: Any) -> Any:
        model, state = pair
        loss, state = of_normed(model, state, batch)
        return loss, {}, state

    keys = jax.random.split(jax.random.key(0), 2)
    members = after_a_step(eqx.filter_vmap(make_pair)(keys), of_all, mesh_of(name))
    for member, key in enumerate(keys):
        alone = after_a_step(make_pair(key), of_one, mesh_of("one"))
        found = jax.tree.leaves(eqx.filter(members, eqx.is_array))
        for x, y in zip(
            found, jax.tree.leaves(eqx.filter(alone, eqx.is_array)), strict=True
        ):
            # Sums in float32, in another order.
            np.testing.assert_allclose(x[member], y, rtol=1e-4, atol=1e-5)
