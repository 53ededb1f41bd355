"""`shard_rules`, `explain` and `init_model` with a program: what they take, and what
they refuse."""

import functools
import warnings
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import MESH, PROGRAMS, loss_of
from fit_helpers import assert_identical
from fit_helpers import scalar_loss as squared
from helpers import abstract, abstract_mesh, decide
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.operations import RULES


def mlp(width=64):
    return abstract(lambda key: eqx.nn.MLP(32, 32, width, 1, key=key))


def rows(size=8, width=32):
    x = jax.ShapeDtypeStruct((size, width), jnp.float32)
    return {"x": x, "y": x}


def test_fsdp_splits_the_largest_dim_that_is_left():
    mesh = helpers.abstract_mesh(data=1, fsdp=2, tensor=4)
    result = rx.shard_rules(mlp(256), mesh, loss_fn=squared, batch=rows())
    assert result.layers[0].weight.spec == P("tensor", "fsdp")
    assert result.layers[1].weight.spec == P("fsdp", "tensor")


def test_fsdp_splits_a_dim_without_pieces_if_it_can():
    """Query, key and value are fused along the longer dim: fourths of it would cross
    borders, thirds do not."""

    def loss(model, batch, key):
        q, k, v = jnp.moveaxis((batch["x"] @ model["qkv"].T).reshape(-1, 3, 64), 1, 0)
        return jnp.mean(jax.nn.softmax(q @ k.T) @ v)

    model = {"qkv": jax.ShapeDtypeStruct((192, 96), jnp.float32)}
    batch = rows(24, 96)
    for fsdp, spec in ((4, P(None, "fsdp")), (3, P("fsdp"))):
        mesh = helpers.abstract_mesh(fsdp=fsdp)
        assert (
            rx.shard_rules(model, mesh, loss_fn=loss, batch=batch)["qkv"].spec == spec
        )
        # Names do not tell of pieces.
        assert rx.shard_rules(model, mesh)["qkv"].spec == P("fsdp")


@eqx.nn.make_with_state
def with_state(key):
    norm = eqx.nn.BatchNorm(64, "batch", mode="ema")
    return {
        "up": eqx.nn.Linear(32, 64, key=key),
        "norm": norm,
        "down": eqx.nn.Linear(64, 32, key=key),
    }


def stateful(pair, batch, key):
    model, state = pair
    norm = jax.vmap(
        model["norm"], axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    x, state = norm(jax.vmap(model["up"])(batch["x"]), state)
    return (
        jnp.mean((jax.vmap(model["down"])(jax.nn.relu(x)) - batch["y"]) ** 2),
        {},
        state,
    )


def test_a_model_with_state_is_a_pair_and_its_state_is_whole():
    decisions = decide(abstract(with_state), MESH, (), stateful, rows())
    assert decisions["0.up.weight"].spec == P("tensor")
    assert decisions["0.down.weight"].spec == P(None, "tensor")
    state = [d for path, d in decisions.items() if path.startswith("1.")]
    assert state
    assert all(d.spec == P() and d.role == "buffer" for d in state)
    mesh = rx.make_mesh(tensor=4)
    overrides = [("up.bias", P())]
    program = {"loss_fn": stateful, "batch": rows()}
    model, _ = rx.init_model(
        with_state, mesh, key=jax.random.key(0), overrides=overrides, **program
    )
    weight, bias = jax.tree.leaves(model["up"])
    assert weight.sharding.spec == P("tensor")
    assert bias.sharding.is_fully_replicated


def test_a_predict_function_and_a_loss_with_metrics_will_do():
    def predict(model, batch, key):
        return jax.vmap(model)(batch["x"])

    def undifferentiable(model, batch, key):  # which is no matter for a prediction
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) > 0, lambda x: x - 1, predict(model, batch, key)
        )

    def with_metrics(model, batch, key):
        loss = squared(model, batch, key)
        return rx.Mean(loss, jnp.ones(())), {"loss": loss}

    for function in (squared, predict, undifferentiable, with_metrics):
        assert rx.shard_rules(
            mlp(), MESH, loss_fn=function, batch=rows()
        ) == rx.shard_rules(mlp(), MESH)


