"""`Data` and `Stream`: examples, how they are read, and in which order."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx

from redco_eqx._base.protocols import Examples
from redco_eqx._base.tree import describe, first_few, is_array


def check_workers(name: str, prefetch: int, num_workers: int, timeout_seconds: float | None) -> None:
    """Raises `ValueError` if these options of `Data` or `Stream` do not go together."""
    if prefetch < 0:
        raise ValueError(f"{name}: prefetch={prefetch}, but it must be 0 (no thread) or more.")
    if num_workers < 0:
        raise ValueError(f"{name}: num_workers={num_workers}, but it must be 0 or more.")
    if num_workers > 0 and prefetch == 0:
        raise ValueError(f"{name}: num_workers={num_workers} work ahead, but prefetch=0 allows none.")
    if timeout_seconds is not None and not (timeout_seconds > 0 and prefetch > 0):
        raise ValueError(
            f"{name}: timeout_seconds={timeout_seconds} with prefetch={prefetch}, but it must be positive, and "
            "only another thread can be waited for: prefetch= must be 1 or more."
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
        in Python itself belongs into the processes of Grain or of a `DataLoader`, read as a [`Stream`][].
    - `timeout_seconds`: after how long a batch that does not come is a `TimeoutError`, which names the worker
        that hangs, and in which batch; `None` waits for ever. (A thread that hangs still keeps a program from
        ending, unlike with `step_timeout_seconds` of [`fit`][].)

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Examples | Callable[[int], Examples]
    _: dataclasses.KW_ONLY
    shuffle: bool = True
    prefetch: int = 2
    num_workers: int = 0
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        check_workers("Data", self.prefetch, self.num_workers, self.timeout_seconds)

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
    31 to 62; early in an epoch from after the first one), which are read again. If they are not the same (by
    checksum), or if there is no state, all of the epoch up to there is read again; if that is not the same
    either, refused, unless `Checkpoints(allow_changes=True)`. So a shuffle needs a seed. Of objects that are no
    numbers, arrays, text, dataclasses or collections of such, type and size alone are compared.

    - `examples`: an iterable of examples (`datasets.IterableDataset`, a Grain dataset or loader, a
        `DataLoader(batch_size=None)`), or a function from the number of the epoch to one.
    - `sharded`: on several processes, what each reads. `False`: the whole stream, of which it keeps the rows
        that its devices hold; the stream must be the same on all. `True`: `examples(epoch, shard, num_shards)`
        gives the part of a shard. Processes whose devices hold the same rows (of one tensor-parallel group)
        read the same shard. Where the part of one ends, the epoch ends for all, at the same step.
    - `batched`: whether each item is a batch already, of all rows that are read here; `collate_fn` is given
        the item itself, and makes NumPy arrays of it. For training only.
    - `prefetch`, `num_workers`, `timeout_seconds`: see [`Data`][].

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Iterable[Any] | Callable[..., Iterable[Any]]
    _: dataclasses.KW_ONLY
    sharded: bool | None = None
    batched: bool = False
    prefetch: int = 2
    num_workers: int = 0
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        check_workers("Stream", self.prefetch, self.num_workers, self.timeout_seconds)
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
    if isinstance(examples, Mapping):
        raise TypeError(
            f"{where} is a {kind} of {first_few([repr(name) for name in examples])}, but a sequence of "
            "examples is needed. Columns become a list of rows by [dict(zip(examples, row)) for row in "
            "zip(*examples.values())]; of several sets of examples pass one."
        )
    if hasattr(examples, "iloc"):
        raise TypeError(
            f"{where} is a {kind}, of which examples[i] is a column. A list of rows serves: "
            'examples.to_dict("records").'
        )
    if type(examples) is tuple and _are_columns(examples):
        arrays = ", ".join(describe(x) for x in examples)
        raise TypeError(
            f"{where} is a tuple of {len(examples)} arrays, {arrays}, which would be taken for "
            f"{len(examples)} examples. Columns become a list of rows by list(zip(*examples)); if each "
            "array is an example, pass list(examples)."
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
