"""Notice a `collate_fn` that makes different batches of the same examples."""

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from redco_eqx._base.protocols import Batch, CollateFn
from redco_eqx._base.warn import warn
from redco_eqx._data.checksums import checksums_of


class CollatedTwice:
    """A `collate_fn` that makes its first batch twice, and warns if the two differ.

    A run that was interrupted makes its next batches anew. If they depend on random
    numbers that no checkpoint has, the resumed run is not the one that was interrupted.
    """

    def __init__(self, collate_fn: CollateFn):
        self._collate_fn = collate_fn
        # A list, because `pop` is atomic between threads.
        self._first_call = [True]

    def __call__(self, examples: Sequence[Any]) -> Batch:
        batch = self._collate_fn(examples)
        try:
            self._first_call.pop()
        except IndexError:
            return batch
        # Before the second call, which may reuse the memory of the first.
        first = checksums_of(batch)
        second: dict[str, int] = {}
        # An error belongs to a batch of the run, which this is not.
        with _same_generators(), contextlib.suppress(Exception):
            second = checksums_of(self._collate_fn(examples))
        changing = [name for name in first if first[name] != second.get(name)]
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


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Leave the global generators of random numbers as they were before the block."""
    # A program that has not imported torch cannot draw from its generator.
    torch: Any = sys.modules.get("torch")
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = None
    if torch is not None:
        of_torch = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
