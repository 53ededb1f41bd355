"""Types for annotations: those of arguments and results that a user does not construct
by name."""

from redco_eqx._base.protocols import Batch as Batch
from redco_eqx._base.protocols import CollateFn as CollateFn
from redco_eqx._base.protocols import Examples as Examples
from redco_eqx._base.protocols import Key as Key
from redco_eqx._base.protocols import Logger as Logger
from redco_eqx._base.protocols import LossFn as LossFn
from redco_eqx._base.protocols import Metrics as Metrics
from redco_eqx._base.protocols import OutputFn as OutputFn
from redco_eqx._base.protocols import PredictFn as PredictFn
from redco_eqx._checkpoint.checkpoint_info import CheckpointInfo as CheckpointInfo
from redco_eqx._checkpoint.checkpoints import CheckpointWriter as CheckpointWriter
from redco_eqx._checkpoint.run_record import RunRecord as RunRecord
from redco_eqx._data.batches import Batches as Batches
from redco_eqx._parallel.scan import Remat as Remat
from redco_eqx._planning.plan import MeshPlan as MeshPlan
from redco_eqx._sharding.explanation import Decision as Decision
from redco_eqx._sharding.explanation import Explanation as Explanation
from redco_eqx._sharding.rules import Overrides as Overrides
from redco_eqx._step.step_functions import StepFn as StepFn
from redco_eqx._step.step_functions import TrainStepFn as TrainStepFn
from redco_eqx._step.steps import JittedStep as JittedStep
from redco_eqx._training.course import Hook as Hook
from redco_eqx._training.evaluation import MetricFn as MetricFn
from redco_eqx._training.loggers import History as History
