"""Whole records with foreign content: refused by name, whatever stands in them."""

import contextlib
import hashlib
import json
import pathlib
import shutil
import warnings
from typing import Any

import jax
import pytest
from fit_helpers import counted, linear_state, raised, steps_in

import redco_eqx as rx

ODD: list[Any] = [None, True, -1, 1.5, "x", [], {}, [1], {"a": 1}, [[1, 2]], 2**70]
ODD += [{"a": {"b": None}}]
NAMED = (rx.errors.CheckpointError, rx.errors.CheckpointFormatError)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> pathlib.Path:
    """A run with one checkpoint, in the middle of a row of its log."""
    directory = tmp_path_factory.mktemp("whole")
    counted(None, rx.Checkpoints(directory, every_steps=3), num_steps=3)
    return directory


def record_of(directory: pathlib.Path) -> pathlib.Path:
    return directory / "3" / "record" / "record.json"


def written(directory: pathlib.Path, content: Any) -> None:
    """With its right SHA-256, as another version would write it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    record_of(directory).write_text(json.dumps({"sha256": digest, "content": content}))


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the record, but only one array of each kind, and what the user
    added."""
    if not isinstance(content, dict):
        return [path]
    found = [path] if path else []
    for name, x in content.items():
        if path != ("arrays",) or name in ("key", "step", "model/weight"):
            found += places(x, (*path, name))
    return found


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    name, *rest = path
    return {
        **content,
        name: with_value(content[name], tuple(rest), value) if rest else value,
    }


# Anything may stand there: the user's own, or what is only compared or told.
FREE = ("extras", "versions", "identity", "id", "order", "num_rows")
FREE += ("finished", "stopped", "window")


def outcome(call: Any) -> str:
    """Return `""` if the call succeeds, and else its error, which must be one with a
    name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (*NAMED, ValueError) as error:
            is_raw = type(error) is ValueError and not str(error).startswith(
                ("fit: ", "restore: ", "the state")
            )
            return f"RAW {error!r}" if is_raw else f"{type(error).__name__}: {error}"
    return ""


def test_each_field_of_another_kind_is_refused_or_harmless(whole: pathlib.Path) -> None:
    content = json.loads(record_of(whole).read_text())["content"]
    kept = record_of(whole).read_bytes()
    like = linear_state()
    expected = jax.device_get(rx.restore(whole, like).params)
    num_refused = 0
    for path in places(content):
        for value in ODD:
            if value == with_nothing(content, path):
                continue
            written(whole, with_value(content, path, value))
            said = outcome(lambda: rx.list_checkpoints(whole))
            said = said or outcome(lambda: check(rx.restore(whole, like), expected))
            assert not said.startswith("RAW"), (path, value, said)
            num_refused += bool(said)
            assert said or is_free(path, value), (path, value)
    record_of(whole).write_bytes(kept)
    assert num_refused > 200
    assert steps_in(whole) == [3]


def with_nothing(content: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        content = content[name]
    return content


def is_free(path: tuple[Any, ...], value: Any) -> bool:
    """True where such a value may stand, for a reader that is not `fit`."""
    if any(part in FREE for part in path):
        return True
    if path == ("run", "positions"):
        return value in (None, [[1, 2]])
    if path[0] == "run":
        return value in (None, 2**70)
    return value == 2**70 or (path == ("metrics",) and value == {})


def check(state: Any, expected: Any) -> None:
    found = jax.device_get(state.params)
    assert all((found[name] == expected[name]).all() for name in expected)


RUN = ("begin", "num_steps", "epoch", "batch", "batch_size", "num_examples")
RUN += ("evaluations", "window", "order", "id")
RUN += ("positions", "identity", "num_rows", "finished", "stopped")


@pytest.mark.parametrize("name", RUN)
def test_a_run_never_fails_raw_over_its_record(
    name: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    content = json.loads(record_of(whole).read_text())["content"]
    for index, value in enumerate([*ODD, "drop"]):
        directory = shutil.copytree(whole, tmp_path / str(index))
        changed = with_value(content, ("run", name), value)
        if value == "drop":
            del changed["run"][name]
        written(directory, changed)
        said = outcome(
            lambda d=directory: counted(
                None, rx.Checkpoints(d, every_steps=9), num_steps=4
            )
        )
        assert not said.startswith("RAW"), (value, said)
        if "FormatError" in said:
            assert (directory / "3").is_dir()
            assert "unchanged" in said


WINDOWS = [
    {"metrics": {}},
    {"num_steps": "x", "metrics": {}},
    {"num_steps": 2**40, "metrics": {}},
    {"a": 1},
    {"num_steps": 1, "metrics": {"loss": [1, 2]}},
    {"num_steps": 1, "metrics": {"loss": ["foo", 1, 2]}},
]
IDENTITIES = [
    {"key": "00"},
    {"key": "00", "parameters": "x"},
    {"key": "00", "parameters": [1.0], "examples": {"0": []}},
]


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("window", x) for x in WINDOWS), *(("identity", x) for x in IDENTITIES)],
)
def test_a_foreign_part_of_a_run_is_named(
    name: str, value: Any, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    directory = shutil.copytree(whole, tmp_path / "run")
    content = json.loads(record_of(whole).read_text())["content"]
    written(directory, with_value(content, ("run", name), value))
    said = outcome(lambda: counted(None, directory, num_steps=4))
    assert said.startswith("CheckpointFormatError") or "is a different one" in said, (
        said
    )


@pytest.mark.parametrize("impl", ["foo", "rbg", "", None])
def test_a_foreign_kind_of_key_is_named(
    impl: Any, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    directory = shutil.copytree(whole, tmp_path / "run")
    content = json.loads(record_of(whole).read_text())["content"]
    written(directory, with_value(content, ("arrays", "key", "key_impl"), impl))
    match = (
        rf"{directory}/3 has key as key<fry>\[\] of the kind {impl!r}, "
        r"which does not make key<fry>.*unchanged"
    )
    raised(
        rx.errors.CheckpointFormatError,
        rx.restore,
        directory,
        linear_state(),
        match=match,
    )
    raised(rx.errors.CheckpointFormatError, counted, None, directory, match=match)
    assert (directory / "3").is_dir()


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", '"x"', "{}", '{"content": 1}', "[" * 100_000, "\xff", ""],
)
def test_a_record_that_is_something_else_is_damaged(
    text: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    directory = shutil.copytree(whole, tmp_path / "run")
    record_of(directory).write_bytes(text.encode("latin-1"))
    raised(
        rx.errors.CheckpointError,
        rx.restore,
        directory,
        linear_state(),
        match="is damaged",
    )


@pytest.mark.parametrize("content", [[], None, 3, "x", [1]], ids=repr)
def test_content_that_is_no_object_is_of_another_version(
    content: Any, whole: pathlib.Path, tmp_path: Any
) -> None:
    directory = shutil.copytree(whole, tmp_path / "run")
    written(directory, content)
    raised(
        rx.errors.CheckpointFormatError,
        rx.restore,
        directory,
        linear_state(),
        match="another version",
    )
    with contextlib.suppress(*NAMED), pytest.warns(UserWarning, match="left out"):
        rx.list_checkpoints(directory)
