"""MAML (Finn et al. 2017): find parameters from which a few gradient steps learn a new
task.

    python examples/meta_learning/main.py  # a few minutes on two CPU cores
    python examples/meta_learning/main.py --data OMNIGLOT_OR_MINI_IMAGENET_DIRECTORY \\
        --epochs 20

There are two problems. In the first, a task is a sinusoid with ten known points. In the
second, a task is five kinds of images with one known example of each, and the test uses
kinds that no training task has. The loss takes inner steps on the first half of a task
and returns the error on the second half, so its gradient has second derivatives, here
through the building blocks of `rx.layers`. The first-order variant leaves them out. The
baseline of both is a model that is trained on the same data without inner steps, and
then adapted at the best of five rates.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common

UNSEEN = range(10**9, 10**9 + 640)  # numbers of test tasks
BASELINE_RATES = (0.003, 0.01, 0.03, 0.1, 0.4)

Task: TypeAlias = dict[str, Array]
"""Inputs `x` and targets `y`. Their first dim is the half of the task: known, or asked
for."""

DrawTask: TypeAlias = Callable[..., tuple[np.ndarray, np.ndarray]]
"""A function from a NumPy generator to `x` and `y` of one task."""

# -------------------------------------------------------------------------------------
# the model


class Model(eqx.Module):
    """Two residual blocks. Before them, convolutions reduce images larger than 8 x 8 to
    2 x 2."""

    stem: list[eqx.nn.Linear]
    blocks: dict[str, eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(
        self,
        key: Key[Array, ""],
        *,
        shape: tuple[int, ...],
        num_outputs: int,
        width: int = 64,
    ):
        keys = jax.random.split(key, 12)
        num_halvings = (shape[0] - 1).bit_length() - 1 if shape[0] > 8 else 0
        if num_halvings == 0:
            sizes = [int(np.prod(shape))]
        else:  # each layer reads windows of 3 x 3, and the last one the remaining 2 x 2
            sizes = [9 * shape[-1], *[9 * width] * (num_halvings - 1), 4 * width]
        self.stem = [
            eqx.nn.Linear(size, width, key=key) for size, key in zip(sizes, keys)
        ]
        up = eqx.filter_vmap(lambda key: eqx.nn.Linear(width, 2 * width, key=key))(
            keys[7:9]
        )
        down = eqx.filter_vmap(lambda key: eqx.nn.Linear(2 * width, width, key=key))(
            keys[9:11]
        )
        self.blocks = {"up": up, "down": down}
        self.head = eqx.nn.Linear(width, num_outputs, key=keys[11])

    def __call__(self, x: Float[Array, "rows ..."]) -> Float[Array, "rows outputs"]:
        """Return one output per row. Images are (rows, side, side, channels)."""
        for layer in self.stem[:-1]:
            x = halve(layer, x)
        x = jax.vmap(self.stem[-1])(x.reshape(len(x), -1))
        x = rx.layers.scan_layers(block, self.blocks, x, batched=None)
        return jax.vmap(self.head)(jax.nn.standardize(x))


def halve(
    layer: eqx.nn.Linear, x: Float[Array, "rows side side channels"]
) -> Float[Array, "rows half half width"]:
    """Apply a convolution of 3 x 3 and stride 2, a ReLU and a norm.

    It is written as a matrix product, because convolutions with a separate kernel per
    task are slow.
    """
    side = x.shape[1]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    windows = [
        x[:, i : i + side : 2, j : j + side : 2] for i in range(3) for j in range(3)
    ]
    (x,) = rx.layers.column(jnp.concatenate(windows, axis=3), layer)
    return jax.nn.relu(jax.nn.standardize(x, (1, 2, 3)))


def block(
    layer: dict[str, eqx.nn.Linear], x: Float[Array, "rows width"]
) -> Float[Array, "rows width"]:
    """Apply a residual block. Its first matrix is split by its outputs, the second by
    its inputs."""
    (up,) = rx.layers.column(jax.nn.standardize(x), layer["up"])
    return x + rx.layers.row(jax.nn.gelu(up), layer["down"])


# ----------------------------------------------------------------------------- the
# three functions


def error_of(model: Model, half: Task, *, count: bool = False) -> Float[Array, ""]:
    """Return the mean squared error. For classes, return the cross-entropy, or the
    error rate (`count`)."""
    outputs, y = model(half["x"]), half["y"]
    if y.ndim == outputs.ndim:
        return jnp.mean((outputs - y) ** 2)
    if count:
        return jnp.mean(outputs.argmax(axis=-1) != y)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, y))


def errors(
    model: Model,
    task: Task,
    rate: float | Float[Array, ""],
    *,
    num_steps: int,
    first: bool = False,
    count: bool = False,
) -> Float[Array, " num_steps+1"]:
    """Return the errors on the second half of a task after 0, 1, ... inner steps on the
    first half.

    With `first`, the gradient of an error leaves out second derivatives.
    """
    known, asked = ({name: x[i] for name, x in task.items()} for i in range(2))
    found = [error_of(model, asked, count=count)]
    for _ in range(num_steps):
        gradient = eqx.filter_grad(error_of)(model, known)
        if first:
            gradient = jax.lax.stop_gradient(gradient)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, gradient))
        found.append(error_of(model, asked, count=count))
    return jnp.stack(found)


def loss_fn(
    model: Model,
    tasks: Task,
    key: Any,
    *,
    rate: float,
    num_steps: int,
    first: bool = False,
) -> Float[Array, ""]:
    """Return the mean error over tasks after the last inner step."""
    of_task = partial(errors, model, rate=rate, num_steps=num_steps, first=first)
    return jax.vmap(of_task)(tasks)[:, -1].mean()


def predict_fn(
    model: Model, tasks: Task, key: Any, *, rates: Sequence[float]
) -> Float[Array, "tasks rates 6"]:
    """Return the errors of each task after 0 to 5 inner steps, at each rate."""
    of_task = partial(errors, model, num_steps=5, count=True)
    at_each_rate = jax.vmap(of_task, in_axes=(None, 0))
    return jax.vmap(at_each_rate, in_axes=(0, None))(tasks, jnp.array(rates))


def collate_fn(
    numbers: list[int], *, draw: DrawTask, seed: int, **options: Any
) -> dict[str, np.ndarray]:
    """Make a batch of tasks. The number of a task is the seed for drawing it."""
    x, y = zip(
        *(draw(np.random.default_rng((seed, number)), **options) for number in numbers)
    )
    return {"x": np.stack(x), "y": np.stack(y)}


# --------------------------------------------------------------------------------------
# the tasks


def sinusoid(
    random: np.random.Generator, *, named: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two sets of ten points of a curve with random amplitude and phase (section
    5.1)."""
    x = random.uniform(-5, 5, (2, 10, 1))
    amplitude = random.uniform(0.1, 5)
    phase = random.uniform(0, np.pi)
    return x.astype(np.float32), (amplitude * np.sin(x - phase)).astype(np.float32)


