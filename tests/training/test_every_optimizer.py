"""Every public optimizer of optax and `optax.contrib` trains through `fit` on a mesh, or is refused by name."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import collate, errors_of, fit, make_examples
from jax.sharding import PartitionSpec
from optax import contrib

import redco_eqx as rx

RATE = 1e-2
EXAMPLES = make_examples(16, dim=8)


def sgd() -> Any:
    return optax.sgd(RATE)


def then(transform: Any) -> Any:
    """A transformation of gradients with a step after it."""
    return optax.chain(transform, optax.scale(-RATE))


def after(transform: Any) -> Any:
    """A transformation of updates, after SGD."""
    return optax.chain(sgd(), transform)


def first(step: Any, **_: Any) -> Any:
    return step < 1


def decayed(gradient: Any, param: Any) -> Any:
    return gradient + 0.1 * param


def by_muon(params: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


# By the function of optax. Those that are not here take a learning rate, or nothing.
HOW: dict[str, Callable[[], Any]] = {
    "optax.adaptive_grad_clip": lambda: then(optax.adaptive_grad_clip(0.1)),
    "optax.add_decayed_weights": lambda: then(optax.add_decayed_weights(0.1)),
    "optax.add_noise": lambda: then(optax.add_noise(0.1, 0.5, key=0)),
    "optax.apply_every": lambda: after(optax.apply_every(2)),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(sgd(), 2),
    "optax.chain": lambda: optax.chain(optax.clip(1.0), sgd()),
    "optax.clip": lambda: then(optax.clip(1.0)),
    "optax.clip_by_block_rms": lambda: then(optax.clip_by_block_rms(1.0)),
    "optax.clip_by_global_norm": lambda: then(optax.clip_by_global_norm(1.0)),
    "optax.conditionally_mask": lambda: optax.conditionally_mask(sgd(), first),
    "optax.conditionally_transform": lambda: optax.conditionally_transform(sgd(), first),
    "optax.ema": lambda: then(optax.ema(0.9)),
    "optax.flatten": lambda: optax.flatten(sgd()),
    "optax.freeze": lambda: after(optax.freeze({"weight": False, "bias": True})),
    "optax.lbfgs": lambda: optax.lbfgs(memory_size=2),
    "optax.lookahead": lambda: optax.lookahead(sgd(), 2, 0.5),
    "optax.masked": lambda: optax.masked(sgd(), {"weight": True, "bias": False}),
    "optax.multi_transform": lambda: optax.multi_transform(
        {"a": sgd(), "b": optax.adam(RATE)}, {"weight": "a", "bias": "b"}
    ),
    "optax.named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("sgd", sgd())),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "optax.partition": lambda: optax.partition(
        {"a": sgd(), "b": optax.adam(RATE)}, {"weight": "a", "bias": "b"}
    ),
    "optax.polyak_sgd": lambda: optax.polyak_sgd(RATE),
    "optax.scale": lambda: optax.scale(-RATE),
    "optax.scale_by_backtracking_linesearch": lambda: after(optax.scale_by_backtracking_linesearch(5)),
    "optax.scale_by_learning_rate": lambda: optax.scale_by_learning_rate(RATE),
    "optax.scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: -RATE),
    "optax.scale_by_zoom_linesearch": lambda: after(optax.scale_by_zoom_linesearch(5)),
    "optax.selective_transform": lambda: optax.selective_transform(sgd(), freeze_mask={"weight": 0, "bias": 1}),
    "optax.snapshot": lambda: then(optax.snapshot("gradient", lambda updates: updates)),
    "optax.stateless": lambda: then(optax.stateless(lambda updates, _: updates)),
    "optax.stateless_with_tree_map": lambda: then(optax.stateless_with_tree_map(decayed)),
    "optax.trace": lambda: then(optax.trace(0.9)),
    "optax.with_extra_args_support": lambda: optax.with_extra_args_support(sgd()),
    "contrib.ademamix": lambda: contrib.ademamix(RATE),
    "contrib.differentially_private_aggregate": lambda: then(
        contrib.differentially_private_aggregate(1.0, 0.1, key=0)
    ),
    "contrib.dpsgd": lambda: contrib.dpsgd(RATE, 1.0, 0.1, 0),
    "contrib.galore": lambda: contrib.galore(RATE, rank=2),
    "contrib.mechanize": lambda: contrib.mechanize(sgd()),
    "contrib.reduce_on_plateau": lambda: after(contrib.reduce_on_plateau(patience=1)),
    "contrib.sam": lambda: contrib.sam(sgd(), then(contrib.normalize())),
    "contrib.scale_by_galore": lambda: then(contrib.scale_by_galore(rank=2)),
    "contrib.scale_by_muon": lambda: then(
        optax.masked(contrib.scale_by_muon(weight_dimension_numbers=by_muon), {"weight": True, "bias": False})
    ),
    "contrib.schedule_free": lambda: contrib.schedule_free(sgd(), RATE),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(sgd()),
}
REFUSED = {
    "optax.lookahead": "optax.lookahead keeps two sets of parameters",
    "contrib.sophia": "optax.contrib.sophia, by its default estimator, differentiates the loss forwards",
    "contrib.dpsgd": "needs the gradient of each example",
    "contrib.differentially_private_aggregate": "needs the gradient of each example",
}


def public() -> dict[str, Any]:
    """Every function of optax that says it returns an optimizer; `measure_with_ema` gives no updates."""
    found = {}
    for module, name in ((optax, "optax"), (contrib, "contrib")):
        for attribute in dir(module):
            function = getattr(module, attribute)
            if inspect.isfunction(function) and not attribute.startswith("_"):
                returns = str(inspect.signature(function).return_annotation)
                if "GradientTransformation" in returns and "Callable" not in returns:
                    found[f"{name}.{attribute}"] = function
    del found["optax.measure_with_ema"]
    return found


PUBLIC = public()


def make(name: str) -> Any:
    if name in HOW:
        return HOW[name]()
    parameters = inspect.signature(PUBLIC[name]).parameters
    if "learning_rate" in parameters:
        return PUBLIC[name](RATE)
    return then(PUBLIC[name]())


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors_of(model, batch))


def state_of(optimizer: Any) -> Any:
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    layout = [("weight", PartitionSpec("tensor", "fsdp")), ("bias", PartitionSpec("tensor"))]
    shardings = rx.shard_rules(model, rx.make_mesh(tensor=2, fsdp=2), overrides=layout)
    return rx.init_state(eqx.filter_shard(model, shardings), optimizer, key=jax.random.key(1))


def test_all_are_in_the_table() -> None:
    """A newer optax may have more of them: then they are tried as what takes a learning rate, or nothing."""
    assert len(PUBLIC) > 100
    assert {*HOW, *REFUSED} <= {*PUBLIC}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_it_trains_on_a_mesh_or_is_refused(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            state_of(make(name))
        return
    optimizer = make(name)
    state = state_of(optimizer)
    layout = jax.tree.map(lambda x: x.sharding, state)
    before = jax.device_get(state.params)
    state = fit(
        state, EXAMPLES, loss_fn=loss_fn, collate_fn=collate, optimizer=optimizer, batch_size=8, num_steps=3
    )
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    changed = [path for path, x in state.params.items() if not np.array_equal(x, before[path])]
    assert bool(changed) == (name != "optax.set_to_zero")
    for x in jax.tree.leaves(state.params):
        assert np.isfinite(x).all()
        assert not x.is_fully_replicated
