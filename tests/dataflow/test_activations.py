"""Activations that the steps lay out: the numbers of one device, and the bytes that
were predicted."""

import math
import os
import pathlib
import sys
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import lstm, recurrent
from fit_helpers import printed
from helpers import Stepped, abstract, assert_close, filled, in_long, mesh_of, stepped
from jax.sharding import PartitionSpec as P
from quickstart import Transformer

import redco_eqx as rx
from redco_eqx._dataflow import engine, search, solution
from redco_eqx._sharding import rules

SGD = optax.sgd(0.1)
# Of small weights.
pytestmark = pytest.mark.filterwarnings("ignore:shard_rules. names and shapes do not")


@pytest.fixture(autouse=True)
def small_weights_over_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "FSDP_MIN_SIZE", 512)


@pytest.fixture(autouse=True)
def layouts_that_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are right, too. `test_left_to_the_compiler.py` tests when they are made."""
    monkeypatch.setattr(engine, "MOST_SENT", math.inf)


# float32: devices add the same numbers in another order. Gradients move parameters by
# little beside their size; norms, largest values and logits are sums themselves, and
# losses are means of many.
OF_PARAMETERS: dict[str, float] = {"rtol": 2e-5, "atol": 2e-6}
OF_SUMS: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
OF_LOGITS: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
OF_LOSSES: dict[str, float] = {"rtol": 1e-5}


def block(layer: Any, x: Any) -> Any:
    return x + jax.vmap(layer)(x)


def tokens(model: Any, x: Any, apply: Any = block) -> Any:
    """Residual MLPs over long rows: their tokens, and not their features, are best
    split."""
    for layer in model:
        x = apply(layer, x)
    return x


def scanned(stack: Any, x: Any) -> Any:
    arrays, static = eqx.partition(stack, eqx.is_array)
    body = jax.checkpoint(lambda x, own: (block(eqx.combine(own, static), x), None))
    return jax.lax.scan(body, x, arrays)[0]


def branching(model: Any, x: Any) -> Any:
    """Convolutions, a branch, a loop, a sort and a layer that is checkpointed."""
    inner = jax.vmap(model["inner"])
    x = jax.nn.relu(model["conv"](x.T)).T
    x = jax.lax.cond(x.mean() > 0, lambda x: jnp.tanh(x), lambda x: x * 2, x)
    x = jax.lax.fori_loop(0, 3, lambda i, x: x + 0.1 * inner(x), x)
    return jax.checkpoint(inner)(jnp.sort(x, axis=0))


def squares(apply: Any) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        out = jax.vmap(partial(apply, model))(batch)
        return (out**2).mean(), {"largest": out.max()}

    return loss_fn


def next_token(model: Any, batch: Any, key: Any) -> Any:
    logits = jax.vmap(model)(batch[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return rx.Mean(each.sum(), each.size)


# Programs that are odd, or that XLA's partitioner has wrong where the batch is split
# before or after a pad.


def in_place(layer: Any, x: Any) -> Any:
    total = jax.new_ref(jnp.zeros(()))
    total[...] = layer(x).sum()
    written = jax.new_ref(jnp.zeros(x.shape))
    written[...] = layer(x)
    return (written[...] ** 2).mean() + total[...] ** 2 / x.size


def no_steps(layer: Any, x: Any) -> Any:
    return (
        jax.lax.scan(lambda y, _: (layer(y), None), layer(x), None, length=0)[0] ** 2
    ).mean()


def branches(layer: Any, x: Any) -> Any:
    return (jax.lax.cond(x.sum() > 1e9, jnp.zeros_like, layer, layer(x)) ** 2).mean()


def shifted(x: Any, config: tuple[int, int, int]) -> Any:
    return jax.lax.pad(x, 0.0, [(0, 0, 0), config, (0, 0, 0)])


ODD: dict[str, Any] = {
    "in_place": in_place,
    "no_steps": no_steps,
    "branches": branches,
    "every_third_row": lambda layer, x: (
        jnp.tanh(layer(layer(x[:, 0])[1::3])) ** 2
    ).mean(),
    "every_fifth_token": lambda layer, x: (
        layer(x.reshape(128, 16))[3:100:5] ** 2
    ).mean(),
    "shifted_rows": lambda layer, x: (layer(shifted(layer(x), (-2, 2, 0))) ** 2).mean(),
    "spread_rows": lambda layer, x: (layer(shifted(layer(x), (-1, 3, 1))) ** 2).mean(),
    "diagonal": lambda layer, x: (jax.vmap(jnp.diagonal)(layer(x)) ** 2).mean(),
    "largest_so_far": lambda layer, x: jax.lax.cummax(layer(x), 0).mean(),
    "folded_rows": lambda layer, x: (
        layer(layer(x).reshape(2, 4, 16, 16)).mean(0) ** 2
    ).mean(),
}


def odd(model: Any, batch: Any, key: Any) -> Any:
    """All of them at once, each with an MLP of its own that reads the last dim of an
    array of any rank."""

    def layer_of(one: Any) -> Any:
        return lambda x: jax.vmap(one)(x.reshape(-1, 16)).reshape(x.shape)

    losses = {
        name: loss(layer_of(one), batch)
        for one, (name, loss) in zip(model, ODD.items())
    }
    return sum(losses.values()), losses


def mlp(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 16, 32, 1, key=key)


def mlps(number: int) -> Any:
    return lambda key: [mlp(key) for key in jax.random.split(key, number)]


def transformer(key: Any) -> Transformer:
    return Transformer(dim=32, num_heads=8, num_layers=1, key=key)


def conv_and_linear(key: Any) -> dict[str, Any]:
    return {
        "conv": eqx.nn.Conv1d(16, 16, 3, padding=1, key=key),
        "inner": eqx.nn.Linear(16, 16, key=key),
    }


RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(8, 16, 16)).astype(np.float32)
LONG = RNG.normal(size=(8, 256, 16)).astype(np.float32)
CASES: dict[str, Any] = {
    "tokens": (mlps(2), squares(tokens), LONG),
    "checkpointed": (
        mlps(2),
        squares(partial(tokens, apply=eqx.filter_checkpoint(block))),
        LONG,
    ),
    "scanned": (
        lambda key: eqx.filter_vmap(mlp)(jax.random.split(key, 3)),
        squares(scanned),
        LONG,
    ),
    "attention": (
        transformer,
        next_token,
        RNG.integers(0, 64, (8, 65)).astype(np.int32),
    ),
    "recurrent": (
        lstm(16, 32),
        squares(recurrent),
        RNG.normal(size=(8, 12, 16)).astype(np.float32),
    ),
    "branching": (conv_and_linear, squares(branching), ROWS),
    "odd": (mlps(len(ODD)), odd, ROWS),
}


def model_of(case: str) -> Any:
    return filled(abstract(CASES[case][0]), jnp.float32, 0)


def step_of(case: str, mesh: Any, loss_fn: Any, **options: Any) -> Stepped:
    model = model_of(case)
    batch = CASES[case][2]
    shardings = rx.shard_rules(model, mesh, loss_fn=loss_fn, batch=batch)
    return stepped(model, batch, mesh, loss_fn, SGD, shardings=shardings, **options)


@cache
def on(case: str, mesh: str) -> Stepped:
    """A step with activations that are laid out, or on one device."""
    loss_fn = CASES[case][1]
    return step_of(
        case, mesh_of(mesh), loss_fn if mesh == "one" else rx.split_activations(loss_fn)
    )


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        *(
            (case, "data2xtensor4")
            for case in ("tokens", "checkpointed", "scanned", "attention", "recurrent")
        ),
        *(("branching", "2x2x2"), ("attention", "2x2x2"), ("tokens", "tensor8")),
        *(("odd", "data2xtensor4"), ("odd", "2x2x2")),
        *in_long(
            ("recurrent", "2x2x2"),
            ("branching", "data2xtensor4"),
            ("recurrent", "tensor8"),
        ),
    ],
)
def test_the_numbers_are_those_of_one_device(case: str, mesh: str) -> None:
    expected, found = on(case, "one"), on(case, mesh)
    assert_close(found.state.params, expected.state.params, **OF_PARAMETERS)
    values = [
        {name: x.value for name, x in step.metrics.items()}
        for step in (found, expected)
    ]
    assert_close(*values, **OF_SUMS)


# The layout of the cell's parameters alone splits its gates, too, so that activations
# save only 0.18 beyond it.
@pytest.mark.parametrize(
    ("case", "mesh", "at_most"),
    [
        *(
            (case, "data2xtensor4", 0.2)
            for case in ("tokens", "checkpointed", "scanned")
        ),
        *(("attention", mesh, None) for mesh in ("data2xtensor4", "2x2x2")),
        *(
            ("recurrent", "data2xtensor4", 0.85),
            ("scanned", "2x2x2", 0.21),
            ("tokens", "2x2x2", 0.21),
        ),
    ],
)
def test_bytes_are_those_predicted_and_fewer(
    case: str, mesh: str, at_most: float | None
) -> None:
    make, loss_fn, batch = CASES[case]
    devices = mesh_of(mesh)
    marked = rx.split_activations(loss_fn)
    found = rx.explain(
        abstract(make), devices, loss_fn=marked, batch=batch
    ).communication
    split = rx.communication(on(case, mesh).compiled, devices).total.sent_bytes
    # Besides the loss and its gradient, a step sums the norm of the gradients, and the
    # metrics.
    assert found is not None
    # Where `tensor` and `fsdp` both split a table, XLA moves its parts, without split
    # activations, too.
    moved = 4 * 128 * 16 if (case, mesh) == ("attention", "2x2x2") else 0
    assert found.num_bytes_unmerged == pytest.approx(split - moved, rel=0.02, abs=200)
    explained = rx.explain(abstract(make), devices, loss_fn=loss_fn, batch=batch)
    assert explained.with_activations == found
    if at_most is not None:
        assert f"split_activations(loss_fn), {str(found).splitlines()[0]}" in str(
            explained
        )
        plain = rx.communication(
            step_of(case, devices, loss_fn).compiled, devices
        ).total.sent_bytes
        assert split <= at_most * plain


def test_the_gradient_of_a_weight_that_is_stored_split_is_not_gathered() -> None:
    """The weight itself and that of the other layer are, once."""
    mesh = mesh_of("data2xtensor4")
    _, loss_fn, batch = CASES["tokens"]
    model = model_of("tokens")
    split = rx.split_activations(loss_fn)
    overrides = [("0.layers.0.weight", P(("fsdp", "tensor")))]
    shardings = rx.shard_rules(
        model, mesh, loss_fn=split, batch=batch, overrides=overrides
    )
    step = stepped(model, batch, mesh, split, SGD, shardings=shardings)
    shapes = [
        x.shapes
        for x in rx.communication(step.compiled, mesh)
        if x.kind == "all-gather"
    ]
    assert shapes.count(("f32[32,16]",)) == 2


class Normed(eqx.Module):
    """Two spectral norms, whose states end whole."""

    up: eqx.nn.SpectralNorm[eqx.nn.Linear]
    down: eqx.nn.SpectralNorm[eqx.nn.Linear]

    def __init__(self, key: Any):
        keys = jax.random.split(key, 4)
        up = eqx.nn.Linear(64, 256, key=keys[0])
        down = eqx.nn.Linear(256, 64, key=keys[1])
        self.up = eqx.nn.SpectralNorm(up, "weight", key=keys[2])
        self.down = eqx.nn.SpectralNorm(down, "weight", key=keys[3])

    def __call__(self, x: Any, state: Any) -> Any:
        hidden, state = self.up(x, state)
        out, state = self.down(jax.nn.relu(hidden), state)
        return x + out, state


def test_weights_are_not_gathered_for_a_state_that_is_whole() -> None:
    def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
        model, state = pair
        apply = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))
        out, state = apply(batch, state)
        return jnp.mean(out**2), {}, state

    mesh = mesh_of("data2xtensor4")
    batch = np.ones((16, 64), np.float32)
    split = rx.split_activations(loss_fn)
    program: Any = {"loss_fn": split, "batch": batch}
    pair = rx.init_model(
        eqx.nn.make_with_state(Normed), mesh, key=jax.random.key(0), **program
    )
    predicted = rx.explain(pair, mesh, **program).communication
    assert predicted is not None
    state = rx.init_state(pair, SGD, key=jax.random.key(1))
    step = partial(
        rx.train_step, loss_fn=split, optimizer=SGD, shardings=state.shardings
    )
    compiled = rx.jit_step(step).lower(state, batch).compile()
    sent = rx.communication(compiled, mesh).total.sent_bytes
    # The new states are gathered: two vectors for each layer.
    states = 3 / 4 * 4 * 2 * (64 + 256)
    assert sent <= predicted.num_bytes_unmerged + states


def test_a_scalar_in_the_batch_and_a_callback_of_the_loss() -> None:
    model = model_of("tokens")
    batch = CASES["tokens"][2]
    seen = []
    found = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        x = jax.vmap(partial(tokens, model))(batch["rows"])
        jax.debug.callback(lambda value: seen.append(float(value)), x.mean())
        return (x**2).mean() * batch["scale"]

    for mesh, loss in (
        (mesh_of("one"), loss_fn),
        (mesh_of("data2xtensor4"), rx.split_activations(loss_fn)),
    ):
        shardings = rx.shard_rules(model, mesh)
        state = rx.init_state(eqx.filter_shard(model, shardings), key=jax.random.key(1))
        step = jax.jit(partial(rx.eval_step, loss_fn=loss, shardings=shardings))
        found.append(step(state, {"rows": batch, "scale": np.float32(2)})["loss"].value)
    assert_close(found[1], found[0], **OF_LOSSES)
    jax.effects_barrier()
    assert len(seen) > 1


def test_an_override_that_no_activation_can_follow_stands() -> None:
    mesh = mesh_of("data2xtensor4")
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))
    stack = abstract(lambda key: make(jax.random.split(key, 4)))

    def loss_fn(stack: Any, batch: Any, key: Any) -> Any:
        arrays, static = eqx.partition(
            stack, lambda x: x is not None and hasattr(x, "shape")
        )
        body = lambda x, layer: (x + jax.vmap(eqx.combine(layer, static))(x), None)  # noqa: E731
        return (jax.lax.scan(body, batch, arrays)[0] ** 2).mean()

    split, batch = rx.split_activations(loss_fn), np.ones((8, 16), np.float32)
    found = rx.explain(
        stack, mesh, overrides=[("weight", P("tensor"))], loss_fn=split, batch=batch
    )
    assert found.decisions["weight"].spec == P("tensor")
    assert found.communication is None
    state = rx.init_state(
        eqx.filter_shard(filled(stack, jnp.float32, 0), found.shardings),
        SGD,
        key=jax.random.key(1),
    )
    with pytest.warns(
        rx.errors.ShardingWarning, match="left to the compiler: .* cannot be split"
    ):
        jax.eval_shape(
            partial(rx.eval_step, loss_fn=split, shardings=found.shardings),
            state,
            batch,
        )


def test_microbatches_evaluations_and_predictions() -> None:
    mesh = mesh_of("data2xtensor4")
    _, loss_fn, batch = CASES["attention"]
    one = on("attention", "one").state
    split = rx.split_activations(loss_fn)
    state = step_of("attention", mesh, split, num_microbatches=2).state
    assert_close(state.params, one.params, **OF_PARAMETERS)

    def predict(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(model)(batch[:, :-1])

    shardings = rx.shard_rules(state.model, mesh, loss_fn=split, batch=batch)
    split_predict = rx.split_activations(predict)
    loss = jax.jit(partial(rx.eval_step, loss_fn=split, shardings=shardings))(
        state, batch
    )["loss"].value
    logits = jax.jit(
        partial(rx.predict_step, predict_fn=split_predict, shardings=shardings)
    )(state, batch)
    by_hand = eqx.filter_jit(
        lambda model: (
            next_token(model, batch, None).value,
            predict(model, batch, None),
        )
    )
    expected = by_hand(one.model)
    assert_close(loss, expected[0], **OF_LOSSES)
    assert_close(logits, expected[1], **OF_LOGITS)


def test_under_scan_and_vmap() -> None:
    """The step is a function like any other; `vmap` may be over an axis of the mesh."""
    mesh = mesh_of("data2xtensor4")
    _, loss_fn, batch = CASES["tokens"]
    model = model_of("tokens")
    two = np.stack([batch[:, :32], batch[:, 32:64]])
    results = []
    for where, loss in (
        (mesh_of("one"), loss_fn),
        (mesh, rx.split_activations(loss_fn)),
    ):
        shardings = rx.shard_rules(model, where, loss_fn=loss, batch=two[0])
        state = rx.init_state(
            eqx.filter_shard(model, shardings), SGD, key=jax.random.key(1)
        )
        step = partial(rx.train_step, loss_fn=loss, optimizer=SGD, shardings=shardings)
        axes = (None, "data")[: where.size]
        mapped = [
            jax.vmap(step, in_axes=(None, 0), spmd_axis_name=axis) for axis in axes
        ]

        @jax.jit
        def run(state: Any, two: Any, step: Any = step, mapped: Any = mapped) -> Any:
            each = [one(state, two)[0].params for one in mapped]
            return jax.lax.scan(step, state, two)[0].params, each[0], each[-1]

        results.append(run(state, two))
    assert_close(results[1], results[0], **OF_PARAMETERS)


PROGRAM = """
import jax; jax.config.update("jax_num_cpu_devices", 8)
import sys; sys.path.insert(0, sys.argv[1])
import test_activations as t, redco_eqx as rx, equinox as eqx
from functools import partial
from cases import explained
for name in ("moe", "llama_gqa_refused"):
    print(explained(name).decisions)
