"""Every gradient through `train_step`, on every mesh, is that of one device: over
generated programs.

Set in the environment:
- `GRADIENTS_SHARES`: tests for each family, of `SHARE` programs each; 1 takes a minute
    on two cores.
- `GRADIENTS_SEED`: another number draws other programs.
- `GRADIENTS_SHRINK=1`: what fails is reduced, which may take five minutes a test.

A program that crashes the compiler ends the process: pytest-xdist names the test.
`-s -n 0` prints programs.
"""

import os
import zlib
from collections.abc import Iterator

import jax
import pytest
from gradients.golden import GOLDEN
from gradients.programs import FAMILIES, Spec, programs
from gradients.steps import check
from hypothesis import HealthCheck, Phase, given, seed, settings

SHARE = (
    4  # after ten, hypothesis tries variants of one program more often than new ones
)
NUM_SHARES = int(os.environ.get("GRADIENTS_SHARES", "1"))
SEED = int(os.environ.get("GRADIENTS_SEED", "0"))
PHASES = (
    (Phase.generate, Phase.shrink)
    if os.environ.get("GRADIENTS_SHRINK") == "1"
    else (Phase.generate,)
)

SETTINGS = settings(
    max_examples=SHARE,
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    phases=PHASES,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)


@pytest.fixture(autouse=True)
def no_programs_of_other_tests() -> Iterator[None]:
    yield
    jax.clear_caches()


def is_of_jax(error: Exception) -> bool:
    """Returns true for what plain JAX raises on a mesh as well, before anything is run:
    XLA, of the second derivative of a shift along a split batch, and JAX, of some
    convolutions under several `vmap`s whose kernel lies on a mesh.
    """
    return isinstance(
        error, NotImplementedError
    ) or "during context [hlo verifier]" in str(error)


@pytest.mark.filterwarnings("ignore::redco_eqx.errors.ShardingWarning")
@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_generated_programs(family: str, share: int) -> None:
    @seed(zlib.crc32(f"{family} {share} {SEED}".encode()))
    @SETTINGS
    @given(programs(family))
    def run(spec: Spec) -> None:
        check(spec, allowed=is_of_jax)

    run()


@pytest.mark.filterwarnings("ignore::redco_eqx.errors.ShardingWarning")
@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_wrong_once(name: str) -> None:
    check(GOLDEN[name])
