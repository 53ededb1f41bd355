"""What a walk through a program knows of its values, and what it writes down."""

import dataclasses

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow.atoms import Dim


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program.

    - `weights`: if nothing but parameters is upstream, which (their numbers): it is a weight.
    - `is_data`: whether the batch is upstream; `is_learned`: whether a parameter is.
    - `sums`: the events of which it is the result, or the sum of results: these can be summed over devices
        at once.
    """

    dims: tuple[Dim, ...]
    num_bytes: int
    weights: tuple[int, ...] = ()
    is_data: bool = False
    is_learned: bool = False
    sums: tuple["Event", ...] = ()


@dataclasses.dataclass(eq=False, slots=True)
class Event:
    """What is sent if the split of a dim reaches an operation that has to have it whole.

    - `kind`: `sum`, `lookup`, `whole`, `reshard`, `merge`.
    - `dims`: splitting any of these, by their leading atom, is what causes it ...
    - `unless`: ... but not if it leads one of these.
    - `sent`: the array that is summed or gathered; the bytes of one device's part of it are counted.
    - `arrays`: of these one at least has to be split for it to happen.
    - `along`: if it is a sum, for each of `arrays` its dims that are summed over, by number.
    - `equation`: the operation; `block`: the building block of this library that it is in, or ''.
    - `first`: the first of several events whose results are added. Compilers for TPU and GPU add before they
        sum over devices, once; the one for CPU does not.
    - `joined`: the first of several that are added by the library's own blocks: before, on every backend.
    - `times`: how often it is done, in loops; `waits`, of these, in loops that go through one sequence by the
        same weights, so that each waits for the last.
    """

    kind: str
    dims: tuple[Dim, ...]
    sent: Value
    arrays: tuple[Value, ...]
    equation: JaxprEqn
    times: int
    waits: int
    unless: tuple[Dim, ...] = ()
    block: str = ""
    along: tuple[tuple[int, ...], ...] = ()
    first: "Event | None" = None
    joined: "Event | None" = None

    def summed_with(self, *, merged: bool) -> "Event":
        """The event that stands for all that are summed over devices at once with this one.

        `merged`: as by a compiler that adds before it sums.
        """
        return (self.first if merged else self.joined) or self


@dataclasses.dataclass(eq=False, slots=True)
class Use:
    """An operation of a weight on data.

    - `weight`: the number of the parameter.
    - `roles`: for each dim of the weight as it is here, what splitting it is called: `row`, `column`, ...
    - `dims`: these dims.
    - `num_bytes`: of the results, in all loops.
    - `depth`: how many products each number of them is the sum of.
    """

    weight: int
    dims: tuple[Dim, ...]
    roles: tuple[str, ...]
    num_bytes: int
    depth: int

    @property
    def work(self) -> float:
        """Bytes of the weight, times how often they are used."""
        return float(self.num_bytes) * self.depth


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """An operation: its operands and results, how often it is done, and what happens there if they are
    split. `block` as of an [`Event`][]."""

    equation: JaxprEqn
    times: int
    operands: list[Value]
    results: list[Value]
    events: list[Event]
    block: str = ""