mesh, (_, loss_fn, batch) = rx.make_mesh(tensor=4), t.CASES["attention"]
model = t.model_of("attention")
loss_fn = rx.split_activations(loss_fn)
shardings = rx.shard_rules(model, mesh, loss_fn=loss_fn, batch=batch)
state = rx.init_state(eqx.filter_shard(model, shardings), t.SGD, key=jax.random.key(1))
step = partial(rx.train_step, loss_fn=loss_fn, optimizer=t.SGD, shardings=shardings)
print(jax.jit(step).lower(state, batch).as_text())
"""


def test_every_process_decides_the_same() -> None:
    """Layouts that differ between hosts would be a deadlock: hash seeds change the
    order of sets."""
    here = pathlib.Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), *sys.path])
    texts = [
        printed(PROGRAM, here, PYTHONHASHSEED=seed, PYTHONPATH=paths)
        for seed in ("1", "77")
    ]
    assert "sharding_constraint" in texts[0]
    assert "P('tensor'" in texts[0]
    assert texts[0] == texts[1]


def chain(number: int) -> Any:
    return lambda key: eqx.nn.MLP(64, 64, 64, number, key=key)


@pytest.mark.parametrize(
    ("make", "apply", "batch"),
    [
        (chain, lambda model, x: model(x), np.ones((64, 64))),
        (mlps, tokens, CASES["tokens"][2]),
        (mlps, lambda model, x: sum(jax.vmap(branch)(x) for branch in model), ROWS),
    ],
    ids=["chain", "residual", "branches"],
)
def test_layers_that_are_alike_are_decided_once(
    make: Any, apply: Any, batch: Any, monkeypatch: Any
) -> None:
    """The integer program does not grow with the number of layers, and the layout costs
    what it would cost if each layer were decided alone: the layers of an MLP still
    alternate."""
    loss_fn = rx.split_activations(squares(apply))
    spy = mock.Mock(wraps=search.cheapest)
    sent = []
    monkeypatch.setattr(solution, "cheapest", spy)
    for n, apart in ((17, 4), (21, 4), (17, 100)):
        monkeypatch.setattr(solution, "NUM_APART", apart)
        found: Any = rx.explain(
            abstract(make(n)), mesh_of("data2xtensor4"), loss_fn=loss_fn, batch=batch
        )
        sent.append(found.communication.num_bytes)
    sizes = [len(call.args[0]) for call in spy.call_args_list]
    assert sizes[0] == sizes[1] < sizes[2]
    assert sent[0] == pytest.approx(sent[2], rel=1e-3)


def test_what_was_decided_stays() -> None:
    """The layout of the parameters, with an override and without."""
    mesh = mesh_of("data2xtensor4")
    make, loss_fn, batch = CASES["tokens"]
    model = abstract(make)
    split = rx.split_activations(loss_fn)
    path = "0.layers.0.weight"
    for overrides in ((), [(path, P(None, "tensor"))]):
        plain = rx.explain(
            model, mesh, loss_fn=loss_fn, batch=batch, overrides=overrides
        )
        found = rx.explain(model, mesh, loss_fn=split, batch=batch, overrides=overrides)
        # The parameters have one layout, with the mark and without. Only reasons say
        # that their bytes are those of the plain loss.
        before = " before activations are split"
        decisions = {
            path: replace(d, reason=d.reason.replace(before, ""))
            for path, d in found.decisions.items()
        }
        assert decisions == plain.decisions
        assert found.communication == plain.with_activations is not None
    assert found.decisions[path].spec == P(None, "tensor")


def test_without_a_tensor_axis_or_a_layout_the_program_is_the_same() -> None:
    make, loss_fn, batch = CASES["tokens"]
    for mesh, is_given in ((mesh_of("data8"), True), (mesh_of("data2xtensor4"), False)):
        model = rx.init_model(make, mesh, key=jax.random.key(0))
        shardings = rx.shard_rules(model, mesh) if is_given else None
        state = rx.init_state(model, SGD, key=jax.random.key(1))
        step = partial(rx.train_step, optimizer=SGD, shardings=shardings)
        losses = (loss_fn, rx.split_activations(loss_fn))
        plain, split = (
            str(jax.make_jaxpr(partial(step, loss_fn=loss))(state, batch))
            for loss in losses
        )
        assert plain == split


def test_a_search_without_an_answer_leaves_it_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def solve(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no layout fits: limit reached")

    monkeypatch.setattr(solution, "solve", solve)
    mesh = mesh_of("data2xtensor4")
    _, loss_fn, _ = CASES["tokens"]
    with pytest.warns(
        rx.errors.ShardingWarning, match="left to the compiler: no layout fits"
    ):
        found = step_of("tokens", mesh, rx.split_activations(loss_fn))
    assert_close(found.state.params, on("tokens", "one").state.params, **OF_PARAMETERS)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"split_activations: function is called as .*\(model, batch, key\)",
    ):
        rx.split_activations(lambda model: 0.0)
