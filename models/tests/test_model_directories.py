"""A directory of a model is that of one model: whoever writes there, and whenever they
are killed."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import equinox as eqx
import jax
import pytest
from checkpoint_files import INDEX, SINGLE, edit_json, in_file_form, make_arrays, write
from fit_helpers import bits, printed, python, raised
from helpers import in_long
from safetensors.numpy import load_file, save_file
from tiny_models import make

import redco_eqx_models as models
from redco_eqx._base.tree import to_arrays
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._families import registry
from redco_eqx_models._files import load, writer
from redco_eqx_models._files.directory import tag_of

PROGRAM = pathlib.Path(__file__).with_name("_saving_over_and_over.py")
ONE = 10**9
SEVERAL = 20_000
KEY = jax.random.key(0)


def make_directory(directory, seed):
    """A model whose weights, configuration and generation configuration all tell its
    seed."""
    write(
        directory,
        "gpt2",
        make_arrays("gpt2", seed=seed),
        layer_norm_epsilon=float(1 + seed),
    )
    generation = {"eos_token_id": seed, "temperature": 0.5}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@functools.cache
def arrays_of(seed):
    return make_arrays("gpt2", seed=seed)


def seeds_of(model):
    """The seeds that weights, configuration and generation configuration tell; `None`
    for no generation."""
    (seed,) = [i for i in range(2) if bits(in_file_form(model)) == bits(arrays_of(i))]
    generation = json.loads(model.config.generation)
    return (
        seed,
        round(model.config.layer_norm_epsilon) - 1,
        generation.get("eos_token_id"),
    )


def quiet_load(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save that was stopped
        return load_pretrained(directory)


def seen_by_others(directory):
    """As `seeds_of`, for a reader that knows only the names of Hugging Face."""
    files = [directory / SINGLE]
    if not files[0].exists():
        names = json.loads((directory / INDEX).read_text())["weight_map"].values()
        files = [directory / name for name in set(names)]
    arrays = {key: x for file in files for key, x in load_file(file).items()}
    expected = [{key: x.tobytes() for key, x in arrays_of(i).items()} for i in range(2)]
    seed = expected.index({key: x.tobytes() for key, x in arrays.items()})
    epsilon = json.loads((directory / "config.json").read_text())["layer_norm_epsilon"]
    generation = directory / "generation_config.json"
    token = (
        json.loads(generation.read_text())["eos_token_id"]
        if generation.exists()
        else None
    )
    return seed, round(epsilon) - 1, token


class Killed(BaseException):
    """Not an Exception: nothing in the library may catch it, as nothing catches
    SIGKILL."""


@contextlib.contextmanager
def killed_at(monkeypatch, at):
    """From the `at`-th call on, what changes a directory raises instead."""
    calls: list[Any] = []

    def call(original, *args, **kwargs):
        if args and str(args[0]).endswith(writer.FILE):
            return original(*args, **kwargs)
        calls.append(args)
        if len(calls) >= at:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "mkdir"):
            patch.setattr(os, name, functools.partial(call, getattr(os, name)))
        yield


def at_every_instant(monkeypatch, tmp_path, start, save):
    """Yield copies of a directory: in each, `save` was killed at another instant; in
    the last, it was not."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for at in itertools.count(1):
        directory = tmp_path / f"killed-{at}"
        shutil.copytree(start, directory)
        is_killed = False
        with killed_at(monkeypatch, at):
            try:
                save(directory)
            except Killed:
                is_killed = True
        yield directory
        if not is_killed:
            assert at > 2
            return


# One save, killed.

SAVES = [
    (ONE, ONE, "both"),
    (ONE, SEVERAL, "both"),
    (SEVERAL, ONE, "both"),
    (SEVERAL, SEVERAL, "both"),
    (ONE, ONE, "old has generation"),
    (ONE, ONE, "new has generation"),
    *in_long(
        (SEVERAL, SEVERAL, "old has generation"), (ONE, SEVERAL, "new has generation")
    ),
]


