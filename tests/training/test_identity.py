"""A live writer, another run, other examples and other functions are not taken for
those of a directory."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    Collate,
    assert_same,
    counted,
    full_disk,
    linear_state,
    python,
    raised,
)

import redco_eqx as rx
from redco_eqx._base.jaxprs import program_digest
from redco_eqx._checkpoint import owner
from redco_eqx._checkpoint.owner import OWNER, Owner
from redco_eqx._training.identity import compare_copies, programs_of

CHILD = """
import os, pathlib, sys, time
from redco_eqx._checkpoint.owner import Owner
owner = Owner(pathlib.Path(sys.argv[1]))
print("owns", flush=True)
if os.fork() == 0:  # a worker that outlives it
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: pathlib.Path) -> Any:
    """Another process that owns `tmp_path`."""
    process: Any = python(CHILD, tmp_path)
    assert process.stdout.readline() == "owns\n"
    yield process
    process.kill()
    process.wait()


def test_a_live_process_is_named_and_a_killed_one_is_taken_over(
    child: Any, tmp_path: pathlib.Path
) -> None:
    before = (tmp_path / OWNER).read_bytes()
    raised(
        rx.errors.CheckpointError,
        Owner,
        tmp_path,
        match=f"{tmp_path} is in use: process {child.pid} on ",
    )
    assert (tmp_path / OWNER).read_bytes() == before
    child.send_signal(signal.SIGKILL)
    child.wait()
    begin = time.monotonic()
    taken = Owner(tmp_path)
    assert time.monotonic() - begin < 2.0
    taken.release()


def test_who_ends_while_another_waits_makes_room(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    # So that the first is not taken for this process.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first = Owner(tmp_path)
    monkeypatch.undo()
    threading.Timer(0.5, first.release).start()
    Owner(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])
def test_an_owner_on_another_host_is_alive_if_it_touches_its_file(
    is_alive, tmp_path, monkeypatch
) -> None:
    """No lock of the other is seen here, as on a file system that does not pass it
    on."""
    monkeypatch.setattr(owner, "_WATCH_SECONDS", 2.0)
    file = tmp_path / OWNER
    done = threading.Event()

    def touch_on() -> None:
        while not done.wait(0.3):
            file.touch()

    file.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    if is_alive:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(touch_on)
            try:
                raised(
                    rx.errors.CheckpointError,
                    Owner,
                    tmp_path,
                    match="process 1 on elsewhere is writing",
                )
            finally:
                done.set()  # the thread would never end
    else:
        begin = time.monotonic()
        Owner(tmp_path).release()
        assert 2.0 <= time.monotonic() - begin < 6.0
        assert not file.exists()


def test_an_owner_touches_its_file(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, "_BEAT_SECONDS", 0.05)
    one = Owner(tmp_path)
    first = (tmp_path / OWNER).stat().st_mtime_ns
    end = time.monotonic() + 5
    while (tmp_path / OWNER).stat().st_mtime_ns == first:
        assert time.monotonic() < end, "the time of the file does not move"
        time.sleep(0.05)
    one.release()


@pytest.mark.parametrize("content", ['{"host": "elsewhere", "pi', "[]"])
def test_a_torn_file_has_no_owner(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / OWNER).write_text(content)
    Owner(tmp_path).release()


def test_a_writer_that_is_dropped_leaves_the_directory(tmp_path: pathlib.Path) -> None:
    writer: Any = rx.Checkpoints(tmp_path).open()
    with pytest.raises(
        rx.errors.CheckpointError, match=f"{tmp_path} is in use: this very process"
    ):
        rx.Checkpoints(tmp_path).open()
    del writer
    rx.Checkpoints(tmp_path).open().close()


def open_files(directory: pathlib.Path) -> list[int]:
    """The flags with which this process has files of a directory open."""
    flags = []
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(directory):
                flags.append(fcntl.fcntl(int(link.name), fcntl.F_GETFL))
    return flags


def test_a_live_owner_holds_no_file_open_for_writing(tmp_path: pathlib.Path) -> None:
    """Or a file system could not be made read-only, nor unmounted once a run has failed
    on a full disk."""
    owner = Owner(tmp_path)
    assert [flags & os.O_ACCMODE for flags in open_files(tmp_path)] == [os.O_RDONLY]
    with full_disk(8):
        owner.release()
    assert not open_files(tmp_path)
    Owner(tmp_path).release()


