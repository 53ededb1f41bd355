"""`plan`: finds a mesh on which a step fits. The devices need not be present."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from redco_eqx._base.compiler import merges, narrows
from redco_eqx._base.protocols import (
    Batch,
    LossFn,
    SplitActivations,
    check_integers,
    check_positive,
)
from redco_eqx._base.tree import is_array, is_trainable, table
from redco_eqx._dataflow.engine import Analysis, with_activations
from redco_eqx._dataflow.prediction import sent_by_axes
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._planning.memory import Memory, memory_of, num_flops
from redco_eqx._planning.targets import GIB, Target, find_target, gib
from redco_eqx._planning.trial import Option, Trial, attempt, meshes, search
from redco_eqx._sharded_init import trace_arrays
from redco_eqx._sharding.mesh import (
    AXES,
    batch_sharding,
    context_of,
    num_batch_shards,
)
from redco_eqx._sharding.rules import analyse, explain_by
from redco_eqx._step.init import init_state
from redco_eqx._step.steps import train_step

RESERVE = 0.05
"""The part of a device's memory that a step leaves to what the compiler does not count,
such as the runtime and fragments."""


# The result of a plan, which prints as a table.


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh on which a step fits or, if there is none, the mesh that comes closest.
    `str()` gives a table.

    - `target`: the devices.
    - `capacity`: the bytes on each device that a step may use.
    - `trials`: everything that was considered, the best first. If none fits, the best
        is followed by the same trial with microbatches of one row on a device, unless
        its arguments alone are too large.
    """

    target: Target
    capacity: int
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The best trial that fits or, if none fits, the one that comes closest."""
        return self.trials[0]

    @property
    def fits(self) -> bool:
        """True if any trial fits."""
        return self.best.fits is True

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes, for `make_mesh(**plan.mesh)`."""
        return dict(self.best.mesh.shape)

    @property
    def memory(self) -> Memory:
        """The memory on one device. Its `peak` is `None` if nothing was compiled."""
        return self.best.memory

    def __repr__(self) -> str:  # so that a notebook shows the table, too
        best = self.best
        is_compiled = best.fits is not None
        is_state = best.memory.arguments > self.capacity
        how = str(self.target)
        outcome = "fits"
        if not is_compiled:
            how = (
                f"{self.target.name}: {self.target.num_devices} devices, by estimates: "
                "nothing was compiled"
            )
            outcome = "first by estimates"
        if is_state or (is_compiled and not self.fits):
            outcome = "DOES NOT FIT"
        lines = [f"plan for {how}, {gib(self.capacity)} GiB of each for a step"]
        lines += [f"{outcome}: {best}: {best.verdict}", ""]
        lines += table(_of_memory(best.memory, self.capacity), right=(1,))
        if is_state:
            lines += ["", _FOR_STATE]
        elif outcome == "DOES NOT FIT":
            lines += ["", _FOR_STEP]
        if best.communication is not None:
            lines += ["", *str(best.communication).splitlines()]
        return "\n".join([*lines, "", *table(_of_trials(self.trials), right=(1, 2, 3))])


_FOR_STATE = "to hold the state: more devices for fsdp or tensor, or larger ones"
_FOR_STEP = (
    "to use less memory: microbatches (see the table), recomputed layers, more fsdp, "
    "or larger devices"
)


def _of_memory(memory: Memory, capacity: int) -> list[tuple[str, str]]:
    unit = _unit_of(memory)

    def text(num_bytes: int | None) -> str:
        return _in_unit(num_bytes, unit) or "?"

    rows = [
        ("on a device", unit),
        ("parameters", text(memory.parameters)),
        ("optimizer state", text(memory.optimizer_state)),
        ("batch", text(memory.batch)),
    ]
    if memory.temporaries is not None:
        name = f"temporaries (all gradients: {text(memory.gradients)})"
        rows.append((name, text(memory.temporaries)))
    return [*rows, ("peak", f"{text(memory.peak)} of {text(capacity)}")]


