"""What a plan considers, and in which order: pure functions, with an invented compiler."""

import itertools
from typing import Any

import pytest

from redco_eqx._compiled.hlo import Buffer
from redco_eqx._planning.memory import Memory, peak_by_message
from redco_eqx._planning.trial import Candidate, Choice, Trial, meshes, search, variants

CAPACITY = 100


def candidate(
    seconds: float, state: int = 10, remat: str = "none", microbatches: int = 1, remembered: int = 0
) -> Candidate:
    choice = Choice({"data": 8, "fsdp": 1, "tensor": 1}, {"remat": remat}, microbatches)
    kept = (Buffer(remembered, f"u8[{remembered}]", ""),) if remembered else ()
    return Candidate(choice, state, kept, 0.0, 0.0, seconds)


class Compiler:
    """Says of each candidate, by its seconds, how much it needs; and remembers what it was asked."""

    def __init__(self, peaks: dict[float, int], interrupted_at: float | None = None):
        self.peaks, self.asked, self.interrupted_at = peaks, [], interrupted_at

    def __call__(self, one: Candidate) -> Trial:
        if one.seconds == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(one.seconds)
        peak = self.peaks[one.seconds]
        memory = Memory(one.state_bytes, 0, 0, 0, peak)
        return Trial(one, peak <= CAPACITY, "", memory)


def run(candidates: list[Candidate], compiler: Compiler, most: int = 6) -> tuple[Trial, ...]:
    found = search(candidates, compiler, CAPACITY, most)
    # Whatever happens, each candidate has one outcome, and what fits comes first.
    assert sorted(t.candidate.seconds for t in found) == sorted(c.seconds for c in candidates)
    fits = [t.fits is True for t in found]
    assert fits == sorted(fits, reverse=True)
    return found


def test_the_fastest_that_fits_is_best_and_those_close_behind_are_compiled() -> None:
    candidates = [candidate(s, remat=str(s)) for s in (1.0, 1.05, 2.0, 3.0)]
    compiler = Compiler({1.0: 200, 1.05: 90, 2.0: 50, 3.0: 20})
    found = run(candidates, compiler)
    assert found[0].candidate.seconds == 1.05
    assert compiler.asked == [1.0, 1.05]
    compiler = Compiler({1.0: 90, 1.05: 80, 2.0: 50, 3.0: 20})
    assert [t.fits for t in run(candidates, compiler)] == [True, True, None, None]
    assert compiler.asked == [1.0, 1.05]


def test_what_cannot_fit_is_not_compiled() -> None:
    candidates = [
        candidate(1.0, state=101),  # the state alone
        candidate(1.5, remembered=8 * 91),  # 91 of each device, and 10
        candidate(1.6, remembered=8 * 91, remat="half", microbatches=2),
        candidate(2.0, state=20),
        candidate(2.5, state=10),  # the activations of the last, 300 - 2 * 20, are too much
        candidate(3.0, state=10, microbatches=4),  # a quarter of them, and 10
        candidate(4.0, state=10, remat="full"),
    ]
    compiler = Compiler({1.6: 110, 2.0: 300, 3.0: 120, 4.0: 60})
    found = run(candidates, compiler)
    assert compiler.asked == [1.6, 2.0, 3.0, 4.0]
    assert found[0].candidate.seconds == 4.0
    outcomes = {t.candidate.seconds: t.verdict for t in found}
    assert "alone take" in outcomes[1.0]
    assert "kept for the backward pass" in outcomes[1.5]
    assert "evenly spread" in outcomes[2.5]


def test_if_nothing_fits_what_lacks_least_comes_first() -> None:
    candidates = [candidate(s, remat=str(s)) for s in (1.0, 2.0, 3.0)]
    found = run(candidates, Compiler({1.0: 300, 2.0: 110, 3.0: 120}))
    assert [t.candidate.seconds for t in found] == [2.0, 3.0, 1.0]
    assert not any(t.fits for t in found)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_compilations_than_allowed(most: int) -> None:
    candidates = [candidate(s, remat=str(s)) for s in (1.0, 2.0, 3.0, 4.0)]
    compiler = Compiler(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 300))
    run(candidates, compiler, most)
    assert len(compiler.asked) == most


def test_after_a_ctrl_c_what_is_known_is_returned() -> None:
    candidates = [candidate(s, remat=str(s)) for s in (1.0, 2.0, 3.0)]
    compiler = Compiler({1.0: 300, 2.0: 50, 3.0: 20}, interrupted_at=2.0)
    found = run(candidates, compiler)
    assert compiler.asked == [1.0]
    assert [t.fits for t in found] == [False, None, None]


@pytest.mark.parametrize(("num_devices", "batch"), [*itertools.product([1, 6, 8, 64], repeat=2)])
def test_meshes_are_all_that_split_the_batch(num_devices: int, batch: int) -> None:
    found = list(meshes(num_devices, batch))
    every = [
        {"data": d, "fsdp": f, "tensor": t}
        for d, f, t in itertools.product(range(1, num_devices + 1), repeat=3)
        if d * f * t == num_devices and batch % (d * f) == 0
    ]
    assert sorted(found, key=str) == sorted(every, key=str)


def test_variants_are_all_combinations_the_first_values_first() -> None:
    assert variants({}) == [{}]
    found = variants({"a": [1, 2], "b": ["x", "y"]})
    assert found[0] == {"a": 1, "b": "x"}
    assert len({tuple(x.items()) for x in found}) == 4


@pytest.mark.parametrize(
    ("message", "temporaries", "peak"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory. Used 34.00G of 30.75G hbm.", 34 * 2**30 - 6, 34 * 2**30),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
            "(2.50M) exceeds available HBM (15.75G).",
            int(2.5 * 2**20) - 6,
            int(2.5 * 2**20),
        ),
        ("RESOURCE_EXHAUSTED: no numbers", None, None),
    ],
)
def test_what_a_compiler_that_found_no_room_says(message: str, temporaries: Any, peak: Any) -> None:
    found = Memory(3, 2, 1, 3, peak_by_message(message))
    assert (found.temporaries, found.peak) == (temporaries, peak)
