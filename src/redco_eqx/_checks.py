"""What `fit` refuses before anything is compiled, and what it warns of."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax

from redco_eqx._state import TrainState, check_optimizer
from redco_eqx._steps import unused_parameters
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch, LossFn


def check_arguments(
    num_epochs: int | None,
    num_steps: int | None,
    log_every: int,
    eval_every_steps: int | None,
    on_nonfinite: str,
) -> None:
    """Raises `ValueError` for numbers that are not positive and the like."""
    if (num_epochs is None) == (num_steps is None):
        raise ValueError(
            f"fit: num_epochs={num_epochs}, num_steps={num_steps}, but exactly one of them must be given."
        )
    counts = {
        "num_epochs": num_epochs,
        "num_steps": num_steps,
        "log_every": log_every,
        "eval_every_steps": eval_every_steps,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"fit: {name}={value}, but it must be positive.")
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'fit: on_nonfinite={on_nonfinite!r}, but it must be "raise" or "skip".')


def check_state(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    num_microbatches: int,
    num_shards: int,
    step_fn: Callable[..., Any] | None,
) -> None:
    """Raises `ValueError` if these arguments of `fit` do not fit together."""
    if not state.params:
        raise ValueError(
            "fit: the state has no trainable leaf. Check `trainable` of init_state (NumPy arrays are "
            "constants; jnp.asarray makes a parameter)."
        )
    check_optimizer(state, optimizer)
    if num_microbatches < 1 or batch_size % (num_microbatches * num_shards) != 0:
        raise ValueError(
            f"fit: batch_size={batch_size} must be a multiple of num_microbatches={num_microbatches} times "
            f"{num_shards}, the number of data shards (mesh axes data x fsdp)."
        )
    if step_fn is not None and num_microbatches != 1:
        raise ValueError("fit: num_microbatches is train_step's; with a step_fn it must be 1.")


def warn_unused(state: TrainState, batch: Batch, loss_fn: LossFn) -> None:
    """Warns of parameters on which the loss does not depend."""
    unused = unused_parameters(state, batch, loss_fn)
    if unused:
        warnings.warn(
            f"the loss does not depend on {len(unused)} trainable arrays, whose gradient is always zero: "
            f"{', '.join(unused)}. Leave them out by `trainable` of init_state, or use them.",
            stacklevel=3,
        )


class BatchShapes:
    """Warns once when batches change their shape: each new one compiles the step again."""

    def __init__(self) -> None:
        self._first: list[Any] | None = None
        self._warned = False

    def check(self, batch: Batch) -> None:
        """Compares with the first batch."""
        if self._warned:
            return
        shapes = [x.shape for x in jax.tree.leaves(batch)]
        if self._first is None:
            self._first = shapes
        elif shapes != self._first:
            self._warned = True
            changed = zip(leaves_with_paths(batch), self._first)
            name, new, old = next(
                ((path, x.shape, old) for (path, x), old in changed if x.shape != old), ("", "", "")
            )
            warnings.warn(
                f"collate_fn: {name or 'the batch'} has shape {new}, but had {old} in the first batch. Each "
                "new shape compiles the step again: pad to a few fixed sizes.",
                stacklevel=3,
            )
