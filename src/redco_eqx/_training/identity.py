"""The identity of a run: facts that distinguish it from other runs, and reveal a
process that differs.

The facts are about its state, functions and examples. `identify` finds those of state
and examples before a run begins or continues, and `with_programs` those of the
functions when the first batch is there. They are compared between processes before the
first step, saved with every checkpoint, and compared again when a run continues.
"""

import contextlib
import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from redco_eqx._base.jaxprs import program_digest
from redco_eqx._base.protocols import Batch, CollateFn, Examples, LossFn
from redco_eqx._base.tree import first_few, leaves_with_paths
from redco_eqx._base.warn import warn
from redco_eqx._checkpoint.arrays import as_saved, to_names
from redco_eqx._checkpoint.run_record import Identity, LogRow, RunRecord
from redco_eqx._data.checksums import checksum
from redco_eqx._distributed.consensus import Facts, agree, is_shared
from redco_eqx._sharding.mesh import axis_size
from redco_eqx._sharding.pieces import (
    Starts,
    indices,
    mix,
    over_pieces,
    piece_checksum,
    summed,
)
from redco_eqx._step.optimizer import update
from redco_eqx._step.passes import on_arrays
from redco_eqx._step.state import TrainState, state_mesh
from redco_eqx._step.step_functions import TrainStepFn
from redco_eqx._training.program import reduces_once

_Checksums: TypeAlias = dict[str, dict[str, int]]
_EXAMPLES = "train_examples"
_BATCHES = "the batches of collate_fn"
_NUM_SUMS = 4
_NUM_DRAWN = 2**16  # elements of an array
_TOLERANCE = 1e-3
# Examples.
_NUM_FIRST = 16
_NUM_SPREAD = 16
_NUM_COLLATED = 8


def identify(
    state: TrainState,
    examples: Examples | None,
    arguments: Facts,
    *,
    collate_fn: CollateFn,
) -> Identity:
    """Compute the identity of the run that begins with `state`. All processes must call
    it, and get the same.

    Takes one pass over the model, and reads at most 32 examples twice. With several
    processes, it also calls `collate_fn` twice on 8 examples.

    **Arguments:**

    - `examples`: those of the first epoch; `None` for a stream, which is not read.
    - `arguments`: those of `fit`. They are compared between processes, but not saved.

    **Returns:** Plain JSON: `key` (hexadecimal), `parameters` (see `parameter_sums`),
    `examples` (`{index: checksum}`), and `changing`: the names of what differed between
    the two readings, and so is not compared.

    Raises `ValueError`, naming the first difference, if the processes do not all have
    the same identity.
    """
    mesh = state_mesh(state)
    key = (
        jax.device_get(jnp.copy(jax.random.key_data(state.key)).addressable_data(0))
        .tobytes()
        .hex()
    )
    seen = () if examples is None else examples
    found, changing = _look_twice(seen, collate_fn if is_shared(mesh) else None)
    sample = found[_EXAMPLES]
    rows = found[_BATCHES]
    if is_shared(mesh):
        layout = {
            name: (x.shape, str(x.dtype), str(x.sharding))
            for name, x in to_names(state).items()
        }
        facts = {
            "the mesh": str(mesh.shape),
            **arguments,
            "what changes by itself": str(changing),
        }
        facts |= {
            f"the checksum of train_examples[{i}]": f"{x:08x}"
            for i, x in sample.items()
        }
        facts |= {
            f"the checksum of collate_fn's {path or 'batch'}": f"{x:08x}"
            for path, x in rows.items()
        }
        facts["the checksum of the state's shapes and layout"] = (
            f"{zlib.crc32(repr(layout).encode()):08x}"
        )
        agree(mesh, "fit", {**facts, "the key of the state": key})
        compare_states(state, "The processes began with different ones")
    return {
        "key": key,
        "parameters": parameter_sums(state).tolist(),
        "examples": sample,
        "changing": changing,
    }


def with_programs(
    run: RunRecord,
    source: object,
    state: TrainState,
    batch: Batch,
    functions: dict[str, Any],
) -> RunRecord:
    """Add the digests of the functions (see `programs_of`) to the identity of a run.
    Warn about those that differ from the digests of the run so far, which continues
    from the checkpoint `source`."""
    before = run.identity
    programs = programs_of(state, batch, **functions)
    changed = _changed(before, programs)
    if changed:
        warn(
            f"fit: {' and '.join(changed)} of this call "
            f"compute{'s' * (len(changed) == 1)} something different from the run so "
            f"far, which continues from {source}."
        )
    others = {name: x for name, x in before.items() if name != "step_fn"}
    return dataclasses.replace(run, identity={**others, **programs})


