"""Mistakes of a first hour, and what the message of each must name.

Run as a program it makes them all, as a user does (nothing checks annotations there), and prints what came of
each as JSON.
"""

import json
import pathlib
import sys
import tempfile
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
from redco_eqx import models

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
    state = jax.tree.map(jnp.copy, state) if isinstance(state, rx.TrainState) else state
    return rx.fit(state, examples, **{**right, **changed})[0]


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


class Block(eqx.Module):
    linear: eqx.nn.Linear
    rate: float

    def __init__(self, key: Any):
        self.linear, self.rate = eqx.nn.Linear(2, 2, key=key), 0.5

    def __call__(self, x: Any) -> Any:
        return self.rate * jax.vmap(self.linear)(x)


class Stacked(eqx.Module):
    layers: Any

    def __init__(self, key: Any):
        self.layers = eqx.filter_vmap(Block)(jax.random.split(key, 3))

    def __call__(self, x: Any) -> Any:
        return rx.layers.scan_layers(lambda block, x: block(x), self.layers, x)


def pair_loss(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    return loss_fn(model.linear, batch, key), {}, model_state


def language_model() -> Any:
    """Return a language model without weights: wrong arguments are refused before anything reads them."""
    config = models.LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return eqx.filter_eval_shape(lambda key: models.LlamaForCausalLM(config, key=key), KEY)


class Table:
    """As much of a pandas DataFrame as the library sees."""

    iloc = None
    columns = ("x", "y")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)


