"""Few bits in a state: running statistics, the dtypes that a step returns, updates that
rounding loses."""

import dataclasses
import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from fit_helpers import fit, fit_with_history, mlp_state
from helpers import KEY, compiled_step, in_long, mesh_of

import redco_eqx as rx

BRAIN = ml_dtypes.bfloat16
ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32) + 3


# Running statistics.


class Net(eqx.Module):
    lin: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, mode: Any, key: Any):
        self.lin = eqx.nn.Linear(8, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode=mode)

    def __call__(self, x: Any, state: Any) -> Any:
        x = self.lin(x)
        # Equinox 0.13.8 takes no input of another dtype than the statistics.
        if self.norm.mode == "ema":
            x = x.astype(jnp.float32)
        return self.norm(x, state)


STILL = optax.sgd(0.0)


def normed_state(mode: str = "batch") -> Any:
    return rx.init_state(eqx.nn.make_with_state(Net)(mode, KEY), STILL, key=KEY)


def applied(pair: Any, batch: Any) -> Any:
    net, state = pair
    y, state = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        batch, state
    )
    return jnp.mean(y.astype(jnp.float32) ** 2), {}, state


def cast_loss(pair: Any, batch: Any, key: Any) -> Any:
    """As the page on bfloat16 casts, here the pair."""
    return applied(*rx.cast((pair, batch), jnp.bfloat16))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_statistics_move_as_far_in_a_cast_model_as_in_float32(mode: str) -> None:
    state = normed_state(mode=mode)
    net, _ = state.model
    hidden = jax.vmap(net.lin)(ROWS)
    # `batch` begins at (0, 1) and moves by a hundredth of what is left; `ema` begins
    # with the first batch.
    left = 0.99**300 if mode == "batch" else 0.0

    @jax.jit
    def train(state: Any) -> Any:
        step = partial(rx.train_step, loss_fn=cast_loss, optimizer=STILL)
        return jax.lax.scan(
            lambda state, _: (step(state, ROWS)[0], None), state, None, 300
        )[0]

    found = train(state).model_state
    mean, variance = (found[f"norm.{mode}_state_index.{i}"] for i in range(2))
    assert mean.dtype == variance.dtype == jnp.float32
    # Of products in bfloat16.
    np.testing.assert_allclose(mean, (1 - left) * hidden.mean(0), atol=0.03)
    np.testing.assert_allclose(variance, (1 - left) * hidden.var(0) + left, rtol=0.03)


def test_a_state_is_cast_nowhere_in_a_tree() -> None:
    net, state = eqx.nn.make_with_state(Net)("batch", KEY)
    (cast_net, cast_state), inner = rx.cast(
        ((net, state), {"inner": [state]}), jnp.bfloat16
    )
    assert cast_net.lin.weight.dtype == jnp.bfloat16
    for found in (cast_state, inner["inner"][0], rx.cast(state, jnp.bfloat16)):
        assert found is state
    shapes = eqx.filter_eval_shape(lambda: eqx.nn.make_with_state(Net)("batch", KEY))
    assert rx.cast(shapes, jnp.bfloat16)[1] is shapes[1]


# A step that changes its state


def narrow_loss(pair: Any, batch: Any, key: Any) -> Any:
    loss, metrics, state = applied(pair, batch)
    return (
        loss,
        metrics,
        jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state
        ),
    )


