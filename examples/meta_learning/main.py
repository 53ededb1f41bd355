"""MAML (Finn et al. 2017): parameters from which a few steps of gradient descent learn a new task.

    python examples/meta_learning/main.py                     # a few minutes on two CPU cores
    python examples/meta_learning/main.py --data OMNIGLOT_OR_MINI_IMAGENET_DIRECTORY --epochs 20

A task is a sinusoid of which ten points are known, or five kinds of images with one example of each known, and
none of them among the kinds to train on. The loss takes inner steps on the first half of a task and is the
error on the second, so its gradient has second derivatives, here through the building blocks of `rx.layers`;
the first-order variant leaves them out. Both are compared with a model that was trained on the same data
without inner steps, and adapted at the best of five rates.
"""

import pathlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common

UNSEEN = range(10**9, 10**9 + 640)  # numbers of tasks to test with


class Model(eqx.Module):
    """Two residual blocks. Images larger than 8 x 8 are halved to 2 x 2 by convolutions before."""

    stem: list[eqx.nn.Linear]
    blocks: dict[str, eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key: Any, *, shape: tuple[int, ...], num_outputs: int, width: int = 64):
        keys, depth = jax.random.split(key, 12), (shape[0] - 1).bit_length() - 1 if shape[0] > 8 else 0
        sizes = [9 * shape[-1], *[9 * width] * depth][:depth] + [4 * width if depth else int(np.prod(shape))]
        self.stem = [eqx.nn.Linear(size, width, key=key) for size, key in zip(sizes, keys)]
        up = eqx.filter_vmap(lambda key: eqx.nn.Linear(width, 2 * width, key=key))(keys[7:9])
        down = eqx.filter_vmap(lambda key: eqx.nn.Linear(2 * width, width, key=key))(keys[9:11])
        self.blocks, self.head = {"up": up, "down": down}, eqx.nn.Linear(width, num_outputs, key=keys[11])

    def __call__(self, x: Float[Array, "rows ..."]) -> Float[Array, "rows outputs"]:
        """One output for each row. Images are (rows, side, side, channels)."""
        for layer in self.stem[:-1]:
            # Of 3 x 3 and stride 2, as a product: kernels that differ by tasks make convolutions slow.
            side, x = x.shape[1], jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
            around = [x[:, i : i + side : 2, j : j + side : 2] for i in range(3) for j in range(3)]
            (x,) = rx.layers.column(jnp.concatenate(around, axis=3), layer)
            x = jax.nn.relu(jax.nn.standardize(x, (1, 2, 3)))
        x = jax.vmap(self.stem[-1])(x.reshape(len(x), -1))
        x = rx.layers.scan_layers(block, self.blocks, x, batched=None)
        return jax.vmap(self.head)(jax.nn.standardize(x))


def block(layer: dict[str, eqx.nn.Linear], x: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """A residual block: its first matrix is split over its outputs, the second over its inputs."""
    (up,) = rx.layers.column(jax.nn.standardize(x), layer["up"])
    return x + rx.layers.row(jax.nn.gelu(up), layer["down"])


def error_of(model: Model, half: Any, *, count: bool = False) -> Array:
    """The mean squared error; of classes the cross-entropy, or the share that is wrong (`count`)."""
    outputs, y = model(half["x"]), half["y"]
    if y.ndim == outputs.ndim:
        return jnp.mean((outputs - y) ** 2)
    wrong = outputs.argmax(axis=-1) != y
    return jnp.mean(wrong if count else optax.softmax_cross_entropy_with_integer_labels(outputs, y))


def errors(model: Model, task: Any, rate: Any, *, num_steps: int, first: bool = False, **of: bool) -> Array:
    """Those on the second half of a task after 0, 1, ... inner steps on the first, perhaps of first order."""
    known, asked = ({name: x[i] for name, x in task.items()} for i in range(2))
    found = [error_of(model, asked, **of)]
    for _ in range(num_steps):
        gradient = eqx.filter_grad(error_of)(model, known)
        gradient = jax.lax.stop_gradient(gradient) if first else gradient
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, gradient))
        found.append(error_of(model, asked, **of))
    return jnp.stack(found)


def loss_fn(model: Model, tasks: Any, key: Any, **rule: Any) -> Array:
    """The error after the last inner step, on average."""
    return jax.vmap(partial(errors, model, **rule))(tasks)[:, -1].mean()


def predict_fn(model: Model, tasks: Any, key: Any, *, rates: Any) -> Float[Array, "tasks rates 6"]:
    """The errors of each task after 0 to 5 steps, at some rates."""
    of_task = partial(errors, model, num_steps=5, count=True)
    return jax.vmap(jax.vmap(of_task, (None, 0)), (0, None))(tasks, jnp.array(rates))


def collate_fn(numbers: list[int], *, draw: Any, seed: int, **of: Any) -> dict[str, np.ndarray]:
    """A batch of tasks, each drawn anew by its number. The two halves of a task are its first dim."""
    x, y = zip(*(draw(np.random.default_rng((seed, i)), **of) for i in numbers))
    return {"x": np.stack(x), "y": np.stack(y)}


