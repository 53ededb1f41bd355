"""The rows that `fit` logs, its history, and the loggers: JSON lines, the terminal."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import pathlib
import re
import types
from typing import Any

import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import EXAMPLES, Rows, counted, fit, fit_with_history

import redco_eqx as rx
from redco_eqx._training.loggers import ConsoleLogger, JSONLLogger, progress_bar
from redco_eqx._training.loop import Training
from redco_eqx._training.program import peak_seconds

# Rows


def test_a_row_is_the_exact_mean_of_its_steps() -> None:
    rows = Rows()
    begin = fit(num_steps=2)
    metrics = [
        metrics
        for _, metrics, _ in itertools.islice(tiny.hand_loop(begin, EXAMPLES), 7)
    ]
    fit(begin, num_steps=7, log_every=3, loggers=[rows])
    assert [step for step, _ in rows.rows] == [5, 8, 9]
    windows = [metrics[0:3], metrics[3:6], metrics[6:7]]
    for (_, row), window, done in zip(rows.rows, windows, (3, 6, 7)):
        for name in window[0]:
            total, weight = (
                sum(float(getattr(m[name], x)) for m in window)
                for x in ("total", "weight")
            )
            # Adds in float32.
            np.testing.assert_allclose(row[f"train/{name}"], total / weight, rtol=1e-6)
        assert row["train/epoch"] == pytest.approx(done / 5, rel=1e-12)
        assert set(row) >= {
            "train/loss",
            "train/plain",
            "train/grad_norm",
            "train/examples_per_second",
        }
        assert (
            not row.keys() & {"train/mfu", "train/slowest_process"}
            or jax.default_backend() == "gpu"
        )
        assert next(iter(row)) == "train/loss"
    of_first = [float(m["loss"].value) for m in windows[0]]
    # No mean of means.
    assert rows.rows[0][1]["train/loss"] != pytest.approx(np.mean(of_first), rel=1e-3)


def per_token(model: Any, batch: Any, key: Any) -> Any:
    weight = jnp.sum(batch["weight"])  # more than one for each example
    return rx.Mean(weight * jnp.mean(tiny.errors_of(model, batch)), weight)


@pytest.mark.parametrize(
    ("loss", "log_every", "eval_every"),
    [(per_token, 10, 15), (tiny.scalar_loss, 100, 3)],
)
def test_rates(
    loss: Any, log_every: int, eval_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that a batch moves on by one second, the first one (which compiles) by
    a minute, and an evaluation by an hour."""
    now = 0.0

    def timed_collate(examples: Any) -> Any:
        nonlocal now
        if len(examples) == 4:
            now += 60.0 if now == 0 else 1.0
        return tiny.collate(examples)

    def metric_fn(examples: Any, predictions: Any) -> Any:
        nonlocal now
        now += 3600.0 if now else 0.0
        return {}

    catch_up = Training._catch_up

    def catch_up_when_done(self: Any, num_ahead: int = 0) -> None:
        jax.block_until_ready([step.window for step in self._in_flight._steps])
        catch_up(self, num_ahead)

    # Devices that are always done with a window when the next step is dispatched.
    monkeypatch.setattr(Training, "_catch_up", catch_up_when_done)
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    for module in ("loop", "in_flight", "loggers"):
        monkeypatch.setattr(f"redco_eqx._training.{module}.time", clock)
    # As if the device were one that has a peak.
    chip = np.array([types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])
    monkeypatch.setattr(
        "redco_eqx._training.program.peak_seconds",
        lambda program, _: peak_seconds(program, chip),
    )
    rows = Rows()
    examples = [
        {**example, "weight": np.float32(3)} for example in tiny.make_examples(100)
    ]
    functions: Any = {"predict_fn": tiny.predict_fn, "metric_fn": metric_fn}
    evaluation = rx.Evaluation(
        examples[:3], batch_size=3, every_steps=eval_every, **functions
    )
    arguments: Any = {
        "collate_fn": timed_collate,
        "loss_fn": loss,
        "evaluation": evaluation,
    }
    fit(
        None,
        examples,
        prefetch=0,
        num_steps=40,
        log_every=log_every,
        loggers=[rows],
        **arguments,
    )
    train = rows.with_prefix("train/")
    expected = sorted(
        {*range(log_every, 41, log_every), *range(eval_every, 41, eval_every), 40}
    )
    assert [step for step, _ in train] == expected
    # Without the first, which compiles.
    steps = np.diff([1, *(step for step, _ in train)])
    rates = np.array([row["train/examples_per_second"] for _, row in train])
    # The end of a window is seen at the next step, so that one in five may count for
    # its neighbour,
    np.testing.assert_allclose(rates, 4.0, rtol=0.2501)
    # but in all no time is lost, and none counted twice.
    assert np.sum(steps * 4 / rates) == pytest.approx(39, rel=1e-9)
    for _, row in train:
        assert ("train/tokens_per_second" in row) == (loss is per_token)
        if loss is per_token:
            ratio = row["train/tokens_per_second"] / row["train/examples_per_second"]
            assert ratio == pytest.approx(3.0, rel=1e-6)
            # The model has a matrix of 2 x 2, used once forward and once backward: the
            # batch has no gradient.
            num_flops = row["train/examples_per_second"] * 2 * (2 * 2 * 2)
            assert row["train/mfu"] == pytest.approx(num_flops / 989e12, rel=1e-6)
    waited = np.array([row["train/data_wait_seconds"] for _, row in train])
    np.testing.assert_array_equal(
        waited, np.diff([0, *(step for step, _ in train)]) + 59 * (waited > 59)
    )
    assert waited.sum() == 60 + 39


