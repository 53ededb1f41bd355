"""Whatever a test of this folder does: no thread and no signal handler of it stays
behind."""

import signal

import pytest
from fit_helpers import no_threads_left

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    # A shell makes background jobs ignore SIGINT.
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert no_threads_left()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
