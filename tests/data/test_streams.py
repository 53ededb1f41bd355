"""Streams: every example once and in order, the position of what was consumed, and
going on from there."""

import ast
import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import stream_sources
from fit_helpers import MESHES, no_threads_left
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_sources import KINDS, WITH_STATE, WithState, order, taken

import redco_eqx as rx
from redco_eqx._data import streams
from redco_eqx._data.batches import Epochs
from redco_eqx._data.checksums import checksum
from redco_eqx._data.data import Place
from redco_eqx._data.streams import state_to_text
from redco_eqx._sharding.mesh import num_batch_shards

BATCH_SIZE = 8
NUM = 29  # three batches of 8, and 5 dropped


@pytest.fixture(autouse=True)
def _proof_of_a_batch(monkeypatch):
    """So that the states of short epochs are used."""
    monkeypatch.setattr(streams, "PROOF", BATCH_SIZE)


def ids(batch: Any) -> list[int]:
    return np.asarray(batch).tolist()


def epochs_of(stream: Any, collate_fn: Any = np.asarray) -> Epochs:
    return Epochs(stream, collate_fn, batch_size=BATCH_SIZE, mesh=rx.make_mesh())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(MESHES)),
    num=st.integers(1, 40),
    multiple=st.integers(1, 3),
    prefetch=st.integers(0, 3),
    start=st.integers(0, 2),
)
def test_a_stream_is_the_sequence_in_its_order(name, num, multiple, prefetch, start):
    mesh = rx.make_mesh(**MESHES[name])
    batch_size = multiple * num_batch_shards(mesh)
    if num < (start + 1) * batch_size:
        num += (start + 1) * batch_size
    options: Any = {"batch_size": batch_size, "mesh": mesh, "start": start}
    streamed = list(
        rx.batches(rx.Stream(range(num), prefetch=prefetch), np.asarray, **options)
    )
    indexed = list(rx.batches(range(num), np.asarray, **options))
    assert [ids(x) for x in streamed] == [ids(x) for x in indexed]
    assert [x.sharding for x in streamed] == [x.sharding for x in indexed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 0), (3, 0), (2, 3)])