def _of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    unit = _unit_of(trials[0].memory)
    rows: list[tuple[str, ...]] = [
        ("considered", "predicted ms", f"peak {unit}", "MiB sent", "outcome")
    ]
    for trial in trials[:MOST]:
        predicted = f"{1000 * trial.seconds:.2f}"
        peak = _in_unit(trial.memory.peak, unit)
        sent = trial.sent_bytes / 2**20
        digits = 0 if sent >= 10 else 2
        rows.append((str(trial), predicted, peak, f"{sent:.{digits}f}", trial.verdict))
    if len(trials) > MOST:
        rows.append((f"and {len(trials) - MOST} more", "", "", "", ""))
    return rows


UNITS = {"MiB": 2**20, "GiB": 2**30}


def _unit_of(memory: Memory) -> str:
    """The unit of a table: MiB for a model that takes less than a tenth of a GiB."""
    num_bytes = memory.arguments if memory.peak is None else memory.peak
    return "GiB" if num_bytes >= GIB / 10 else "MiB"


def _in_unit(num_bytes: int | None, unit: str) -> str:
    return "" if num_bytes is None else f"{num_bytes / UNITS[unit]:.2f}"


MOST = 12
"""The most trials in a table."""


# The search for a plan.


@context_of(AbstractMesh((1,), ("none",)))  # none of the tried meshes is set
def plan(
    model: PyTree | Callable[..., PyTree],
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    batch: Batch,
    target: str | Sequence[Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    options: Mapping[str, Sequence[Option]] | None = None,
    num_microbatches: int | Sequence[int] = 1,
    reduce_once: bool = False,
    trainable: PyTree = is_trainable,
    bytes_per_device: int | None = None,
    max_compilations: int = 6,
    progress: bool = True,
) -> MeshPlan:
    """Find a mesh on which a training step fits, with the compiler for the devices of
    the step.

    It allocates nothing, and needs no device of the target. The TPU compiler comes with
    `python -m pip install "jax[tpu]"`, the GPU compiler with `"jax[cuda12]"`. `plan`
    ranks all meshes that split the batch evenly by the communication and the operations
    of their layouts (`shard_rules` with `loss_fn` and `batch`), at the speeds in the
    chip's data sheet. No measured time has confirmed these ranks yet. `plan` compiles
    the meshes in this order until one fits, and also those close behind that one.
    Meshes that seem too large, judging by the memory of those already compiled, come
    after the rest, and are also compiled if they would be faster. A compiled mesh is
    ranked by the bytes that its program sends.

    ```python
    found = rx.plan(
        make_model,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-4),
        batch=batch,
        target="v5e:4x4",
        options={"remat": ["none", "products", "row_out", "full"]},
        num_microbatches=[1, 2, 4],
    )
    print(found)
    mesh = rx.make_mesh(**found.mesh)
    ```

    **Main arguments:**

    - `model`: a function `(key, **options) -> model`, as for `init_model`, or an
        abstract model.
    - `loss_fn`, `optimizer`: those of the run. A loss from [`split_activations`][] is
        tried with and without it: see `options["split_activations"]` of a trial.
    - `batch`: the batch for `loss_fn`, over all devices. Its arrays may be abstract.
    - `target`: for TPUs, for example `"v4:2x2x4"` or `"v5e:4x4"`; for the GPUs of one
        server, for example `"a100-40g:4"` or `"h100:8"`; a sequence of devices; or
        `None` for the devices of this machine.

    **Other arguments:**

    - `mesh`: the only mesh to try, as sizes by axis, as for `make_mesh`. It is compiled
        however much memory it needs.
    - `options`: the values to try for each option of `model`, by name, the best first.
    - `num_microbatches`: one number, or several to try, see `train_step`.
    - `reduce_once`: see `train_step`.
    - `trainable`: see `init_state`; a function gets abstract arrays.
    - `bytes_per_device`: the bytes of a device that a step may use; by default, 95% of
        its memory.
    - `max_compilations`: the maximum number of candidates to compile. If none fits, the
        one that comes closest is compiled again, with microbatches of one row on a
        device. With 0, nothing is compiled, so a named target needs no compiler, and
        may have any number of devices: meshes are ranked by estimates, and nothing says
        what a step takes beside its arguments.
    - `progress`: true to report each compilation on stderr.

    A Ctrl-C ends the search early, and returns the result so far.

    **Returns:**

    A `MeshPlan`: the best mesh that fits or, if `fits` is false, the one that comes
    closest to fitting. `str()` gives a table.

    **Raises:**

    - `ValueError`: the target is not known, no mesh splits the batch evenly, or the
        batch does not fit the loss.
    - `ImportError` if the target's compiler is not installed, and `max_compilations` is
        not 0.
    """
    check_positive("plan", bytes_per_device=bytes_per_device)
    check_integers("plan", max_compilations=max_compilations)
    if max_compilations < 0:
        raise ValueError(
            f"plan: max_compilations={max_compilations}, but it must be at least 0, to "
            "compile nothing."
        )
    if isinstance(num_microbatches, Iterable):
        counts = tuple(num_microbatches)
    else:
        counts = (num_microbatches,)
    for count in counts:
        check_positive("plan", num_microbatches=count)
    chosen = find_target(target, compiles=max_compilations > 0)
    capacity = bytes_per_device
    if capacity is None:
        capacity = int(chosen.chip.memory * (1 - RESERVE))
    if not capacity:
        kind = chosen.devices[0].device_kind
        raise ValueError(
            f"plan: the memory of devices of kind {kind!r} is not known. Pass "
            'bytes_per_device=, or a target such as "h100:8" or "v5e:4x4".'
        )
    is_model = any(map(is_array, jax.tree.leaves(model)))
    if options and is_model:
        raise ValueError(
            "plan: options need a function that makes the model, but model is a model "
            "already."
        )
    if empty := [name for name, values in (options or {}).items() if not len(values)]:
        raise ValueError(
            f"plan: options[{empty[0]!r}] is empty. List the values to try."
        )
    # `trace_step` refuses a batch with none, or with others.
    num_rows = next(
        (x.shape[0] for x in jax.tree.leaves(batch) if is_array(x) and x.shape), 1
    )
    num_devices = chosen.num_devices
    if mesh is not None and not set(mesh) <= set(AXES):
        raise ValueError(
            f"plan: mesh has axes {list(mesh)}, but each axis must be one of {AXES}."
        )
    sizes: Iterable[dict[str, Any]] = [dict(mesh or {})]
    if mesh is None:
        sizes = meshes(num_devices, num_rows)
    all_meshes = [chosen.mesh(**each) for each in sizes]
    if any(each.size != num_devices for each in all_meshes):
        raise ValueError(
            f"plan: mesh={mesh} must use exactly the target's {num_devices} devices."
        )
    choices = _Choices(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch=batch,
        trainable=trainable,
        target=chosen,
        meshes=[x for x in all_meshes if num_rows % num_batch_shards(x) == 0],
        counts=counts,
        reduce_once=reduce_once,
        num_rows=num_rows,
    )
    options = options or {}
    trials: list[Trial] = []
    for values in itertools.product(*options.values()):
        trials += choices.trials(dict(zip(options, values)))
    if not trials:
        raise ValueError(
            f"plan: no mesh of {num_devices} devices splits a batch of {num_rows} "
            f"evenly into {' or '.join(map(str, counts))} microbatches. Use a batch "
            "size that divides."
        )
    plain = loss_fn.function if isinstance(loss_fn, SplitActivations) else loss_fn

    def compile(trial: Trial) -> Trial:
        if progress:
            line = f"plan: compiling {trial} for {chosen.name}"
            print(line, file=sys.stderr, flush=True)
        function = loss_fn if trial.options.get("split_activations") else plain
        step = functools.partial(
            train_step,
            loss_fn=function,
            optimizer=optimizer,
            reduce_once=reduce_once,
        )
        return attempt(trial, step, capacity)

    found = search(trials, compile, capacity, max_compilations, num_rows)
    return MeshPlan(chosen, capacity, found)


@dataclasses.dataclass(frozen=True, eq=False)
class _Choices:
    """The trials among which a plan chooses, before any is compiled.

    - `model`, `loss_fn`, `optimizer`, `batch`, `trainable`: as for `plan`.
    - `target`: the devices.
    - `meshes`: those that split the batch evenly.
    - `counts`: the numbers of microbatches.
    - `reduce_once`: as for `plan`.
    - `num_rows`: the number of rows of the batch.
    """

    model: PyTree | Callable[..., PyTree]
    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    batch: Batch
    trainable: PyTree
    target: Target
    meshes: Sequence[Mesh | AbstractMesh]
    counts: Sequence[int]
    reduce_once: bool
    num_rows: int

    def trials(self, values: Mapping[str, Option]) -> Iterator[Trial]:
        """Yield the ways to train a model with these values of its options, which is
        traced once."""
        shapes = self._shapes(values)
        traced = trace_step(self.loss_fn, shapes, self.batch)
        flops = num_flops(traced.jaxpr)
        num_devices = self.target.num_devices

        # Independent of how many of the other devices `fsdp` has, if any.
        @functools.cache
        def analyses(tensor: int, has_fsdp: bool) -> list[Analysis]:
            fsdp = num_devices // tensor if has_fsdp else 1
            mesh = self.target.mesh(tensor=tensor, fsdp=fsdp)
            found = [analyse(traced, shapes, mesh)]
            if traced.splits:
                split = with_activations(found[0], mesh)
                found += [] if split is None else [split]
            return found

        for mesh in self.meshes:
            has_fsdp = mesh.shape["fsdp"] > 1
            for i, found in enumerate(analyses(mesh.shape["tensor"], has_fsdp)):
                options = values
                if traced.splits:
                    options = {**values, "split_activations": i == 1}
                yield from self._on_mesh(mesh, options, found, shapes, flops)

    def _shapes(self, values: Mapping[str, Option]) -> PyTree:
        """The model with abstract arrays."""
        if any(map(is_array, jax.tree.leaves(self.model))):
            return self.model
        # Not `eqx.filter_eval_shape`, which makes NumPy arrays abstract: they are not
        # trained.
        make_model = functools.partial(self.model, **values)
        _, arrays, static = trace_arrays(make_model, jax.random.key(0))
        return eqx.combine(arrays, static)

    def _on_mesh(
        self,
        mesh: Mesh | AbstractMesh,
        options: Mapping[str, Option],
        found: Analysis,
        shapes: PyTree,
        flops: float,
    ) -> Iterator[Trial]:
        """Yield a trial for each number of microbatches, in the layout that an analysis
        has found. `flops` are those of a step on all devices."""
        tensor = mesh.shape["tensor"]
        num_shards = num_batch_shards(mesh)
        of_batch = functools.partial(_placed, sharding=batch_sharding(mesh))
        batch = jax.tree.map(of_batch, self.batch)
        explained = explain_by(found, shapes, mesh)
        placed = jax.tree.map(_of_model, shapes, explained.shardings)
        state = init_state(
            placed, self.optimizer, key=jax.random.key(0), trainable=self.trainable
        )
        # `tensor` divides only the work of the operations that it splits.
        work = found.costs.work
        share = sum(work[leaf] for leaf in found.layout) / max(1.0, sum(work))
        own_flops = flops / num_shards * (share / tensor + 1 - share)
        merged = merges(mesh)
        over_tensor, over_batch, gathered = sent_by_axes(
            found, explained.stored, merged=merged, narrowed=narrows(mesh)
        )
        # Microbatches share the activations that `tensor` sends, but each gathers the
        # weights and sums the gradients again. If no weight is stored split, compilers
        # for TPU and GPU sum gradients once for all microbatches.
        is_for_each = mesh.shape["fsdp"] > 1 or not merged
        for count in self.counts:
            if self.num_rows % (num_shards * count) != 0:
                continue
            num_times = count if is_for_each else 1
            # Over `fsdp`, the sums of each microbatch stay.
            num_sums = num_times
            if self.reduce_once and mesh.shape["fsdp"] == 1:
                num_sums = 1
            of_weights = over_batch * num_sums + gathered * num_times
            yield Trial(
                mesh=mesh,
                options=options,
                num_microbatches=count,
                state=state,
                batch=batch,
                target=self.target,
                memory=memory_of(state, batch),
                flops=own_flops,
                predicted_bytes=over_tensor + of_weights,
            )


def _placed(x: PyTree, sharding: NamedSharding | None) -> PyTree:
    if not is_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _of_model(x: PyTree, sharding: NamedSharding | None) -> PyTree:
    """As `_placed`, but an array of NumPy is a constant, as wide as JAX stores it."""
    if isinstance(x, np.ndarray):
        return np.asarray(x, jax.numpy.result_type(x))
    return _placed(x, sharding)
