"""The trials of a plan, and their order: pure functions, with an invented compiler."""

import dataclasses
import inspect
import itertools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redco_eqx as rx
from redco_eqx._planning.memory import Memory, limit_by_message, peak_by_message
from redco_eqx._planning.targets import GIB, Chip, Target
from redco_eqx._planning.trial import Trial, attempt, meshes, search

CAPACITY = 100
MESH = rx.make_mesh()
STATE = rx.init_state(
    eqx.nn.Linear(1, 1, key=jax.random.key(0)), optax.sgd(0.1), key=jax.random.key(0)
)
TARGET = Target("", (), Chip(GIB, 1.0, 1.0), "cpu")


def trial(
    seconds: float, held: int = 10, remat: str = "none", microbatches: int = 1
) -> Trial:
    return Trial(
        MESH,
        {"remat": remat},
        microbatches,
        STATE,
        {},
        TARGET,
        Memory(held, 0, 0, 0),
        0.0,
        seconds,
    )


class Compiler:
    """Says of each trial, by its seconds, how much it needs; and remembers what it was
    asked. Somebody presses Ctrl-C at any other trial."""

    def __init__(self, peaks: dict[float, int]):
        self.peaks = peaks
        self.asked = []

    def __call__(self, one: Trial) -> Trial:
        if one.seconds not in self.peaks:
            raise KeyboardInterrupt
        self.asked.append(one.seconds)
        peak = self.peaks[one.seconds] // one.num_microbatches
        memory = dataclasses.replace(one.memory, peak=peak)
        return dataclasses.replace(one, memory=memory, fits=peak <= CAPACITY)


def run(
    trials: list[Trial], compiler: Compiler, most: int = 6, rows: int = 1
) -> tuple[Trial, ...]:
    found = search(trials, compiler, CAPACITY, most, rows)
    # Whatever happens, each trial has one outcome, what fits comes first, and only what
    # is held is a reason to refuse a trial: a compiled program can need less than
    # anything else says.
    assert {t.seconds for t in found} == {t.seconds for t in trials}
    fits = [t.fits is True for t in found]
    assert rows > 1 or fits == sorted(fits, reverse=True)
    assert len(compiler.asked) <= most
    for one in found:
        assert ("alone take" in one.verdict) == (
            one.fits is None and one.memory.arguments > CAPACITY
        )
    return found


def test_a_mesh_that_fits_is_found_and_the_fastest_of_those_is_best() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        held = rng.integers(1, 2 * CAPACITY, 5)
        trials = [
            trial(float(i + 1), int(n), rng.choice(["none", "full"]))
            for i, n in enumerate(held)
        ]
        compiler = Compiler(
            {i + 1.0: int(n + rng.integers(0, 150)) for i, n in enumerate(held)}
        )
        found = run(trials, compiler, most=5)
        fitting = [
            seconds for seconds, peak in compiler.peaks.items() if peak <= CAPACITY
        ]
        assert found[0].fits is bool(fitting)
        if fitting:
            assert found[0].seconds == min(fitting)
        else:
            assert compiler.peaks[found[0].seconds] == min(
                map(compiler.peaks.__getitem__, compiler.asked)
            )


def test_those_close_behind_are_compiled_and_no_more_than_allowed() -> None:
    trials = [trial(s, remat=str(s)) for s in (1.0, 1.05, 2.0, 3.0)]
    compiler = Compiler({1.0: 90, 1.05: 80, 2.0: 50, 3.0: 20})
    found = run(trials, compiler)
    assert [t.fits for t in found] == [True, True, None, None]
    assert compiler.asked == [1.0, 1.05]
    assert "2.00 times as long" in found[2].verdict
    assert (
        "max_compilations"
        in run(trials, Compiler({1.0: 300, 1.05: 300}), most=2)[-1].verdict
    )


