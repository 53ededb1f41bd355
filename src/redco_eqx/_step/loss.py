"""What a loss function returns, checked."""

from typing import Any

from jaxtyping import Array

from redco_eqx._step.state import TrainState
from redco_eqx._tree import describe, is_array, to_arrays
from redco_eqx._types import RESERVED_METRICS, Mean, Metrics, as_mean


def unpack_loss(state: TrainState, output: Any, weight: Any) -> tuple[Mean, Metrics, dict[str, Array]]:
    """What `loss_fn` returned, as `(loss, metrics, model_state)`."""
    has_state = state.structure[1] is not None
    expected = "(loss, metrics, new_state)" if has_state else "a loss, or (loss, metrics)"
    parts: list[Any] = list(output) if isinstance(output, tuple) else [output]
    hint = 'Metrics have names, as in (loss, {"accuracy": x}); gradients are left to the step.'
    if has_state and len(parts) != 3:
        hint = "Its model is the pair (model, eqx.nn.State), and the new State comes back."
    elif not has_state and len(parts) == 3:
        hint = "A new_state comes back only where init_state was given the pair (model, eqx.nn.State)."
    if len(parts) not in ((3,) if has_state else (1, 2)) or isinstance(output, dict):
        what = f"a tuple of {len(parts)}" if isinstance(output, tuple) else f"a {type(output).__name__}"
        raise ValueError(f"loss_fn must return {expected}, but returned {what}. {hint}")
    metrics = parts[1] if len(parts) > 1 else {}
    if not isinstance(metrics, dict):
        what = describe(metrics) if is_array(metrics) else type(metrics).__name__
        raise ValueError(f"loss_fn must return {expected}, with metrics a dict of names, not {what}. {hint}")
    reserved = [name for name in metrics if name in RESERVED_METRICS]
    if reserved:
        raise ValueError(f"loss_fn: the metric name {reserved[0]!r} is reserved. Choose another.")
    loss = as_mean(parts[0], weight, "the loss")
    metrics = {name: as_mean(x, weight, f"the metric {name!r}") for name, x in metrics.items()}
    model_state = to_arrays(parts[2]) if has_state else state.model_state
    return loss, metrics, model_state
