"""What a loss function returns, checked."""

from typing import Any

from jaxtyping import Array

from redco_eqx._step.state import TrainState
from redco_eqx._tree import to_arrays
from redco_eqx._types import RESERVED_METRICS, Mean, Metrics, as_mean


def unpack_loss(state: TrainState, output: Any, weight: Any) -> tuple[Mean, Metrics, dict[str, Array]]:
    """What `loss_fn` returned, as `(loss, metrics, model_state)`."""
    has_state = state.structure[1] is not None
    expected = "(loss, metrics, new_state)" if has_state else "a loss, or (loss, metrics)"
    parts: list[Any] = list(output) if isinstance(output, tuple) else [output]
    if len(parts) not in ((3,) if has_state else (1, 2)):
        what = f"a tuple of {len(parts)}" if isinstance(output, tuple) else type(output).__name__
        raise ValueError(f"loss_fn must return {expected}, but returned {what}.")
    metrics = parts[1] if len(parts) > 1 else {}
    if not isinstance(metrics, dict):
        raise ValueError(
            f"loss_fn must return {expected}, with metrics a dict of names, not {type(metrics).__name__}."
        )
    reserved = [name for name in metrics if name in RESERVED_METRICS]
    if reserved:
        raise ValueError(f"loss_fn: the metric name {reserved[0]!r} is reserved. Choose another.")
    loss = as_mean(parts[0], weight, "the loss")
    metrics = {name: as_mean(x, weight, f"the metric {name!r}") for name, x in metrics.items()}
    model_state = to_arrays(parts[2]) if has_state else state.model_state
    return loss, metrics, model_state
