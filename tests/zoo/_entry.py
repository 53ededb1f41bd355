"""The definition of an entry of the zoo, its batches and losses, and the comparison
with its layout."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx

D, F, HEADS, VOCAB, SEQ, LAYERS = 32, 64, 8, 64, 8, 2
# Divides over tensor=4, so that splitting the dim of layers is a mistake one can make.
NUM_STACKED = 4


@dataclass(frozen=True)
class Entry:
    """A tiny model and the layout that every one of its arrays should get.

    - `make`: key -> the model, an `eqx.Module` or a plain list, tuple or dict.
    - `inputs`: number of rows -> a batch of NumPy arrays with that leading dim.
    - `loss`: (model, batch) -> the mean loss. Every floating parameter has a gradient.
    - `specs`: glob over the leaf's path (`*` also crosses dots; the first match wins)
        -> the spec on a mesh with tensor=4 and fsdp=1. Trailing `None`s do not count.
        `...` means that any layout is right. An array that no glob matches is whole.
    """

    name: str
    make: Callable[[Any], Any]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    specs: dict[str, Any]


def split(columns: str = "", rows: str = "", *, stacked: int = 0) -> dict[str, Any]:
    """The specs of layers by globs of their paths; `stacked` dims come first, and are
    never split.

    A column is split along its outputs, dim 0 of an (out, in) weight and of its bias.
    So are a table along its vocabulary, and experts along their number. A row is split
    along its inputs, and its bias is whole.
    """
    before = (None,) * stacked
    specs: dict[str, Any] = {}
    for path in rows.split():
        specs |= {f"{path}.weight": (*before, None, "tensor"), f"{path}.bias": ()}
    return specs | {f"{path}.*": (*before, "tensor") for path in columns.split()}


def strip(spec: Any) -> tuple[Any, ...]:
    """A spec (tuple or `PartitionSpec`) without its trailing `None`s, for
    comparison."""
    spec = tuple(spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


def goldens(entry: Entry, model: Any = None) -> dict[str, Any]:
    """`{path: spec}` for every array leaf; `...` where any layout is right."""
    model = (
        eqx.filter_eval_shape(entry.make, jax.random.key(0)) if model is None else model
    )
    patterns = entry.specs.items()
    paths = rx.to_arrays(model)
    return {
        path: next((spec for glob, spec in patterns if fnmatchcase(path, glob)), ())
        for path in paths
    }


def unlike(specs: dict[str, Any], golden: dict[str, Any]) -> dict[str, Any]:
    """The arrays whose layout is not the golden one, with both layouts."""
    pairs = {path: (spec, golden[path]) for path, spec in specs.items()}
    return {
        path: (x, y)
        for path, (x, y) in pairs.items()
        if y is not ... and strip(x) != strip(y)
    }


# Batches and losses


def tokens(
    batch_size: int, *, vocab: int = VOCAB, seq: int = SEQ, seed: int = 0
) -> dict[str, Any]:
    return {
        "tokens": np.random.default_rng(seed).integers(
            0, vocab, (batch_size, seq + 1), dtype=np.int32
        )
    }


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_tokens(
    name: str, make: Any, apply: Any, specs: Any, *, vocab: int = VOCAB
) -> Entry:
    """With the mean next-token cross-entropy of
    `apply: model, (time,) ints -> (time, vocab)`."""

    def loss(model: Any, batch: Any) -> Any:
        logits = jax.vmap(lambda ids: apply(model, ids))(batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:])

    return Entry(name, make, partial(tokens, vocab=vocab), loss, specs)


def of_rows(
    name: str,
    make: Any,
    apply: Any,
    specs: Any,
    *,
    x: tuple[int, ...] = (D,),
    y: tuple[int, ...] | None = None,
) -> Entry:
    """With the mean squared error of `apply(model, row)`, for rows of shape `x` and
    targets of shape `y`."""
    y = x if y is None else y

    def inputs(batch_size: int) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        shapes = {"x": x, "y": y}
        return {
            n: rng.normal(size=(batch_size, *shape)).astype(np.float32)
            for n, shape in shapes.items()
        }

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(
            (jax.vmap(lambda row: apply(model, row))(batch["x"]) - batch["y"]) ** 2
        )

    return Entry(name, make, inputs, loss, specs)
