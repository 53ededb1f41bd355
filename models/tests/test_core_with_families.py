"""What the core does for models of the families: initializers, storage, gathers,
counts, meshes that are set."""

import functools
import types
from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workloads
from fit_helpers import printed
from helpers import KEY, abstract, abstract_mesh, assert_close, filled, mesh_of, stepped
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx import _sharded_init as sharded_init
from redco_eqx._base.jaxprs import trace
from redco_eqx._compiled.communication import Communication, communication
from redco_eqx._planning.memory import num_flops
from redco_eqx._training.program import peak_seconds
from redco_eqx_models._families.registry import FAMILIES, PARTS

# Initializers.


@pytest.mark.parametrize("name", [*FAMILIES, *PARTS])
def test_every_family_is_made_shard_by_shard(name):
    """At its default sizes, its layers stacked where it has layers; only traced."""
    config, model = {**FAMILIES, **PARTS}[name]
    closed, _, _ = sharded_init.trace_arrays(
        lambda key: model(config(), stacked=name in FAMILIES, key=key), KEY
    )
    made, _ = sharded_init.initializers_of(closed, KEY)
    assert {
        initializer.way
        for initializer in made
        if not sharded_init.is_small(initializer.leaf)
    } == {"spread"}


def test_models_generate_and_their_layers_communicate_under_a_mesh_that_is_set():
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    mesh = Mesh(explicit.devices, ("data", "tensor"))
    config = models.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=4
    )
    abstract = eqx.filter_eval_shape(
        lambda key: models.GPT2LMHeadModel(config, key=key), KEY
    )
    model, _ = helpers.place(helpers.filled(abstract, jnp.float32, 0), mesh)
    prompts = np.arange(8).reshape(2, 4)
    expected = np.asarray(models.generate(model, prompts, max_new_tokens=3))
    with jax.set_mesh(explicit):
        np.testing.assert_array_equal(
            models.generate(model, prompts, max_new_tokens=3), expected
        )


# Layouts and gathers.


def test_what_tensor_cannot_split_of_an_opt_is_stored_split():
    config = models.OPTConfig(
        vocab_size=50257,
        hidden_size=9216,
        ffn_dim=36864,
        num_hidden_layers=4,
        num_attention_heads=72,
    )
    for stacked in (True, False):
        make = partial(
            models.OPTForCausalLM, config, stacked=stacked, key=jax.random.key(0)
        )
        explanation = rx.explain(
            eqx.filter_eval_shape(make), abstract_mesh(data=4, tensor=16)
        )
        whole = (
            sum(int(np.prod(d.shape)) for d in explanation.decisions.values()) * 4 / 16
        )
        assert whole < explanation.bytes_per_device < 1.01 * whole
        spec = explanation.decisions["model.decoder.embed_tokens.weight"].spec
        assert spec == P(None, ("fsdp", "tensor")), "a vocabulary of 50257"


OPTIMIZER = optax.sgd(0.5, momentum=0.9)
# `tensor` cannot split 6 heads, nor a vocabulary of 97.
SIZES: Any = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64}
ODD = models.LlamaConfig(num_hidden_layers=2, num_attention_heads=6, **SIZES)