def test_a_program_that_cannot_be_read_gets_the_layout_by_paths_and_trains(monkeypatch):
    def unread(*arguments, **options):
        raise KeyError("a parameter of another JAX")

    mesh, optimizer = rx.make_mesh(tensor=4), optax.sgd(0.1)
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    by_paths = rx.shard_rules(model, mesh)
    monkeypatch.setattr("redco_eqx._dataflow.engine.choose_layout", unread)
    with pytest.warns(
        rx.errors.ShardingWarning, match=r"could not be read \(KeyError: .* with JAX \d"
    ):
        assert rx.shard_rules(model, mesh, loss_fn=squared, batch=rows()) == by_paths
    state = rx.init_state(
        eqx.filter_shard(model, by_paths), optimizer, key=jax.random.key(1)
    )
    split = rx.split_activations(squared)
    monkeypatch.setattr("redco_eqx._step.constraints.weigh", unread)
    batch = {name: jnp.ones(x.shape) for name, x in rows().items()}
    states = []
    for loss_fn in (squared, split):
        step = functools.partial(
            rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=by_paths
        )
        with warnings.catch_warnings(record=True) as caught:
            states.append(jax.jit(step)(state, batch)[0])
        assert any("left to the compiler" in str(x.message) for x in caught) == (
            loss_fn is split
        )
    assert_identical(states[0].params, states[1].params)


def python_branch(model, batch, key):
    return squared(model, batch, key) if batch["x"].sum() > 0 else 0.0


def numpy_call(model, batch, key):
    return np.mean(np.asarray(jax.vmap(model)(batch["x"])))


def undifferentiable(model, batch, key):
    y = jax.vmap(model)(batch["x"])
    return jnp.sum(jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x - 1, y))


REFUSED = [
    pytest.param(
        squared,
        rows(width=33),
        "could not be traced: TypeError.*float32.8, 33.*path rules decide",
        id="of_another_width",
    ),
    pytest.param(
        squared,
        {"x": rows()["x"]},
        "could not be traced: KeyError: 'y'.*path rules decide",
        id="missing_entry",
    ),
    pytest.param(
        python_branch,
        rows(),
        "traced: TracerBoolConversionError.*no Python branches.*path rules",
        id="python_branch",
    ),
    pytest.param(
        numpy_call,
        rows(),
        "traced: TracerArrayConversionError.*no NumPy functions.*path rules",
        id="numpy_call",
    ),
    pytest.param(
        undifferentiable,
        rows(),
        "could not be traced: ValueError: Reverse-mode.*path rules",
        id="undifferentiable",
    ),
    pytest.param(
        squared,
        {"x": 1.0},
        "batch has no arrays with a leading dim",
        id="batch_of_numbers",
    ),
    pytest.param(
        squared,
        {**rows(), "y": rows(4)["y"]},
        "differ in their leading dim",
        id="unequal_rows",
    ),
    pytest.param(squared, None, "loss_fn is given, but not batch", id="without_batch"),
    pytest.param(None, rows(), "batch is given, but not loss_fn", id="without_loss_fn"),
]


