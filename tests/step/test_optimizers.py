"""Steps on a mesh equal plain optax on one device, in the layout of their parameters.

The optimizers of optax that train through `fit` come last; tests/gradients has more
programs.
"""

import functools
import inspect
from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import compilations, fit, make_examples, paired, raised, scalar_loss
from helpers import (
    KEY,
    by_path,
    compiled_step,
    cross_entropy,
    in_long,
    mlp_batch,
    squared_error,
    token_batch,
)
from optax import contrib

import redco_eqx as rx
from redco_eqx._step.optimizer import like_params

matrices = partial(jax.tree.map, lambda x: x.ndim == 2)

SEARCH = optax.scale_by_backtracking_linesearch(5, store_grad=True)
# One for each form that a state has, and for each argument that an update takes.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(1.0),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "masked in multi steps": lambda: optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(0.1), optax.masked(optax.adamw(1e-2), matrices)
        ),
        2,
    ).gradient_transformation(),
    "plateau": lambda: optax.chain(
        optax.inject_hyperparams(optax.adamw)(1e-2),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9),
    ),
    # It differentiates the loss at the point that it accepts, and keeps the gradient.
    "lbfgs": lambda: optax.lbfgs(memory_size=2, linesearch=SEARCH),
    "opaque sam": lambda: contrib.sam(
        optax.sgd(1e-2),
        optax.chain(contrib.normalize(), optax.sgd(0.05)),
        opaque_mode=True,
    ),
}
# Of which the state alone is looked at.
MORE: dict[str, Any] = {
    "noisy sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "low-precision momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
SUBJECTS: dict[str, Any] = {
    "mlp": (helpers.make_mlp, mlp_batch, squared_error, "absolute"),
    "transformer": (helpers.make_transformer, token_batch, cross_entropy, "hits"),
}


def by_hand(
    model: Any, name: str, loss_fn: Any, metric: str, batches: list[Any]
) -> tuple[Any, list[Any]]:
    """A loop of optax alone on one device, over the model as a tree: the parameters,
    and loss, metric and gradient norm of each step."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(p, *_):
            return helpers.ratio(loss_fn)(eqx.combine(p, static), batch)

        value, grads = jax.value_and_grad(loss)(params)
        usual = {"value": value, "grad": grads, "value_fn": loss}
        extra: Any = {"grad_fn": jax.grad(loss)} if "sam" in name else usual
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        measured = helpers.ratio(loss_fn, metric)(eqx.combine(params, static), batch)
        report = {"loss": value, "grad_norm": norm, metric: measured}
        return optax.apply_updates(params, updates), opt_state, report

    opt_state: Any = jax.jit(optimizer.init)(params)
    reports = []
    for batch in batches:
        params, opt_state, report = step(params, opt_state, batch)
        reports.append(report)
    if name == "plateau":
        assert opt_state[1].scale < 1  # so the loss has come through
    return by_path(params), reports


def num_split(opt_state: Any, params: dict[str, Any]) -> int:
    """Counts the moments that are split; those of a parameter's shape must be split as
    the parameter is."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        assert x.sharding.mesh.devices.size == 8
        found += [
            (entry.key, x) for entry in path if getattr(entry, "key", None) in params
        ]
    for path, x in found:
        if x.shape == params[path].shape:
            assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim), path
    return sum(not x.is_fully_replicated for _, x in found)


