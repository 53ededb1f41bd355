"""The meta-gradient is the true one on every mesh, first order drops what it should, and MAML adapts faster."""

import pytest

pytest.importorskip("sklearn", exc_type=ImportError)
pytest.importorskip("PIL", exc_type=ImportError)

import functools

import common
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from meta_learning import main as maml
from PIL import Image

import redco_eqx as rx

RULE = {"num_steps": 2, "rate": 0.1}


@pytest.fixture
def double():
    """Computes in float64, where a tolerance tells rounding from anything else."""
    with jax.enable_x64(True):
        yield


def classes(side=12, num=6):
    return list(np.random.default_rng(0).integers(0, 256, (num, 4, 1, side, side)))


def batch_of(kind):
    images = functools.partial(maml.image_tasks, ways=2, shots=1)
    tasks = maml.sinusoids(0, 8) if kind == "sinusoids" else images(0, 8, classes=classes())
    wide = {"x": np.float64, "y": np.float64 if kind == "sinusoids" else np.int32}
    return {name: x.astype(wide[name]) for name, x in maml.collate_fn(tasks).items()}


def make_of(batch, outputs):
    return functools.partial(maml.make_model, shape=batch["x"].shape[2:], num_outputs=outputs, width=8)


def after_a_step(axes, kind):
    """What one meta-step by SGD adds to the parameters."""
    mesh, batch, optimizer = rx.make_mesh(**axes), batch_of(kind), optax.sgd(1.0)
    model = rx.init_model(make_of(batch, 1 if kind == "sinusoids" else 2), mesh, key=jax.random.key(0))
    shardings = rx.shard_rules(model, mesh)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    num_steps = 2 if kind == "sinusoids" else 1  # convolutions compile long
    loss_fn = functools.partial(maml.loss_fn, num_steps=num_steps, rate=0.1)
    batch = jax.device_put(batch, rx.batch_sharding(mesh))
    step = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings)
    after, _ = jax.jit(step)(state, batch)
    return {path: np.asarray(x) - np.asarray(state.params[path]) for path, x in after.params.items()}


@pytest.mark.parametrize("kind", ["sinusoids", "images"])
def test_a_meta_step_is_the_same_on_every_mesh(kind, double):
    expected = after_a_step({"data": 1}, kind)
    for path, change in after_a_step({"tensor": 2, "fsdp": 2}, kind).items():
        assert change.dtype == np.float64
        np.testing.assert_allclose(change, expected[path], rtol=1e-8, atol=1e-12, err_msg=path)


def test_the_second_order_is_that_of_a_finite_difference_and_the_first_leaves_it_out(double):
    batch = batch_of("sinusoids")
    params, static = eqx.partition(make_of(batch, 1)(jax.random.key(0)), eqx.is_inexact_array)

    @functools.partial(jax.jit, static_argnames="first_order")
    def loss(params, first_order=False):
        model = eqx.combine(params, static)
        return maml.loss_fn(model, batch, None, **RULE, first_order=first_order)

    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    way = jax.tree.unflatten(tree, [random.normal(size=x.shape) for x in leaves])

    def along(gradient):
        return float(sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(way))))

    high, low = (loss(jax.tree.map(lambda p, d, e=e: p + e * d, params, way)) for e in (1e-5, -1e-5))
    slope = float(high - low) / 2e-5
    assert along(jax.grad(loss)(params)) == pytest.approx(slope, rel=1e-6)
    first = along(jax.grad(functools.partial(loss, first_order=True))(params))
    assert abs(first - slope) > 1e-3 * abs(slope)

    def at_adapted(x, y):
        """The gradient of the queries' error at the adapted parameters: the first order of Finn et al."""
        own = params
        for _ in range(RULE["num_steps"]):
            error = lambda p: maml.loss_of(eqx.combine(p, static)(x[:10]), y[:10])  # noqa: E731
            own = jax.tree.map(lambda p, g: p - RULE["rate"] * g, own, jax.grad(error)(own))
        return jax.grad(lambda p: maml.loss_of(eqx.combine(p, static)(x[10:]), y[10:]))(own)

    gradients = jax.jit(jax.vmap(at_adapted))(batch["x"], batch["y"])
    assert first == pytest.approx(along(jax.tree.map(lambda g: g.mean(axis=0), gradients)), rel=1e-9)


def test_the_halves_of_a_task_have_the_same_classes_and_no_image_in_common():
    kinds = [np.full((4, 1, 2, 2), 10 * i) + np.arange(4).reshape(4, 1, 1, 1) for i in range(6)]
    for named in (False, True):
        for task in maml.image_tasks(1, 20, classes=kinds, ways=3, shots=2, named=named):
            assert task["x"].shape == (12, 1, 2, 2)
            x, y = np.rint((task["x"][:, 0, 0, 0] + 1) * 128).astype(int), task["y"]
            np.testing.assert_array_equal(y[:6], y[6:])
            np.testing.assert_array_equal(x[:6] // 10, x[6:] // 10)
            assert len(set(x.tolist())) == 12
            np.testing.assert_array_equal(np.unique(y), np.unique(x // 10) if named else np.arange(3))


def test_meta_learning_adapts_better_than_what_was_only_trained(monkeypatch):
    monkeypatch.setattr(maml, "RATES", (0.01,))
    results = maml.main(["--quick"])
    assert results.keys() == {"sinusoids", "sinusoids, first order", "images", "images, first order"}
    for name, (errors, baseline) in results.items():
        assert len(errors) == len(baseline) == 6
        assert errors[5] < errors[0], name
        if name != "images, first order":  # which learns slowly
            assert errors[5] < baseline[5], name


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A few classes in the form of each data set."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

    def write(file, shape):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(file)

    for part, num in {"images_background": 3, "images_evaluation": 2}.items():
        for i in range(2 * num):
            for j in range(4):
                write(root / f"omniglot/{part}/A{i // 2}/character0{i % 2}/{i}_{j}.png", (105, 105))
    for part in ("train", "val", "test"):
        for i in range(3):
            for j in range(4):
                write(root / f"mini/{part}/n{part}{i}/{j}.jpg", (90, 100, 3))
    return root


def test_both_data_sets_are_read(directories):
    train, test = maml.read(str(directories / "omniglot"))
    assert (len(train), len(test)) == (24, 16), "quarter turns are classes"
    assert {kind.shape for kind in train + test} == {(4, 1, 28, 28)}
    np.testing.assert_array_equal(train[1], np.rot90(train[0], 1, (2, 3)))
    train, test = maml.read(str(directories / "mini"))
    assert (len(train), len(test)) == (3, 3)
    assert {kind.shape for kind in train + test} == {(4, 3, 84, 84)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--data", "/nowhere"], "/nowhere: there must be"), (["--tensor", "3"], "fsdp * tensor = 3 must divide")],
)
def test_bad_input_ends_with_one_line(flags, words):
    with pytest.raises(SystemExit) as caught:
        common.run(lambda: maml.main(flags))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
