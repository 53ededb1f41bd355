"""Virtual devices of a CPU have threads for collectives that wait at the same time."""

import os
from functools import partial

import pytest
from fit_helpers import printed

START = """
import pathlib
from functools import partial
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 8)
import redco_eqx as rx
mesh = rx.make_mesh(fsdp=8)
"""
THREADS = """
jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
print(len(list(pathlib.Path("/proc/self/task").iterdir())))
"""
# The gradient of the table of positions and the layers in reverse: both send, and neither waits for the other.
TRAINING = """
import redco_eqx_models as models
sizes = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
sizes |= dict(vocab_size=1024, d_model=256, encoder_ffn_dim=512, decoder_ffn_dim=512)
sizes |= dict(max_position_embeddings=128)
make_model = partial(models.BartForConditionalGeneration, models.BartConfig(**sizes), stacked=True)
model = rx.init_model(lambda key: make_model(key=key), mesh, key=jax.random.key(0))
def loss_fn(model, batch, key):
    hidden = model.hidden_states(batch["source"], batch["target"][:, :-1], key=key)
    return rx.layers.cross_entropy(hidden, model.head, batch["target"][:, 1:])
state = rx.init_state(model, optax.sgd(1e-3), key=jax.random.key(1))
step = jax.jit(partial(rx.train_step, loss_fn=loss_fn, optimizer=optax.sgd(1e-3)), donate_argnums=0)
batch = {"source": jnp.ones((8, 128), int), "target": jnp.ones((8, 129), int)}
batch = jax.device_put(batch, rx.batch_sharding(mesh))
for _ in range(10):
    state, metrics = jax.block_until_ready(step(state, batch))
print("trained")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted as Linux lists them")
def test_three_threads_for_each_device_unless_the_environment_says_how_many():
    started = partial(printed, START + THREADS, without=("PJRT_NPROC", "XLA_FLAGS"))
    assert int(started()) - int(started(PJRT_NPROC="8")) >= 16


@pytest.mark.long
def test_collectives_that_do_not_wait_for_one_another_do_not_hang():
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds=10"
    assert printed(START + TRAINING, without=("PJRT_NPROC",), XLA_FLAGS=flag).strip() == "trained"