# In float64 the order of summation alone differs between meshes, which three steps let
# grow: Adam divides by a root of squared gradients, where the rounding of float32 would
# decide.
@pytest.mark.parametrize(
    ("subject", "mesh_name", "number", "laid_out", "name"),
    [
        ("transformer", "2x2x2", 1, True, "sgd"),
        ("mlp", "fsdp8", 2, True, "sgd"),
        ("mlp", "2x2x2", 1, False, "sgd"),
        *(("mlp", "2x2x2", 1, True, name) for name in OPTIMIZERS if name != "sgd"),
    ],
)
def test_equal_to_plain_optax_and_laid_out_like_its_parameters(
    subject, mesh_name, number, laid_out, name
):
    make, make_batch, loss_fn, metric = SUBJECTS[subject]
    close: Any = (
        {"rtol": 1e-10, "atol": 1e-12}
        if name == "sgd"
        else {"rtol": 1e-8, "atol": 1e-10}
    )
    with jax.enable_x64(True):
        data = [make_batch(seed, dtype=np.float64) for seed in range(3)]
        expected, reports = by_hand(make(jnp.float64), name, loss_fn, metric, data)
        mesh = helpers.mesh_of(mesh_name)
        optimizer = OPTIMIZERS[name]()
        model, shardings = helpers.place(make(jnp.float64), mesh)
        state = before = rx.init_state(model, optimizer, key=KEY)
        assert any(not x.is_fully_replicated for x in state.params.values())
        assert bool(num_split(state.opt_state, state.params)) == (
            name not in ("sgd", "opaque sam")
        )
        options: Any = {
            "shardings": shardings if laid_out else None,
            "num_microbatches": number,
        }
        step = compiled_step(loss_fn, optimizer, **options)
        batches = [jax.device_put(batch, rx.batch_sharding(mesh)) for batch in data]
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


def narrow_mlp(*sizes: int) -> Any:
    """Shapes alone."""
    return eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, *sizes, key=KEY)


# Makes a model whose layout is not that of the state, and the message.
OF_ANOTHER_MODEL: dict[str, tuple[Any, str]] = {
    "other_paths": (
        lambda: {"mlp": narrow_mlp(31, 1)},
        r"shardings has no NamedSharding for layers\.0\.weight",
    ),
    "deeper": (
        lambda: narrow_mlp(31, 2),
        r"shardings has layers\.2\.weight, layers\.2\.bias, "
        r"but the state has no such array",
    ),
    "wider": (
        lambda: narrow_mlp(128, 1),
        r"layers\.0\.weight, float32\[31,64\]: dim 0 of size 31 "
        r"does not divide into 2 parts",
    ),
}
STEPS: dict[str, Any] = {
    "train_step": partial(
        rx.train_step, optimizer=optax.sgd(1.0), loss_fn=squared_error
    ),
    "eval_step": partial(rx.eval_step, loss_fn=squared_error),
    "predict_step": partial(
        rx.predict_step, predict_fn=lambda model, batch, key: batch
    ),
}


@functools.cache
def narrow_state() -> Any:
    model = eqx.nn.MLP(64, 64, 31, 1, key=KEY)
    return rx.init_state(model, optax.sgd(1.0), key=KEY)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OF_ANOTHER_MODEL)
def test_shardings_of_another_model_are_refused(name, step):
    make, message = OF_ANOTHER_MODEL[name]
    shardings = rx.shard_rules(make(), helpers.mesh_of("2x2x2"))
    with pytest.raises(ValueError, match=message):
        STEPS[step](narrow_state(), mlp_batch(0), shardings=shardings)


def test_the_state_of_an_optimizer_comes_out_as_it_went_in():
    """A fixed point of shape, dtype and weak type: one compilation serves every
    step."""
    for name, make in {**OPTIMIZERS, **MORE}.items():
        optimizer = make()
        state = rx.init_state(
            eqx.filter_eval_shape(helpers.make_mlp), optimizer, key=KEY
        )
        for number in (1, 2):
            step = partial(
                rx.train_step,
                loss_fn=squared_error,
                optimizer=optimizer,
                num_microbatches=number,
            )
            new, _ = jax.eval_shape(step, state, mlp_batch(0))
            assert jax.tree.structure(new) == jax.tree.structure(state)
            for path, x, y in paired(new, state):
                expected = (y.shape, y.dtype, jax.typeof(y).weak_type)
                assert (x.shape, x.dtype, x.weak_type) == expected, (name, path)


