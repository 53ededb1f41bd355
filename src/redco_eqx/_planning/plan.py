"""`plan`: whether a step fits on devices that need not be there, and on which mesh."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._base.protocols import Batch, LossFn
from redco_eqx._base.tree import is_array, is_trainable, leaves_with_paths, table
from redco_eqx._compiled.communication import Communication
from redco_eqx._compiled.hlo import Buffer
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.tracing import TracedStep, trace_step
from redco_eqx._planning.memory import Memory, memory_of, num_flops, remembered
from redco_eqx._planning.targets import Target, find_target, gib
from redco_eqx._planning.trial import (
    Candidate,
    Choice,
    Option,
    Trial,
    Variant,
    attempt,
    meshes,
    search,
    variants,
)
from redco_eqx._sharding.mesh import AXES, axes_of, context_of, for_use, make_mesh
from redco_eqx._sharding.rules import Decision, Explanation, analyse, explain_by
from redco_eqx._step.init import init_state
from redco_eqx._step.state import TrainState
from redco_eqx._step.steps import train_step

MakeModel: TypeAlias = Callable[..., PyTree]

RESERVE = 0.05
"""Part of a device's memory for what the compiler does not count: its runtime's, and fragments."""


# A plan as people read it: a table.


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """A mesh on which a step fits, or lacks least. `str()` is a table.

    - `target`: the devices. By the CPU compiler (`target.compiler == "cpu"`) memory is an estimate, and
        `target.margin(mesh)` its margin: what others were measured to ask for.
    - `capacity`: bytes that a step may take of each device.
    - `trials`: what was considered, the best first.
    """

    target: Target
    capacity: int
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial that fits best; if nothing does, the one that lacks least."""
        return self.trials[0]

    @property
    def fits(self) -> bool:
        """True if anything fits."""
        return self.best.fits is True

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes: `make_mesh(**plan.mesh)`."""
        return dict(self.best.candidate.choice.mesh)

    @property
    def options(self) -> dict[str, Option]:
        """The options to call the function with that makes the model."""
        return dict(self.best.candidate.choice.options)

    @property
    def num_microbatches(self) -> int:
        return self.best.candidate.choice.num_microbatches

    @property
    def memory(self) -> Memory | None:
        """On one device; `None` if nothing was compiled."""
        return self.best.memory

    @property
    def communication(self) -> Communication | None:
        """The communication of a step; `None` if it did not compile."""
        return self.best.communication

    def __str__(self) -> str:
        best = self.best
        lines = [f"plan for {self.target}, {gib(self.capacity)} GiB for a step"]
        lines += [f"{'fits' if self.fits else 'DOES NOT FIT'}: {best.candidate.choice}: {best.verdict}"]
        if best.memory is not None:
            margin = self.target.margin(best.candidate.choice.mesh)
            lines += ["", *table(_of_memory(best.memory, self.capacity, margin), right=(1,))]
        if best.arrays and not self.fits:
            lines += ["", "largest arrays of the state, on a device"]
            lines += table([(path, f"{gib(size)} GiB") for path, size in best.arrays], right=(1,))
        if best.buffers:
            lines += ["", "largest values that the step computes, on a device"]
            lines += _of_buffers(best.buffers)
        elif best.candidate.remembered and not self.fits:
            # The compiler gave no program to look into.
            lines += ["", "largest values that are kept for the backward pass, over all devices"]
            lines += _of_buffers(best.candidate.remembered[:5])
        if best.communication is not None:
            lines += ["", *str(best.communication).splitlines()]
        lines += ["", *table(_of_trials(self.trials), right=(1, 2, 3, 4))]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table in a notebook, and in IPython."""
        printer.text(str(self))


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


def _of_buffers(buffers: Sequence[Buffer]) -> list[str]:
    rows = [(f"{gib(b.num_bytes)} GiB", b.shape, os.path.basename(b.source)) for b in buffers]
    return table(rows, right=(0,))


def _of_trials(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("considered", "predicted ms", "peak GiB", "MiB sent", "compiled in s", "outcome")
    ]
    for trial in trials[:MOST]:
        peak = "" if trial.memory is None or trial.memory.peak is None else gib(trial.memory.peak)
        sent = "" if trial.communication is None else f"{trial.communication.total.sent_bytes / 2**20:.0f}"
        seconds = f"{trial.seconds:.1f}" if trial.seconds else ""
        milliseconds = f"{1000 * trial.candidate.seconds:.2f}"
        rows.append((str(trial.candidate.choice), milliseconds, peak, sent, seconds, trial.verdict))
    if len(trials) > MOST:
        rows.append((f"and {len(trials) - MOST} more", "", "", "", "", ""))
    return rows


MOST = 12
"""So many trials are in a table."""


# The search for one.


