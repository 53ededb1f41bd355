"""Streams of Hugging Face, Grain and torch: trained on, left in the middle of an epoch, and gone on with."""

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

import redco_eqx as rx
from redco_eqx._data import streams
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Place

NUM, BATCH_SIZE = 29, 4  # seven batches, and one left over


def collate(examples: Any) -> np.ndarray:
    return np.asarray([int(x["x"] if isinstance(x, dict) else x) for x in examples])


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets", reason="the parity session installs it")
    return datasets.IterableDataset.from_generator(lambda: ({"x": i} for i in range(NUM)))


def shuffled_by_a_buffer() -> Any:
    return hugging_face().shuffle(seed=3, buffer_size=8)


def part(begin: int, *, num: int = 20, buffer_size: int | None = 5) -> Any:
    datasets = pytest.importorskip("datasets", reason="the parity session installs it")
    found = datasets.Dataset.from_dict({"x": list(range(begin, begin + num))}).to_iterable_dataset()
    return found if buffer_size is None else found.shuffle(seed=1, buffer_size=buffer_size)


def interleaved() -> Any:
    import datasets

    return datasets.interleave_datasets([part(0, buffer_size=None), part(100, buffer_size=None)])


def interleaved_shuffled() -> Any:
    import datasets

    return datasets.interleave_datasets([part(0), part(100)], probabilities=[0.3, 0.7], seed=3)


def concatenated_shuffled() -> Any:
    import datasets

    return datasets.concatenate_datasets([part(0), part(100)])


def shuffled_in_shuffled() -> Any:
    import datasets

    return datasets.concatenate_datasets([interleaved_shuffled(), part(200)]).map(lambda x: x)


def shuffled_mapped_filtered() -> Any:
    found = part(0, num=40).map(lambda x: {"x": x["x"] + 1000}).filter(lambda x: x["x"] % 3).batch(1)
    return found.map(lambda x: {"x": x["x"][0]})


def mapped_filtered() -> Any:
    found = part(0, num=40, buffer_size=None).map(lambda x: {"x": x["x"] + 1000})
    return found.filter(lambda x: x["x"] % 3)


def loader_of_shuffled() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="the parity session installs it")
    return lambda epoch: torchdata.StatefulDataLoader(interleaved_shuffled(), batch_size=None)


def grain_dataset() -> Any:
    grain = pytest.importorskip("grain.python", reason="the parity session installs it")
    return lambda epoch: grain.MapDataset.range(NUM).shuffle(seed=epoch).to_iter_dataset()


def grain_loader() -> Any:
    grain = pytest.importorskip("grain.python", reason="the parity session installs it")

    def of_epoch(epoch: int) -> Any:
        sampler = grain.IndexSampler(NUM, grain.NoSharding(), shuffle=True, seed=epoch, num_epochs=1)
        return grain.DataLoader(data_source=grain.RangeDataSource(0, NUM, 1), sampler=sampler, worker_count=0)

    return of_epoch


def grain_iterator() -> Any:
    return iter(grain_dataset()(0))


def torch_loader() -> Any:
    import torch

    def of_epoch(epoch: int) -> Any:
        generator = torch.Generator().manual_seed(epoch)
        return torch.utils.data.DataLoader(range(NUM), batch_size=None, shuffle=True, generator=generator)

    return of_epoch


def stateful_loader() -> Any:
    import torch

    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="the parity session installs it")

    def of_epoch(epoch: int) -> Any:
        generator = torch.Generator().manual_seed(epoch)
        return torchdata.StatefulDataLoader(range(NUM), batch_size=None, shuffle=True, generator=generator)

    return of_epoch


# Each with whether its own state takes it to a position.
SOURCES = {
    hugging_face: True,
    shuffled_by_a_buffer: False,
    interleaved: True,
    interleaved_shuffled: False,
    concatenated_shuffled: False,
    shuffled_in_shuffled: False,
    shuffled_mapped_filtered: False,
    mapped_filtered: True,
    loader_of_shuffled: False,
    grain_dataset: True,
    grain_loader: True,
    grain_iterator: False,
    torch_loader: False,
    stateful_loader: True,
}