# History


def test_it_has_what_the_loggers_got_without_rates() -> None:
    rows = Rows()
    evaluation = rx.Evaluation(EXAMPLES, every_steps=4)
    _, history = fit_with_history(
        num_steps=11, log_every=3, evaluation=evaluation, loggers=[rows]
    )
    assert [row["step"] for row in history.rows] == [3, 4, 6, 8, 9, 11]
    assert [row["step"] for row in history.evaluations] == [4, 8, 11]
    expected = [{"step": step, **row} for step, row in tiny.without_times(rows.rows)]
    assert [row for row in expected if "eval/loss" not in row] == list(history.rows)
    assert [row for row in expected if "eval/loss" in row] == list(history.evaluations)
    assert history["eval/loss"] == [row["eval/loss"] for row in history.evaluations]
    assert history["train/loss"] == [row["train/loss"] for row in history.rows]
    with pytest.raises(
        KeyError, match=r"eval/los' is in no row .* train/loss, .*eval/loss"
    ):
        history["eval/los"]
    assert rx.types.History() == rx.types.History((), ())
    with pytest.raises(KeyError, match="none"):
        rx.types.History()["train/loss"]


def test_runs_in_one_directory_have_their_own_rows(tmp_path: pathlib.Path) -> None:
    arguments: Any = {
        "optimizer": tiny.COUNTING,
        "checkpoints": tmp_path,
        "log_every": 1,
    }
    state, first = fit_with_history(num_steps=3, **arguments)
    _, second = fit_with_history(state, num_steps=2, **arguments)
    assert [row["step"] for row in first.rows] == [1, 2, 3]
    assert [row["step"] for row in second.rows] == [4, 5]


def test_numbers_that_are_not_finite_come_back(tmp_path: pathlib.Path) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        value = jnp.mean(tiny.errors_of(model, batch))
        return value, {"odd": value * jnp.nan, "large": value + jnp.inf}

    for _ in range(2):
        _, history = fit_with_history(
            num_steps=2, log_every=1, checkpoints=tmp_path, loss_fn=loss
        )
        assert np.isnan(history["train/odd"]).all()
        assert history["train/large"] == [np.inf, np.inf]


def test_checkpoints_do_not_grow_by_rows(tmp_path: pathlib.Path) -> None:
    counted(
        None,
        rx.Checkpoints(tmp_path, every_steps=20, keep_last=None),
        num_steps=60,
        log_every=1,
    )
    records = [tmp_path / f"{step}" / "record" / "record.json" for step in (20, 60)]
    first, last = (len(record.read_bytes()) for record in records)
    assert last <= first + 10
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 60


# Loggers