def test_what_seems_too_large_waits_for_the_others_the_smallest_first() -> None:
    trials = [
        trial(2.0, held=20),
        # With the activations of the first, 300 - 2 * 20, too much.
        trial(2.5, held=15),
        trial(2.7, held=10),
        trial(3.0, held=10, microbatches=4),  # with a quarter of them, not
        trial(4.0, held=10, remat="full"),
    ]
    compiler = Compiler({2.0: 300, 2.5: 290, 2.7: 280, 3.0: 480, 4.0: 60})
    assert run(trials, compiler)[0].seconds == 4.0
    assert compiler.asked == [2.0, 3.0, 4.0, 2.7, 2.5]


APART = [trial(s, remat=str(s)) for s in (1.0, 2.0, 3.0)]


def test_if_nothing_fits_what_lacks_least_is_compiled_again_in_microbatches() -> None:
    compiler = Compiler({1.0: 300, 2.0: 110, 3.0: 120})
    found = run(APART, compiler, rows=16)
    assert [(t.seconds, t.num_microbatches, t.fits) for t in found[:2]] == [
        (2.0, 1, False),
        (2.0, 2, True),
    ]
    assert compiler.asked == [1.0, 2.0, 3.0, 2.0]
    # Microbatches leave the state as it is.
    run([trial(1.0, held=101)], compiler, rows=16)
    assert compiler.asked[4:] == [1.0]


def test_after_a_ctrl_c_what_is_known_is_returned() -> None:
    assert [t.fits for t in run(APART, Compiler({1.0: 300, 3.0: 20}))] == [
        False,
        None,
        None,
    ]


def test_meshes_are_all_that_split_the_batch() -> None:
    for num_devices, batch in itertools.product([1, 6, 8, 64], repeat=2):
        every = [
            {"data": d, "fsdp": f, "tensor": t}
            for d, f, t in itertools.product(range(1, num_devices + 1), repeat=3)
            if d * f * t == num_devices and batch % (d * f) == 0
        ]
        assert sorted(meshes(num_devices, batch), key=str) == sorted(every, key=str)


def test_what_a_compiler_that_found_no_room_says() -> None:
    used = "Ran out of memory. Used 34.00G of 30.75G hbm."
    temporaries = (
        "the total memory required for HLO temporaries (2.50M) exceeds available HBM "
        "(15.75G)."
    )
    for message, peak in ((used, 34 * 2**30), (temporaries, 5 * 2**19)):
        found = Memory(3, 2, 1, 3, peak_by_message(f"RESOURCE_EXHAUSTED: {message}"))
        assert (found.temporaries, found.peak) == (peak - 6, peak)
    assert (
        Memory(
            3, 2, 1, 3, peak_by_message("RESOURCE_EXHAUSTED: no numbers")
        ).temporaries
        is None
    )


TOO_LARGE = {
    "used": "Ran out of memory in memory space hbm. Used 17.38G of 15.75G hbm.",
    "temporaries": "the total memory required for HLO temporaries (17.38G) exceeds "
    "available HBM (15.75G).",
}


@pytest.mark.parametrize("message", TOO_LARGE.values(), ids=TOO_LARGE)
def test_the_verdict_names_what_the_device_has_not_what_was_allowed(
    message, monkeypatch
):
    assert limit_by_message(message) == int(15.75 * 2**30)

    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    one = dataclasses.replace(trial(1.0), batch=np.zeros(8))

    def step(state: rx.TrainState, batch: object, **_: object) -> rx.TrainState:
        return state

    tried = attempt(one, step, 2**50)  # pyright: ignore[reportArgumentType]
    assert tried.fits is False
    assert tried.verdict == "needs 17.38 GiB, but 15.75 GiB are available"


def own_policy(*_: Any, **__: Any) -> bool:
    return False


def test_a_policy_among_the_options_is_written_by_its_name() -> None:
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names("row_out")
    for policy, expected in {
        policies.nothing_saveable: "nothing_saveable",
        # A class in JAX 0.10.2, and a function inside another one in 0.12.
        named: "save_only_these_names" if inspect.isfunction(named) else repr(named),
        own_policy: "own_policy",
    }.items():
        one = dataclasses.replace(trial(1.0), options={"remat": policy})
        assert f"remat={expected}" in str(one)
        assert " at 0x" not in str(one)
