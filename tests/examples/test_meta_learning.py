"""The meta-gradient is the true one, first order drops what it should, and MAML adapts
faster."""

import types
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meta_learning import main as maml
from PIL import Image

RULE = {"num_steps": 2, "rate": 0.1}


make_model = partial(maml.Model, shape=(1,), num_outputs=1, width=8)


def test_the_second_order_is_that_of_a_finite_difference_and_the_first_leaves_it_out(
    double,
):
    batch = maml.collate_fn(list(range(8)), draw=maml.sinusoid, seed=0)
    batch = jax.tree.map(lambda x: x.astype(np.float64), batch)
    params, static = eqx.partition(
        make_model(key=jax.random.key(0)), eqx.is_inexact_array
    )

    @partial(jax.jit, static_argnames="first")
    def loss(params, first=False):
        return maml.loss_fn(
            eqx.combine(params, static), batch, None, **RULE, first=first
        )

    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    way = jax.tree.unflatten(tree, [random.normal(size=x.shape) for x in leaves])

    def along(gradient):
        return float(
            sum(
                jnp.vdot(g, d)
                for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(way))
            )
        )

    high, low = (
        loss(jax.tree.map(lambda p, d, e=e: p + e * d, params, way))
        for e in (1e-5, -1e-5)
    )
    slope = float(high - low) / 2e-5
    assert along(jax.jit(jax.grad(loss))(params)) == pytest.approx(slope, rel=1e-6)
    first = along(jax.jit(jax.grad(partial(loss, first=True)))(params))
    assert abs(first - slope) > 1e-3 * abs(slope)

    def at_adapted(x, y):
        """First order, as Finn et al. have it: the second half's gradient at the
        adapted parameters."""

        def error(params, i):
            return jnp.mean((eqx.combine(params, static)(x[i]) - y[i]) ** 2)

        own = params
        for _ in range(RULE["num_steps"]):
            own = jax.tree.map(
                lambda p, g: p - RULE["rate"] * g, own, jax.grad(error)(own, 0)
            )
        return jax.grad(error)(own, 1)

    gradients = jax.jit(jax.vmap(at_adapted))(batch["x"], batch["y"])
    assert first == pytest.approx(
        along(jax.tree.map(lambda g: g.mean(axis=0), gradients)), rel=1e-9
    )


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_the_halves_of_a_task_have_the_same_classes_and_no_image_in_common(named):
    kinds = [
        np.full((4, 2, 2, 1), 10 * i) + np.arange(4).reshape(4, 1, 1, 1)
        for i in range(6)
    ]
    draw = {
        "draw": maml.few_images,
        "seed": 1,
        "kinds": kinds,
        "args": types.SimpleNamespace(ways=3, shots=2),
        "named": named,
    }
    batch = maml.collate_fn(list(range(20)), **draw)
    assert batch["x"].shape == (20, 2, 6, 2, 2, 1)
    for images, y in zip(batch["x"], batch["y"]):
        x = np.rint((images[..., 0, 0, 0] + 1) * 128).astype(int)
        np.testing.assert_array_equal(y[0], y[1])
        np.testing.assert_array_equal(x[0] // 10, x[1] // 10)
        assert len(set(x.ravel().tolist())) == 12
        names = np.unique(x // 10) if named else np.arange(3)
        np.testing.assert_array_equal(np.unique(y), names)


def test_the_same_number_is_the_same_task():
    one, other = (
        maml.collate_fn(numbers, draw=maml.sinusoid, seed=0)
        for numbers in ([3, 4], [4, 5])
    )
    np.testing.assert_array_equal(one["x"][1], other["x"][0])
    assert not np.array_equal(one["x"][0], one["x"][1])


def test_both_data_sets_are_read(tmp_path):
    """A few classes in the form of each."""
    random = np.random.default_rng(0)

    def write(file, shape):
        file.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(random.integers(0, 256, shape).astype(np.uint8))
        (image.convert("1") if len(shape) == 2 else image).save(file)

    for part, num in {"images_background": 3, "images_evaluation": 2}.items():
        for i in range(2 * num):
            for j in range(4):
                write(
                    tmp_path
                    / f"omniglot/{part}/A{i // 2}/character0{i % 2}/{i}_{j}.png",
                    (105, 105),
                )
    for part in ("train", "val", "test"):
        for i in range(3):
            for j in range(4):
                write(tmp_path / f"mini/{part}/n{part}{i}/{j}.jpg", (90, 100, 3))
    train, test = maml.read(
        types.SimpleNamespace(data=tmp_path / "omniglot", ways=2, shots=1)
    )
    assert (len(train), len(test)) == (24, 16), "quarter turns are kinds of their own"
    assert {kind.shape for kind in train + test} == {(4, 28, 28, 1)}
    np.testing.assert_array_equal(train[1], np.rot90(train[0], 1, (1, 2)))
    train, test = maml.read(
        types.SimpleNamespace(data=tmp_path / "mini", ways=2, shots=1)
    )
    assert (len(train), len(test)) == (3, 3)
    assert {kind.shape for kind in train + test} == {(4, 84, 84, 3)}


@pytest.mark.long
def test_meta_learning_adapts_better_than_what_was_only_trained():
    results = maml.main(["--quick"])
    assert results.keys() == {
        "sinusoids",
        "sinusoids, first order",
        "images",
        "images, first order",
    }
    for name, (errors, baseline) in results.items():
        assert len(errors) == len(baseline) == 6
        assert errors[5] < errors[0], name
        if name != "images, first order":  # which learns slowly
            assert errors[5] < baseline[5], name