def taken(
    stream: rx.Stream, num: int, epoch: int = 0, batch: int = 0, positions: Any = None, **options: Any
) -> Any:
    epochs = Epochs(stream, collate, batch_size=BATCH_SIZE, mesh=rx.make_mesh(data=4))
    made = epochs.after(Place(epoch, batch, None, positions), key=jax.random.key(0), **options)
    found = [(x.tolist(), place) for x, place in itertools.islice(made, num)]
    made.close()
    return found


@pytest.fixture(autouse=True)
def _proof_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the states of short epochs are used."""
    monkeypatch.setattr(streams, "PROOF", BATCH_SIZE)


@pytest.mark.parametrize(("source", "has_state"), SOURCES.items(), ids=[f.__name__ for f in SOURCES])
def test_it_goes_on_where_it_was_left(source: Any, has_state: bool) -> None:
    whole = taken(rx.Stream(source()), 12)
    is_once = source is grain_iterator
    assert len(whole) == (7 if is_once else 12)
    length = next(i for i, (_, place) in enumerate(whole, 1) if place.batch == 0)
    assert len({x for batch, _ in whole[:length] for x in batch}) == 4 * length > 20
    for at in {3, 7, min(9, len(whole))}:
        _, place = taken(rx.Stream(source()), at)[-1]
        positions, said = json.loads(json.dumps(place.positions)), []
        options: Any = {"positions": positions, "say": said.append}
        rest = taken(rx.Stream(source()), 12 - at, place.epoch, place.batch, **options)
        assert [x for x, _ in rest] == [x for x, _ in whole[at:]]
        by_state = has_state and place.batch > 1  # from the first batch on, with a proof
        assert ["continues from the stored state" in how for how in said] == [by_state] * (place.batch > 0)


def test_a_loader_that_shuffles_without_a_seed_is_refused() -> None:
    import torch

    def make() -> rx.Stream:
        return rx.Stream(torch.utils.data.DataLoader(range(NUM), batch_size=None, shuffle=True))

    _, place = taken(make(), 3)[-1]
    with pytest.raises(
        ValueError, match=r"12 items of epoch 0 differ.*DataLoader\(shuffle=True\) needs a new gen"
    ):
        taken(make(), 1, 0, 3, positions=place.positions)
    ((batch, _),) = taken(make(), 1, 0, 3, positions=place.positions, verify=False)
    assert len(batch) == 4


def test_content_of_tensors_is_compared() -> None:
    import torch

    one, other = ({"x": torch.arange(i, i + 3), "y": torch.zeros(2, dtype=torch.bfloat16)} for i in (0, 1))
    assert streams.checksum(one) == streams.checksum({name: x.clone() for name, x in one.items()})
    assert streams.checksum(one) != streams.checksum(other)


def test_batches_of_a_loader() -> None:
    import torch

    loader = torch.utils.data.DataLoader(range(NUM), batch_size=BATCH_SIZE, drop_last=True)
    stream = rx.Stream(loader, batched=True)
    epochs = Epochs(stream, np.asarray, batch_size=BATCH_SIZE, mesh=rx.make_mesh(data=4))
    made = epochs.after(Place(0, 0, None), key=jax.random.key(0))
    assert [x.tolist() for x, _ in itertools.islice(made, 8)] == [
        [i % 7 * 4 + j for j in range(4)] for i in range(8)
    ]
    made.close()


def test_a_dataset_of_grain_that_repeats_itself() -> None:
    grain = pytest.importorskip("grain.python", reason="the parity session installs it")
    repeated = grain.MapDataset.range(NUM).repeat()
    made = rx.batches(repeated, collate, batch_size=4, mesh=rx.make_mesh(data=4), key=jax.random.key(0))
    assert all(0 <= x < NUM for batch in itertools.islice(made, 3) for x in batch.tolist())
    made.close()
