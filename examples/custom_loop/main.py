"""`train_step` in your own loops, on handwritten digits.

    # a few minutes on two CPU cores, nothing to download
    python examples/custom_loop/main.py
    python examples/custom_loop/main.py --quick    # to see that it works

An epoch is one `lax.scan` under plain `jax.jit`, and an ensemble is a `vmap` of it.
`grad` through whole training runs tunes learning rate and weight decay. A vision
transformer from equimo, a package that knows nothing about this library, is sharded and
trained unchanged. Another loop uses `batches` and checkpoints, and has its own stopping
rule.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key
from sklearn.linear_model import LogisticRegression
from tqdm import tqdm

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data

Examples: TypeAlias = list[tuple[np.ndarray, int]]
"""Images of digits, and their labels."""


def make_model(key: Key[Array, ""]) -> eqx.nn.MLP:
    """Make a model that maps the pixels of a digit to the logits of its class."""
    return eqx.nn.MLP(64, 10, 256, depth=2, activation=jax.nn.gelu, key=key)


def collate_fn(examples: Sequence[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    """Collate examples into a batch of NumPy arrays."""
    x, y = zip(*examples)
    return {"x": np.stack(x), "y": np.array(y)}


def predict_fn(
    model: eqx.nn.MLP, batch: dict[str, Array], key: Key[Array, ""]
) -> Float[Array, "batch 10"]:
    """Return the logits of each digit."""
    return jax.vmap(lambda x: model(x.ravel()))(batch["x"])


def predict_by_vit(
    model: Any, batch: dict[str, Array], key: Key[Array, ""]
) -> Float[Array, "batch 10"]:
    """Return the logits of a vision transformer, which needs images with channels, and
    a key for dropout."""
    keys = jax.random.split(key, len(batch["y"]))
    return jax.vmap(lambda x, key: model(x[None], key=key))(batch["x"], keys)


def loss_fn(
    model: Any,
    batch: dict[str, Array],
    key: Key[Array, ""],
    *,
    predict_fn: rx.types.PredictFn = predict_fn,
) -> Array:
    """Return the cross-entropy."""
    logits = predict_fn(model, batch, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def accuracy(examples: Sequence[tuple[Any, int]], logits: Any) -> dict[str, float]:
    """Return the share of digits for which the correct logit is the highest."""
    return {
        "accuracy": float(
            np.mean(np.argmax(np.asarray(logits), axis=-1) == [y for _, y in examples])
        )
    }


# --------------------------------------------------------------------------------------
# the loops


def train_epoch(
    state: rx.TrainState,
    data: dict[str, Array],
    *,
    step: Callable[..., Any],
    batch_size: int,
) -> tuple[rx.TrainState, Float[Array, " steps"]]:
    """Train for one epoch in a new order, as one `scan`. Return the loss of each
    step."""
    order = jax.random.permutation(
        jax.random.fold_in(state.key, state.step), len(data["y"])
    )
    order = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)

    def body(state: rx.TrainState, rows: Array) -> tuple[rx.TrainState, Array]:
        state, metrics = step(state, jax.tree.map(lambda x: x[rows], data))
        return state, metrics["loss"].value

    return jax.lax.scan(body, state, order)


def loss_after_training(
    hyper: dict[str, Array],
    state: rx.TrainState,
    train: dict[str, Array],
    held_out: dict[str, Array],
    *,
    batch_size: int,
) -> Array:
    """Return the held-out loss after one epoch, as a differentiable function of the
    hyperparameters."""
    decay = optax.add_decayed_weights(jnp.exp(hyper["log_decay"]))
    optimizer = optax.chain(decay, optax.sgd(jnp.exp(hyper["log_rate"]), momentum=0.9))
    state = rx.init_state(state.model, optimizer, key=state.key)
    step = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer)
    state, _ = train_epoch(state, train, step=step, batch_size=batch_size)
    return rx.eval_step(state, held_out, loss_fn=loss_fn)["loss"].value


def ensemble(
    args: argparse.Namespace, mesh: Mesh, train: Examples, held_out: Examples
) -> tuple[float, float]:
    """Return the accuracy of the members' mean, and the mean of their accuracies."""
    optimizer = optax.adamw(1e-3)
    keys = jax.random.split(jax.random.key(args.seed), 8)
    program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[: args.batch_size])}
    models = [rx.init_model(make_model, mesh, key=key, **program) for key in keys]
    states = [
        rx.init_state(model, optimizer, key=key) for model, key in zip(models, keys)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    step = functools.partial(
        rx.train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        shardings=states[0].shardings,
    )
    epoch = functools.partial(train_epoch, step=step, batch_size=args.batch_size)
    run = jax.jit(jax.vmap(epoch, in_axes=(0, None)), donate_argnums=0)
    bar = tqdm(range(args.epochs), desc="ensemble", disable=None)
    for _ in bar:
        stacked, losses = run(stacked, collate_fn(train))
        bar.set_postfix(loss=float(losses[:, -1].mean()))
    predict = functools.partial(rx.predict_step, predict_fn=predict_fn)
    logits = jax.jit(jax.vmap(predict, in_axes=(0, None)))(
        stacked, collate_fn(held_out)
    )
    members = [accuracy(held_out, x)["accuracy"] for x in logits]
    return accuracy(held_out, jax.nn.softmax(logits).mean(axis=0))["accuracy"], float(
        np.mean(members)
    )


def tune(
    args: argparse.Namespace, mesh: Mesh, train: Examples, held_out: Examples
) -> dict[str, Any]:
    """Return the loss while and before tuning, and a hypergradient with its finite
    difference."""
    data = collate_fn(train), collate_fn(held_out)
    model = rx.init_model(
        make_model, mesh, key=jax.random.key(args.seed), loss_fn=loss_fn, batch=data[0]
    )
    state = rx.init_state(model, key=jax.random.key(1))
    objective = functools.partial(loss_after_training, batch_size=args.batch_size)
    value_and_grad = jax.jit(jax.value_and_grad(objective))
    hyper: Any = {"log_rate": jnp.log(0.01), "log_decay": jnp.log(0.01)}
    first, gradient = value_and_grad(hyper, state, *data)
    sides = [
        value_and_grad(hyper | {"log_rate": hyper["log_rate"] + e}, state, *data)[0]
        for e in (0.02, -0.02)
    ]
    outer, losses = optax.adam(0.4), []
    opt_state = outer.init(hyper)
    bar = tqdm(range(args.epochs), desc="hyperparameters", disable=None)
    for _ in bar:
        loss, grads = value_and_grad(hyper, state, *data)
        losses.append(float(loss))
        updates, opt_state = outer.update(grads, opt_state)
        hyper = optax.apply_updates(hyper, updates)
        bar.set_postfix(loss=losses[-1])
    print({name: f"{float(jnp.exp(x)):.2g}" for name, x in hyper.items()})
    slope = float(sides[0] - sides[1]) / 0.04
    return {
        "tuned loss": (losses, float(first)),
        "hypergradient": (float(gradient["log_rate"]), slope),
    }


def stop_early(
    args: argparse.Namespace, mesh: Mesh, train: Examples, held_out: Examples
) -> list[float]:
    """Return the accuracy after each epoch. Stop when three epochs have not raised
    it."""
    optimizer = optax.adamw(1e-3)
    program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[: args.batch_size])}
    model = rx.init_model(make_model, mesh, key=jax.random.key(args.seed), **program)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    evaluation = rx.Evaluation(
        held_out,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        predict_fn=predict_fn,
        metric_fn=accuracy,
        batch_size=32,
    )

    # Only the step needs the layout. It skips updates with a loss or gradient that is
    # not finite.
    step_fn = functools.partial(
        rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=state.shardings
    )
    step = rx.jit_step(rx.skip_nonfinite(step_fn))

    # A stopped run continues from its checkpoint, which holds the state, and everything
    # else in `extras`.
    directory = args.checkpoints and args.checkpoints / "until accuracy stops rising"
    saved = rx.list_checkpoints(directory) if directory else []
    extras: Any = (
        saved[-1].extras if saved else {"place": {"epoch": 0, "start": 0}, "scores": []}
    )
    state = rx.restore(directory, state) if saved else state
    place, scores = extras["place"], extras["scores"]

    while place["epoch"] < args.epochs and not has_stopped_growing(scores):
        # Each epoch has its own order, from the key and the number of the epoch.
        batches = rx.batches(
            train,
            collate_fn,
            batch_size=args.batch_size,
            mesh=mesh,
            key=jax.random.key(2),
            **place,
        )
        for batch in batches:
            state, _ = step(state, batch)
        place = batches.place  # at the end of an epoch: the beginning of the next one
        scores = [*scores, evaluation(state)["eval/accuracy"]]
        print(f"epoch {place['epoch']}: accuracy {scores[-1]:.3f}")
        if directory:
            rx.save(directory, state, extras={"place": place, "scores": scores})
    return scores


