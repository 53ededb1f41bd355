import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import assert_same, to_numpy

import redco_eqx as rx
from redco_eqx._base.tree import is_trainable, to_arrays
from redco_eqx._checkpoint.arrays import digests, from_names, to_names
from redco_eqx._training.identity import identify, what_differs

MESHES: dict[str, dict[str, Any]] = {
    "data 8": {},
    "tensor 8": {"tensor": 8},
    "fsdp 8": {"fsdp": 8},
    "2x4": {"tensor": 4},
    "4x2": {"tensor": 2},
    "2x2x2": {"tensor": 2, "fsdp": 2},
    "one": {"data": 1},
}
ADAM = optax.adamw(1e-2)


class Odd(eqx.Module):
    """A layer among leaves of every kind that a model can hold."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    half: Any
    table: Any
    mask: Any
    keys: Any
    empty: Any
    scale: float

    def __init__(self, key: Any):
        a, b, c = jax.random.split(key, 3)
        self.up, self.down = eqx.nn.Linear(8, 16, key=a), eqx.nn.Linear(16, 8, key=b)
        self.half = jax.random.normal(c, (8,), jnp.bfloat16)
        self.table = jnp.arange(6, dtype=jnp.int8).reshape(2, 3)
        self.mask = jnp.array([0.0, -jnp.inf, jnp.nan])
        self.keys = jax.random.split(c, 2)
        self.empty = jnp.zeros((0, 3))
        self.scale = 2.0

    def __call__(self, x: Any) -> Any:
        return self.down(self.up(x)) * self.half.astype(jnp.float32)


def is_weight(x: Any) -> bool:
    return is_trainable(x) and x.ndim == 2 and x.size > 0


def odd_state(optimizer: Any = ADAM, seed: int = 0, step: int = 0, mesh: Any = None, **arguments: Any) -> Any:
    mesh = mesh or rx.make_mesh(tensor=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rx.errors.ShardingWarning)
        model = rx.init_model(Odd, mesh, key=jax.random.key(seed))
    state = rx.init_state(
        model, optimizer, key=jax.random.key(seed + 1), **{"trainable": is_weight, **arguments}
    )
    return dataclasses.replace(state, step=state.step + step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """A state on data 2 x tensor 4, and the directory of its only checkpoint. Not to be changed."""
    directory = tmp_path_factory.mktemp("saved")
    state = odd_state(step=7)
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    rx.save(directory, state, extras={"note": ["mine", 1, None]}, metrics={"eval/loss": 0.5})
    return state, directory


# Checksums


def expected_words(x: np.ndarray) -> tuple[int, int]:
    """By NumPy, from the definition."""

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    bits = x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[x.dtype.itemsize]).ravel()
    bits = bits.astype(np.uint32)
    h = mix(bits ^ mix(np.arange(1, bits.size + 1, dtype=np.uint32)))
    return int(np.sum(h, dtype=np.uint32)), int(np.sum(mix(h + np.uint32(1)), dtype=np.uint32))


def words(x: Any) -> tuple[int, int]:
    checksums, nonfinite = digests({"x": x})
    assert nonfinite == []
    return int(checksums["x"][:8], 16), int(checksums["x"][8:], 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8", "bool", "complex64"])
def test_a_checksum_is_that_of_the_bits(dtype: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(jnp.dtype(dtype))
    assert words(jnp.asarray(x)) == expected_words(x)


@pytest.mark.parametrize("name", MESHES)
def test_a_checksum_does_not_depend_on_the_layout(name: str) -> None:
    mesh = rx.make_mesh(**MESHES[name])
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    for spec in (("tensor", "fsdp"), (None, ("data", "fsdp")), ()):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert words(jax.device_put(x, sharding)) == expected_words(x)


def test_any_bit_and_any_exchange_changes_a_checksum() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 64, np.uint32)
    seen = {expected_words(x)}
    for bit in range(0, 64 * 32, 7):
        y = x.copy()
        y[bit // 32] ^= np.uint32(1 << (bit % 32))
        seen.add(expected_words(y))
    for i in range(63):
        y = x.copy()
        y[[i, i + 1]] = y[[i + 1, i]]
        seen.add(expected_words(y))
    seen.add(expected_words(np.zeros(64, np.uint32)))
    assert len(seen) == 1 + len(range(0, 64 * 32, 7)) + 63 + 1


def test_what_is_not_finite_is_told() -> None:
    x = jnp.ones(3)
    arrays = {"good": x, "nan": x.at[1].set(jnp.nan), "inf": x.at[1].set(-jnp.inf), "int": jnp.arange(2)}
    assert digests(arrays)[1] == ["nan", "inf"]
    split = jax.sharding.NamedSharding(rx.make_mesh(), jax.sharding.PartitionSpec("data"))
    assert digests({"x": jax.device_put(jnp.ones(8).at[5].set(jnp.nan), split)})[1] == ["x"]


# There and back


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("abstract", [False, True])
def test_restored_on_any_mesh(saved: Any, name: str, abstract: bool) -> None:
    state, directory = saved
    like = odd_state(seed=5, mesh=rx.make_mesh(**MESHES[name]))
    if abstract:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    found = rx.restore(directory, like)
    assert to_names(found).keys() == to_names(state).keys()
    for path, x in to_names(found).items():
        assert x.sharding == to_names(like)[path].sharding, path
        assert x.dtype == to_names(state)[path].dtype
    for x, y in zip(to_numpy(found), to_numpy(state)):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("name", MESHES)
def test_saved_on_any_mesh(name: str, tmp_path: pathlib.Path) -> None:
    state = odd_state(mesh=rx.make_mesh(**MESHES[name]))
    rx.save(tmp_path, state)
    found = rx.restore(tmp_path, odd_state(seed=5))
    for x, y in zip(to_numpy(found), to_numpy(state)):
        assert x.tobytes() == y.tobytes()


def test_names_do_not_say_what_is_trained(saved: Any) -> None:
    state, directory = saved
    names = set(rx.list_checkpoints(directory)[0].arrays)
    assert {"step", "key", "model/up.weight", "model/up.bias", "optimizer/0.mu.up.weight"} <= names
    other = odd_state(trainable=lambda x: is_weight(x) and x.shape[0] == 16, seed=5)
    assert set(other.params) < set(state.params)
    found = rx.restore(directory, other, only="model")
    assert jax.tree.structure(found) == jax.tree.structure(other)
    for path, x in {**found.params, **found.frozen}.items():
        expected = {**state.params, **state.frozen}[path]
        assert to_numpy(x)[0].tobytes() == to_numpy(expected)[0].tobytes()


def test_a_model_with_a_state(tmp_path: pathlib.Path) -> None:
    def make() -> Any:
        pair = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
        return rx.init_state(pair, ADAM, key=jax.random.key(1))

    state = make()
    changed = dataclasses.replace(state, model_state=jax.tree.map(lambda x: x + 1, state.model_state))
    rx.save(tmp_path, changed)
    assert_same(rx.restore(tmp_path, make()), changed)


def test_donation_right_after_an_asynchronous_save(tmp_path: pathlib.Path) -> None:
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)

    def begin() -> Any:
        model = eqx.filter_shard(
            eqx.nn.Linear(128, 128, key=jax.random.key(0)),
            jax.sharding.NamedSharding(rx.make_mesh(tensor=8), jax.sharding.PartitionSpec("tensor")),
        )
        return rx.init_state(model, optax.sgd(0.1, momentum=0.9), key=jax.random.key(1))

    def count(state: Any) -> Any:
        arrays = step((state.params, state.opt_state, state.step))
        return dataclasses.replace(state, params=arrays[0], opt_state=arrays[1], step=arrays[2])

    state = begin()
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        for _ in range(4):
            writer.save(state)
            for _ in range(3):
                state = count(state)
    expected = begin()
    for at in range(12):
        if at % 3 == 0:
            assert_same(rx.restore(tmp_path, begin(), step=at), expected)
        expected = count(expected)


# The record


def test_a_step_that_is_a_numpy_array_is_saved(tmp_path: pathlib.Path) -> None:
    state = odd_state(step=5)
    given = dataclasses.replace(state, step=np.asarray(state.step))
    assert rx.save(tmp_path, given).name == "5"
    assert_same(rx.restore(tmp_path, odd_state(seed=1)), state)


def test_the_record(saved: Any) -> None:
    _, directory = saved
    (info,) = rx.list_checkpoints(directory)
    assert (info.step, info.extras, info.metrics, info.run) == (
        7,
        {"note": ["mine", 1, None]},
        {"eval/loss": 0.5},
        None,
    )
    assert info.versions["jax"] == jax.__version__
    assert str(info.arrays["model/keys"]) == "key<fry>[2]"
    assert str(info.arrays["model/half"]) == "bfloat16[8]"
    assert rx.list_checkpoints(directory / "nowhere") == []


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1 / 3])
def test_numbers_come_back_exactly(value: float, tmp_path: pathlib.Path) -> None:
    run = rx.types.RunRecord(
        0, 7, 1, 2, 4, 22, evaluations=({"step": 3, "eval/loss": value},), window={"a": [value]}
    )
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        path = writer.save(odd_state(mesh=rx.make_mesh(data=1)), metrics={"m": value}, run=run)
    (info,) = rx.list_checkpoints(tmp_path)
    assert repr((info.metrics, info.run)) == repr(({"m": value}, run))
    json.loads((path / "record" / "record.json").read_text(), parse_constant=pytest.fail)  # strict JSON


@pytest.mark.parametrize(
    "extras", [{"a": (1, 2)}, {"a": np.ones(2)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": {3}}]
)
def test_extras_that_json_would_change_are_refused(extras: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="extras must be plain JSON"):
        rx.save(tmp_path, odd_state(), extras=extras)
    assert list(tmp_path.iterdir()) == []


# A part only


def test_the_model_alone_into_another_optimizer(saved: Any) -> None:
    state, directory = saved
    like = odd_state(optax.sgd(0.1, momentum=0.9), seed=5, step=3)
    with pytest.raises(ValueError, match=r"optimizer/0.mu.up.weight: missing in the state, float32\[16,8\]"):
        rx.restore(directory, like)
    found = rx.restore(directory, like, only="model")
    assert_same((found.opt_state, found.key, found.step), (like.opt_state, like.key, like.step))
    assert_same(found.params, state.params)


class Grown(Odd):
    head: Any

    def __init__(self, key: Any):
        super().__init__(key)
        self.head = eqx.nn.Linear(8, 4, key=key)
        self.half = jnp.ones(6, jnp.bfloat16)


def test_new_and_missing_leaves(saved: Any) -> None:
    state, directory = saved
    mesh = rx.make_mesh(data=1)
    grown = rx.init_state(rx.init_model(Grown, mesh, key=jax.random.key(5)), None, key=jax.random.key(6))
    with pytest.raises(ValueError, match="does not fit the checkpoint") as caught:
        rx.restore(directory, grown)
    message = str(caught.value)
    assert "model/head.weight: float32[4,8] in the state, missing in the checkpoint" in message
    assert "model/half: bfloat16[6] in the state, bfloat16[8] in the checkpoint" in message
    assert "optimizer/0.nu.down.weight: missing in the state, float32[8,16] in the checkpoint" in message
    assert "model/up.weight" not in message
    found = rx.restore(directory, grown, new=["model/h*"], unused=["optimizer/*"])
    arrays = {**found.params, **found.frozen}
    own = {**grown.params, **grown.frozen}
    for path in arrays:
        source = own if path.startswith("h") else {**state.params, **state.frozen}
        assert to_numpy(arrays[path])[0].tobytes() == to_numpy(source[path])[0].tobytes(), path
    assert int(found.step) == 7
    with pytest.raises(ValueError, match=r"model/head.weight: float32\[4,8\] in the state, missing"):
        rx.restore(directory, grown, new=["modle/*"], unused=["optimizer/*"])


class Renamed(eqx.Module):
    base: Odd

    def __init__(self, key: Any):
        self.base = Odd(key)


def test_a_renamed_field_is_read_under_its_new_name(saved: Any) -> None:
    state, directory = saved

    def make(kind: Any) -> Any:
        model = rx.init_model(kind, rx.make_mesh(data=1), key=jax.random.key(5))
        return rx.init_state(model, ADAM, key=jax.random.key(6), trainable=is_weight)

    like = make(Renamed)
    with pytest.raises(ValueError, match=r"model/base.up.weight: .* missing in the checkpoint") as caught:
        rx.restore(directory, like)
    for remedy in ("renamed=", "new=", "unused=", 'only="model"', "optimizer that it began with"):
        assert remedy in str(caught.value)
    tops = {name.partition("/")[2].partition(".")[0] for name in to_names(state) if name.startswith("model/")}
    found = rx.restore(directory, like, renamed={name: f"base.{name}" for name in tops})
    assert [x.tobytes() for x in to_numpy(found)] == [x.tobytes() for x in to_numpy(state)]
    assert sum(path.startswith("0.mu.base.") for path in to_arrays(found.opt_state)) == len(state.params)

    swapped = rx.restore(directory, make(Odd), only="model", renamed={"up": "aside"}, new=["model/up.*"],
                         unused=["model/aside.*"])  # fmt: skip
    assert_same(swapped.frozen["down.bias"], state.frozen["down.bias"])
    assert_same(swapped.params["up.weight"], make(Odd).params["up.weight"])
    with pytest.raises(ValueError, match=r"model/up\.weight: missing in the state"):
        rx.restore(directory, like, renamed={"up.wait": "base.up.weight"})
    with pytest.raises(ValueError, match=r"two arrays of the checkpoint the name model/down\.bias"):
        rx.restore(directory, make(Odd), renamed={"up.bias": "down.bias"})


def begun_by(state: Any) -> Any:
    """The identity of a run that begins with a state."""
    unused: Any = {"collate_fn": lambda examples: None, "loss_fn": lambda model, batch, key: 0.0}
    return identify(state, None, {}, optimizer=optax.sgd(0.1), **unused)


@pytest.mark.parametrize("name", MESHES)
def test_an_identity_is_that_of_the_state_on_any_mesh(name: str) -> None:
    expected = begun_by(odd_state())
    found = begun_by(odd_state(mesh=rx.make_mesh(**MESHES[name])))
    assert what_differs(expected, found) == []
    np.testing.assert_allclose(found["parameters"], expected["parameters"], atol=1e-5)
    nearly = odd_state(mesh=rx.make_mesh(**MESHES[name]))

    def scaled(factor: float, paths: Any = nearly.params) -> Any:
        params = {path: x * factor if path in paths else x for path, x in nearly.params.items()}
        return begun_by(dataclasses.replace(nearly, params=params))

    assert what_differs(expected, scaled(1 + 1e-6)) == []  # another compiler's last bits
    for factor in (0.5, 3.0, 1.01, -1.0):
        assert what_differs(expected, scaled(factor)) == ["other initial parameters"]
        assert what_differs(expected, scaled(factor, ["up.weight"])) == ["other initial parameters"]
    other = odd_state(seed=1, mesh=rx.make_mesh(**MESHES[name]))
    assert what_differs(expected, begun_by(other)) == ["another key", "other initial parameters"]
    some = dataclasses.replace(nearly, params={**nearly.params, "up.weight": other.params["up.weight"]})
    assert what_differs(expected, begun_by(some)) == ["other initial parameters"]


def test_identities_of_a_hundred_seeds_all_differ() -> None:
    def weight(seed: int) -> Any:
        params = {"weight": jax.random.normal(jax.random.key(seed), (3, 2))}
        return dataclasses.replace(tiny(0), params=params, frozen={})

    found = [begun_by(weight(seed)) for seed in range(100)]
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    assert all(what_differs(a, b) == ["other initial parameters"] for a, b in pairs)


def test_the_home_directory_is_meant_by_a_tilde(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rx.save("~/run", tiny(1))
    rx.Checkpoints("~/run").open().close()
    assert [info.path for info in rx.list_checkpoints("~/run")] == [tmp_path / "run" / "1"]
    assert int(rx.restore("~/run", tiny(0)).step) == 1
    with rx.JSONLLogger("~/run/log.jsonl") as logger:
        logger(1, {})
    with rx.TensorBoardLogger("~/run/board") as board:
        board(1, {"a": 1.0})
    assert (tmp_path / "run" / "log.jsonl").exists()
    assert (tmp_path / "run" / "board").is_dir()
    assert not (tmp_path / "~").exists()


def test_what_is_kept_must_have_a_value(saved: Any) -> None:
    like = jax.eval_shape(lambda x: x, odd_state())
    with pytest.raises(ValueError, match="in `like` it is abstract"):
        rx.restore(saved[1], like, only="model")


def test_a_donated_state_says_how_to_restore(saved: Any) -> None:
    state, directory = saved
    like = odd_state(seed=5)
    jax.tree.map(lambda x: x.delete(), like)
    found = rx.restore(directory, like)
    assert [x.tobytes() for x in to_numpy(found)] == [x.tobytes() for x in to_numpy(state)]
    with pytest.raises(ValueError, match="in `like` it has been deleted"):
        rx.restore(directory, like, only="model")


# Damage


def test_no_checkpoint(tmp_path: pathlib.Path, saved: Any) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        rx.restore(tmp_path / "nowhere", saved[0])
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 8, only of \[7\]"):
        rx.restore(saved[1], saved[0], step=8)


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def refusal(directory: pathlib.Path, state: Any) -> str | None:
    """Return the error of `restore` on its only checkpoint; `None` if it returns exactly `state`."""
    try:
        found = rx.restore(directory, state)
    except rx.errors.CheckpointError as error:
        return str(error)
    assert [x.tobytes() for x in to_numpy(found)] == [x.tobytes() for x in to_numpy(state)]
    return None


def test_a_missing_file_is_found_or_harmless(saved: Any, tmp_path: pathlib.Path) -> None:
    state, directory = saved
    said = {}
    for i, path in enumerate(files(directory)):
        copy = shutil.copytree(directory, tmp_path / str(i))
        (copy / path.relative_to(directory)).unlink()
        answer = said[str(path.relative_to(directory / "7"))] = refusal(copy, state)
        assert answer is None or str(copy / "7") in answer
    assert said["record/record.json"]
    assert said["arrays/manifest.ocdbt"]


def test_a_flipped_bit_is_found_or_harmless(tmp_path: pathlib.Path) -> None:
    model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))  # a small one has its arrays among the indices
    state = rx.init_state(model, ADAM, key=jax.random.key(1))
    rx.save(tmp_path, state)
    largest = max(tmp_path.rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    draw = np.random.default_rng(0)
    num_found = 0
    for _ in range(20):
        data, bit = bytearray(whole), int(draw.integers(len(whole) * 8))
        data[bit // 8] ^= 1 << bit % 8
        largest.write_bytes(data)
        num_found += "is damaged" in (refusal(tmp_path, state) or "harmless")
    assert num_found > 5


def test_arrays_that_were_exchanged_unseen_by_orbax_are_found(tmp_path: pathlib.Path) -> None:
    """Whole and readable, but not what the record speaks of."""
    state, other = odd_state(), odd_state(seed=9)
    a, b = rx.save(tmp_path / "a", state), rx.save(tmp_path / "b", other)
    (a / "arrays").rename(tmp_path / "aside")
    (b / "arrays").rename(a / "arrays")
    with pytest.raises(rx.errors.CheckpointError, match="the checksum of"):
        rx.restore(tmp_path / "a", state)


def empty(path: pathlib.Path) -> None:
    path.write_text("")


def alter(path: pathlib.Path) -> None:
    path.write_text(path.read_text().replace('"mine"', '"yours"'))


@pytest.mark.parametrize("damage", [empty, alter, pathlib.Path.unlink])
def test_a_damaged_record_is_skipped_for_an_older_one(damage: Any, tmp_path: pathlib.Path) -> None:
    state = odd_state(mesh=rx.make_mesh(data=1))
    for _ in range(2):
        state = dataclasses.replace(state, step=state.step + 1)
        rx.save(tmp_path, state, extras={"note": "mine"})
    damage(tmp_path / "2" / "record" / "record.json")
    with pytest.warns(UserWarning, match=f"{tmp_path}/2.*damaged.*The checkpoint before it is used"):
        assert int(rx.restore(tmp_path, state).step) == 1
    with pytest.warns(UserWarning, match="It is left out"):
        assert [info.step for info in rx.list_checkpoints(tmp_path)] == [1]
    with pytest.raises(rx.errors.CheckpointError, match="damaged"):
        rx.restore(tmp_path, state, step=2)
    damage(tmp_path / "1" / "record" / "record.json")
    with (
        pytest.warns(UserWarning, match=f"{tmp_path}/2"),
        pytest.raises(rx.errors.CheckpointError, match="no checkpoint can be restored"),
    ):
        rx.restore(tmp_path, state)


# The writer


def tiny(step: int) -> Any:
    model = eqx.nn.Linear(2, 2, key=jax.random.key(step))
    state = rx.init_state(model, None, key=jax.random.key(1))
    return dataclasses.replace(state, step=state.step + step)


def test_what_is_kept(tmp_path: pathlib.Path) -> None:
    losses = {1: 3.0, 2: float("nan"), 3: 1.0, 4: 2.0, 5: 1.0, 6: None}
    with rx.Checkpoints(tmp_path, keep_last=2, keep_best={"loss": "min"}).open() as writer:
        for step, loss in losses.items():
            writer.save(tiny(step), metrics=None if loss is None else {"loss": loss})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5", "6"]
    with rx.Checkpoints(tmp_path, keep_last=1, keep_best={"loss": "max"}).open() as writer:
        writer.save(tiny(7), metrics={"loss": 0.0})
    assert [info.step for info in rx.list_checkpoints(tmp_path)] == [3, 7]


def test_a_step_that_is_saved_again_replaces_the_first_when_it_is_whole(tmp_path: pathlib.Path) -> None:
    rx.save(tmp_path, tiny(3), extras={"try": 1})
    with rx.Checkpoints(tmp_path, keep_last=None).open() as writer:
        writer.save(tiny(3), extras={"try": 2})
        assert rx.list_checkpoints(tmp_path)[0].extras == {"try": 1}
        writer.wait()
    (info,) = rx.list_checkpoints(tmp_path)
    assert info.extras == {"try": 2}
    assert int(rx.restore(tmp_path, tiny(0)).step) == 3


def test_litter_is_removed_and_nothing_else(tmp_path: pathlib.Path) -> None:
    for name in ("12.orbax-checkpoint-tmp", "7.deleting", "3-2.orbax-checkpoint-tmp-1", "mine", "7.damaged"):
        (tmp_path / name).mkdir()
    rx.Checkpoints(tmp_path).open().close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.damaged", "mine"]


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path: pathlib.Path) -> None:
    state = tiny(3)
    state = dataclasses.replace(state, params={**state.params, "bias": jnp.array([1.0, jnp.nan])})
    with pytest.raises(ValueError, match=r"step 3 is not saved, because model/bias"):
        rx.save(tmp_path, state)
    assert rx.list_checkpoints(tmp_path) == []


def test_a_state_without_arrays_to_save_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="is abstract"):
        rx.save(tmp_path, jax.eval_shape(lambda: tiny(0)))
    state = tiny(0)
    state.params["weight"].delete()
    with pytest.raises(ValueError, match="model/weight of the state has been deleted"):
        rx.save(tmp_path, state)


@pytest.mark.parametrize(
    "arguments", [{"keep_last": 0}, {"keep_best": {"loss": "least"}}, {"keep_best": "loss"}]
)
def test_wrong_arguments_of_the_writer(arguments: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        rx.Checkpoints(tmp_path / "new", **arguments).open()
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="not a path of a file system"):
        rx.Checkpoints("gs://bucket/run").open()


def save_and_wait(writer: Any) -> None:
    writer.save(odd_state(step=2))
    writer.wait()


def test_a_disk_that_is_full_reaches_the_caller(tmp_path: pathlib.Path) -> None:
    rx.save(tmp_path, tiny(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = rx.Checkpoints(tmp_path, keep_last=None).open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(rx.errors.CheckpointError, match="could not be written"):
            save_and_wait(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.save(tiny(3))  # and the writer can go on
    writer.close()
    assert [info.step for info in rx.list_checkpoints(tmp_path)] == [1, 3]


def test_without_orbax_the_install_line_is_told(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (lambda: rx.save(tmp_path, tiny(0)), lambda: rx.restore(tmp_path, tiny(0))):
        with pytest.raises(ImportError, match=r'pip install "redco_eqx\[checkpoint\]"'):
            call()


# Without this library

BY_ORBAX = """
import orbax.checkpoint as ocp
checkpointer = ocp.PyTreeCheckpointer()
names = checkpointer.metadata("run/7/arrays").item_metadata.tree
as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
arrays = checkpointer.restore("run/7/arrays", restore_args=as_numpy)
"""

BY_TENSORSTORE = """
import tensorstore as ts
base = {"driver": "ocdbt", "base": "file://run/7/arrays/"}
keys = ts.KvStore.open(base).result().list().result()
spec = {key[:-8].decode(): {**base, "path": key[:-7].decode()} for key in keys if key.endswith(b"/.zarray")}
arrays = {name: ts.open({"driver": "zarr", "kvstore": spec[name]}).result().read().result() for name in spec}
"""


@pytest.mark.parametrize("program", [BY_ORBAX, BY_TENSORSTORE])
def test_it_opens_without_this_library(program: str, saved: Any) -> None:
    state, directory = saved
    assert len(program.strip().splitlines()) == 5
    program = program.replace("run/7", str(directory / "7"))
    save_all = textwrap.dedent(
        f"""
        import sys
        assert "redco_eqx" not in sys.modules
        assert "orbax" in sys.modules or "jax" not in sys.modules
        import ml_dtypes
        np.savez({str(directory)!r} + "/../out.npz", **{{
            name.replace("/", "|"): np.asarray(x).view(np.uint8) if x.ndim else np.asarray(x)
            for name, x in arrays.items()
        }})
        """
    )
    subprocess.run([sys.executable, "-c", "import numpy as np\n" + program + save_all], check=True)
    with np.load(directory / ".." / "out.npz") as out:
        found = {name.replace("|", "/"): out[name].tobytes() for name in out}
    expected = {name: to_numpy(x)[0].tobytes() for name, x in to_names(state).items() if x.size > 0}
    assert found == expected


def test_names_are_an_inverse() -> None:
    state = odd_state()
    assert_same(from_names(state, to_names(state)).params, state.params)
    assert [x.tobytes() for x in to_numpy(from_names(state, to_names(state)))] == [
        x.tobytes() for x in to_numpy(state)
    ]