def test_a_moment_is_split_like_its_parameter():
    """If its shape lacks one dim, it must be clear which one, or the split of that dim
    must not matter."""
    mesh = helpers.mesh_of("2x2x2")
    of_a = jax.NamedSharding(mesh, jax.P("data"))
    matrix = (8, 16)
    both = jax.P("tensor", "fsdp")
    tensor = jax.P("tensor")
    for shape, spec, moment, expected in (
        (matrix, both, (8, 16), both),
        (matrix, both, (8,), tensor),
        (matrix, both, (16,), jax.P("fsdp")),
        (matrix, tensor, (16,), jax.P()),
        ((8, 8), both, (8,), jax.P()),
        ((4, 8, 16), jax.P(None, "tensor", "fsdp"), (4, 8), jax.P(None, "tensor")),
        ((4, 8, 16), jax.P(None, "tensor", "fsdp"), (4, 16), jax.P(None, "fsdp")),
        (matrix, tensor, (1,), jax.P()),
        (matrix, tensor, (), jax.P()),
        (matrix, tensor, (8, 1), jax.P()),
        ((2,), tensor, (), jax.P()),
        ((16, 8), jax.P(("fsdp", "tensor")), (16,), jax.P(("fsdp", "tensor"))),
        (matrix, both, (3, 8, 16), jax.P(None, "tensor", "fsdp")),
        ((8,), tensor, (3, 8), jax.P(None, "tensor")),
        ((8, 8), both, (8, 8, 8), jax.P(None, "tensor", "fsdp")),
    ):
        params = {
            "a.b": jax.ShapeDtypeStruct(shape, jnp.float32),
            "a": jax.ShapeDtypeStruct((8,), jnp.float32),
        }
        shardings = {"a.b": jax.NamedSharding(mesh, spec), "a": of_a}
        state = (
            {"a": {"a.b": jax.ShapeDtypeStruct(moment, jnp.float32)}},
            jnp.zeros(()),
            {"a": jnp.zeros(8)},
        )
        found = like_params(state, params, shardings)
        # The innermost name decides: a label of `optax.partition` could be that of a
        # parameter.
        wanted = jax.NamedSharding(mesh, expected)
        assert found[0]["a"]["a.b"].is_equivalent_to(wanted, len(moment)), (
            shape,
            spec,
            moment,
        )
        assert found[1].is_equivalent_to(jax.NamedSharding(mesh, jax.P()), 0)
        assert found[2]["a"].is_equivalent_to(of_a, 1)


# The optimizers of optax and `optax.contrib` train through `fit` on a mesh, or are
# refused by name.

RATE = 1e-2
EXAMPLES = make_examples(16, dim=8)


sgd = partial(optax.sgd, RATE)


def then(transform: Any) -> Any:
    """A transformation of gradients with a step after it."""
    return optax.chain(transform, optax.scale(-RATE))


def after(transform: Any) -> Any:
    """A transformation of updates, after SGD."""
    return optax.chain(sgd(), transform)


by_muon = partial(jax.tree.map, lambda _: contrib.MuonDimensionNumbers())
MUON = contrib.scale_by_muon(weight_dimension_numbers=by_muon)
WEIGHT_ALONE = {"weight": True, "bias": False}
LABELS = {"weight": "a", "bias": "b"}

# Those that need more than a learning rate, or nothing.
HOW: dict[str, Any] = {
    "optax.apply_if_finite": lambda: optax.apply_if_finite(sgd(), 2),
    "optax.chain": lambda: optax.chain(optax.clip(1.0), sgd()),
    "optax.conditionally_mask": lambda: optax.conditionally_mask(
        sgd(), lambda step, **_: jnp.less(step, 1)
    ),
    "optax.freeze": lambda: after(optax.freeze({"weight": False, "bias": True})),
    "optax.lbfgs": lambda: optax.lbfgs(memory_size=2),
    "optax.lookahead": lambda: optax.lookahead(sgd(), 2, 0.5),
    "optax.masked": lambda: optax.masked(sgd(), WEIGHT_ALONE),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "optax.partition": lambda: optax.partition(
        {"a": sgd(), "b": optax.adam(RATE)}, LABELS
    ),
    "optax.polyak_sgd": lambda: optax.polyak_sgd(RATE),
    "optax.scale_by_backtracking_linesearch": lambda: after(
        optax.scale_by_backtracking_linesearch(5)
    ),
    "optax.scale_by_zoom_linesearch": lambda: after(optax.scale_by_zoom_linesearch(5)),
    "optax.snapshot": lambda: then(optax.snapshot("gradient", lambda updates: updates)),
    "contrib.ademamix": lambda: contrib.ademamix(RATE),
    "contrib.dpsgd": lambda: contrib.dpsgd(RATE, 1.0, 0.1, 0),
    "contrib.galore": lambda: contrib.galore(RATE, rank=2),
    "contrib.mechanize": lambda: contrib.mechanize(sgd()),
    "contrib.reduce_on_plateau": lambda: after(contrib.reduce_on_plateau(patience=1)),
    "contrib.sam": lambda: contrib.sam(sgd(), then(contrib.normalize())),
    "contrib.scale_by_muon": lambda: then(optax.masked(MUON, WEIGHT_ALONE)),
    "contrib.schedule_free": lambda: contrib.schedule_free(sgd(), RATE),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(sgd()),
}
REFUSED = {
    "optax.lookahead": "optax.lookahead keeps two sets of parameters",
    "contrib.sophia": (
        "optax.contrib.sophia, by its default estimator, differentiates the loss "
        "forwards"
    ),
    "contrib.dpsgd": "needs the gradient of each example",
}