def trained(
    mesh: Any, *, overrides: Any = (), **options: Any
) -> tuple[rx.TrainState, Communication]:
    """The state after two steps of an odd LLaMA, and what a step communicates."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        hidden, _ = model.hidden_states(batch[:, :-1], key=key)
        return rx.layers.cross_entropy(hidden, model.head, batch[:, 1:])

    make = lambda key: models.LlamaForCausalLM(ODD, stacked=True, key=key, **options)  # noqa: E731
    model = filled(abstract(make), jnp.float32, 0)
    shardings = rx.shard_rules(model, mesh, overrides=overrides)
    rows = np.random.default_rng(0).integers(0, 97, (16, 9)).astype(np.int32)
    found = stepped(
        model, rows, mesh, loss_fn, OPTIMIZER, shardings=shardings, num_microbatches=2
    )
    assert found.before.shardings == {
        path: x.sharding for path, x in rx.to_arrays(found.before.model).items()
    }
    state, _ = found.compiled(
        found.state, jax.device_put(rows, rx.batch_sharding(mesh))
    )
    return state, communication(found.compiled, mesh)


def test_an_override_reaches_every_block():
    """Arrays that an override makes whole are not gathered: in layers, in the lookup,
    or in the head."""
    overrides = [("*up_proj.weight", P(None, None, "fsdp")), ("*", P())]
    _, found = trained(mesh_of("fsdp8"), overrides=overrides)
    shapes = {shape for c in found if c.kind == "all-gather" for shape in c.shapes}
    assert {shape.replace("[1,", "[") for shape in shapes} == {"f32[64,48]"}


def test_what_tensor_cannot_split_is_stored_split_and_costs_only_gathers(monkeypatch):
    mesh = mesh_of("data2xtensor4")
    expected, found = trained(mesh)
    assert not expected.stored
    rest = sum(c.total_bytes for c in found)
    monkeypatch.setattr("redco_eqx._sharding.rules.STORED_BYTES", 0)
    for there, options in (
        (mesh, {}),
        (rx.make_mesh(fsdp=2, tensor=4), {"remat": "row_out"}),
    ):
        state, found = trained(there, **options)
        projections = {path for path in state.params if "self_attn" in path}
        assert set(state.stored) == projections | {
            "model.embed_tokens.weight",
            "lm_head.weight",
        }
        # Float32, summed in another order.
        assert_close(state.params, expected.params, rtol=1e-4, atol=1e-5)
        if there is mesh:
            stored = sum(state.params[path].size * 4 for path in state.stored)
            gathered = sum(
                c.total_bytes
                for c in found
                if (c.kind, c.axes) == ("all-gather", ("tensor",))
            )
            # Forward and again backward, in each of two microbatches.
            assert 0 < gathered <= 2 * 2 * stored
            # The gradient norm sums what is split, a number for each array.
            assert sum(c.total_bytes for c in found) - gathered <= rest + 64


# Operations.

SIZES = workloads.Sizes(
    dim=32, num_layers=2, num_heads=4, vocabulary=64, length=16, batch_size=8
)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_has_the_operations_of_the_closed_form_on_every_mesh(remat: str) -> None:
    """`6N + 12 L d s` for a token (PaLM, appendix B): layers that are computed again do
    not count."""
    case, optimizer = workloads.family_case("LLaMA", SIZES, remat=remat), optax.sgd(0.1)
    for sizes in ({"data": 1}, {"tensor": 4}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}):
        model, shardings = workloads.abstract_model(
            case, rx.make_mesh(**dict[str, Any](sizes))
        )
        state = rx.init_state(model, optimizer, key=jax.random.key(0))
        step = functools.partial(
            rx.train_step,
            loss_fn=case.loss_fn,
            optimizer=optimizer,
            shardings=shardings,
        )
        program = trace(step, state, case.batch).closed
        num = sum(
            x.size
            for path, x in state.params.items()
            if x.ndim == 2 and "embed" not in path
        )
        by_attention = 12 * SIZES.num_layers * SIZES.dim * SIZES.length
        expected = SIZES.batch_size * SIZES.length * (6 * num + by_attention)
        assert num_flops(program.jaxpr, recomputed=False) == expected, sizes
        chips = np.array(
            [types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")] * 8
        )
        assert peak_seconds(program, chips) == pytest.approx(
            expected / 8 / 197e12, rel=1e-12
        )
        assert peak_seconds(program, np.array(jax.devices())) == 0
        of_unknown = types.SimpleNamespace(platform="gpu", device_kind="another")
        assert peak_seconds(program, np.array([of_unknown])) == 0


# Virtual devices of a CPU.

START = """
from functools import partial
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 8)
import redco_eqx as rx
mesh = rx.make_mesh(fsdp=8)
"""
# The gradient of the table of positions and the layers in reverse: both send, and
# neither waits for the other.
TRAINING = """
import redco_eqx_models as models
sizes = dict(encoder_layers=2, decoder_layers=2)
sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
sizes |= dict(vocab_size=1024, d_model=256, encoder_ffn_dim=512, decoder_ffn_dim=512)
sizes |= dict(max_position_embeddings=128)
config = models.BartConfig(**sizes)
make_model = partial(models.BartForConditionalGeneration, config, stacked=True)
model = rx.init_model(lambda key: make_model(key=key), mesh, key=jax.random.key(0))
def loss_fn(model, batch, key):
    hidden = model.hidden_states(batch["source"], batch["target"][:, :-1], key=key)
    return rx.layers.cross_entropy(hidden, model.head, batch["target"][:, 1:])
state = rx.init_state(model, optax.sgd(1e-3), key=jax.random.key(1))
step = partial(rx.train_step, loss_fn=loss_fn, optimizer=optax.sgd(1e-3))
step = jax.jit(step, donate_argnums=0)
batch = {"source": jnp.ones((8, 128), int), "target": jnp.ones((8, 129), int)}
batch = jax.device_put(batch, rx.batch_sharding(mesh))
for _ in range(10):
    state, metrics = jax.block_until_ready(step(state, batch))
print("trained")
"""


@pytest.mark.long
def test_collectives_that_do_not_wait_for_one_another_do_not_hang():
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds=10"
    assert (
        printed(START + TRAINING, without=("PJRT_NPROC",), XLA_FLAGS=flag).strip()
        == "trained"
    )
