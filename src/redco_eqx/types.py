"""Types that results and annotations have: what is taken and returned, but not made by name."""

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
from redco_eqx._checkpoint.record import CheckpointInfo
from redco_eqx._checkpoint.runs import RunRecord
from redco_eqx._data.batches import Batches
from redco_eqx._planning.plan import MeshPlan
from redco_eqx._sharding.rules import Decision, Explanation
from redco_eqx._step.steps import JittedStep
from redco_eqx._step.window import StepFn
from redco_eqx._training.course import Hook
from redco_eqx._training.evaluation import MetricFn
from redco_eqx._training.loggers import History

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
