"""Training on handwritten digits with differential privacy: DP-SGD (Abadi et al. 2016),
and plain SGD.

    python examples/differential_privacy/main.py  # about a minute
    python examples/differential_privacy/main.py --data MNIST_DIRECTORY --delta 1e-5

The gradient of each example is clipped before any sum over examples, so nothing about
one example leaves its device unclipped. Batches are Poisson samples, as the accounting
(by dp-accounting) assumes: each example is in a batch or not, independently of all
others. NumPy's and JAX's generators draw them. That is enough to study privacy; to
protect people, use a cryptographic generator.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting.rdp import RdpAccountant
from jaxtyping import Array, Float

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data


def collate_fn(
    examples: Sequence[tuple[np.ndarray, int, float]],
) -> dict[str, np.ndarray]:
    """Collate examples into a batch of NumPy arrays. Unused places have weight 0."""
    x, y, weight = zip(*examples)
    return {"x": np.stack(x), "y": np.array(y), "weight": np.array(weight, np.float32)}


def predict_fn(model: eqx.nn.MLP, batch: Any, key: Any) -> Float[Array, "batch 10"]:
    """Return the logits of each digit."""
    return jax.vmap(lambda x: model(x.ravel()))(batch["x"])


def losses(model: eqx.nn.MLP, batch: Any, key: Any) -> Float[Array, " batch"]:
    """Return the cross-entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(
        predict_fn(model, batch, key), batch["y"]
    )


def loss_fn(model: eqx.nn.MLP, batch: Any, key: Any) -> rx.Mean:
    """Return the mean over the examples, without unused places."""
    return rx.Mean(
        jnp.sum(losses(model, batch, key) * batch["weight"]), jnp.sum(batch["weight"])
    )


def metric_fn(
    examples: Sequence[tuple[Any, int, float]], logits: list[Any]
) -> dict[str, float]:
    """Return the share of digits for which the correct logit is the highest."""
    return {
        "accuracy": float(
            np.mean(np.argmax(logits, axis=1) == [y for _, y, _ in examples])
        )
    }