def few_images(
    random: np.random.Generator,
    *,
    kinds: Sequence[np.ndarray],
    args: Any,
    named: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images of some kinds, with new numbers in each task, or with the kinds' own
    numbers (`named`)."""
    chosen = random.choice(len(kinds), args.ways, replace=False)
    x = np.stack(
        [random.choice(kinds[i], 2 * args.shots, replace=False) for i in chosen], axis=1
    )
    x = x.reshape(2, -1, *x.shape[2:])
    y = np.tile(chosen if named else np.arange(args.ways), (2, args.shots))
    return (x / 128 - 1).astype(np.float32), y


def read(args: Any) -> list[list[np.ndarray]]:
    """Read kinds of images for training and for testing, each as (number, side, side,
    channels) in 0..255.

    They come from Omniglot, from Mini-ImageNet (with a folder per kind in `train` and
    in `test`), or from scikit-learn's digits (3, 4 and 7 are for testing). Quarter
    turns of characters and digits are separate kinds.

    Raises `ValueError` if there are too few.
    """
    if args.data is None:
        names, num_turns = ("digits",), 4
        parts = digits()
    elif (args.data / "train").is_dir():
        names, num_turns = ("train/*", "test/*"), 1
        parts = [folders(args.data, name, mode="RGB", side=84) for name in names]
    else:
        names, num_turns = ("images_background/*/*", "images_evaluation/*/*"), 4
        parts = [folders(args.data, name, mode="L", side=28) for name in names]
    for part in parts:
        if len(part) * num_turns < args.ways or min(map(len, part)) < 2 * args.shots:
            raise ValueError(
                f"--data {args.data} --ways {args.ways} --shots {args.shots}: too few "
                f"kinds, or images of one, in {' and '.join(names)}, or none at all."
            )
    return [
        [np.rot90(kind, turn, (1, 2)) for kind in part for turn in range(num_turns)]
        for part in parts
    ]


def digits() -> list[list[np.ndarray]]:
    """Return scikit-learn's digits by kind: seven for training, and three for
    testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return [
        [16 * x[y == int(i)].reshape(-1, 8, 8, 1) for i in part]
        for part in ("0125689", "347")
    ]


def folders(
    directory: pathlib.Path, pattern: str, *, mode: str, side: int
) -> list[np.ndarray]:
    """Return the images of each folder of this name, in PIL's `mode`, made square."""
    from PIL import Image

    def load(file: pathlib.Path) -> np.ndarray:
        return np.asarray(Image.open(file).convert(mode).resize((side, side)))

    found = []
    for folder in sorted(directory.glob(pattern)):
        images = [load(file) for file in sorted(folder.iterdir())]
        found.append(np.stack(images).reshape(len(images), side, side, -1))
    return found


# ------------------------------------------------------------------------------------
# the program


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tasks to learn from.

    - `train`, `unseen`: `collate_fn` of training tasks, and of test tasks.
    - `num_classes`: the classes of all training tasks together; `num_outputs`: those of
        one task.
    - `num_steps`, `rate`: the number and the rate of the inner steps.
    """

    train: Callable[..., dict[str, np.ndarray]]
    unseen: Callable[..., dict[str, np.ndarray]]
    num_classes: int
    num_outputs: int
    num_steps: int
    rate: float


def problems_of(args: argparse.Namespace) -> dict[str, Problem]:
    """Return the problem with images and, if no directory of images is given, the one
    with sinusoids."""
    kinds, unseen_kinds = read(args)
    curves = partial(collate_fn, seed=args.seed, draw=sinusoid)
    images = partial(collate_fn, seed=args.seed, draw=few_images, args=args)
    train, unseen = partial(images, kinds=kinds), partial(images, kinds=unseen_kinds)
    problems = {
        "images": Problem(train, unseen, len(kinds), args.ways, num_steps=5, rate=0.1)
    }
    if args.data is None:
        problems = {
            "sinusoids": Problem(curves, curves, 1, 1, num_steps=3, rate=0.01),
            **problems,
        }
    return problems


def train(
    args: argparse.Namespace,
    mesh: Mesh,
    name: str,
    collate: Any,
    *,
    num_outputs: int,
    **inner: Any,
) -> Model:
    """Train a model with these inner steps, on new tasks in each epoch."""
    num_tasks = 1000 if args.quick else 3200
    key = jax.random.key(args.seed)
    # At first, inner steps go too far, and the gradients through them are large.
    rate = optax.linear_schedule(0, 2e-3, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    make = partial(Model, shape=collate([0])["x"].shape[3:], num_outputs=num_outputs)
    state, _ = rx.fit(
        rx.init_state(rx.init_model(make, mesh, key=key), optimizer, key=key),
        lambda epoch: range(epoch * num_tasks, (epoch + 1) * num_tasks),
        collate_fn=collate,
        loss_fn=partial(loss_fn, **inner),
        optimizer=optimizer,
        batch_size=args.batch_size,
        num_epochs=args.epochs,
        checkpoints=args.checkpoints and args.checkpoints / name,
    )
    return state.model


def zeros(head: eqx.nn.Linear, num_outputs: int) -> eqx.nn.Linear:
    """Return a head with fewer outputs, all of them zero."""
    return jax.tree.map(lambda x: 0 * x[:num_outputs], head)


def test(
    args: argparse.Namespace, model: Model, collate: Any, *rates: float
) -> list[float]:
    """Return the errors on unseen tasks after 0 to 5 inner steps, at the rate with the
    smallest final error."""
    found = rx.predict(
        rx.init_state(model, key=jax.random.key(args.seed)),
        UNSEEN,
        collate_fn=collate,
        predict_fn=partial(predict_fn, rates=rates),
        batch_size=args.batch_size,
    )
    return min(np.mean(found, axis=0).tolist(), key=lambda steps: steps[-1])


def main(
    argv: Sequence[str] | None = None,
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the errors after 0 to 5 inner steps, beside those of the model that was
    trained without them."""
    parser = common.flags(__doc__, batch_size=32, epochs=3)
    parser.add_argument(
        "--data", type=pathlib.Path, help="directory of Omniglot or of Mini-ImageNet"
    )
    parser.add_argument(
        "--ways", type=int, default=5, help="kinds of images in a task (5)"
    )
    parser.add_argument(
        "--shots",
        type=int,
        default=1,
        help="examples of a kind in each half of a task (1)",
    )
    args, mesh = common.start(parser, argv)
    results = {}
    for name, problem in problems_of(args).items():
        # The baseline learns all classes at once, without inner steps.
        named = partial(problem.train, named=True)
        number = problem.num_classes
        model = train(
            args,
            mesh,
            f"{name}, pretrained",
            named,
            num_outputs=number,
            num_steps=0,
            rate=0,
        )
        # The test has other classes, which need a new head.
        if problem.num_classes != problem.num_outputs:
            model = eqx.tree_at(
                lambda m: m.head, model, zeros(model.head, problem.num_outputs)
            )
        baseline = test(args, model, problem.unseen, *BASELINE_RATES)

        for label, first in ((name, False), (f"{name}, first order", True)):
            inner: Any = {
                "num_steps": problem.num_steps,
                "rate": problem.rate,
                "first": first,
            }
            model = train(
                args,
                mesh,
                label,
                problem.train,
                num_outputs=problem.num_outputs,
                **inner,
            )
            results[label] = test(args, model, problem.unseen, problem.rate), baseline
            print(f"{label}: {np.round(results[label], 3).tolist()}", flush=True)
    return results


if __name__ == "__main__":
    common.run(main)
