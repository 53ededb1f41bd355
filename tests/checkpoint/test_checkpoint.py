"""Checkpoints: exact on any mesh, verified, pruned, refused by name, and open without
this library."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import sys
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    assert_same,
    bits,
    counting_step,
    full_disk,
    printed,
    raised,
    steps_in,
)

import redco_eqx as rx
from redco_eqx._base.tree import is_trainable, to_arrays
from redco_eqx._checkpoint.arrays import to_names
from redco_eqx._checkpoint.restore import rename
from redco_eqx._sharding.pieces import array_checksums

ADAM = optax.adamw(1e-2)


def odd(seed: int) -> dict[str, Any]:
    """A model with leaves of every kind that it can hold."""
    normal = np.random.default_rng(seed).standard_normal
    arrays = {
        "up": {"weight": normal((16, 8), np.float32), "bias": normal(16, np.float32)},
        "down": {"weight": normal((8, 16), np.float32), "bias": normal(8, np.float32)},
        "half": normal(8).astype(jnp.bfloat16),
        "table": np.arange(6, dtype=np.int8).reshape(2, 3),
        "mask": np.array([0.0, -np.inf, np.nan], np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    keys = jax.random.split(jax.random.key(seed), 2)
    return {**jax.tree.map(jnp.asarray, arrays), "keys": keys, "scale": 2.0}


def is_weight(x: Any) -> bool:
    return is_trainable(x) and x.ndim == 2 and x.size > 0


def begin(
    model: Any, mesh: Any, optimizer: Any = ADAM, seed: int = 0, **arguments: Any
) -> Any:
    def place(x: Any) -> Any:
        spec = jax.P("tensor", "fsdp") if is_weight(x) else jax.P()
        return (
            jax.device_put(x, jax.NamedSharding(mesh, spec)) if eqx.is_array(x) else x
        )

    placed = jax.tree.map(place, model)
    arguments = {"trainable": is_weight, **arguments}
    return rx.init_state(placed, optimizer, key=jax.random.key(seed + 1), **arguments)


def odd_state(
    optimizer: Any = ADAM,
    seed: int = 0,
    step: int = 0,
    mesh: Any = None,
    **arguments: Any,
) -> Any:
    state = begin(
        odd(seed), mesh or rx.make_mesh(tensor=4), optimizer, seed, **arguments
    )
    return dataclasses.replace(state, step=state.step + step)


def tiny(step: int = 0, model: Any = None) -> Any:
    model = {"weight": jnp.ones(2), "bias": jnp.ones(2)} if model is None else model
    state = rx.init_state(model, key=jax.random.key(1))
    return dataclasses.replace(state, step=state.step + step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """A state on data 2 x tensor 4, and the directory of its only checkpoint. Not to be
    changed."""
    directory = tmp_path_factory.mktemp("saved")
    state = odd_state(step=7)
    state = dataclasses.replace(
        state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state)
    )
    rx.save(
        directory, state, extras={"note": ["mine", 1, None]}, metrics={"eval/loss": 0.5}
    )
    return state, directory


# Checksums


def expected_words(x: np.ndarray) -> str:
    """By NumPy, from the definition."""

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    bits = x.view(
        {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[x.dtype.itemsize]
    ).ravel()
    bits = bits.astype(np.uint32)
    h = mix(bits ^ mix(np.arange(1, bits.size + 1, dtype=np.uint32)))
    words = (np.sum(h, dtype=np.uint32), np.sum(mix(h + np.uint32(1)), dtype=np.uint32))
    return "".join(f"{word:08x}" for word in words)


def test_a_checksum_is_that_of_the_bits_on_any_layout() -> None:
    normal = np.random.default_rng(0).normal(size=(16, 8))
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "uint8", "bool", "complex64")
    arrays = {dtype: normal[:8, :5].astype(jnp.dtype(dtype)) for dtype in dtypes}
    assert array_checksums(jax.tree.map(jnp.asarray, arrays)) == (
        jax.tree.map(expected_words, arrays),
        [],
    )
    mesh, x = rx.make_mesh(tensor=2, fsdp=2), normal.astype(np.float32)
    specs = {
        str(spec): spec
        for spec in (jax.P("tensor", "fsdp"), jax.P(None, ("data", "fsdp")), jax.P())
    }
    found, _ = array_checksums(
        {
            name: jax.device_put(x, jax.NamedSharding(mesh, spec))
            for name, spec in specs.items()
        }
    )
    assert found == dict.fromkeys(specs, expected_words(x))
    # What is not finite is told.
    x[5, 5] = np.nan
    y = np.full(2, -np.inf, np.float32)
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("tensor", "fsdp")))
    mixed: Any = {"good": normal.astype(np.float32), "nan": split, "inf": y}
    assert array_checksums(mixed)[1] == ["nan", "inf"]


# There and back


@pytest.mark.parametrize("name", ["2x2x2", "one"])
def test_saved_and_restored_on_any_mesh(
    saved: Any, name: str, tmp_path: pathlib.Path
) -> None:
    state, directory = saved
    like = odd_state(seed=5, mesh=helpers.mesh_of(name))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    for target in (like, abstract):
        found = rx.restore(directory, target)
        assert to_names(found).keys() == to_names(state).keys()
        for path, x in to_names(found).items():
            assert x.sharding == to_names(like)[path].sharding, path
            assert x.dtype == to_names(state)[path].dtype
        assert bits(found) == bits(state)
    # The step may be a NumPy array.
    assert (
        rx.save(tmp_path, dataclasses.replace(found, step=np.asarray(found.step))).name
        == "7"
    )
    assert bits(rx.restore(tmp_path, odd_state(seed=5))) == bits(state)


def test_names_do_not_say_what_is_trained(saved: Any) -> None:
    state, directory = saved
    names = set(rx.list_checkpoints(directory)[0].arrays)
    assert {
        "step",
        "key",
        "model/up.weight",
        "model/up.bias",
        "optimizer/0.mu.up.weight",
    } <= names
    other = odd_state(trainable=lambda x: is_weight(x) and x.shape[0] == 16, seed=5)
    assert set(other.params) < set(state.params)
    found = rx.restore(directory, other, only="model")
    assert jax.tree.structure(found) == jax.tree.structure(other)
    for path, x in {**found.params, **found.frozen}.items():
        assert bits(x) == bits({**state.params, **state.frozen}[path]), path


def test_donation_right_after_an_asynchronous_save(tmp_path: pathlib.Path) -> None:
    layout = jax.NamedSharding(rx.make_mesh(tensor=8), jax.P("tensor"))
    step = jax.jit(counting_step, donate_argnums=0)

    def start() -> Any:
        return tiny(
            model={"w": jax.device_put(np.ones((128, 128), np.float32), layout)}
        )

    state = start()
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        for _ in range(3):
            writer.save(state)
            for _ in range(3):
                state, _ = step(state, {"weight": jnp.zeros(1)})
    for at in (0, 3, 6):
        expected = dataclasses.replace(
            start(), params={"w": start().params["w"] + at}, step=jnp.int32(at)
        )
        assert_same(rx.restore(tmp_path, start(), step=at), expected)


# The record


def test_the_record(saved: Any) -> None:
    _, directory = saved
    (info,) = rx.list_checkpoints(directory)
    assert (info.step, info.metrics, info.run) == (7, {"eval/loss": 0.5}, None)
    assert info.extras == {"note": ["mine", 1, None]}
    assert info.versions["jax"] == jax.__version__
    assert str(info.arrays["model/keys"]) == "key<fry>[2]"
    assert str(info.arrays["model/half"]) == "bfloat16[8]"
    assert rx.list_checkpoints(directory / "nowhere") == []


def test_numbers_come_back_exactly(tmp_path: pathlib.Path) -> None:
    numbers = {"nan": float("nan"), "inf": float("-inf"), "third": 1 / 3}
    window = {"a": list(numbers.values())}
    run = rx.types.RunRecord(
        0, 7, 1, 2, 4, 22, evaluations=({"step": 3, **numbers},), window=window
    )
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        path = writer.save(tiny(1), metrics=numbers, run=run)
    (info,) = rx.list_checkpoints(tmp_path)
    assert repr((info.metrics, info.run)) == repr((numbers, run))
    # Strict JSON.
    json.loads(
        (path / "record" / "record.json").read_text(), parse_constant=pytest.fail
    )


# A part only


def test_the_model_alone_into_another_optimizer(saved: Any) -> None:
    state, directory = saved
    like = odd_state(optax.sgd(0.1, momentum=0.9), seed=5, step=3)
    with pytest.raises(
        ValueError,
        match=r"optimizer/0.mu.up.weight: missing in the state, float32\[16,8\]",
    ):
        rx.restore(directory, like)
    found = rx.restore(directory, like, only="model")
    assert_same(
        (found.opt_state, found.key, found.step), (like.opt_state, like.key, like.step)
    )
    assert_same(found.params, state.params)


def test_a_rate_that_became_a_whole_number_is_named(tmp_path):
    def begin_with(rate: Any) -> Any:
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return rx.init_state(
            eqx.nn.Linear(2, 2, key=helpers.KEY), optimizer, key=helpers.KEY
        )

    rx.save(tmp_path, begin_with(0.1))
    with pytest.raises(ValueError, match=r"learning_rate: int32.*such as 1\.0\)"):
        rx.restore(tmp_path, begin_with(1))


def test_new_and_missing_leaves(saved: Any) -> None:
    state, directory = saved
    head = {"weight": jnp.ones((4, 8)), "bias": jnp.ones(4)}
    grown = begin(
        {**odd(5), "head": head, "half": jnp.ones(6, jnp.bfloat16)},
        rx.make_mesh(data=1),
        None,
    )
    said = str(
        raised(
            ValueError,
            rx.restore,
            directory,
            grown,
            match="does not fit the checkpoint",
        )
    )
    for words in (
        "model/head.weight: float32[4,8] in the state, missing in the checkpoint",
        "model/half: bfloat16[6] in the state, bfloat16[8] in the checkpoint",
        "optimizer/0.nu.down.weight: missing in the state, float32[8,16] in the "
        "checkpoint",
    ):
        assert words in said
    assert "model/up.weight" not in said
    found = rx.restore(directory, grown, new=["model/h*"], unused=["optimizer/*"])
    own, read = {**grown.params, **grown.frozen}, {**state.params, **state.frozen}
    for path, x in {**found.params, **found.frozen}.items():
        assert bits(x) == bits((own if path.startswith("h") else read)[path]), path
    assert int(found.step) == 7
    with pytest.raises(
        ValueError, match=r"model/head.weight: float32\[4,8\] in the state, missing"
    ):
        rx.restore(directory, grown, new=["modle/*"], unused=["optimizer/*"])


def test_a_renamed_field_is_read_under_its_new_name(saved: Any) -> None:
    state, directory = saved
    like, plain = (
        begin(model, rx.make_mesh(data=1)) for model in ({"base": odd(5)}, odd(5))
    )
    missing = r"model/base.up.weight: .* missing in the checkpoint"
    error = raised(ValueError, rx.restore, directory, like, match=missing)
    for remedy in (
        "renamed=",
        "new=",
        "unused=",
        'only="model"',
        "optimizer that it began with",
    ):
        assert remedy in str(error)
    tops = {
        name.partition("/")[2].partition(".")[0]
        for name in to_names(state)
        if name.startswith("model/")
    }
    found = rx.restore(directory, like, renamed={name: f"base.{name}" for name in tops})
    assert bits(found) == bits(state)
    assert sum(
        path.startswith("0.mu.base.") for path in to_arrays(found.opt_state)
    ) == len(state.params)

    aside: Any = {
        "renamed": {"up": "aside"},
        "new": ["model/up.*"],
        "unused": ["model/aside.*"],
    }
    swapped = rx.restore(directory, plain, only="model", **aside)
    assert_same(swapped.frozen["down.bias"], state.frozen["down.bias"])
    assert_same(swapped.params["up.weight"], plain.params["up.weight"])
    names = ("model/a", "model/sub.a", "optimizer/0.mu.a", "optimizer/0.mu.sub.a")
    assert rename(names, {"a": "c"}) == {
        x: x if "sub" in x else f"{x[:-1]}c" for x in names
    }
    with pytest.raises(ValueError, match=r"`renamed` has up\.wait, but no path"):
        rx.restore(directory, like, renamed={"up.wait": "base.up.weight"})
    with pytest.raises(
        ValueError, match=r"two arrays of the checkpoint the name model/down\.bias"
    ):
        rx.restore(directory, plain, renamed={"up.bias": "down.bias"})


def test_what_is_not_read_must_have_a_value(saved: Any) -> None:
    state, directory = saved
    like = odd_state(seed=5)
    with pytest.raises(ValueError, match="in `like` it is abstract"):
        rx.restore(directory, jax.eval_shape(lambda: like), only="model")
    jax.tree.map(lambda x: x.delete(), like)
    assert bits(rx.restore(directory, like)) == bits(state)
    raised(
        ValueError,
        rx.restore,
        directory,
        like,
        only="model",
        match="in `like` it has been deleted",
    )


def test_the_home_directory_is_meant_by_a_tilde(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rx.save("~/run", tiny(1))
    rx.Checkpoints("~/run").open().close()
    assert [info.path for info in rx.list_checkpoints("~/run")] == [
        tmp_path / "run" / "1"
    ]
    assert int(rx.restore("~/run", tiny(0)).step) == 1
    rx.JSONLLogger("~/run/log.jsonl")(1, {})
    assert (tmp_path / "run" / "log.jsonl").exists()
    assert not (tmp_path / "~").exists()


# Damage


def refusal(directory: pathlib.Path, state: Any) -> str | None:
    """Return the error of `restore` on its only checkpoint; `None` if it returns
    exactly `state`."""
    try:
        found = rx.restore(directory, state)
    except rx.errors.CheckpointError as error:
        return str(error)
    assert bits(found) == bits(state)
    return None


def test_a_missing_file_is_found_or_harmless(
    saved: Any, tmp_path: pathlib.Path
) -> None:
    state, directory = saved
    said = {}
    for i, path in enumerate(
        sorted(path for path in directory.rglob("*") if path.is_file())
    ):
        copy = shutil.copytree(directory, tmp_path / str(i))
        (copy / path.relative_to(directory)).unlink()
        answer = said[str(path.relative_to(directory / "7"))] = refusal(copy, state)
        assert answer is None or str(copy / "7") in answer
    assert said["record/record.json"]
    assert said["arrays/manifest.ocdbt"]


def test_a_flipped_bit_is_found_or_harmless(tmp_path: pathlib.Path) -> None:
    draw = np.random.default_rng(0)  # a small model has its arrays among the indices
    state = tiny(
        model={str(i): jnp.asarray(draw.normal(size=(128, 64))) for i in range(3)}
    )
    rx.save(tmp_path, state)
    largest = max(tmp_path.rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    num_found = 0
    for _ in range(20):
        data = bytearray(whole)
        bit = int(draw.integers(len(whole) * 8))
        data[bit // 8] ^= 1 << bit % 8
        largest.write_bytes(data)
        num_found += "is damaged" in (refusal(tmp_path, state) or "harmless")
    assert num_found > 5


def test_arrays_that_were_exchanged_unseen_by_orbax_are_found(
    tmp_path: pathlib.Path,
) -> None:
    """Whole and readable, but not what the record speaks of."""
    state, other = odd_state(), odd_state(seed=9)
    a, b = rx.save(tmp_path / "a", state), rx.save(tmp_path / "b", other)
    (a / "arrays").rename(tmp_path / "aside")
    (b / "arrays").rename(a / "arrays")
    raised(
        rx.errors.CheckpointError,
        rx.restore,
        tmp_path / "a",
        state,
        match="the checksum of",
    )


@pytest.mark.parametrize("damage", ["empty", "alter", "unlink"])
def test_a_damaged_record_is_skipped_for_an_older_one(
    damage: str, tmp_path: pathlib.Path
) -> None:
    def damaged(step: int) -> None:
        path = tmp_path / str(step) / "record" / "record.json"
        altered = path.read_text().replace('"mine"', '"yours"')
        path.unlink() if damage == "unlink" else path.write_text(
            altered if damage == "alter" else ""
        )

    state = tiny(2)
    for step in (1, 2):
        rx.save(tmp_path, tiny(step), extras={"note": "mine"})
    damaged(2)
    with pytest.warns(
        UserWarning, match=f"{tmp_path}/2.*damaged.*The checkpoint before it is used"
    ):
        assert int(rx.restore(tmp_path, state).step) == 1
    with pytest.warns(UserWarning, match="It is left out"):
        assert steps_in(tmp_path) == [1]
    raised(
        rx.errors.CheckpointError, rx.restore, tmp_path, state, step=2, match="damaged"
    )
    damaged(1)
    error = pytest.raises(
        rx.errors.CheckpointError, match="no checkpoint can be restored"
    )
    with pytest.warns(UserWarning, match=f"{tmp_path}/2"), error:
        rx.restore(tmp_path, state)


# The writer


def test_what_is_kept(tmp_path: pathlib.Path) -> None:
    losses = {1: 3.0, 2: float("nan"), 3: 1.0, 4: 2.0, 5: 1.0, 6: None}
    cases: Any = (
        ("one", {"loss": "min"}, [3, 5, 6]),
        ("two", {"loss": "min", "up": "max"}, [1, 3, 5, 6]),
    )
    for name, best, kept in cases:
        with rx.Checkpoints(
            tmp_path / name, keep_last=2, keep_best=best
        ).open() as writer:
            for step, loss in losses.items():
                writer.save(
                    tiny(step),
                    metrics=None if loss is None else {"loss": loss, "up": loss},
                )
        assert steps_in(tmp_path / name) == kept
    tmp_path /= "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5", "6"]
    with rx.Checkpoints(
        tmp_path, keep_last=1, keep_best={"loss": "max"}
    ).open() as writer:
        writer.save(tiny(7), metrics={"loss": 0.0})
    assert steps_in(tmp_path) == [3, 7]


def test_a_step_that_is_saved_again_replaces_the_first_when_it_is_whole(
    tmp_path: pathlib.Path,
) -> None:
    rx.save(tmp_path, tiny(3), extras={"try": 1})
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        writer.save(tiny(3), extras={"try": 2})
        assert rx.list_checkpoints(tmp_path)[0].extras == {"try": 1}
        writer.wait()
    (info,) = rx.list_checkpoints(tmp_path)
    assert info.extras == {"try": 2}
    assert int(rx.restore(tmp_path, tiny(0)).step) == 3


def test_litter_is_removed_and_nothing_else(tmp_path: pathlib.Path) -> None:
    for name in (
        "12.orbax-checkpoint-tmp",
        "7.deleting",
        "3-2.orbax-checkpoint-tmp-1",
        "mine",
        "7.damaged",
    ):
        (tmp_path / name).mkdir()
    rx.Checkpoints(tmp_path).open().close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.damaged", "mine"]


def with_nan() -> Any:
    params = {"weight": jnp.ones(2), "bias": jnp.array([1.0, jnp.nan])}
    return dataclasses.replace(tiny(3), params=params)


def with_a_deleted_array() -> Any:
    state = tiny(0)
    state.params["weight"].delete()
    return state


NOT_TO_BE_SAVED: dict[str, tuple[Any, str]] = {
    "nan": (with_nan, r"step 3 is not saved, because model/bias"),
    "abstract": (lambda: jax.eval_shape(lambda: tiny(0)), "is abstract"),
    "deleted": (with_a_deleted_array, "model/weight of the state has been deleted"),
}


@pytest.mark.parametrize("name", NOT_TO_BE_SAVED)
def test_a_state_that_cannot_be_saved_is_refused(
    name: str, tmp_path: pathlib.Path
) -> None:
    make, message = NOT_TO_BE_SAVED[name]
    raised(ValueError, rx.save, tmp_path, make(), match=message)
    assert rx.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    "extras",
    [(1, 2), np.ones(2), {1: 2}, float("nan"), {3}],
    ids=["tuple", "array", "int_as_name", "nan", "set"],
)
def test_extras_that_json_would_change_are_refused(
    extras: Any, tmp_path: pathlib.Path
) -> None:
    message = "extras must be plain JSON"
    raised(ValueError, rx.save, tmp_path, tiny(0), extras={"a": extras}, match=message)
    assert rx.list_checkpoints(tmp_path) == []


def test_an_address_is_no_directory() -> None:
    raised(
        ValueError,
        rx.Checkpoints,
        "gs://bucket/run",
        match="not a path of a file system",
    )


def save_and_wait(writer: Any) -> None:
    writer.save(odd_state(step=2))
    writer.wait()


def test_a_disk_that_is_full_reaches_the_caller(tmp_path: pathlib.Path) -> None:
    rx.save(tmp_path, tiny(1))
    writer = rx.Checkpoints(tmp_path, keep_last=None).open()
    with (
        full_disk(),
        pytest.raises(rx.errors.CheckpointError, match="could not be written"),
    ):
        save_and_wait(writer)
    writer.save(tiny(3))  # and the writer can go on
    writer.close()
    assert steps_in(tmp_path) == [1, 3]


def test_without_orbax_the_install_line_is_told(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (rx.save, rx.restore):
        raised(
            ImportError,
            call,
            tmp_path,
            tiny(0),
            match=r'pip install "redco_eqx\[checkpoint\]"',
        )


# Without this library

READ = """
import hashlib, json, sys
import ml_dtypes, numpy as np, tensorstore as ts
base = {"driver": "ocdbt", "base": f"file://{sys.argv[1]}/arrays/"}
keys = ts.KvStore.open(base).result().list().result()
names = [key[:-8].decode() for key in keys if key.endswith(b"/.zarray")]
def read(name):
    spec = {"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}}
    return np.asarray(ts.open(spec).result().read().result())
arrays = {name: read(name) for name in names}
assert not {"redco_eqx", "orbax", "jax"} & set(sys.modules)
digest = lambda x: hashlib.sha256(x.tobytes()).hexdigest()
print(json.dumps({name: digest(x) for name, x in arrays.items()}))
"""


def test_it_opens_by_tensorstore_alone(saved: Any) -> None:
    state, directory = saved
    arrays = {name: x for name, x in to_names(state).items() if x.size > 0}
    expected = {
        name: hashlib.sha256(bits(x)[0]).hexdigest() for name, x in arrays.items()
    }
    assert json.loads(printed(READ, str(directory / "7"))) == expected
