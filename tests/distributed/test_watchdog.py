"""A process in which no step finishes is ended, and what was written is kept."""

import subprocess
import sys

import pytest

from redco_eqx._distributed.watchdog import Watchdog


def test_watchdog(tmp_path):
    script = (
        "import time\n"
        "from redco_eqx._distributed.watchdog import Watchdog\n"
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


def test_watchdog_refuses_no_time():
    with pytest.raises(ValueError, match="step_timeout_seconds=0"):
        Watchdog(0.0)
