"""Streams of every kind that there is, over the same examples: what tests of streams
share."""

import itertools
from typing import Any

import jax
import numpy as np

import redco_eqx as rx
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Place


def order(num: int, epoch: int) -> list[int]:
    """Each epoch has an order of its own, which a stream must get from its number."""
    return np.random.default_rng(epoch).permutation(num).tolist()


class ByEpoch:
    """An iterable that is told its epoch, as a dataset of Hugging Face is."""

    def __init__(self, examples: Any):
        self.examples = examples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return generate(self.examples, self.epoch)


class WithState(ByEpoch):
    """The same, with a state of its own: bytes, tuples and numbers for keys are in
    it."""

    def __init__(self, examples: Any):
        super().__init__(examples)
        self.at = 0

    def __iter__(self) -> Any:
        begin = self.at
        self.at = 0
        for at, i in enumerate(order(len(self.examples), self.epoch)):
            if at >= begin:
                self.at = at + 1
                yield self.examples[i]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at, 3: (b"\x00\xff", None, 0.5)}

    def load_state_dict(self, state: Any) -> None:
        assert state[3] == (b"\x00\xff", None, 0.5)
        self.at = state["at"]


class StatefulIterator:
    """An iterator with a state, as those of Grain are."""

    def __init__(self, examples: Any, epoch: int):
        self.examples = examples
        self.at = 0
        self.order = order(len(examples), epoch)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.examples[self.order[self.at - 1]]

    def get_state(self) -> bytes:
        return str(self.at).encode()

    def set_state(self, state: bytes) -> None:
        self.at = int(state)


class Refilling(WithState):
    """Shuffles by a buffer, whose content is not in its state: going on from that loses
    examples."""

    def __iter__(self) -> Any:
        begin = self.at
        self.at = 0
        held = []
        for at, i in enumerate(order(len(self.examples), self.epoch)):
            if at >= begin:
                held.append(self.examples[i])
                self.at = at + 1
                if len(held) == 5:
                    yield held.pop(0 if i % 2 else 3)
        yield from held
        self.at = 0


class Unlike(ByEpoch):
    """In another order each time that it is read, as a shuffle without a seed."""

    num_opened = 0

    def __iter__(self) -> Any:
        Unlike.num_opened += 1
        return generate(self.examples, 1000 + Unlike.num_opened)


def generate(examples: Any, epoch: int) -> Any:
    for i in order(len(examples), epoch):
        yield examples[i]


BEGIN = Place(0, 0, None)


def taken(epochs: Epochs, num: int, place: Place = BEGIN, **options: Any) -> Any:
    """The first batches from a place on, each with the place after it."""
    made = epochs.after(place, key=jax.random.key(0), **options)
    found = [(x.tolist(), place) for x, place in itertools.islice(made, num)]
    made.close()
    return found


KINDS: dict[str, Any] = {
    "function": lambda examples, **options: rx.Stream(
        lambda epoch: generate(examples, epoch), **options
    ),
    "iterable": lambda examples, **options: rx.Stream(ByEpoch(examples), **options),
    "iterable with a state": lambda examples, **options: rx.Stream(
        WithState(examples), **options
    ),
    "function of iterators with a state": lambda examples, **options: rx.Stream(
        lambda epoch: StatefulIterator(examples, epoch), **options
    ),
}
"""All give `order(num, epoch)` in each epoch, and can be made anew."""

WITH_STATE = {"iterable with a state", "function of iterators with a state"}
