"""The scalars that TensorBoard reads."""

import math
import pathlib
import sys

import numpy as np
import pytest
from helpers import events

from redco_eqx._training.tensorboard import TensorBoardLogger


def test_each_number_is_a_scalar(tmp_path: pathlib.Path) -> None:
    logger = TensorBoardLogger(tmp_path / "run")
    assert not list(tmp_path.iterdir()), "nothing is written before the first row"
    logger(3, {"train/loss": 2.5, "eval/loss": 1.5})
    logger(4, {"train/loss": math.nan})
    # Without a close: a row is in the file at once.
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events(tmp_path / "run")
        for value in event.summary.value
    ]
    expected = [
        (3, "train/loss", 2.5),
        (3, "eval/loss", 1.5),
        (4, "train/loss", math.nan),
    ]
    np.testing.assert_equal(scalars, expected)
    logger.close()


def test_it_is_told_once_where_a_run_goes_on(tmp_path: pathlib.Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger(5, {"a": 1.0})
    logger.rewind(3)
    for step in (4, 8):
        logger(step, {"a": 2.0})
        logger.close()
        sessions = [e.step for e in events(tmp_path) if e.HasField("session_log")]
        assert sessions == [4]
    found = [v.simple_value for e in events(tmp_path) for v in e.summary.value]
    assert found == [1.0, 2.0, 2.0]


def test_loggers_of_one_second_keep_their_files(tmp_path: pathlib.Path) -> None:
    for step in range(3):
        logger = TensorBoardLogger(tmp_path)
        logger(step, {"a": 1.0})
        logger.close()
        logger.close()
    assert sorted(e.step for e in events(tmp_path) if e.summary.value) == [0, 1, 2]


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install \"redco_eqx\[tensorboard\]\""):
        TensorBoardLogger(tmp_path)


@pytest.mark.parametrize(
    ("directory", "message"),
    [("gs://bucket/run", "which is an address"), ("file", "is a file")],
)
def test_a_directory_that_cannot_be(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    with pytest.raises(ValueError, match=message):
        TensorBoardLogger(directory)