def sinusoid(random: Any, *, named: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Twice ten points of a curve of its own amplitude and phase (section 5.1), which has no name."""
    x, amplitude, phase = random.uniform(-5, 5, (2, 10, 1)), random.uniform(0.1, 5), random.uniform(0, np.pi)
    return x.astype(np.float32), (amplitude * np.sin(x - phase)).astype(np.float32)


def few_images(random: Any, *, kinds: Any, args: Any, named: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Images of some kinds, which are numbered anew in each task, or by their own numbers (`named`)."""
    chosen = random.choice(len(kinds), args.ways, replace=False)
    x = np.stack([random.choice(kinds[i], 2 * args.shots, replace=False) for i in chosen], axis=1)
    y = np.tile(chosen if named else np.arange(args.ways), (2, args.shots))
    return (x.reshape(2, -1, *x.shape[2:]) / 128 - 1).astype(np.float32), y


def read(args: Any) -> list[list[np.ndarray]]:
    """Kinds of images to train on and to test with, each as (number, side, side, channels) in 0..255.

    Those of Omniglot; of Mini-ImageNet, a folder for each in `train` and in `test`; or scikit-learn's digits,
    of which 3, 4 and 7 are for testing. Quarter turns of characters and digits are kinds of their own.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    (x, y), directory = load_digits(return_X_y=True), args.data
    is_mini = directory is not None and (directory / "train").is_dir()
    mode, side, turns = ("RGB", 84, 1) if is_mini else ("L", 28, 4)
    names = ("train/*", "test/*") if is_mini else ("images_background/*/*", "images_evaluation/*/*")

    def load(folder: pathlib.Path) -> np.ndarray:
        x = [np.asarray(Image.open(f).convert(mode).resize((side, side))) for f in sorted(folder.iterdir())]
        return np.stack(x).reshape(len(x), side, side, -1)

    if directory is None:
        parts = [[16 * x[y == int(i)].reshape(-1, 8, 8, 1) for i in own] for own in ("0125689", "347")]
    else:
        parts = [[load(folder) for folder in sorted(directory.glob(name))] for name in names]
    if any(len(part) * turns < args.ways or min(map(len, part)) < 2 * args.shots for part in parts):
        asked = f"--data {directory} --ways {args.ways} --shots {args.shots}"
        raise ValueError(f"{asked}: too few kinds, or images of one, in {' and '.join(names)}, or none at all.")
    return [[np.rot90(kind, turn, (1, 2)) for kind in part for turn in range(turns)] for part in parts]


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], list[float]]]:
    """The errors after 0 to 5 inner steps, each beside those of the model that was trained without."""
    parser = common.flags(__doc__, batch_size=32, epochs=3)
    parser.add_argument("--data", type=pathlib.Path, help="directory of Omniglot or of Mini-ImageNet")
    parser.add_argument("--ways", type=int, default=5, help="kinds of images in a task (5)")
    parser.add_argument("--shots", type=int, default=1, help="examples of a kind in each half of a task (1)")
    args, mesh = common.start(parser, argv)
    parts, key, num, results = read(args), jax.random.key(args.seed), 1000 if args.quick else 3200, {}
    few = [partial(collate_fn, seed=args.seed, draw=few_images, kinds=kinds, args=args) for kinds in parts]
    sinusoids = [partial(collate_fn, seed=args.seed, draw=sinusoid)] * 2
    # Tasks to train on and to test with, the number of all their classes and of one's, the inner steps' rule.
    problems: Any = {} if args.data else {"sinusoids": (*sinusoids, 1, 1, {"num_steps": 3, "rate": 0.01})}
    problems["images"] = (*few, len(parts[0]), args.ways, {"num_steps": 5, "rate": 0.1})
    # Where inner steps go too far, as they do at first, the gradients through them are steep.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0, 2e-3, 100)))

    def trained(name: str, collate: Any, num_outputs: int, **rule: Any) -> Model:
        make = partial(Model, shape=collate([0])["x"].shape[3:], num_outputs=num_outputs)
        state = rx.init_state(rx.init_model(make, mesh, key=key), optimizer, key=key)
        run: Any = {"optimizer": optimizer, "checkpoints": args.checkpoints and args.checkpoints / name}
        run |= {"collate_fn": collate, "loss_fn": partial(loss_fn, **rule), "num_epochs": args.epochs}
        state, _ = rx.fit(state, lambda i: range(i * num, (i + 1) * num), batch_size=args.batch_size, **run)
        return state.model

    def scores(model: Model, collate: Any, *rates: float) -> list[float]:
        run: Any = {"collate_fn": collate, "predict_fn": partial(predict_fn, rates=rates)}
        found = rx.predict(rx.init_state(model, key=key), UNSEEN, batch_size=args.batch_size, **run)
        return min(np.mean(found, axis=0).tolist(), key=lambda steps: steps[-1])

    for name, (tasks, unseen, num_classes, num_outputs, rule) in problems.items():
        model = trained(f"{name}, pretrained", partial(tasks, named=True), num_classes, num_steps=0, rate=0)
        if num_classes != num_outputs:  # it meets other classes, and so with a new head
            model = eqx.tree_at(lambda m: m.head, model, jax.tree.map(lambda x: 0 * x[: args.ways], model.head))
        baseline = scores(model, unseen, 0.003, 0.01, 0.03, 0.1, 0.4)
        for label, first in ((name, False), (f"{name}, first order", True)):
            model = trained(label, tasks, num_outputs, **rule, first=first)
            results[label] = scores(model, unseen, rule["rate"]), baseline
            print(f"{label}: {np.round(results[label], 3).tolist()}", flush=True)
    return results


if __name__ == "__main__":
    common.run(main)