COLUMNS = np.zeros((16, 2), np.float32), np.zeros(16, np.float32)
NAMED = {"x": COLUMNS[0], "y": COLUMNS[1]}
SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)
HOLDER = tempfile.TemporaryDirectory()
PLACE = pathlib.Path(HOLDER.name) / "door"
A_FILE, EMPTY = PLACE / "file", PLACE / "empty"
EMPTY.mkdir(parents=True)
A_FILE.write_text("")


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
    (
        "init_state(schedule)",
        lambda: rx.init_state(MODEL, SCHEDULE, key=KEY),  # pyright: ignore
        TypeError,
        ["init_state: optimizer", "function schedule", "optax.adam(schedule)"],
    ),
    ("fit(schedule)", lambda: fit(optimizer=SCHEDULE), TypeError, ["fit: optimizer", "optax.adam(schedule)"]),
    (
        "train_step(schedule)",
        lambda: step(optimizer=SCHEDULE),
        TypeError,
        ["train_step: optimizer", "optax.adam(schedule)"],
    ),
    (
        "train_step with another optimizer",
        lambda: step(optimizer=optax.sgd(1.0)),
        ValueError,
        ["train_step", "opt_state.0", "EmptyState", "ScaleByAdamState", "init_state"],
    ),
    (
        "another optimizer without arrays",
        lambda: fit(rx.init_state(MODEL, optax.sgd(1.0), key=KEY), optimizer=optax.chain(optax.sgd(1.0))),
        ValueError,
        ["opt_state.0", "EmptyState", "tuple", "init_state"],
    ),
    (
        "a state for evaluation in train_step",
        lambda: step(rx.init_state(MODEL, key=KEY), optimizer=optax.sgd(1.0)),
        ValueError,
        ["train_step", "opt_state", "nothing", "init_state(model, optimizer, key=...)"],
    ),
    # Numbers
    (
        "a batch larger than the examples",
        lambda: fit(batch_size=32),
        ValueError,
        ["batch_size=32", "16 examples", "smaller batch_size"],
    ),
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
    (
        "a loss in a dict",
        lambda: fit(loss_fn=returning(lambda x: {"loss": x})),
        ValueError,
        ["loss_fn must return", "(loss, metrics)", "a dict", '(loss, {"accuracy": x})'],
    ),
    (
        "an accuracy without a name",
        lambda: step(loss_fn=returning(lambda x: (x, x))),
        ValueError,
        ["metrics a dict", "float32[]", '(loss, {"accuracy": x})'],
    ),
    (
        "fit(value_and_grad)",
        lambda: fit(loss_fn=jax.value_and_grad(loss_fn)),
        TypeError,
        ["fit: loss_fn", "gradient of the loss itself", "jax.value_and_grad"],
    ),
    (
        "train_step(filter_value_and_grad)",
        lambda: step(loss_fn=eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))),
        TypeError,
        ["train_step: loss_fn", "gradient of the loss itself"],
    ),
    (
        "evaluate(jax.grad)",
        lambda: evaluate(loss_fn=jax.grad(loss_fn)),
        TypeError,
        ["evaluate: loss_fn", "gradient of the loss itself"],
    ),
    (
        "a loss of pairs given the model alone",
        lambda: step(loss_fn=pair_loss),
        TypeError,
        ["a MLP alone", "init_state((model, model_state), ...)"],
    ),
    (
        "a loss of models given a pair",
        lambda: step(rx.init_state(eqx.nn.make_with_state(Normed)(KEY), ADAM, key=KEY)),
        TypeError,
        ["the pair (model, eqx.nn.State)"],
    ),
    (
        "a new_state of a model alone",
        lambda: step(loss_fn=returning(lambda x: (x, {}, x))),
        ValueError,
        ["a tuple of 3", "init_state was given the pair (model, eqx.nn.State)"],
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
    *(
        (f"{name} of {what}", call, TypeError, [where, what, rows, *more])
        for name, where, of in (
            ("fit", "fit: train_examples", lambda x: fit(STATE, x)),
            ("evaluate", "evaluate: examples", lambda x: evaluate(STATE, x)),
            ("predict", "predict: examples", lambda x: predict(STATE, x)),
            ("Evaluation", "Evaluation: examples", rx.Evaluation),
            ("batches", "batches: examples", lambda x: rx.batches(x, collate, batch_size=4, mesh=MESH)),
        )
        for what, call, rows, more in (
            ("a dict", partial(of, NAMED), "zip(*examples.values())", ["'x', 'y'"]),
            ("a tuple", partial(of, COLUMNS), "list(zip(*examples))", ["float32[16,2], float32[16]"]),
        )
    ),
    *(
        (f"{name}({what})", partial(call, batch), TypeError, [f"{name}: {where}", "collate_fn(examples)"])
        for name, call in (
            ("eval_step", lambda x: rx.eval_step(STATE, x, loss_fn=loss_fn)),
            ("predict_step", lambda x: rx.predict_step(STATE, x, predict_fn=predict_fn)),
        )
        for what, batch, where in (
            ("no batch", {}, "batch is nothing"),
            ("examples", EXAMPLES, "batch.0.flag is float32[]"),
            ("lists", {"x": [[1.0, 2.0]]}, "batch.x.0.0 is a float"),
        )
    ),
    ("a name for examples", lambda: fit(STATE, "a.jsonl"), TypeError, ["train_examples is a str", "sequence"]),
    ("a number for examples", lambda: fit(STATE, np.array(3)), TypeError, ["is a ndarray", "sequence"]),
    (
        "optimizer and model swapped",
        lambda: rx.init_state(ADAM, MODEL, key=KEY),  # pyright: ignore
        TypeError,
        ["optimizer is a MLP", "model comes first"],
    ),
    (
        "batches(no collate_fn)",
        lambda: rx.batches(EXAMPLES, None, batch_size=4, mesh=MESH),  # pyright: ignore
        TypeError,
        ["batches: collate_fn", "collate_fn(examples)", "None"],
    ),
    (
        "num_train_steps(examples)",
        lambda: rx.num_train_steps(EXAMPLES, batch_size=4, num_epochs=1),  # pyright: ignore
        TypeError,
        ["num_examples must be", "whole number", "a list", "Pass its len()"],
    ),
    (
        "batches(DataFrame)",
        lambda: rx.batches(Table(), collate, batch_size=4, mesh=MESH),
        TypeError,
        ["records"],
    ),
    ("a generator function", lambda: fit(STATE, generator), TypeError, ["train_examples(epoch)", "takes ()"]),
    (
        "a model for examples",
        lambda: fit(STATE, MODEL),
        TypeError,
        ["train_examples", "MLP", "state comes first"],
    ),
    # Checkpoints
    ("save(model)", lambda: rx.save(PLACE / "a", MODEL), TypeError, ["save: state", "MLP", "init_state"]),  # pyright: ignore
    (
        "state and directory swapped",
        lambda: rx.save(STATE, PLACE / "a"),  # pyright: ignore
        TypeError,
        ["directory", "TrainState", "save(directory, state)"],
    ),
    (
        "CheckpointWriter.save(model)",
        lambda: rx.Checkpoints(PLACE / "writer").open().save(MODEL),  # pyright: ignore
        TypeError,
        ["save: state", "MLP"],
    ),
    ("restore(model)", lambda: rx.restore(EMPTY, MODEL), TypeError, ["restore: like", "MLP", "init_state"]),  # pyright: ignore
    *(
        (f"{name} a file", call, ValueError, ["door/file is a file", "directory"])
        for name, call in (
            ("save to", lambda: rx.save(A_FILE, STATE)),
            ("restore of", lambda: rx.restore(A_FILE, STATE)),
            ("fit with checkpoints in", lambda: fit(checkpoints=A_FILE)),
        )
    ),
    (
        "restore of a part that is none",
        lambda: rx.restore(rx.save(PLACE / "part", STATE).parent, STATE, only="params"),  # pyright: ignore
        ValueError,
        ["only='params'", '"model"'],
    ),
    (
        "restore of a step in text",
        lambda: rx.restore(rx.save(PLACE / "text", STATE).parent, STATE, step="0"),  # pyright: ignore
        FileNotFoundError,
        ["no checkpoint of step '0', only of [0]"],
    ),
    (
        "restore of nothing",
        lambda: rx.restore(EMPTY, STATE),
        FileNotFoundError,
        ["door/empty", "it is empty", "Pass the directory of a run"],
    ),
    (
        "restore of a place that is none",
        lambda: rx.restore(PLACE / "nowhere", STATE),
        FileNotFoundError,
        ["door/nowhere does not exist"],
    ),
    (
        "restore of one checkpoint",
        lambda: rx.restore(rx.save(PLACE / "run", STATE), STATE),
        FileNotFoundError,
        ["itself a checkpoint", "door/run, and step="],
    ),
    # Text
    *(
        (f"generate of {what}", partial(generate, inputs), TypeError, ["inputs", *names])
        for generate in (lambda x: models.generate(language_model(), x, max_new_tokens=2),)
        for what, inputs, names in (
            ("text", "hello", ["a str", "tokenizer("]),
            ("texts", ["hello", "you"], ["a list", "tokenizer("]),
            ("lists", [[1, 2], [3, 4]], ["a list", "np.array(ids)"]),
            ("ragged lists", [[1, 2], [3]], ["a list", "padding"]),
        )
    ),
    (
        "beam_search of lists",
        lambda: models.beam_search(language_model(), [[1]], max_new_tokens=2, num_beams=2),  # pyright: ignore
        TypeError,
        ["beam_search: inputs", "np.array(ids)"],
    ),
    (
        "generate(state)",
        lambda: models.generate(STATE, BATCH["x"], max_new_tokens=2),  # pyright: ignore
        TypeError,
        ["generate: model", "TrainState", "state.model"],
    ),
    # Models
    (
        "jax.jit of a stacked model",
        lambda: jax.jit(lambda model, x: model(x))(Stacked(KEY), BATCH["x"]),
        ValueError,
        ["layers.rate", "float32[]", "eqx.filter_jit"],
    ),
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
    """Return the result of a mistake: the exception, its message, and whether a step was compiled before."""
    with Compilations() as compilations:
        try:
            call()
        except Exception as error:
            message = "\n".join([str(error), *getattr(error, "__notes__", [])])
            found = {"exception": type(error).__name__, "message": message}
        else:
            found = {"exception": "none", "message": ""}
    return {**found, "compiled": bool({BODY, STEP} & set(compilations.names))}


if __name__ == "__main__":
    json.dump({name: outcome(call) for name, call, *_ in MISTAKES}, sys.stdout)
