"""`Data` and `Stream`: examples, how they are read, and in which order."""

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
            f"{name}: prefetch={prefetch} and num_workers={num_workers}, but both must be 0 or more, and "
            "workers, which work ahead, need a prefetch of 1 or more."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Examples and how to read them, wherever examples are taken; alone they stand for all defaults.

    ```python
    state, _ = rx.fit(state, rx.Data(examples, num_workers=4), **pipeline, num_epochs=1)
    ```

    - `examples`: anything with `len(examples)` and `examples[int]`; for training also a function from the
        number of an epoch to one.
    - `shuffle`: whether training goes through them in an order of its own in each epoch. It costs no memory
        and microseconds for an example, however many there are.
    - `prefetch`: how many batches are made and placed ahead, in the background; 0 for none, and no thread.
    - `num_workers`: how many threads collate, each another batch; as many are made ahead at least. Order and
        errors stay as they are with one. `examples` and `collate_fn` must then allow calls at the same time.
        Threads speed up what waits (a disk, a network) or leaves Python's lock (most of NumPy); what computes
        in Python itself belongs in the processes of Grain or of a `DataLoader`, read as a [`Stream`][].

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
        """The examples, where they are no function of the epoch."""
        return self.examples


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Examples that come one after the other, in the order in which they come.

    ```python
    def rows(epoch):
        yield from np.random.default_rng(epoch).permutation(examples)

    state, _ = rx.fit(state, rx.Stream(rows), **pipeline, num_steps=20, checkpoints="run")
    ```

    It is read by one thread, and one batch further ahead is made than `prefetch` says (on several processes
    three), so that its end is known. In training the ragged tail of an epoch is dropped, and the next epoch
    begins: with what the function gives, or by iterating again, after `set_epoch(epoch)` where there is such a
    method. An iterator, which can be read only once, ends the run.

    A run that goes on reads on after the last batch that was trained on. The position is set by the own
    `get_state` and `set_state`, or `state_dict` and `load_state_dict`, of the iterable, or of the iterators
    that it or the function gives, if they have them: to a state from 1,000 to 2,000 examples before (of batches
    31 to 62), which are read again. If they are not the same (by checksum), or if there is no state so far
    back, all of the epoch up to there is read again; if that is not the same either, refused, unless
    `Checkpoints(allow_changes=True)`. So a shuffle needs a seed. Of objects that are no numbers, arrays, text,
    dataclasses or collections of such, type and size alone are compared.

    - `examples`: an iterable of examples (`datasets.IterableDataset`, a Grain dataset or loader, a
        `DataLoader(batch_size=None)`), or a function from the number of the epoch to one.
    - `sharded`: on several processes, what each reads. `False`: the whole stream, of which it keeps the rows
        that its devices hold; the stream must be the same on all. `True`: `examples(epoch, shard, num_shards)`
        gives the part of a shard. Processes whose devices hold the same rows (of one tensor-parallel group)
        read the same shard. Where the part of one ends, the epoch ends for all, at the same step.
    - `batched`: whether each item is a batch already, of all rows that are read here; `collate_fn` is given
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
        """True if there is a new iterable for each epoch."""
        return callable(self.examples) and not hasattr(self.examples, "__iter__")

    @property
    def is_once(self) -> bool:
        """True of an iterator, which can be read only once."""
        return not self.is_function and hasattr(self.examples, "__next__")


class Position(NamedTuple):
    """A position of one shard of a stream in an epoch. Plain numbers and text, for a checkpoint.

    - `shard`, `num_shards`: which part of the stream; 0 of 1 is the whole.
    - `num_items`: how many items (examples, or batches) have been read.
    - `state`: the source's own state there or a little before; `None` if it has none.
    - `checksum`: of the items that have been read; `None` if that is not known.
    - `state_items`, `state_checksum`: how many had been read when the state was taken, and their checksum. What
        is read from there must lead to `checksum`: this proves the state.
    """

    shard: int
    num_shards: int
    num_items: int = 0
    state: str | None = None
    checksum: int | None = None
    state_items: int = 0
    state_checksum: int = 0


class Place(NamedTuple):
    """`epoch` epochs are done, and `batch` of the `num_batches` of another.

    - `num_batches`: `None` for a stream.
    - `positions`: where a stream stands: its shard that this process reads, or, of a record, all of them.
    - `is_end`: whether no batch follows, because a stream that is read only once has ended.
    """

    epoch: int
    batch: int
    num_batches: int | None
    positions: Sequence[Any] | None = None
    is_end: bool = False

    @property
    def epochs_done(self) -> float:
        """With the fraction of the one in hand, if its length is known."""
        return self.epoch + (self.batch / self.num_batches if self.num_batches else 0.0)


def as_data(examples: Examples | Callable[[int], Examples] | Data | Stream) -> Data | Stream:
    """Examples alone with all defaults."""
    return examples if isinstance(examples, Data | Stream) else Data(examples)


def check_examples(where: str, examples: Any) -> None:
    """Raises `TypeError`, naming the argument as `where`, for what is no sequence of examples, function of the
    epoch, [`Data`][] or [`Stream`][], or would be taken for other examples than are meant."""
    if isinstance(examples, Stream):
        return
    examples = examples.examples if isinstance(examples, Data) else examples
    kind = type(examples).__name__
    is_tuple = type(examples) is tuple and _are_columns(examples)
    if is_tuple or isinstance(examples, Mapping) or hasattr(examples, "iloc"):
        names = getattr(examples, "columns", examples)  # of a data frame
        columns = [describe(x) for x in examples] if is_tuple else [repr(name) for name in names]
        raise TypeError(
            f"{where} is a {kind} of {first_few(columns)}, which are columns, or several sets of examples; but "
            "a sequence of examples is needed, so that examples[i] is a row. Columns become a list of rows by "
            "list(zip(*examples)) of a tuple, [dict(zip(examples, row)) for row in zip(*examples.values())] of "
            'a dict, examples.to_dict("records") of a data frame. Of several sets pass one; if each array of a '
            "tuple is an example, pass list(examples)."
        )
    sized = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    sized = sized and not isinstance(examples, str) and getattr(examples, "shape", None) != ()
    if not sized and (isinstance(examples, eqx.Module) or not callable(examples)):
        raise TypeError(
            f"{where} is a {kind}, but a sequence of examples is needed, with len(examples) and examples[int]. "
            "list(...) makes one of an iterable, and rx.Stream(...) reads what is too long for that. In a call "
            "the state comes first, then the examples."
        )


def _are_columns(examples: tuple[Any, ...]) -> bool:
    """True if these arrays look like columns (inputs, labels) of more examples than they are themselves."""
    if not 2 <= len(examples) <= 4 or not all(is_array(x) and x.ndim > 0 for x in examples):
        return False
    lengths = {x.shape[0] for x in examples}
    return len(lengths) == 1 and lengths.pop() > len(examples)


def num_examples_of(examples: Examples, where: str = "batches: examples") -> int:
    """Count the examples. Raises `TypeError` if it is no sequence, and `ValueError` if it is empty."""
    check_examples(where, examples)
    if not hasattr(examples, "__len__"):
        raise TypeError(f"{where} is a function, which is for training: a sequence of examples is needed.")
    if len(examples) == 0:
        raise ValueError(f"{where} is empty.")
    return len(examples)