# The identity of a run: another run, other examples and other functions are not taken
# for it.

fit = functools.partial(tiny.fit, num_steps=10)


def begun(directory: pathlib.Path, state: Any = None, **arguments: Any) -> None:
    """A run of ten steps that ends by an error after four."""

    def hook(run: Any, row: Any, state: Any) -> None:
        if run.step == 4:
            tiny.fail()

    arguments = {"log_every": 1, "checkpoints": directory, **arguments}
    raised(LookupError, fit, state, hook=hook, match="mine", **arguments)


def content_of(directory: pathlib.Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


def refused(
    directory: pathlib.Path, message: str, examples: Any = EXAMPLES, state: Any = None
) -> None:
    before = content_of(directory)
    state = state or linear_state()
    raised(ValueError, fit, state, examples, checkpoints=directory, match=message)
    assert content_of(directory) == before
    assert not state.params["weight"].is_deleted()


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (
            [EXAMPLES[i] for i in (0, 1, 2, 4, 3, *range(5, 22))],
            r"it has another order of the examples: train_examples\[3\]",
        ),
        (
            [*EXAMPLES[:7], {**EXAMPLES[7], "y": EXAMPLES[7]["y"] + 1}, *EXAMPLES[8:]],
            r"it has another example: train_examples\[7\]",
        ),
    ],
    ids=["another order", "another example"],
)
def test_other_examples_and_another_order_are_refused_by_name(
    examples: Any, message: str, tmp_path: pathlib.Path
) -> None:
    begun(tmp_path)
    refused(tmp_path, message, examples)
    assert_same(fit(checkpoints=tmp_path), fit())


MESHES: dict[str, Any] = {"one": {"data": 1}, "tensor": {"tensor": 2}}


def began(mesh: str, *, factor: float = 1.0, key: int = 1) -> Any:
    """A state whose weights have the same direction for each positive factor."""
    begin = linear_state(mesh=rx.make_mesh(**MESHES[mesh]), dim=8)
    params = {name: x * factor for name, x in begin.params.items()}
    other = jax.device_put(jax.random.key(key), begin.key.sharding)
    return dataclasses.replace(begin, params=params, key=other)


two_steps = functools.partial(
    counted, examples=tiny.make_examples(8, dim=8), num_steps=2
)