@pytest.mark.parametrize(("before", "after", "generation"), SAVES)
def test_a_killed_save_leaves_weights_and_configurations_of_one_model(
    tmp_path, monkeypatch, before, after, generation
):
    loaded = []
    for seed, name in enumerate(("old", "new")):
        directory = make_directory(tmp_path / name, seed)
        if generation not in ("both", f"{name} has generation"):
            (directory / "generation_config.json").unlink()
        loaded.append(load_pretrained(directory))
    save_pretrained(
        loaded[0], tmp_path / "start", max_shard_bytes=before, card="the card of 0"
    )
    save = functools.partial(
        save_pretrained, loaded[1], max_shard_bytes=after, card="the card of 1"
    )
    wanted = [seeds_of(model) for model in loaded]
    seen = []
    mixed = 0
    for directory in at_every_instant(monkeypatch, tmp_path, tmp_path / "start", save):
        found = seeds_of(quiet_load(directory))
        assert found in wanted
        seen.append(wanted.index(found))
        others = seen_by_others(directory)
        mixed += others not in wanted
        assert others[0] == found[0]  # at every instant, all read the same weights
        # The next save finishes it, or begins anew: also one that fails itself.
        shutil.copytree(directory, tmp_path / "again")
        save_pretrained(
            loaded[1], tmp_path / "again", max_shard_bytes=after, card="the card of 1"
        )
        assert seen_by_others(tmp_path / "again") == wanted[1]
        assert (tmp_path / "again" / "README.md").read_text() == "the card of 1"
        assert not [
            x
            for x in os.listdir(tmp_path / "again")
            if x.endswith((".part", writer.FILE))
        ]
        shutil.rmtree(tmp_path / "again")
    assert seen == sorted(seen)
    assert {0, 1} == set(seen)
    # Between the renames of the weights and of the last file beside them.
    assert mixed <= 5


def scale_of(model):
    return model.model.layers[0].self_attn.q_proj.scale


def lora_of(model, scale):
    return models.add_lora(
        model, targets=("q_proj",), rank=2, scale=scale, key=jax.random.key(int(scale))
    )


def test_a_killed_save_of_lora_leaves_branches_and_scale_of_one(tmp_path, monkeypatch):
    base = make("llama")
    both = [lora_of(base, scale) for scale in (1.0, 2.0)]
    wanted = [(bits(to_arrays(x)), scale) for x, scale in zip(both, (1.0, 2.0))]
    models.save_lora(both[0], tmp_path / "start")
    seen = []
    save = functools.partial(models.save_lora, both[1])
    for directory in at_every_instant(monkeypatch, tmp_path, tmp_path / "start", save):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = models.load_lora(base, directory)
        seen.append(wanted.index((bits(to_arrays(found)), scale_of(found))))
    assert seen == sorted(seen)
    assert {0, 1} == set(seen)


def test_a_killed_save_of_a_pipeline_does_not_open_as_a_mixture(
    tmp_path, monkeypatch, stable_diffusion
):
    old, new = stable_diffusion
    models.save_stable_diffusion(old, tmp_path / "start")
    wanted = [bits(to_arrays(x)) for x in stable_diffusion]
    seen = []
    for directory in at_every_instant(
        monkeypatch,
        tmp_path,
        tmp_path / "start",
        functools.partial(models.save_stable_diffusion, new),
    ):
        try:
            found = models.load_stable_diffusion(directory)
        except FileNotFoundError as error:
            assert "model_index.json does not exist" in str(error)  # noqa: PT017
            seen.append("refused")
            continue
        seen.append("old" if bits(to_arrays(found)) == wanted[0] else "new")
        assert bits(to_arrays(found)) in wanted
    assert [name for name, _ in itertools.groupby(seen)] == ["old", "refused", "new"]
    models.save_stable_diffusion(new, tmp_path / "killed-1")
    assert (
        bits(to_arrays(models.load_stable_diffusion(tmp_path / "killed-1")))
        == wanted[1]
    )


@pytest.fixture(scope="module")
def stable_diffusion():
    from test_sample_images import alone

    old = alone()
    new = jax.tree.map(lambda x: x + 1 if eqx.is_inexact_array(x) else x, old)
    return old, new


def test_a_bad_part_of_a_pipeline_is_refused_before_anything_is_written(
    tmp_path, stable_diffusion
):
    model, _ = stable_diffusion
    bad = eqx.tree_at(
        lambda m: jax.tree.leaves(m.vae)[0], model, replace_fn=lambda x: x.astype(int)
    )
    raised(
        ValueError,
        models.save_stable_diffusion,
        bad,
        tmp_path / "new",
        match=r"save_stable_diffusion: vae: ",
    )
    assert not (tmp_path / "new").exists()


