"""Every Python block of the README runs, in order, in one namespace, and prints what stands below it."""

import re

import pages

import redco_eqx as rx

README = (pages.ROOT / "README.md").read_text()


def test_python_blocks_run_and_the_tables_are_true(capfd, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    example, program = (block.code for block in pages.blocks_of(pages.ROOT / "README.md", "python"))
    table, by_program = (block.code for block in pages.blocks_of(pages.ROOT / "README.md", "text"))

    exec(compile(example, "README.md", "exec"), namespace)
    out, err = capfd.readouterr()
    assert table.rstrip() in out
    first, last = 5.55, 3.6  # uniform over 256 bytes is log(256) nats; letters are not uniform
    losses = [float(x) for x in re.findall(r"\bloss (\d+\.\d+)", err)]
    assert losses
    assert losses[-1] < last < first
    num_examples = len(namespace["examples"])
    assert int(namespace["state"].step) == rx.num_train_steps(num_examples, batch_size=64, num_epochs=1)

    exec(compile(program, "README.md", "exec"), namespace)
    assert by_program in capfd.readouterr().out
    assert not [str(warning.message) for warning in recwarn]


def test_commands_of_the_readme_are_those_of_ci():
    ci = (pages.ROOT / ".ci" / "run").read_text()
    assert "python -m pip install nox && python -m nox -s tests" in README
    assert "python -m pip install nox && python -m nox -s tests" in ci


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 150
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (pages.ROOT / link).exists()] == []
