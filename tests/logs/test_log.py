import io
import json
import math
import sys

import numpy as np
import pytest
from helpers import events

from redco_eqx._base.protocols import Logger
from redco_eqx._training.loggers import ConsoleLogger, JSONLLogger, TensorBoardLogger, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def read_lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_all_are_loggers_that_close(tmp_path):
    for logger in (ConsoleLogger(io.StringIO()), JSONLLogger(tmp_path / "a"), TensorBoardLogger(tmp_path)):
        assert isinstance(logger, Logger)
        with logger as entered:
            assert entered is logger
        logger.close()
    assert list(tmp_path.iterdir()) == []  # nothing is written before the first row


# JSON lines


def test_jsonl_rows(tmp_path):
    path = tmp_path / "runs" / "first" / "log.jsonl"
    with JSONLLogger(path) as logger:
        logger(1, {"train/loss": 2.5, "train/examples_per_second": 10.0})
        assert len(read_lines(path)) == 1  # there before anything is closed
        logger(2, {})
    with JSONLLogger(str(path)) as logger:
        logger(3, {"train/loss": 0.1})
    first, second, third = read_lines(path)
    assert abs(first.pop("time") - third.pop("time")) < 60
    assert first == {"step": 1, "train/loss": 2.5, "train/examples_per_second": 10.0}
    assert second.keys() == {"step", "time"}
    assert third == {"step": 3, "train/loss": 0.1}


def test_jsonl_numbers_are_read_back(tmp_path):
    path = tmp_path / "log.jsonl"
    row = {"nan": math.nan, "up": math.inf, "down": -math.inf, "tiny": 5e-324, "third": 1 / 3}
    with JSONLLogger(path) as logger:
        logger(0, row)
    (line,) = read_lines(path)
    assert line["nan"] == "NaN"
    for name, value in row.items():
        np.testing.assert_equal(float(line[name]), value)


def test_jsonl_goes_on_after_half_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with JSONLLogger(path) as logger:
        logger(2, {})
        logger(3, {})
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"st']
    assert [json.loads(line)["step"] for line in lines[2:]] == [2, 3]


def test_jsonl_refuses_what_is_no_number(tmp_path):
    logger = JSONLLogger(tmp_path / "log.jsonl")
    with pytest.raises(TypeError):
        logger(0, {"loss": np.zeros(2)})  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


# TensorBoard


def test_tensorboard_scalars(tmp_path):
    with TensorBoardLogger(tmp_path / "run") as logger:
        logger(3, {"train/loss": 2.5, "eval/loss": 1.5})
        logger(4, {"train/loss": math.nan})
    scalars = [(e.step, v.tag, v.simple_value) for e in events(tmp_path / "run") for v in e.summary.value]
    assert scalars[:2] == [(3, "train/loss", 2.5), (3, "eval/loss", 1.5)]
    assert scalars[2][:2] == (4, "train/loss")
    assert math.isnan(scalars[2][2])


def test_tensorboard_purges_once(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.rewind(6)
    logger(7, {"a": 1.0})
    logger.close()
    starts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert starts == [7]
    logger(8, {"a": 2.0})
    logger.close()
    found = events(tmp_path)
    assert [e.step for e in found if e.HasField("session_log")] == [7]
    assert {v.simple_value for e in found for v in e.summary.value} == {1.0, 2.0}


def test_tensorboard_loggers_of_one_second_keep_their_files(tmp_path):
    for step in range(3):
        with TensorBoardLogger(tmp_path) as logger:
            logger(step, {"a": 1.0})
    assert sorted(e.step for e in events(tmp_path) if e.summary.value) == [0, 1, 2]


def test_tensorboard_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r'pip install "redco_eqx\[log\]"'):
        TensorBoardLogger(tmp_path)


# Console


def test_console_lines_are_aligned():
    stream = io.StringIO()
    logger = ConsoleLogger(stream)
    logger(1, {"train/loss": 2.3456789, "train/grad_norm": 1e-7})
    logger(1000, {"train/loss": 12345.678, "train/grad_norm": math.nan})
    first, second = stream.getvalue().splitlines()
    assert first.split() == ["step", "1", "train/loss", "2.346", "train/grad_norm", "1e-07"]
    assert second.split() == ["step", "1000", "train/loss", "1.235e+04", "train/grad_norm", "nan"]
    assert first.index("train/grad_norm") == second.index("train/grad_norm")


def test_console_goes_to_stderr(capsys):
    ConsoleLogger()(5, {"loss": 1.0})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split() == ["step", "5", "loss", "1"]


def test_console_does_not_tear_the_bar():
    stream = Terminal()
    with progress_bar(10, stream=stream) as bar:
        bar.update()
        ConsoleLogger(stream)(1, {"loss": 1.0})
    # The bar is cleared before the line, which ends on its own.
    before, _, after = stream.getvalue().partition("step        1")
    assert before.endswith("\r")
    assert after.split("\r")[0].rstrip(" ").endswith("\n")


# Progress


def test_progress_shows_on_terminals_only_unless_asked():
    for stream, show, shown in (
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
        (io.StringIO(), False, False),
    ):
        with progress_bar(20, initial=5, show=show, stream=stream) as bar:
            bar.update(15)
        for words in ("5/20", "20/20", "train:"):
            assert (words in stream.getvalue()) == shown, (stream, show)
    with progress_bar(None, show=True, stream=(stream := io.StringIO())) as bar:
        bar.update(3)
    assert "3it" in stream.getvalue()
