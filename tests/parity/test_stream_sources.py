"""Streams of Hugging Face, Grain and torch: trained on, left in the middle of an epoch, and gone on with."""

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

import redco_eqx as rx

NUM, BATCH_SIZE = 29, 4  # seven batches, and one left over


def collate(examples: Any) -> np.ndarray:
    return np.asarray([int(x["x"] if isinstance(x, dict) else x) for x in examples])


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets", reason="the parity session installs it")
    return datasets.IterableDataset.from_generator(lambda: ({"x": i} for i in range(NUM)))


def shuffled_by_a_buffer() -> Any:
    return hugging_face().shuffle(seed=3, buffer_size=8)


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
    grain_dataset: True,
    grain_loader: True,
    grain_iterator: True,
    torch_loader: False,
    stateful_loader: True,
}


def taken(stream: rx.Stream, num: int, *place: Any, positions: Any = None) -> Any:
    epochs = rx.loop.Epochs(stream, collate, batch_size=BATCH_SIZE, mesh=rx.make_mesh(data=4))
    made = epochs.after(*place or (0, 0), key=jax.random.key(0), positions=positions)
    found = [(x.tolist(), place) for x, place in itertools.islice(made, num)]
    made.close()
    return found


@pytest.mark.parametrize(("source", "has_state"), SOURCES.items(), ids=[f.__name__ for f in SOURCES])
@pytest.mark.parametrize("at", [3, 7, 9])
def test_it_goes_on_where_it_was_left(source: Any, has_state: bool, at: int) -> None:
    whole = taken(rx.Stream(source()), 12)
    is_once = source is grain_iterator
    assert len(whole) == (7 if is_once else 12)
    assert all(len({x for batch, _ in whole[begin : begin + 7] for x in batch}) == 28 for begin in (0,))
    at = min(at, len(whole))
    _, place = taken(rx.Stream(source()), at)[-1]
    positions = json.loads(json.dumps(place.positions))
    rest = taken(rx.Stream(source()), 12 - at, place.epoch, place.batch, positions=positions)
    assert [x for x, _ in rest] == [x for x, _ in whole[at:]]
    assert (positions[0][3] is not None) == (has_state and place.batch > 0)


def test_batches_of_a_loader() -> None:
    import torch

    loader = torch.utils.data.DataLoader(range(NUM), batch_size=BATCH_SIZE, drop_last=True)
    stream = rx.Stream(loader, batched=True)
    epochs = rx.loop.Epochs(stream, np.asarray, batch_size=BATCH_SIZE, mesh=rx.make_mesh(data=4))
    made = epochs.after(0, 0, key=jax.random.key(0))
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
