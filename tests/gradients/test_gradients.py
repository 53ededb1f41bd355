"""Every gradient through `train_step`, on every mesh, is that of one device: over generated programs.

Set in the environment:
- `GRADIENTS_SHARES`: tests for each family, of `SHARE` programs each; 1 takes a minute on two cores.
- `GRADIENTS_SEED`: another number draws other programs.
- `GRADIENTS_SHRINK=1`: what fails is reduced, which may take five minutes a test.

A program that crashes the compiler ends the process: pytest-xdist names the test. `-s -n 0` prints programs.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator

import jax
import pytest
from golden import GOLDEN
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import FAMILIES, Spec, build, make_batch, make_model, programs
from steps import NUM_MEMBERS, differences, on_one_device, through_train_step

SHARE = 4  # after ten, hypothesis tries variants of one program more often than new ones
NUM_SHARES = int(os.environ.get("GRADIENTS_SHARES", "1"))
SEED = int(os.environ.get("GRADIENTS_SEED", "0"))
PHASES = (Phase.generate, Phase.shrink) if os.environ.get("GRADIENTS_SHRINK") == "1" else (Phase.generate,)

# float64 has 1e-16; sums of some thousand terms in another order, solves and second derivatives lose two digits
# (the largest of 300 layouts that are right was 2e-14). Some programs amplify rounding: of one, a change of
# the parameters by 1e-15 moves the gradients by 2e-9 on one device. A gradient summed over a device too many,
# or over a wrong one, was off by 2e-4 or more.
TOLERANCE = 1e-8


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Computes in float64, and lets go of the programs of the test."""
    with jax.enable_x64(True):
        yield
    jax.clear_caches()


def is_of_jax(error: Exception) -> bool:
    """Returns true for what plain JAX raises on a mesh as well, before anything is run: XLA, of the second
    derivative of a shift along a split batch, and JAX, of some convolutions under several `vmap`s whose kernel
    lies on a mesh.
    """
    return isinstance(error, NotImplementedError) or "during context [hlo verifier]" in str(error)


def check(spec: Spec, allowed: Callable[[Exception], bool] = lambda error: False) -> None:
    """Compares the gradients on each mesh and layout of a program with those of one device."""
    print(json.dumps(spec), flush=True)
    program, batch = build(spec), make_batch(spec)
    models = [make_model(program, seed) for seed in range(NUM_MEMBERS if spec["mode"] == "ensemble" else 1)]
    try:
        expected = on_one_device(program, models, batch, spec)
    except (NotImplementedError, TypeError, ValueError):
        return  # plain JAX has no such gradient
    for mesh, kind in spec["layouts"]:
        try:
            found, collectives = through_train_step(program, models, batch, spec, mesh, kind)
        except Exception as error:
            error.add_note(f"on {mesh}, {kind}")
            if allowed(error):
                continue
            raise
        worst = differences(found, expected)
        assert max(worst.values()) <= TOLERANCE, (mesh, kind, worst)
        if spec.get("collectives"):
            # Left to XLA, the step gathers the batch, and each device does all of it (openxla/xla#47945).
            kernel = 8 * (3 * (spec["channels"] // 2) * 2 * 8)  # float64
            assert set(collectives) == {"all-reduce"}, (mesh, collectives)
            assert kernel < collectives["all-reduce"] < 1.2 * kernel, (mesh, collectives)


@pytest.mark.filterwarnings("ignore::redco_eqx.errors.ShardingWarning")
@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_generated_programs(family: str, share: int) -> None:
    @seed(zlib.crc32(f"{family} {share} {SEED}".encode()))
    @settings(
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
    @given(programs(family))
    def run(spec: Spec) -> None:
        check(spec, allowed=is_of_jax)

    run()


@pytest.mark.filterwarnings("ignore::redco_eqx.errors.ShardingWarning")
@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_wrong_once(name: str) -> None:
    check(GOLDEN[name])
