"""Every gradient through `train_step`, on every mesh, is that of one device: over generated programs.

Set in the environment:
- `GRADIENTS_SHARES`: tests for each family, of `SHARE` programs each; 1 takes three minutes on two cores.
- `GRADIENTS_SEED`: another number draws other programs.
- `GRADIENTS_SHRINK=1`: what fails is reduced, which may take five minutes a test.
"""

import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from client import Client
from golden import GOLDEN
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import FAMILIES, Spec, programs
from verdict import PROPERTY, Counts, Died, WrongGradient

SHARE = 6  # after ten, hypothesis tries variants of one program more often than new ones
NUM_SHARES = int(os.environ.get("GRADIENTS_SHARES", "1"))
SEED = int(os.environ.get("GRADIENTS_SEED", "0"))
PHASES = (Phase.generate, Phase.shrink) if os.environ.get("GRADIENTS_SHRINK") == "1" else (Phase.generate,)


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def counts(record_property: Any) -> Iterator[Counts]:
    counts = Counts()
    yield counts
    record_property(PROPERTY, dict(counts))


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_generated_programs(family: str, share: int, client: Client, counts: Counts) -> None:
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
    def check(spec: Spec) -> None:
        counts.judge(client.answer(spec))

    check()


@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_wrong_once(name: str, client: Client, counts: Counts) -> None:
    counts.judge(client.answer(GOLDEN[name]))


def test_a_grouped_convolution_gathers_no_batch(client: Client) -> None:
    """Left to XLA, the step gathers the batch, and each device does all of it (openxla/xla#47945)."""
    spec = GOLDEN["grouped"]
    kernel = 8 * (3 * (spec["channels"] // 2) * 2 * 8)  # float64
    for layout in client.answer(spec)["layouts"]:
        assert set(layout["collectives"]) == {"all-reduce"}, layout
        assert kernel < layout["collectives"]["all-reduce"] < 1.2 * kernel, layout


SIMPLE = {**GOLDEN["depthwise"], "layouts": [["data2xtensor4", "whole"]]}


def test_a_gradient_that_is_four_times_too_large_is_found(client: Client) -> None:
    with pytest.raises(WrongGradient, match=r"data2xtensor4, whole: .*3\.0"):
        Counts().judge(client.answer({**SIMPLE, "fault": "scaled"}))


def test_a_crash_is_reported_and_survived(client: Client) -> None:
    with pytest.raises(Died, match="status -6"):
        Counts().judge(client.answer({**SIMPLE, "fault": "abort"}))
    Counts().judge(client.answer(SIMPLE))


def test_a_hang_is_reported() -> None:
    client = Client(seconds=0.5)
    with pytest.raises(Died, match="no answer"):
        Counts().judge(client.answer({**SIMPLE, "fault": "hang"}))