def test_jsonl_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "runs" / "first" / "log.jsonl"
    numbers = {
        "nan": math.nan,
        "up": math.inf,
        "down": -math.inf,
        "tiny": 5e-324,
        "third": 1 / 3,
    }
    logger = JSONLLogger(path)
    assert list(tmp_path.iterdir()) == []  # nothing is written before the first row
    logger(1, {"train/loss": 2.5, "train/examples_per_second": 10.0})
    assert len(path.read_text().splitlines()) == 1
    logger(2, {})
    with path.open("a") as file:
        file.write('{"st')  # a machine that went down
    JSONLLogger(str(path))(3, numbers)
    *lines, half, last = path.read_text().splitlines()
    assert half == '{"st'
    first, second, third = (
        json.loads(line, parse_constant=pytest.fail) for line in (*lines, last)
    )
    assert abs(first.pop("time") - third.pop("time")) < 60
    assert first == {"step": 1, "train/loss": 2.5, "train/examples_per_second": 10.0}
    assert second.keys() == {"step", "time"}
    assert third["nan"] == "NaN"
    np.testing.assert_equal(
        {name: float(x) for name, x in third.items()}, {"step": 3, **numbers}
    )


def test_jsonl_refuses_what_is_no_number(tmp_path: pathlib.Path) -> None:
    tiny.raised(
        TypeError, JSONLLogger(tmp_path / "log.jsonl"), 0, {"loss": np.zeros(2)}
    )
    assert list(tmp_path.iterdir()) == []


def test_a_jsonl_log_is_rewound(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    logger = JSONLLogger(path)
    logger.rewind(3)  # there is none yet
    assert not path.exists()
    for step in (1, 2, 3, 3, 4, 9):
        logger(step, {"a": float(step)})
    with path.open("a") as file:
        file.write('{"step": 2, "a"')  # a machine that went down
    logger.rewind(3)
    logger(4, {"a": 40.0})
    assert tiny.read_log(path) == [
        *((step, {"a": float(step)}) for step in (1, 2, 3, 3)),
        (4, {"a": 40.0}),
    ]
    assert os.listdir(tmp_path) == ["log.jsonl"]


# Terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_lines_are_aligned() -> None:
    stream = io.StringIO()
    logger = ConsoleLogger(stream)
    logger(1, {"train/loss": 2.3456789, "train/grad_norm": 1e-7})
    logger(1000, {"train/loss": 12345.678, "train/grad_norm": math.nan})
    first, second = stream.getvalue().splitlines()
    assert first.split() == [
        "step",
        "1",
        "train/loss",
        "2.346",
        "train/grad_norm",
        "1e-07",
    ]
    assert second.split() == [
        "step",
        "1000",
        "train/loss",
        "1.235e+04",
        "train/grad_norm",
        "nan",
    ]
    assert first.index("train/grad_norm") == second.index("train/grad_norm")


def test_console_does_not_tear_the_bar() -> None:
    stream = Terminal()
    with progress_bar(10, stream=stream) as bar:
        bar.update()
        ConsoleLogger(stream)(1, {"loss": 1.0})
    # The bar is cleared before the line, which ends on its own.
    before, _, after = stream.getvalue().partition("step        1")
    assert before.endswith("\r")
    assert after.split("\r")[0].rstrip(" ").endswith("\n")


def test_progress_shows_on_terminals_only_unless_asked() -> None:
    for make, show in itertools.product((Terminal, io.StringIO), (None, True, False)):
        stream = make()
        shown = make is Terminal if show is None else show
        with progress_bar(20, initial=5, show=show, stream=stream) as bar:
            bar.update(15)
        for words in ("5/20", "20/20", "train:"):
            assert (words in stream.getvalue()) == shown, (stream, show)
    with progress_bar(None, show=True, stream=(stream := io.StringIO())) as bar:
        bar.update(3)
    assert "3it" in stream.getvalue()


def test_what_fit_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing without loggers, no bar where there is no terminal, and a bar where it is
    asked for."""
    counted(num_steps=3, log_every=1, evaluation=rx.Evaluation(EXAMPLES[:5]))
    assert capfd.readouterr() == ("", "")
    counted(num_steps=3, log_every=1, loggers=None)
    out, err = capfd.readouterr()
    assert out == ""
    first, cost, *rest = err.splitlines()
    assert first == "fit: 22 examples, 5 steps of 4 per epoch, 2 dropped from each"
    sizes = r"([\d.]+) KiB of each device, ([\d.]+) KiB of it while it runs"
    found = re.fullmatch(f"fit: a step takes {sizes}, and sends nothing", cost)
    assert found, cost
    assert float(found[2]) < float(found[1])
    assert [line.split()[:3] for line in rest] == [
        ["step", str(i), "train/loss"] for i in (1, 2, 3)
    ]
    assert "\r" not in err
    assert "it/s" not in err
    counted(num_epochs=1, loggers=[ConsoleLogger(progress=True)])
    err = capfd.readouterr().err
    for words in ("train: 100%", "loss ", "5/5"):
        assert words in err


# Consoles that go, and loggers that change what they get


class Gone(io.StringIO):
    """A stream that can be written a few times, and then raises for ever."""

    def __init__(self, error: Exception, num_writes: int = 2, is_terminal: bool = True):
        super().__init__()
        self.error, self.num_left, self.is_terminal = error, num_writes, is_terminal

    def write(self, text: str) -> int:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.num_left < 0:
            raise self.error

    def isatty(self) -> bool:
        return self.is_terminal


GONE: dict[str, Any] = {
    "EPIPE": lambda: Gone(BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "EIO": lambda: Gone(OSError(errno.EIO, "Input/output error")),
    "ENOSPC": lambda: Gone(
        OSError(errno.ENOSPC, "No space left on device"), is_terminal=False
    ),
    "closed": lambda: Gone(ValueError("I/O operation on closed file."), num_writes=0),
    "a closed file": lambda: closed_file(),
    "None": lambda: None,
}


def closed_file() -> Any:
    file = open(os.devnull, "w")  # noqa: SIM115
    file.close()
    return file


@pytest.mark.parametrize("progress", [None, True, False])
@pytest.mark.parametrize("kind", GONE)
def test_a_console_that_goes_ends_no_training(
    kind: str, progress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", GONE[kind]())
    state, history = fit_with_history(
        num_steps=4, log_every=1, loggers=[ConsoleLogger(progress=progress)]
    )
    assert int(state.step) == 4
    assert len(history.rows) == 4


@pytest.mark.parametrize("kind", [kind for kind in GONE if kind != "None"])
def test_a_stream_of_ones_own_may_go_too(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = ConsoleLogger(GONE[kind]())
    for step in range(4):
        logger(step, {"loss": 1.0})
    assert (
        capfd.readouterr().err.count(
            "the console can no longer be written, and says nothing more"
        )
        == 1
    )


def test_a_pipe_whose_reader_has_ended(tmp_path: pathlib.Path) -> None:
    """As in `python train.py 2>&1 | head -1`."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", buffering=1)
    os.close(reader)
    assert int(fit(num_steps=2, log_every=1, loggers=[ConsoleLogger(stream)]).step) == 2
    with contextlib.suppress(OSError):
        stream.close()


