"""`plan`: finds a mesh on which a step fits. The devices need not be present."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from redco_eqx._base.protocols import Batch, LossFn, check_positive
from redco_eqx._base.tree import is_array, is_trainable, leaves_with_paths, table
from redco_eqx._compiled.communication import Communication
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._planning.memory import Memory, largest_arrays, memory_of, num_flops
from redco_eqx._planning.targets import Target, find_target, gib
from redco_eqx._planning.trial import Candidate, Option, Trial, attempt, meshes, search, variants
from redco_eqx._sharding.mesh import AXES, axes_of, axis_size, context_of, for_use, make_mesh
from redco_eqx._sharding.rules import Decision, analyse, explain_by
from redco_eqx._step.init import init_state
from redco_eqx._step.steps import train_step

MakeModel: TypeAlias = Callable[..., PyTree]

RESERVE = 0.05
"""The part of a device's memory for bytes that the compiler does not count: the runtime's, and fragments."""


# The result of a plan, which prints as a table.


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh on which a step fits; if there is none, the mesh on which it lacks the least memory. `str()` is a
    table.

    - `target`: the devices. With the CPU compiler (`target.compiler == "cpu"`) memory is an estimate, and
        `target.margin(mesh)` its margin, as measured against other compilers.
    - `capacity`: bytes of each device that a step may use.
    - `trials`: a trial of each candidate that was considered, the best first.
    """

    target: Target
    capacity: int
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The best trial that fits; if none fits, the one that lacks the least memory."""
        return self.trials[0]

    @property
    def fits(self) -> bool:
        """True if any trial fits."""
        return self.best.fits is True

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes, for `make_mesh(**plan.mesh)`."""
        return dict(self.best.candidate.mesh.shape)

    @property
    def options(self) -> dict[str, Option]:
        """The options for the function that makes the model."""
        return dict(self.best.candidate.options)

    @property
    def num_microbatches(self) -> int:
        return self.best.candidate.num_microbatches

    @property
    def memory(self) -> Memory | None:
        """The memory on one device; `None` if nothing was compiled."""
        return self.best.memory

    @property
    def communication(self) -> Communication | None:
        """The communication of a step; `None` if it did not compile."""
        return self.best.communication

    def __repr__(self) -> str:  # so that a notebook shows the table, too
        best = self.best
        lines = [f"plan for {self.target}, {gib(self.capacity)} GiB for a step"]
        lines += [f"{'fits' if self.fits else 'DOES NOT FIT'}: {best.candidate}: {best.verdict}"]
        if best.memory is not None:
            margin = self.target.margin(self.mesh)
            lines += ["", *table(_of_memory(best.memory, self.capacity, margin), right=(1,))]
        if best.memory is not None and not self.fits:
            lines += ["", "largest arrays of the state, on a device"]
            arrays = largest_arrays(best.candidate.state).items()
            lines += table([(path, f"{gib(size)} GiB") for path, size in arrays], right=(1,))
        if best.communication is not None:
            lines += ["", *str(best.communication).splitlines()]
        lines += ["", *table(_of_trials(self.trials), right=(1, 2, 3, 4))]
        return "\n".join(lines)


def _of_memory(memory: Memory, capacity: int, margin: tuple[float, float] | None) -> list[tuple[str, str]]:
    rows = [
        ("on a device", "GiB"),
        ("parameters", gib(memory.parameters)),
        ("optimizer state", gib(memory.optimizer_state)),
        ("batch", gib(memory.batch)),
    ]
    if memory.temporaries is not None:
        rows.append((f"temporaries (all gradients: {gib(memory.gradients)})", gib(memory.temporaries)))
    peak = "?" if memory.peak is None else gib(memory.peak)
    rows.append(("peak", f"{peak} of {gib(capacity)}"))
    if memory.peak is not None and margin is not None:
        least, most = (gib(int(memory.peak / factor)) for factor in margin[::-1])
        rows.append(("by the devices' own compiler, as measured", f"{least} to {most}"))
    return rows


