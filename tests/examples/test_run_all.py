"""The table of the examples: what counts as a line of code, what a bound says, which
rows are replaced."""

import pytest
import run_all


def test_an_example_counts_each_file_of_the_folder_that_it_imports():
    names = {
        file.name
        for file in run_all.files_of(run_all.file_of("reinforcement_learning/ppo"))
    }
    assert names == {"ppo.py", "environments.py", "common.py"}
    generate = run_all.HERE / "language_modeling" / "generate.py"
    assert generate in run_all.files_of(run_all.file_of("lora")), "by way of another"


@pytest.mark.parametrize(
    ("bound", "number", "baseline", "expected"),
    [
        (">= 0.9", 0.9, 0.0, True),
        (">= 0.9", 0.89, 0.0, False),
        ("<= 2", 2.1, 0.0, False),
        ("within 1%", -1.005, -1.0, True),
        ("within 1%", 1.02, 1.0, False),
    ],
)
def test_bounds(bound, number, baseline, expected):
    assert run_all.is_met(bound, number, baseline) is expected


def test_of_many_runs_the_worst_last_number_counts():
    runs = [{1: 0.1, 2: 0.8}, {1: 0.9, 3: 0.6}]
    assert run_all.last_of(runs, ">= 0.5") == 0.6
    assert run_all.last_of(runs, "<= 0.5") == 0.8
    assert run_all.last_of([3.0, 2.0], "<= 2") == 2.0
    assert run_all.last_of(7.0, ">= 1") == 7.0


def test_the_page_has_every_example_and_what_is_stated_of_it():
    lines = (run_all.HERE / "README.md").read_text("utf-8").splitlines()
    rows = [row for row in lines if row.startswith("| [")]
    for name, example in run_all.EXAMPLES.items():
        *table, last = [
            row.split(" | ") for row in rows if row.startswith(f"| [{name}](")
        ]
        stated = [
            (what, measure, bound) for what, (measure, bound) in example.stated.items()
        ]
        assert [(cells[1], cells[2], cells[5]) for cells in table] == stated
        assert len(last) == 4
