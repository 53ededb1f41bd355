"""What a plan considers, and in which order: pure functions, with an invented compiler."""

import itertools
from typing import Any

import equinox as eqx
import jax
import optax
import pytest

import redco_eqx as rx
from redco_eqx._planning.memory import Memory, peak_by_message
from redco_eqx._planning.trial import Candidate, Trial, meshes, search, variants

CAPACITY = 100
MESH = rx.make_mesh()
STATE = rx.init_state(eqx.nn.Linear(1, 1, key=jax.random.key(0)), optax.sgd(0.1), key=jax.random.key(0))


def candidate(seconds: float, state: int = 10, remat: str = "none", microbatches: int = 1) -> Candidate:
    return Candidate(MESH, {"remat": remat}, microbatches, STATE, state, 0.0, 0.0, seconds)


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


def test_only_the_state_is_a_reason_to_refuse() -> None:
    candidates = [candidate(1.0, state=101), candidate(2.0, state=120), candidate(3.0, remat="full")]
    compiler = Compiler({3.0: 60})
    found = run(candidates, compiler)
    assert compiler.asked == [3.0]
    assert [t.candidate.seconds for t in found] == [3.0, 1.0, 2.0]  # what lacks least first
    assert all("alone take" in t.verdict for t in found[1:])


CANDIDATES = [
    candidate(2.0, state=20),
    candidate(2.5, state=10),  # with the activations of the first, 300 - 2 * 20, too much
    candidate(3.0, state=10, microbatches=4),  # with a quarter of them, not
    candidate(4.0, state=10, remat="full"),
]


def test_what_seems_too_large_waits_for_the_others() -> None:
    compiler = Compiler({2.0: 300, 3.0: 120, 4.0: 60})
    found = run(CANDIDATES, compiler)
    assert compiler.asked == [2.0, 3.0, 4.0]
    assert found[0].candidate.seconds == 4.0
    assert "seems too large" in {t.candidate.seconds: t.verdict for t in found}[2.5]


def test_what_seems_too_large_is_compiled_if_nothing_else_fits() -> None:
    compiler = Compiler({2.0: 300, 2.5: 90, 3.0: 120, 4.0: 110})
    found = run(CANDIDATES, compiler)
    assert compiler.asked == [2.0, 3.0, 4.0, 2.5]
    assert found[0].fits
    assert found[0].candidate.seconds == 2.5


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
