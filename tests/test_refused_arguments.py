"""Bad arguments of the public functions: each is refused before a step is compiled, and
the message names what it must.

Each id is the function, the argument and what is wrong with it.
"""

import functools
import pathlib
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import Normed, collate, make_examples, predict_fn
from fit_helpers import scalar_loss as loss_fn
from helpers import KEY, assert_refused_early, refused

import redco_eqx

rx: Any = redco_eqx  # no type checker warns of the bad arguments
pytestmark = pytest.mark.usefixtures("annotations_unchecked")

# Shared by all cases, which change none of it

EXAMPLES = make_examples(16)
BATCH = collate(EXAMPLES[:4])
COLUMNS = np.zeros((16, 2), np.float32), np.zeros(16, np.float32)
INPUT: Any = {"collate_fn": collate, "batch_size": 4}
ADAM, SGD = optax.adam(1e-2), optax.sgd(1.0)
SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)


@functools.cache
def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 4, 1, key=KEY)


@functools.cache
def linear() -> eqx.nn.Linear:
    return eqx.nn.Linear(2, 2, key=KEY)


@functools.cache
def mesh() -> Any:
    return rx.make_mesh(data=1)


@functools.cache
def state() -> Any:
    return rx.init_state(mlp(), ADAM, key=KEY)


@functools.cache
def state_of_sgd() -> Any:
    return rx.init_state(mlp(), SGD, key=KEY)


# Right calls, of which a case changes one argument


def fit(of: Any = None, examples: Any = EXAMPLES, **changed: Any) -> Any:
    of = state() if of is None else of
    # `fit` donates its state: of the shared ones it gets a copy.
    of = jax.tree.map(jnp.copy, of) if isinstance(of, rx.TrainState) else of
    right = {**INPUT, "loss_fn": loss_fn, "optimizer": ADAM, "num_steps": 2}
    return rx.fit(of, examples, **{**right, **changed})[0]


def evaluate(of: Any = None, examples: Any = EXAMPLES, **changed: Any) -> Any:
    of = state() if of is None else of
    return rx.evaluate(of, examples, **{**INPUT, "loss_fn": loss_fn, **changed})


def predict(of: Any = None, examples: Any = EXAMPLES, **changed: Any) -> Any:
    of = state() if of is None else of
    return rx.predict(of, examples, **{**INPUT, "predict_fn": predict_fn, **changed})


def train_step(of: Any = None, **changed: Any) -> Any:
    of = state() if of is None else of
    return rx.train_step(
        of, BATCH, **{"loss_fn": loss_fn, "optimizer": ADAM, **changed}
    )


def jit_step(of: Any) -> Any:
    step = rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=ADAM))
    return step(of, BATCH)


def eval_step(of: Any = None, batch: Any = BATCH) -> Any:
    return rx.eval_step(state() if of is None else of, batch, loss_fn=loss_fn)


def predict_step(of: Any = None, batch: Any = BATCH) -> Any:
    return rx.predict_step(state() if of is None else of, batch, predict_fn=predict_fn)


def evaluation(of: Any) -> Any:
    return rx.Evaluation(EXAMPLES, **INPUT, loss_fn=loss_fn)(of)


def metric(**changed: Any) -> Any:
    return rx.Evaluation(EXAMPLES, predict_fn=predict_fn, **changed)


def batches(examples: Any = EXAMPLES, collate_fn: Any = collate) -> Any:
    return rx.batches(examples, collate_fn, batch_size=4, mesh=mesh())


def explain(overrides: Any = (), on: Any = None) -> Any:
    return rx.explain(mlp(), on or mesh(), overrides=overrides)


def returning(output: Any, call: Any = fit) -> Any:
    """Trains by a loss that returns something else."""
    return call(loss_fn=lambda model, batch, key: output(loss_fn(model, batch, key)))


# A thing in the place of another

