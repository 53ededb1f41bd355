"""Errors and warnings that a program can catch or filter by name."""

from redco_eqx._checkpoint.run_record import CheckpointError as CheckpointError
from redco_eqx._checkpoint.run_record import (
    CheckpointFormatError as CheckpointFormatError,
)
from redco_eqx._sharding.mesh import ShardingWarning as ShardingWarning
from redco_eqx._training.course import NonFiniteError as NonFiniteError
from redco_eqx._training.course import TrainingInterrupted as TrainingInterrupted