def test_epochs_follow_each_other_and_go_on_after_what_was_consumed(
    kind, prefetch, num_workers
):
    """With a new stream, as in a new process, after batches that were only made ahead
    are forgotten."""

    def new() -> rx.Stream:
        return KINDS[kind](range(NUM), prefetch=prefetch, num_workers=num_workers)

    whole = taken(epochs_of(new()), 8)
    assert [x for x, _ in whole] == [
        order(NUM, i // 3)[i % 3 * 8 :][:8] for i in range(8)
    ]
    assert [(p.epoch, p.batch) for _, p in whole] == [divmod(i, 3) for i in range(1, 9)]
    for at in range(1, 7):
        _, place = taken(epochs_of(new()), at)[-1]
        # As a checkpoint has them.
        positions = json.loads(json.dumps(place.positions))
        said = []
        rest = taken(
            epochs_of(new()),
            8 - at,
            place._replace(positions=positions),
            say=said.append,
        )
        assert [x for x, _ in rest] == [x for x, _ in whole[at:]]
        assert [p[:2] for _, p in rest] == [p[:2] for _, p in whole[at:]]
        # From the first batch on, with a proof.
        by_state = kind in WITH_STATE and place.batch > 1
        assert (place.positions[0].state is not None) == by_state
        assert len(said) == (place.batch > 0)
        assert all(
            ("continues from the stored state" in how) == by_state for how in said
        )
    assert no_threads_left()


# States that are wrong, and streams that are others


def resumed(make: Any, at: int = 2, positions: Any = None, **options: Any) -> Any:
    """Return a new stream's batches after `at` batches of another, the other's batches,
    and the messages."""
    whole = taken(epochs_of(rx.Stream(make())), 3)
    said = []
    _, place = taken(epochs_of(rx.Stream(make())), at)[-1]
    place = place._replace(positions=positions or place.positions)
    rest = taken(
        epochs_of(rx.Stream(make())), 3 - at, place, say=said.append, **options
    )
    return [x for x, _ in rest], [x for x, _ in whole[at:]], said


class Bare:
    """Its iterator says nothing of itself: only `for` knows what to do with it."""

    def __iter__(self) -> Any:
        items = iter(range(NUM))
        return type("", (), {"__next__": lambda self: next(items)})()


class Formless(WithState):
    def state_dict(self) -> Any:
        return {"at": object()}


class Failing(WithState):
    def load_state_dict(self, state: Any) -> None:
        if int(state["at"]):
            raise KeyError("of another version")


NOT_USED: dict[str, tuple[Any, str]] = {
    "leads_elsewhere": (
        lambda: stream_sources.Refilling(range(NUM)),
        "does not lead to the same items",
    ),
    "cannot_be_set": (
        lambda: Failing(range(NUM)),
        "cannot be set to the stored state: KeyError",
    ),
    "without_text": (lambda: Formless(range(NUM)), ""),
    "no_state": (Bare, ""),
}


@pytest.mark.parametrize("name", NOT_USED)
def test_a_state_that_is_wrong_is_not_used_and_what_a_for_loop_takes_is_taken(name):
    make, why = NOT_USED[name]
    found, expected, (said,) = resumed(make)
    assert found == expected
    assert "read again from its beginning: 16 items are skipped" in said
    assert why in said


def test_other_items_are_refused():
    with pytest.raises(
        ValueError,
        match=r"first 16 items of epoch 0 differ.*generator=.*allow_changes=True",
    ):
        resumed(lambda: stream_sources.Unlike(range(NUM)))
    found, expected, said = resumed(
        lambda: stream_sources.Unlike(range(NUM)), verify=False
    )
    assert len(found[0]) == 8
    assert found != expected
    assert "continuing anyway (allow_changes=True)" in said[-1]


@pytest.mark.parametrize("changed", [[99, 4], [4, 3]], ids=["replaced", "exchanged"])
def test_one_item_that_is_another_is_refused(changed):
    before = list(range(NUM))
    _, place = taken(epochs_of(rx.Stream(before)), 2)[-1]
    other = [*before[:3], *changed, *before[5:]]
    with pytest.raises(ValueError, match="differ from those read before the save"):
        taken(epochs_of(rx.Stream(other)), 1, place)


def test_a_position_without_a_proof_or_for_a_source_without_a_state_is_read_again():
    # Of earlier versions.
    for state in (None, state_to_text({"at": 7, 3: (b"\x00\xff", None, 0.5)})):
        found, expected, (said,) = resumed(
            lambda: WithState(range(NUM)), positions=[(0, 1, 16, state)]
        )
        assert found == expected
        assert "read again from its beginning: 16" in said
    whole = taken(epochs_of(KINDS["iterable with a state"](range(NUM))), 5)
    said = []
    _, place = whole[1]
    assert place.positions[0].state is not None
    for positions in (place.positions, None):
        rest = taken(
            epochs_of(KINDS["iterable"](range(NUM))),
            3,
            Place(0, 2, None, positions),
            say=said.append,
        )
        assert [x for x, _ in rest] == [x for x, _ in whole[2:]]
    assert all(
        "is read again from its beginning: 16 items are skipped" in how for how in said
    )
    assert len(said) == 2


def test_a_state_takes_it_there_without_reading_all():
    given: list[int] = []

    class Counted(WithState):
        def __iter__(self) -> Any:
            return (given.append(x) or x for x in super().__iter__())

    def stream() -> rx.Stream:
        return rx.Stream(Counted(range(100)), prefetch=0)

    *_, (_, place), (expected, _) = taken(epochs_of(stream()), 11)
    given.clear()
    ((found, _),) = taken(epochs_of(stream()), 1, place)
    assert found == expected
    # A batch as the proof, the next, and one ahead.
    assert given == order(100, 0)[72:96]


def test_a_state_does_not_stay_in_the_users_iterable():
    """A dataset of Hugging Face begins at a state that was set each time that it is
    iterated in that epoch."""

    class Staying(stream_sources.ByEpoch):
        begin, at = 0, 0

        def __iter__(self) -> Any:
            for at in range(self.begin, NUM):
                self.at = at + 1
                yield self.examples[order(NUM, self.epoch)[at]]

        def state_dict(self) -> Any:
            return self.at

        def load_state_dict(self, at: Any) -> None:
            self.begin = at

    source = Staying(range(NUM))
    whole = taken(epochs_of(rx.Stream(source)), 2)
    assert (
        taken(epochs_of(rx.Stream(source)), 1, whole[-1][1])[0][0]
        == order(NUM, 0)[16:24]
    )
    assert taken(epochs_of(rx.Stream(source)), 2) == whole


def test_batches_of_a_stream_go_to_collate_fn_as_they_are():
    stream = rx.Stream(
        lambda epoch: (order(NUM, epoch)[i : i + 8] for i in (0, 8, 16)), batched=True
    )
    found = taken(epochs_of(stream), 5)
    assert [x for x, _ in found] == [
        order(NUM, i // 3)[i % 3 * 8 :][:8] for i in range(5)
    ]
    assert [x for x, _ in taken(epochs_of(stream), 3, found[1][1])] == [
        x for x, _ in found[2:]
    ]
    with pytest.raises(ValueError, match=r"int64\[5\], but its leading dim must be 8"):
        taken(epochs_of(rx.Stream([np.arange(8), np.arange(5)], batched=True)), 2)


def test_an_error_arrives_at_its_batch():
    def failing(epoch: int) -> Any:
        yield from range(19)
        raise KeyError("bad row")

    for prefetch, num_workers in ((0, 0), (4, 0), (1, 3)):
        stream = rx.Stream(failing, prefetch=prefetch, num_workers=num_workers)
        made = rx.batches(stream, np.asarray, batch_size=8, mesh=rx.make_mesh())
        assert [ids(next(made))[0] for _ in range(2)] == [0, 8]
        with pytest.raises(KeyError, match="bad row") as caught:
            next(made)
        assert (
            "This happened when epoch 0 of the stream was read."
            in caught.value.__notes__
        )
        assert no_threads_left()


# States as text

FINITE = st.floats(allow_nan=False, allow_infinity=False)
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@given(STATES)
def test_a_state_comes_back_as_it_is(state):
    assert repr(ast.literal_eval(state_to_text(state) or "")) == repr(state)


@pytest.mark.parametrize(
    "x",
    [object(), np.arange(3), np.float32(0.5), float("nan"), ids],
    ids=["object", "array", "number of NumPy", "nan", "function"],
)
def test_a_state_with_other_objects_has_no_text(x):
    assert state_to_text({"x": [x]}) is None


# What all processes must read alike


@dataclasses.dataclass
class Example:
    tokens: Any


# A value, the same one made again, and another.
CHECKED = [
    pytest.param([1, 2, 3], [1, 2, 3], [1, 3, 2], id="order"),
    pytest.param([1, 2**70], [1, 2**70], [1, 2**71], id="large_integers"),
    pytest.param(["a", "b"], ["a", "".join("b")], ["a", "c"], id="texts"),
    pytest.param(
        {"x": [1, 2.5, None]},
        {"x": [1, 2.5, None]},
        {"x": [1, 2.5, False]},
        id="none_and_false",
    ),
    pytest.param(
        {"x": np.arange(3), "y": "a"},
        {"x": np.arange(3), "y": "a"},
        {"x": np.arange(1, 4), "y": "a"},
        id="dict_of_arrays",
    ),
    pytest.param(
        np.array(["a", None]),
        np.array(["a", None]),
        np.array(["b", None]),
        id="objects",
    ),
    pytest.param(
        np.zeros(3, jnp.bfloat16),
        np.zeros(3, jnp.bfloat16),
        np.ones(3, jnp.bfloat16),
        id="bfloat16",
    ),
    pytest.param(jnp.arange(3), jnp.arange(3), jnp.arange(1, 4), id="of_jax"),
    pytest.param(Example([1]), Example([1]), Example([2]), id="dataclass"),
    pytest.param(Example, Example, object(), id="class"),
    pytest.param(
        np.arange(8).reshape(2, 4).T,
        np.arange(8).reshape(2, 4).T.copy(),
        np.arange(8).reshape(4, 2),
        id="transposed",
    ),
]


@pytest.mark.parametrize(("one", "same", "other"), CHECKED)
def test_what_a_checksum_sees(one, same, other):
    assert checksum(one, 5) == checksum(same, 5)
    assert len({checksum(one), checksum(one, 5), checksum(other, 5)}) == 3


def test_a_checksum_does_not_see_which_object_it_is():
    assert checksum([object()]) == checksum([object()])


# Errors


def int_as_any() -> Any:
    return 3


MOVED: Any = Place(0, 1, None, [(0, 2, 4, None)])
ERRORS = [
    # The type checker of the tests comes first.
    pytest.param(
        lambda: rx.Stream(int_as_any()),
        TypeError,
        r"examples",
        id="Stream-examples-int",
    ),
    pytest.param(
        lambda: rx.Stream([1], sharded=True),
        ValueError,
        r"sharded=True needs a function.*num_shards",
        id="Stream-sharded-without_function",
    ),
    pytest.param(
        lambda: rx.Stream([1], prefetch=-1),
        ValueError,
        r"Stream: prefetch=-1",
        id="Stream-prefetch-negative",
    ),
    pytest.param(
        lambda: taken(epochs_of(rx.Stream(range(7))), 1),
        ValueError,
        r"epoch 0 ends before its first batch is full",
        id="Stream-examples-too_few",
    ),
    pytest.param(
        lambda: rx.Stream(iter([1])),
        TypeError,
        r"list_iterator, but must be .* read more than once",
        id="Stream-examples-iterator",
    ),
    pytest.param(
        lambda: taken(epochs_of(rx.Stream(range(20))), 1, Place(0, 3, None)),
        ValueError,
        r"24 items of epoch 0, but the stream now gives only 20",
        id="place-examples-shorter",
    ),
    pytest.param(
        lambda: taken(epochs_of(rx.Stream(range(20))), 1, MOVED),
        ValueError,
        r"in 2 shards, .*in 1",
        id="place-shards-of_another_number",
    ),
    pytest.param(
        lambda: rx.batches(
            rx.Stream([1]),
            ids,
            batch_size=8,
            mesh=rx.make_mesh(),
            remainder="pad",  # pyright: ignore[reportArgumentType]
        ),
        ValueError,
        r"'pad'.*list\(",
        id="batches-remainder-pad",
    ),
    pytest.param(
        lambda: epochs_of(rx.Data(range(7))),
        ValueError,
        r"there are only 7 examples",
        id="Data-examples-too_few",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_errors(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()
    assert no_threads_left()
