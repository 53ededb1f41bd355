"""Mistakes of a first hour, and what the message of each must name.

Run as a program it makes them all, as a user does (nothing checks annotations there), and prints what came of
each as JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fit_helpers import BODY, STEP, Compilations, collate, make_examples
from jax.sharding import PartitionSpec

import redco_eqx as rx

jax.config.update("jax_num_cpu_devices", 8)
KEY = jax.random.key(0)
EXAMPLES = make_examples(16)
ADAM = optax.adam(1e-2)
MODEL = eqx.nn.MLP(2, 2, 4, 1, key=KEY)
MESH = rx.make_mesh(data=1)
STATE = rx.init_state(MODEL, ADAM, key=KEY)
BATCH = collate(EXAMPLES[:4])


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


def fit(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    right = {"collate_fn": collate, "loss_fn": loss_fn, "optimizer": ADAM, "batch_size": 4, "num_steps": 2}
    return rx.fit(state, examples, donate=False, **{**right, **changed})


def evaluate(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    return rx.evaluate(
        state, examples, **{"collate_fn": collate, "loss_fn": loss_fn, "batch_size": 4, **changed}
    )


def predict(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    return rx.predict(
        state, examples, **{"collate_fn": collate, "predict_fn": predict_fn, "batch_size": 4, **changed}
    )


def step(state: Any = STATE, batch: Any = BATCH, **changed: Any) -> Any:
    return rx.train_step(state, batch, **{"loss_fn": loss_fn, "optimizer": ADAM, **changed})


def returning(output: Callable[[Any], Any]) -> Any:
    return lambda model, batch, key: output(loss_fn(model, batch, key))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(2, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")


class Table:
    """As much of a pandas DataFrame as the library sees."""

    iloc = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)


def generator() -> Any:
    yield from EXAMPLES


def explicit() -> Any:
    return jax.make_mesh((8,), ("data",))


def renamed() -> Any:
    return jax.make_mesh((2, 4), ("dp", "tp"))


# mistake, what is called, the exception, and what its message names
Mistake = tuple[str, Callable[[], Any], type[Exception], list[str]]
MISTAKES: list[Mistake] = [
    # A thing in another's place
    ("fit(model)", lambda: fit(MODEL), TypeError, ["fit: state", "MLP", "init_state(model, optimizer"]),
    ("evaluate(model)", lambda: evaluate(MODEL), TypeError, ["evaluate: state", "MLP", "init_state"]),
    ("predict(model)", lambda: predict(MODEL), TypeError, ["predict: state", "MLP", "init_state"]),
    ("train_step(model)", lambda: step(MODEL), TypeError, ["train_step: state", "MLP", "init_state"]),
    (
        "jit_step()(model)",
        lambda: rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=ADAM))(MODEL, BATCH),  # pyright: ignore
        TypeError,
        ["first argument", "MLP", "init_state"],
    ),
    (
        "eval_step(model)",
        lambda: rx.eval_step(MODEL, BATCH, loss_fn=loss_fn),  # pyright: ignore
        TypeError,
        ["eval_step: state", "MLP"],
    ),
    (
        "Evaluation()(model)",
        lambda: rx.Evaluation(EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4)(MODEL),  # pyright: ignore
        TypeError,
        ["Evaluation: state", "MLP", "init_state"],
    ),
    ("state and examples swapped", lambda: fit(EXAMPLES, STATE), TypeError, ["list", "state comes first"]),
    ("examples a state", lambda: fit(STATE, STATE), TypeError, ["train_examples", "TrainState"]),
    ("the pair of train_step", lambda: fit(step()), TypeError, ["tuple", "(state, metrics)"]),
    ("a batch in place of a state", lambda: step(BATCH, STATE), TypeError, ["train_step: state", "dict"]),
    (
        "init_model(model)",
        lambda: rx.init_model(MODEL, MESH, key=KEY),
        TypeError,
        ["make_model", "MLP", "lambda"],
    ),
    ("init_model(no key)", lambda: rx.init_model(lambda: MODEL, MESH, key=KEY), TypeError, ["make_model(key)"]),  # pyright: ignore
    ("init_model(class)", lambda: rx.init_model(eqx.nn.MLP, MESH, key=KEY), TypeError, ["make_model(key)"]),  # pyright: ignore
    ("init_model(key 0)", lambda: rx.init_model(Normed, MESH, key=0), TypeError, ["key", "jax.random.key(0)"]),  # pyright: ignore
    ("init_model(mesh 8)", lambda: rx.init_model(Normed, 8, key=KEY), TypeError, ["mesh", "int", "make_mesh"]),  # pyright: ignore
    (
        "init_state(state)",
        lambda: rx.init_state(STATE, ADAM, key=KEY),
        TypeError,
        ["TrainState", "state.model"],
    ),
    (
        "init_state(class)",
        lambda: rx.init_state(eqx.nn.MLP, ADAM, key=KEY),
        TypeError,
        ["class MLP", "MLP(..."],
    ),
    ("init_state(model, key)", lambda: rx.init_state(MODEL, KEY, key=KEY), TypeError, ["optimizer", "adam"]),  # pyright: ignore
    ("key=0", lambda: rx.init_state(MODEL, ADAM, key=0), TypeError, ["key", "0 (int)", "jax.random.key(0)"]),  # pyright: ignore
    (
        "many keys",
        lambda: rx.init_state(MODEL, key=jax.random.split(KEY)),
        ValueError,
        ["key", "(2,)", "keys[0]"],
    ),
    ("explain(state)", lambda: rx.explain(STATE, MESH), TypeError, ["TrainState", "state.model"]),
    ("shard_rules(state)", lambda: rx.shard_rules(STATE, MESH), TypeError, ["TrainState", "state.model"]),
    ("shard_rules(class)", lambda: rx.shard_rules(eqx.nn.MLP, MESH), TypeError, ["class MLP", "instance"]),
    ("mesh and model swapped", lambda: rx.shard_rules(MESH, MODEL), TypeError, ["mesh", "MLP", "model comes"]),  # pyright: ignore
    ("explain(mesh 8)", lambda: rx.explain(MODEL, 8), TypeError, ["mesh", "int", "make_mesh"]),  # pyright: ignore
    # Optimizers
    ("optax.adam uncalled", lambda: rx.init_state(MODEL, optax.adam, key=KEY), TypeError, ["optax.adam(1e-3)"]),  # pyright: ignore
    ("fit(optax.adam)", lambda: fit(optimizer=optax.adam), TypeError, ["fit", "optimizer", "optax.adam(1e-3)"]),
    ("a rate for an optimizer", lambda: fit(optimizer=1e-3), TypeError, ["optimizer", "float", "optax.adam"]),
    ("no optimizer", lambda: fit(optimizer=None), TypeError, ["optimizer", "NoneType", "optax.adam(1e-3)"]),
    ("another optimizer", lambda: fit(optimizer=optax.sgd(1.0)), ValueError, ["opt_state.0", "init_state"]),
    (
        "a state for evaluation",
        lambda: fit(rx.init_state(MODEL, key=KEY)),
        ValueError,
        ["opt_state", "nothing", "init_state(model, optimizer, key=...)"],
    ),
    # Numbers
    ("batch_size=16.0", lambda: fit(batch_size=16.0), TypeError, ["fit: batch_size=16.0", "whole number"]),
    ("batch_size None", lambda: fit(batch_size=None), TypeError, ["fit: batch_size=None", "whole number"]),
    (
        "evaluate(batch_size=4.0)",
        lambda: evaluate(batch_size=4.0),
        TypeError,
        ["batch_size=4.0", "whole number"],
    ),
    ("predict(batch_size='4')", lambda: predict(batch_size="4"), TypeError, ["batch_size='4'", "whole number"]),
    (
        "num_epochs=1.5",
        lambda: fit(num_steps=None, num_epochs=1.5),
        TypeError,
        ["fit: num_epochs=1.5", "whole number"],
    ),
    ("num_steps='2'", lambda: fit(num_steps="2"), TypeError, ["fit: num_steps='2'", "whole number"]),
    ("num_steps True", lambda: fit(num_steps=True), TypeError, ["fit: num_steps=True", "whole number"]),
    ("log_every=2.5", lambda: fit(log_every=2.5), TypeError, ["fit: log_every=2.5", "whole number"]),
    (
        "2.0 microbatches",
        lambda: fit(num_microbatches=2.0),
        TypeError,
        ["num_microbatches=2.0", "whole number"],
    ),
    (
        "every 1.5 steps",
        lambda: rx.Evaluation(EXAMPLES, every_steps=1.5),  # pyright: ignore
        TypeError,
        ["Evaluation: every_steps=1.5", "whole number"],
    ),
    ("make_mesh(tensor=2.0)", lambda: rx.make_mesh(tensor=2.0), TypeError, ["tensor=2.0", "whole number"]),  # pyright: ignore
    ("make_mesh(tensor=16)", lambda: rx.make_mesh(tensor=16), ValueError, ["tensor=16", "there are 8 (cpu)"]),
    # Layouts
    (
        "overrides a dict",
        lambda: rx.explain(MODEL, MESH, overrides={"layers.0.weight": PartitionSpec()}),  # pyright: ignore
        TypeError,
        ["overrides", "[(pattern, PartitionSpec), ...]", "list(overrides.items())"],
    ),
    (
        "one override alone",
        lambda: rx.shard_rules(MODEL, MESH, overrides=("layers.0.weight", PartitionSpec())),  # pyright: ignore
        TypeError,
        ["overrides", "[(pattern, PartitionSpec), ...]"],
    ),
    (
        "an override's spec a tuple",
        lambda: rx.shard_rules(MODEL, MESH, overrides=[("layers.0.weight", ("tensor",))]),  # pyright: ignore
        TypeError,
        ["overrides", "('tensor',)", 'PartitionSpec("tensor")'],
    ),
    (
        "explicit axes",
        lambda: rx.explain(MODEL, explicit()),
        ValueError,
        ["('data',)", "AxisType.Auto", "make_mesh(mesh=mesh)"],
    ),
    (
        "axes of other names",
        lambda: rx.explain(MODEL, renamed()),
        ValueError,
        ["('dp', 'tp')", 'make_mesh(mesh=mesh, names=("data", "tensor"))'],
    ),
    # Functions
    ("no loss_fn", lambda: fit(loss_fn=None), TypeError, ["fit: loss_fn", "(model, batch, key)", "None"]),
    ("a called loss_fn", lambda: fit(loss_fn=0.5), TypeError, ["fit: loss_fn", "(model, batch, key)", "0.5"]),
    (
        "a loss_fn without key",
        lambda: fit(loss_fn=lambda model, batch: 0.0),
        TypeError,
        ["loss_fn(model, batch, key)", "takes (model, batch)"],
    ),
    (
        "no collate_fn",
        lambda: fit(collate_fn=None),
        TypeError,
        ["fit: collate_fn", "collate_fn(examples)", "None"],
    ),
    (
        "collate_fn of two",
        lambda: fit(collate_fn=lambda a, b: a),
        TypeError,
        ["collate_fn(examples)", "(a, b)"],
    ),
    (
        "a loss of None",
        lambda: step(loss_fn=returning(lambda x: None)),
        TypeError,
        ["the loss", "None", "return"],
    ),
    ("fit: a loss of None", lambda: fit(loss_fn=returning(lambda x: None)), TypeError, ["the loss", "None"]),
    (
        "a nested metric",
        lambda: fit(loss_fn=returning(lambda x: (x, {"a": {"b": x}}))),
        TypeError,
        ["the metric 'a'", "'b'", '{"group/name": value}'],
    ),
    (
        "a metric of text",
        lambda: fit(loss_fn=returning(lambda x: (x, {"a": "high"}))),
        TypeError,
        ["the metric 'a'", "'high'", "scalar"],
    ),
    (
        "a list of losses",
        lambda: fit(loss_fn=returning(lambda x: [x, x])),
        TypeError,
        ["the loss", "list", "scalar"],
    ),
    ("predict_fn without key", lambda: predict(predict_fn=lambda m, b: b), TypeError, ["predict_fn", "(m, b)"]),
    (
        "evaluation's metric_fn of one",
        lambda: rx.Evaluation(EXAMPLES, predict_fn=predict_fn, metric_fn=lambda predictions: {}),  # pyright: ignore
        TypeError,
        ["metric_fn(examples, predictions)", "takes (predictions)"],
    ),
    (
        "output_fn of one",
        lambda: rx.Evaluation(EXAMPLES, predict_fn=predict_fn, output_fn=lambda prediction: 1),  # pyright: ignore
        TypeError,
        ["output_fn(example, prediction)", "takes (prediction)"],
    ),
    ("loggers=print", lambda: fit(loggers=print), TypeError, ["loggers", "loggers=[logger]"]),
    ("loggers='log'", lambda: fit(loggers="log"), TypeError, ["loggers", "str", "loggers=[logger]"]),
    (
        "a logger of one",
        lambda: fit(loggers=[lambda row: 0]),
        TypeError,
        ["a logger(step, row)", "takes (row)"],
    ),
    ("a hook of one", lambda: fit(hook=lambda state: 0), TypeError, ["hook(run, row, state)", "takes (state)"]),
    (
        "evaluation=examples",
        lambda: fit(evaluation=EXAMPLES),
        TypeError,
        ["evaluation", "rx.Evaluation(examples)"],
    ),
    ("checkpoints=True", lambda: fit(checkpoints=True), TypeError, ["checkpoints", "bool", "directory"]),
    # Examples
    ("a DataFrame", lambda: fit(STATE, Table()), TypeError, ["train_examples", 'to_dict("records")']),
    ("evaluate(DataFrame)", lambda: evaluate(STATE, Table()), TypeError, ["examples", 'to_dict("records")']),
    ("a generator function", lambda: fit(STATE, generator), TypeError, ["train_examples(epoch)", "takes ()"]),
    (
        "a model for examples",
        lambda: fit(STATE, MODEL),
        TypeError,
        ["train_examples", "MLP", "state comes first"],
    ),
    # Models
    (
        "a BatchNorm model without its State",
        lambda: rx.init_state(eqx.nn.make_with_state(Normed)(KEY)[0], ADAM, key=KEY),
        ValueError,
        ["norm.", "eqx.nn.State", "make_with_state", "(model, model_state)"],
    ),
    (
        "a BatchNorm model that was made plainly",
        lambda: rx.init_state(Normed(KEY), ADAM, key=KEY),
        ValueError,
        ["norm.", "eqx.nn.State", "make_with_state"],
    ),
    (
        "a loss of a pair without the new State",
        lambda: rx.train_step(
            rx.init_state(eqx.nn.make_with_state(Normed)(KEY), ADAM, key=KEY),
            BATCH,
            loss_fn=lambda model, batch, key: jnp.zeros(()),
            optimizer=ADAM,
        ),
        ValueError,
        ["(loss, metrics, new_state)"],
    ),
    (
        "a NumPy model",
        lambda: rx.init_state({"w": np.ones(2, np.float32)}, ADAM, key=KEY),
        ValueError,
        ["trainable", "Floating JAX arrays"],
    ),
]


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What came of a mistake: the exception, its message, and whether a step was compiled before."""
    with Compilations() as compilations:
        try:
            call()
        except Exception as error:
            found = {"exception": type(error).__name__, "message": str(error)}
        else:
            found = {"exception": "none", "message": ""}
    return {**found, "compiled": bool({BODY, STEP} & set(compilations.names))}


if __name__ == "__main__":
    json.dump({name: outcome(call) for name, call, *_ in MISTAKES}, sys.stdout)
