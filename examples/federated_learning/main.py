"""Federated averaging (McMahan et al. 2017): 100 clients learn handwritten digits and
keep their data.

    python examples/federated_learning/main.py  # about a minute on two CPU cores
    python examples/federated_learning/main.py --data MNIST_DIRECTORY --batch-size 10 \\
        --fit-rounds 0

In each round, some clients train from the server's parameters, each on its own
examples. The mean of their parameters becomes the server's new parameters. All clients
train at once, with `vmap` over `train_step`, split over the mesh's `data` axis. Some
rounds are repeated with one `fit` per client. The digits are dealt at random (IID), or
each client gets two pieces of the sorted digits, and so sees hardly more than two kinds
(not IID).
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data


def make_model(key: Any, *, side: int) -> eqx.Module:
    """Make a model that maps an image to the logits of its class: one of the two in the
    paper, by image size.

    Small images use two hidden layers of width 200. MNIST uses two convolutions and a
    hidden layer.
    """
    if side < 16:
        layers = [
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.MLP(side**2, 10, 200, depth=2, key=key),
        ]
        return eqx.nn.Sequential(layers)
    keys = jax.random.split(key, 4)
    relu, pool = eqx.nn.Lambda(jax.nn.relu), eqx.nn.AvgPool2d(2, 2)
    layers = [
        *(eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0]), relu, pool),
        *(eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]), relu, pool),
        *(
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(64 * (side // 4) ** 2, 256, key=keys[2]),
            relu,
        ),
        eqx.nn.Linear(256, 10, key=keys[3]),
    ]
    return eqx.nn.Sequential(layers)


def collate_fn(examples: Sequence[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    """Collate examples into a batch of NumPy arrays."""
    x, y = zip(*examples)
    return {"x": np.stack(x)[:, None], "y": np.array(y)}


def predict_fn(model: Any, batch: Any, key: Any) -> Float[Array, "batch 10"]:
    """Return the logits of each digit."""
    return jax.vmap(model)(batch["x"])


def loss_fn(model: Any, batch: Any, key: Any) -> Array:
    """Return the cross-entropy."""
    logits = predict_fn(model, batch, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def deal(
    labels: Sequence[int], num_clients: int, *, iid: bool, seed: int
) -> Int[np.ndarray, "clients rows"]:
    """Deal the same number of examples to each client, and none twice. A remainder is
    left out."""
    random = np.random.default_rng(seed)
    order = (
        random.permutation(len(labels)) if iid else np.argsort(labels, kind="stable")
    )
    pieces = order[: len(labels) // (2 * num_clients) * 2 * num_clients].reshape(
        2 * num_clients, -1
    )
    return random.permutation(pieces).reshape(num_clients, -1)


def draw(
    clients: np.ndarray, round: int, *, args: Any
) -> Int[np.ndarray, "clients steps batch"]:
    """Draw the clients of a round at random. Return the rows of the batches of each."""
    random = np.random.default_rng((args.seed, round))
    chosen = random.choice(clients, args.clients_per_round, replace=False)
    orders = random.permuted(
        np.repeat(chosen[:, None], args.local_epochs, axis=1), axis=2
    )
    steps = orders.shape[2] // args.batch_size
    orders = orders[:, :, : steps * args.batch_size]
    return orders.reshape(len(chosen), args.local_epochs * steps, args.batch_size)


def averaged(state: rx.TrainState, num_steps: int, params: Any) -> rx.TrainState:
    """Return the server's next state. Its optimizer state stays initial, because
    clients begin anew."""
    return dataclasses.replace(state, params=params, step=state.step + num_steps)


def round_by_vmap(
    state: rx.TrainState,
    data: Any,
    rows: Int[Array, "clients steps batch"],
    *,
    step: Any,
) -> rx.TrainState:
    """Run one round with all of its clients at once, under your own `jit`."""

    def trained(client: Array, rows: Array) -> Any:
        own = dataclasses.replace(state, key=jax.random.fold_in(state.key, client))

        def body(own: rx.TrainState, rows: Array) -> tuple[rx.TrainState, None]:
            return step(own, jax.tree.map(lambda x: x[rows], data))[0], None

        return jax.lax.scan(body, own, rows)[0].params

    # The step's layout for one client then applies to each of them, and the clients are
    # split over `data`.
    params = jax.vmap(trained, spmd_axis_name="data")(jnp.arange(len(rows)), rows)
    return averaged(
        state, rows.shape[1], jax.tree.map(lambda x: jnp.mean(x, axis=0), params)
    )


def round_by_fit(
    state: rx.TrainState, train: list[Any], rows: np.ndarray, **arguments: Any
) -> rx.TrainState:
    """Run the same round, client by client. The step is compiled once: `fit` keeps it
    from call to call."""
    total = jax.tree.map(jnp.zeros_like, state.params)
    for client, batches in enumerate(rows):
        own = jax.tree.map(jnp.copy, state)  # `fit` takes over the arrays of its state
        own = dataclasses.replace(own, key=jax.random.fold_in(state.key, client))
        examples = rx.Data(
            [train[i] for i in batches.ravel()], shuffle=False, prefetch=0
        )
        fit: Any = {"batch_size": rows.shape[2], "num_epochs": 1, "loggers": ()}
        total = jax.tree.map(
            jnp.add, total, rx.fit(own, examples, **fit, **arguments)[0].params
        )
    return averaged(state, rows.shape[1], jax.tree.map(lambda x: x / len(rows), total))


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Return the accuracy over time for each case, beside that of central training on
    the same data."""
    parser = common.flags(__doc__, batch_size=4, epochs=40)
    parser.add_argument("--data", help="directory with the files of MNIST")
    parser.add_argument(
        "--clients", type=int, default=100, help="total number of clients (100)"
    )
    parser.add_argument(
        "--clients-per-round", type=int, default=20, help="clients in each round (20)"
    )
    parser.add_argument(
        "--local-epochs", type=int, default=5, help="epochs per client and round (5)"
    )
    parser.add_argument(
        "--rounds", type=int, default=100, help="number of rounds (%(default)s)"
    )
    parser.add_argument(
        "--fit-rounds",
        type=int,
        default=2,
        help="rounds to repeat with one fit per client (2)",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=0.3, help="SGD's, on each client (0.3)"
    )
    args, mesh = common.start(parser, argv)
    if args.quick:
        args.rounds, args.fit_rounds, args.epochs = 8, 1, 5
    train, held_out = digits_data.digits(args.data)
    labels, size = [y for _, y in train], len(train) // (2 * args.clients) * 2
    if not (0 < args.clients_per_round <= args.clients and args.batch_size <= size):
        got = f"--clients {args.clients} --clients-per-round {args.clients_per_round}"
        what = f"each client has {size} of {len(train)} examples"
        raise ValueError(
            f"{got} --batch-size {args.batch_size}: {what}, and must have a batch of "
            "them."
        )
    functions: Any = {
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "optimizer": optax.sgd(args.learning_rate),
    }
    make = functools.partial(make_model, side=len(train[0][0]))
    model = rx.init_model(make, mesh, key=jax.random.key(args.seed))
    shardings = rx.shard_rules(model, mesh)
    state = rx.init_state(
        model, functions["optimizer"], key=jax.random.key(args.seed + 1)
    )
    step = functools.partial(
        rx.train_step,
        loss_fn=loss_fn,
        optimizer=functions["optimizer"],
        shardings=shardings,
    )
    laid_out = jax.tree.map(lambda x: x.sharding, state)
    run_round = jax.jit(
        functools.partial(round_by_vmap, step=step), out_shardings=laid_out
    )
    data = jax.device_put(collate_fn(train), NamedSharding(mesh, PartitionSpec()))

    def accuracy(state: rx.TrainState) -> float:
        logits = rx.predict(
            state,
            held_out,
            collate_fn=collate_fn,
            predict_fn=predict_fn,
            batch_size=256,
        )
        return float(np.mean(np.argmax(logits, axis=1) == [y for _, y in held_out]))

    copy = jax.tree.map(jnp.copy, state)
    trained, _ = rx.fit(copy, train, **functions, batch_size=32, num_epochs=args.epochs)
    central = accuracy(trained)
    dealt = {
        name: deal(labels, args.clients, iid=name == "IID", seed=args.seed)
        for name in ("IID", "not IID")
    }
    server, results = state, dict[str, tuple[Any, float]]()
    for i in tqdm(range(args.fit_rounds), desc="a fit for each client", disable=None):
        server = round_by_fit(
            server, train, draw(dealt["not IID"], i, args=args), **functions
        )
    by_fit = accuracy(server)
    for name, clients in dealt.items():
        server, scores, directory = (
            state,
            [],
            args.checkpoints and args.checkpoints / name,
        )
        if directory and rx.list_checkpoints(directory):
            server = rx.restore(directory, server)
        done = int(server.step) // draw(clients, 0, args=args).shape[1]
        for i in tqdm(range(done, args.rounds), desc=name, disable=None):
            server = run_round(server, data, draw(clients, i, args=args))
            scores.append(accuracy(server))
            if directory and i % 10 == 9:
                rx.save(directory, server)
        results[name] = scores or [accuracy(server)], central
    reached = results["not IID"][0]
    if 0 < args.fit_rounds <= len(reached) == args.rounds:
        results["by fit"] = by_fit, reached[args.fit_rounds - 1]
    for name, (reached, reference) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.4f}, to compare with {reference:.4f}")
    return results


if __name__ == "__main__":
    common.run(main)
