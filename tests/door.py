"""Mistakes of a first hour, and what the message of each must name.

Run as a program it makes them all, as a user does (nothing checks annotations there),
and ends with those that were told otherwise, or only after a step was compiled.
"""

import pathlib
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fit_helpers import (
    BODY,
    STEP,
    Normed,
    collate,
    compilations,
    make_examples,
    predict_fn,
)
from fit_helpers import scalar_loss as loss_fn

import redco_eqx

jax.config.update("jax_num_cpu_devices", 8)
rx: Any = redco_eqx  # no type checker warns of the mistakes
KEY = jax.random.key(0)
EXAMPLES = make_examples(16)
ADAM = optax.adam(1e-2)
MODEL = eqx.nn.MLP(2, 2, 4, 1, key=KEY)
MESH = rx.make_mesh(data=1)
STATE = rx.init_state(MODEL, ADAM, key=KEY)
FOR_EVALUATION = rx.init_state(MODEL, key=KEY)
BATCH = collate(EXAMPLES[:4])


INPUT: Any = {"collate_fn": collate, "batch_size": 4}


def fit(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    right = {**INPUT, "loss_fn": loss_fn, "optimizer": ADAM, "num_steps": 2}
    state = jax.tree.map(jnp.copy, state) if isinstance(state, rx.TrainState) else state
    return rx.fit(state, examples, **{**right, **changed})[0]


def evaluate(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    return rx.evaluate(state, examples, **{**INPUT, "loss_fn": loss_fn, **changed})


def predict(state: Any = STATE, examples: Any = EXAMPLES, **changed: Any) -> Any:
    return rx.predict(state, examples, **{**INPUT, "predict_fn": predict_fn, **changed})


def step(state: Any = STATE, batch: Any = BATCH, **changed: Any) -> Any:
    return rx.train_step(
        state, batch, **{"loss_fn": loss_fn, "optimizer": ADAM, **changed}
    )


def jitted(state: Any) -> Any:
    return rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=ADAM))(
        state, BATCH
    )


def eval_step(state: Any = STATE, batch: Any = BATCH) -> Any:
    return rx.eval_step(state, batch, loss_fn=loss_fn)


def predict_step(state: Any = STATE, batch: Any = BATCH) -> Any:
    return rx.predict_step(state, batch, predict_fn=predict_fn)


def metric(**changed: Any) -> Any:
    return rx.Evaluation(EXAMPLES, predict_fn=predict_fn, **changed)


def returning(output: Any, call: Any = fit) -> Any:
    """Trains by a loss that returns something else."""
    return call(loss_fn=lambda model, batch, key: output(loss_fn(model, batch, key)))


def batches(examples: Any = EXAMPLES, collate_fn: Any = collate) -> Any:
    return rx.batches(examples, collate_fn, batch_size=4, mesh=MESH)


def explain(overrides: Any, mesh: Any = MESH) -> Any:
    return rx.explain(MODEL, mesh, overrides=overrides)


def call_stacked() -> None:
    """Calls a model of stacked layers under a plain `jax.jit`, which makes an array of
    its `rate`."""
    keys = jax.random.split(KEY, 3)
    layers = eqx.filter_vmap(
        lambda key: {"linear": eqx.nn.Linear(2, 2, key=key), "rate": 0.5}
    )(keys)
    jax.jit(lambda layers, x: rx.layers.scan_layers(lambda _, x: x, layers, x))(
        layers, BATCH["x"]
    )


class Table:
    """As much of a pandas DataFrame as the library sees."""

    iloc = None
    columns = ("x", "y")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)


COLUMNS = np.zeros((16, 2), np.float32), np.zeros(16, np.float32)
SCHEDULE, SGD = optax.cosine_decay_schedule(1e-3, 100), optax.sgd(1.0)
OF_SGD = rx.init_state(MODEL, SGD, key=KEY)
OF_LINEAR = rx.init_state(eqx.nn.Linear(2, 2, key=KEY), ADAM, key=KEY)
EXPLICIT, RENAMED = jax.make_mesh((8,), ("data",)), jax.make_mesh((2, 4), ("dp", "tp"))
JITTED_GRADIENT = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))
GRADIENTS, PAIR = (
    "The step computes the gradients",
    '(loss, metrics) ... (loss, {"accuracy": x})',
)
PAIRS = "overrides ... [(pattern, PartitionSpec), ...]"
HOLDER = tempfile.TemporaryDirectory()
PLACE = pathlib.Path(HOLDER.name) / "door"
A_FILE, EMPTY = PLACE / "file", PLACE / "empty"


