"""A warning about updates that rounding loses, where trained arrays have few bits."""

from collections.abc import Mapping
from typing import Any

import jax

from redco_eqx._base.protocols import Mean
from redco_eqx._base.tree import first_few
from redco_eqx._base.warn import warn
from redco_eqx._step.window import Window


class LostUpdates:
    """The updates of parameters of fewer than 32 bits that rounding loses, in the first
    rows of the log.

    The first rows are those with an update, because a warm-up may begin with learning
    rates of 0.
    """

    NUM_ROWS = 3

    def __init__(self) -> None:
        self.rows: list[Mean] | None = []  # `None`: the verdict is given

    @property
    def is_complete(self) -> bool:
        """True if enough rows have come, and no verdict was given yet."""
        return self.rows is not None and len(self.rows) >= self.NUM_ROWS

    def add(self, window: Window) -> None:
        """Count the updates in the fetched window of a row."""
        row = window.metrics.get("rounded_away")
        if self.rows is not None and row is not None and row.weight:
            self.rows.append(row)

    def warn(self, params: Mapping[str, Any]) -> None:
        """Warn if most updates of `params` were lost, unless the verdict is already
        given."""
        rows = self.rows
        self.rows = None
        lost = sum(rows or (), Mean(0.0, 0.0))
        if float(lost) <= 0.5 or jax.process_index() != 0:
            return
        narrow = [
            f"{path} ({x.dtype})" for path, x in params.items() if x.dtype.itemsize < 4
        ]
        warn(
            f"fit: rounding loses {float(lost):.0%} of the updates: they are too "
            "small for the trained arrays of fewer than 32 bits, "
            f"{first_few(narrow, most=3)}, which stay the same. Train float32 "
            "parameters, and cast them in the loss: model = rx.cast(model, "
            "np.float32) before init_state (or load float32 arrays), and model = "
            "rx.cast(model, jnp.bfloat16) in loss_fn."
        )