@context_of(AbstractMesh((1,), ("none",)), is_traced=False)  # of the meshes that are tried none is set
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
    """Find a mesh on which a training step fits, by the compiler of the devices it is for.

    Nothing is allocated, and no device of the target is needed: the TPU compiler comes with
    `python -m pip install "jax[tpu]"`, that for GPUs with `"jax[cuda12]"`. All meshes that split the batch
    evenly are ranked by what their layouts (`shard_rules` with `loss_fn` and `batch`) send and compute, at the
    speeds on the chip's data sheet; no measured time has confirmed these ranks yet. Those that can fit are
    compiled in this order, until one does, and those close behind it.

    ```python
    found = rx.plan(make_model, loss_fn=loss_fn, optimizer=optax.adamw(1e-4), batch=batch, target="v5e:4x4",
                    options={"remat": ["none", "row_out", "full"]}, num_microbatches=[1, 2, 4])
    print(found)
    mesh = rx.make_mesh(**found.mesh)
    ```

    **Main arguments:**

    - `model`: a function `(key, **options) -> model`, as for `init_model`, or an abstract model.
    - `loss_fn`, `optimizer`: those of the run.
    - `batch`: what `loss_fn` is given, over all devices; abstract will do.
    - `target`: `"v4:2x2x4"`, `"v5e:4x4"` or the like for TPUs; `"a100-40g:4"`, `"h100:8"` or the like for the
        GPUs of one server; devices; or nothing, for those of this machine.

    **Other arguments:**

    - `mesh`: only this one: sizes by axis, as for `make_mesh`.
    - `options`: values that `model` may be called with, by name, the best first.
    - `num_microbatches`: see `train_step`; one, or several to choose from.
    - `trainable`: see `init_state`.
    - `bytes_per_device`: of memory, in place of what the target has.
    - `reserve`: which part of that to leave free.
    - `estimate`: compile for as many virtual CPU devices in the target's place. See `MeshPlan.target`.
    - `max_compilations`: at most so many candidates are compiled.
    - `progress`: whether to say on stderr what is compiled. A Ctrl-C returns what is known by then.

    **Returns:**

    A `MeshPlan`: the best that fits, or, with `fits` false, the one that lacks least. `str()` is a table.

    **Raises:**

    - `ValueError`: a target that is not known, no mesh that splits the batch, a batch or a loss that do not fit
        each other.
    - `ImportError` if the target's compiler is not installed.
    """
    if max_compilations < 1:
        raise ValueError(f"plan: max_compilations={max_compilations}, but it must be positive.")
    if not 0 <= reserve < 1:
        raise ValueError(f"plan: reserve={reserve}, but it must be a part of the memory: in [0, 1).")
    on = find_target(target, bytes_per_device=bytes_per_device, estimate=estimate)
    space = _Space(model, loss_fn, optimizer, batch, trainable, on)
    counts = (num_microbatches,) if isinstance(num_microbatches, int) else tuple(num_microbatches)
    candidates = space.candidates(mesh, variants(options or {}), counts)
    capacity = int(on.chip.memory * (1 - reserve))

    def compile(candidate: Candidate) -> Trial:
        if progress:
            print(f"plan: compiling {candidate.choice} for {on.name}", file=sys.stderr, flush=True)
        data, fsdp, tensor = (candidate.choice.mesh[axis] for axis in AXES)
        on_mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=on.devices)
        state = space.state(candidate.choice, on_mesh)
        step = functools.partial(train_step, loss_fn=loss_fn, optimizer=optimizer)
        return attempt(candidate, state, batch, on_mesh, step, capacity, on.compiler_options)

    return MeshPlan(on, capacity, search(candidates, compile, capacity, max_compilations))


