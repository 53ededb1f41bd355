"""Numbers and batches: what is refused before anything is compiled, and what is warned of."""

import warnings
from collections.abc import Hashable, Iterable, Mapping

import jax
import numpy as np

from redco_eqx._tree import describe, leaves_with_paths
from redco_eqx._types import Batch


def check_whole(function: str, **counts: object) -> None:
    """Raises `TypeError` for what is no whole number."""
    for name, x in counts.items():
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            many = hasattr(x, "__len__") and not isinstance(x, str)
            value, hint = ("", " Pass its len().") if many else (f"={x!r}", "")
            kind = type(x).__name__
            raise TypeError(f"{function}: {name}{value} must be a whole number, but is a {kind}.{hint}")


def check_positive(function: str, **counts: int | None) -> None:
    """Raises `TypeError` for what is no whole number, `ValueError` for one below 1; `None` was not given."""
    for name, value in counts.items():
        if value is None:
            continue
        check_whole(function, **{name: value})
        if value < 1:
            raise ValueError(f"{function}: {name}={value}, but it must be positive.")


def check_keep_best(names: Iterable[str], row: Mapping[str, float]) -> None:
    """Raises `ValueError` if a metric that decides which checkpoint is best is not in the evaluations."""
    for name in names:
        if name not in row:
            raise ValueError(
                f"fit: Checkpoints(keep_best={{{name!r}: ...}}), but evaluations give "
                f"{', '.join(map(repr, row)) or 'nothing, without an evaluation='}."
            )


def check_batch_sizes(
    batch_size: int, num_microbatches: int, eval_batch_size: int | None, num_shards: int
) -> None:
    """Raises `ValueError` if a batch does not divide over the data shards, or into the microbatches."""
    shards = f"{num_shards}, the number of data shards (mesh axes data x fsdp)"
    check_positive("fit", num_microbatches=num_microbatches)
    check_whole("fit", batch_size=batch_size)
    for name, size, number in (
        ("batch_size", batch_size, num_microbatches),
        ("Evaluation's batch_size", eval_batch_size or num_shards, 1),
    ):
        if size < 1 or size % (number * num_shards) != 0:
            times = f"num_microbatches={number} times " if number > 1 else ""
            raise ValueError(f"fit: {name}={size} must be a positive multiple of {times}{shards}.")


class BatchShapes:
    """Warns once when batches change their shape: each new one compiles the step again."""

    def __init__(self) -> None:
        self._first: dict[str, str] | None = None
        self._last: Hashable = None
        self._warned = False

    def check(self, batch: Batch) -> None:
        """Compares with the first batch."""
        leaves, treedef = jax.tree.flatten(batch)
        shapes = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if self._warned or shapes == self._last:  # names cost too much to make them at every step
            return
        self._last = shapes
        found = {path: describe(x) for path, x in leaves_with_paths(batch)}
        if self._first is None:
            self._first = found
        elif found != self._first:
            self._warned = True
            both = {**self._first, **found}
            name = next(path for path in both if found.get(path) != self._first.get(path))
            warnings.warn(
                f"collate_fn: {name or 'the batch'} is {found.get(name, 'missing')}, but was "
                f"{self._first.get(name, 'missing')} in the first batch. Each new shape compiles the step "
                "again: pad to a few fixed sizes.",
                stacklevel=3,
            )
