"""A process in which no step finishes is ended, and what was written is kept."""

import subprocess
import sys

from fit_helpers import errors_of, fit, linear_state, make_examples

import redco_eqx as rx
from redco_eqx._distributed.process_group import Watchdog

SCRIPT = """
import threading, time
from redco_eqx._distributed.process_group import Watchdog
def stuck(): time.sleep(3600)
log = open('log.txt', 'w'); log.write('not flushed')
with Watchdog(None): pass
with Watchdog(1) as watchdog:
    for _ in range(6): time.sleep(0.25); watchdog.beat()
    print('beats help', flush=True)
    worker = threading.Thread(target=stuck, daemon=True)
    worker.start()
    worker.join()
"""


def test_a_process_without_beats_is_ended_and_shows_all_threads(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "beats help\n"
    assert "no step has finished for 1 s" in done.stderr
    assert "in stuck" in done.stderr
    assert (tmp_path / "log.txt").read_text() == "not flushed"


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
