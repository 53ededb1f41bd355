"""Clients at once by vmap, one by one by fit, and a loop written by hand come to the
same; and it learns."""

import functools
import types

import digits_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from federated_learning import main as fed
from fit_helpers import compilations
from helpers import assert_close

import redco_eqx as rx

ARGS = types.SimpleNamespace(seed=0, clients_per_round=4, local_epochs=2, batch_size=8)
OPTIMIZER = optax.sgd(0.1)
FUNCTIONS = {
    "collate_fn": fed.collate_fn,
    "loss_fn": fed.loss_fn,
    "optimizer": OPTIMIZER,
}


def rows_of(round, train):
    return fed.draw(
        fed.deal([y for _, y in train], 16, iid=False, seed=0), round, args=ARGS
    )


def round_by_hand(params, train, rows):
    """SGD in plain JAX, for each client from the same parameters; their mean. `params`
    are (weight, bias)s."""

    @jax.jit
    def gradient(params, x, y):
        def loss(params):
            hidden = x
            for weight, bias in params[:-1]:
                hidden = jax.nn.relu(hidden @ weight.T + bias)
            weight, bias = params[-1]
            logits = hidden @ weight.T + bias
            return -jnp.take_along_axis(
                jax.nn.log_softmax(logits), y[:, None], axis=1
            ).mean()

        return jax.grad(loss)(params)

    ends = []
    for batches in rows:
        own = params
        for batch in batches:
            x = np.stack([train[i][0].ravel() for i in batch])
            y = np.array([train[i][1] for i in batch])
            own = jax.tree.map(lambda p, g: p - 0.1 * g, own, gradient(own, x, y))
        ends.append(own)
    return jax.tree.map(lambda *arrays: np.mean(arrays, axis=0), *ends)


def layers_of(state):
    """The matrices and biases, from the first layer to the last."""
    paths = sorted(
        path.rpartition(".")[0] for path in state.params if path.endswith("weight")
    )
    return [
        tuple(np.asarray(state.params[f"{path}.{name}"]) for name in ("weight", "bias"))
        for path in paths
    ]


def test_all_ways_to_a_round_give_the_same_parameters_and_fit_compiles_once(double):
    train = [(x.astype(np.float64), y) for x, y in digits_data.digits()[0][:512]]
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    model = rx.init_model(
        lambda key: fed.make_model(key, side=8), mesh, key=jax.random.key(0)
    )
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(1))
    shardings = rx.shard_rules(model, mesh)
    step = functools.partial(
        rx.train_step, loss_fn=fed.loss_fn, optimizer=OPTIMIZER, shardings=shardings
    )
    run_round = jax.jit(functools.partial(fed.round_by_vmap, step=step))
    data = fed.collate_fn(train)
    server = state
    expected = layers_of(state)
    with compilations() as compiled:
        for i in range(2):  # other clients each time
            server = fed.round_by_fit(server, train, rows_of(i, train), **FUNCTIONS)
    assert compiled.count("jit(body)") == 1, (
        "four clients of two rounds, and one program"
    )
    for i in range(2):
        state = run_round(state, data, rows_of(i, train))
        expected = round_by_hand(expected, train, rows_of(i, train))
    assert int(state.step) == int(server.step) == 2 * rows_of(0, train).shape[1]
    assert {x.dtype for x in state.params.values()} == {np.dtype("float64")}
    # Float64: sums in another order.
    assert_close(state.params, server.params, rtol=1e-9, atol=1e-12)
    assert_close(layers_of(state), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("iid", [True, False])
def test_clients_have_equally_many_and_no_example_twice(iid):
    labels = np.array([y for _, y in digits_data.digits()[0]])
    clients = fed.deal(labels.tolist(), 100, iid=iid, seed=3)
    assert clients.shape == (100, 14)
    assert len(np.unique(clients)) == clients.size
    kinds = np.array([len(np.unique(labels[rows])) for rows in clients])
    if iid:
        assert kinds.mean() > 6
    else:  # two pieces in order, of which few lie between one digit and the next
        assert kinds.max() <= 4
        assert 1.5 < kinds.mean() < 2.5


def test_a_round_draws_whole_epochs_of_some_clients():
    clients = np.arange(160).reshape(16, 10)
    rows = fed.draw(
        clients,
        5,
        args=types.SimpleNamespace(**vars(ARGS) | {"batch_size": 5, "local_epochs": 3}),
    )
    assert rows.shape == (4, 6, 5)
    for own in rows.reshape(4, 3, 10):
        for epoch in own:
            np.testing.assert_array_equal(np.sort(epoch), clients[epoch[0] // 10])
        assert not np.array_equal(own[0], own[1])
    assert not np.array_equal(
        rows, fed.draw(clients, 6, args=ARGS)[: len(rows), :6, :5]
    )


@pytest.mark.long
def test_it_learns_and_goes_on_from_its_checkpoints(tmp_path):
    flags = [
        "--epochs",
        "2",
        "--fit-rounds",
        "1",
        "--clients-per-round",
        "10",
        "--rounds",
        "12",
    ]
    flags += ["--checkpoints", str(tmp_path)]
    whole = fed.main(flags)
    assert whole["IID"][0][-1] > 0.6, "ten digits by chance: 0.1"
    assert whole["not IID"][0][-1] > 0.3
    # One image of 360.
    assert whole["by fit"][0] == pytest.approx(whole["by fit"][1], abs=0.003)
    rest = fed.main(flags)  # after the tenth round, which is the last that was saved
    for name in ("IID", "not IID"):
        assert rest[name][0] == whole[name][0][10:]
