"""MAML (Finn et al. 2017): parameters from which a few steps of gradient descent learn a new task.

    python examples/meta_learning/main.py                     # a few minutes on two CPU cores
    python examples/meta_learning/main.py --data OMNIGLOT_OR_MINI_IMAGENET_DIRECTORY --epochs 300

The tasks are sinusoids, and five kinds of handwritten digits that no training has seen, of one example each.
The loss takes inner steps on the first half of a task and is the error on the second, so its gradient has
second derivatives, here through the building blocks of `rx.layers`; the first-order variant leaves them out.
Both are compared with a model that was trained on the same data without inner steps, and adapted at the best of
`RATES`.
"""

import functools
import pathlib
import sys
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

RATES = (0.003, 0.01, 0.03, 0.1)


class Model(eqx.Module):
    """A stem, then a stack of residual blocks."""

    stem: eqx.nn.Sequential
    blocks: dict[str, eqx.nn.Linear]
    head: eqx.nn.Linear

    def __call__(self, x: Float[Array, "rows ..."]) -> Float[Array, "rows outputs"]:
        """One output for each row."""
        x = rx.layers.scan_layers(block, self.blocks, jax.vmap(self.stem)(x), batched=None)
        return jax.vmap(self.head)(x)


def block(layer: dict[str, eqx.nn.Linear], x: Array) -> Array:
    """A residual block: its first matrix is split over its outputs, the second over its inputs."""
    (up,) = rx.layers.column(jax.nn.standardize(x), layer["up"])
    return x + rx.layers.row(jax.nn.gelu(up), layer["down"])


def make_model(key: Any, *, shape: tuple[int, ...], num_outputs: int, width: int = 64) -> Model:
    """Of two blocks. Images larger than 8 x 8 first go through four convolutions of stride 2."""
    keys, normed = jax.random.split(key, 8), eqx.nn.Lambda(lambda x: jax.nn.relu(jax.nn.standardize(x, None)))
    channels = [shape[0], width, width, width] if shape[-1] > 8 else []
    size = width * (-(-shape[-1] // 16)) ** 2 if channels else int(np.prod(shape))
    stem = [x for n, k in zip(channels, keys) for x in (eqx.nn.Conv2d(n, width, 3, 2, 1, key=k), normed)]
    stem = eqx.nn.Sequential([*stem, eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(size, width, key=keys[4])])
    up = eqx.filter_vmap(lambda key: eqx.nn.Linear(width, 2 * width, key=key))(jax.random.split(keys[5]))
    down = eqx.filter_vmap(lambda key: eqx.nn.Linear(2 * width, width, key=key))(jax.random.split(keys[6]))
    return Model(stem, {"up": up, "down": down}, eqx.nn.Linear(width, num_outputs, key=keys[7]))


def loss_of(outputs: Array, y: Array) -> Array:
    """The mean squared error, or of classes the cross-entropy."""
    if y.ndim == outputs.ndim:
        return jnp.mean((outputs - y) ** 2)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def error_of(outputs: Array, y: Array) -> Array:
    """The mean squared error, or of classes the share that is wrong."""
    return loss_of(outputs, y) if y.ndim == outputs.ndim else jnp.mean(outputs.argmax(axis=-1) != y)


def errors(model: Any, x: Any, y: Any, num_steps: int, rate: Any, of: Any, first_order: bool = False) -> Any:
    """What is wrong on the second half of one task after 0, 1, 2, ... inner steps on the first."""
    half, found = len(y) // 2, []
    for _ in range(num_steps + 1):  # the compiler leaves out the last gradient, which nothing uses
        found.append(of(model(x[half:]), y[half:]))
        gradient = eqx.filter_grad(lambda model: loss_of(model(x[:half]), y[:half]))(model)
        gradient = jax.lax.stop_gradient(gradient) if first_order else gradient
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, gradient))
    return jnp.stack(found)


def predict_fn(model: Model, tasks: Any, key: Any, **rule: Any) -> Float[Array, "tasks steps"]:
    """The `errors` of each task."""
    return jax.vmap(functools.partial(errors, model, **rule))(tasks["x"], tasks["y"])


def loss_fn(model: Model, tasks: Any, key: Any, **rule: Any) -> Array:
    """The loss after the last inner step, on average."""
    return jnp.mean(predict_fn(model, tasks, key, of=loss_of, **rule)[:, -1])