# Several writers.


def start_writers(tmp_path, target, kind, times):
    programs = []
    for seed in range(2):
        own = tmp_path / f"own-{seed}"
        if not own.exists() and kind == "save_lora":
            save_pretrained(make("llama"), own)
        if not own.exists():
            make_directory(own, seed)
        arguments = [
            sys.executable,
            str(PROGRAM),
            str(target),
            str(own),
            kind,
            str(times),
        ]
        pipe = subprocess.PIPE
        programs.append(
            subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        )
    for program in programs:
        assert program.stdout is not None
        assert program.stdin is not None
        if program.stdout.readline() != "ready\n":
            pytest.fail(program.communicate()[1])
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    return programs


def whole(target, kind, tmp_path):
    """Load what is in the directory, which is that of one of the two models."""
    if kind == "save_pretrained":
        assert seeds_of(quiet_load(target)) in [(0, 0, 0), (1, 1, 1)]
        return
    base = load_pretrained(tmp_path / "own-0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = models.load_lora(base, target)
    wanted = [lora_of(base, scale) for scale in (1.0, 2.0)]
    assert any(
        bits(to_arrays(found)) == bits(to_arrays(x)) and scale_of(found) == scale_of(x)
        for x in wanted
    )


KINDS = ["save_pretrained", "save_lora"]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_save_to_one_directory_take_turns(tmp_path, kind):
    target = tmp_path / "target"
    for program in start_writers(tmp_path, target, kind, 15):
        _, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors
    whole(target, kind, tmp_path)
    assert not [x for x in os.listdir(target) if x.endswith((".part", writer.FILE))]


KILLS = [("save_pretrained", 1), *in_long(("save_lora", 5), ("save_pretrained", 20))]


@pytest.mark.parametrize(("kind", "rounds"), KILLS)
def test_programs_that_are_killed_while_they_save_to_one_directory(
    tmp_path, kind, rounds
):
    target = tmp_path / "target"
    draw = random.Random(0)
    for _ in range(rounds):
        programs = start_writers(tmp_path, target, kind, 10**6)
        time.sleep(1.0)  # until something has been saved
        for program in programs:
            time.sleep(draw.uniform(0.0, 1.0))
            program.kill()
            program.wait()
        whole(target, kind, tmp_path)
    model = load_pretrained(tmp_path / "own-0")
    if kind == "save_lora":
        models.save_lora(lora_of(model, 1.0), target)
    else:
        save_pretrained(model, target)
    whole(target, kind, tmp_path)
    assert not [x for x in os.listdir(target) if x.endswith((".part", writer.FILE))]


@contextlib.contextmanager
def another_writer(directory, **changes):
    """Keep a directory locked, as another program with these entries in its file
    would."""
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with writer.only_writer("other", directory):
            edit_json(directory / writer.FILE, **changes)
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.fixture
def short_waits(monkeypatch):
    waits = {
        "WAIT_SECONDS": 1.0,
        "TELL_SECONDS": 0.2,
        "WATCH_SECONDS": 0.4,
        "BEAT_SECONDS": 0.1,
    }
    for name, seconds in waits.items():
        monkeypatch.setattr(writer, name, seconds)


@pytest.mark.parametrize("locks", ["locks", "no locks", "locks of one host"])
def test_a_writer_that_does_not_end_is_named(tmp_path, monkeypatch, short_waits, locks):
    answers = {
        "locks": writer._lock,
        "no locks": lambda fd: None,
        "locks of one host": lambda fd: True,
    }
    monkeypatch.setattr(writer, "_lock", answers[locks])
    changes = {"host": "otherhost 01234567"} if locks == "locks of one host" else {}
    name = changes.get("host", writer._host())
    with (
        another_writer(tmp_path, **changes),
        pytest.warns(
            UserWarning,
            match=(
                f"save_pretrained: waiting for process {os.getpid()} on {name}, which"
            ),
        ),
        pytest.raises(
            TimeoutError,
            match=f"process {os.getpid()} on {name} has been writing .* another dir",
        ),
    ):
        save_pretrained(make("gpt2"), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    save_pretrained(make("gpt2"), tmp_path)  # it has ended
    assert not (tmp_path / writer.FILE).exists()


LEFT = {
    "this host, locks": (True, {"host": None, "pid": os.getpid()}),
    "this host, no locks": (None, {"host": None, "pid": 2**22 + 1}),
    "another host, locks": (True, {"host": "otherhost 01234567", "pid": 1}),
    "another host, no locks": (None, {"host": "otherhost 01234567", "pid": 1}),
    "cut short": (True, "{"),
    "empty": (None, ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_file_of_a_writer_that_was_killed_holds_nobody_up(
    tmp_path, monkeypatch, short_waits, name
):
    lock, left = LEFT[name]
    monkeypatch.setattr(writer, "_lock", lambda fd: lock)
    if isinstance(left, dict):
        left = json.dumps({**left, "host": left["host"] or writer._host()})
    (tmp_path / writer.FILE).write_text(left)
    save_pretrained(make("gpt2"), tmp_path)
    assert not (tmp_path / writer.FILE).exists()
    load_pretrained(tmp_path)


FORK = """
import os, pathlib, signal, sys, time
from redco_eqx_models._files.writer import only_writer
with only_writer("save", pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    print("forked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_of_a_killed_writer_does_not_keep_the_lock(tmp_path, short_waits):
    program = python(FORK, tmp_path)
    assert program.stdout is not None
    assert program.stdout.readline() == "forked\n"
    program.wait()
    save_pretrained(make("gpt2"), tmp_path)


@pytest.mark.parametrize("max_shard_bytes", [ONE, SEVERAL])
def test_a_load_during_a_save_is_of_one_model(tmp_path, monkeypatch, max_shard_bytes):
    """The other program finishes its save after the configuration has been read."""
    both = [
        load_pretrained(make_directory(tmp_path / f"own-{seed}", seed))
        for seed in range(2)
    ]
    save_pretrained(both[0], tmp_path / "target", max_shard_bytes=max_shard_bytes)
    read = registry.read_family
    saves = [lambda: save_pretrained(both[1], tmp_path / "target")]

    def read_during_save(*arguments):
        found = read(*arguments)
        if saves:
            saves.pop()()
        return found

    monkeypatch.setattr(load, "read_family", read_during_save)
    assert seeds_of(load_pretrained(tmp_path / "target")) == (1, 1, 1)
    saves += [lambda: save_pretrained(both[0], tmp_path / "target")] * 100
    raised(
        OSError,
        load_pretrained,
        tmp_path / "target",
        match="other programs keep saving to .*Load it when",
    )


# Files from elsewhere.


def with_tags(directory, tags, num_files):
    """Give the weights of a directory these metadata."""
    arrays = load_file(directory / SINGLE)
    if num_files == 1:
        save_file(arrays, directory / SINGLE, metadata={"format": "pt", **tags})
        return
    (directory / SINGLE).rename(directory / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(arrays, "model-00001-of-00001.safetensors")
    (directory / INDEX).write_text(
        json.dumps({"metadata": tags, "weight_map": weight_map})
    )


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["random", "checksum of another directory", "stale"])
def test_a_part_from_elsewhere_is_not_in_force(tmp_path, num_files, name, kind):
    directory = make_directory(tmp_path / "model", 0)
    other = make_directory(tmp_path / "other", 1)
    text = (other / name).read_bytes()
    tag = "0123456789abcdef"
    if kind == "checksum of another directory":
        tag = tag_of(b"{}", text)
    if kind == "stale":  # a copy from an instant in a save, whose file was edited later
        tag = tag_of((directory / name).read_bytes(), text)
        edit_json(directory / name, **{"pad_token_id": 7})
    with_tags(directory, {name.partition(".")[0]: tag}, num_files)
    part = directory / f"{name}.{tag}.part"
    part.write_bytes(text)
    with pytest.warns(
        UserWarning,
        match=rf"{name} is read, and .*{part.name} is not, .* Remove {part.name}",
    ):
        model = load_pretrained(directory)
    assert seeds_of(model) == (0, 0, 0)
    save_pretrained(model, tmp_path / "new")
    assert not list((tmp_path / "new").glob("*.part"))


def test_a_part_that_nothing_names_is_not_in_force(tmp_path, recwarn):
    directory = make_directory(tmp_path / "model", 0)
    (directory / "config.json.0123456789abcdef.part").write_text("{}")
    assert seeds_of(load_pretrained(directory)) == (0, 0, 0)
    assert not [w for w in recwarn if ".part" in str(w.message)]


def test_the_part_of_an_interrupted_save_is_in_force_with_a_warning(
    tmp_path, monkeypatch
):
    save_pretrained(
        load_pretrained(make_directory(tmp_path / "old", 0)), tmp_path / "model"
    )
    new = load_pretrained(make_directory(tmp_path / "new", 1))
    replace = os.replace
    names = []

    def stop(source, target):
        if str(target).endswith("config.json"):
            raise Killed
        names.append(str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(Killed):
            save_pretrained(new, tmp_path / "model")
    match = (
        r"was stopped\. config\.json\.[0-9a-f]{16}\.part belongs to the weights, "
        r"and is read instead"
    )
    with pytest.warns(UserWarning, match=match):
        assert seeds_of(load_pretrained(tmp_path / "model")) == (1, 1, 1)


# Texts and addresses.

ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
CARD = """
import locale, sys
import redco_eqx_models as models
from redco_eqx import types
encoding = locale.getpreferredencoding(False)
assert encoding.lower() != "utf-8", encoding
model = models.load_pretrained(sys.argv[1])
text, other = sys.argv[2] + "/text", sys.argv[2] + "/mod\\u00e8le"
models.save_pretrained(model, text, card="Donn\\u00e9es: \\u4f60\\u597d")
other = other.encode().decode("ascii", "surrogateescape")
models.save_pretrained(model, other, card=types.History())
"""


def test_a_card_is_utf_8_in_an_ascii_locale(tmp_path):
    make_directory(tmp_path / "old", 0)
    generation = {"eos_token_id": 0, "comment": "Données"}
    (tmp_path / "old" / "generation_config.json").write_text(
        json.dumps(generation, ensure_ascii=False), "utf-8"
    )
    printed(CARD, tmp_path / "old", tmp_path, without=(), **ASCII)
    assert (tmp_path / "text" / "README.md").read_bytes() == "Données: 你好".encode()
    assert "# modèle" in (tmp_path / "modèle" / "README.md").read_text("utf-8")
    assert (
        json.loads((tmp_path / "text" / "generation_config.json").read_bytes())
        == generation
    )


NO_TEXT = r"card has '\\udce9' at position 3, .*encoding='utf-8'"
BAD_CARDS = {
    "not a text": ("caf\udce9", ValueError, NO_TEXT),
    "a path": (pathlib.Path("README.md"), TypeError, "card"),
}


@pytest.mark.parametrize(
    ("card", "error", "message"), BAD_CARDS.values(), ids=list(BAD_CARDS)
)
def test_a_bad_card_is_refused_before_anything_is_written(
    tmp_path, card, error, message
):
    save_pretrained(make("gpt2"), tmp_path / "model", card="the old one")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    raised(
        error,
        save_pretrained,
        make("llama"),
        tmp_path / "model",
        card=card,
        match=message,
    )
    assert {
        file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()
    } == before


def call_with(function, address):
    arguments = (address,)
    if function == "save_pretrained":
        arguments = (make("gpt2"), address)
    if function == "save_lora":
        arguments = (lora_of(make("llama"), 1.0), address)
    if function == "load_lora":
        arguments = (make("llama"), address)
    getattr(models, function)(*arguments)


@pytest.mark.parametrize(
    "address", ["gs://bucket/model", pathlib.Path("s3://bucket/model")], ids=repr
)
@pytest.mark.parametrize(
    "function",
    [
        "save_pretrained",
        "save_lora",
        "load_pretrained",
        "load_lora",
        "load_stable_diffusion",
        "load_image_processor",
    ],
)
def test_an_address_is_refused_by_everything_that_writes_or_reads(
    tmp_path, monkeypatch, function, address
):
    monkeypatch.chdir(tmp_path)
    raised(
        ValueError,
        call_with,
        function,
        address,
        match=f"{function}: directory is .*address and not a path",
    )
    assert not list(tmp_path.iterdir())


def test_an_address_is_refused_by_save_stable_diffusion(
    tmp_path, monkeypatch, stable_diffusion
):
    monkeypatch.chdir(tmp_path)
    message = "save_stable_diffusion: directory is .*address and not a path"
    raised(
        ValueError,
        models.save_stable_diffusion,
        stable_diffusion[0],
        "gs://bucket/model",
        match=message,
    )
    assert not list(tmp_path.iterdir())
