"""Float64, for the examples whose training is compared with a loop written by hand."""

import jax
import pytest


@pytest.fixture
def double():
    """Computes in float64, where a tolerance tells rounding from anything else."""
    with jax.enable_x64(True):
        yield