def public() -> dict[str, Any]:
    """Every function of optax that says it returns an optimizer, and that can be called
    by the table or with a learning rate; `measure_with_ema` gives no updates."""
    found = {}
    for module, name in ((optax, "optax"), (contrib, "contrib")):
        for attribute, function in inspect.getmembers(module, inspect.isfunction):
            signature = inspect.signature(function)
            parameters = [p for p in signature.parameters.values() if "*" not in str(p)]
            needed = {p.name for p in parameters if p.default is p.empty}
            returns = str(signature.return_annotation)
            is_one = "GradientTransformation" in returns and "Callable" not in returns
            is_callable = f"{name}.{attribute}" in HOW or needed <= {"learning_rate"}
            if is_one and is_callable and attribute != "measure_with_ema":
                found[f"{name}.{attribute}"] = function
    return found


PUBLIC = public()
# Those whose state or update is treated in a way of its own: moments like parameters
# for some and none for others, sums along each dim, a stack of gradients, the loss
# elsewhere, with its gradient and alone, its value.
FEW = ("partition", "sm3", "lbfgs", "scale_by_backtracking_linesearch", "polyak_sgd")
KINDS = [*(f"optax.{name}" for name in FEW), *REFUSED]


def make(name: str) -> Any:
    if name in HOW:
        return HOW[name]()
    if "learning_rate" in inspect.signature(PUBLIC[name]).parameters:
        return PUBLIC[name](RATE)
    return then(PUBLIC[name]())


def state_of(optimizer: Any) -> Any:
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    layout = [("weight", jax.P("tensor", "fsdp")), ("bias", jax.P("tensor"))]
    shardings = rx.shard_rules(model, rx.make_mesh(tensor=2, fsdp=2), overrides=layout)
    return rx.init_state(
        eqx.filter_shard(model, shardings), optimizer, key=jax.random.key(1)
    )


def test_all_are_in_the_table() -> None:
    """A newer optax may have more of them: then they are tried as what takes a learning
    rate, or nothing."""
    assert len(PUBLIC) > 80
    assert {*HOW, *REFUSED} <= {*PUBLIC}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [*KINDS, *in_long(*(name for name in PUBLIC if name not in KINDS))]
)
def test_it_trains_on_a_mesh_or_is_refused(name: str) -> None:
    if name in REFUSED:
        raised(ValueError, state_of, make(name), match=REFUSED[name])
        return
    optimizer = make(name)
    begin = state_of(optimizer)
    before = jax.device_get(begin.params)
    state = fit(
        begin,
        EXAMPLES,
        optimizer=optimizer,
        loss_fn=scalar_loss,
        batch_size=8,
        num_steps=3,
    )
    helpers.assert_same_layout(state, begin)
    changed = [
        path for path, x in state.params.items() if not np.array_equal(x, before[path])
    ]
    assert bool(changed) == (name != "optax.set_to_zero")
    for x in jax.tree.leaves(state.params):
        assert np.isfinite(x).all()
        assert not x.is_fully_replicated
