"""Plans of small models by the CPU compiler: what they say is what the program needs
and sends."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import scalar_loss as squares

import redco_eqx as rx
from redco_eqx._dataflow import engine
from redco_eqx._planning.targets import GPUS, TPUS, find_target

OPTIMIZER = optax.adamw(1e-3)
BATCH = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in ("x", "y")}


def make_mlp(key: Any, width: int = 64) -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 16, width, depth=1, key=key)


def plan(model: Any = make_mlp, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "loss_fn": squares,
        "optimizer": OPTIMIZER,
        "batch": BATCH,
        "progress": False,
    }
    found = rx.plan(
        model,
        **{**defaults, "bytes_per_device": 2**40, "max_compilations": 1, **arguments},
    )
    for trial in found.trials:  # what is refused by these bytes does not fit
        assert trial.memory.peak is None or trial.memory.arguments <= trial.memory.peak
    return found


def test_memory_is_that_of_the_arrays_and_of_the_compiled_step() -> None:
    def is_bias(x: Any) -> bool:
        return getattr(x, "ndim", 0) == 1

    on = rx.make_mesh(data=2, fsdp=2, tensor=2)
    found = plan(mesh={"fsdp": 2, "tensor": 2}, trainable=is_bias)
    assert found.mesh == on.shape
    # Independently: real arrays, and the step compiled for them.
    shape = jax.ShapeDtypeStruct
    model = rx.init_model(
        make_mlp, on, key=jax.random.key(0), loss_fn=squares, batch=BATCH
    )
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(0), trainable=is_bias)
    batch = jax.tree.map(
        lambda x: shape(x.shape, x.dtype, sharding=rx.batch_sharding(on)), BATCH
    )
    layout = {path: x.sharding for path, x in (state.params | state.frozen).items()}
    step = functools.partial(
        rx.train_step, loss_fn=squares, optimizer=OPTIMIZER, shardings=layout
    )
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    stats: Any = compiled.memory_analysis()

    def on_a_device(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert found.memory.gradients == on_a_device(state.params)
    assert found.memory.parameters == on_a_device((state.params, state.frozen))
    assert found.memory.optimizer_state == on_a_device(state.opt_state)
    assert found.memory.batch == 2 * 16 * 16 * 4 // 4
    kept = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    assert found.memory.peak == kept + stats.temp_size_in_bytes
    assert found.best.communication.counts == rx.communication(compiled, on).counts


def make_linear(key: Any) -> eqx.nn.Linear:
    return eqx.nn.Linear(64, 64, use_bias=False, key=key)


WIDE = {name: jax.ShapeDtypeStruct((16, 64), jnp.float32) for name in ("x", "y")}


def make_pair(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(
        64, 64, 64, depth=1, use_bias=False, use_final_bias=False, key=key
    )


def test_bytes_of_layers_have_a_closed_form_and_are_of_the_compiled_step() -> None:
    # An all-reduce sends 7/8 of a weight twice. FSDP gathers each weight once, also of
    # a list, and the compiler for CPUs sums its gradient whole.
    cases = (
        (make_linear, "data", 2, 32),
        (make_linear, "fsdp", 3, 32),
        (make_pair, "fsdp", 2 * 3, 64),
    )
    for make, axis, times, scalars in cases:
        best = plan(make, batch=WIDE, mesh={axis: 8}).best
        closed = times * 7 / 8 * 64 * 64 * 4
        assert closed <= best.predicted_bytes <= closed + 32  # and some scalars
        assert closed <= best.sent_bytes <= closed + scalars
        assert (
            dataclasses.replace(best, predicted_bytes=0.0).sent_bytes == best.sent_bytes
        )


def test_predicted_bytes_follow_dtype_microbatches_and_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_bfloat16(model: Any, batch: Any, key: Any) -> Any:
        return squares(*rx.cast((model, batch), jnp.bfloat16), key)

    def shards(**arguments: Any) -> tuple[float, ...]:
        """The bytes that data 8 and fsdp 8 send, in units of 7/8 of the weight."""
        trials = plan(make_linear, batch=WIDE, bytes_per_device=1, **arguments).trials
        sent = {
            tuple(t.mesh.shape.values()): t.predicted_bytes / (7 / 8 * 64 * 64 * 4)
            for t in trials
        }
        return round(sent[8, 1, 1], 1), round(sent[1, 8, 1], 1)

    assert shards() == (2, 3)
    assert shards(loss_fn=in_bfloat16) == (1, 1.5)
    assert shards(num_microbatches=2) == (4, 6)
    # As for GPU.
    monkeypatch.setattr("redco_eqx._planning.plan.merges", lambda mesh: True)
    assert shards() == (2, 2)
    assert shards(num_microbatches=2) == (2, 4)
    # As for TPU.
    monkeypatch.setattr("redco_eqx._planning.plan.narrows", lambda mesh: True)
    assert shards() == (2, 1.5)  # the weight is gathered in bfloat16
    with jax.default_matmul_precision("float32"):
        assert shards() == (2, 2)


def test_all_meshes_and_options_are_ranked_by_what_they_send_and_compute() -> None:
    found = plan(options={"width": [64, 128]})
    assert found.fits
    assert found.best.num_microbatches == 1
    compiled, *seconds = (trial.seconds for trial in found.trials)
    assert seconds == sorted(seconds)
    assert compiled <= 1.1 * seconds[0]
    assert len({tuple(t.mesh.shape.values()) for t in found.trials}) == 10
    flops = {
        t.options["width"]: t.flops for t in found.trials if t.mesh.shape["data"] == 8
    }
    assert flops[128] == 2 * flops[64]
    assert {t.seconds for t in found.trials} == {
        t.flops / 1e14 + t.sent_bytes / 1e10 for t in found.trials
    }


def test_a_loss_is_tried_with_its_activations_split_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighed = []
    weigh = engine.weigh
    monkeypatch.setattr(
        engine,
        "weigh",
        lambda *args, **options: weighed.append(1) or weigh(*args, **options),
    )
    for mesh, tried in (
        ({"data": 2, "tensor": 4}, {True, False}),
        ({"data": 8}, {False}),
    ):
        found = plan(loss_fn=rx.split_activations(squares), mesh=mesh)
        assert {trial.options["split_activations"] for trial in found.trials} == tried
    assert len(weighed) == 2  # once for each mesh
    odd = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((12, *x.shape[1:]), x.dtype), BATCH
    )
    with pytest.raises(
        ValueError, match="no mesh of 8 devices splits a batch of 12 evenly"
    ):
        plan(batch=odd, mesh={"data": 8})


def test_what_does_not_fit_says_what_would_help() -> None:
    none = plan(bytes_per_device=1000, mesh={"data": 8})
    assert none.memory.peak > none.capacity  # a mesh that is asked for is compiled
    for words in ("DOES NOT FIT", "to hold the state: more devices"):
        assert words in str(none), words
    long = {name: jax.ShapeDtypeStruct((4096, 16), jnp.float32) for name in BATCH}
    whole = plan(batch=long, mesh={"data": 8})
    few = plan(
        batch=long, mesh={"data": 8}, bytes_per_device=int(whole.memory.peak * 0.97)
    )
    again = few.trials[1]
    assert (few.fits, again.fits, again.num_microbatches) == (False, True, 512)
    for words in ("DOES NOT FIT", "to use less memory", "num_microbatches=512"):
        assert words in str(few), words


@pytest.mark.parametrize(("width", "unit"), [(4096, "MiB"), (2**21, "GiB")])
def test_the_table_has_a_unit_in_which_its_numbers_are_not_zero(
    width: int, unit: str
) -> None:
    make = functools.partial(make_mlp, width=width)
    found = plan(make, max_compilations=0, mesh={"data": 8})
    lines = [line.split() for line in str(found).splitlines()]
    numbers = {line[0]: line[-1] for line in lines if len(line) > 1}
    assert ["on", "a", "device", unit] in lines
    size = {"MiB": 2**20, "GiB": 2**30}[unit]
    parameters = found.memory.parameters / size
    assert float(numbers["parameters"]) == pytest.approx(parameters, abs=0.005)
    assert parameters > 0.01


def test_a_model_with_a_state_is_planned_with_it() -> None:
    def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
        norm, state = pair
        x, state = jax.vmap(
            norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(batch["x"], state)
        return jnp.mean((x - batch["y"]) ** 2), {}, state

    make_norm = functools.partial(
        eqx.nn.make_with_state(eqx.nn.BatchNorm), 16, "batch", mode="batch"
    )
    found = plan(eqx.filter_eval_shape(make_norm), loss_fn=loss_fn, mesh={"data": 8})
    assert found.memory.parameters >= 4 * 16 * 4  # weight, bias, mean and variance


def test_numpy_constants_are_not_trained() -> None:
    model = {"w": jnp.ones((16, 16)), "table": np.ones((64, 64))}
    found = plan(
        lambda key: model,
        loss_fn=lambda m, b, k: jnp.mean((b["x"] @ m["w"]) ** 2),
        mesh={"data": 8},
    )
    # In float32.
    assert found.memory.optimizer_state < found.memory.parameters < 5 * 64 * 64


WRONG = [
    pytest.param(
        {"target": "h900:8"}, r"'h900:8' is not known.*v5e.*h100", id="target-unknown"
    ),
    pytest.param(
        {"target": "v5e"}, r'is not known.*"v5e:4x4"', id="target-without_shape"
    ),
    pytest.param(
        {"bytes_per_device": None},
        r"kind 'cpu' is not known.*bytes_per_device",
        id="bytes_per_device-none",
    ),
    pytest.param(
        {"bytes_per_device": 0},
        "bytes_per_device=0.*positive",
        id="bytes_per_device-zero",
    ),
    pytest.param({"target": []}, "no devices", id="target-empty"),
    pytest.param({"target": 8}, "target=8 has no devices", id="target-int"),
    pytest.param(
        {"mesh": {"data": 4}},
        r"\{'data': 4\} must use exactly the target's 8",
        id="mesh-too_small",
    ),
    pytest.param({"mesh": {"model": 2}}, r"axes \['model'\]", id="mesh-unknown_axis"),
    pytest.param(
        {"mesh": {"data": 8}, "num_microbatches": 3},
        "batch of 16 evenly into 3",
        id="num_microbatches-indivisible",
    ),
    pytest.param(
        {"num_microbatches": 0}, "num_microbatches=0", id="num_microbatches-zero"
    ),
    pytest.param(
        {"max_compilations": -1}, "max_compilations=-1", id="max_compilations-below-0"
    ),
    pytest.param({"batch": {}}, "no arrays with a leading dim", id="batch-empty"),
    pytest.param(
        {"batch": {**BATCH, "y": jax.ShapeDtypeStruct((8, 16), jnp.float32)}},
        r"leading dim.*16.*8",
        id="batch-unequal_rows",
    ),
    pytest.param(
        {"batch": {**BATCH, "x": jax.ShapeDtypeStruct((16, 5), jnp.float32)}},
        "could not be traced",
        id="batch-of_another_width",
    ),
    pytest.param(
        {"model": jnp.ones(3), "options": {"width": [1]}},
        "options need a function",
        id="options-without_function",
    ),
    pytest.param(
        {"options": {"width": []}}, r"options\['width'\] is empty", id="options-empty"
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_cannot_be_planned_is_refused_before_anything_is_compiled(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


@pytest.mark.parametrize(
    ("target", "line"),
    [("v5e:2x2", r"jax\[tpu\]"), ("h100:8", r"jax\[cuda12\]")],
    ids=["tpu", "gpu"],
)
def test_a_compiler_that_is_not_installed_is_named(
    target: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=line):
        plan(target=target)


def test_a_named_target_has_the_memory_and_the_speeds_of_its_chip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "redco_eqx._planning.targets._topology", lambda name: tuple(jax.devices())
    )
    for name, chip in {**GPUS, **TPUS}.items():
        assert 8 * 2**30 <= chip.memory <= 141 * 10**9
        assert find_target(f"{name}:{'2x4' if name in TPUS else '8'}").chip == chip
    found = plan(target="v5e:2x4", bytes_per_device=None, mesh={"data": 8})
    assert found.capacity == int(15.75 * 2**30 * 0.95)
    assert (
        found.best.seconds == found.best.flops / 197e12 + found.best.sent_bytes / 100e9
    )
    assert "v5e:2x4: 8 devices, by the TPU compiler, 14.96 GiB of each" in str(found)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is installed, and nothing may be compiled."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a compiler is called")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("redco_eqx._planning.plan.attempt", fail)
    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)


LARGE = {"x": jax.ShapeDtypeStruct((4096, 16), jnp.float32)}
LARGE |= {"y": LARGE["x"]}


@pytest.mark.parametrize(
    ("target", "num_devices", "line"),
    [
        ("v5e:64x64", 4096, "plan for v5e:64x64: 4096 devices, by estimates: nothing"),
        ("v4:2x2x4", 16, "plan for v4:2x2x4: 16 devices, by estimates: nothing was"),
        ("v3:2x2", 8, "plan for v3:2x2: 8 devices, by estimates: nothing was compiled"),
        ("h100:8", 8, "plan for h100:8: 8 devices, by estimates: nothing was compiled"),
        (None, 8, "plan for these devices: 8 devices, by estimates: nothing was"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_a_plan_without_compilations_ranks_by_estimates(
    target: str | None, num_devices: int, line: str
) -> None:
    found = plan(target=target, batch=LARGE, max_compilations=0)
    assert str(found).splitlines()[0].startswith(line)
    assert "nothing was compiled" in str(found).splitlines()[0]
    assert found.best.mesh.size == num_devices
    assert not found.fits
    seconds = [trial.seconds for trial in found.trials]
    assert seconds == sorted(seconds)
    for trial in found.trials:
        assert trial.fits is trial.memory.peak is trial.communication is None
        assert trial.verdict == "not compiled: max_compilations=0"
    assert "DOES NOT FIT" not in str(found)


@pytest.mark.usefixtures("no_compiler")
def test_a_plan_without_compilations_puts_last_what_cannot_be_held() -> None:
    held = [t.memory.arguments for t in plan(max_compilations=0).trials]
    limit = (min(held) + max(held)) // 2
    found = plan(max_compilations=0, bytes_per_device=limit)
    is_large = [t.memory.arguments > limit for t in found.trials]
    assert is_large == sorted(is_large)
    assert any(is_large)
    assert "alone take" in found.trials[-1].verdict
    none = plan(max_compilations=0, bytes_per_device=1)
    assert "DOES NOT FIT" in str(none).splitlines()[1]


@pytest.mark.usefixtures("no_compiler")
def test_the_estimates_of_absent_devices_are_those_of_present_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = functools.partial(make_mlp, width=512)  # so that `fsdp` splits it
    absent = plan(wide, target="v5e:2x4", max_compilations=0, batch=LARGE)
    present = plan(wide, max_compilations=0, batch=LARGE)
    # The platform counts: compilers for TPU merge sums, which that for CPU does not.
    monkeypatch.setattr("redco_eqx._planning.plan.merges", lambda mesh: True)
    monkeypatch.setattr("redco_eqx._planning.plan.narrows", lambda mesh: True)
    merged = plan(wide, max_compilations=0, batch=LARGE)

    def sent(found: Any) -> dict[str, float]:
        return {str(trial): trial.sent_bytes for trial in found.trials}

    assert sent(absent) == sent(merged) != sent(present)
