"""Streams of Hugging Face, Grain and torch: trained on, left in the middle of an epoch,
and gone on with."""

import functools
import itertools
import json
from typing import Any

import datasets
import grain.python as grain
import jax
import numpy as np
import pytest
import torch
from stream_sources import taken
from torchdata.stateful_dataloader import StatefulDataLoader

import redco_eqx as rx
from redco_eqx._data import streams
from redco_eqx._data.batches import Epochs
from redco_eqx._data.checksums import checksum

NUM, BATCH_SIZE = 29, 4  # seven batches, and one left over


def collate(examples: Any) -> np.ndarray:
    return np.asarray([int(x["x"] if isinstance(x, dict) else x) for x in examples])


def part(begin: int, *, num: int = 20, buffer_size: int | None = 5) -> Any:
    found = datasets.Dataset.from_dict(
        {"x": list(range(begin, begin + num))}
    ).to_iterable_dataset()
    return (
        found if buffer_size is None else found.shuffle(seed=1, buffer_size=buffer_size)
    )


def interleaved_shuffled() -> Any:
    return datasets.interleave_datasets(
        [part(0), part(100)], probabilities=[0.3, 0.7], seed=3
    )


def grain_dataset(epoch: int) -> Any:
    return grain.MapDataset.range(NUM).shuffle(seed=epoch).to_iter_dataset()


def grain_loader(epoch: int) -> Any:
    sampler = grain.IndexSampler(
        NUM, grain.NoSharding(), shuffle=True, seed=epoch, num_epochs=1
    )
    return grain.DataLoader(
        data_source=grain.RangeDataSource(0, NUM, 1), sampler=sampler, worker_count=0
    )


def torch_loader(epoch: int, kind: Any = torch.utils.data.DataLoader) -> Any:
    generator = torch.Generator().manual_seed(epoch)
    return kind(range(NUM), batch_size=None, shuffle=True, generator=generator)


def mapped_filtered() -> Any:
    return (
        part(0, num=40, buffer_size=None)
        .map(lambda x: {"x": x["x"] + 1000})
        .filter(lambda x: x["x"] % 3)
    )


def interleaved() -> Any:
    return datasets.interleave_datasets(
        [part(0, buffer_size=None), part(100, buffer_size=None)]
    )


def shuffled_in_shuffled() -> Any:
    return datasets.concatenate_datasets([interleaved_shuffled(), part(200)]).map(
        lambda x: x
    )


# Each with whether its own state takes it to a position.
SOURCES: dict[str, tuple[Any, bool]] = {
    "mapped and filtered": (mapped_filtered, True),
    "interleaved": (interleaved, True),
    "interleaved and shuffled": (interleaved_shuffled, False),
    "shuffled within shuffled": (shuffled_in_shuffled, False),
    "shuffled loader": (
        lambda: lambda _: StatefulDataLoader(interleaved_shuffled(), batch_size=None),
        False,
    ),
    "grain dataset": (lambda: grain_dataset, True),
    "grain loader": (lambda: grain_loader, True),
    "loader": (lambda: torch_loader, False),
    "stateful loader": (
        lambda: functools.partial(torch_loader, kind=StatefulDataLoader),
        False,
    ),  # it has a tensor
}


def epochs_of(stream: rx.Stream, collate: Any = collate) -> Epochs:
    return Epochs(stream, collate, batch_size=BATCH_SIZE, mesh=rx.make_mesh(data=4))


