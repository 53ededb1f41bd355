"""Errors and warnings that are raised by name."""

from redco_eqx._checkpoint.record import CheckpointError, CheckpointFormatError
from redco_eqx._sharding.mesh import ShardingWarning
from redco_eqx._training.endings import NonFiniteError, TrainingInterrupted

__all__ = [
    "CheckpointError",
    "CheckpointFormatError",
    "NonFiniteError",
    "ShardingWarning",
    "TrainingInterrupted",
]
