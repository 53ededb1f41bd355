"""Processes that can never meet end soon, and by name. A process that is only late is
named, and goes on."""

import pathlib
import re
from typing import Any

import pytest
from helpers import in_long
from hosts import harness

from redco_eqx._distributed.whereabouts import Judge, Status

PROGRAM = pathlib.Path(__file__).with_name("_never_meet.py")
CALLS = ("predict", "Evaluation", "save", "restore", "init_model", "fit")


def run(
    directory: pathlib.Path, case: str, seconds: float = 120
) -> tuple[list[int | None], str, str]:
    """Return the exit codes of two processes, and what they have written to standard
    error."""
    options: Any = {"program": PROGRAM, "num_devices": 1}
    processes = harness.start_loopback(directory, case, **options)
    codes, _ = processes.leave(seconds)
    return codes, processes.text(0), processes.text(1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "sys.exit 1",
            r"process 0 \(.* waits in fit \(.*\) for process 1 \(.*, "
            r"which has ended \(SystemExit: 1\)",
        ),
        (
            "after evaluate",
            r"process 0 \(.* waits in evaluate \(.*\) for process 1 \(.*, "
            r"which has ended\.",
        ),
        (
            "hook evaluate",
            r"evaluate has been reached on process 0 \(.*, "
            r"but a decision of all processes on .*at fit \(",
        ),
        *in_long(
            ("sys.exit 0", r"for process 1 \(.*, which has ended \(SystemExit: 0\)"),
            *(
                (
                    f"after {call}",
                    rf"waits in {call}.* for process 1 \(.*, which has ended\.",
                )
                for call in CALLS
            ),
            *(
                (f"hook {call}", r"has been reached on process 0 \(.*, but ")
                for call in CALLS
            ),
        ),
    ],
)
def test_who_can_never_meet_ends_by_name(
    tmp_path: pathlib.Path, case: str, message: str
) -> None:
    codes, *logs = run(tmp_path, case)
    assert codes == [1, 1], logs
    for log in logs:
        assert re.search(message, log), log


def test_a_process_that_is_late_is_named_and_goes_on(tmp_path: pathlib.Path) -> None:
    """Then one comes to its end while the other works for itself."""
    codes, *logs = run(tmp_path, "slow")
    assert codes == [0, 0], logs
    waited = (
        r"process 0 \(.* has waited for 1\d s in fit \(_never_meet.py, line \d+, "
        r"in train\) for process 1 \("
    )
    for log in logs:
        assert re.search(waited, log), log
        assert log.count("has waited") == 1, log


@pytest.mark.long
def test_an_exit_that_all_have_caught_ends_nobody(tmp_path: pathlib.Path) -> None:
    codes, *logs = run(tmp_path, "caught")
    assert codes == [0, 0], logs


# The decision, without processes: 0 waits for 1 in most of these cases.

WAITS, COMPUTES = {"call": "fit", "absent": [1]}, {"call": "fit", "computing": [1]}
ELSEWHERE, ENDED = {"call": "save", "absent": [0]}, {"has_ended": True}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "has ended": (WAITS, ENDED, 3),
    "has ended, with arrays": (COMPUTES, ENDED, 3),
    "ends when its arrays are ready": (COMPUTES, {**ENDED, "computing": [0]}, None),
    "works for itself": ({"call": ""}, ENDED, None),
    "computes outside of the library": ({**COMPUTES, "call": ""}, ENDED, None),
    "has left by sys.exit": (
        {"call": "fit", "seconds": 20.0},
        {**ENDED, "left": "SystemExit: 1"},
        3,
    ),
    "moves on after a sys.exit": (
        {"call": "fit", "seconds": 1.0},
        {**ENDED, "left": "SystemExit: 1"},
        None,
    ),
    "meets elsewhere": (WAITS, ELSEWHERE, 10),
    "meets elsewhere, with arrays": (COMPUTES, ELSEWHERE, 10),
    "meets another": (WAITS, {**ELSEWHERE, "absent": [2]}, None),
    "meets elsewhere when its arrays are ready": (
        COMPUTES,
        {**ELSEWHERE, "computing": [0]},
        None,
    ),
    "both meet elsewhere, and have arrays": (
        {**WAITS, **COMPUTES},
        {**ELSEWHERE, "computing": [0]},
        10,
    ),
    "computes": (WAITS, COMPUTES, None),
    "loads": (WAITS, {"call": "fit", "seconds": 500.0}, None),
    "compiles": (COMPUTES, {"call": "fit", "seconds": 500.0}, None),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_two_that_can_never_meet_are_ended(name: str) -> None:
    one, other, expected = PAIRS[name]
    judge = Judge(["process 0", "process 1"])
    statuses = {0: Status("here", **one), 1: Status("there", **other)}
    said = {second: judge.verdict(statuses, float(second)) for second in range(1000)}
    first = next((second for second, line in said.items() if line), None)
    assert first == expected
    if first is not None:
        assert said[first].startswith("process 0 waits in here for process 1, which ")


def test_thousands_of_processes_are_looked_at() -> None:
    """This takes milliseconds, where a loop over all pairs takes a minute."""
    number = 4096
    judge = Judge([f"process {i}" for i in range(number)])
    many = {i: Status("there", call="fit", absent=[0]) for i in range(1, number)}
    assert judge.verdict({**many, 0: Status("here", call="fit", absent=[7])}, 0.0) == ""
    ended = {i: Status("its end", has_ended=True) for i in range(1, number)}
    assert (
        judge.verdict({**ended, 0: Status("here", call="evaluate", seconds=99)}, 1.0)
        == ""
    )
    assert (
        judge.verdict(
            {**ended, 0: Status("here", call="save", absent=[number - 1])}, 2.0
        )
        == ""
    )
    said = judge.verdict(
        {**ended, 0: Status("here", call="save", absent=[number - 1])}, 9.0
    )
    assert "process 4095, which has ended" in said


def test_a_pair_that_moves_is_never_ended() -> None:
    judge = Judge(["process 0", "process 1"])
    for second in range(1000):
        statuses = {
            0: Status("here", **WAITS),
            1: Status("there", **(ELSEWHERE if second % 9 else {})),
        }
        assert judge.verdict(statuses, float(second)) == ""
        assert judge.verdict({0: statuses[0]}, second + 0.5) == "", (
            "one that does not answer"
        )


def test_each_wait_is_reported_once() -> None:
    judge = Judge([f"process {i}" for i in range(3)])
    statuses = {
        0: Status("here", **WAITS, seconds=11),
        1: Status("there", call="fit"),
        2: Status("x", **WAITS),
    }
    assert judge.reports(statuses, 0.0) == [
        "process 0 has waited for 11 s in here for process 1, which is at there"
    ]
    assert judge.reports(statuses, 500.0) == []
    assert len(judge.reports(statuses, 700.0)) == 1
    both = {
        i: Status("here", call="fit", computing=[1 - i], seconds=99) for i in range(2)
    }
    assert judge.reports(both, 800.0) == [], "a long step"
    del statuses[1]
    assert "process 1, which does not answer" in judge.reports(statuses, 2000.0)[0]
