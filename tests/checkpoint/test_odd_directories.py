"""Directories whose names Orbax or tensorstore take for something else: written so that
they can be read, or refused before anything is written."""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fit_helpers import assert_same, counted, raised, steps_in

import redco_eqx as rx
from redco_eqx._checkpoint import handlers


def state_of(value: float) -> Any:
    return rx.init_state({"weight": jnp.full((4, 4), value)}, key=jax.random.key(1))


NAMES = ("betas=[0.9,0.95]", "layers=[4]", "[!a]", "a*b", "what?", "[x", "x]", "**")
NAMES += ("a**b", "{a,b}", "p%20q#r?s", "é\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_a_pattern_is_only_a_name(
    name: str, tmp_path: pathlib.Path
) -> None:
    directory = tmp_path / name / "run"
    rx.save(directory, state_of(3.0))
    np.testing.assert_array_equal(
        rx.restore(directory, state_of(0.0)).params["weight"], np.full((4, 4), 3.0)
    )
    assert steps_in(directory) == [0]


def test_a_run_in_brackets_continues_exactly(tmp_path: pathlib.Path) -> None:
    expected = counted(None, tmp_path / "plain", num_steps=8)
    counted(None, tmp_path / "betas=[0.9,0.95]", num_steps=4)
    assert_same(counted(None, tmp_path / "betas=[0.9,0.95]", num_steps=8), expected)


def test_a_pattern_does_not_take_the_files_of_a_directory_that_it_matches(
    tmp_path: pathlib.Path,
) -> None:
    """`a*` matches `ab`, in which another run is just writing its checkpoint of the
    same step."""
    other = (
        tmp_path
        / "ab"
        / "0.orbax-checkpoint-tmp"
        / "arrays.orbax-checkpoint-tmp"
        / "ocdbt.process_0"
    )
    other.mkdir(parents=True)
    (other / "manifest.ocdbt").write_bytes(b"of another run")
    rx.save(tmp_path / "a*", state_of(3.0))
    np.testing.assert_array_equal(
        rx.restore(tmp_path / "a*", state_of(0.0)).params["weight"],
        np.full((4, 4), 3.0),
    )


REFUSED: dict[str, tuple[str, str]] = {
    "backslash": ("a\\b", "tensorstore takes a backslash for a slash"),
    "not UTF-8": (os.fsdecode(b"caf\xe9"), "needs names in UTF-8"),
    "gs:": ("gs:/run", "address of a bucket"),
    "s3:": ("s3:", "address of a bucket"),
    "file": ("file", "it is a file"),
    "dangling link": ("link", "it is a link to .*nowhere'?, which does not exist"),
    "below a file": ("file/run", "is a file"),
    "below a dangling link": (
        "link/run",
        "is a link to .*nowhere, which does not exist",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_directory_that_cannot_be_written_is_refused_first(
    kind: str, tmp_path: pathlib.Path
) -> None:
    name, reason = REFUSED[kind]
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(os.listdir(tmp_path))
    for call in (
        rx.Checkpoints,
        lambda path: rx.save(path, state_of(1.0)),
        lambda path: counted(None, path),
    ):
        raised(
            ValueError,
            call,
            tmp_path / name,
            match=f"directory of checkpoints is .*{reason}.*Pass another path",
        )
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("scheme", ["gs", "s3", "az", "hf"])
def test_a_mount_that_orbax_takes_for_a_bucket_is_refused(scheme: str) -> None:
    raised(
        ValueError,
        rx.Checkpoints,
        f"/{scheme}/run",
        match=f"Orbax takes /{scheme} for the buckets of a cloud",
    )


# What is written is read back once


def without_a_merge(self: Any, directory: Any) -> None:
    """Leave the files of the processes as they are, as Orbax did in a directory with
    brackets."""


@pytest.mark.parametrize("how", ["save", "fit", "writer"])
def test_a_checkpoint_that_cannot_be_read_back_ends_the_first_save(
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers.ArraysHandler, "finalize", without_a_merge)
    refusal = {"match": "was written, but cannot be read back"}
    if how == "save":
        raised(rx.errors.CheckpointError, rx.save, tmp_path, state_of(1.0), **refusal)
    elif how == "fit":
        error = raised(
            rx.errors.CheckpointError, counted, None, tmp_path, num_steps=40, **refusal
        )
        assert int(error.state.step) <= 4  # at the second save at the latest
    else:
        writer = rx.Checkpoints(tmp_path).open()
        writer.save(state_of(1.0))
        raised(rx.errors.CheckpointError, writer.wait, **refusal)
        writer.close()


def test_a_checkpoint_of_another_is_not_taken_for_the_one_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ocp.PyTreeCheckpointHandler.restore

    def another(*arguments: Any, **options: Any) -> Any:
        return {"step": read(*arguments, **options)["step"] + 1}

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", another)
    raised(
        rx.errors.CheckpointError,
        rx.save,
        tmp_path,
        state_of(1.0),
        match="holds something else: step 1, not 0",
    )


def test_only_the_first_checkpoint_is_read_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr("redco_eqx._checkpoint.checkpoints.read_back", calls.append)
    counted(None, tmp_path, num_steps=8)
    assert [info.step for info in calls] == [2]
