"""Distributed training of any Equinox model: two sharding rules, three functions, pure steps."""

import importlib
from typing import TYPE_CHECKING, Any

from redco_eqx import errors, layers, types
from redco_eqx._birth import init_model
from redco_eqx._checkpoint.checkpoints import Checkpoints, save
from redco_eqx._checkpoint.record import list_checkpoints
from redco_eqx._checkpoint.restore import restore
from redco_eqx._data.batches import batches
from redco_eqx._data.data import Data, Stream
from redco_eqx._distributed.initialize import initialize_distributed
from redco_eqx._sharding.mesh import batch_sharding, make_mesh
from redco_eqx._sharding.rules import explain, shard_rules
from redco_eqx._step.init import init_state
from redco_eqx._step.state import TrainState
from redco_eqx._step.steps import eval_step, jit_step, predict_step, train_step
from redco_eqx._step.window import skip_nonfinite
from redco_eqx._training.course import Change
from redco_eqx._training.evaluation import Evaluation, evaluate, predict
from redco_eqx._training.fit import fit, num_train_steps
from redco_eqx._training.loggers import ConsoleLogger, JSONLLogger, TensorBoardLogger
from redco_eqx._tree import by_path, cast, from_arrays, to_arrays
from redco_eqx._types import Mean

if TYPE_CHECKING:
    from redco_eqx._compiled.communication import communication
    from redco_eqx._planning.plan import plan

_ON_DEMAND = {"communication": "_compiled.communication", "plan": "_planning.plan"}


def __getattr__(name: str) -> Any:
    """Import what most programs do not need when it is asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)


__all__ = [
    "Change",
    "Checkpoints",
    "ConsoleLogger",
    "Data",
    "Evaluation",
    "JSONLLogger",
    "Mean",
    "Stream",
    "TensorBoardLogger",
    "TrainState",
    "batch_sharding",
    "batches",
    "by_path",
    "cast",
    "communication",
    "errors",
    "eval_step",
    "evaluate",
    "explain",
    "fit",
    "from_arrays",
    "init_model",
    "init_state",
    "initialize_distributed",
    "jit_step",
    "layers",
    "list_checkpoints",
    "make_mesh",
    "num_train_steps",
    "plan",
    "predict",
    "predict_step",
    "restore",
    "save",
    "shard_rules",
    "skip_nonfinite",
    "to_arrays",
    "train_step",
    "types",
]
