"""Epoch after epoch: a run's batches, each with the place in the run that it leads to."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from redco_eqx._types import Batch


class Position(NamedTuple):
    """`epoch` epochs are done, and `batch` of the `num_batches` of another."""

    epoch: int
    batch: int
    num_batches: int

    @property
    def epochs_done(self) -> float:
        """With the fraction of the one in hand."""
        return self.epoch + self.batch / self.num_batches


def epochs(
    examples_of: Callable[[int], Any],
    first: Any,
    batch_size: int,
    stream_of: Callable[..., Generator[Batch]],
    *,
    epoch: int,
    batch: int,
    resumed: bool,
) -> Generator[tuple[Batch | None, Position]]:
    """The batches of a run from a place on, without end, each with the place after it.

    **Arguments:**

    - `examples_of`: from the number of an epoch to its examples; `first` are those of epoch 0.
    - `stream_of`: `batches` of some examples, with `epoch=` and `start=`.
    - `epoch`, `batch`: where to begin.
    - `resumed`: whether to yield that place itself first, with no batch.
    """
    if resumed and batch == 0:
        yield None, Position(epoch, 0, 1)
    while True:
        examples = first if epoch == 0 else examples_of(epoch)
        num_batches = len(examples) // batch_size
        batch = min(batch, num_batches)
        if resumed and batch > 0:
            yield None, Position(epoch, batch, num_batches)
        with contextlib.closing(stream_of(examples, epoch=epoch, start=batch)) as stream:
            for index, data in enumerate(stream, start=batch + 1):
                is_end = index == num_batches
                yield data, Position(epoch + is_end, 0 if is_end else index, num_batches)
        epoch, batch, resumed = epoch + 1, 0, False
