"""Steps on a mesh equal plain optax on one device, in the layout of their parameters.

tests/training/test_every_optimizer.py trains with each optimizer of optax; tests/gradients has more programs.
"""

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
from by_hand import KEY, by_path, compiled_step, ratio
from fit_helpers import compilations
from helpers import cross_entropy, mlp_batch, squared_error, token_batch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import batch_sharding, eval_step, init_state, predict_step, shard_rules, train_step
from redco_eqx._step.optimizer import like_params


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def sharpness_aware() -> Any:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(1e-2), ascent, opaque_mode=True)


# One for each form that a state has, and for each argument that an update takes.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1.0),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "masked in multi steps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.masked(optax.adamw(1e-2), matrices)), 2
    ).gradient_transformation(),
    "plateau": lambda: optax.chain(
        optax.inject_hyperparams(optax.adamw)(1e-2),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9),
    ),
    # It differentiates the loss at the point that it accepts, and keeps the gradient.
    "lbfgs": lambda: optax.lbfgs(
        memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "opaque sam": sharpness_aware,
}
# Of which the state alone is looked at.
MORE: dict[str, Callable[[], Any]] = {
    "noisy sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "low-precision momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
SUBJECTS: dict[str, Any] = {
    "mlp": (helpers.make_mlp, mlp_batch, squared_error, "absolute"),
    "transformer": (helpers.make_transformer, token_batch, cross_entropy, "hits"),
}


def by_hand(model: Any, name: str, loss_fn: Any, metric: str, batches: list[Any]) -> tuple[Any, list[Any]]:
    """A loop of optax alone on one device, over the model as a tree: the parameters, and loss, metric and
    gradient norm of each step."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(p, *_):
            return ratio(loss_fn)(eqx.combine(p, static), batch)

        value, grads = jax.value_and_grad(loss)(params)
        usual = {"value": value, "grad": grads, "value_fn": loss}
        extra: Any = {"grad_fn": jax.grad(loss)} if "sam" in name else usual
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        measured = ratio(loss_fn, metric)(eqx.combine(params, static), batch)
        return (
            optax.apply_updates(params, updates),
            opt_state,
            {"loss": value, "grad_norm": norm, metric: measured},
        )

    opt_state: Any = jax.jit(optimizer.init)(params)
    reports = []
    for batch in batches:
        params, opt_state, report = step(params, opt_state, batch)
        reports.append(report)
    if name == "plateau":
        assert opt_state[1].scale < 1  # so the loss has come through
    return by_path(params), reports


def num_split(opt_state: Any, params: dict[str, Any]) -> int:
    """Counts the moments that are split; those of a parameter's shape must be split as the parameter is."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        assert x.sharding.mesh.devices.size == 8
        found += [(entry.key, x) for entry in path if getattr(entry, "key", None) in params]
    for path, x in found:
        if x.shape == params[path].shape:
            assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim), path
    return sum(not x.is_fully_replicated for _, x in found)


# In float64 the order of summation alone differs between meshes, which three steps let grow: Adam divides by a
# root of squared gradients, where the rounding of float32 would decide.
@pytest.mark.parametrize(
    ("subject", "mesh_name", "num_microbatches", "laid_out", "name"),
    [
        ("transformer", "2x2x2", 1, True, "sgd"),
        ("mlp", "fsdp8", 2, True, "sgd"),
        ("mlp", "2x2x2", 1, False, "sgd"),
        *(("mlp", "2x2x2", 1, True, name) for name in OPTIMIZERS if name != "sgd"),
    ],
)
def test_equal_to_plain_optax_and_laid_out_like_its_parameters(
    subject, mesh_name, num_microbatches, laid_out, name
):
    make, make_batch, loss_fn, metric = SUBJECTS[subject]
    close: Any = {"rtol": 1e-10, "atol": 1e-12} if name == "sgd" else {"rtol": 1e-8, "atol": 1e-10}
    with jax.enable_x64(True):
        data = [make_batch(seed, dtype=np.float64) for seed in range(3)]
        expected, reports = by_hand(make(jnp.float64), name, loss_fn, metric, data)
        mesh, optimizer = helpers.mesh_of(mesh_name), OPTIMIZERS[name]()
        model, shardings = helpers.place(make(jnp.float64), mesh)
        state = before = init_state(model, optimizer, key=KEY)
        assert any(not x.is_fully_replicated for x in state.params.values())
        assert bool(num_split(state.opt_state, state.params)) == (name not in ("sgd", "opaque sam"))
        options: Any = {"shardings": shardings if laid_out else None, "num_microbatches": num_microbatches}
        step = compiled_step(loss_fn, optimizer, **options)
        batches = [jax.device_put(batch, batch_sharding(mesh)) for batch in data]
        measured = []
        with compilations() as compiled:
            for batch in batches:
                state, metrics = step(state, batch)
                measured.append(metrics)
        for metrics, report in zip(measured, reports, strict=True):
            for key, x in report.items():
                np.testing.assert_allclose(metrics[key].value, x, **close)
        helpers.assert_close(state.params, expected, **close)
        assert state.step == 3
        if laid_out:  # otherwise the compiler may choose another
            assert len(compiled) == 1
            helpers.assert_same_layout(state, before)


