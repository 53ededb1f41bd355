"""Every Python block of the README runs, in order, in one namespace, and prints what
stands below it."""

import math
import re

import pages

import redco_eqx as rx

README = (pages.ROOT / "README.md").read_text()
OF_MODELS = pages.ROOT / "models" / "README.md"


def test_python_blocks_run_and_the_tables_are_true(
    capfd, tmp_path, monkeypatch, recwarn
):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    example, program = (
        block.code for block in pages.blocks_of(pages.ROOT / "README.md", "python")
    )
    table, by_program = (
        block.code for block in pages.blocks_of(pages.ROOT / "README.md", "text")
    )

    exec(compile(example, "README.md", "exec"), namespace)
    out, err = capfd.readouterr()
    assert table.rstrip() in out
    # Uniform over 256 bytes is log(256) nats; letters are not uniform.
    claimed = re.search(r"falls from ([\d.]+) to about ([\d.]+) in one", README)
    assert claimed
    first, last = float(claimed[1]), float(claimed[2])
    losses = [float(x) for x in re.findall(r"\bloss (\d+\.\d+)", err)]
    assert abs(first - math.log(256)) < 0.05
    assert abs(losses[-1] - last) < 0.15  # each Python has another argparse
    num_examples = len(namespace["examples"])
    assert int(namespace["state"].step) == rx.num_train_steps(
        num_examples, batch_size=64, num_epochs=1
    )

    exec(compile(program, "README.md", "exec"), namespace)
    assert by_program in capfd.readouterr().out
    assert not [str(warning.message) for warning in recwarn]


def test_the_links_and_commands_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (pages.ROOT / link).exists()] == []
    command = "python -m pip install nox && python -m nox -s tests"
    assert command in README
    assert command in (pages.ROOT / ".ci" / "run").read_text()


def test_the_readme_of_the_models_is_true(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [example] = (block.code for block in pages.blocks_of(OF_MODELS, "python"))
    [printed] = (block.code for block in pages.blocks_of(OF_MODELS, "text"))
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capfd.readouterr().out == printed

    text = OF_MODELS.read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert len(links) > 8
    assert [link for link in links if not (OF_MODELS.parent / link).exists()] == []
    of_page = rows_of(
        section_of(
            (pages.PAGES / "models" / "index.md").read_text(), "Supported families"
        )
    )
    assert rows_of(section_of(text, "Families")) == [row[:2] for row in of_page]
    both = "python -m pip install . ./models"
    assert all(
        both in page
        for page in (text, README, (pages.PAGES / "install.md").read_text())
    )


def rows_of(text: str) -> list[list[str]]:
    """The cells of the tables in a text."""
    lines = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section_of(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", text)


def test_tables_of_the_readme_are_small():
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    tables = [rows_of(section_of(README, title))[2:] for title in titles]
    assert sum(map(bool, tables)) == 2
    for rows in tables:
        assert len(rows) <= 6
        assert all(cell.count("](") <= 5 for row in rows for cell in row)


def test_each_number_of_the_readme_stands_on_its_page_and_has_a_command():
    rows = rows_of(section_of(README, "In numbers"))[2:]
    sessions = re.findall(
        r"^def (\w+)\(session", (pages.ROOT / "noxfile.py").read_text(), re.MULTILINE
    )
    assert rows
    for what, ours, beside, command in rows:
        found = numbers(ours + " " + beside)
        link = re.fullmatch(r"\[`(.+)`\]\((docs/.+)\)", command)
        assert found, what
        assert link, what
        assert set(found) <= set(numbers((pages.ROOT / link[2]).read_text())), what
        first, *rest = link[1].split()
        assert (
            rest[1] in sessions if first == "nox" else (pages.ROOT / first).exists()
        ), what
    claim = re.search(
        r"\*\*([\d.]+) bits.*?with\s([\d.]+)\sfor.*?\((\d+) seconds", README, re.DOTALL
    )
    assert claim
    page = (pages.PAGES / "five-minutes.md").read_text()
    (row,) = re.findall(r"^\| .*nox -s quickstart.*$", page, re.MULTILINE)
    assert numbers(row)[:3] == list(claim.groups())


def test_the_page_beside_others_has_the_rows_of_the_results():
    def table(text: str) -> set[tuple[str, ...]]:
        """Mesh and model, peer, MiB, sent, memory, step."""
        rows: set[tuple[str, ...]] = set()
        case = ""
        for row in rows_of(text):
            case = row[0] or case
            rows.add((case, *row[1:6]))
        return rows

    page = section_of(
        (pages.PAGES / "benchmarks.md").read_text(), "Comparison with other libraries"
    )
    of_page = {row for row in table(page) if row[0].startswith(("data", "fsdp"))}
    assert len(of_page) > 20
    assert of_page <= table((pages.ROOT / "benchmarks" / "RESULTS.md").read_text())
