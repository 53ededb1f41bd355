"""A process in which no step finishes is ended, and what was written is kept."""

import subprocess
import sys

import pytest
from fit_helpers import errors_of, fit, linear_state, make_examples

import redco_eqx as rx
from redco_eqx._distributed.process_group import Watchdog


def test_watchdog(tmp_path):
    script = (
        "import time\n"
        "from redco_eqx._distributed.process_group import Watchdog\n"
        "def stuck(): time.sleep(3600)\n"
        "log = open('log.txt', 'w'); log.write('not flushed')\n"
        "with Watchdog(None): pass\n"
        "with Watchdog(2) as watchdog:\n"
        "    for _ in range(6): time.sleep(0.5); watchdog.beat()\n"
        "    stuck()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "no step has finished for 2 s" in done.stderr
    assert "in stuck" in done.stderr
    assert (tmp_path / "log.txt").read_text() == "not flushed"


def test_fit_ends_where_a_worker_hangs(tmp_path):
    script = (
        "import time, jax, numpy as np, optax, equinox as eqx, redco_eqx as rx\n"
        "mesh, optimizer = rx.make_mesh(), optax.sgd(0.1)\n"
        "model = rx.init_model(lambda key: eqx.nn.Linear(2, 2, key=key), mesh, key=jax.random.key(0))\n"
        "def collate(examples):\n"
        "    if 19 in examples: time.sleep(3600)\n"
        "    return np.ones((len(examples), 2), np.float32)\n"
        "rx.fit(rx.init_state(model, optimizer, key=jax.random.key(1)), rx.Data(range(80), shuffle=False),\n"
        "       collate_fn=collate, loss_fn=lambda m, b, key: (jax.vmap(m)(b) ** 2).mean(),\n"
        "       optimizer=optimizer, batch_size=8, num_epochs=1, step_timeout_seconds=8)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "no step has finished for 8 s" in done.stderr
    assert "in collate" in done.stderr


def test_watchdog_refuses_no_time():
    with pytest.raises(ValueError, match="step_timeout_seconds=0"):
        Watchdog(0.0)


def test_fit_tells_it_of_every_step(monkeypatch):
    """Steps of training, evaluation and prediction count."""
    beats, beat = [], Watchdog.beat
    monkeypatch.setattr(Watchdog, "beat", lambda watchdog: [beats.append(watchdog), beat(watchdog)])
    examples = make_examples(24)
    fit(
        linear_state(),
        examples,
        batch_size=4,
        num_steps=3,
        evaluation=rx.Evaluation(examples, predict_fn=lambda model, batch, key: errors_of(model, batch)),
        step_timeout_seconds=600.0,
    )
    # The beginning, the rehearsal, three steps, and each pass over the 24 examples: six batches, and its end.
    assert len(beats) == 1 + 1 + 3 + 7 + 7
    assert len(set(beats)) == 1