def test_shardings_of_another_model_are_refused():
    model = eqx.nn.MLP(64, 64, 31, 1, key=KEY)
    mesh = helpers.mesh_of("2x2x2")
    other = shard_rules({"mlp": model}, mesh)
    deeper, wider = (
        shard_rules(eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, width, depth, key=KEY), mesh)
        for width, depth in ((31, 2), (128, 1))
    )
    state = init_state(model, optax.sgd(1.0), key=KEY)
    for step in (
        partial(train_step, optimizer=optax.sgd(1.0), loss_fn=squared_error),
        partial(eval_step, loss_fn=squared_error),
        partial(predict_step, predict_fn=lambda model, batch, key: batch),
    ):
        for layout, message in (
            (other, r"shardings has no NamedSharding for layers\.0\.weight"),
            (deeper, r"shardings has layers\.2\.weight, layers\.2\.bias, but the state has no such array"),
            (wider, r"layers\.0\.weight, float32\[31,64\]: dim 0 of size 31 does not divide into 2 parts"),
        ):
            with pytest.raises(ValueError, match=message):
                step(state, mlp_batch(0), shardings=layout)


def test_the_state_of_an_optimizer_comes_out_as_it_went_in():
    """A fixed point of shape, dtype and weak type: one compilation serves every step."""
    model = eqx.filter_eval_shape(helpers.make_mlp)
    for name, make in {**OPTIMIZERS, **MORE}.items():
        optimizer = make()
        state = init_state(model, optimizer, key=KEY)
        for number in (1, 2):
            step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, num_microbatches=number)
            new, _ = jax.eval_shape(step, state, mlp_batch(0))
            assert jax.tree.structure(new) == jax.tree.structure(state)
            pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(state), strict=True)
            for (path, x), y in pairs:
                expected = (y.shape, y.dtype, jax.typeof(y).weak_type)
                assert (x.shape, x.dtype, x.weak_type) == expected, (name, path)


def test_a_moment_is_split_like_its_parameter():
    """If its shape lacks one dim, it must be clear which one, or the split of that dim must not matter."""
    mesh = helpers.mesh_of("2x2x2")
    of_a = NamedSharding(mesh, P("data"))
    matrix, both, tensor = (8, 16), P("tensor", "fsdp"), P("tensor")
    for shape, spec, moment, expected in (
        (matrix, both, (8, 16), both),
        (matrix, both, (8,), tensor),
        (matrix, both, (16,), P("fsdp")),
        (matrix, tensor, (16,), P()),
        ((8, 8), both, (8,), P()),
        ((4, 8, 16), P(None, "tensor", "fsdp"), (4, 8), P(None, "tensor")),
        ((4, 8, 16), P(None, "tensor", "fsdp"), (4, 16), P(None, "fsdp")),
        (matrix, tensor, (1,), P()),
        (matrix, tensor, (), P()),
        (matrix, tensor, (8, 1), P()),
        ((2,), tensor, (), P()),
        ((16, 8), P(("fsdp", "tensor")), (16,), P(("fsdp", "tensor"))),
        (matrix, both, (3, 8, 16), P(None, "tensor", "fsdp")),
        ((8,), tensor, (3, 8), P(None, "tensor")),
        ((8, 8), both, (8, 8, 8), P(None, "tensor", "fsdp")),
    ):
        params = {"a.b": jax.ShapeDtypeStruct(shape, jnp.float32), "a": jax.ShapeDtypeStruct((8,), jnp.float32)}
        shardings = {"a.b": NamedSharding(mesh, spec), "a": of_a}
        state = ({"a": {"a.b": jax.ShapeDtypeStruct(moment, jnp.float32)}}, jnp.zeros(()), {"a": jnp.zeros(8)})
        found = like_params(state, params, shardings)
        # The innermost name decides: a label of `optax.partition` could be that of a parameter.
        wanted = NamedSharding(mesh, expected)
        assert found[0]["a"]["a.b"].is_equivalent_to(wanted, len(moment)), (shape, spec, moment)
        assert found[1].is_equivalent_to(NamedSharding(mesh, P()), 0)
        assert found[2]["a"].is_equivalent_to(of_a, 1)