STEP: Any = partial(rx.train_step, optimizer=STILL)
WAYS: dict[str, Any] = {
    "train_step": lambda state, loss: STEP(state, ROWS, loss_fn=loss),
    "microbatches": lambda state, loss: STEP(
        state, ROWS, loss_fn=loss, num_microbatches=2
    ),
    "jit": lambda state, loss: jax.jit(partial(STEP, loss_fn=loss))(state, ROWS),
    "jit_step": lambda state, loss: rx.jit_step(partial(STEP, loss_fn=loss))(
        state, ROWS
    ),
    "skip_nonfinite": lambda state, loss: rx.skip_nonfinite(
        partial(STEP, loss_fn=loss)
    )(state, ROWS),
    "scan": lambda state, loss: jax.lax.scan(
        partial(STEP, loss_fn=loss), state, ROWS[None]
    ),
    "fit": lambda state, loss: fit(
        state,
        list(ROWS),
        collate_fn=np.stack,
        loss_fn=loss,
        optimizer=STILL,
        num_steps=1,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_another_dtype_are_refused_with_the_remedy(way: str) -> None:
    message = (
        r"model_state.norm.batch_state_index.0 was float32\[4\] and became "
        r"bfloat16\[4\].*not the State"
    )
    with pytest.raises(ValueError, match=message):
        WAYS[way](normed_state(), narrow_loss)


def test_a_state_of_another_structure_is_refused() -> None:
    def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
        loss, metrics, _ = applied(pair, batch)
        return (
            loss,
            metrics,
            eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")[1],
        )

    with pytest.raises(
        ValueError,
        match=r"model_state.norm.batch_counter was int32\[\] and became missing",
    ):
        STEP(normed_state(), ROWS, loss_fn=loss_fn)


def changed(state: Any, batch: Any, *, what: str) -> Any:
    """A step of one's own that returns another kind of state."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), state.params)
    more: Any = {"half": {"params": half}, "fewer": {"opt_state": ()}, "none": {}}[what]
    return dataclasses.replace(state, step=state.step + 1, **more), {
        "loss": jnp.zeros(())
    }


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("half", r"float32\[16\] and became float16\[16\]"),
        ("fewer", r"opt_state\S* was"),
    ],
)
def test_a_step_of_ones_own_that_changes_the_state_is_refused(
    what: str, message: str
) -> None:
    state = mlp_state(optax.adam(1e-3), mesh_of("one"))
    step = partial(changed, what=what)
    with pytest.raises(ValueError, match=message):
        rx.jit_step(step)(state, ROWS)
    # To make another kind of state is no step.
    assert rx.jit_step(step, donate=False)(state, ROWS)[0].step == 1
    assert rx.jit_step(partial(changed, what="none"))(state, ROWS)[0].step == 1


def test_an_optimizer_whose_state_changes_its_dtype_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)

    optimizer = optax.GradientTransformation(lambda params: params, update)
    state = rx.init_state({"w": jnp.ones(3)}, optimizer, key=KEY)
    with pytest.raises(
        ValueError, match=r"opt_state.w was float32\[3\] and became bfloat16\[3\]"
    ):
        compiled_step(lambda model, batch, key: model["w"].sum(), optimizer)(
            state, ROWS
        )


# Updates that rounding loses


def numbers(shape: Any, seed: int) -> np.ndarray:
    """Numbers of many sizes, some of them 0."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=shape)
        * 10.0 ** rng.integers(-4, 2, shape)
        * (rng.random(shape) > 0.2)
    ).astype(BRAIN)


def linear_loss(model: Any, batch: Any, key: Any) -> Any:
    """Its gradient is `batch["grad"]`, whatever the model."""
    grads = batch["grad"]
    return sum(
        jnp.sum(model[name].astype(jnp.float32) * grads[name].mean(0)) for name in grads
    )


SHAPES = {
    "matrix": (64, 128),
    "stack": (4, 8, 64),
    "vector": (64,),
    "wide": (64, 64),
    "large": (2, 512, 1152),
}
EVERY = {
    "large": 8
    # Of its 512 rows, so that 64 shards divide what is left; of 1152 columns every
    # second.
}


@pytest.mark.filterwarnings("ignore:shard_rules. names and shapes do not")
@pytest.mark.parametrize("mesh", ["one", "2x2x2", *in_long("data", "tensor", "fsdp")])
def test_lost_updates_are_counted_exactly_on_every_mesh(mesh: str) -> None:
    model: Any = {
        name: numbers(shape, i) for i, (name, shape) in enumerate(SHAPES.items())
    }
    grads = {
        name: numbers(shape, 9 + i) for i, (name, shape) in enumerate(SHAPES.items())
    }
    model["wide"] = model["wide"].astype(np.float32)  # not counted
    lost = count = 0
    for name in SHAPES:
        # Exact in bfloat16.
        update = np.float32(-0.125) * grads[name].astype(np.float32)
        new = (model[name].astype(np.float32) + update).astype(BRAIN)
        rows = (
            (..., slice(None, None, EVERY.get(name, 1)), slice(None))
            if len(SHAPES[name]) > 1
            else ...
        )
        update = update[rows]
        new = new[rows]
        old = model[name][rows]
        if name != "wide":
            count += np.sum(update != 0)
            lost += np.sum((update != 0) & (new == old))
    assert 0.1 < lost / count < 0.9
    arrays = jax.tree.map(jnp.asarray, model)
    shardings = rx.shard_rules(arrays, mesh_of(mesh))
    state = rx.init_state(
        eqx.filter_shard(arrays, shardings), optax.sgd(0.125), key=KEY
    )
    batch = {
        "grad": jax.tree.map(
            lambda x: np.broadcast_to(x.astype(np.float32), (8, *x.shape)), grads
        )
    }
    _, metrics = compiled_step(linear_loss, optax.sgd(0.125), shardings=shardings)(
        state, batch
    )
    assert (metrics["rounded_away"].total, metrics["rounded_away"].weight) == (
        lost,
        count,
    )


def share(model: Any, optimizer: Any, loss_fn: Any, num_steps: int = 1) -> list[Any]:
    """`rounded_away` in each of so many steps."""
    state = rx.init_state(model, optimizer, key=KEY)
    step = compiled_step(loss_fn, optimizer)
    found = []
    for _ in range(num_steps):
        state, metrics = step(state, np.ones(8, np.float32))
        mean = metrics["rounded_away"]
        found.append((float(mean.total), float(mean.weight)))
    return found


def sums(model: Any, batch: Any, key: Any) -> Any:
    return (
        sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(model)) * batch.mean()
    )