class _Space:
    """The choices of a plan, and what is known of them before anything is compiled."""

    def __init__(
        self,
        model: PyTree | MakeModel,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        trainable: PyTree,
        target: Target,
    ):
        self._is_model = any(map(is_array, jax.tree.leaves(model)))
        self._make = (lambda key: model) if self._is_model else model
        self._loss_fn, self._optimizer, self._trainable = loss_fn, optimizer, trainable
        self._batch, self._target = batch, target
        # Of each variant of the model once, and of each size of `tensor`.
        self._abstract = functools.cache(self._abstract_of)
        self._traced = functools.cache(self._trace)
        self._analysis = functools.cache(self._analyse)
        self._work = functools.cache(self._count)

    def candidates(
        self, mesh: Mapping[str, int] | None, options: Sequence[Mapping[str, Option]], counts: Sequence[int]
    ) -> list[Candidate]:
        num_devices, rows = len(self._target.devices), self._num_rows()
        if self._is_model and any(options):
            raise ValueError("plan: options are for a function that makes the model, but model is one.")
        for count in counts:
            if count < 1:
                raise ValueError(f"plan: num_microbatches={count}, but it must be positive.")
        sizes = list(meshes(num_devices, rows)) if mesh is None else [_sizes(mesh, num_devices)]
        found = []
        for size, variant in itertools.product(sizes, options):
            shards = size["data"] * size["fsdp"]
            choices = [Choice(size, variant, n) for n in counts if rows % (shards * n) == 0]
            found += self._candidates_of(choices)
        if not found:
            raise ValueError(
                f"plan: no mesh of {num_devices} devices splits a batch of {rows} evenly into "
                f"{' or '.join(map(str, counts))} microbatches. Use a batch size that divides."
            )
        return found

    def state(self, choice: Choice, mesh: Mesh) -> TrainState:
        """The state of a run, with no number in it, laid out on the target's devices."""
        return self._laid_out(choice, self._explained(choice, mesh))

    def _candidates_of(self, choices: Sequence[Choice]) -> Iterator[Candidate]:
        """Yield candidates of choices that differ in the number of microbatches alone."""
        if not choices:
            return
        sizes = choices[0].mesh
        explained = self._explained(choices[0], _abstract_mesh(sizes))
        state = memory_of(self._laid_out(choices[0], explained), {})
        sent = 0.0 if explained.communication is None else explained.communication.num_bytes
        flops, kept = self._work(choices[0].variant)
        chip, share = self._target.chip, _share_split(explained.decisions, sizes)
        own = flops / (sizes["data"] * sizes["fsdp"]) * (share / sizes["tensor"] + 1 - share)
        for choice in choices:
            # Weights that are stored split are gathered for each microbatch.
            in_all = sent * (choice.num_microbatches if sizes["fsdp"] > 1 else 1)
            seconds = own / chip.flops + in_all / chip.bandwidth
            yield Candidate(choice, state.parameters + state.optimizer_state, kept, own, in_all, seconds)

    def _explained(self, choice: Choice, mesh: Mesh | AbstractMesh) -> Explanation:
        analysis = self._analysis(choice.variant, choice.mesh["tensor"])
        return explain_by(analysis, self._abstract(choice.variant), mesh)

    def _laid_out(self, choice: Choice, explained: Explanation) -> TrainState:
        def lay(x: PyTree, sharding: NamedSharding | None) -> PyTree:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array(x) else x

        placed = jax.tree.map(lay, self._abstract(choice.variant), explained.shardings)
        return init_state(placed, self._optimizer, key=jax.random.key(0), trainable=self._trainable)

    def _abstract_of(self, variant: Variant) -> PyTree:
        return eqx.filter_eval_shape(lambda key: self._make(key, **dict(variant)), jax.random.key(0))

    def _trace(self, variant: Variant) -> TracedStep:
        return trace_step(self._loss_fn, self._abstract(variant), self._batch)

    def _analyse(self, variant: Variant, tensor: int) -> Analysis:
        """Analyse the program for a size of `tensor`: the sizes of the other axes change nothing in it."""
        mesh = _abstract_mesh({"data": len(self._target.devices) // tensor, "fsdp": 1, "tensor": tensor})
        return analyse(self._traced(variant), self._abstract(variant), mesh)

    def _count(self, variant: Variant) -> tuple[float, tuple[Buffer, ...]]:
        """The products of a step over all devices, and what it remembers."""
        program = placed = self._traced(variant).jaxpr
        if self._target.compiler == "gpu":  # attention may keep less there
            place = NamedSharding(make_mesh(devices=self._target.devices[:1]), PartitionSpec())
            placed = trace_step(self._loss_fn, self._abstract(variant), self._batch, place=place).jaxpr
        return num_flops(program), remembered(placed)

    def _num_rows(self) -> int:
        sizes = {path: x.shape[0] for path, x in leaves_with_paths(self._batch) if is_array(x) and x.shape}
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"plan: the leading dim of batch numbers the examples, but its arrays have {sizes}."
            )
        return next(iter(sizes.values()))


def _abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes[a] for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _sizes(mesh: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """All three sizes of a mesh that was asked for."""
    unknown = [name for name in mesh if name not in AXES]
    if unknown:
        raise ValueError(f"plan: mesh has axes {unknown}, but a mesh has {AXES}.")
    inner = mesh.get("tensor", 1) * mesh.get("fsdp", 1)
    sizes = {"data": num_devices // inner, "fsdp": 1, "tensor": 1, **mesh}
    if math.prod(sizes.values()) != num_devices:
        raise ValueError(f"plan: mesh={dict(mesh)} is of other than the target's {num_devices} devices.")
    return sizes


def _share_split(decisions: Mapping[str, Decision], mesh: Mapping[str, int]) -> float:
    """Return the part of the model's bytes that `tensor` splits for use: of the work about the same."""
    shards = {path: math.prod(mesh[axis] for axis in axes_of(d.spec)) for path, d in decisions.items()}
    whole = {path: d.bytes_per_device * shards[path] for path, d in decisions.items()}
    split = sum(whole[path] for path, d in decisions.items() if "tensor" in axes_of(for_use(d.spec)))
    return split / max(1, sum(whole.values()))