def _of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("considered", "predicted ms", "peak GiB", "MiB sent", "compiled in s", "outcome")
    ]
    for trial in trials[:MOST]:
        peak = "" if trial.memory is None or trial.memory.peak is None else gib(trial.memory.peak)
        sent = "" if trial.communication is None else f"{trial.communication.total.sent_bytes / 2**20:.0f}"
        seconds = f"{trial.seconds:.1f}" if trial.seconds else ""
        milliseconds = f"{1000 * trial.candidate.seconds:.2f}"
        rows.append((str(trial.candidate), milliseconds, peak, sent, seconds, trial.verdict))
    if len(trials) > MOST:
        rows.append((f"and {len(trials) - MOST} more", "", "", "", "", ""))
    return rows


MOST = 12
"""The most trials in a table."""


# The search for a plan.


@context_of(AbstractMesh((1,), ("none",)))  # none of the meshes that are tried is set
def plan(
    model: PyTree | MakeModel,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    batch: Batch,
    target: str | Sequence[Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    options: Mapping[str, Sequence[Option]] | None = None,
    num_microbatches: int | Sequence[int] = 1,
    trainable: PyTree = is_trainable,
    bytes_per_device: int | None = None,
    reserve: float = RESERVE,
    estimate: bool = False,
    max_compilations: int = 6,
    progress: bool = True,
) -> MeshPlan:
    """Finds a mesh on which a training step fits, with the compiler for the devices of the step.

    Nothing is allocated, and no device of the target is needed. The TPU compiler comes with
    `python -m pip install "jax[tpu]"`, the GPU compiler with `"jax[cuda12]"`. All meshes that split the batch
    evenly are ranked by the communication and the operations of their layouts (`shard_rules` with `loss_fn` and
    `batch`), at the speeds on the chip's data sheet; no measured time has confirmed these ranks yet. `plan`
    compiles them in this order until one fits, and also those close behind that one. Meshes that seem too
    large, judged by the memory of those compiled before, come last.

    ```python
    found = rx.plan(make_model, loss_fn=loss_fn, optimizer=optax.adamw(1e-4), batch=batch, target="v5e:4x4",
                    options={"remat": ["none", "row_out", "full"]}, num_microbatches=[1, 2, 4])
    print(found)
    mesh = rx.make_mesh(**found.mesh)
    ```

    **Main arguments:**

    - `model`: a function `(key, **options) -> model`, as for `init_model`, or an abstract model.
    - `loss_fn`, `optimizer`: those of the run.
    - `batch`: the batch for `loss_fn`, over all devices; its arrays may be abstract.
    - `target`: `"v4:2x2x4"`, `"v5e:4x4"` or the like for TPUs; `"a100-40g:4"`, `"h100:8"` or the like for the
        GPUs of one server; a sequence of devices; or `None` for those of this machine.

    **Other arguments:**

    - `mesh`: the only mesh to try: sizes by axis, as for `make_mesh`.
    - `options`: values to choose from for each option of `model`, by name, the best first.
    - `num_microbatches`: see `train_step`; one number, or several to choose from.
    - `trainable`: see `init_state`.
    - `bytes_per_device`: the memory of a device, instead of that of the target.
    - `reserve`: the part of the memory to leave free.
    - `estimate`: whether to compile for the same number of virtual CPU devices instead of the target. See
        `MeshPlan.target`.
    - `max_compilations`: the most candidates to compile.
    - `progress`: whether to report each compilation on stderr.

    A Ctrl-C ends the search early, and returns the result so far.

    **Returns:**

    A `MeshPlan`: the best that fits, or, with `fits` false, the one that lacks the least memory. `str()` is a
    table.

    **Raises:**

    - `ValueError`: a target that is not known, no mesh that splits the batch, or a batch and a loss that do not
        fit each other.
    - `ImportError` if the target's compiler is not installed.
    """
    check_positive("plan", max_compilations=max_compilations)
    if not 0 <= reserve < 1:
        raise ValueError(f"plan: reserve={reserve}, but it must be a fraction of the memory, in [0, 1).")
    counts = (num_microbatches,) if isinstance(num_microbatches, int) else tuple(num_microbatches)
    for count in counts:
        check_positive("plan", num_microbatches=count)
    on = find_target(target, bytes_per_device=bytes_per_device, estimate=estimate)
    if options and _is_model(model):
        raise ValueError("plan: options need a function that makes the model, but model is a model already.")
    rows = _num_rows(batch)
    if mesh is not None and not set(mesh) <= set(AXES):
        raise ValueError(f"plan: mesh has axes {list(mesh)}, but each axis must be one of {AXES}.")
    sizes = meshes(len(on.devices), rows) if mesh is None else [dict[str, Any](mesh)]
    on_meshes = [make_mesh(**each, devices=on.devices) for each in sizes]
    if any(each.size != len(on.devices) for each in on_meshes):
        raise ValueError(f"plan: mesh={mesh} must use exactly the target's {len(on.devices)} devices.")

    def ways(values: Mapping[str, Option]) -> Iterator[Candidate]:
        """Yields the ways to train a model with these values of its options, which is traced once."""
        make = (lambda key: model) if _is_model(model) else (lambda key: model(key, **values))
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        traced = trace_step(loss_fn, shapes, batch)
        flops = num_flops(traced.jaxpr)

        @functools.cache  # independent of the sizes of the other axes
        def analysis(tensor: int) -> Analysis:
            return analyse(traced, shapes, make_mesh(tensor=tensor, devices=on.devices))

        for mesh in on_meshes:
            data, fsdp, tensor = (mesh.shape[axis] for axis in AXES)
            explained = explain_by(analysis(tensor), shapes, mesh)
            placed = jax.tree.map(_placed, shapes, explained.shardings)
            state = init_state(placed, optimizer, key=jax.random.key(0), trainable=trainable)
            memory, share = memory_of(state, {}), _share_split(explained.decisions, mesh)
            own = flops / (data * fsdp) * (share / tensor + 1 - share)
            sent = 0.0 if explained.communication is None else explained.communication.num_bytes
            for count in counts:
                if rows % (data * fsdp * count) == 0:
                    # Weights that are stored split are gathered for each microbatch.
                    in_all = sent * (count if fsdp > 1 else 1)
                    seconds = own / on.chip.flops + in_all / on.chip.bandwidth
                    held = memory.parameters + memory.optimizer_state
                    yield Candidate(mesh, values, count, state, held, own, in_all, seconds)

    candidates = [found for values in variants(options or {}) for found in ways(values)]
    if not candidates:
        raise ValueError(
            f"plan: no mesh of {len(on.devices)} devices splits a batch of {rows} evenly into "
            f"{' or '.join(map(str, counts))} microbatches. Use a batch size that divides."
        )
    capacity = int(on.chip.memory * (1 - reserve))
    step = functools.partial(train_step, loss_fn=loss_fn, optimizer=optimizer)

    def compile(candidate: Candidate) -> Trial:
        if progress:
            print(f"plan: compiling {candidate} for {on.name}", file=sys.stderr, flush=True)
        return attempt(candidate, step, batch, capacity, on.compiler_options)

    return MeshPlan(on, capacity, search(candidates, compile, capacity, max_compilations))


def _is_model(model: PyTree | MakeModel) -> bool:
    return any(map(is_array, jax.tree.leaves(model)))


def _placed(x: PyTree, sharding: NamedSharding | None) -> PyTree:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array(x) else x


def _num_rows(batch: Batch) -> int:
    sizes = {path: x.shape[0] for path, x in leaves_with_paths(batch) if is_array(x) and x.shape}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"plan: the leading dim of batch counts the examples, but its arrays have {sizes}.")
    return next(iter(sizes.values()))


def _share_split(decisions: Mapping[str, Decision], mesh: Mesh) -> float:
    """Returns the part of the model's bytes that `tensor` splits for use. It splits about the same part of the
    work."""
    whole = {path: d.bytes_per_device * axis_size(mesh, axes_of(d.spec)) for path, d in decisions.items()}
    split = sum(whole[path] for path, d in decisions.items() if "tensor" in axes_of(for_use(d.spec)))
    return split / max(1, sum(whole.values()))