CALL_INIT = "MLP ... init_state(model, optimizer"
IN_PLACE_OF_ANOTHER = [
    refused("fit-state-model", lambda: fit(mlp()), f"fit: state ... {CALL_INIT}"),
    refused(
        "evaluate-state-model",
        lambda: evaluate(mlp()),
        f"evaluate: state ... {CALL_INIT}",
    ),
    refused(
        "predict-state-model", lambda: predict(mlp()), f"predict: state ... {CALL_INIT}"
    ),
    refused(
        "train_step-state-model",
        lambda: train_step(mlp()),
        f"train_step: state ... {CALL_INIT}",
    ),
    refused(
        "eval_step-state-model",
        lambda: eval_step(mlp()),
        f"eval_step: state ... {CALL_INIT}",
    ),
    refused(
        "predict_step-state-model",
        lambda: predict_step(mlp()),
        f"predict_step: state ... {CALL_INIT}",
    ),
    refused(
        "jit_step-state-model",
        lambda: jit_step(mlp()),
        f"first argument ... {CALL_INIT}",
    ),
    refused(
        "Evaluation-state-model",
        lambda: evaluation(mlp()),
        f"Evaluation: state ... {CALL_INIT}",
    ),
    refused(
        "fit-state-examples",
        lambda: fit(EXAMPLES, state()),
        "list ... state comes first",
    ),
    refused(
        "fit-examples-state",
        lambda: fit(state(), state()),
        "train_examples ... TrainState",
    ),
    refused(
        "fit-examples-model",
        lambda: fit(state(), mlp()),
        "train_examples ... MLP ... state comes first",
    ),
    refused(
        "fit-state-result_of_step",
        lambda: fit((state(), {"loss": jnp.float32(1.0)})),
        "tuple ... (state, metrics)",
    ),
    refused(
        "init_model-make_model-model",
        lambda: rx.init_model(mlp(), mesh(), key=KEY),
        "make_model ... MLP ... lambda",
    ),
    refused(
        "init_model-make_model-without_key",
        lambda: rx.init_model(lambda: mlp(), mesh(), key=KEY),
        "make_model(key)",
    ),
    refused(
        "init_model-key-int",
        lambda: rx.init_model(Normed, mesh(), key=0),
        "key ... jax.random.key(0)",
    ),
    refused(
        "init_model-mesh-int",
        lambda: rx.init_model(Normed, 8, key=KEY),
        "mesh ... int ... make_mesh",
    ),
    refused(
        "init_model-mesh-abstract",
        lambda: rx.init_model(Normed, mesh().abstract_mesh, key=KEY),
        "mesh is abstract ... make_mesh",
    ),
    refused(
        "init_state-model-state",
        lambda: rx.init_state(state(), ADAM, key=KEY),
        "TrainState ... state.model",
    ),
    refused(
        "init_state-model-class",
        lambda: rx.init_state(eqx.nn.MLP, ADAM, key=KEY),
        "class MLP ... MLP(...",
    ),
    refused(
        "init_state-key-int",
        lambda: rx.init_state(mlp(), ADAM, key=0),
        "key ... 0 (int) ... jax.random.key(0)",
    ),
    refused(
        "init_state-optimizer-model",
        lambda: rx.init_state(ADAM, mlp(), key=KEY),
        "optimizer is a MLP ... model comes first",
    ),
    refused(
        "explain-model-state",
        lambda: rx.explain(state(), mesh()),
        "TrainState ... state.model",
    ),
    refused(
        "shard_rules-model-class",
        lambda: rx.shard_rules(eqx.nn.MLP, mesh()),
        "class MLP ... instance",
    ),
    refused(
        "shard_rules-mesh-model",
        lambda: rx.shard_rules(mesh(), mlp()),
        "mesh ... MLP ... model comes",
    ),
]


@pytest.mark.parametrize(("call", "words"), IN_PLACE_OF_ANOTHER)
def test_a_thing_in_the_place_of_another_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