def collate_fn(tasks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Tasks to a batch of NumPy arrays."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *tasks)


def sinusoids(seed: Any, num: int, *, named: bool = False) -> list[Any]:
    """Twice ten points of curves of different amplitudes and phases (section 5.1), which have no names."""
    random = np.random.default_rng(seed)
    x = random.uniform(-5, 5, (num, 20, 1)).astype(np.float32)
    amplitude, phase = random.uniform(0.1, 5, (num, 1, 1)), random.uniform(0, np.pi, (num, 1, 1))
    y = (amplitude * np.sin(x - phase)).astype(np.float32)
    return [{"x": x[i], "y": y[i]} for i in range(num)]


def image_tasks(seed: Any, num: int, *, classes: Any, ways: int, shots: int, named: bool = False) -> list[Any]:
    """Tasks of some of the classes, numbered anew in each task, or by their own numbers (`named`)."""
    random, tasks = np.random.default_rng(seed), []
    for _ in range(num):
        chosen = random.choice(len(classes), ways, replace=False)
        images = [classes[i][random.choice(len(classes[i]), 2 * shots, replace=False)] for i in chosen]
        x = np.float32(np.stack(images, axis=1).reshape(-1, *images[0].shape[1:]) / 128 - 1)
        tasks.append({"x": x, "y": np.tile(chosen if named else np.arange(ways), 2 * shots)})
    return tasks


def read(directory: str | None) -> list[list[np.ndarray]]:
    """Classes to train on and to test with, each as (number, channels, side, side) in 0..255.

    Those of Omniglot; of Mini-ImageNet, a folder for each class in `train` and in `test`; or scikit-learn's
    digits, of which 3, 4 and 7 are for testing. Quarter turns of characters and digits are further classes.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    is_mini = directory is not None and pathlib.Path(directory, "train").is_dir()
    mode, side, turns = ("RGB", 84, 1) if is_mini else ("L", 28, 4)
    names = ("train/*", "test/*") if is_mini else ("images_background/*/*", "images_evaluation/*/*")

    def load(folder: pathlib.Path) -> np.ndarray:
        x = [np.asarray(Image.open(f).convert(mode).resize((side, side))) for f in sorted(folder.iterdir())]
        return np.stack(x).reshape(len(x), side, side, -1).transpose(0, 3, 1, 2)

    if directory is None:
        parts = [[16 * data.images[data.target == int(i), None] for i in own] for own in ("0125689", "347")]
    else:
        parts = [[load(folder) for folder in sorted(pathlib.Path(directory).glob(name))] for name in names]
    if not all(parts):
        raise ValueError(f"{directory}: there must be folders {' and '.join(names)}.")
    return [[np.rot90(kind, turn, (2, 3)) for kind in part for turn in range(turns)] for part in parts]


def main(argv: list[str] | None = None) -> dict[str, tuple[list[float], list[float]]]:
    """The errors after 0 to 5 inner steps, each beside those of the model that was not meta-trained."""
    parser = common.flags(__doc__, batch_size=32, epochs=3)
    parser.add_argument("--data", help="the directory of Omniglot or of Mini-ImageNet")
    parser.add_argument("--ways", type=int, default=5, help="classes of a task (5)")
    parser.add_argument("--shots", type=int, default=1, help="examples of a class in each half of a task (1)")
    args, mesh = common.start(parser, argv)
    epochs, num = (2, 1600) if args.quick else (args.epochs, 3200)
    parts, key, results = read(args.data), jax.random.key(args.seed), {}
    # Where inner steps go too far, as they do at first, the gradients through them are steep.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0, 2e-3, 100)))
    images = [functools.partial(image_tasks, classes=x, ways=args.ways, shots=args.shots) for x in parts]
    # Tasks to train on and to test with; the numbers of classes of a task, and of all; inner steps in training,
    # with their rate by second order and by first.
    problems: Any = {} if args.data else {"sinusoids": (sinusoids, sinusoids, 1, 1, 3, (0.01, 0.01))}
    problems["images"] = (*images, args.ways, len(parts[0]), 5, (0.4, 0.1))

    def trained(tasks: Any, num_outputs: int, name: str, **rule: Any) -> Model:
        make = functools.partial(make_model, shape=tasks(0, 1)[0]["x"].shape[1:], num_outputs=num_outputs)
        state = rx.init_state(rx.init_model(make, mesh, key=key), optimizer, key=key)
        run: Any = {"checkpoints": args.checkpoints and args.checkpoints / name, "num_epochs": epochs}
        run |= {"collate_fn": collate_fn, "loss_fn": functools.partial(loss_fn, **rule), "optimizer": optimizer}
        return rx.fit(state, lambda i: tasks((args.seed, i), num), batch_size=args.batch_size, **run).model

    def scores(model: Model, tasks: Any, rate: float) -> list[float]:
        predict = functools.partial(predict_fn, num_steps=5, rate=rate, of=error_of)
        run: Any = {"collate_fn": collate_fn, "predict_fn": predict, "batch_size": args.batch_size}
        found = rx.predict(rx.init_state(model, key=key), tasks((args.seed, 0, 1), num // 5), **run)
        return np.mean(found, axis=0).tolist()

    for name, (tasks, unseen, num_outputs, num_classes, num_steps, rates) in problems.items():
        model = trained(functools.partial(tasks, named=True), num_classes, name + "0", num_steps=0, rate=0)
        if num_classes != num_outputs:  # it meets other classes, and so with a new head
            head = jax.tree.map(lambda x, num=num_outputs: jnp.zeros_like(x[:num]), model.head)
            model = eqx.tree_at(lambda model: model.head, model, head)
        baseline = min((scores(model, unseen, rate) for rate in RATES), key=lambda found: found[-1])
        for label, first, rate in zip((name, f"{name}, first order"), (False, True), rates):
            model = trained(tasks, num_outputs, label, num_steps=num_steps, rate=rate, first_order=first)
            results[label] = scores(model, unseen, rate), baseline
            print(f"{label}: {np.round(results[label], 3).tolist()}", flush=True)
    return results


if __name__ == "__main__":
    common.run(main)
