"""The pieces that `fit` is made of, for a loop of one's own."""

from redco_eqx._data.epochs import Epochs, Place
from redco_eqx._step.state import order_key
from redco_eqx._step.window import StepFn, Window, empty_window, guarded, next_window, window_row
from redco_eqx._training.plan import Due, Every, Plan, due

__all__ = [
    "Due",
    "Epochs",
    "Every",
    "Place",
    "Plan",
    "StepFn",
    "Window",
    "due",
    "empty_window",
    "guarded",
    "next_window",
    "order_key",
    "window_row",
]
