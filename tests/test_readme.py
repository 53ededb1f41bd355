"""Every Python block of the README runs, in order, in one namespace; its table is the one that is printed."""

import ast
import pathlib
import re
import warnings
from typing import Any

import jax
import numpy as np

import redco_eqx as rx
from redco_eqx import models

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run_and_the_table_is_true(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}

    def run(program: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)  # Python prints none of these
            exec(compile(program, "README.md", "exec"), namespace)

    def printed() -> Any:
        found = capfd.readouterr()
        assert "warning" not in found.err.lower()
        return found

    example, program, functions, within, loop, planned, streams, pretrained, *by_others = blocks("python")
    by_orbax, by_tensorstore = by_others
    run(example)
    out, err = printed()
    table, by_program, sent = blocks("text")
    assert table.rstrip() in out
    first, last = 5.55, 3.6  # uniform over 256 bytes is log(256) nats; letters are not uniform
    losses = [float(x) for x in re.findall(r"\bloss (\d+\.\d+)", err)]
    assert losses
    assert losses[-1] < last < first

    run(program)
    assert by_program.strip() in printed().out

    run(functions)
    outputs = ast.literal_eval(printed().out)
    contexts = [bytes(x).decode() for x, _ in namespace["examples"][:3]]
    assert [output.rpartition("|")[0] for output in outputs] == contexts

    run(within)
    out, err = printed()
    assert [int(line.partition(" ")[0]) for line in out.splitlines()][:2] == [50, 100]
    assert "eval/loss" in err

    step = int(namespace["state"].step)
    run(loop)
    rows = [re.sub(r"\w+\.\w+:\d+", "", line).split() for line in printed().out.splitlines()]
    for line in sent.splitlines():
        assert re.sub(r"\w+\.\w+:\d+", "", line).split() in rows
    assert (
        int(namespace["state"].step)
        == 2 * step
        == 2 * rx.num_train_steps(len(namespace["examples"]), batch_size=64, num_epochs=1)
    )
    assert jax.tree.leaves(namespace["state"].params)[0].sharding.mesh == namespace["mesh"]

    run(planned)
    out = printed().out
    assert "fits: data=" in out
    assert "MiB sent" in out
    assert rx.make_mesh(**namespace["found"].mesh).size == 8

    run(streams)
    assert int(namespace["state"].step) == 2 * step + 100
    assert "a stream of examples, read whole" in printed().err

    run(pretrained)
    state = namespace["state"]
    assert int(state.step) == 3
    assert "key/value: 8 heads split" in printed().out
    assert {path.name for path in (tmp_path / "finetuned").iterdir()} == {"config.json", "model.safetensors"}
    saved = rx.to_arrays(models.load_pretrained("finetuned", stacked=True))
    np.testing.assert_equal(jax.device_get(saved), jax.device_get(rx.to_arrays(state.model)))

    for program in (by_orbax, by_tensorstore):
        run(program)
        printed()
        arrays = namespace.pop("arrays")
        for path, x in state.params.items():
            np.testing.assert_array_equal(arrays[f"model/{path}"], x)


def test_commands_of_the_readme_are_those_of_ci():
    ci = (pathlib.Path(__file__).parent.parent / ".ci" / "run").read_text()
    assert "python -m pip install nox && python -m nox -s tests" in README
    assert "python -m pip install nox && python -m nox -s tests" in ci