def has_stopped_growing(scores: Sequence[float]) -> bool:
    """Return true if none of the last three scores is above all earlier ones."""
    return len(scores) > 3 and max(scores[-3:]) <= max(scores[:-3])


def third_party(
    args: argparse.Namespace, mesh: Mesh, train: Examples, held_out: Examples
) -> list[float]:
    """Return the accuracy after each epoch of a published model that was written
    without sharding in mind."""
    # Its import makes a key, which initialises devices.
    from equimo.models.vit import VisionTransformer

    vit: Any = VisionTransformer
    sizes = {
        "img_size": 8,
        "in_channels": 1,
        "patch_size": 2,
        "dim": 64,
        "num_heads": 4,
        "depths": [2],
    }
    make = functools.partial(vit, **sizes, num_classes=10)
    loss = functools.partial(loss_fn, predict_fn=predict_by_vit)
    program: Any = {"loss_fn": loss, "batch": collate_fn(train[: args.batch_size])}
    model = rx.init_model(
        lambda key: make(key=key), mesh, key=jax.random.key(args.seed), **program
    )
    print(rx.explain(model, mesh, **program), end="\n\n")
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=args.epochs
    )
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, num_steps))
    _, history = rx.fit(
        rx.init_state(model, optimizer, key=jax.random.key(1)),
        train,
        collate_fn=collate_fn,
        loss_fn=loss,
        optimizer=optimizer,
        batch_size=args.batch_size,
        num_epochs=args.epochs,
        evaluation=rx.Evaluation(
            held_out,
            predict_fn=predict_by_vit,
            metric_fn=accuracy,
            predictions_directory=args.output,
        ),
        checkpoints=args.checkpoints,
    )
    return history["eval/accuracy"]


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Return the results, each a number or a list of numbers over time, with their
    baselines."""
    parser = common.flags(__doc__, batch_size=32, epochs=12)
    args, mesh = common.start(parser, argv)
    args.epochs = 2 if args.quick else args.epochs
    train, held_out = digits_data.digits()
    flat = [
        np.stack([x.ravel().astype(float) for x, _ in examples])
        for examples in (train, held_out)
    ]
    labels = [[y for _, y in examples] for examples in (train, held_out)]
    # Fit to convergence in float64, because the result of an early stop in float32
    # depends on the processor.
    regression = LogisticRegression(max_iter=10_000, tol=1e-6).fit(flat[0], labels[0])
    linear = float(regression.score(flat[1], labels[1]))
    results: dict[str, tuple[Any, float]] = {
        "ensemble of 8": ensemble(args, mesh, train, held_out)
    }
    results["until accuracy stops rising"] = (
        stop_early(args, mesh, train, held_out),
        linear,
    )
    results |= tune(args, mesh, train[:960], train[960:])
    results["equimo's VisionTransformer"] = (
        third_party(args, mesh, train, held_out),
        linear,
    )
    for name, (reached, reference) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.4f}, to compare with {reference:.4f}")
    return results


if __name__ == "__main__":
    common.run(main)