def test_characters_that_a_stream_cannot_encode_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    ConsoleLogger(stream)(1, {"genauigkeit_für_a": 1.0})
    ConsoleLogger(stream).say("plain")
    stream.seek(0)
    assert [line.split()[-2:] for line in stream] == [
        ["genauigkeit_f\\xfcr_a", "1"],
        ["plain"],
    ]


def test_another_standard_error_is_used_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = ConsoleLogger()
    monkeypatch.setattr("sys.stderr", closed_file())
    logger.say("one")
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logger.say("two")
    assert stream.getvalue() == "two\n"


def test_a_logger_that_changes_its_row_changes_nothing_else(
    tmp_path: pathlib.Path,
) -> None:
    def spoil(step: int, row: Any) -> None:
        for name in list(row):
            row[name] = -1e9
        row["mine"] = 1.0

    def run(directory: str, loggers: Any) -> Any:
        checkpoints = rx.Checkpoints(
            tmp_path / directory, every_steps=50, keep_best={"eval/loss": "min"}
        )
        evaluation = rx.Evaluation(EXAMPLES, every_steps=3)
        arguments: Any = {
            "log_every": 1,
            "evaluation": evaluation,
            "checkpoints": checkpoints,
        }
        _, history = fit_with_history(num_steps=12, loggers=loggers, **arguments)
        return history, [
            (info.step, info.metrics)
            for info in rx.list_checkpoints(tmp_path / directory)
        ]

    rows = Rows()
    assert run("spoilt", [spoil, rows, spoil]) == run("whole", [])
    assert all("mine" not in row and -1e9 not in row.values() for _, row in rows.rows)


