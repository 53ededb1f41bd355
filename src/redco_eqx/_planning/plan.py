"""`plan`: whether a step fits on devices that need not be there, and on which mesh."""

import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._compiled.hlo import Buffer
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._dataflow.tracing import trace_step
from redco_eqx._planning.memory import memory_of, num_flops, remembered
from redco_eqx._planning.report import MeshPlan
from redco_eqx._planning.targets import Device, Target, find_target
from redco_eqx._planning.trial import Candidate, Choice, Option, Trial, attempt, gib, may_fit, meshes, variants
from redco_eqx._sharding.mesh import AXES, axes_of, context_of, for_use, make_mesh
from redco_eqx._sharding.rules import Decision, Explanation, analysis_of, explain_by
from redco_eqx._step.init import init_state
from redco_eqx._step.state import TrainState
from redco_eqx._tree import is_array, is_trainable, leaves_with_paths
from redco_eqx._types import Batch, LossFn

MakeModel: TypeAlias = Callable[..., PyTree]

RESERVE = 0.05
"""Part of a device's memory for what the compiler does not count: its runtime's, and fragments."""

CLOSE = 1.1
"""Plans that are predicted to be slower than the best by no more than this factor are compiled too."""


@context_of(AbstractMesh((1,), ("none",)), is_traced=False)  # of the meshes that are tried none is set
def plan(
    model: PyTree | MakeModel,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    batch: Batch,
    target: str | Sequence[Device] | None = None,
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
        state = space.state(candidate.choice)
        return attempt(
            candidate,
            state,
            batch,
            _mesh_of(candidate.choice, on),
            loss_fn=loss_fn,
            optimizer=optimizer,
            capacity=capacity,
            compiler_options=on.compiler_options,
        )

    return MeshPlan(on, capacity, search(candidates, compile, capacity, max_compilations))


def search(
    candidates: Sequence[Candidate],
    compile: Callable[[Candidate], Trial],
    capacity: int,
    max_compilations: int,
) -> tuple[Trial, ...]:
    """Compiles candidates, the fastest first, until one fits, and those that are close; the best comes first.

    After those that fit come those that do not, the one that lacks least first, and then what was not compiled.
    """
    tried: list[Trial] = []
    rest: list[Trial] = []
    best = math.inf
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        peaks = [(t.candidate, t.memory.peak) for t in tried if t.memory is not None and t.memory.peak]
        if candidate.state_bytes > capacity:
            need = f"parameters and optimizer state alone take {gib(candidate.state_bytes)} GiB"
            rest.append(Trial(candidate, False, need))
        elif candidate.least_bytes > capacity:
            need = f"with what is kept for the backward pass, evenly spread, {gib(candidate.least_bytes)} GiB"
            rest.append(Trial(candidate, False, need))
        elif not may_fit(candidate, capacity, peaks):
            rest.append(Trial(candidate, False, "the activations alone, evenly spread, are too much"))
        elif len(tried) >= max_compilations:
            rest.append(Trial(candidate, None, "not compiled: max_compilations is reached"))
        elif candidate.seconds > CLOSE * best:
            slower = f"predicted to take {candidate.seconds / best:.2f} times as long"
            rest.append(Trial(candidate, None, slower))
        else:
            try:
                tried.append(compile(candidate))
            except KeyboardInterrupt:
                max_compilations = len(tried)
                rest.append(Trial(candidate, None, "not compiled: interrupted"))
            else:
                best = min(best, candidate.seconds) if tried[-1].fits else best
    return *sorted(tried, key=_rank), *rest


def _rank(trial: Trial) -> tuple[bool, float]:
    peak = math.inf if trial.memory is None or trial.memory.peak is None else float(trial.memory.peak)
    return not trial.fits, trial.candidate.seconds if trial.fits else peak


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
        is_model = any(map(is_array, jax.tree.leaves(model)))
        self._make = None if is_model else model
        self._model = eqx.filter_eval_shape(lambda: model) if is_model else None
        self._models: dict[Hashable, PyTree] = {}
        self._analyses: dict[Hashable, Analysis] = {}
        self._works: dict[Hashable, tuple[float, tuple[Buffer, ...]]] = {}
        self._loss_fn, self._optimizer, self._trainable = loss_fn, optimizer, trainable
        self._batch, self._target = batch, target

    def candidates(
        self, mesh: Mapping[str, int] | None, options: Sequence[Mapping[str, Option]], counts: Sequence[int]
    ) -> list[Candidate]:
        num_devices, rows = len(self._target.devices), self._num_rows()
        if self._make is None and any(options):
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

    def state(self, choice: Choice) -> TrainState:
        """The state of a run, with no number in it, laid out on the target's devices."""
        mesh = _mesh_of(choice, self._target)
        return self._laid_out(choice, self._explained(choice, mesh))

    def _candidates_of(self, choices: Sequence[Choice]) -> Iterator[Candidate]:
        """Yield candidates of choices that differ in the number of microbatches alone."""
        if not choices:
            return
        sizes = choices[0].mesh
        mesh = _abstract_mesh(sizes)
        explained = self._explained(choices[0], mesh)
        state = memory_of(self._laid_out(choices[0], explained), {})
        sent = 0.0 if explained.communication is None else explained.communication.num_bytes
        flops, kept = self._work(choices[0].options, sizes["tensor"])
        chip, share = self._target.chip, _share_split(explained.decisions, sizes)
        own = flops / (sizes["data"] * sizes["fsdp"]) * (share / sizes["tensor"] + 1 - share)
        for choice in choices:
            # Weights that are stored split are gathered for each microbatch.
            in_all = sent * (choice.num_microbatches if sizes["fsdp"] > 1 else 1)
            seconds = own / chip.flops + in_all / chip.bandwidth
            yield Candidate(choice, state.parameters + state.optimizer_state, kept, own, in_all, seconds)

    def _explained(self, choice: Choice, mesh: Mesh | AbstractMesh) -> Explanation:
        analysis = self._analysis(choice.options, choice.mesh["tensor"])
        return explain_by(analysis, self._abstract(choice.options), mesh)

    def _laid_out(self, choice: Choice, explained: Explanation) -> TrainState:
        def lay(x: PyTree, sharding: NamedSharding | None) -> PyTree:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array(x) else x

        model, key = self._abstract(choice.options), jax.random.key(0)
        placed = jax.tree.map(lay, model, explained.shardings)
        return init_state(placed, self._optimizer, key=key, trainable=self._trainable)

    def _abstract(self, options: Mapping[str, Option]) -> PyTree:
        make, key = self._make, _key(options)
        if make is None:
            return self._model
        if key not in self._models:
            self._models[key] = eqx.filter_eval_shape(lambda k: make(k, **options), jax.random.key(0))
        return self._models[key]

    def _analysis(self, options: Mapping[str, Option], tensor: int) -> Analysis:
        """Analyse the program for a size of `tensor`: the sizes of the other axes change nothing in it."""
        key = _key(options), tensor
        if key not in self._analyses:
            mesh = _abstract_mesh({"data": len(self._target.devices) // tensor, "fsdp": 1, "tensor": tensor})
            found = analysis_of(self._abstract(options), mesh, self._loss_fn, self._batch)
            assert found is not None  # there is a program
            self._analyses[key] = found
        return self._analyses[key]

    def _work(self, options: Mapping[str, Option], tensor: int) -> tuple[float, tuple[Buffer, ...]]:
        """The products of a step over all devices, and what it remembers: of any size of `tensor`."""
        key = _key(options)
        if key not in self._works:
            program = self._analysis(options, tensor).traced.jaxpr
            self._works[key] = num_flops(program), remembered(self._on_device(program, options))
        return self._works[key]

    def _on_device(self, program: Jaxpr, options: Mapping[str, Option]) -> Jaxpr:
        """The program as one device of the target would run it: on GPUs attention may keep less."""
        if self._target.compiler != "gpu":
            return program
        mesh = make_mesh(devices=self._target.devices[:1])
        place = NamedSharding(mesh, PartitionSpec())
        return trace_step(self._loss_fn, self._abstract(options), self._batch, place=place).jaxpr

    def _num_rows(self) -> int:
        sizes = {path: x.shape[0] for path, x in leaves_with_paths(self._batch) if is_array(x) and x.shape}
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"plan: the leading dim of batch numbers the examples, but its arrays have {sizes}."
            )
        return next(iter(sizes.values()))


def _mesh_of(choice: Choice, target: Target) -> Mesh:
    data, fsdp, tensor = (choice.mesh[axis] for axis in AXES)
    return make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=target.devices)


def _abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes[a] for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _key(options: Mapping[str, Option]) -> tuple[tuple[str, Option], ...]:
    return tuple(options.items())


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
