"""Plans of small models by the CPU compiler: what they say is what the program needs and sends."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redco_eqx as rx
from redco_eqx import models
from redco_eqx._planning.targets import GPUS, TPUS

OPTIMIZER = optax.adamw(1e-3)
ROOM = 2**40


def make_mlp(key: Any, width: int = 64) -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 16, width, depth=1, key=key)


def squares(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


BATCH = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in ("x", "y")}


def plan(model: Any = make_mlp, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "loss_fn": squares,
        "optimizer": OPTIMIZER,
        "batch": BATCH,
        "bytes_per_device": ROOM,
        "progress": False,
        "max_compilations": 1,
    }
    found = rx.plan(model, **{**defaults, **arguments})
    for trial in found.trials:  # what is refused by these bytes does not fit
        if trial.memory is not None and trial.memory.peak is not None:
            assert trial.candidate.state_bytes <= trial.memory.peak
    return found


@pytest.mark.parametrize(
    "mesh", [{}, {"tensor": 8}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"data": 4, "tensor": 2}], ids=str
)
def test_memory_is_that_of_the_arrays_and_of_the_compiled_step(mesh: Any) -> None:
    found = plan(mesh=mesh)
    on = rx.make_mesh(**found.mesh)
    assert on.shape == rx.make_mesh(**mesh).shape
    # Independently: real arrays, and the step compiled for them.
    shape = jax.ShapeDtypeStruct
    model = rx.init_model(make_mlp, on, key=jax.random.key(0), loss_fn=squares, batch=BATCH)
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(0))
    batch = jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=rx.batch_sharding(on)), BATCH)
    layout = {path: x.sharding for path, x in state.params.items()}
    step = functools.partial(rx.train_step, loss_fn=squares, optimizer=OPTIMIZER, shardings=layout)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    stats: Any = compiled.memory_analysis()

    def on_a_device(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert found.memory.parameters == on_a_device(state.params)
    assert found.memory.optimizer_state == on_a_device(state.opt_state)
    assert found.memory.gradients == found.memory.parameters
    assert found.memory.batch == 2 * 16 * 16 * 4 // rx.make_mesh(**mesh).shape["data"] // on.shape["fsdp"]
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert found.memory.peak == kept + stats.temp_size_in_bytes
    assert found.communication.counts == rx.communication(compiled, on).counts


def test_what_fits_best_sends_least() -> None:
    found = plan()
    assert found.fits
    seconds = [trial.candidate.seconds for trial in found.trials]
    assert seconds == sorted(seconds)
    meshes = {tuple(t.candidate.mesh.shape.values()) for t in found.trials}
    assert meshes == {
        (8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2),
        (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8),
    }  # fmt: skip


def test_a_smaller_device_asks_for_another_mesh_and_a_tiny_one_for_more() -> None:
    wide = functools.partial(make_mlp, width=4096)
    roomy = plan(wide)
    assert roomy.mesh == {"data": 1, "fsdp": 1, "tensor": 8}  # much wider than the batch
    whole = plan(wide, mesh={"data": 8}).memory
    # Not enough for whole parameters and moments on each device: they are split.
    found = plan(wide, bytes_per_device=whole.parameters + whole.optimizer_state, max_compilations=6)
    assert found.fits
    assert found.memory.parameters < whole.parameters
    assert found.memory.peak <= found.capacity
    none = plan(wide, bytes_per_device=1000)
    assert not none.fits
    assert "alone take" in none.best.verdict
    few = plan(wide, mesh={"data": 8}, bytes_per_device=int(whole.peak * 1.02))  # less than with the reserve
    assert not few.fits
    text = str(few)
    assert "DOES NOT FIT" in text
    assert "layers.0.weight" in text  # the largest arrays, by path


LLAMA = models.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def make_llama(key: Any, stacked: Any = True, remat: Any = "none") -> Any:
    return models.LlamaForCausalLM(LLAMA, stacked=stacked, remat=remat, key=key)


def next_token_loss(model: Any, batch: Any, key: Any) -> Any:
    return rx.layers.cross_entropy(model.hidden_states(batch[:, :-1])[0], model.head, batch[:, 1:])


OF_LLAMA: dict[str, Any] = {
    "loss_fn": next_token_loss,
    "batch": jax.ShapeDtypeStruct((16, 65), jnp.int32),
    "mesh": {"tensor": 4},
}


@pytest.mark.long
def test_microbatches_and_remat_are_chosen_where_memory_is_short() -> None:
    options: Any = {"options": {"remat": ["none", "full"]}, "num_microbatches": [1, 2]}
    roomy = plan(make_llama, **OF_LLAMA, **options)
    assert (roomy.options, roomy.num_microbatches) == ({"remat": "none"}, 1)
    less = int(roomy.memory.peak * 0.8)
    found = plan(make_llama, **OF_LLAMA, **options, bytes_per_device=less, max_compilations=3)
    assert found.fits
    assert (found.options, found.num_microbatches) != ({"remat": "none"}, 1)
    assert found.memory.peak <= less < roomy.memory.peak


@pytest.mark.long
def test_options_that_change_paths_or_the_program_are_laid_out_and_counted_for_themselves() -> None:
    options: Any = {"stacked": [False, True], "remat": ["none", "full"]}
    found = plan(make_llama, **OF_LLAMA, options=options)
    assert len(found.trials) == 4
    for trial in found.trials:
        own = plan(
            functools.partial(make_llama, **trial.candidate.options), **OF_LLAMA, bytes_per_device=1
        ).best.candidate
        for name in ("state_bytes", "flops", "sent_bytes", "seconds"):
            assert getattr(own, name) == getattr(trial.candidate, name)
    stacked = plan(make_llama, **OF_LLAMA, options={"stacked": [False, True]}, max_compilations=2)
    assert [trial.fits for trial in stacked.trials] == [True, True]


def test_what_is_planned_trains() -> None:
    found = plan(functools.partial(make_mlp, width=32))
    mesh = rx.make_mesh(**found.mesh)
    model = rx.init_model(functools.partial(make_mlp, width=32), mesh, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    examples = [{name: rng.normal(size=16).astype(np.float32) for name in BATCH} for _ in range(32)]
    state, _ = rx.fit(
        rx.init_state(model, OPTIMIZER, key=jax.random.key(1)),
        examples,
        collate_fn=lambda rows: {name: np.stack([row[name] for row in rows]) for name in BATCH},
        loss_fn=squares,
        optimizer=OPTIMIZER,
        batch_size=16,
        num_epochs=1,
        num_microbatches=found.num_microbatches,
        loggers=(),
    )
    assert int(state.step) == 2


def test_a_model_with_a_state_a_part_that_is_trained_and_an_abstract_model() -> None:
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key: Any):
            self.linear = eqx.nn.Linear(16, 16, key=key)
            self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")

    def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
        model, state = pair
        x = jax.vmap(model.linear)(batch["x"])
        x, state = jax.vmap(model.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((x - batch["y"]) ** 2), {}, state

    found = plan(lambda key: eqx.nn.make_with_state(Normed)(key), loss_fn=loss_fn, mesh={"data": 8})
    assert found.fits
    half = plan(trainable=lambda x: getattr(x, "ndim", 0) == 1, mesh={"data": 8})
    assert half.memory.optimizer_state < half.memory.parameters
    abstract = eqx.filter_eval_shape(make_mlp, jax.random.key(0))
    assert plan(abstract, mesh={"tensor": 2}).memory == plan(mesh={"tensor": 2}).memory


TOO_MANY = {"estimate": True, "bytes_per_device": None}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown target": ({"target": "h900:8"}, r"'h900:8' is not known.*v5e.*h100"),
    "no shape": ({"target": "v5e"}, r'is not known.*"v5e:4x4"'),
    "no GPUs": ({"target": "h100:0"}, "is not known"),
    "an estimate of a pod": (
        {**TOO_MANY, "target": "v5e:4x4"},
        r"16 virtual devices, but there are 8.*jax_num_cpu",
    ),
    "memory of a CPU": ({"bytes_per_device": None}, r"kind 'cpu' is not known.*bytes_per_device"),
    "no memory": ({"bytes_per_device": 0}, "bytes_per_device=0.*positive"),
    "no devices": ({"target": []}, "no devices"),
    "a mesh of others": ({"mesh": {"tensor": 3}}, "tensor = 3 must divide the number of devices"),
    "a mesh of fewer": ({"mesh": {"data": 4}}, r"\{'data': 4\} must use exactly the target's 8"),
    "an unknown axis": ({"mesh": {"model": 2}}, r"axes \['model'\]"),
    "a batch that no mesh splits": ({"mesh": {"data": 8}, "num_microbatches": 3}, "batch of 16 evenly into 3"),
    "no microbatch": ({"num_microbatches": 0}, "num_microbatches=0"),
    "no compilation": ({"max_compilations": 0}, "max_compilations=0"),
    "a reserve of all": ({"reserve": 1.0}, r"reserve=1.0"),
    "no batch": ({"batch": {}}, "leading dim of batch"),
    "batches of two sizes": (
        {"batch": {**BATCH, "y": jax.ShapeDtypeStruct((8, 16), jnp.float32)}},
        r"leading dim of batch.*'x': 16, 'y': 8",
    ),
    "a batch that does not fit": (
        {"batch": {name: jax.ShapeDtypeStruct((16, 5), jnp.float32) for name in BATCH}},
        "could not be traced",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_planned_is_refused_before_anything_is_compiled(name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_options_are_for_functions() -> None:
    with pytest.raises(ValueError, match="options need a function"):
        plan(eqx.filter_eval_shape(make_mlp, jax.random.key(0)), options={"width": [1, 2]})


@pytest.mark.parametrize(("target", "line"), [("v5e:2x2", r"jax\[tpu\]"), ("h100:8", r"jax\[cuda12\]")])
def test_a_compiler_that_is_not_installed_is_named(
    target: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=line):
        plan(target=target, bytes_per_device=None)


@pytest.mark.parametrize("name", [*GPUS, *TPUS])
def test_an_estimate_takes_the_chips_memory_and_speeds(name: str) -> None:
    chip = {**GPUS, **TPUS}[name]
    shape = {"v2": "2x2", "v3": "2x2"}.get(name, "2x2x2" if name in ("v4", "v5p") else "2x4")
    target = f"{name}:{shape if name in TPUS else 8}"
    found = plan(target=target, bytes_per_device=None, estimate=True, mesh={"data": 8})
    assert found.capacity == int(chip.memory * 0.95)
    assert found.target.compiler == "cpu"
    assert "estimated" in str(found)
    least, most = found.target.margin(found.mesh)
    assert 0.9 < found.target.margin({"fsdp": 8})[0] < least < most
    assert "by the devices' own compiler" in str(found)
    trial = found.best.candidate
    assert trial.seconds == pytest.approx(trial.flops / chip.flops + trial.sent_bytes / chip.bandwidth)
