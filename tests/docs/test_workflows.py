"""The GitHub workflows run sessions that exist: each change runs what `.ci/run` runs,
and every week runs what takes longer."""

import re

import pages
import yaml

FOLDER = pages.ROOT / ".github" / "workflows"
# Each needs a GPU, hours, or packages of others, and prints a table for the site.
BY_HAND = {"gpu", "bench", "mutants", "peers", "examples"}


def sessions_of(text: str) -> set[str]:
    """The sessions that the nox commands of a script name, without their options."""
    commands = re.findall(r"nox -s ([\w ]+)", text)
    return {name for command in commands for name in command.split()}


def sessions_of_workflow(name: str) -> set[str]:
    text = (FOLDER / name).read_text()
    found = sessions_of(text)
    for job in yaml.safe_load(text)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = [row["session"] for row in matrix.get("include", [])]
        for row in [*rows, *matrix.get("session", [])]:
            found |= sessions_of(f"nox -s {row}")
    return found


def test_each_change_runs_what_ci_runs():
    local = sessions_of((pages.ROOT / ".ci" / "run").read_text())
    assert len(local) >= 8
    assert local <= sessions_of_workflow("changes.yml")


def test_the_workflows_name_the_sessions_of_nox_and_leave_out_those_by_hand():
    text = (pages.ROOT / "noxfile.py").read_text()
    every = set(re.findall(r"^def (\w+)\(session", text, re.MULTILINE))
    found = {
        name
        for path in FOLDER.glob("*.yml")
        for name in sessions_of_workflow(path.name)
    }
    assert found == every - BY_HAND
