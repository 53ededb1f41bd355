"""Every Python block of the README runs, in order, in one namespace; its table is the one that is printed."""

import pathlib
import re

import jax

import redco_eqx as rx

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run_and_the_table_is_true(capfd):
    namespace: dict = {"__name__": "readme"}
    python = blocks("python")
    assert len(python) == 3
    # The functions that only show their signature would shadow those of the example.
    example, signatures, loop = python
    exec(compile(example, "README.md", "exec"), namespace)
    out, err = capfd.readouterr()
    (table,) = blocks("text")
    assert table.rstrip() in out
    first, last = 5.55, 3.6  # uniform over 256 bytes is log(256) nats; letters are not uniform
    losses = [float(x) for x in re.findall(r"\bloss (\d+\.\d+)", err)]
    assert losses
    assert losses[-1] < last < first

    exec(compile(signatures, "README.md", "exec"), {})
    step = int(namespace["state"].step)
    exec(compile(loop, "README.md", "exec"), namespace)
    assert (
        int(namespace["state"].step)
        == 2 * step
        == 2 * rx.num_train_steps(len(namespace["examples"]), batch_size=64, num_epochs=1)
    )
    assert jax.tree.leaves(namespace["state"].params)[0].sharding.mesh == namespace["mesh"]


def test_commands_of_the_readme_are_those_of_ci():
    ci = (pathlib.Path(__file__).parent.parent / ".ci" / "run").read_text()
    assert "python -m pip install nox && python -m nox -s tests" in README
    assert "python -m pip install nox && python -m nox -s tests" in ci
