"""Types that results and annotations have: what is taken and returned, but not made by name."""

from typing import TYPE_CHECKING, Any

from redco_eqx._base.protocols import (
    Batch,
    CollateFn,
    Examples,
    Key,
    Logger,
    LossFn,
    Metrics,
    OutputFn,
    PredictFn,
)
from redco_eqx._checkpoint.checkpoints import CheckpointWriter
from redco_eqx._checkpoint.record import CheckpointInfo, RunRecord
from redco_eqx._data.batches import Batches
from redco_eqx._sharding.rules import Decision, Explanation
from redco_eqx._step.steps import JittedStep
from redco_eqx._step.window import StepFn
from redco_eqx._training.course import Hook
from redco_eqx._training.evaluation import MetricFn
from redco_eqx._training.loggers import History

if TYPE_CHECKING:
    from redco_eqx._planning.plan import MeshPlan

__all__ = [
    "Batch",
    "Batches",
    "CheckpointInfo",
    "CheckpointWriter",
    "CollateFn",
    "Decision",
    "Examples",
    "Explanation",
    "History",
    "Hook",
    "JittedStep",
    "Key",
    "Logger",
    "LossFn",
    "MeshPlan",
    "MetricFn",
    "Metrics",
    "OutputFn",
    "PredictFn",
    "RunRecord",
    "StepFn",
]


def __getattr__(name: str) -> Any:
    """Import the planner when its type is asked for."""
    if name != "MeshPlan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from redco_eqx._planning.plan import MeshPlan

    return MeshPlan
