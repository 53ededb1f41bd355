"""Epoch after epoch: a run's batches, each with the place in the run that it leads to."""

import contextlib
from collections.abc import Callable, Generator
from typing import NamedTuple

from jax.sharding import Mesh

from redco_eqx._data.batches import batch_sizes, batches, check_prefetch
from redco_eqx._types import Batch, CollateFn, Examples, Key


class Place(NamedTuple):
    """`epoch` epochs are done, and `batch` of the `num_batches` of another."""

    epoch: int
    batch: int
    num_batches: int

    @property
    def epochs_done(self) -> float:
        """With the fraction of the one in hand."""
        return self.epoch + self.batch / self.num_batches


class Epochs:
    """The training batches of a run, without end: each epoch in an order of its own, its ragged tail left out.

    ```python
    epochs = rx.loop.Epochs(examples, collate_fn, batch_size=32, mesh=mesh)
    for batch, place in epochs.after(0, 0, key=key):
        state, metrics = step(state, batch)
        if place.epoch == 3:
            break
    ```

    `num_examples` and `num_batches` are those of the first epoch.
    """

    def __init__(
        self,
        examples: Examples | Callable[[int], Examples],
        collate_fn: CollateFn,
        *,
        batch_size: int,
        mesh: Mesh,
        prefetch: int = 2,
    ):
        """**Arguments:** as for `batches`; `examples` may also be a function from the number of the epoch.

        Raises `ValueError` or `TypeError` as `batches` does, here and for the examples of a later epoch.
        """
        check_prefetch(prefetch)
        self._examples, self._collate_fn = examples, collate_fn
        self._batch_size, self._mesh, self._prefetch = batch_size, mesh, prefetch
        self._last: tuple[int, Examples] | None = None
        self.num_batches = self.place(0, 0).num_batches
        self.num_examples = len(self._of(0))

    def place(self, epoch: int, batch: int) -> Place:
        """The place after so many whole epochs and batches of another, at most all of them."""
        num_batches = len(batch_sizes(self._of(epoch), self._batch_size, "drop", self._mesh))
        return Place(epoch, min(batch, num_batches), num_batches)

    def after(self, epoch: int, batch: int, *, key: Key) -> Generator[tuple[Batch, Place]]:
        """The batches from a place on, each with the place after it. Closing the generator ends its thread.

        `key` gives the order of each epoch; that of `fit` is `order_key`.
        """
        while True:
            _, batch, num_batches = self.place(epoch, batch)
            stream = batches(
                self._of(epoch),
                self._collate_fn,
                batch_size=self._batch_size,
                mesh=self._mesh,
                key=key,
                epoch=epoch,
                start=batch,
                prefetch=self._prefetch,
            )
            with contextlib.closing(stream):
                for index, data in enumerate(stream, start=batch + 1):
                    is_end = index == num_batches
                    yield data, Place(epoch + is_end, 0 if is_end else index, num_batches)
            epoch, batch = epoch + 1, 0

    def _of(self, epoch: int) -> Examples:
        if not callable(self._examples):
            return self._examples
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._examples(epoch)
        return self._last[1]
