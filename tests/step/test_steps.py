"""`train_step`, `eval_step`, `predict_step`: against loops written by hand, and under plain transformations."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from einops import rearrange
from helpers import cross_entropy, mlp_batch, squared_error, token_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import (
    Mean,
    batch_sharding,
    cast,
    eval_step,
    init_state,
    make_mesh,
    predict_step,
    shard_rules,
    train_step,
)

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


def compiled_step(loss_fn: Any, optimizer: Any, **options: Any) -> Any:
    step = partial(train_step, loss_fn=loss_fn, optimizer=optimizer, **options)
    return jax.jit(step, compiler_options=helpers.QUICK_COMPILE)


def by_path(model: Any) -> dict[str, Any]:
    """The floating JAX arrays of a model by the path that JAX spells."""
    pairs = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_inexact_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in pairs}


def by_hand(model: Any, optimizer: Any, loss: Any, batches: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Plain optax and `eqx.partition` on one device: the model, and losses and gradients of each step."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(eqx.combine(p, static), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    losses, gradients = [], []
    for batch in batches:
        params, opt_state, value, grads = step(params, opt_state, batch)
        losses.append(value)
        gradients.append(grads)
    return eqx.combine(params, static), losses, gradients


def ratio(loss_fn: Any, name: str | None = None) -> Callable[[Any, Any], Any]:
    """The loss (or a metric) as plain division of sums."""

    def f(model: Any, batch: Any) -> Any:
        loss, metrics = loss_fn(model, batch, None)
        mean = loss if name is None else metrics[name]
        return mean.total / mean.weight

    return f


# The mesh does not matter.

SUBJECTS: dict[str, Any] = {
    "mlp": (helpers.make_mlp, mlp_batch, squared_error, "absolute"),
    "transformer": (helpers.make_transformer, token_batch, cross_entropy, "hits"),
}


@functools.cache
def reference(subject: str) -> Any:
    """Three steps of gradient descent with step size 1, in float64 on one device."""
    make, make_batch, loss_fn, metric = SUBJECTS[subject]
    with jax.enable_x64(True):
        model = make(jnp.float64)
        data = [make_batch(seed, dtype=np.float64) for seed in range(3)]
        final, losses, gradients = by_hand(model, optax.sgd(1.0), ratio(loss_fn), data)
        first = eqx.filter_jit(ratio(loss_fn, metric))(model, data[0])
        return model, data, loss_fn, metric, final, losses, gradients, first


# Tolerances. In float64 only the order of summation differs between meshes: 1e-10 is rounding, three steps on.
# In float32 the same operations in another program agree to 1e-4: XLA fuses and orders them otherwise.


@pytest.mark.parametrize(
    ("subject", "name", "num_microbatches"),
    [
        *(("mlp", name, 1) for name in helpers.MESHES),
        *(("transformer", name, 1) for name in helpers.MESHES),
        ("mlp", "data8", 2),
        ("mlp", "2x2x2", 4),
    ],
)
def test_steps_do_not_depend_on_the_mesh(subject, name, num_microbatches):
    model, data, loss_fn, metric, final, losses, gradients, first = reference(subject)
    with jax.enable_x64(True):
        mesh = helpers.mesh_of(name)
        placed, shardings = helpers.place(model, mesh)
        state = init_state(placed, optax.sgd(1.0), key=KEY)
        split = [path for path, x in state.params.items() if not x.is_fully_replicated]
        assert bool(split) == (name not in ("one", "data8"))
        before = state
        step = compiled_step(loss_fn, optax.sgd(1.0), shardings=shardings, num_microbatches=num_microbatches)
        reports = []
        with helpers.count_compilations() as compiled:
            for batch in data:
                state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
                reports.append(metrics)
        assert len(compiled) == 1
        for metrics, loss, gradient in zip(reports, losses, gradients, strict=True):
            np.testing.assert_allclose(metrics["loss"].value, loss, rtol=1e-10, atol=1e-12)
            norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
            np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(reports[0][metric].value, first, rtol=1e-10, atol=1e-12)
        helpers.assert_close(state.params, by_path(final), rtol=1e-10, atol=1e-12)
        assert state.step == 3
        helpers.assert_same_layout(state, before)


def test_without_shardings_the_values_are_the_same(mesh):
    model = helpers.make_mlp()
    data = [mlp_batch(seed) for seed in range(2)]
    state = init_state(helpers.place(model, mesh)[0], optax.sgd(1.0), key=KEY)
    step = compiled_step(squared_error, optax.sgd(1.0))
    for batch in data:
        state, _ = step(state, jax.device_put(batch, batch_sharding(mesh)))
    final, _, _ = by_hand(model, optax.sgd(1.0), ratio(squared_error), data)
    helpers.assert_close(state.params, by_path(final), rtol=1e-4, atol=1e-5)


def test_shardings_of_another_model_are_refused(mesh):
    model, _ = helpers.place(helpers.make_mlp(), mesh)
    other = shard_rules({"mlp": model}, mesh)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    for step in (
        partial(train_step, optimizer=optax.sgd(1.0), loss_fn=squared_error),
        partial(eval_step, loss_fn=squared_error),
        partial(predict_step, predict_fn=lambda model, batch, key: batch),
    ):
        with pytest.raises(ValueError, match=r"shardings has no NamedSharding for layers\.0\.weight"):
            step(state, mlp_batch(0), shardings=other)


# Microbatches.


def linear_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Mean]]:
    """Linear in `w`, so that every sum can be written down."""
    weight = batch["weight"]
    total = jnp.sum(weight * (batch["x"] @ model["w"]))
    return Mean(total, jnp.sum(weight)), {"x": Mean(jnp.sum(batch["x"][:, 0]), weight.shape[0])}


WEIGHTS = {
    "unequal": np.array([1, 5, 0, 2, 7, 1, 1, 3.0]),
    "every second is zero": np.array([0, 2, 0, 1, 0, 3, 0, 1.0]),
    "every fourth is zero": np.array([0, 2, 3, 1, 0, 1, 2, 1.0]),
    "the first half is zero": np.array([0, 0, 0, 0, 1, 2, 3, 4.0]),
    "all but one are zero": np.array([0, 0, 0, 0, 0, 3, 0, 0.0]),
    "all are zero": np.zeros(8),
}


@functools.cache
def linear_step(num_microbatches: int) -> Any:
    return compiled_step(linear_loss, optax.sgd(1.0), num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_accumulated_equals_whole(weights, num_microbatches):
    weight = WEIGHTS[weights].astype(np.float32)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    w = np.array([1.0, -2.0, 0.5], np.float32)
    scale = 1 / weight.sum() if weight.sum() else 0.0
    state = init_state({"w": jnp.asarray(w)}, optax.sgd(1.0), key=KEY)
    state, metrics = linear_step(num_microbatches)(state, {"x": x, "weight": weight})
    gradient = scale * (weight @ x)
    # One sum of 8 products in float32.
    np.testing.assert_allclose(state.params["w"], w - gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, gradient @ w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"].value, np.linalg.norm(gradient), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["x"].value, x[:, 0].mean(), rtol=1e-5, atol=1e-6)
    assert metrics["loss"].weight == weight.sum()
    assert metrics["x"].weight == 8


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_batch_without_weight_changes_nothing(num_microbatches):
    model = helpers.make_mlp()
    state = init_state(model, optax.sgd(1.0), key=KEY)
    batch = {**mlp_batch(0), "weight": np.zeros(16, np.float32)}
    step = compiled_step(squared_error, optax.sgd(1.0), num_microbatches=num_microbatches)
    new, metrics = step(state, batch)
    helpers.assert_identical(new.params, state.params)
    for name in ("loss", "grad_norm", "absolute"):
        assert metrics[name].value == 0, name


def test_a_bare_scalar_counts_once_per_microbatch():
    """The mean of the maxima, not the maximum: what a loss that is no mean can be over parts."""
    x = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], np.float32)

    def loss_fn(model, batch, key):
        return model["w"] * jnp.max(batch["x"]), {"sum": jnp.sum(batch["x"])}

    for num_microbatches in (1, 2, 4):
        state = init_state({"w": jnp.array(2.0)}, optax.sgd(1.0), key=KEY)
        step = compiled_step(loss_fn, optax.sgd(1.0), num_microbatches=num_microbatches)
        state, metrics = step(state, {"x": x})
        parts = x.reshape(-1, num_microbatches)  # example i in microbatch i % number
        expected = parts.max(axis=0).mean()
        np.testing.assert_allclose(metrics["loss"].value, 2 * expected, rtol=1e-6)
        np.testing.assert_allclose(state.params["w"], 2 - expected, rtol=1e-6)
        np.testing.assert_allclose(metrics["sum"].value, x.sum() / num_microbatches, rtol=1e-6)
        assert metrics["loss"].weight == num_microbatches


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    # 512 gradients of 1 each: a bfloat16 sum would stop at 256.
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"].astype(jnp.float32) * batch)

    state = init_state({"w": jnp.zeros((), jnp.bfloat16)}, optax.sgd(1.0), key=KEY)
    state, metrics = train_step(
        state, np.ones(512, np.float32), loss_fn=loss_fn, optimizer=optax.sgd(1.0), num_microbatches=512
    )
    assert metrics["grad_norm"].value == 1
    w: Any = state.params["w"]
    assert w.dtype == jnp.bfloat16
    assert w == -1


def test_each_microbatch_has_a_key_of_its_own():
    def loss_fn(model, batch, key):
        u = jax.random.uniform(key)
        return model["w"] * u, {"square": u**2}

    state = init_state({"w": jnp.array(0.0)}, optax.sgd(1.0), key=KEY)
    step = compiled_step(loss_fn, optax.sgd(1.0), num_microbatches=8)
    new, metrics = step(state, np.ones(8))
    mean, square = float(metrics["grad_norm"].value), float(metrics["square"].value)
    assert square - mean**2 > 0.01  # a spread: uniform numbers have 1/12
    np.testing.assert_allclose(new.params["w"], -mean, rtol=1e-6)
    # And another step draws others.
    _, later = step(new, np.ones(8))
    assert later["grad_norm"].value != mean


def row_major(batch: Any, number: int) -> Any:
    return jax.tree.map(lambda x: rearrange(x, "(k b) ... -> k b ...", k=number), batch)


def test_microbatches_cost_no_more_arithmetic():
    """On data=8, each device works on a part of each microbatch."""
    mesh = make_mesh()
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    batch = jax.device_put(mlp_batch(0, size=1024), batch_sharding(mesh))

    def flops(f, state):
        cost: Any = jax.jit(f).lower(state, batch).compile().cost_analysis()
        return cost["flops"]

    def of(num_microbatches):
        state = init_state(model, optax.sgd(1.0), key=KEY)
        step = partial(
            train_step,
            loss_fn=squared_error,
            optimizer=optax.sgd(1.0),
            shardings=shardings,
            num_microbatches=num_microbatches,
        )
        return flops(step, state)

    def neighbours(state, batch):
        # The wrong way: each microbatch lies on two of the eight devices.
        def body(total, part):
            params = jax.grad(lambda p: squared_error(state.build(p, {}), part, None)[0].value)(state.params)
            return jax.tree.map(jnp.add, total, params), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state.params), row_major(batch, 4))[0]

    whole, accumulated = of(1), of(4)
    # The cost of a loop is that of one round. What each round adds to the accumulator, and the update of the
    # parameters, count 4 times here: about 4 operations per parameter against 6 for each of 128 examples.
    assert accumulated * 4 == pytest.approx(whole, rel=0.08)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    assert flops(neighbours, state) * 4 > 1.5 * whole


@pytest.mark.parametrize("number", [0, -1, 3, 16])
def test_a_number_of_microbatches_that_does_not_divide_is_refused(number):
    state = init_state({"w": jnp.ones(3)}, optax.sgd(1.0), key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=f"num_microbatches={number}"):
        train_step(state, batch, loss_fn=linear_loss, optimizer=optax.sgd(1.0), num_microbatches=number)


def test_microbatches_must_divide_over_the_devices():
    mesh = make_mesh()
    model, shardings = helpers.place({"w": jnp.ones(3)}, mesh)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match="weight has 8 rows, which do not divide into 2 microbatches on 8"):
        train_step(
            state,
            batch,
            loss_fn=linear_loss,
            optimizer=optax.sgd(1.0),
            num_microbatches=2,
            shardings=shardings,
        )


# Plain transformations, with no filter of Equinox.


class Odd(eqx.Module):
    """Holds a lambda, a partial and tied weights."""

    shared: Any
    activation: Callable[[Any], Any]
    gate: Callable[[Any], Any]
    count: Any

    def __init__(self, kind: str, seed: int):
        keys = jax.random.split(jax.random.key(seed))
        embedding = eqx.nn.Embedding(5, 4, key=keys[0])
        head = eqx.nn.Linear(4, 5, key=keys[1])
        if kind == "shared":
            pair = (embedding, head)
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
        else:
            self.shared = Call((embedding, head))
        self.activation = lambda x: x + x**2
        self.gate = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
        self.count = jnp.arange(2)

    def __call__(self, token: Any) -> Any:
        embedding, head = self.shared()
        return head(self.gate(self.activation(embedding(token))))


class Call(eqx.Module):
    pair: Any

    def __call__(self) -> Any:
        return self.pair


def odd_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Any]]:
    logits = jax.vmap(model)(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    noise = jax.random.normal(key)
    return Mean(jnp.sum(loss) + 0.1 * noise, len(loss)), {"noise": noise}


def odd_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 5, 8).astype(np.int32) for name in ("tokens", "labels")}


ADAM = optax.adam(0.1)
ODD_STEP = partial(train_step, loss_fn=odd_loss, optimizer=ADAM)
ODD_BATCHES = [odd_batch(seed) for seed in range(3)]


def odd_state(seed: int = 0, kind: str = "plain") -> Any:
    return init_state(Odd(kind, seed), ADAM, key=jax.random.key(seed))


@pytest.fixture(scope="module")
def looped():
    """Three steps of the compiled step, from seed 0, with the metrics of each."""
    step, state, metrics = jax.jit(ODD_STEP), odd_state(), []
    for batch in ODD_BATCHES:
        state, report = step(state, batch)
        metrics.append(report)
    return state, metrics


def test_jit_with_donation(looped):
    step, states = jax.jit(ODD_STEP, donate_argnums=0), [odd_state()]
    for batch in ODD_BATCHES:
        states.append(step(states[-1], batch)[0])
    *previous, state = states
    assert all(x.is_deleted() for x in jax.tree.leaves([s.params for s in previous]))
    helpers.assert_close(state, looped[0], rtol=1e-6)


def test_scan_equals_a_loop(looped):
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *ODD_BATCHES)
    state, metrics = jax.lax.scan(ODD_STEP, odd_state(), stacked)
    helpers.assert_close(state, looped[0], rtol=1e-4, atol=1e-5)
    helpers.assert_close(metrics, jax.tree.map(lambda *xs: jnp.stack(xs), *looped[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_vmap_over_an_ensemble_equals_each_alone(kind):
    """States that are built apart, each with its own lambda and partial, and stacked."""
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(odd_state(seed, kind) for seed in range(3)))
    batches = jax.tree.map(lambda *xs: np.stack(xs), *ODD_BATCHES)
    together = jax.jit(jax.vmap(ODD_STEP))
    alone = jax.jit(ODD_STEP)
    ensemble, metrics = together(*together(stacked, batches)[:1], batches)
    for seed in range(3):
        state, _ = alone(odd_state(seed, kind), ODD_BATCHES[seed])
        state, report = alone(state, ODD_BATCHES[seed])
        helpers.assert_close(jax.tree.map(lambda x, seed=seed: x[seed], ensemble), state, rtol=1e-4, atol=1e-5)
        helpers.assert_close(jax.tree.map(lambda x, seed=seed: x[seed], metrics), report, rtol=1e-4, atol=1e-5)


def test_vmap_with_shardings_equals_each_alone(mesh):
    """An ensemble on the mesh, each member split."""
    optimizer = optax.sgd(0.1)
    models = [helpers.place(helpers.make_mlp(seed=seed), mesh) for seed in range(2)]
    shardings = models[0][1]
    states = [init_state(model, optimizer, key=KEY) for model, _ in models]
    step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
    batch = jax.device_put(mlp_batch(0), batch_sharding(mesh))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    ensemble, _ = jax.jit(jax.vmap(step, in_axes=(0, None)))(stacked, batch)
    alone = jax.jit(step)
    for i, state in enumerate(states):
        helpers.assert_close(
            jax.tree.map(lambda x, i=i: x[i], ensemble.params),
            alone(state, batch)[0].params,
            rtol=1e-4,
            atol=1e-5,
        )
    assert not ensemble.params["layers.0.weight"].is_fully_replicated


def test_scan_with_shardings_keeps_the_layout(mesh):
    optimizer = optax.sgd(0.1)
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    state = init_state(model, optimizer, key=KEY)
    step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *(mlp_batch(seed) for seed in range(3)))
    final, _ = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(state, stacked)
    helpers.assert_same_layout(final.params, state.params)
    expected, _, _ = by_hand(
        helpers.make_mlp(), optimizer, ratio(squared_error), [mlp_batch(seed) for seed in range(3)]
    )
    helpers.assert_close(final.params, by_path(expected), rtol=1e-4, atol=1e-5)


def test_the_state_comes_out_as_it_went_in():
    """A fixed point of shape, dtype and weak type: what scan needs, and a step that compiles once."""
    state = odd_state()
    new, metrics = jax.eval_shape(ODD_STEP, state, ODD_BATCHES[0])
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, jax.typeof(y).weak_type)
    assert sorted(metrics) == ["grad_norm", "loss", "noise"]
    for x in jax.tree.leaves(metrics):
        assert (x.shape, x.dtype) == ((), jnp.float32)


def quadratic_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch @ model["w"]) ** 2) + 0.1 * jnp.sum(model["w"] ** 4)


def central(f: Callable[[Any], Any], x: float, step: float = 1e-5) -> float:
    return float(f(x + step) - f(x - step)) / (2 * step)


@pytest.mark.parametrize("how", ["closed over", "in the optimizer state"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradient_through_steps_by_the_learning_rate(how, num_microbatches):
    with jax.enable_x64(True):
        batch = np.random.default_rng(0).normal(size=(4, 3))
        w = {"w": jnp.array([0.3, -0.7, 1.1])}

        def after(rate):
            # eps_root: without it the derivative of a square root at 0 is infinite.
            make = partial(optax.adam, eps_root=1e-8)
            if how == "closed over":
                optimizer = make(rate)
                state = init_state(w, optimizer, key=KEY)
            else:
                optimizer = optax.inject_hyperparams(make)(0.1)
                state = init_state(w, optimizer, key=KEY)
                hyperparams = {**state.opt_state.hyperparams, "learning_rate": jnp.asarray(rate)}
                state = dataclasses.replace(state, opt_state=state.opt_state._replace(hyperparams=hyperparams))
            for _ in range(3):
                state, _ = train_step(
                    state,
                    batch,
                    loss_fn=quadratic_loss,
                    optimizer=optimizer,
                    num_microbatches=num_microbatches,
                )
            return eval_step(state, batch, loss_fn=quadratic_loss)["loss"].value

        compiled = jax.jit(after)
        gradient = jax.jit(jax.grad(after))(0.05)
        assert abs(gradient) > 1e-3
        # Central differences in float64: an error of step^2.
        np.testing.assert_allclose(gradient, central(compiled, 0.05), rtol=1e-6)


def test_gradient_through_steps_by_the_parameters(mesh):
    with jax.enable_x64(True):
        optimizer = optax.sgd(0.5, momentum=0.9)
        model, shardings = helpers.place(helpers.make_mlp(jnp.float64), mesh)
        state = init_state(model, optimizer, key=KEY)
        data = [jax.device_put(mlp_batch(seed, dtype=np.float64), batch_sharding(mesh)) for seed in range(2)]

        def after(params):
            now = dataclasses.replace(state, params=params)
            step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
            now, _ = step(now, data[0])
            return step(now, data[1])[1]["loss"].value

        keys = jax.random.split(KEY, len(state.params))
        direction = {
            path: jax.random.normal(k, x.shape, x.dtype) for k, (path, x) in zip(keys, state.params.items())
        }

        @jax.jit
        def along(distance):
            return after({path: x + distance * direction[path] for path, x in state.params.items()})

        gradient = jax.jit(jax.grad(after))(state.params)
        slope = sum(jnp.vdot(gradient[path], direction[path]) for path in direction)
        assert abs(slope) > 1e-3
        np.testing.assert_allclose(slope, central(along, 0.0, 1e-6), rtol=1e-5)


# Compiles once.


def test_a_weakly_typed_parameter_compiles_one_step():
    state = init_state({"temperature": jnp.asarray(0.5)}, ADAM, key=jax.random.key(1))
    step = jax.jit(
        partial(train_step, loss_fn=lambda m, b, k: (m["temperature"] * jnp.mean(b) - 1) ** 2, optimizer=ADAM),
        donate_argnums=0,
    )
    with helpers.count_compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, np.ones(4, np.float32))
    assert len(compiled) == 1


# Means.

NUMBERS = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 100)), min_size=1, max_size=5))
def test_means_add_up_to_the_mean_of_all(pairs):
    total = sum((Mean(np.float32(x * n), np.float32(n)) for x, n in pairs), Mean(0.0, 0.0))
    count = sum(n for _, n in pairs)
    expected = sum(x * n for x, n in pairs) / count if count else 0.0
    # Up to 5 roundings of sums up to 5e4 in float32.
    np.testing.assert_allclose(float(total), expected, rtol=1e-5, atol=1e-6 * 5e4 / max(count, 1))


def test_a_mean_over_nothing_is_zero():
    assert float(Mean(jnp.float32(0), jnp.float32(0))) == 0
    gradient = jax.grad(lambda x: Mean(x, jnp.float32(0)).value)(1.0)
    assert gradient == 0


def test_a_mean_is_a_tree():
    doubled = jax.tree.map(lambda x: 2 * x, Mean(1.0, 2.0))
    assert doubled == Mean(2.0, 4.0)
    assert jax.jit(lambda m: m + m)(Mean(1.0, 2.0)) == Mean(2.0, 4.0)


def test_gradients_do_not_flow_through_the_weight():
    x = np.array([1.0, 2.0], np.float32)

    def loss_fn(model, batch, key):
        return Mean(jnp.sum(model["w"] * batch), jnp.sum(model["w"] ** 2))

    w = np.array([2.0, 1.0], np.float32)
    state = init_state({"w": jnp.asarray(w)}, optax.sgd(1.0), key=KEY)
    state, metrics = train_step(state, x, loss_fn=loss_fn, optimizer=optax.sgd(1.0))
    np.testing.assert_allclose(state.params["w"], w - x / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, 4 / 5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_metrics_come_in_float32(dtype):
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"]), {"m": Mean(jnp.ones((), dtype), jnp.ones((), dtype)), "s": 3}

    state = init_state({"w": jnp.ones(2)}, optax.sgd(1.0), key=KEY)
    for metrics in (
        train_step(state, np.ones(4), loss_fn=loss_fn, optimizer=optax.sgd(1.0))[1],
        eval_step(state, np.ones(4), loss_fn=loss_fn),
    ):
        assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
        assert metrics["m"].value == 1
        assert metrics["s"].value == 3


# What a loss may return.


def run_loss(loss_fn: Any, model: Any = None) -> Any:
    state = init_state({"w": jnp.ones(2)} if model is None else model, optax.sgd(1.0), key=KEY)
    batch = np.ones((4, 2), np.float32)
    train_step(state, batch, loss_fn=loss_fn, optimizer=optax.sgd(1.0))


ONE = jnp.ones(())
BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "a vector": (lambda m, b, k: b @ m["w"], r"the loss must be a scalar .* shape \(4,\)"),
    "a vector with Mean": (lambda m, b, k: Mean(b @ m["w"], ONE), r"its total has shape \(4,\)"),
    "a vector of weights": (lambda m, b, k: Mean(ONE, jnp.ones(4)), r"its weight has shape \(4,\)"),
    "a vector metric": (lambda m, b, k: (ONE, {"hits": b}), r"the metric 'hits' .* shape \(4, 2\)"),
    "complex": (lambda m, b, k: (ONE, {"z": ONE + 1j}), r"the metric 'z' must be a real number"),
    "three values": (lambda m, b, k: (ONE, {}, None), r"must return a loss, or .* a tuple of 3"),
    "no values": (lambda m, b, k: (), "a tuple of 0"),
    "metrics that are no dict": (lambda m, b, k: (ONE, [ONE]), "a dict of names, not list"),
    "the name loss": (lambda m, b, k: (ONE, {"loss": ONE}), "'loss' is reserved"),
    "the name grad_norm": (lambda m, b, k: (ONE, {"grad_norm": ONE}), "'grad_norm' is reserved"),
    "the name learning_rate": (lambda m, b, k: (ONE, {"learning_rate": ONE}), "'learning_rate' is reserved"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_a_bad_loss_is_refused(case):
    loss_fn, message = BAD_LOSSES[case]
    with pytest.raises(ValueError, match=message):
        run_loss(loss_fn)
    state = init_state({"w": jnp.ones(2)}, key=KEY)
    with pytest.raises(ValueError, match=message):
        eval_step(state, np.ones((4, 2), np.float32), loss_fn=loss_fn)


# Metrics of a step.


def test_the_learning_rate_is_reported_where_it_can_be_seen():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    for optimizer, visible in (
        (optax.inject_hyperparams(optax.adam)(schedule), True),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(schedule)), True),
        (optax.adam(schedule), False),
    ):
        state = init_state({"w": jnp.ones(2)}, optimizer, key=KEY)
        step = compiled_step(lambda m, b, k: jnp.sum(m["w"]), optimizer)
        for i in range(3):
            state, metrics = step(state, np.ones(4))
            assert ("learning_rate" in metrics) == visible
            if visible:
                np.testing.assert_allclose(metrics["learning_rate"].value, schedule(i), rtol=1e-6)


def test_the_optimizer_is_given_the_loss():
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: jnp.full_like(g, value), updates), state

    given: Any = update
    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), given)
    state = init_state({"w": jnp.ones(2)}, optimizer, key=KEY)
    for num_microbatches in (1, 2):
        new, metrics = train_step(
            state,
            np.arange(4.0, dtype=np.float32),
            loss_fn=lambda m, b, k: jnp.sum(m["w"]) * jnp.mean(b),
            optimizer=optimizer,
            num_microbatches=num_microbatches,
        )
        assert metrics["loss"].value == 3
        np.testing.assert_allclose(new.params["w"], 1 + 3, rtol=1e-6)


# Randomness and inference mode.


class Noisy(eqx.Module):
    w: Any
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.w = jnp.ones(())
        self.dropout = eqx.nn.Dropout(0.5)


def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
    kept = jnp.mean(model.w * model.dropout(batch, key=key))
    return kept, {"noise": jax.random.uniform(key)}


ZERO_RATE = optax.sgd(0.0)
ONES = np.ones(64, np.float32)


NOISY_STEP = compiled_step(noisy_loss, ZERO_RATE)
NOISY_EVAL = jax.jit(partial(eval_step, loss_fn=noisy_loss))
NOISY_PREDICT = jax.jit(partial(predict_step, predict_fn=lambda m, b, k: b * jax.random.uniform(k)))


def noises(key: Any) -> dict[str, list[float]]:
    """What each of the three steps draws, at four steps of a run that changes no parameter."""
    state = init_state(Noisy(), ZERO_RATE, key=key)
    drawn: dict[str, list[float]] = {"train": [], "eval": [], "predict": []}
    for _ in range(4):
        drawn["eval"].append(float(NOISY_EVAL(state, ONES)["noise"].value))
        drawn["predict"].append(float(NOISY_PREDICT(state, ONES)[0]))
        state, metrics = NOISY_STEP(state, ONES)
        drawn["train"].append(float(metrics["noise"].value))
    return drawn


def test_streams_of_randomness_are_apart_and_reproducible():
    drawn, again, other = noises(KEY), noises(jax.random.key(0)), noises(jax.random.key(1))
    numbers = [x for stream in drawn.values() for x in stream]
    assert len(set(numbers)) == 12
    assert drawn == again
    assert not set(numbers) & {x for stream in other.values() for x in stream}


def test_the_key_of_a_state_is_never_consumed():
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    new, _ = NOISY_STEP(state, ONES)
    helpers.assert_identical(new.key, state.key)
    assert new.step == state.step + 1


def test_dropout_is_on_in_training_only():
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    assert NOISY_STEP(state, ONES)[1]["loss"].value != 1
    assert NOISY_EVAL(state, ONES)["loss"].value == 1
    outputs = predict_step(state, ONES, predict_fn=lambda m, b, k: m.dropout(m.w * b, key=k))
    np.testing.assert_array_equal(outputs, ONES)
    # The state itself stays in training mode.
    assert state.model.dropout.inference is False


# Evaluation and prediction.


def test_evaluation_weighs_a_scalar_by_its_examples(mesh):
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)

    def loss_fn(model, batch, key):
        return jnp.mean(batch @ model["w"]), {"first": jnp.mean(batch[:, 0])}

    parts = [eval_step(state, part, loss_fn=loss_fn) for part in (x[:4], x[4:])]
    assert [part["loss"].weight for part in parts] == [4, 2]
    for name, expected in (("loss", x.sum(axis=1).mean()), ("first", x[:, 0].mean())):
        np.testing.assert_allclose((parts[0][name] + parts[1][name]).value, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["one", "2x2x2"])
def test_evaluation_and_prediction_on_a_mesh(name):
    mesh = helpers.mesh_of(name)
    model = helpers.make_mlp()
    placed, shardings = helpers.place(model, mesh)
    state = init_state(placed, key=KEY)
    host_batch = mlp_batch(0)
    batch = jax.device_put(host_batch, batch_sharding(mesh))
    metrics = jax.jit(partial(eval_step, loss_fn=squared_error, shardings=shardings))(state, batch)
    assert sorted(metrics) == ["absolute", "loss"]
    for key, metric in (("loss", None), ("absolute", "absolute")):
        expected = ratio(squared_error, metric)(model, host_batch)
        np.testing.assert_allclose(metrics[key].value, expected, rtol=1e-5)

    def predict_fn(model, batch, key):
        return {"out": jax.vmap(model)(batch["x"]), "index": jnp.argmax(batch["x"], axis=1)}

    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn, shardings=shardings))(state, batch)
    np.testing.assert_allclose(
        outputs["out"], jax.vmap(model)(jnp.asarray(host_batch["x"])), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(outputs["index"], host_batch["x"].argmax(axis=1))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda b: {"rows": b, "sum": jnp.sum(b)}, r"output sum has shape \(\)"),
        (lambda b: {"nested": [b, b[:2]]}, r"output nested\.1 has shape \(2, 3\).*the batch's, 4"),
        (lambda b: b.T, r"output array has shape \(3, 4\)"),
        (lambda b: {}, "returned no array"),
        (lambda b: None, "returned no array"),
    ],
)
def test_predictions_without_one_row_per_example_are_refused(output, message):
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    with pytest.raises(ValueError, match=message):
        predict_step(state, np.ones((4, 3)), predict_fn=lambda model, batch, key: output(jnp.asarray(batch)))


def test_bfloat16_compute_over_float32_masters():
    def loss_fn(model, batch, key):
        model, batch = cast((model, batch), jnp.bfloat16)
        out = jax.vmap(model)(batch["x"])
        assert out.dtype == jnp.bfloat16
        return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)

    state = init_state(helpers.make_mlp(), optax.sgd(0.1), key=KEY)
    new, metrics = jax.jit(partial(train_step, loss_fn=loss_fn, optimizer=optax.sgd(0.1)))(state, mlp_batch(0))
    assert {x.dtype for x in new.params.values()} == {jnp.dtype("float32")}
    x, y = (jnp.asarray(mlp_batch(0)[name]) for name in ("x", "y"))
    exact = jnp.mean((jax.vmap(helpers.make_mlp())(x) - y) ** 2)
    # bfloat16 has 8 bits.
    np.testing.assert_allclose(metrics["loss"].value, exact, rtol=2e-2)
    assert metrics["loss"].value != exact


# Models with state.


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema", momentum=0.9)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def normed_loss(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    out, model_state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        batch, model_state
    )
    return jnp.mean(jnp.sin(3 * out)), {"out": jnp.mean(out)}, model_state


def normed_data() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(1 + i + rng.normal(size=(16, 3))).astype(np.float32) for i in range(3)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", ["one", "data8"])
def test_running_statistics_equal_a_loop_by_hand(name, num_microbatches):
    mesh = helpers.mesh_of(name)
    model, model_state = eqx.nn.make_with_state(Normed)(KEY)
    placed, shardings = helpers.place(model, mesh)
    placed_state = jax.device_put(jax.tree.map(jnp.copy, model_state), NamedSharding(mesh, P()))
    state = init_state((placed, placed_state), optax.sgd(0.1), key=jax.random.key(1))
    step = jax.jit(
        partial(
            train_step,
            loss_fn=normed_loss,
            optimizer=optax.sgd(0.1),
            num_microbatches=num_microbatches,
            shardings=shardings,
        ),
        donate_argnums=0,
    )
    data = normed_data()
    metrics: Any = None
    with helpers.count_compilations() as compiled:
        for x in data:
            state, metrics = step(state, jax.device_put(x, batch_sharding(mesh)))
    # One for the step; placing NumPy arrays compiles nothing.
    assert len(compiled) == 1

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, model_state, part):
        value, _, model_state = normed_loss((eqx.combine(params, static), model_state), part, None)
        return value, model_state

    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    for x in data:
        grads = []
        for i in range(num_microbatches):
            gradient, model_state = gradient_of(params, model_state, x[i::num_microbatches])
            grads.append(gradient)
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    # Float32, three steps, through a division by a standard deviation.
    helpers.assert_close(state.params, by_path(params), rtol=1e-4, atol=1e-5)
    expected = model_state.get(static.norm.ema_state_index)
    for i, x in enumerate(expected):
        np.testing.assert_allclose(state.model_state[f"norm.ema_state_index.{i}"], x, rtol=1e-4, atol=1e-5)
    assert not state.model_state["norm.ema_first_time_index"]
    assert sorted(metrics) == ["grad_norm", "loss", "out"]


def test_evaluation_uses_the_running_statistics_and_keeps_them():
    state = init_state(eqx.nn.make_with_state(Normed)(KEY), optax.sgd(0.1), key=KEY)
    data, step = normed_data(), compiled_step(normed_loss, optax.sgd(0.1))
    for x in data:
        state, _ = step(state, x)
    mean, variance = (np.asarray(state.model_state[f"norm.ema_state_index.{i}"]) for i in range(2))
    model, _ = state.model
    hidden = np.asarray(data[0] @ model.linear.weight.T + model.linear.bias)
    expected = (hidden - mean) / np.sqrt(variance + model.norm.eps) * model.norm.weight + model.norm.bias
    metrics = jax.jit(partial(eval_step, loss_fn=normed_loss))(state, data[0])
    np.testing.assert_allclose(metrics["out"].value, expected.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"].value, np.sin(3 * expected).mean(), rtol=1e-4, atol=1e-5)

    def predict_fn(pair, batch, key):
        model, model_state = pair
        return jax.vmap(lambda x: model(x, model_state)[0], axis_name="batch")(batch)

    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn))(state, data[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda out: out[0], r"must return \(loss, metrics, new_state\)"),
        (lambda out: out[:2], r"must return \(loss, metrics, new_state\), but returned a tuple of 2"),
    ],
)
def test_a_model_with_state_must_return_the_new_one(output, message):
    state = init_state(eqx.nn.make_with_state(Normed)(KEY), optax.sgd(0.1), key=KEY)
    with pytest.raises(ValueError, match=message):
        train_step(
            state,
            normed_data()[0],
            loss_fn=lambda m, b, k: output(normed_loss(m, b, k)),
            optimizer=optax.sgd(0.1),
        )


# What the loss does not use.


def test_parameters_that_the_loss_cannot_depend_on_are_named():
    model = {
        "used": jnp.ones(2),
        "unused": jnp.ones(2),
        "stopped": jnp.ones(()),
        "times_zero": jnp.ones(()),
        "in_a_jit": jnp.ones(2),
        "only_shape": jnp.ones(3),
    }

    @jax.jit
    def inner(model, x):
        return jnp.sum(x * model["in_a_jit"]) + model["only_shape"].size

    def loss_fn(model, batch, key):
        zero = batch[0, 0] - batch[0, 0]
        return (
            jnp.mean(batch @ model["used"])
            + jax.lax.stop_gradient(model["stopped"])
            + zero * model["times_zero"]
            + inner(model, batch[0])
        )

    state = init_state(model, optax.sgd(0.1), key=KEY)
    with pytest.warns(
        UserWarning, match="does not depend on 3 trainable arrays.*: only_shape, stopped, unused"
    ):
        train_step(state, np.ones((4, 2), np.float32), loss_fn=loss_fn, optimizer=optax.sgd(0.1))


def test_every_parameter_of_a_transformer_is_used():
    state = init_state(helpers.make_transformer(), optax.sgd(0.1), key=KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = partial(train_step, loss_fn=cross_entropy, optimizer=optax.sgd(0.1))
        jax.eval_shape(step, state, token_batch(0))