@pytest.mark.parametrize("function", ["shard_rules", "explain"])
@pytest.mark.parametrize(("loss_fn", "batch", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_and_the_path_rules_are_offered(
    loss_fn, batch, message, function
):
    with pytest.raises(ValueError, match=f"(?s)shard_rules: .*{message}"):
        getattr(rx, function)(mlp(), MESH, loss_fn=loss_fn, batch=batch)


# What is added up along a dim has to be whole: alone it would not be split.
def whole(model, batch, key):
    x = jax.vmap(model)(batch["x"])
    for _ in range(4):
        x = jnp.cumsum(x, axis=-1)
    return jnp.mean(x**2)


def test_a_weight_that_has_to_be_whole_says_why_and_is_stored_in_parts_if_it_is_large():
    both = helpers.abstract_mesh(data=1, fsdp=2, tensor=4)
    for mesh, shape, spec in (
        (MESH, (4096, 7), P()),
        (both, (2**15, 63), P(("fsdp", "tensor"))),
    ):
        model = abstract(
            lambda key, sizes=shape[::-1]: eqx.nn.Linear(
                *sizes, use_bias=False, key=key
            )
        )
        batch = {"x": jax.ShapeDtypeStruct((4096, shape[1]), jnp.float32)}
        found = rx.explain(model, mesh, loss_fn=whole, batch=batch)
        assert "cumsum at" in found.decisions["weight"].reason
        assert found.decisions["weight"].spec == spec
        assert found.bytes_per_device == 4 * shape[0] * shape[1] // (8 if spec else 1)


def test_explain_says_what_is_sent_and_what_to_change():
    def loss(model, batch, key):
        gate, up = jnp.split(jax.vmap(model["first"])(batch["x"]), 2, axis=-1)
        return jnp.mean(
            (jax.vmap(model["second"])(jax.nn.silu(gate) * up) - batch["y"]) ** 2
        )

    layers = {"first": (256, 512), "second": (256, 32)}
    model = abstract(
        lambda key: {
            name: eqx.nn.Linear(*sizes, key=key) for name, sizes in layers.items()
        }
    )
    program = {"loss_fn": loss, "batch": {"x": rows(width=256)["x"], "y": rows()["y"]}}
    explanation = rx.explain(model, MESH, **program)
    sent = explanation.communication
    assert sent is not None
    assert 0 < sent.at_least <= sent.num_bytes <= sent.num_bytes_unmerged
    of_first = "holds 2 pieces, whose borders an even split crosses"
    assert of_first in explanation.decisions["first.weight"].reason
    text = str(explanation)
    assert "sent by a device in a step" in text
    assert "whole operand of split at test_interface.py" in text  # in a reason
    # An override is followed: nothing is split, and nothing is sent but gradients.
    whole = rx.explain(model, MESH, overrides=[("*", P())], **program)
    assert whole.communication is not None
    assert whole.communication.num_bytes == whole.bytes_per_device + 4  # and the loss
    by_paths = rx.explain(model, MESH)
    assert by_paths.communication is None
    assert by_paths.with_activations is None
    marked = {**program, "loss_fn": rx.split_activations(program["loss_fn"])}
    assert rx.explain(model, MESH, **marked).with_activations is None
    nothing = rx.explain(
        eqx.nn.Identity(),
        MESH,
        loss_fn=lambda m, b, key: m(b).mean(),
        batch=rows()["x"],
    )
    assert "split_activations" not in str(nothing)


def test_what_is_not_understood_is_named():
    def through_host(model, batch, key):
        y = jax.vmap(model)(batch["x"])
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    explanation = rx.explain(mlp(), MESH, loss_fn=through_host, batch=rows())
    assert explanation.communication is not None
    assert [text.partition(" ")[0] for text in explanation.communication.opaque] == [
        "pure_callback"
    ]
    assert "test_interface.py" in explanation.communication.opaque[0]


def test_an_operation_whose_rule_fails_is_not_understood(monkeypatch):
    """As if a newer JAX had renamed a parameter of it."""
    monkeypatch.setitem(
        RULES, "dot_general", lambda walk, operands: walk.params["renamed"]
    )
    explanation = rx.explain(mlp(), MESH, loss_fn=squared, batch=rows())
    assert explanation.communication is not None
    assert {text.partition(" ")[0] for text in explanation.communication.opaque} == {
        "dot_general"
    }


def test_complex_parameters_are_trained():
    def loss(model, batch, key):
        return jnp.mean(
            ((jnp.fft.fft(batch["x"]) * model["decay"]).real @ model["mix"]) ** 2
        )

    model = abstract(
        lambda key: {"decay": jnp.ones(32, jnp.complex64), "mix": jnp.ones((32, 32))}
    )
    assert decide(model, MESH, (), loss, rows())["decay"].role != "buffer"


@pytest.mark.parametrize("fsdp", [1, 2])
def test_last_line_says_what_whole_arrays_would_send_and_hold(fsdp):
    """A perceptron on data 2 or fsdp 2, and tensor 4."""
    mesh = abstract_mesh(data=2 // fsdp, fsdp=fsdp, tensor=4)
    num_rows, dim, hidden = 8, 64, 128
    model = {
        "up": jax.ShapeDtypeStruct((hidden, dim), jnp.float32),
        "down": jax.ShapeDtypeStruct((dim, hidden), jnp.float32),
    }

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        def apply(x: Any) -> Any:
            return model["down"] @ jnp.tanh(model["up"] @ x)

        return jnp.mean(jax.vmap(apply)(batch) ** 2)

    found = rx.explain(
        model,
        mesh,
        loss_fn=loss_fn,
        batch=jax.ShapeDtypeStruct((num_rows, dim), jnp.float32),
    )
    all_bytes = 4 * 2 * dim * hidden
    if fsdp == 1:
        # By the ring, each of two devices sends all of the gradients: half as they are,
        # half as sums.
        sent_whole = all_bytes
    else:
        # A half of `up` is gathered for the loss; of `down`, also for the gradient of
        # the hidden layer. A half of all gradients is scattered.
        sent_whole = all_bytes / 4 + all_bytes / 2 + all_bytes / 2
    # The sum of the hidden layer, for a half of the rows, over four devices.
    sums = 2 * 3 / 4 * 4 * num_rows / 2 * dim
    sent_here = sent_whole / 4 + sums
    last = str(found).splitlines()[-1]
    assert last == (
        "with all arrays whole over tensor, a device would send "
        f"{size_text(sent_whole)} in a step (here {size_text(sent_here)}) and hold "
        f"{size_text(all_bytes / fsdp)} of them "
        f"(here {size_text(all_bytes / fsdp / 4)})"
    )


def test_no_line_about_whole_arrays_where_tensor_splits_none():
    entry = PROGRAMS["gpt2"]
    for mesh in (abstract_mesh(data=8), abstract_mesh(fsdp=8)):
        found = rx.explain(
            abstract(entry.make), mesh, loss_fn=loss_of(entry), batch=entry.inputs(8)
        )
        assert "whole over tensor" not in str(found)
    by_names = rx.explain(abstract(entry.make), MESH)
    assert "whole over tensor" not in str(by_names)