@pytest.fixture(autouse=True)
def _proof_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the states of short epochs are used."""
    monkeypatch.setattr(streams, "PROOF", BATCH_SIZE)


@pytest.mark.parametrize("name", SOURCES)
def test_it_goes_on_where_it_was_left(name: str) -> None:
    source, has_state = SOURCES[name]
    whole = taken(epochs_of(rx.Stream(source())), 12)
    assert len(whole) == 12
    length = next(i for i, (_, place) in enumerate(whole, 1) if place.batch == 0)
    assert len({x for batch, _ in whole[:length] for x in batch}) == 4 * length > 20
    for at in (3, 7, 9):
        _, place = taken(epochs_of(rx.Stream(source())), at)[-1]
        place = place._replace(positions=json.loads(json.dumps(place.positions)))
        said = []
        rest = taken(epochs_of(rx.Stream(source())), 12 - at, place, say=said.append)
        assert [x for x, _ in rest] == [x for x, _ in whole[at:]]
        # From the first batch on, with a proof.
        by_state = has_state and place.batch > 1
        assert ["continues from the stored state" in how for how in said] == [
            by_state
        ] * (place.batch > 0)


def test_a_loader_that_shuffles_without_a_seed_is_refused() -> None:
    def make() -> Epochs:
        return epochs_of(
            rx.Stream(
                torch.utils.data.DataLoader(range(NUM), batch_size=None, shuffle=True)
            )
        )

    _, place = taken(make(), 3)[-1]
    message = r"12 items of epoch 0 differ.*DataLoader\(shuffle=True\) needs a new gen"
    with pytest.raises(ValueError, match=message):
        taken(make(), 1, place)
    ((batch, _),) = taken(make(), 1, place, verify=False)
    assert len(batch) == 4


def test_content_of_tensors_is_compared() -> None:
    one, other = (
        {"x": torch.arange(i, i + 3), "y": torch.zeros(2, dtype=torch.bfloat16)}
        for i in (0, 1)
    )
    assert checksum(one) == streams.checksum(
        {name: x.clone() for name, x in one.items()}
    )
    assert checksum(one) != streams.checksum(other)


def test_batches_of_a_loader() -> None:
    loader = torch.utils.data.DataLoader(
        range(NUM), batch_size=BATCH_SIZE, drop_last=True
    )
    found = taken(epochs_of(rx.Stream(loader, batched=True), np.asarray), 8)
    assert [x for x, _ in found] == [
        [i % 7 * 4 + j for j in range(4)] for i in range(8)
    ]


def test_a_dataset_of_grain_that_repeats_itself() -> None:
    repeated = grain.MapDataset.range(NUM).repeat()
    made = rx.batches(
        repeated,
        collate,
        batch_size=4,
        mesh=rx.make_mesh(data=4),
        key=jax.random.key(0),
    )
    assert all(
        0 <= x < NUM for batch in itertools.islice(made, 3) for x in batch.tolist()
    )
    made.close()


# Workers of torch's DataLoader over an IterableDataset


class EachWhole(torch.utils.data.IterableDataset):
    """Every worker yields all items, which is what torch does by itself."""

    def __iter__(self) -> Any:
        return iter(range(NUM))


class Divided(EachWhole):
    """Every worker yields its part, as torch's page on the class says."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return iter(range(NUM))
        return iter(range(worker.id, NUM, worker.num_workers))


class ShuffledEach(EachWhole):
    """Every worker yields all items in an order of its own, so no repetition is
    seen."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        seed = 0 if worker is None else worker.id
        return iter(np.random.default_rng(seed).permutation(NUM).tolist())


def divide(number: int) -> None:
    """A `worker_init_fn`, torch's other way."""
    worker = torch.utils.data.get_worker_info()
    worker.dataset.__class__ = Divided


def from_workers(
    dataset: Any,
    num_workers: int = 2,
    *,
    disjoint: bool = False,
    batched: bool = False,
    **options: Any,
) -> list[int]:
    """The items of the first six batches of a stream over a `DataLoader`."""
    size = BATCH_SIZE if batched else None
    stream = rx.Stream(
        lambda epoch: torch.utils.data.DataLoader(
            dataset,
            batch_size=size,
            num_workers=num_workers,
            drop_last=batched,
            **options,
        ),
        batched=batched,
        disjoint_workers=disjoint,
    )
    mesh = rx.make_mesh(data=1, devices=jax.devices()[:1])
    made = rx.batches(stream, collate, batch_size=BATCH_SIZE, mesh=mesh)
    found = [x.tolist() for x in itertools.islice(made, 6)]
    made.close()
    return list(itertools.chain.from_iterable(found))


@pytest.mark.parametrize("batched", [False, True], ids=["items", "batches"])
def test_workers_that_each_yield_every_item_are_refused(batched: bool) -> None:
    with (
        pytest.warns(UserWarning, match="2 workers over an IterableDataset"),
        pytest.raises(
            ValueError,
            match=r"each item is read 2 times.*get_worker_info.*disjoint_workers=True",
        ),
    ):
        from_workers(EachWhole(), batched=batched)


@pytest.mark.parametrize(
    "dataset", [Divided(), ShuffledEach()], ids=["divided", "shuffled"]
)
def test_workers_whose_items_do_not_repeat_at_once_are_warned_of(dataset: Any) -> None:
    with pytest.warns(
        UserWarning, match="yields every item, unless the dataset divides its items"
    ):
        from_workers(dataset)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("dataset", "num_workers", "options"),
    [
        (Divided(), 2, {"disjoint": True}),
        (EachWhole(), 1, {}),
        (EachWhole(), 0, {}),
        (EachWhole(), 2, {"worker_init_fn": divide}),
        (range(NUM), 2, {}),
        (part(0, num=NUM, buffer_size=None), 2, {}),
    ],
    ids=[
        "said to be disjoint",
        "one worker",
        "no worker",
        "worker_init_fn",
        "by index",
        "Hugging Face",
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.filterwarnings("ignore:Too many dataloader workers")
def test_each_item_is_read_once_without_a_word(
    dataset: Any, num_workers: int, options: Any
) -> None:
    found = from_workers(dataset, num_workers, **options)
    assert len(set(found)) == len(found) == 6 * BATCH_SIZE
