"""`Data` and `Stream`: examples, with how and in which order to read them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from redco_eqx._base.protocols import Examples, check_call
from redco_eqx._base.tree import describe, first_few, is_array


def check_workers(name: str, prefetch: int, num_workers: int) -> None:
    """Raise `ValueError` if these options of `Data` or `Stream` do not go together."""
    if prefetch < 0 or num_workers < 0 or prefetch < min(num_workers, 1):
        raise ValueError(
            f"{name}: prefetch={prefetch} and num_workers={num_workers}, but both must "
            "be 0 or more. Workers work ahead, so they need a prefetch of 1 or more."
        )


# Compared by identity, because arrays of examples have no single truth value.
@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Examples, and options for reading them. You can pass it wherever you can pass
    examples. Plain examples are read with the default options.

    ```python
    state, _ = rx.fit(state, rx.Data(examples, num_workers=4), **pipeline, num_epochs=1)
    ```

    - `examples`: anything with `len(examples)` and `examples[int]`. For training, it
        can also be a function from the epoch number to such an object.
    - `shuffle`: true if training reads the examples in a different order in each epoch.
        Shuffling takes no memory and microseconds per example, for any number of
        examples.
    - `prefetch`: the number of batches to make and place ahead, in a background thread.
        After a batch that took less than 0.2 ms, the next one is made without the
        thread, because passing it on would take longer. With 0, there is no thread.
    - `num_workers`: the number of threads that collate, each a different batch. At
        least this number of batches is made ahead. Order and errors are the same as
        with one thread. With several threads, `examples` and `collate_fn` must allow
        calls at the same time. Threads speed up work that waits (for a disk or a
        network) or releases Python's lock (most of NumPy). For work in Python itself,
        use the processes of Grain or of a `DataLoader`, and read it as a [`Stream`][].

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
    """Examples that come one after the other, read in that order. For training (in
    `fit`, and in `batches` with `remainder="drop"`), and for an [`Evaluation`][] with
    `num_batches`.

    ```python
    def rows(epoch):
        yield from np.random.default_rng(epoch).permutation(examples)

    stream = rx.Stream(rows)
    state, _ = rx.fit(state, stream, **pipeline, num_steps=20, checkpoints="run")
    ```

    One thread reads the stream. It makes one batch more than `prefetch` ahead (three
    more with several processes), so that it knows in time where the stream ends. At the
    end of an epoch, training drops the examples that do not fill a batch. The next
    epoch then calls the function again, or iterates again. If the iterable has a method
    `set_epoch(epoch)`, it is called first.

    A resumed run continues after the last batch that it was trained on. To get there,
    it restores a state of the source from 1,000 to 2,000 examples earlier (31 to 62
    items if `batched`) and rereads these examples. For this, the iterable, or the
    iterator that it or the function returns, must have the methods `get_state` and
    `set_state`, or `state_dict` and `load_state_dict`, with a state of numbers, text,
    bytes and collections of these. If the examples are not the same (by checksum), or
    if there is no state that far back, the run rereads the epoch from its beginning. If
    these examples are not the same either, `fit` refuses to continue, unless you pass
    `Checkpoints(allow_changes=True)`. A shuffle therefore needs a seed. Numbers,
    arrays, text, dataclasses and collections of these are compared by content, other
    objects only by type and size.

    - `examples`: an iterable that can be read more than once
        (`datasets.IterableDataset`, a Grain dataset or loader, a
        `DataLoader(batch_size=None)`), or a function from the epoch number to an
        iterable.
    - `sharded`: the part that each process reads, if there are several. With `False`,
        each reads the whole stream, which must be the same on all, and keeps the rows
        that its devices need. With `True`, each reads one shard, the result of
        `examples(epoch, shard, num_shards)`. Processes whose devices need the same rows
        (in one tensor-parallel group) read the same shard. When one shard ends, the
        epoch ends for all processes, at the same step.
    - `batched`: true if each item is already a batch of all rows that this process
        reads. `collate_fn` gets the item itself and turns it into NumPy arrays.
    - `prefetch`, `num_workers`: see [`Data`][].
    - `disjoint_workers`: true if the stream is a `DataLoader` over an
        `IterableDataset`, and each of its workers reads another part of it (by
        `torch.utils.data.get_worker_info()`). By default, every worker of torch yields
        every item, so a stream warns about several workers, and raises an error when it
        sees that their items repeat. Datasets of Hugging Face divide themselves, and
        need no argument.

    Raises `TypeError` for an iterator, and `ValueError` for values that cannot be used
    together.
    """

    examples: Iterable[Any] | Callable[..., Iterable[Any]]
    _: dataclasses.KW_ONLY
    sharded: bool | None = None
    batched: bool = False
    prefetch: int = 2
    num_workers: int = 0
    disjoint_workers: bool = False

    def __post_init__(self) -> None:
        check_workers("Stream", self.prefetch, self.num_workers)
        is_once = hasattr(self.examples, "__next__")
        if is_once or not (self.is_function or hasattr(self.examples, "__iter__")):
            raise TypeError(
                f"Stream: examples is a {type(self.examples).__name__}, but must be an "
                "iterable that can be read more than once, or a function from the "
                "epoch number to an iterable."
            )
        if self.sharded and not self.is_function:
            raise ValueError(
                "Stream: sharded=True needs a function, examples(epoch, shard, "
                "num_shards), which gives the part of a shard; examples is a "
                f"{type(self.examples).__name__}."
            )
        if self.is_function:
            shard = ("shard", "num_shards") if self.sharded else ()
            check_call("Stream", "examples", self.examples, ("epoch", *shard))

    @property
    def is_function(self) -> bool:
        """True if the examples are a function, which returns a new iterable for each
        epoch."""
        return callable(self.examples) and not hasattr(self.examples, "__iter__")


class Position(NamedTuple):
    """The position in one shard of a stream, within an epoch. It holds only plain
    numbers and strings, so that it can be saved in a checkpoint.

    - `shard`, `num_shards`: the part of the stream; 0 of 1 is the whole stream.
    - `num_items`: the number of items (examples or batches) that have been read.
    - `state`: the state of the source at this position or a little before; `None` if
        the source has none.
    - `checksum`: the checksum of the items that have been read; `None` if it is not
        known.
    - `state_items`, `state_checksum`: the number of items that had been read when the
        state was taken, and their checksum. The state is correct if reading on from it
        produces `checksum`.
    """

    shard: int
    num_shards: int
    num_items: int = 0
    state: str | None = None
    checksum: int | None = None
    state_items: int = 0
    state_checksum: int = 0


class Place(NamedTuple):
    """A place in a run: `epoch` epochs are done, and `batch` of the `num_batches`
    batches of the next one.

    - `num_batches`: `None` for a stream.
    - `positions`: the position in the shard of a stream that this process reads; in a
        record, the positions in all shards.
    """

    epoch: int
    batch: int
    num_batches: int | None
    positions: Sequence[Any] | None = None

    @property
    def epochs_done(self) -> float:
        """The number of epochs done, including the fraction of the current one if its
        length is known."""
        if not self.num_batches:
            return float(self.epoch)
        return self.epoch + self.batch / self.num_batches


def as_data(
    examples: Examples | Callable[[int], Examples] | Data | Stream,
) -> Data | Stream:
    """Wrap examples that are neither `Data` nor `Stream` in a `Data` with the
    defaults."""
    if isinstance(examples, Data | Stream):
        return examples
    return Data(examples)


def as_sequence(where: str, examples: Examples | Data) -> Data:
    """Wrap examples of an evaluation as `as_data` does. Raises as `check_examples`
    does, and for a `Stream`."""
    check_examples(where, examples)
    data = as_data(examples)
    if isinstance(data, Stream):
        raise TypeError(
            f"{where} is a Stream, which is only for training, and for "
            "Evaluation(stream, num_batches=...). Pass list(stream), or any sequence."
        )
    return data


def check_examples(where: str, examples: Any) -> None:
    """Raise `TypeError`, naming the argument as `where`, unless it is a sequence of
    examples, a function of the epoch, a [`Data`][] or a [`Stream`][]. Also raises for
    columns and similar objects, because their items are not examples."""
    if isinstance(examples, Stream):
        return
    if isinstance(examples, Data):
        examples = examples.examples
    kind = type(examples).__name__
    is_tuple = type(examples) is tuple and _are_columns(examples)
    is_data_frame = hasattr(examples, "iloc")
    if is_tuple or isinstance(examples, Mapping) or is_data_frame:
        names = getattr(examples, "columns", examples)  # of a data frame
        if is_tuple:
            columns = [describe(x) for x in examples]
        else:
            columns = [repr(name) for name in names]
        raise TypeError(
            f"{where} is a {kind} of {first_few(columns)}: columns, or several sets of "
            "examples. Pass a sequence of examples, in which examples[i] is a row. To "
            "turn columns into rows, use list(zip(*examples)) for a tuple, "
            "[dict(zip(examples, row)) for row in zip(*examples.values())] "
            'for a dict, examples.to_dict("records") for a data frame. If you have '
            "several sets, pass one of "
            "them. If each array of a tuple is an example, pass list(examples)."
        )
    has_items = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    # An array without dims has both methods, and raises in them.
    is_scalar = getattr(examples, "shape", None) == ()
    is_sequence = has_items and not isinstance(examples, str) and not is_scalar
    # A module can be called, but is a model in the place of the examples.
    is_function = callable(examples) and not isinstance(examples, eqx.Module)
    if not is_sequence and not is_function:
        raise TypeError(
            f"{where} is a {kind}, but must be a sequence of examples, with "
            "len(examples) and examples[int]. Use list(...) for an iterable, or, for "
            "training, rx.Stream(...) if it is too long for a list. In a call the "
            "state comes first, then the examples."
        )


def _are_columns(examples: tuple[Any, ...]) -> bool:
    """Return true if these arrays look like columns (inputs, labels): if there are few
    arrays, and they have more rows than there are arrays."""
    are_few = 2 <= len(examples) <= 4
    have_rows = all(is_array(x) and x.ndim > 0 for x in examples)
    if not are_few or not have_rows:
        return False
    lengths = {x.shape[0] for x in examples}
    return len(lengths) == 1 and lengths.pop() > len(examples)


def num_examples_of(examples: Examples, where: str = "batches: examples") -> int:
    """Count the examples. Raises `TypeError` if they are not a sequence, and
    `ValueError` if there are none."""
    check_examples(where, examples)
    if not hasattr(examples, "__len__"):
        raise TypeError(
            f"{where} is a function, which is only for training. Pass a sequence of "
            "examples."
        )
    if len(examples) == 0:
        raise ValueError(f"{where} is empty.")
    return len(examples)