def _changed(before: Identity, programs: Mapping[str, str]) -> list[str]:
    """Name the functions whose digests differ from those of the run so far. An empty
    digest is not known."""
    if "loss_fn" not in before:
        return []
    unknown = ("", None)
    changed = [
        name
        for name in ("loss_fn", "optimizer")
        if before.get(name) not in unknown
        and programs[name] not in unknown
        and before[name] != programs[name]
    ]
    # The digest of a step covers the loss and the optimizer that it calls, so it says
    # something of its own only if they are the same. `train_step` has no digest.
    was = before.get("step_fn")
    now = programs.get("step_fn")
    if not changed and was != now and "" not in (was, now):
        return ["step_fn"]
    return changed


def programs_of(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    step_fn: TrainStepFn | None = None,
) -> dict[str, str]:
    """Compute digests of the loss and optimizer programs, and of the user's own step,
    traced on one device for a batch of 8 rows like this one.

    A digest is empty if the function cannot be traced in this way.
    """

    def optimize(params: dict[str, Array], opt_state: Any) -> Any:
        loss = jnp.zeros(())
        # Without `optimizer.init`: a run that continues has its state, and with it the
        # hyperparameters.
        return update(
            optimizer, params, opt_state, params, loss, lambda params: (loss, params)
        )

    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), batch
    )
    arrays = state.params, state.frozen, state.model_state
    digests = {
        "loss_fn": _traced(on_arrays(state, loss_fn), *arrays, rows, state.key),
        "optimizer": _traced(optimize, state.params, state.opt_state),
    }
    if step_fn is not None:
        step = functools.partial(
            step_fn,
            loss_fn=loss_fn,
            optimizer=optimizer,
            num_microbatches=1,
            shardings=None,
        )
        digest = _traced(step, state, rows)
        if digest and reduces_once(step_fn):
            # The loss is called for each data shard by itself, with a key of its own.
            num_shards = axis_size(state_mesh(state), "data")
            digest += f", for each of {num_shards} data shards"
        digests["step_fn"] = digest
    return digests


def compare_states(state: TrainState, reason: str) -> None:
    """Compare all copies of a state's arrays, and wait. All processes must call it.
    Raises as `compare_copies` does."""
    if is_shared(state_mesh(state)):
        compare_copies(as_saved(to_names(state)), reason)()


def compare_copies(
    arrays: Mapping[str, Any], reason: str, seconds: float = 0.0
) -> Callable[[], LogRow]:
    """Begin to compare the copies of arrays on all devices. All processes must call it;
    it does not wait.

    Return a function that waits, and raises `ValueError` if copies of an array differ.
    It returns the process with the most `seconds`, and by how many these are more than
    the least, for the row of the log.
    """
    own = np.array([seconds, jax.process_index(), 0], np.float32).view(np.uint32)
    of_pieces = over_pieces(piece_checksum, arrays, own)

    def wait() -> LogRow:
        found = of_pieces()
        names = [
            name for name, (every, first) in found.items() if np.any(every != first)
        ]
        if names:
            raise ValueError(
                f"{first_few(names)} should be the same on the devices of all "
                f"processes, but differ. {reason}. Give each process the same key, "
                "weights, examples and functions, and change the state alike."
            )
        of_devices = found[""][0].view(np.float32).reshape(-1, 3).tolist()
        most, process, _ = max(of_devices)
        least, *_ = min(of_devices)
        return {
            "train/slowest_process": process,
            "train/slowest_by_seconds": most - least,
        }

    return wait


def what_differs(before: Identity, now: Identity) -> list[str]:
    """Name the differences between a run and an earlier one, if that has an identity.

    Compare parameters with a tolerance of 1e-3, because a different mesh or compiler
    may change the last bits.
    """
    if not before:
        return []
    found = ["another key"] if before["key"] != now["key"] else []
    ours, theirs = (np.asarray(identity["parameters"]) for identity in (now, before))
    if not np.all(np.abs(ours - theirs) <= _TOLERANCE):
        found.append("other initial parameters")
    here = now["examples"]
    there = before.get("examples")
    if here and there and here != there:
        index = next(i for i in {**here, **there} if here.get(i) != there.get(i))
        is_order = sorted(here.values()) == sorted(there.values())
        found.append(
            f"another {'order of the examples' if is_order else 'example'}: "
            f"train_examples[{index}]"
        )
    return found


