"""Errors and warnings that are raised by name."""

from redco_eqx._checkpoint.runs import CheckpointError, CheckpointFormatError
from redco_eqx._sharding.mesh import ShardingWarning
from redco_eqx._training.course import NonFiniteError, TrainingInterrupted

__all__ = [
    "CheckpointError",
    "CheckpointFormatError",
    "NonFiniteError",
    "ShardingWarning",
    "TrainingInterrupted",
]