def test_wide_parameters_have_no_such_metric() -> None:
    state = mlp_state(optax.sgd(0.1), mesh_of("one"))
    _, metrics = STEP(
        state,
        ROWS,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
    )
    assert set(metrics) == {"loss", "grad_norm"}


def test_a_rate_of_zero_counts_nothing() -> None:
    schedule = optax.linear_schedule(0.0, 1.0, 1)
    model = {"w": jnp.ones(4, jnp.bfloat16)}
    assert share(model, optax.adam(schedule), sums, 2) == [(0, 0), (0, 4)]


def test_rows_that_no_batch_uses_count_nothing() -> None:
    """Though weight decay gives them an update, which is lost."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return (
            model["table"][jnp.array([1, 2])].astype(jnp.float32).sum() * batch.mean()
        )

    model = {"table": jnp.ones((64, 4), jnp.bfloat16)}
    assert share(model, optax.adamw(0.1, weight_decay=1e-4), loss_fn) == [(0, 8)]


def test_factors_before_one_that_is_zero_count_nothing() -> None:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return (model["b"] @ model["a"] @ jnp.ones(8, jnp.bfloat16)).astype(
            jnp.float32
        ).sum() * batch.mean()

    model = {"a": jnp.ones((2, 8), jnp.bfloat16), "b": jnp.zeros((4, 2), jnp.bfloat16)}
    first, second = share(model, optax.adamw(1e-5), loss_fn, 2)
    assert first == (0, 8)  # `b` alone has a gradient, and moves from 0
    assert second[1] == 24


def test_steps_that_only_accumulate_count_nothing() -> None:
    optimizer = optax.MultiSteps(optax.sgd(1e-5), 2).gradient_transformation()
    assert share({"w": jnp.ones(4, jnp.bfloat16)}, optimizer, sums, 2) == [
        (0, 0),
        (4, 4),
    ]


def brain_state(optimizer: Any, dtype: Any = jnp.bfloat16) -> Any:
    model = rx.cast(eqx.nn.MLP(2, 2, 16, 1, key=KEY), dtype)
    return rx.init_state(model, optimizer, key=KEY)


WARM_UP = optax.join_schedules(
    [optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [8]
)
FITS: dict[str, tuple[Any, Any, bool]] = {
    "small rate": (optax.adamw(1e-6), jnp.bfloat16, True),
    "float16": (optax.sgd(1e-5), jnp.float16, True),
    "large rate": (optax.adamw(0.1), jnp.bfloat16, False),
    "zeros in a warm-up": (optax.adamw(WARM_UP), jnp.bfloat16, False),
    "wide": (optax.adamw(1e-6), jnp.float32, False),
}


@pytest.mark.parametrize("num_steps", [2, 16])  # fewer rows than are judged, and more
@pytest.mark.parametrize("name", FITS)
def test_fit_warns_once_of_lost_updates(name: str, num_steps: int) -> None:
    optimizer, dtype, is_lost = FITS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, history = fit_with_history(
            brain_state(optimizer, dtype),
            optimizer=optimizer,
            num_steps=num_steps,
            log_every=2,
        )
    found = [str(w.message) for w in caught if "rounding loses" in str(w.message)]
    assert len(found) == is_lost
    for message in found:
        assert f"layers.0.weight ({np.dtype(dtype).name})" in message
        assert "rx.cast(model, np.float32) before init_state" in message
    assert ("train/rounded_away" in history.rows[0]) == (dtype != jnp.float32)