def saved(name: str) -> Any:
    """A directory with one checkpoint, of step 0."""
    return rx.save(PLACE / name, STATE).parent


def generator() -> Any:
    yield from EXAMPLES


# What is called, and what the message names, with `...` between. Of `TypeError`:
CONFUSED: list[tuple[Any, str]] = [
    # A thing in another's place
    *(
        (partial(call, MODEL), f"{where} ... MLP ... init_state(model, optimizer")
        for call, where in (
            (fit, "fit: state"),
            (evaluate, "evaluate: state"),
            (predict, "predict: state"),
            (step, "train_step: state"),
            (eval_step, "eval_step: state"),
            (predict_step, "predict_step: state"),
            (jitted, "first argument"),
            (rx.Evaluation(EXAMPLES, **INPUT, loss_fn=loss_fn), "Evaluation: state"),
            (partial(rx.save, PLACE / "a"), "save: state"),
            (
                lambda model: rx.Checkpoints(PLACE / "writer").open().save(model),
                "save: state",
            ),
            (lambda model: rx.restore(EMPTY, model), "restore: like"),
        )
    ),
    (lambda: fit(EXAMPLES, STATE), "list ... state comes first"),
    (lambda: fit(STATE, STATE), "train_examples ... TrainState"),
    (lambda: fit(STATE, MODEL), "train_examples ... MLP ... state comes first"),
    (lambda: fit(step()), "tuple ... (state, metrics)"),
    (
        lambda: rx.save(STATE, PLACE / "a"),
        "directory ... TrainState ... save(directory, state)",
    ),
    (lambda: rx.init_model(MODEL, MESH, key=KEY), "make_model ... MLP ... lambda"),
    (lambda: rx.init_model(lambda: MODEL, MESH, key=KEY), "make_model(key)"),
    (lambda: rx.init_model(Normed, MESH, key=0), "key ... jax.random.key(0)"),
    (lambda: rx.init_model(Normed, 8, key=KEY), "mesh ... int ... make_mesh"),
    (
        lambda: rx.init_model(Normed, MESH.abstract_mesh, key=KEY),
        "mesh is abstract ... make_mesh",
    ),
    (lambda: rx.init_state(STATE, ADAM, key=KEY), "TrainState ... state.model"),
    (lambda: rx.init_state(eqx.nn.MLP, ADAM, key=KEY), "class MLP ... MLP(..."),
    (
        lambda: rx.init_state(MODEL, ADAM, key=0),
        "key ... 0 (int) ... jax.random.key(0)",
    ),
    (
        lambda: rx.init_state(ADAM, MODEL, key=KEY),
        "optimizer is a MLP ... model comes first",
    ),
    (lambda: rx.explain(STATE, MESH), "TrainState ... state.model"),
    (lambda: rx.shard_rules(eqx.nn.MLP, MESH), "class MLP ... instance"),
    (lambda: rx.shard_rules(MESH, MODEL), "mesh ... MLP ... model comes"),
    # Optimizers
    (lambda: rx.init_state(MODEL, optax.adam, key=KEY), "optax.adam(1e-3)"),
    (lambda: rx.init_state(MODEL, KEY, key=KEY), "optimizer ... optax.adam(1e-3)"),
    (lambda: fit(optimizer=1e-3), "fit: optimizer ... float ... optax.adam(1e-3)"),
    (
        lambda: fit(optimizer=SCHEDULE),
        "fit: optimizer ... function schedule ... optax.adam(schedule)",
    ),
    (
        lambda: step(optimizer=SCHEDULE),
        "train_step: optimizer ... optax.adam(schedule)",
    ),
    # Numbers
    *(
        (partial(fit, **{name: x}), f"fit: {name}={x!r} ... whole number")
        for name in ("batch_size", "num_steps", "log_every", "num_microbatches")
        for x in (2.0, "2", True)
    ),
    (
        lambda: fit(num_steps=None, num_epochs=1.5),
        "fit: num_epochs=1.5 ... whole number",
    ),
    (lambda: evaluate(batch_size=4.0), "batch_size=4.0 ... whole number"),
    (lambda: predict(batch_size=None), "batch_size=None ... whole number"),
    (
        lambda: rx.Evaluation(EXAMPLES, every_steps=1.5),
        "Evaluation: every_steps=1.5 ... whole number",
    ),
    (lambda: rx.make_mesh(tensor=2.0), "tensor=2.0 ... whole number"),
    (
        lambda: rx.num_train_steps(EXAMPLES, batch_size=4, num_epochs=1),
        "num_examples must be ... whole number ... a list ... Pass its len()",
    ),
    # Layouts
    (lambda: explain({"*": jax.P()}), f"{PAIRS} ... list(overrides.items())"),
    (
        lambda: explain([("*", jax.P(jax.P.UNCONSTRAINED))]),
        f"{PAIRS} ... For a spec of axes",
    ),
    (lambda: explain(("*", jax.P())), PAIRS),
    (
        lambda: explain([("*", ("tensor",))]),
        "overrides ... ('tensor',) ... PartitionSpec(\"tensor\")",
    ),
    # Functions
    (lambda: fit(loss_fn=None), "fit: loss_fn ... (model, batch, key) ... None"),
    (
        lambda: fit(loss_fn=lambda model, batch: 0.0),
        "loss_fn(model, batch, key) ... takes (model, batch)",
    ),
    (lambda: fit(collate_fn=None), "fit: collate_fn ... collate_fn(examples) ... None"),
    (lambda: fit(collate_fn=lambda a, b: a), "collate_fn(examples) ... (a, b)"),
    (
        lambda: batches(collate_fn=None),
        "batches: collate_fn ... collate_fn(examples) ... None",
    ),
    (lambda: returning(lambda x: None, step), "the loss ... None ... return"),
    (lambda: returning(lambda x: [x, x]), "the loss ... list ... scalar"),
    (
        lambda: returning(lambda x: (x, {"a": {"b": x}})),
        "the metric 'a' ... dict ... {\"group/name\": value}",
    ),
    (
        lambda: returning(lambda x: (x, {"a": "high"})),
        "the metric 'a' ... 'high' ... scalar",
    ),
    (
        lambda: step(OF_LINEAR, loss_fn=jax.grad(loss_fn)),
        "the loss ... Linear ... scalar",
    ),
    (lambda: predict(predict_fn=lambda m, b: b), "predict_fn ... (m, b)"),
    (
        lambda: metric(metric_fn=lambda x: {}),
        "metric_fn(examples, predictions) ... takes (x)",
    ),
    (
        lambda: metric(output_fn=lambda x: 1),
        "output_fn(example, prediction) ... takes (x)",
    ),
    (lambda: fit(loggers=print), "loggers ... loggers=[logger]"),
    (
        lambda: fit(loggers=[lambda row: 0]),
        "fit: logger is called as logger(step, row) ... takes (row)",
    ),
    (lambda: fit(hook=lambda state: 0), "hook(run, row, state) ... takes (state)"),
    (lambda: fit(evaluation=EXAMPLES), "evaluation ... rx.Evaluation(examples)"),
    (lambda: fit(checkpoints=True), "checkpoints ... bool ... directory"),
    # Examples
    *(
        (partial(call, examples), f"{where} ... {words}")
        for where, call in (
            ("fit: train_examples", partial(fit, STATE)),
            ("evaluate: examples", partial(evaluate, STATE)),
            ("predict: examples", partial(predict, STATE)),
            ("Evaluation: examples", rx.Evaluation),
            ("batches: examples", batches),
        )
        for examples, words in (
            (
                dict(zip("xy", COLUMNS)),
                "a dict ... zip(*examples.values()) ... 'x', 'y'",
            ),
            (
                COLUMNS,
                "a tuple ... list(zip(*examples)) ... float32[16,2], float32[16]",
            ),
            (Table(), 'to_dict("records")'),
        )
    ),
    (lambda: fit(STATE, "a.jsonl"), "train_examples is a str ... sequence"),
    (lambda: fit(STATE, generator), "train_examples(epoch) ... takes ()"),
    *(
        (
            partial(call, STATE, batch),
            f"{call.__name__}: {where} ... collate_fn(examples)",
        )
        for call in (eval_step, predict_step)
        for batch, where in (
            ({}, "batch is nothing"),
            (EXAMPLES, "batch.0.flag is float32[]"),
            ({"x": [[1.0, 2.0]]}, "batch.x.0.0 is a float"),
        )
    ),
]
# Of `ValueError`:
WITH_LEAST = partial(rx.Checkpoints, PLACE / "new", keep_best={"loss": "least"})
WITHOUT_STATE = partial(rx.init_state, Normed(KEY), ADAM, key=KEY)
WRONG: list[tuple[Any, str]] = [
    (
        lambda: rx.init_state(MODEL, key=jax.random.split(KEY)),
        "key ... (2,) ... keys[0]",
    ),
    (
        lambda: fit(FOR_EVALUATION),
        "opt_state ... nothing ... init_state(model, optimizer, key=...)",
    ),
    (
        lambda: step(optimizer=SGD),
        "train_step ... opt_state.0 ... EmptyState ... ScaleByAdamS ... init_state",
    ),
    # no array differs
    (
        lambda: fit(OF_SGD, optimizer=optax.chain(SGD)),
        "opt_state.0 ... EmptyState ... tuple ... init_state",
    ),
    (
        lambda: fit(batch_size=32),
        "batch_size=32 ... 16 examples ... smaller batch_size",
    ),
    (lambda: rx.make_mesh(tensor=16), "tensor=16 ... there are 8 (cpu)"),
    (lambda: rx.make_mesh(tensor=0), "tensor=0 ... positive"),
    (WITH_LEAST, "keep_best={'loss': 'least'} ... \"min\" or the \"max\""),
    (
        lambda: explain((), EXPLICIT),
        "('data',) ... AxisType.Auto ... Mesh(mesh.devices, mesh.axis_names)",
    ),
    (
        lambda: explain((), RENAMED),
        "('dp', 'tp') ... Mesh(mesh.devices, (\"data\", \"tensor\"))",
    ),
    (
        lambda: returning(lambda x: {"loss": x}),
        f"loss_fn must return ... a dict ... {PAIR}",
    ),
    (
        lambda: returning(lambda x: (x, x), step),
        f"metrics a dict ... float32[] ... {PAIR}",
    ),
    (
        lambda: returning(lambda x: (x, {1: x}), step),
        f"metrics a dict ... of [1] ... {PAIR}",
    ),
    (
        lambda: fit(loss_fn=eqx.filter_value_and_grad(loss_fn)),
        f"not MLP ... {GRADIENTS}",
    ),
    (lambda: step(loss_fn=JITTED_GRADIENT), f"not MLP ... {GRADIENTS}"),
    (
        lambda: returning(lambda x: (x, {}, x), step),
        "a tuple of 3 ... init_state was given the pair (model, eqx.nn.State)",
    ),
    (call_stacked, "rate ... float32[] ... eqx.filter_jit"),
    (
        WITHOUT_STATE,
        "norm. ... eqx.nn.State ... make_with_state ... (model, model_state)",
    ),
    (
        lambda: rx.save(A_FILE, STATE),
        "door/file', but it is a file, and checkpoints need a directory",
    ),
    (
        lambda: rx.restore(A_FILE, STATE),
        "door/file', but it is a file, and checkpoints need a directory",
    ),
    (
        lambda: fit(checkpoints=A_FILE),
        "door/file', but it is a file, and checkpoints need a directory",
    ),
    (
        lambda: rx.restore(saved("part"), STATE, only="params"),
        "only='params' ... \"model\"",
    ),
]
# Of `FileNotFoundError`:
MISSING: list[tuple[Any, str]] = [
    (
        lambda: rx.restore(EMPTY, STATE),
        "door/empty ... it is empty ... Pass the directory of a run",
    ),
    (lambda: rx.restore(PLACE / "nowhere", STATE), "door/nowhere does not exist"),
    (
        lambda: rx.restore(saved("other"), STATE, step=8),
        "no checkpoint of step 8, only of [0]",
    ),
    (
        lambda: rx.restore(saved("run") / "0", STATE),
        "itself a checkpoint ... door/run, and step=",
    ),
]


def problem(call: Any, exception: type[Exception], words: str) -> str | None:
    """Makes a mistake. Returns what was told, unless it is the exception with all
    words, before a step."""
    with compilations() as compiled:
        try:
            found: Any = call()
        except Exception as error:
            found = error
    message = "\n".join([str(found), *getattr(found, "__notes__", [])])
    is_told = type(found) is exception and all(
        part in message for part in words.split(" ... ")
    )
    is_early = not {BODY, STEP} & set(compiled)
    return (
        None
        if is_told and is_early
        else f"{words}\n  after {compiled}: {found!r}\n  {message}"
    )


def tell(*kinds: tuple[Sequence[tuple[Any, str]], type[Exception]]) -> None:
    """Makes all mistakes, and ends the program with those that were told otherwise."""
    told = [
        problem(call, exception, words)
        for mistakes, exception in kinds
        for call, words in mistakes
    ]
    sys.exit("\n\n".join(text for text in told if text is not None) or None)


if __name__ == "__main__":
    EMPTY.mkdir(parents=True)
    A_FILE.write_text("")
    tell((CONFUSED, TypeError), (WRONG, ValueError), (MISSING, FileNotFoundError))
