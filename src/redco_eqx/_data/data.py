"""`Data` and `Stream`: examples, and the way and the order in which they are read."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from redco_eqx._base.protocols import Examples
from redco_eqx._base.tree import describe, first_few, is_array


def check_workers(name: str, prefetch: int, num_workers: int) -> None:
    """Raises `ValueError` if these options of `Data` or `Stream` do not go together."""
    if prefetch < 0 or num_workers < 0 or prefetch < min(num_workers, 1):
        raise ValueError(
            f"{name}: prefetch={prefetch} and num_workers={num_workers}, but both must be 0 or more. Workers "
            "work ahead, so they need a prefetch of 1 or more."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Examples and the options for reading them. It is accepted wherever examples are; examples without it are
    read with the defaults.

    ```python
    state, _ = rx.fit(state, rx.Data(examples, num_workers=4), **pipeline, num_epochs=1)
    ```

    - `examples`: anything with `len(examples)` and `examples[int]`; for training also a function from the
        number of an epoch to such an object.
    - `shuffle`: whether training reads the examples of each epoch in a different order. It costs no memory, and
        microseconds for an example, for any number of examples.
    - `prefetch`: the number of batches that are made and placed ahead, in the background; 0 for none, and no
        thread.
    - `num_workers`: the number of threads that collate, each a different batch; at least as many batches are
        made ahead. Order and errors are the same as with one thread. With several, `examples` and `collate_fn`
        must allow calls at the same time. Threads speed up work that waits (for a disk, a network) or releases
        Python's lock (most of NumPy). For work in Python itself use the processes of Grain or of a
        `DataLoader`, read as a [`Stream`][].

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Examples | Callable[[int], Examples]
    _: dataclasses.KW_ONLY
    shuffle: bool = True
    prefetch: int = 2
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_workers("Data", self.prefetch, self.num_workers)

    @property
    def sequence(self) -> Examples:
        """The examples, if they are not a function of the epoch."""
        return self.examples


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Examples that come one after the other, read in that order.

    ```python
    def rows(epoch):
        yield from np.random.default_rng(epoch).permutation(examples)

    state, _ = rx.fit(state, rx.Stream(rows), **pipeline, num_steps=20, checkpoints="run")
    ```

    One thread reads the stream. One batch more than `prefetch` is made ahead (three more on several processes),
    so that the end is known in time. At the end of an epoch training drops the examples that do not fill a
    batch. The next epoch then reads the result of the function, or iterates again, after a call of
    `set_epoch(epoch)` if there is such a method. An iterator can be read only once, so its end is the end of
    the run.

    A run that continues reads on after the last batch that it was trained on. It sets the position by a state
    of the source, from 1,000 to 2,000 examples before (31 to 62 items if `batched`), and reads these examples
    again. For this the iterable, or the iterator that it or the function returns, must have the methods
    `get_state` and `set_state`, or `state_dict` and `load_state_dict`. If the examples are not the same (by
    checksum), or if there is no state so far back, all of the epoch up to there is read again. If these
    examples are not the same either, `fit` refuses to continue, unless `Checkpoints(allow_changes=True)`. So a
    shuffle needs a seed. Numbers, arrays, text, dataclasses and collections of these are compared by their
    content; other objects only by type and size.

    - `examples`: an iterable of examples (`datasets.IterableDataset`, a Grain dataset or loader, a
        `DataLoader(batch_size=None)`), or a function from the number of the epoch to one.
    - `sharded`: the part that each of several processes reads. `False`: the whole stream, of which the process
        keeps the rows that its devices need; the stream must be the same on all. `True`: one shard, the result
        of `examples(epoch, shard, num_shards)`. Processes whose devices need the same rows (of one
        tensor-parallel group) read the same shard. When one shard ends, the epoch ends for all processes, at
        the same step.
    - `batched`: whether each item is a batch already, of all rows that this process reads. `collate_fn` gets
        the item itself, and makes NumPy arrays of it. For training only.
    - `prefetch`, `num_workers`: see [`Data`][].

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Iterable[Any] | Callable[..., Iterable[Any]]
    _: dataclasses.KW_ONLY
    sharded: bool | None = None
    batched: bool = False
    prefetch: int = 2
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_workers("Stream", self.prefetch, self.num_workers)
        if not self.is_function and not hasattr(self.examples, "__iter__"):
            raise TypeError(
                f"Stream: examples is a {type(self.examples).__name__}, but must be an iterable, or a function "
                "from the number of an epoch to one."
            )
        if self.sharded and not self.is_function:
            raise ValueError(
                "Stream: sharded=True needs a function, examples(epoch, shard, num_shards), which gives the "
                f"part of a shard; examples is a {type(self.examples).__name__}."
            )

    @property
    def is_function(self) -> bool:
        """True if the examples are a function, which returns a new iterable for each epoch."""
        return callable(self.examples) and not hasattr(self.examples, "__iter__")

    @property
    def is_once(self) -> bool:
        """True if the examples are an iterator, which can be read only once."""
        return not self.is_function and hasattr(self.examples, "__next__")


class Position(NamedTuple):
    """A position of one shard of a stream in an epoch. Plain numbers and text, for a checkpoint.

    - `shard`, `num_shards`: the part of the stream; 0 of 1 is the whole.
    - `num_items`: the number of items (examples, or batches) that have been read.
    - `state`: the state of the source at this position or a little before; `None` if the source has none.
    - `checksum`: the checksum of the items that have been read; `None` if it is not known.
    - `state_items`, `state_checksum`: the number of items that had been read when the state was taken, and
        their checksum. The items after these must lead to `checksum`: this proves the state.
    """

    shard: int
    num_shards: int
    num_items: int = 0
    state: str | None = None
    checksum: int | None = None
    state_items: int = 0
    state_checksum: int = 0


class Place(NamedTuple):
    """A place in the epochs of a run: `epoch` epochs are done, and `batch` of `num_batches` of the next one.

    - `num_batches`: `None` for a stream.
    - `positions`: the position in the shard of a stream that this process reads; in a record, those in all
        shards.
    - `is_end`: whether no batch follows, because a stream that can be read only once has ended.
    """

    epoch: int
    batch: int
    num_batches: int | None
    positions: Sequence[Any] | None = None
    is_end: bool = False

    @property
    def epochs_done(self) -> float:
        """The number of epochs done, with the fraction of the present one if its length is known."""
        return self.epoch + (self.batch / self.num_batches if self.num_batches else 0.0)


def as_data(examples: Examples | Callable[[int], Examples] | Data | Stream) -> Data | Stream:
    """Wraps examples that are neither `Data` nor `Stream` in a `Data` with the defaults."""
    return examples if isinstance(examples, Data | Stream) else Data(examples)


def check_examples(where: str, examples: Any) -> None:
    """Raises `TypeError`, naming the argument as `where`, unless it is a sequence of examples, a function of
    the epoch, a [`Data`][] or a [`Stream`][]. Also raises for columns and the like, whose items are not the
    examples that the user means."""
    if isinstance(examples, Stream):
        return
    examples = examples.examples if isinstance(examples, Data) else examples
    kind = type(examples).__name__
    is_tuple = type(examples) is tuple and _are_columns(examples)
    if is_tuple or isinstance(examples, Mapping) or hasattr(examples, "iloc"):
        names = getattr(examples, "columns", examples)  # of a data frame
        columns = [describe(x) for x in examples] if is_tuple else [repr(name) for name in names]
        raise TypeError(
            f"{where} is a {kind} of {first_few(columns)}: columns, or several sets of examples. Pass a "
            "sequence of examples, in which examples[i] is a row. To turn columns into rows, use "
            "list(zip(*examples)) for a tuple, [dict(zip(examples, row)) for row in zip(*examples.values())] "
            'for a dict, examples.to_dict("records") for a data frame. If you have several sets, pass one of '
            "them. If each array of a tuple is an example, pass list(examples)."
        )
    sized = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    sized = sized and not isinstance(examples, str) and getattr(examples, "shape", None) != ()
    if not sized and (isinstance(examples, eqx.Module) or not callable(examples)):
        raise TypeError(
            f"{where} is a {kind}, but must be a sequence of examples, with len(examples) and examples[int]. "
            "Use list(...) for an iterable, or rx.Stream(...) if it is too long for a list. In a call the "
            "state comes first, then the examples."
        )


def _are_columns(examples: tuple[Any, ...]) -> bool:
    """Returns true if these arrays look like columns (inputs, labels) of the examples: if there are few arrays,
    with more rows than there are arrays."""
    if not 2 <= len(examples) <= 4 or not all(is_array(x) and x.ndim > 0 for x in examples):
        return False
    lengths = {x.shape[0] for x in examples}
    return len(lengths) == 1 and lengths.pop() > len(examples)


def num_examples_of(examples: Examples, where: str = "batches: examples") -> int:
    """Counts the examples. Raises `TypeError` if they are no sequence, and `ValueError` if there are none."""
    check_examples(where, examples)
    if not hasattr(examples, "__len__"):
        raise TypeError(f"{where} is a function, which is only for training. Pass a sequence of examples.")
    if len(examples) == 0:
        raise ValueError(f"{where} is empty.")
    return len(examples)
