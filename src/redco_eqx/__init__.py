"""Distributed training of any Equinox model: two sharding rules, three functions, pure steps."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redco_eqx import errors, layers, types
    from redco_eqx._base.protocols import Mean
    from redco_eqx._base.tree import by_path, cast, from_arrays, to_arrays
    from redco_eqx._birth import init_model
    from redco_eqx._checkpoint.checkpoints import Checkpoints, save
    from redco_eqx._checkpoint.record import list_checkpoints
    from redco_eqx._checkpoint.restore import restore
    from redco_eqx._compiled.communication import communication
    from redco_eqx._data.batches import batches
    from redco_eqx._data.data import Data, Stream
    from redco_eqx._distributed.initialize import initialize_distributed
    from redco_eqx._planning.plan import plan
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

_NAMES = {
    "_birth": "init_model",
    "_checkpoint.checkpoints": "Checkpoints save",
    "_checkpoint.record": "list_checkpoints",
    "_checkpoint.restore": "restore",
    "_compiled.communication": "communication",
    "_data.batches": "batches",
    "_data.data": "Data Stream",
    "_distributed.initialize": "initialize_distributed",
    "_planning.plan": "plan",
    "_sharding.mesh": "batch_sharding make_mesh",
    "_sharding.rules": "explain shard_rules",
    "_step.init": "init_state",
    "_step.state": "TrainState",
    "_step.steps": "eval_step jit_step predict_step train_step",
    "_step.window": "skip_nonfinite",
    "_training.course": "Change",
    "_training.evaluation": "Evaluation evaluate predict",
    "_training.fit": "fit num_train_steps",
    "_training.loggers": "ConsoleLogger JSONLLogger TensorBoardLogger",
    "_base.tree": "by_path cast from_arrays to_arrays",
    "_base.protocols": "Mean",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: a program loads what it uses."""
    if name in ("errors", "layers", "types"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
