"""`fit(step_fn=)`: a user's own step gets all that `fit` gives to `train_step`."""

import functools
import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    assert_same,
    errors_of,
    fit,
    loss_fn,
    make_examples,
    raised,
)

import redco_eqx as rx

MESH: dict[str, Any] = {"tensor": 2, "fsdp": 2}


def by_hand(
    state: Any, batch: Any, *, loss_fn: Any, optimizer: Any, **_: Any
) -> tuple[Any, Any]:
    """A step with gradients of its own, for `loss_fn` of `fit_helpers`."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, 0), state.step)

    def loss_of(params: Any) -> Any:
        model = state.build(params, state.model_state)
        loss, metrics = loss_fn(model, batch, key)
        return loss.value, (loss, metrics)

    (_, (loss, metrics)), grads = jax.value_and_grad(loss_of, has_aux=True)(
        state.params
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = eqx.tree_at(
        lambda s: (s.params, s.opt_state, s.step),
        state,
        (optax.apply_updates(state.params, updates), opt_state, state.step + 1),
    )
    return new, {"loss": loss, **metrics}


class WithTeacher(eqx.Module):
    """A student, and the moving average of its weights, which is not trained."""

    student: eqx.nn.Linear
    teacher: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.student(x)


def teacher_state(**sizes: int) -> Any:
    given: dict[str, Any] = sizes or MESH
    mesh = rx.make_mesh(**given)
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    model = WithTeacher(linear, jax.tree.map(jnp.copy, linear))
    model = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    trainable = jax.tree.map(eqx.is_array, model)
    trainable = eqx.tree_at(
        lambda m: m.teacher, trainable, jax.tree.map(lambda _: False, model.teacher)
    )
    return rx.init_state(model, SGD, key=jax.random.key(1), trainable=trainable)


def with_average(state: Any, batch: Any, *, rate: float = 0.9, **options: Any) -> Any:
    """`train_step`, after which the teacher moves towards the student."""
    new, metrics = rx.train_step(state, batch, **options)
    teacher = {
        path: rate * x + (1 - rate) * new.params[path.replace("teacher", "student")]
        for path, x in state.frozen.items()
    }
    return eqx.tree_at(lambda s: s.frozen, new, teacher), metrics


def run(
    step_fn: Any, directory: Any, num_steps: int, state: Any = None, **options: Any
) -> Any:
    return fit(
        state or teacher_state(),
        make_examples(40, dim=8),
        batch_size=8,
        step_fn=step_fn,
        num_steps=num_steps,
        checkpoints=directory,
        **options,
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_around_train_step_is_train_step(num_microbatches: int) -> None:
    def around(state: Any, batch: Any, **options: Any) -> Any:
        assert set(options) == {
            "loss_fn",
            "optimizer",
            "num_microbatches",
            "shardings",
        }
        return rx.train_step(state, batch, **options)

    options: Any = {"num_epochs": 2, "num_microbatches": num_microbatches}
    assert_same(fit(step_fn=around, **options), fit(**options))


def test_a_step_with_gradients_of_its_own_is_train_step() -> None:
    ours = fit(num_epochs=2)
    own = fit(step_fn=by_hand, num_epochs=2)
    for path, x in ours.params.items():
        np.testing.assert_allclose(own.params[path], x, rtol=1e-5)


def test_the_teacher_of_a_resumed_run_is_that_of_the_whole_run(
    tmp_path: pathlib.Path,
) -> None:
    whole = run(with_average, None, 7)
    run(with_average, tmp_path, 4)
    resumed = run(with_average, tmp_path, 7)
    assert_same(resumed, whole)
    assert not np.array_equal(
        resumed.frozen["teacher.weight"], teacher_state().frozen["teacher.weight"]
    )


def test_a_step_that_is_not_finite_ends_the_run_with_the_last_good_state() -> None:
    def diverging(state: Any, batch: Any, **options: Any) -> Any:
        new, metrics = rx.train_step(state, batch, **options)
        spoiled = jnp.where(state.step == 3, jnp.nan, metrics["loss"].value)
        return new, {"loss": spoiled}

    error = raised(rx.errors.NonFiniteError, fit, step_fn=diverging, num_epochs=2)
    assert error.step == 3
    assert_same(error.state, fit(num_steps=3))


SLOWER = functools.partial(with_average, rate=0.99)
OPTIONS = functools.partial(rx.train_step, reshard_after_forward=True)
ONCE = functools.partial(rx.train_step, reduce_once=True)


@pytest.mark.parametrize(
    ("first", "second", "is_named"),
    [
        (with_average, SLOWER, True),
        (rx.train_step, with_average, True),
        (with_average, rx.train_step, True),
        (with_average, with_average, False),
        (rx.train_step, OPTIONS, False),
        (rx.train_step, ONCE, True),
        (ONCE, ONCE, False),
    ],
    ids=[
        "another",
        "from train_step",
        "to train_step",
        "the same",
        "other options",
        "to data shards by themselves",
        "the same data shards",
    ],
)
def test_another_step_of_a_resumed_run_is_named(
    first: Any, second: Any, is_named: bool, tmp_path: pathlib.Path, recwarn: Any
) -> None:
    run(first, tmp_path, 2)
    run(second, tmp_path, 3)
    words = "step_fn of this call computes something different"
    assert any(words in str(w.message) for w in recwarn) == is_named


def test_another_number_of_data_shards_by_themselves_is_named(
    tmp_path: pathlib.Path,
) -> None:
    """Each has a key of its own, so random numbers are others."""
    run(ONCE, tmp_path, 2)
    with pytest.warns(UserWarning, match="step_fn of this call computes something"):
        run(ONCE, tmp_path, 3, teacher_state(tensor=2))


def weighted_loss(model: Any, batch: Any, key: Any) -> Any:
    total = jnp.sum(batch["weight"] * errors_of(model, batch))
    return rx.Mean(total, jnp.sum(batch["weight"]))


def test_sums_of_each_microbatch_are_said_and_once_is_the_same_run(
    capsys: Any,
) -> None:
    options: Any = {
        "num_microbatches": 2,
        "loggers": [rx.ConsoleLogger()],
        # Without random numbers, which each data shard draws by itself.
        "loss_fn": weighted_loss,
    }
    each = run(rx.train_step, None, 3, **options)
    said = capsys.readouterr()
    words = "each of the 2 microbatches sums gradients over data"
    assert (said.out + said.err).count(words) == 1
    once = run(ONCE, None, 3, **options)
    said = capsys.readouterr()
    assert words not in said.out + said.err
    for path, x in each.params.items():
        # Float32 sums in another order, of three steps.
        np.testing.assert_allclose(once.params[path], x, rtol=1e-4, atol=1e-6)


def test_a_step_that_cannot_be_compared_says_so_once(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    def needs_layout(state: Any, batch: Any, *, shardings: Any, **options: Any) -> Any:
        mesh = next(iter(shardings.values())).mesh
        assert mesh.size > 1
        return rx.train_step(state, batch, shardings=shardings, **options)

    for num_steps in (2, 4):
        run(needs_layout, tmp_path, num_steps, loggers=[rx.ConsoleLogger()])
        said = capsys.readouterr()
        assert (said.out + said.err).count("step_fn cannot be traced on one") == 1


def other_dtype(state: Any, batch: Any, **options: Any) -> Any:
    new, metrics = rx.train_step(state, batch, **options)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), new.params)
    return eqx.tree_at(lambda s: s.params, new, half), metrics


def without_loss(state: Any, batch: Any, **options: Any) -> Any:
    new, metrics = rx.train_step(state, batch, **options)
    return new, {"accuracy": metrics["plain"]}


def without_metrics(state: Any, batch: Any, **options: Any) -> Any:
    return rx.train_step(state, batch, **options)[0]


def not_counted(state: Any, batch: Any, **options: Any) -> Any:
    state, _ = rx.train_step(state, batch, **options)
    return rx.train_step(state, batch, **options)


REFUSED = {
    "two steps": (not_counted, ValueError, "after one step, state.step is 2, but must"),
    "two arguments": (
        lambda state, batch: (state, {}),
        TypeError,
        r"step_fn is called as step_fn\(state, batch, loss_fn=..., optimizer=..., "
        r"num_microbatches=..., shardings=...\).*\*\*_",
    ),
    "jitted": (jax.jit(rx.train_step), TypeError, "fit compiles it"),
    "by jit_step": (rx.jit_step(rx.train_step), TypeError, "fit compiles it"),
    "another dtype": (other_dtype, ValueError, r"params\.bias was .*bfloat16"),
    "no loss": (without_loss, ValueError, "'loss', but the metrics are"),
    "no metrics": (without_metrics, ValueError, r"step_fn must return \(state, met"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_step_is_refused(kind: str, tmp_path: pathlib.Path) -> None:
    step_fn, error, match = REFUSED[kind]
    raised(
        error,
        fit,
        None,
        EXAMPLES,
        loss_fn=loss_fn,
        step_fn=step_fn,
        num_epochs=1,
        match=match,
    )
