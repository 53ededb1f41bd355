"""Notice a `collate_fn` that makes different batches of the same examples."""

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from redco_eqx._base.protocols import Batch, CollateFn
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._base.warn import warn
from redco_eqx._data.streams import checksum


class CollatedTwice:
    """A `collate_fn` that makes its first batch twice, and warns if the two differ.

    A run that was interrupted makes its next batches anew. If they depend on random
    numbers that no checkpoint has, the resumed run is not the one that was interrupted.
    """

    def __init__(self, collate_fn: CollateFn):
        self._collate_fn = collate_fn
        self._first_call = [True]  # a list, because `pop` is atomic between threads

    def __call__(self, examples: Sequence[Any]) -> Batch:
        batch = self._collate_fn(examples)
        try:
            self._first_call.pop()
        except IndexError:
            return batch
        # Before the second call, which may reuse the memory of the first.
        first = _checksums(batch)
        second: dict[str, int] = {}
        # An error belongs to a batch of the run, which this is not.
        with _same_generators(), contextlib.suppress(Exception):
            second = _checksums(self._collate_fn(examples))
        changing = [
            path or "the batch" for path in first if first[path] != second.get(path)
        ]
        if changing and jax.process_index() == 0:
            warn(
                "collate_fn made two different batches of the same examples: "
                f"{changing[0]} differs. It draws random numbers, or depends on "
                "something else that changes. So a run that is interrupted and "
                "resumed is not exactly the run without an interruption. To make it "
                "exact, draw the numbers in loss_fn from its key, or in collate_fn "
                "from a seed that is in the example, as in "
                'np.random.default_rng(example["seed"]).'
            )
        return batch


def _checksums(batch: Batch) -> dict[str, int]:
    return {path: checksum(x) for path, x in leaves_with_paths(batch)}


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Leave the global generators of random numbers as they were before the block."""
    torch: Any = sys.modules.get("torch")
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