def parameter_sums(state: TrainState) -> Float[np.ndarray, "n"]:
    """Compute eight sums over the model's floating arrays. Four depend on their
    directions, and four on their scales.

    Takes `sum(sign * x) / norm(x)` over a sample of the elements of each array `x`. The
    index of an element alone decides its signs and whether it is in the sample. The sum
    is of order 1 for any random array, and accurate to 1e-6. The scale is
    `log(norm(x))`.
    """
    model = {
        name: x
        for name, x in to_names(state).items()
        if name.startswith("model/")
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and x.size > 0
    }
    total = np.zeros((2, _NUM_SUMS))
    for name, (*sums, square) in zip(model, summed(_projections, model).tolist()):
        signs = 1 - 2 * ((zlib.crc32(name.encode()) >> np.arange(_NUM_SUMS)) & 1)
        norm = np.sqrt(square or 1.0)
        total += signs * np.stack(
            [np.asarray(sums) / norm, np.full(_NUM_SUMS, np.log(norm))]
        )
    return total.ravel()


def _traced(function: Callable[..., Any], *arguments: Any) -> str:
    """Compute the digest of a function of arrays on no mesh. It is empty if the
    function cannot be traced."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace of the step gives the same warnings
        return program_digest(jax.make_jaxpr(function)(*abstract))
    return ""


def compare_examples(where: str, mesh: Mesh, examples: Examples) -> None:
    """Compare some of the examples between the processes of `mesh`, unless they change
    with each reading.

    Raises as [`agree`][] does.
    """
    found, _ = _look_twice(examples, None)
    facts = {
        f"the checksum of examples[{i}]": f"{x:08x}"
        for i, x in found[_EXAMPLES].items()
    }
    agree(mesh, where, {"len(examples)": str(len(examples)), **facts})


def _look_twice(
    examples: Examples, collate_fn: CollateFn | None
) -> tuple[_Checksums, list[str]]:
    """Return the result of `_look` without those parts that differ at a second look,
    and name these."""
    first, second = (_look(examples, collate_fn) for _ in range(2))
    changing = [name for name in first if first[name] != second[name]]
    return {**first, **{name: {} for name in changing}}, changing


def _look(examples: Examples, collate_fn: CollateFn | None) -> _Checksums:
    """Compute checksums of some examples by index (the first ones and others), and of
    each leaf of the batch that `collate_fn` makes from some of them.

    Leave out examples and batches that raise an error here. They end the run when
    training reaches them.
    """
    spread = np.linspace(0, len(examples) - 1, _NUM_SPREAD).astype(int).tolist()
    sample = {}
    rows = {}
    for i in sorted({*range(min(len(examples), _NUM_FIRST)), *spread}):
        with contextlib.suppress(Exception):
            sample[str(i)] = checksum(examples[i])
    with contextlib.suppress(Exception):
        if collate_fn is not None and sample:
            batch = collate_fn([examples[int(i)] for i in list(sample)[:_NUM_COLLATED]])
            rows = {path: checksum(x) for path, x in leaves_with_paths(batch)}
    return {_EXAMPLES: sample, _BATCHES: rows}


def _projections(x: Array, starts: Starts, shape: tuple[int, ...]) -> Float[Array, "n"]:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    x = x.astype(jnp.float32)
    hashes = mix(indices(x.shape, starts, shape))
    # Few enough elements for float32 to sum them well in any order, even if the array
    # is large.
    size = max(1, int(np.prod(shape, dtype=np.float64)))
    is_drawn = mix(hashes) <= jnp.uint32(int(min(1, _NUM_DRAWN / size) * (2**32 - 1)))
    x = jnp.where(is_drawn & jnp.isfinite(x), x, 0)
    signs = [jnp.where((hashes >> i) & 1, -1, 1) for i in range(_NUM_SUMS)]
    return jnp.stack([*(jnp.sum(sign * x) for sign in signs), jnp.sum(x * x)])
