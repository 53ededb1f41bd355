"""Distributed training of any Equinox model: two sharding rules, three functions, pure steps."""

from redco_eqx._checkpoint import CheckpointWriter, save
from redco_eqx._data import batches
from redco_eqx._distributed import initialize_distributed
from redco_eqx._evaluate import evaluate, predict
from redco_eqx._explain import Explanation, explain
from redco_eqx._fit import fit, num_train_steps
from redco_eqx._interrupt import TrainingInterrupted
from redco_eqx._jit_step import jit_step
from redco_eqx._listing import checkpoints
from redco_eqx._log import ConsoleLogger, JSONLLogger, TensorBoardLogger
from redco_eqx._mesh import batch_sharding, make_mesh
from redco_eqx._parallel import column, row
from redco_eqx._record import CheckpointError, CheckpointInfo, RunRecord
from redco_eqx._restore import restore
from redco_eqx._rules import Decision, ShardingWarning, shard_rules
from redco_eqx._saving import Checkpoints
from redco_eqx._scan_layers import scan_layers
from redco_eqx._state import TrainState, init_model, init_state
from redco_eqx._steps import eval_step, predict_step, train_step
from redco_eqx._training import NonFiniteError
from redco_eqx._tree import cast, from_arrays, to_arrays
from redco_eqx._types import CollateFn, Logger, LossFn, Mean, PredictFn
from redco_eqx._vocabulary import cross_entropy, embed

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointWriter",
    "Checkpoints",
    "CollateFn",
    "ConsoleLogger",
    "Decision",
    "Explanation",
    "JSONLLogger",
    "Logger",
    "LossFn",
    "Mean",
    "NonFiniteError",
    "PredictFn",
    "RunRecord",
    "ShardingWarning",
    "TensorBoardLogger",
    "TrainState",
    "TrainingInterrupted",
    "batch_sharding",
    "batches",
    "cast",
    "checkpoints",
    "column",
    "cross_entropy",
    "embed",
    "eval_step",
    "evaluate",
    "explain",
    "fit",
    "from_arrays",
    "init_model",
    "init_state",
    "initialize_distributed",
    "jit_step",
    "make_mesh",
    "num_train_steps",
    "predict",
    "predict_step",
    "restore",
    "row",
    "save",
    "scan_layers",
    "shard_rules",
    "to_arrays",
    "train_step",
]