@functools.cache
def population() -> Any:
    """Three states in one, as for `jax.vmap`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[state()] * 3)


ONE = "state must be one TrainState ... (3,) ... x[0] ... jax.vmap"
STACKED = [
    refused("fit-state-stacked", lambda: fit(population()), f"fit: {ONE}"),
    refused("evaluate-state-stacked", lambda: evaluate(population()), ONE),
    refused("predict-state-stacked", lambda: predict(population()), ONE),
    refused("train_step-state-stacked", lambda: train_step(population()), ONE),
    refused("eval_step-state-stacked", lambda: eval_step(population()), ONE),
    refused("predict_step-state-stacked", lambda: predict_step(population()), ONE),
    refused("Evaluation-state-stacked", lambda: evaluation(population()), ONE),
]


@pytest.mark.parametrize(("call", "words"), STACKED)
def test_several_states_in_one_are_refused(call: Any, words: str) -> None:
    assert_refused_early(call, ValueError, words)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit], ids=["vmap", "jit"])
def test_init_model_under_a_transformation_is_refused(transform: Any) -> None:
    def make(key: Any) -> Any:
        return rx.init_model(Normed, mesh(), key=key)

    keys = jax.random.split(KEY, 2) if transform is jax.vmap else KEY
    with pytest.raises(TypeError, match=r"key is traced.*Call it outside"):
        transform(make)(keys)


class Static(eqx.Module):
    weight: Any
    mean: Any = eqx.field(static=True)


def test_init_model_names_an_array_in_a_static_field() -> None:
    def make(key: Any) -> Any:
        return Static(jax.random.normal(key, (4,)), np.ones(4))

    with pytest.raises(ValueError, match="mean is a static field that holds an array"):
        rx.init_model(make, mesh(), key=KEY)


TRAINABLE = {
    "by_path": {"layers.0.weight": True},
    "text": "layers.0",
    "list": [True, False],
}


@pytest.mark.parametrize("trainable", TRAINABLE.values(), ids=list(TRAINABLE))
def test_what_selects_no_arrays_is_refused(trainable: Any) -> None:
    with pytest.raises(TypeError, match=r"trainable must be .*eqx\.tree_at"):
        rx.init_state(mlp(), ADAM, key=KEY, trainable=trainable)


STREAMS = [
    refused(
        "Stream-examples-without_epoch",
        lambda: rx.Stream(lambda: iter(EXAMPLES)),
        "Stream: examples is called as examples(epoch)",
    ),
    refused(
        "Stream-examples-without_shards",
        lambda: rx.Stream(lambda epoch: iter(EXAMPLES), sharded=True),
        "examples is called as examples(epoch, shard, num_shards)",
    ),
    refused(
        "Stream-examples-nothing",
        lambda: fit(examples=rx.Stream(lambda epoch: None)),
        "examples(0) returned a NoneType ... iterable",
    ),
]


@pytest.mark.parametrize(("call", "words"), STREAMS)
def test_a_stream_of_another_form_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


OPTIMIZERS = [
    refused(
        "init_state-optimizer-function_of_optax",
        lambda: rx.init_state(mlp(), optax.adam, key=KEY),
        "optax.adam(1e-3)",
    ),
    refused(
        "init_state-optimizer-key",
        lambda: rx.init_state(mlp(), KEY, key=KEY),
        "optimizer ... optax.adam(1e-3)",
    ),
    refused(
        "fit-optimizer-float",
        lambda: fit(optimizer=1e-3),
        "fit: optimizer ... float ... optax.adam(1e-3)",
    ),
    refused(
        "fit-optimizer-schedule",
        lambda: fit(optimizer=SCHEDULE),
        "fit: optimizer ... function schedule ... optax.adam(schedule)",
    ),
    refused(
        "train_step-optimizer-schedule",
        lambda: train_step(optimizer=SCHEDULE),
        "train_step: optimizer ... optax.adam(schedule)",
    ),
]


@pytest.mark.parametrize(("call", "words"), OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


NUMBERS = [
    *(
        refused(
            f"fit-{name}-{type(x).__name__}",
            partial(fit, **{name: x}),
            f"fit: {name}={x!r} ... whole number",
        )
        for name in ("batch_size", "num_steps", "log_every", "num_microbatches")
        for x in (2.0, "2", True)
    ),
    refused(
        "fit-num_epochs-float",
        lambda: fit(num_steps=None, num_epochs=1.5),
        "fit: num_epochs=1.5 ... whole number",
    ),
    refused(
        "evaluate-batch_size-float",
        lambda: evaluate(batch_size=4.0),
        "batch_size=4.0 ... whole number",
    ),
    refused(
        "predict-batch_size-none",
        lambda: predict(batch_size=None),
        "batch_size=None ... whole number",
    ),
    refused(
        "Evaluation-every_steps-float",
        lambda: rx.Evaluation(EXAMPLES, every_steps=1.5),
        "Evaluation: every_steps=1.5 ... whole number",
    ),
    refused(
        "make_mesh-tensor-float",
        lambda: rx.make_mesh(tensor=2.0),
        "tensor=2.0 ... whole number",
    ),
    refused(
        "num_train_steps-num_examples-list",
        lambda: rx.num_train_steps(EXAMPLES, batch_size=4, num_epochs=1),
        "num_examples must be ... whole number ... a list ... Pass its len()",
    ),
]


@pytest.mark.parametrize(("call", "words"), NUMBERS)
def test_what_is_no_whole_number_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


PAIRS = "overrides ... [(pattern, PartitionSpec), ...]"
OVERRIDES = [
    refused(
        "explain-overrides-dict",
        lambda: explain({"*": jax.P()}),
        f"{PAIRS} ... list(overrides.items())",
    ),
    refused(
        "explain-overrides-unconstrained",
        lambda: explain([("*", jax.P(jax.P.UNCONSTRAINED))]),
        f"{PAIRS} ... For a spec of axes",
    ),
    refused("explain-overrides-one_pair", lambda: explain(("*", jax.P())), PAIRS),
    refused(
        "explain-overrides-tuple_for_spec",
        lambda: explain([("*", ("tensor",))]),
        "overrides ... ('tensor',) ... PartitionSpec(\"tensor\")",
    ),
]


@pytest.mark.parametrize(("call", "words"), OVERRIDES)
def test_overrides_that_are_no_pairs_are_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


FUNCTIONS = [
    refused(
        "fit-loss_fn-none",
        lambda: fit(loss_fn=None),
        "fit: loss_fn ... (model, batch, key) ... None",
    ),
    refused(
        "fit-loss_fn-without_key",
        lambda: fit(loss_fn=lambda model, batch: 0.0),
        "loss_fn(model, batch, key) ... takes (model, batch)",
    ),
    refused(
        "fit-step_fn-none",
        lambda: fit(step_fn=None),
        "fit: step_fn must be a function, step_fn(state, batch, loss_fn=..., ... None",
    ),
    refused(
        "fit-collate_fn-none",
        lambda: fit(collate_fn=None),
        "fit: collate_fn ... collate_fn(examples) ... None",
    ),
    refused(
        "fit-collate_fn-of_two",
        lambda: fit(collate_fn=lambda a, b: a),
        "collate_fn(examples) ... (a, b)",
    ),
    refused(
        "batches-collate_fn-none",
        lambda: batches(collate_fn=None),
        "batches: collate_fn ... collate_fn(examples) ... None",
    ),
    refused(
        "predict-predict_fn-without_key",
        lambda: predict(predict_fn=lambda m, b: b),
        "predict_fn ... (m, b)",
    ),
    refused(
        "Evaluation-metric_fn-of_one",
        lambda: metric(metric_fn=lambda x: {}),
        "metric_fn(examples, predictions) ... takes (x)",
    ),
    refused(
        "Evaluation-output_fn-of_one",
        lambda: metric(output_fn=lambda x: 1),
        "output_fn(example, prediction) ... takes (x)",
    ),
    refused(
        "fit-loggers-function",
        lambda: fit(loggers=print),
        "loggers ... loggers=[logger]",
    ),
    refused(
        "fit-loggers-of_one",
        lambda: fit(loggers=[lambda row: 0]),
        "fit: logger is called as logger(step, row) ... takes (row)",
    ),
    refused(
        "fit-hook-of_one",
        lambda: fit(hook=lambda state: 0),
        "hook(run, row, state) ... takes (state)",
    ),
    refused(
        "fit-evaluation-list",
        lambda: fit(evaluation=EXAMPLES),
        "evaluation ... rx.Evaluation(examples)",
    ),
    refused(
        "fit-checkpoints-bool",
        lambda: fit(checkpoints=True),
        "checkpoints ... bool ... directory",
    ),
]


@pytest.mark.parametrize(("call", "words"), FUNCTIONS)
def test_a_function_of_other_arguments_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


OUTPUTS = [
    refused(
        "train_step-loss-none",
        lambda: returning(lambda x: None, train_step),
        "the loss ... None ... return",
    ),
    refused(
        "fit-loss-list",
        lambda: returning(lambda x: [x, x]),
        "the loss ... scalar ... list ... returns a tuple: return loss, metrics",
    ),
    refused(
        "fit-metric-dict",
        lambda: returning(lambda x: (x, {"a": {"b": x}})),
        "the metric 'a' ... dict ... {\"group/name\": value}",
    ),
    refused(
        "fit-metric-str",
        lambda: returning(lambda x: (x, {"a": "high"})),
        "the metric 'a' ... 'high' ... scalar",
    ),
    refused(
        "train_step-loss-gradient",
        lambda: train_step(
            rx.init_state(linear(), ADAM, key=KEY), loss_fn=jax.grad(loss_fn)
        ),
        "the loss ... Linear ... scalar",
    ),
]


@pytest.mark.parametrize(("call", "words"), OUTPUTS)
def test_a_loss_of_another_type_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


# Examples


class Table:
    """As much of a pandas DataFrame as the library sees."""

    iloc = None
    columns = ("x", "y")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, name: Any) -> Any:
        raise KeyError(name)


def generator() -> Any:
    yield from EXAMPLES


NO_SEQUENCES: dict[str, tuple[Any, str]] = {
    "dict_of_columns": (
        dict(zip("xy", COLUMNS)),
        "a dict ... zip(*examples.values()) ... 'x', 'y'",
    ),
    "tuple_of_columns": (
        COLUMNS,
        "a tuple ... list(zip(*examples)) ... float32[16,2], float32[16]",
    ),
    "table": (Table(), 'to_dict("records")'),
}
TAKE_EXAMPLES: dict[str, tuple[Any, str]] = {
    "fit": (partial(fit, None), "fit: train_examples"),
    "evaluate": (partial(evaluate, None), "evaluate: examples"),
    "predict": (partial(predict, None), "predict: examples"),
    "Evaluation": (rx.Evaluation, "Evaluation: examples"),
    "batches": (batches, "batches: examples"),
}
NO_BATCHES: dict[str, tuple[Any, str]] = {
    "empty": ({}, "batch is nothing"),
    "list_of_examples": (EXAMPLES, "batch.0.flag is float32[]"),
    "lists_of_numbers": ({"x": [[1.0, 2.0]]}, "batch.x.0.0 is a float"),
}
NO_EXAMPLES = [
    *(
        refused(
            f"{name}-examples-{kind}", partial(call, examples), f"{where} ... {words}"
        )
        for name, (call, where) in TAKE_EXAMPLES.items()
        for kind, (examples, words) in NO_SEQUENCES.items()
    ),
    refused(
        "fit-examples-str",
        lambda: fit(state(), "a.jsonl"),
        "train_examples is a str ... sequence",
    ),
    refused(
        "fit-examples-generator_function",
        lambda: fit(state(), generator),
        "train_examples(epoch) ... takes ()",
    ),
    *(
        refused(
            f"{call.__name__}-batch-{kind}",
            partial(call, None, batch),
            f"{call.__name__}: {where} ... collate_fn(examples)",
        )
        for call in (eval_step, predict_step)
        for kind, (batch, where) in NO_BATCHES.items()
    ),
]


@pytest.mark.parametrize(("call", "words"), NO_EXAMPLES)
def test_what_are_no_examples_and_no_batch_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


# Values


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


def explicit() -> Any:
    return jax.make_mesh((jax.device_count(),), ("data",))


def renamed() -> Any:
    return jax.make_mesh((1, jax.device_count()), ("dp", "tp"))


GRADIENTS = "not MLP ... The step computes the gradients"
PAIR = '(loss, metrics) ... (loss, {"accuracy": x})'
VALUES = [
    refused(
        "init_state-key-two_keys",
        lambda: rx.init_state(mlp(), key=jax.random.split(KEY)),
        "key ... (2,) ... keys[0]",
    ),
    refused(
        "init_state-model-without_its_state",
        lambda: rx.init_state(Normed(KEY), ADAM, key=KEY),
        "norm. ... eqx.nn.State ... make_with_state ... (model, model_state)",
    ),
    refused(
        "fit-state-without_optimizer",
        lambda: fit(rx.init_state(mlp(), key=KEY)),
        "opt_state ... nothing ... init_state(model, optimizer, key=...)",
    ),
    refused(
        "train_step-optimizer-of_another_state",
        lambda: train_step(optimizer=SGD),
        "train_step ... opt_state.0 ... EmptyState ... ScaleByAdamS ... init_state",
    ),
    # no array differs
    refused(
        "fit-optimizer-chain_of_the_same",
        lambda: fit(state_of_sgd(), optimizer=optax.chain(SGD)),
        "opt_state.0 ... EmptyState ... tuple ... init_state",
    ),
    refused(
        "fit-batch_size-too_large",
        lambda: fit(batch_size=32),
        "batch_size=32 ... 16 examples ... smaller batch_size",
    ),
    refused(
        "make_mesh-tensor-too_large",
        lambda: rx.make_mesh(tensor=16),
        "tensor=16 ... there are 8 (cpu)",
    ),
    refused(
        "make_mesh-tensor-zero",
        lambda: rx.make_mesh(tensor=0),
        "tensor=0 ... positive",
    ),
    refused(
        "explain-mesh-explicit",
        lambda: explain(on=explicit()),
        "('data',) ... AxisType.Auto ... Mesh(mesh.devices, mesh.axis_names)",
    ),
    refused(
        "explain-mesh-other_names",
        lambda: explain(on=renamed()),
        "('dp', 'tp') ... Mesh(mesh.devices, (\"data\", \"tensor\"))",
    ),
    refused(
        "fit-loss_fn-dict",
        lambda: returning(lambda x: {"loss": x}),
        f"loss_fn must return ... a dict ... {PAIR}",
    ),
    refused(
        "train_step-loss_fn-pair_of_numbers",
        lambda: returning(lambda x: (x, x), train_step),
        f"metrics a dict ... float32[] ... {PAIR}",
    ),
    refused(
        "train_step-loss_fn-metric_named_by_int",
        lambda: returning(lambda x: (x, {1: x}), train_step),
        f"metrics a dict ... of [1] ... {PAIR}",
    ),
    refused(
        "train_step-loss_fn-triple",
        lambda: returning(lambda x: (x, {}, x), train_step),
        "a tuple of 3 ... init_state was given the pair (model, eqx.nn.State)",
    ),
    refused(
        "fit-loss_fn-with_gradients",
        lambda: fit(loss_fn=eqx.filter_value_and_grad(loss_fn)),
        GRADIENTS,
    ),
    refused(
        "train_step-loss_fn-with_jitted_gradients",
        lambda: train_step(loss_fn=eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))),
        GRADIENTS,
    ),
    refused(
        "scan_layers-layers-under_jit",
        call_stacked,
        "rate ... float32[] ... eqx.filter_jit",
    ),
]


@pytest.mark.parametrize(("call", "words"), VALUES)
def test_a_value_that_does_not_fit_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, ValueError, words)


# Directories: each case gets an empty one of its own, HERE in the message


def a_file(here: pathlib.Path) -> pathlib.Path:
    (here / "file").write_text("")
    return here / "file"


def saved(here: pathlib.Path) -> Any:
    """The directory `run`, with one checkpoint, of step 0."""
    return rx.save(here / "run", state()).parent


IS_A_FILE = "HERE/file', but it is a file, and checkpoints need a directory"
DIRECTORIES = [
    refused(
        "save-state-model",
        lambda here: rx.save(here, mlp()),
        f"save: state ... {CALL_INIT}",
        TypeError,
    ),
    refused(
        "Checkpoints.save-state-model",
        lambda here: rx.Checkpoints(here).open().save(mlp()),
        f"save: state ... {CALL_INIT}",
        TypeError,
    ),
    refused(
        "restore-like-model",
        lambda here: rx.restore(here, mlp()),
        f"restore: like ... {CALL_INIT}",
        TypeError,
    ),
    refused(
        "save-directory-state",
        lambda here: rx.save(state(), here),
        "directory ... TrainState ... save(directory, state)",
        TypeError,
    ),
    refused(
        "Checkpoints-keep_best-least",
        lambda here: rx.Checkpoints(here, keep_best={"loss": "least"}),
        "keep_best={'loss': 'least'} ... \"min\" or the \"max\"",
        ValueError,
    ),
    refused(
        "save-directory-file",
        lambda here: rx.save(a_file(here), state()),
        IS_A_FILE,
        ValueError,
    ),
    refused(
        "restore-directory-file",
        lambda here: rx.restore(a_file(here), state()),
        IS_A_FILE,
        ValueError,
    ),
    refused(
        "fit-checkpoints-file",
        lambda here: fit(checkpoints=a_file(here)),
        IS_A_FILE,
        ValueError,
    ),
    refused(
        "restore-only-params",
        lambda here: rx.restore(saved(here), state(), only="params"),
        "only='params' ... \"model\"",
        ValueError,
    ),
    refused(
        "restore-directory-empty",
        lambda here: rx.restore(here, state()),
        "HERE ... it is empty ... Pass the directory of a run",
        FileNotFoundError,
    ),
    refused(
        "restore-directory-missing",
        lambda here: rx.restore(here / "nowhere", state()),
        "HERE/nowhere does not exist",
        FileNotFoundError,
    ),
    refused(
        "restore-step-missing",
        lambda here: rx.restore(saved(here), state(), step=8),
        "no checkpoint of step 8, only of [0]",
        FileNotFoundError,
    ),
    refused(
        "restore-directory-checkpoint",
        lambda here: rx.restore(saved(here) / "0", state()),
        "itself a checkpoint ... HERE/run, and step=",
        FileNotFoundError,
    ),
]


@pytest.mark.parametrize(("call", "words", "exception"), DIRECTORIES)
def test_an_argument_of_checkpoints_is_refused(
    call: Any, words: str, exception: type[Exception], tmp_path: pathlib.Path
) -> None:
    words = words.replace("HERE", str(tmp_path))
    assert_refused_early(lambda: call(tmp_path), exception, words)