@pytest.fixture(scope="module", params=MESHES)
def finished(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A mesh, the directory of a run of two steps on it, and its last state. Tests must
    not change them."""
    directory = tmp_path_factory.mktemp("finished")
    return request.param, directory, two_steps(began(request.param), directory)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"factor": 1.01}, "other initial parameters"),
        ({"key": 7}, "another key"),
        ({"factor": -1.0, "key": 7}, "another key and other initial parameters"),
    ],
    ids=["parameters", "key", "both"],
)
def test_a_run_that_began_otherwise_is_refused(
    finished: Any, other: Any, what: str
) -> None:
    mesh, directory, _ = finished
    begin = began(mesh, **other)
    message = rf"is a different one: it has {what}\. To begin a new run"
    raised(ValueError, two_steps, begin, directory, match=message)
    assert_same(begin, began(mesh, **other))  # nothing was taken over


def test_the_last_bits_of_another_compiler_are_no_other_beginning(
    finished: Any,
) -> None:
    mesh, directory, expected = finished
    assert_same(two_steps(began(mesh, factor=1 + 1e-6), directory), expected)


def test_another_beginning_may_be_allowed(finished: Any) -> None:
    mesh, directory, expected = finished
    allowed = rx.Checkpoints(directory, allow_changes=True)
    assert_same(two_steps(began(mesh, key=7), allowed), expected)


def test_the_state_of_another_run_at_the_same_step_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    begun(tmp_path / "a")
    begin = linear_state()
    begun(
        tmp_path / "b",
        dataclasses.replace(
            begin, params={name: -x for name, x in begin.params.items()}
        ),
    )
    other, own = (rx.restore(tmp_path / name, linear_state()) for name in ("b", "a"))
    assert int(own.step) == int(other.step) == 4
    refused(
        tmp_path / "a",
        r"the state is at step 4, but is not the one that .*a/4 holds: model/",
        state=other,
    )
    assert_same(fit(own, checkpoints=tmp_path / "a"), fit())


@pytest.mark.parametrize(
    "act",
    [lambda path, state: fit(checkpoints=path), rx.save],
    ids=["fit", "save"],
)
def test_another_run_that_is_alive_is_refused_and_loses_nothing(
    act: Any, tmp_path: pathlib.Path
) -> None:
    seen = []

    def nested(run: Any, row: Any, state: Any) -> None:
        if run.step == 2:
            error = raised(
                rx.errors.CheckpointError,
                act,
                tmp_path,
                state,
                match="is in use: this very process",
            )
            seen.append(error)

    state = fit(log_every=1, hook=nested, checkpoints=tmp_path)
    expected = fit()
    assert len(seen) == 1
    assert_same(state, expected)
    assert_same(rx.restore(tmp_path, linear_state()), expected)


def doubled_loss(model: Any, batch: Any, key: Any) -> Any:
    loss, metrics = tiny.loss_fn(model, batch, key)
    return rx.Mean(2 * loss.total, loss.weight), metrics


SLOW = optax.sgd(0.01)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"loss_fn": doubled_loss, "optimizer": SLOW},
            ["fit: loss_fn and optimizer of this call compute"],
        ),
        ({"optimizer": SLOW}, ["fit: optimizer of this call computes"]),
        # Of another name.
        ({"loss_fn": lambda model, batch, key: tiny.loss_fn(model, batch, key)}, []),
    ],
)
def test_functions_that_compute_something_else_are_named_once(
    changed, expected, tmp_path, recwarn
) -> None:
    begun(tmp_path)
    for _ in range(2):  # then they are those of the run
        fit(checkpoints=tmp_path, **changed)
    said = [
        str(w.message)
        for w in recwarn
        if "something different from the run so far" in str(w.message)
    ]
    assert [text.partition(" something")[0] for text in said] == expected


def test_the_learning_rate_of_a_state_counts(
    tmp_path: pathlib.Path, recwarn: Any
) -> None:
    slow, fast = (optax.inject_hyperparams(optax.sgd)(rate) for rate in (0.01, 0.1))
    begun(tmp_path, linear_state(slow), optimizer=slow)
    fit(linear_state(fast), checkpoints=tmp_path, optimizer=fast)
    said = [str(w.message) for w in recwarn if "fit: " in str(w.message)]
    assert [
        ("hyperparams.learning_rate is 0.01, not 0.1" in text) for text in said
    ] == [True]


class Augmented:
    """Examples with noise from generators of three kinds."""

    def __init__(self) -> None:
        # Not Python's global one, from which beartype draws too.
        self.own = np.random.default_rng(3)
        self.plain = random.Random(5)

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, index: int) -> Any:
        noise = self.own.normal() + np.random.normal() + self.plain.random()
        return {
            **EXAMPLES[index],
            "x": (EXAMPLES[index]["x"] + noise).astype(np.float32),
        }


def test_random_examples_are_left_out_which_is_said_once(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    def trained(**arguments: Any) -> Any:
        np.random.seed(5)
        return fit(None, Augmented(), prefetch=0, loggers=None, **arguments)

    trained()
    assert "change from one reading" not in capsys.readouterr().err
    trained(checkpoints=tmp_path)
    assert (
        capsys.readouterr().err.count(
            "train_examples change from one reading to the next"
        )
        == 1
    )
    trained(checkpoints=tmp_path)


def digests() -> Any:
    adam, batch = optax.adam(1e-3), tiny.collate(EXAMPLES[:4])
    return programs_of(linear_state(adam), batch, loss_fn=tiny.loss_fn, optimizer=adam)


TRACE = """
import jax, jax.numpy as jnp
for i in range(3):  # other work before, which fills JAX's caches in another order
    other = lambda x: jax.nn.gelu(jnp.where(x > i, jax.nn.relu(x), 0))
    jax.make_jaxpr(other)(jnp.ones(i + 1))
from training.test_identity import digests
print(digests())
"""


def test_a_digest_is_the_same_in_every_process() -> None:
    said = tiny.printed(TRACE, PYTHONHASHSEED="1")
    assert said == f"{digests()}\n"
    assert "''" not in said


def test_a_digest_tells_programs_apart() -> None:
    x, table = jnp.ones(3), np.arange(3.0)
    programs = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x + table,
        lambda x: x + table[::-1],
        lambda x: jax.jit(lambda y: y * 2)(x),
        lambda x: jax.jit(lambda y: y * 3)(x),
        lambda x: jax.lax.scan(lambda c, y: (c + y, None), 0.0, x)[0],
        lambda x: jax.lax.scan(lambda c, y: (c - y, None), 0.0, x)[0],
    ]
    found = [program_digest(jax.make_jaxpr(program)(x)) for program in programs]
    assert len(set(found)) == len(programs)
    assert found == [program_digest(jax.make_jaxpr(program)(x)) for program in programs]


def test_a_function_that_cannot_be_traced_on_one_device_has_no_digest() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(batch["x"].reshape(3, -1))  # of 8 rows

    batch = {"x": np.ones((6, 1), np.float32)}
    assert (
        programs_of(linear_state(), batch, loss_fn=loss, optimizer=SGD)["loss_fn"] == ""
    )


OVER_ALL = jax.P(("data", "fsdp"), "tensor")
"""A layout in which each device has a piece of its own."""
SPECS = [
    jax.P(),
    jax.P("tensor"),
    jax.P(None, "fsdp"),
    jax.P(("fsdp", "tensor")),
    OVER_ALL,
]
CLOCKS = {"train/slowest_process": 0, "train/slowest_by_seconds": 0.0}


def in_layouts() -> dict[str, Any]:
    """One array in each layout."""
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    return {
        str(spec): jax.device_put(whole, jax.NamedSharding(mesh, spec))
        for spec in SPECS
    }


def test_copies_that_are_alike_have_the_clocks_of_their_processes() -> None:
    assert compare_copies(in_layouts(), "", 1.5)() == CLOCKS


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_copies_that_differ_are_found(spec: Any) -> None:
    """In the last bit of one number on one device."""
    arrays = in_layouts()
    name = str(spec)
    x = arrays[name]
    pieces = [np.array(shard.data) for shard in x.addressable_shards]
    last = pieces[5].flat[-1]
    pieces[5].flat[-1] += 2.0**-20 if last == 0 else last * 2.0**-23
    placed = [
        jax.device_put(piece, shard.device)
        for piece, shard in zip(pieces, x.addressable_shards)
    ]
    odd = jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
    wait = compare_copies({**arrays, name: odd}, "mine")
    if spec == OVER_ALL:
        assert wait() == CLOCKS
    else:
        message = rf"^{re.escape(name)} should be the same .*mine"
        raised(ValueError, wait, match=message)


def rewrite(directory: pathlib.Path, change: Any) -> None:
    """Changes the record of the newest checkpoint, as another version would have
    written it."""
    (record,) = rx.list_checkpoints(directory)[-1].path.rglob("record.json")
    content = json.loads(record.read_text())["content"]
    change(content)
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    record.write_text(json.dumps({"sha256": sha256, "content": content}))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda content: content.update(format=7),
            r"its format is 7, but this version reads 2",
        ),
        (
            lambda content: content["run"].update(colour=1),
            "unexpected keyword argument",
        ),
        (lambda content: content.update(hue=2), "unexpected keyword argument"),
    ],
)
@pytest.mark.parametrize("reader", ["fit", "restore", "list_checkpoints"])
def test_another_version_is_an_error_of_its_own_that_touches_nothing(
    reader, change, what, tmp_path
) -> None:
    begun(tmp_path, checkpoints=rx.Checkpoints(tmp_path, every_steps=2))
    rewrite(tmp_path, change)
    before = content_of(tmp_path)
    message = f"was written by another version of redco_eqx .*{what}"
    of_format = rx.errors.CheckpointFormatError
    if reader == "fit":
        raised(of_format, fit, checkpoints=tmp_path, match=message)
    elif reader == "restore":
        raised(of_format, rx.restore, tmp_path, linear_state(), match=message)
    else:
        with pytest.warns(UserWarning, match=f"{message}.*left out"):
            assert [info.step for info in rx.list_checkpoints(tmp_path)] == [2]
    assert content_of(tmp_path) == before


def test_a_checkpoint_that_does_not_say_how_its_run_began_is_taken(
    tmp_path: pathlib.Path,
) -> None:
    counted(None, rx.Checkpoints(tmp_path), num_steps=4)
    rewrite(
        tmp_path,
        lambda content: [content["run"].pop(name) for name in ("identity", "id")],
    )
    spy = Collate()
    tiny.assert_counted(counted(None, rx.Checkpoints(tmp_path), collate_fn=spy), 12)
    assert len(spy.ids) == 4 * 8
