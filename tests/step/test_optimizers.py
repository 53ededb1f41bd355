"""Every optimizer on a mesh: equal to plain optax on one device, in the layout of its parameters."""

import functools
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
from helpers import mlp_batch, squared_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import batch_sharding, init_state, train_step
from redco_eqx._step.optimizer import like_params

KEY = jax.random.key(0)
NUM_STEPS = 3


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def sharpness_aware(*, opaque: bool) -> Any:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(1e-2), ascent, opaque_mode=opaque)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 3), weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lion": lambda: optax.lion(1e-2),
    "momentum": lambda: optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "muon": lambda: optax.contrib.muon(1e-2),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "masked": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.masked(optax.adamw(1e-2), matrices)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "sam": lambda: sharpness_aware(opaque=False),
    "opaque sam": lambda: sharpness_aware(opaque=True),
}
# Of which the state alone is looked at.
MORE: dict[str, Callable[[], Any]] = {
    "adagrad": lambda: optax.adagrad(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "noisy sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "low-precision momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
# Every optimizer where both axes split; where one does or none, two whose states have every form there is.
CASES = [(name, "2x2x2") for name in OPTIMIZERS] + [
    (name, mesh) for name in ("adamw", "adafactor") for mesh in ("data8", "tensor8", "fsdp8")
]
DATA = [mlp_batch(seed, dtype=np.float64) for seed in range(NUM_STEPS)]


def loss_of(model: Any, batch: Any) -> Any:
    mean, _ = squared_error(model, batch, None)
    return mean.total / mean.weight


@functools.cache
def plain(name: str) -> dict[str, Any]:
    """The parameters after a loop of optax alone on one device, over the model as a tree."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    params, static = eqx.partition(helpers.make_mlp(jnp.float64), eqx.is_inexact_array)

    @partial(jax.jit, compiler_options=helpers.QUICK_COMPILE)
    def step(params, opt_state, batch):
        def loss(p):
            return loss_of(eqx.combine(p, static), batch)

        value, grads = jax.value_and_grad(loss)(params)
        if "sam" in name:
            extra = {"grad_fn": jax.grad(lambda p, _: loss(p))}
        else:
            extra = {"value": value, "grad": grads, "value_fn": loss}
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    opt_state: Any = optimizer.init(params)
    for batch in DATA:
        params, opt_state = step(params, opt_state, batch)
    if name == "plateau":
        assert opt_state[1].scale < 1  # so the loss has come through
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in pairs}


def moments(opt_state: Any, params: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arrays of an optimizer state that belong to a parameter, with its path."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        owners = [entry.key for entry in path if getattr(entry, "key", None) in params]
        found += [(owner, x) for owner in owners]
    return found


def without_dim(sharding: Any, ndim: int, dim: int) -> Any:
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, P(*spec[:dim], *spec[dim + 1 :]))


def assert_laid_out_like_parameters(opt_state: Any, params: dict[str, Any]) -> int:
    """Checks every moment, and counts those that are split."""
    count = 0
    for path, x in moments(opt_state, params):
        param = params[path]
        if x.shape == param.shape:
            assert x.sharding.is_equivalent_to(param.sharding, x.ndim), path
        elif x.shape[1:] == param.shape:  # a stack of them
            assert x.sharding.is_equivalent_to(
                NamedSharding(param.sharding.mesh, P(None, *param.sharding.spec)), x.ndim
            )
        elif x.ndim == 1 and param.ndim == 2 and x.shape[0] in param.shape:
            # A factored moment: what is left of the split. The dims differ, so it is known which is gone.
            dim = 1 - param.shape.index(x.shape[0])
            assert x.sharding.is_equivalent_to(without_dim(param.sharding, 2, dim), 1), path
        else:
            assert x.is_fully_replicated, path
        count += not x.is_fully_replicated
    for x in jax.tree.leaves(opt_state):
        assert x.sharding.mesh.devices.size == 8
    return count


# Float64 throughout: Adam divides by a root of squared gradients, and Lion takes a sign, which lets the
# rounding of float32 decide.
@pytest.mark.parametrize(("name", "mesh_name"), CASES)
def test_equal_to_plain_optax_and_laid_out_like_its_parameters(name, mesh_name):
    with jax.enable_x64(True):
        mesh = helpers.mesh_of(mesh_name)
        model, shardings = helpers.place(helpers.make_mlp(jnp.float64), mesh)
        optimizer = OPTIMIZERS[name]()
        state = init_state(model, optimizer, key=jax.random.key(1))
        born = assert_laid_out_like_parameters(state.opt_state, state.params)
        assert bool(born) == (mesh_name != "data8" and name not in ("backtracking", "opaque sam"))
        layout = jax.tree.map(lambda x: x.sharding, state)
        step = jax.jit(
            partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings),
            donate_argnums=0,
            compiler_options=helpers.QUICK_COMPILE,
        )
        batches = [jax.device_put(batch, batch_sharding(mesh)) for batch in DATA]
        with helpers.count_compilations() as compiled:
            for batch in batches:
                state, _ = step(state, batch)
        assert len(compiled) == 1
        assert assert_laid_out_like_parameters(state.opt_state, state.params) == born
        for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        # Rounding, grown by three steps; Muon's iteration of polynomials grows it most.
        helpers.assert_close(state.params, plain(name), rtol=1e-8, atol=1e-10)


def test_adafactor_keeps_what_is_left_of_a_split():
    mesh = helpers.mesh_of("2x2x2")
    model, _ = helpers.place(helpers.make_mlp(), mesh)
    state = init_state(model, OPTIMIZERS["adafactor"](), key=KEY)
    weight: Any = state.params["layers.0.weight"]
    assert weight.shape == (128, 64)
    assert weight.sharding.spec == P("tensor", "fsdp")
    factors = {x.shape: x for path, x in moments(state.opt_state, state.params) if path == "layers.0.weight"}
    assert {x.dtype for x in factors.values()} == {jnp.dtype("float32")}
    assert factors[(128,)].sharding.is_equivalent_to(NamedSharding(mesh, P("tensor")), 1)
    assert factors[(64,)].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 1)


# Of a shape that lacks one dim, which one it is must be clear, or its split must not matter.
@pytest.mark.parametrize(
    ("shape", "spec", "moment", "expected"),
    [
        ((8, 16), P("tensor", "fsdp"), (8, 16), P("tensor", "fsdp")),
        ((8, 16), P("tensor", "fsdp"), (8,), P("tensor")),
        ((8, 16), P("tensor", "fsdp"), (16,), P("fsdp")),
        ((8, 16), P("tensor"), (16,), P()),
        ((8, 8), P("tensor", "fsdp"), (8,), P()),
        ((8, 8), P(), (8,), P()),
        ((4, 8, 16), P(None, "tensor", "fsdp"), (4, 8), P(None, "tensor")),
        ((4, 8, 16), P(None, "tensor", "fsdp"), (4, 16), P(None, "fsdp")),
        ((8, 16), P("tensor"), (1,), P()),
        ((8, 16), P("tensor"), (), P()),
        ((8, 16), P("tensor"), (8, 1), P()),
        ((2,), P("tensor"), (), P()),
        ((16, 8), P(("fsdp", "tensor")), (16,), P(("fsdp", "tensor"))),
        ((8, 16), P("tensor", "fsdp"), (3, 8, 16), P(None, "tensor", "fsdp")),
        ((8,), P("tensor"), (3, 8), P(None, "tensor")),
        ((8, 8), P("tensor", "fsdp"), (8, 8, 8), P(None, "tensor", "fsdp")),
    ],
    ids=str,
)
def test_the_split_of_a_moment(shape, spec, moment, expected):
    mesh = helpers.mesh_of("2x2x2")
    params = {"a.b": jax.ShapeDtypeStruct(shape, jnp.float32), "a": jax.ShapeDtypeStruct((8,), jnp.float32)}
    shardings = {"a.b": NamedSharding(mesh, spec), "a": NamedSharding(mesh, P("data"))}
    state = ({"a": {"a.b": jax.ShapeDtypeStruct(moment, jnp.float32)}}, jnp.zeros(()), {"a": jnp.zeros(8)})
    found = like_params(state, params, shardings)
    # The innermost name decides: a label of `optax.partition` could be that of a parameter.
    assert found[0]["a"]["a.b"].is_equivalent_to(NamedSharding(mesh, expected), len(moment))
    assert found[1].is_equivalent_to(NamedSharding(mesh, P()), 0)
    assert found[2]["a"].is_equivalent_to(NamedSharding(mesh, P("data")), 1)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_the_state_of_an_optimizer_comes_out_as_it_went_in(name, num_microbatches):
    """A fixed point of shape, dtype and weak type: one compilation serves every step."""
    optimizer = {**OPTIMIZERS, **MORE}[name]()
    model = eqx.filter_eval_shape(helpers.make_mlp)
    state = init_state(model, optimizer, key=KEY)
    step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, num_microbatches=num_microbatches)
    new, _ = jax.eval_shape(step, state, mlp_batch(0))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(state), strict=True)
    for (path, x), y in pairs:
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, jax.typeof(y).weak_type), path


@pytest.mark.parametrize("name", MORE)
def test_the_state_of_further_optimizers_is_laid_out_like_its_parameters(name):
    mesh = helpers.mesh_of("tensor8")
    state = init_state(helpers.place(helpers.make_mlp(), mesh)[0], MORE[name](), key=KEY)
    born = assert_laid_out_like_parameters(state.opt_state, state.params)
    assert bool(born) == (name != "noisy sgd")  # which keeps nothing of a parameter
