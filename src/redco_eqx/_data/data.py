"""`Data` and `Stream`: examples, and how they are read."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redco_eqx._types import Examples


def check_workers(name: str, prefetch: int, num_workers: int, processes: bool) -> None:
    """Raises `ValueError` if these options of `Data` or `Stream` do not go together."""
    if prefetch < 0:
        raise ValueError(f"{name}: prefetch={prefetch}, but it must be 0 (no thread) or more.")
    if num_workers < 0:
        raise ValueError(f"{name}: num_workers={num_workers}, but it must be 0 or more.")
    if num_workers > 0 and prefetch == 0:
        raise ValueError(f"{name}: num_workers={num_workers} work ahead, but prefetch=0 allows none.")
    if processes and num_workers == 0:
        raise ValueError(f"{name}: processes=True needs num_workers=, the number of processes.")


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Examples and how to read them, wherever examples are taken; alone they stand for all defaults.

    ```python
    state = rx.fit(state, rx.Data(examples, num_workers=4), **pipeline, num_epochs=1)
    ```

    - `examples`: anything with `len(examples)` and `examples[int]`; for training also a function from the
        number of an epoch to one.
    - `shuffle`: whether training goes through them in an order of its own in each epoch. It costs no memory
        and microseconds for an example, however many there are.
    - `prefetch`: how many batches are made and placed ahead, in the background; 0 for none, and no thread.
    - `num_workers`: how many threads collate, each another batch; as many are made ahead at least. Order and
        errors stay as they are with one. `examples` and `collate_fn` must then allow calls at the same time.
    - `processes`: whether each of them leaves `collate_fn` to a process of its own: for what holds Python's
        lock. The processes are started anew (the "spawn" of `multiprocessing`), so `collate_fn` is a function
        of a module, a program has `if __name__ == "__main__":`, and examples and batches are pickled.

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Examples | Callable[[int], Examples]
    _: dataclasses.KW_ONLY
    shuffle: bool = True
    prefetch: int = 2
    num_workers: int = 0
    processes: bool = False

    def __post_init__(self) -> None:
        check_workers("Data", self.prefetch, self.num_workers, self.processes)

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

    state = rx.fit(state, rx.Stream(rows), **pipeline, num_steps=20, checkpoints="run")
    ```

    It is read by one thread, one batch further ahead than `prefetch` says (on several processes three), so
    that its end is known. In training the ragged tail of an epoch is dropped, and the next epoch begins: with
    what the function gives, or by iterating again, after `set_epoch(epoch)` where there is such a method. An
    iterator, which can be read only once, ends the run.

    A run that goes on reads on after the last batch that was trained on. The position is set by the iterator's
    or iterable's own `get_state` and `set_state`, or `state_dict` and `load_state_dict`, if it has them, and
    else by reading as many again. That is exact if the stream gives the same each time: a shuffle needs a seed.

    - `examples`: an iterable of examples (`datasets.IterableDataset`, a Grain dataset or loader, a
        `DataLoader(batch_size=None)`), or a function from the number of the epoch to one.
    - `sharded`: on several processes, what each reads. `False`: the whole stream, of which it keeps the rows
        that its devices hold; the stream must be the same on all. `True`: `examples(epoch, shard, num_shards)`
        gives the part of a shard. Processes whose devices hold the same rows (of one tensor-parallel group)
        read the same shard. Where the part of one ends, the epoch ends for all, at the same step.
    - `batched`: whether each item is a batch already, of all rows that are read here; `collate_fn` is given
        the item itself, and makes NumPy arrays of it. For training only.
    - `replay`: whether a run always goes on by reading again, although the stream can set its position, but not
        exactly. A shuffle buffer of `datasets`, which is filled anew, is recognised.
    - `prefetch`, `num_workers`, `processes`: see [`Data`][].

    Raises `ValueError` for values that cannot be used together.
    """

    examples: Iterable[Any] | Callable[..., Iterable[Any]]
    _: dataclasses.KW_ONLY
    sharded: bool | None = None
    batched: bool = False
    replay: bool = False
    prefetch: int = 2
    num_workers: int = 0
    processes: bool = False

    def __post_init__(self) -> None:
        check_workers("Stream", self.prefetch, self.num_workers, self.processes)
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
        """Whether there is a new iterable for each epoch."""
        return callable(self.examples) and not hasattr(self.examples, "__iter__")

    @property
    def is_once(self) -> bool:
        """Whether it is an iterator, which can be read only once."""
        return not self.is_function and hasattr(self.examples, "__next__")


def as_data(examples: Examples | Callable[[int], Examples] | Data | Stream) -> Data | Stream:
    """Examples alone with all defaults."""
    return examples if isinstance(examples, Data | Stream) else Data(examples)


def num_examples_of(examples: Examples) -> int:
    """How many there are. Raises `TypeError` if it is no sequence, and `ValueError` if it is empty."""
    sized = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not sized or isinstance(examples, Mapping):
        raise TypeError(
            f"batches: examples is a {type(examples).__name__}, but a sequence of examples is needed, "
            "with len(examples) and examples[int]. list(...) makes one of an iterable, and rx.Stream(...) "
            "reads what is too long for that."
        )
    if len(examples) == 0:
        raise ValueError("batches: examples is empty.")
    return len(examples)
