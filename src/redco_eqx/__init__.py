"""Distributed training of any Equinox model: two sharding rules, three functions, pure steps."""

import importlib
import pathlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redco_eqx import errors as errors
    from redco_eqx import layers as layers
    from redco_eqx import types as types
    from redco_eqx._base.protocols import Mean as Mean
    from redco_eqx._base.protocols import split_activations as split_activations
    from redco_eqx._base.tree import by_path as by_path
    from redco_eqx._base.tree import cast as cast
    from redco_eqx._base.tree import from_arrays as from_arrays
    from redco_eqx._base.tree import to_arrays as to_arrays
    from redco_eqx._birth import init_model as init_model
    from redco_eqx._checkpoint.checkpoints import Checkpoints as Checkpoints
    from redco_eqx._checkpoint.checkpoints import save as save
    from redco_eqx._checkpoint.record import list_checkpoints as list_checkpoints
    from redco_eqx._checkpoint.restore import restore as restore
    from redco_eqx._compiled.communication import communication as communication
    from redco_eqx._data.batches import batches as batches
    from redco_eqx._data.data import Data as Data
    from redco_eqx._data.data import Stream as Stream
    from redco_eqx._distributed.initialize import initialize_distributed as initialize_distributed
    from redco_eqx._planning.plan import plan as plan
    from redco_eqx._sharding.kinds import parameter_kinds as parameter_kinds
    from redco_eqx._sharding.mesh import batch_sharding as batch_sharding
    from redco_eqx._sharding.mesh import make_mesh as make_mesh
    from redco_eqx._sharding.rules import explain as explain
    from redco_eqx._sharding.rules import shard_rules as shard_rules
    from redco_eqx._step.init import init_state as init_state
    from redco_eqx._step.state import TrainState as TrainState
    from redco_eqx._step.steps import eval_step as eval_step
    from redco_eqx._step.steps import jit_step as jit_step
    from redco_eqx._step.steps import predict_step as predict_step
    from redco_eqx._step.steps import train_step as train_step
    from redco_eqx._step.window import skip_nonfinite as skip_nonfinite
    from redco_eqx._training.evaluation import Evaluation as Evaluation
    from redco_eqx._training.evaluation import evaluate as evaluate
    from redco_eqx._training.evaluation import predict as predict
    from redco_eqx._training.fit import fit as fit
    from redco_eqx._training.fit import num_train_steps as num_train_steps
    from redco_eqx._training.loggers import ConsoleLogger as ConsoleLogger
    from redco_eqx._training.loggers import JSONLLogger as JSONLLogger

# The imports above are the only list of the public names. A name is imported when it is first used, so that a
# program loads only the modules that it needs (https://scientific-python.org/specs/spec-0001).
_IMPORT = re.compile(r"^    from (\S+) import \(?\s*(\w+) as", re.MULTILINE)
_HOMES = {name: home for home, name in _IMPORT.findall(pathlib.Path(__file__).read_text("utf-8"))}

__all__ = sorted(_HOMES, key=lambda name: (name[0].islower(), name))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
