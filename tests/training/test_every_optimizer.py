"""The optimizers of optax and `optax.contrib` train through `fit` on a mesh, or are refused by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from fit_helpers import fit, make_examples, scalar_loss
from helpers import in_long
from jax.sharding import PartitionSpec
from optax import contrib

import redco_eqx as rx

RATE = 1e-2
EXAMPLES = make_examples(16, dim=8)


sgd = functools.partial(optax.sgd, RATE)


def then(transform: Any) -> Any:
    """A transformation of gradients with a step after it."""
    return optax.chain(transform, optax.scale(-RATE))


def after(transform: Any) -> Any:
    """A transformation of updates, after SGD."""
    return optax.chain(sgd(), transform)


def first(step: Any, **_: Any) -> Any:
    return step < 1


def by_muon(params: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


WEIGHT_ALONE = {"weight": True, "bias": False}
LABELS = {"weight": "a", "bias": "b"}

# Those that need more than a learning rate, or nothing.
HOW: dict[str, Callable[[], Any]] = {
    "optax.apply_if_finite": lambda: optax.apply_if_finite(sgd(), 2),
    "optax.chain": lambda: optax.chain(optax.clip(1.0), sgd()),
    "optax.conditionally_mask": lambda: optax.conditionally_mask(sgd(), first),
    "optax.freeze": lambda: after(optax.freeze({"weight": False, "bias": True})),
    "optax.lbfgs": lambda: optax.lbfgs(memory_size=2),
    "optax.lookahead": lambda: optax.lookahead(sgd(), 2, 0.5),
    "optax.masked": lambda: optax.masked(sgd(), WEIGHT_ALONE),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "optax.partition": lambda: optax.partition({"a": sgd(), "b": optax.adam(RATE)}, LABELS),
    "optax.polyak_sgd": lambda: optax.polyak_sgd(RATE),
    "optax.scale_by_backtracking_linesearch": lambda: after(optax.scale_by_backtracking_linesearch(5)),
    "optax.scale_by_zoom_linesearch": lambda: after(optax.scale_by_zoom_linesearch(5)),
    "optax.snapshot": lambda: then(optax.snapshot("gradient", lambda updates: updates)),
    "contrib.ademamix": lambda: contrib.ademamix(RATE),
    "contrib.dpsgd": lambda: contrib.dpsgd(RATE, 1.0, 0.1, 0),
    "contrib.galore": lambda: contrib.galore(RATE, rank=2),
    "contrib.mechanize": lambda: contrib.mechanize(sgd()),
    "contrib.reduce_on_plateau": lambda: after(contrib.reduce_on_plateau(patience=1)),
    "contrib.sam": lambda: contrib.sam(sgd(), then(contrib.normalize())),
    "contrib.scale_by_muon": lambda: then(
        optax.masked(contrib.scale_by_muon(weight_dimension_numbers=by_muon), WEIGHT_ALONE)
    ),
    "contrib.schedule_free": lambda: contrib.schedule_free(sgd(), RATE),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(sgd()),
}
REFUSED = {
    "optax.lookahead": "optax.lookahead keeps two sets of parameters",
    "contrib.sophia": "optax.contrib.sophia, by its default estimator, differentiates the loss forwards",
    "contrib.dpsgd": "needs the gradient of each example",
}


def public() -> dict[str, Any]:
    """Every function of optax that says it returns an optimizer, and that can be called by the table or with a
    learning rate; `measure_with_ema` gives no updates."""
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
# Those whose state or update is treated in a way of its own: moments like parameters for some and none for
# others, sums along each dim, a stack of gradients, the loss elsewhere, with its gradient and alone, its value.
KINDS = [
    "optax.partition",
    "optax.sm3",
    "optax.lbfgs",
    "optax.scale_by_backtracking_linesearch",
    "optax.polyak_sgd",
    *REFUSED,
]


def make(name: str) -> Any:
    if name in HOW:
        return HOW[name]()
    if "learning_rate" in inspect.signature(PUBLIC[name]).parameters:
        return PUBLIC[name](RATE)
    return then(PUBLIC[name]())


def state_of(optimizer: Any) -> Any:
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    layout = [("weight", PartitionSpec("tensor", "fsdp")), ("bias", PartitionSpec("tensor"))]
    shardings = rx.shard_rules(model, rx.make_mesh(tensor=2, fsdp=2), overrides=layout)
    return rx.init_state(eqx.filter_shard(model, shardings), optimizer, key=jax.random.key(1))


def test_all_are_in_the_table() -> None:
    """A newer optax may have more of them: then they are tried as what takes a learning rate, or nothing."""
    assert len(PUBLIC) > 80
    assert {*HOW, *REFUSED} <= {*PUBLIC}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [*KINDS, *in_long(*(name for name in PUBLIC if name not in KINDS))])
def test_it_trains_on_a_mesh_or_is_refused(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            state_of(make(name))
        return
    optimizer = make(name)
    state = state_of(optimizer)
    layout = jax.tree.map(lambda x: x.sharding, state)
    before = jax.device_get(state.params)
    state = fit(state, EXAMPLES, optimizer=optimizer, loss_fn=scalar_loss, batch_size=8, num_steps=3)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    changed = [path for path, x in state.params.items() if not np.array_equal(x, before[path])]
    assert bool(changed) == (name != "optax.set_to_zero")
    for x in jax.tree.leaves(state.params):
        assert np.isfinite(x).all()
        assert not x.is_fully_replicated
