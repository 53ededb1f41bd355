"""The table of the examples: what counts as a line of code, what a bound says, which rows are replaced."""

import pytest
import run_all

PROGRAM = '''"""What it does,
in two lines."""

import sys  # why


def f(x):
    """Docstring."""
    # a comment
    text = """not a
    docstring"""
    return text, x, sys
'''


def test_lines_of_code_are_neither_blank_nor_comment_nor_docstring():
    assert run_all.code_lines(PROGRAM) == 5
    assert run_all.code_lines("") == 0


def test_an_example_counts_each_file_of_the_folder_that_it_imports():
    names = {file.name for file in run_all.files_of(run_all.file_of("reinforcement_learning/ppo"))}
    assert names == {"ppo.py", "environments.py", "common.py"}
    generate = run_all.HERE / "language_modeling" / "generate.py"
    assert generate in run_all.files_of(run_all.file_of("lora")), "by way of another"


@pytest.mark.parametrize("name", run_all.EXAMPLES)
def test_a_row_of_the_table_of_lines_has_its_four_cells(name):
    assert run_all.lines_of(name).count(" | ") == 3


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


def test_rows_of_an_example_are_replaced_in_each_table_and_the_rest_of_the_page_stays():
    first, second, last = list(run_all.EXAMPLES)[:3]
    page = "\n".join(
        ["# Page", "| name | what |", "| --- | --- |", f"| [{first}](a) | old |", f"| [{last}](c) | old |"]
        + ["", "text", "", "| name | lines |", "| --- | --- |", f"| [{second}](b) | 7 |", "end", ""]
    )
    new = {second: [f"| [{second}](b) | {what} |" for what in ("one", "other")]}
    lines = {name: [f"| [{name}](x) | 8 |"] for name in (last, second)}
    found = run_all.with_rows(page, new, lines).splitlines()
    assert [row for row in found if not row.startswith("| [")] == [
        row for row in page.splitlines() if not row.startswith("| [")
    ]
    assert found[3:7] == [f"| [{first}](a) | old |", *new[second], f"| [{last}](c) | old |"]
    assert found[12:14] == [f"| [{second}](x) | 8 |", f"| [{last}](x) | 8 |"]
    assert run_all.with_rows("\n".join(found), new, lines).splitlines() == found


def test_the_page_has_every_example_and_what_is_stated_of_it():
    rows = [
        row for row in (run_all.HERE / "README.md").read_text("utf-8").splitlines() if row.startswith("| [")
    ]
    for name, example in run_all.EXAMPLES.items():
        own = [row.split(" | ") for row in rows if row.startswith(f"| [{name}](")]
        *table, lines = own
        assert [(cells[1], cells[2], cells[5]) for cells in table] == [
            (what, measure, bound) for what, (measure, bound) in example.stated.items()
        ]
        assert len(lines) == 4
