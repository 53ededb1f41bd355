"""A compiled step for the tests, references for it, and a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax

from redco_eqx import train_step

KEY = jax.random.key(0)


class Normed(eqx.Module):
    """A model with a state. Large enough that `tensor` and `fsdp` split it."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(64, 128, key=key)
        self.norm = eqx.nn.BatchNorm(128, "batch", mode="ema", momentum=0.9)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def compiled_step(loss_fn: Any, optimizer: Any, **options: Any) -> Any:
    return jax.jit(partial(train_step, loss_fn=loss_fn, optimizer=optimizer, **options))


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves by the path that JAX spells."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in pairs}


def ratio(loss_fn: Any, name: str | None = None) -> Callable[[Any, Any], Any]:
    """The loss (or a metric) as plain division of sums."""

    def f(model: Any, batch: Any) -> Any:
        loss, metrics = loss_fn(model, batch, None)
        mean = loss if name is None else metrics[name]
        return mean.total / mean.weight

    return f
