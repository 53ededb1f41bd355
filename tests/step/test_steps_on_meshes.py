"""`train_step` on meshes equals a loop written by hand on one device; tests/gradients has more programs."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, by_hand, by_path, compiled_step, ratio
from helpers import cross_entropy, mlp_batch, squared_error, token_batch

from redco_eqx import batch_sharding, eval_step, init_state, predict_step, shard_rules, train_step

SUBJECTS: dict[str, Any] = {
    "mlp": (helpers.make_mlp, mlp_batch, squared_error, "absolute"),
    "transformer": (helpers.make_transformer, token_batch, cross_entropy, "hits"),
}


# In float64 only the order of summation differs between meshes: 1e-10 is rounding, three steps on.
@pytest.mark.parametrize(
    ("subject", "name", "num_microbatches", "laid_out"),
    [
        ("transformer", "2x2x2", 1, True),
        ("mlp", "fsdp8", 2, True),
        ("mlp", "2x2x2", 1, False),
    ],
)
def test_steps_do_not_depend_on_the_mesh(subject, name, num_microbatches, laid_out):
    make, make_batch, loss_fn, metric = SUBJECTS[subject]
    with jax.enable_x64(True):
        model = make(jnp.float64)
        data = [make_batch(seed, dtype=np.float64) for seed in range(3)]
        final, losses, gradients = by_hand(model, optax.sgd(1.0), ratio(loss_fn), data)

        mesh = helpers.mesh_of(name)
        placed, shardings = helpers.place(model, mesh)
        state = init_state(placed, optax.sgd(1.0), key=KEY)
        assert any(not x.is_fully_replicated for x in state.params.values())
        before, reports = state, []
        step = compiled_step(
            loss_fn,
            optax.sgd(1.0),
            shardings=shardings if laid_out else None,
            num_microbatches=num_microbatches,
        )
        with helpers.count_compilations() as compiled:
            for batch in data:
                state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
                reports.append(metrics)
        for metrics, loss, gradient in zip(reports, losses, gradients, strict=True):
            np.testing.assert_allclose(metrics["loss"].value, loss, rtol=1e-10, atol=1e-12)
            norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
            np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-10, atol=1e-12)
        first = eqx.filter_jit(ratio(loss_fn, metric))(model, data[0])
        np.testing.assert_allclose(reports[0][metric].value, first, rtol=1e-10, atol=1e-12)
        helpers.assert_close(state.params, by_path(final), rtol=1e-10, atol=1e-12)
        assert state.step == 3
        if laid_out:  # otherwise the compiler may choose another
            assert len(compiled) == 1
            helpers.assert_same_layout(state, before)


def test_shardings_of_another_model_are_refused():
    mesh = helpers.mesh_of("2x2x2")
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