def test_a_hook_that_changes_what_it_gets_changes_nothing_else(
    tmp_path: pathlib.Path,
) -> None:
    def spoil(run: Any, row: Any, state: Any) -> None:
        for numbers in (row, *run.evaluations):
            for name in list(numbers):
                numbers[name] = -1e9

    def run(directory: str, hook: Any) -> Any:
        checkpoints = rx.Checkpoints(
            tmp_path / directory, every_steps=50, keep_best={"eval/loss": "min"}
        )
        evaluation = rx.Evaluation(EXAMPLES, every_steps=3)
        arguments: Any = {
            "log_every": 1,
            "evaluation": evaluation,
            "checkpoints": checkpoints,
        }
        _, history = fit_with_history(num_steps=12, hook=hook, **arguments)
        return history, [
            (info.step, info.metrics)
            for info in rx.list_checkpoints(tmp_path / directory)
        ]

    assert run("spoilt", spoil) == run("whole", None)


# Foreign content of logs


def trained_to(tmp_path: pathlib.Path, num_steps: int) -> Any:
    return fit_with_history(
        num_steps=num_steps,
        log_every=1,
        checkpoints=rx.Checkpoints(tmp_path, every_steps=2),
    )[1]


def test_a_row_that_is_in_the_file_twice_is_once_in_the_history(
    tmp_path: pathlib.Path,
) -> None:
    trained_to(tmp_path, 4)
    file = tmp_path / "history.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, lines[1], *lines]))
    assert trained_to(tmp_path, 6) == trained_to(tmp_path / "whole", 6)


FOREIGN = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a list": b"[1, 2]",
    "a number": b"7",
    "an object": b'{"step": {"a": 1}, "run": 3}',
    "text": b"hello",
    "no UTF-8": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_line_of_a_log_is_no_row(kind: str, tmp_path: pathlib.Path) -> None:
    trained_to(tmp_path, 4)
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(FOREIGN[kind] + b"\n")
    assert trained_to(tmp_path, 6) == trained_to(tmp_path / "whole", 6)


ROWS: list[dict[str, Any]] = [
    {"step": "x"},
    {"step": None},
    {"step": True},
    {"train/loss": "bad"},
    {"train/loss": [1]},
]


@pytest.mark.parametrize("change", ROWS, ids=str)
def test_a_foreign_row_with_the_id_of_the_run_is_none(
    change: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    trained_to(tmp_path, 4)
    file = tmp_path / "history.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    with file.open("a") as opened:
        opened.write(json.dumps({**row, **change}) + "\n")
    assert trained_to(tmp_path, 6) == trained_to(tmp_path / "whole", 6)


def test_a_history_that_is_a_directory_is_refused_first(tmp_path: pathlib.Path) -> None:
    (tmp_path / "history.jsonl").mkdir()
    tiny.raised(
        ValueError,
        trained_to,
        tmp_path,
        4,
        match="history.jsonl, but that is a directory",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
    tiny.raised(
        ValueError,
        JSONLLogger,
        tmp_path / "history.jsonl",
        match="JSONLLogger: path .* is a directory",
    )


def test_a_log_that_is_a_link_stays_one(tmp_path: pathlib.Path) -> None:
    link = tmp_path / "log.jsonl"
    link.symlink_to(tmp_path / "real.jsonl")
    logger = JSONLLogger(link)
    for step in (1, 2, 3):
        logger(step, {"a": 1.0})
    logger.rewind(2)
    assert link.is_symlink()
    assert [step for step, _ in tiny.read_log(tmp_path / "real.jsonl")] == [1, 2]


def test_a_disk_that_takes_half_a_line_raises(tmp_path: pathlib.Path) -> None:
    logger = JSONLLogger(tmp_path / "log.jsonl")
    with tiny.full_disk(16):
        tiny.raised(OSError, logger, 1, {"loss": 1.0})
    logger(2, {"loss": 1.0})
    *_, last = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(last)["step"] == 2


def test_a_disk_that_is_full_leaves_the_log_as_it_was(tmp_path: pathlib.Path) -> None:
    logger = JSONLLogger(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        logger(step, {"a": 1.0})
    before = (tmp_path / "log.jsonl").read_bytes()
    with tiny.full_disk(16):
        tiny.raised(OSError, logger.rewind, 2)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert os.listdir(tmp_path) == ["log.jsonl"]