def private_step(
    state: rx.TrainState,
    batch: Any,
    *,
    optimizer: Any,
    clip: float,
    noise: float,
    batch_size: int,
    **_: Any,
) -> tuple[rx.TrainState, dict[str, Any]]:
    """Take one step of DP-SGD (Algorithm 1 of the paper), as a step of `fit`.

    `clip` bounds the norm of an example's gradient, and the noise's standard deviation
    is `noise * clip`. The sum is divided by the expected size of a batch, since the
    true one is not public.
    """

    def loss_of(params: Any, example: Any) -> Array:
        model = state.build(params, state.model_state)
        return losses(model, jax.tree.map(lambda x: x[None], example), state.key)[0]

    grads = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(state.params, batch)
    norms = jnp.sqrt(
        sum(jnp.sum(jnp.square(g), axis=range(1, g.ndim)) for g in grads.values())
    )
    weights = batch["weight"] * jnp.minimum(1, clip / jnp.maximum(norms, 1e-12))
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), len(grads))

    def private(g: Array, key: Any) -> Array:
        total = jnp.tensordot(weights, g, axes=1)
        return (total + noise * clip * jax.random.normal(key, total.shape)) / batch_size

    mean = {path: private(g, key) for (path, g), key in zip(grads.items(), keys)}
    updates, opt_state = optimizer.update(mean, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    new_state = dataclasses.replace(
        state, params=params, opt_state=opt_state, step=state.step + 1
    )
    return new_state, {"loss": loss_fn(state.model, batch, state.key)}


def poisson_sample(
    step: int, *, examples: Any, rate: float, places: int, seed: int
) -> list[Any]:
    """Draw the sample of a step, and fill it up to `places` places."""
    drawn = np.random.default_rng((seed, step)).random(len(examples)) < rate
    chosen = [example for example, is_drawn in zip(examples, drawn) if is_drawn]
    if len(chosen) > places:
        raise RuntimeError(
            f"{len(chosen)} examples were drawn, for which {places} places are too few."
        )
    return chosen + [(*examples[0][:2], 0.0)] * (places - len(chosen))


class PoissonSamples:
    """The examples of all steps, one step's sample after the other, without end."""

    def __init__(self, **options: Any):
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        for step in itertools.count():
            yield from poisson_sample(step, **self._options)


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return the accuracy over time, with privacy and without, and the final accuracy
    without it."""
    parser = common.flags(__doc__, batch_size=256, epochs=40)
    parser.add_argument("--data", help="directory with the files of MNIST")
    parser.add_argument(
        "--epsilon", type=float, default=3.0, help="epsilon of the guarantee (3)"
    )
    parser.add_argument(
        "--delta", type=float, default=1e-4, help="delta: below 1 / number of examples"
    )
    parser.add_argument(
        "--clip", type=float, default=1.0, help="limit on the norm of each gradient"
    )
    args, mesh = common.start(parser, argv)
    train, held_out = (
        [(x, y, 1.0) for x, y in split] for split in digits_data.digits(args.data)
    )
    rate = args.batch_size / len(train)
    if not (
        0 < args.delta < 1 / len(train)
        and min(args.epsilon, args.clip) > 0
        and rate <= 1
    ):
        got = (
            f"--epsilon {args.epsilon} --clip {args.clip} --delta {args.delta} "
            f"--batch-size {args.batch_size}"
        )
        raise ValueError(
            f"{got}: not epsilon, clip > 0, 0 < delta < 1/{len(train)}, batch <= "
            f"{len(train)}."
        )
    num_steps = 20 if args.quick else math.ceil(args.epochs / rate)
    # Leave room for six standard deviations above the mean, which is too little for one
    # sample in a billion.
    places = (
        math.ceil(
            (args.batch_size + 6 * math.sqrt(args.batch_size * (1 - rate))) / mesh.size
        )
        * mesh.size
    )

    def event(noise: float) -> dp_accounting.DpEvent:
        sampled = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(noise)
        )
        return dp_accounting.SelfComposedDpEvent(sampled, num_steps)

    noise = dp_accounting.calibrate_dp_mechanism(
        RdpAccountant, event, args.epsilon, args.delta
    )
    print(
        f"{num_steps} samples at rate {rate:.3f}, with noise {noise:.3f} for "
        f"{args.epsilon=}, {args.delta=}"
    )

    def accuracies(clip: float, noise: float) -> list[float]:
        size, optimizer = train[0][0].size, optax.sgd(1.0, momentum=0.5)
        make_model = functools.partial(
            eqx.nn.MLP, size, 10, 64, depth=1, activation=jnp.tanh
        )
        program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[:places])}
        model = rx.init_model(
            lambda key: make_model(key=key),
            mesh,
            key=jax.random.key(args.seed),
            **program,
        )
        state = rx.init_state(model, optimizer, key=jax.random.key(args.seed + 1))
        name = f"noise-{noise:.3f}"
        evaluation = rx.Evaluation(
            held_out,
            batch_size=places,
            every_steps=20,
            predict_fn=predict_fn,
            metric_fn=metric_fn,
            predictions_directory=args.output and args.output / name,
        )
        samples = PoissonSamples(
            examples=train, rate=rate, places=places, seed=args.seed
        )
        checkpoints = None
        if args.checkpoints:
            checkpoints = rx.Checkpoints(args.checkpoints / name, every_steps=20)
        # `fit` keeps the key of the noise and the place in the samples, so a run that
        # is stopped and resumed draws neither twice.
        _, history = rx.fit(
            state,
            rx.Stream(samples),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            optimizer=optimizer,
            batch_size=places,
            num_steps=num_steps,
            step_fn=functools.partial(
                private_step, clip=clip, noise=noise, batch_size=args.batch_size
            ),
            evaluation=evaluation,
            checkpoints=checkpoints,
        )
        return history["eval/accuracy"]

    private, plain = accuracies(args.clip, noise), accuracies(1e9, 0.0)
    print(
        f"accuracy {private[-1]:.3f} at epsilon {args.epsilon}, and {plain[-1]:.3f} "
        "without privacy"
    )
    return {"private": (private, plain[-1]), "not private": (plain, plain[-1])}


if __name__ == "__main__":
    common.run(main)
