"""Train Equinox models on many devices: two sharding rules, three functions, pure
steps."""

import importlib
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
    from redco_eqx._checkpoint.checkpoint_info import (
        list_checkpoints as list_checkpoints,
    )
    from redco_eqx._checkpoint.checkpoints import Checkpoints as Checkpoints
    from redco_eqx._checkpoint.checkpoints import save as save
    from redco_eqx._checkpoint.restore import restore as restore
    from redco_eqx._compiled.communication import communication as communication
    from redco_eqx._data.batches import batches as batches
    from redco_eqx._data.data import Data as Data
    from redco_eqx._data.data import Stream as Stream
    from redco_eqx._distributed.initialize import (
        initialize_distributed as initialize_distributed,
    )
    from redco_eqx._planning.plan import plan as plan
    from redco_eqx._sharded_init import init_model as init_model
    from redco_eqx._sharding.kinds import parameter_kinds as parameter_kinds
    from redco_eqx._sharding.mesh import batch_sharding as batch_sharding
    from redco_eqx._sharding.mesh import make_mesh as make_mesh
    from redco_eqx._sharding.rules import explain as explain
    from redco_eqx._sharding.rules import shard_rules as shard_rules
    from redco_eqx._step.guard import skip_nonfinite as skip_nonfinite
    from redco_eqx._step.init import init_state as init_state
    from redco_eqx._step.state import TrainState as TrainState
    from redco_eqx._step.steps import eval_step as eval_step
    from redco_eqx._step.steps import jit_step as jit_step
    from redco_eqx._step.steps import predict_step as predict_step
    from redco_eqx._step.steps import train_step as train_step
    from redco_eqx._training.evaluation import Evaluation as Evaluation
    from redco_eqx._training.evaluation import evaluate as evaluate
    from redco_eqx._training.evaluation import predict as predict
    from redco_eqx._training.fit import fit as fit
    from redco_eqx._training.fit import num_train_steps as num_train_steps
    from redco_eqx._training.loggers import ConsoleLogger as ConsoleLogger
    from redco_eqx._training.loggers import JSONLLogger as JSONLLogger
    from redco_eqx._training.tensorboard import TensorBoardLogger as TensorBoardLogger

# A name is imported when it is first used, so that a program loads only the modules
# that it needs (https://scientific-python.org/specs/spec-0001). Type checkers and
# editors read the imports above; the program reads this table, because the text of a
# module may not be there (in a zip file, or compiled alone). A test compares the two.
_MODULES = ("errors", "layers", "types")
_NAMES_IN = {
    "_base.protocols": ("Mean", "split_activations"),
    "_base.tree": ("by_path", "cast", "from_arrays", "to_arrays"),
    "_sharded_init": ("init_model",),
    "_checkpoint.checkpoints": ("Checkpoints", "save"),
    "_checkpoint.checkpoint_info": ("list_checkpoints",),
    "_checkpoint.restore": ("restore",),
    "_compiled.communication": ("communication",),
    "_data.batches": ("batches",),
    "_data.data": ("Data", "Stream"),
    "_distributed.initialize": ("initialize_distributed",),
    "_planning.plan": ("plan",),
    "_sharding.kinds": ("parameter_kinds",),
    "_sharding.mesh": ("batch_sharding", "make_mesh"),
    "_sharding.rules": ("explain", "shard_rules"),
    "_step.guard": ("skip_nonfinite",),
    "_step.init": ("init_state",),
    "_step.state": ("TrainState",),
    "_step.steps": ("eval_step", "jit_step", "predict_step", "train_step"),
    "_training.evaluation": ("Evaluation", "evaluate", "predict"),
    "_training.fit": ("fit", "num_train_steps"),
    "_training.loggers": ("ConsoleLogger", "JSONLLogger"),
    "_training.tensorboard": ("TensorBoardLogger",),
}
_HOME_OF = {name: home for home, names in _NAMES_IN.items() for name in names}

# Classes before functions and modules, each in alphabetical order.
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    [*_MODULES, *_HOME_OF], key=lambda name: (name[0].islower(), name)
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOME_OF[name]}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    of_module = [name for name in globals() if name.startswith("__")]
    return sorted([*of_module, *__all__])
