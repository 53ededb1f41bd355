"""`train_step`, `eval_step`, `predict_step`: pure functions of a state and a batch; and
`jit_step`.

A training step on its way from `fit` to XLA:

1. `fit` (`_training/fit.py`) checks its arguments and builds a `Training`. Its `loop`
   (`_training/loop.py`) takes one batch after the other.
2. For the first batch of each shape, `train_program` (`_training/program.py`) wraps
   `train_step` in `guarded` (`guard.py`: change nothing unless it is finite) and in
   `accumulated` (`window.py`: add the metrics up on the devices), lowers it, and
   compiles it, unless `compile_once` (`compile_cache.py`) has the program already.
3. While JAX traces it, `train_step` below reads the layout from the shardings and
   splits the rows of the batch (`layout.py`).
4. `gradient_of` (`gradient.py`) calls `program_of` (`passes.py`), which makes the
   gradient of the loss a program of plain arrays: `gather.py` gathers weights where
   they are used, then `jax.value_and_grad` differentiates it, `constraints.py` lays out
   its activations if the loss is wrapped in `split_activations`, and `workarounds.py`
   replaces operations that XLA's partitioner gets wrong.
5. The program is called once, or for each microbatch. `update`
   (`optimizer.py`) applies the optimizer. Gradients, parameters and optimizer state
   are constrained to the layout, from which XLA's partitioner (Shardy) derives the
   communication.
6. The loop calls the compiled program with the leaves of the state and with the batch.
   It donates these leaves, but for frozen arrays that the step does not change. It
   keeps the steps that have not finished in `_training/in_flight.py`.

CONTRIBUTING.md tells the whole way, from the batch to the row of the log.

In your own loop, `jit_step` compiles the step. It adds only the correction for the
partitioner and the donation of the state: it neither watches for values that are not
finite nor adds up metrics.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from redco_eqx._base.jaxprs import Program, trace
from redco_eqx._base.protocols import (
    RESERVED_METRICS,
    Batch,
    Key,
    LossFn,
    Mean,
    Metrics,
    PredictFn,
    SplitActivations,
    as_mean,
    check_functions,
    check_takes_model,
)
from redco_eqx._base.tree import (
    AnyArray,
    describe,
    first_few,
    is_array,
    join,
    leaves_with_paths,
    to_arrays,
)
from redco_eqx._base.warn import warn
from redco_eqx._sharding.mesh import context_of, in_own_context, replicated, traced_mesh
from redco_eqx._step.compile_cache import CompilerOptions, checked_options
from redco_eqx._step.gradient import gradient_of
from redco_eqx._step.layout import (
    check_on_mesh,
    constrain,
    mesh_in,
    mesh_of,
    shardings_by_path,
    split_rows,
)
from redco_eqx._step.optimizer import (
    check_optimizer,
    learning_rate_of,
    like_params,
    update,
)
from redco_eqx._step.passed_through import frozen_passed_through
from redco_eqx._step.passes import on_arrays, program_of
from redco_eqx._step.rounding import rounded_away, with_gradient
from redco_eqx._step.state import (
    EVALUATE,
    PREDICT,
    TRAIN,
    TrainState,
    check_alive,
    check_is_one_state,
    check_is_state,
    check_unchanged,
    stream,
)
from redco_eqx._step.workarounds import for_partitioner

# Checks of the value that a loss function returns.


def unpack_loss(
    state: TrainState, output: Any, weight: Any
) -> tuple[Mean, Metrics, dict[str, Array]]:
    """Split the value that `loss_fn` returned into `(loss, metrics, model_state)`."""
    has_state = state.structure[1] is not None
    expected = (
        "(loss, metrics, new_state)" if has_state else "a loss, or (loss, metrics)"
    )
    parts: list[Any] = list(output) if isinstance(output, tuple) else [output]
    hint = (
        'Metrics have names, as in (loss, {"accuracy": x}). The step computes the '
        "gradients."
    )
    if has_state and len(parts) != 3:
        hint = (
            "Its model is the pair (model, eqx.nn.State). Return the new State as well."
        )
    elif not has_state and len(parts) == 3:
        hint = (
            "Return a new_state only if init_state was given the pair (model, "
            "eqx.nn.State)."
        )
    if len(parts) not in ((3,) if has_state else (1, 2)) or isinstance(output, dict):
        what = (
            f"a tuple of {len(parts)}"
            if isinstance(output, tuple)
            else f"a {type(output).__name__}"
        )
        raise ValueError(f"loss_fn must return {expected}, but returned {what}. {hint}")
    metrics = parts[1] if len(parts) > 1 else {}
    if not isinstance(metrics, dict) or not all(
        isinstance(name, str) for name in metrics
    ):
        what = describe(metrics) if is_array(metrics) else type(metrics).__name__
        what += f" of {list(metrics)}" if what == "dict" else ""
        raise ValueError(
            f"loss_fn must return {expected}, with metrics a dict of names, not "
            f"{what}. {hint}"
        )
    if reserved := [name for name in metrics if name in RESERVED_METRICS]:
        raise ValueError(
            f"loss_fn: the metric name {reserved[0]!r} is reserved. Choose another."
        )
    loss = as_mean(parts[0], weight, "the loss")
    metrics = {
        name: as_mean(x, weight, f"the metric {name!r}") for name, x in metrics.items()
    }
    model_state = to_arrays(parts[2]) if has_state else state.model_state
    return loss, metrics, model_state


@in_own_context
def train_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_microbatches: int = 1,
    reduce_once: bool = False,
    shardings: PyTree | None = None,
    reshard_after_forward: bool | None = None,
) -> tuple[TrainState, Metrics]:
    """Update the parameters once. The function is pure and not jitted.

    Use it under [`jit_step`][], or under `jax.jit`, `lax.scan`, `vmap` or `grad`.
    `jit_step` donates the state, and raises an error if the state was donated before.
    Under plain `jax.jit(..., donate_argnums=0)`, some versions of JAX end the process
    with a segmentation fault when such a state is used again.

    The step splits the leading dim of the batch over `data` and `fsdp`, even if you
    have not placed the batch. If the dim does not divide evenly, the step warns. Under
    `vmap`, it leaves out the axes that `spmd_axis_name` names.

    If `shardings` splits arrays over `fsdp`, trained or frozen, each array is gathered
    where the loss first uses it. A `lax.scan` over stacked layers gathers one layer at
    a time, and a `jax.checkpoint` (such as the one in [`scan_layers`][]) gathers again
    for the gradient, so at most one layer is whole (ZeRO-3). If no `jax.checkpoint` in
    the loss reads weights, the whole loss becomes one, which keeps the results of
    matrix products and convolutions (with [`split_activations`][], only if a scan reads
    weights). If a `jax.checkpoint` does read weights, weights that are read outside it
    are gathered once, and kept until the gradient is done. `reshard_after_forward` says
    which gathered weights are kept instead. The gathers have no forward-mode derivative
    (`jax.jvp`, `jax.hessian`).

    The gradient is that of `jax.grad`. For a complex parameter, this is the conjugate
    of the direction in which the loss grows. So conjugate it in the optimizer:
    `optax.chain(optax.stateless(lambda g, _: jax.tree.map( jnp.conj, g)), optimizer)`.

    `loss_fn` is traced once, or twice if [`split_activations`][] leaves its activations
    to the compiler. The step warns, once, about parameters that the loss does
    not depend on.

    ```python
    arguments = dict(loss_fn=loss_fn, optimizer=optimizer, shardings=state.shardings)
    step = partial(rx.train_step, **arguments)
    state, metrics = rx.jit_step(step)(state, batch)
    print(float(metrics["loss"]))
    ```

    **Arguments:**

    - `state`: from `init_state`.
    - `batch`: a PyTree of arrays with the same leading dim.
    - `loss_fn`: see [`LossFn`][]. It gets the model in training mode.
    - `optimizer`: the optimizer that you passed to `init_state`. If its update takes
        them, it also gets `value` (the loss), `grad`, `value_fn` (the loss of this
        batch as a function of the parameters, for a line search) and `grad_fn` (the
        gradient of the loss, for `optax.contrib.sam`).
    - `num_microbatches`: the number `k` of parts that the batch is divided into. It
        must divide the batch. Part `i` holds the rows `i`, `i + k`, `i + 2 k`, ..., on
        every mesh. The weighted gradients of the parts are accumulated in float32. The
        result is that of the whole batch if the loss is a mean or a [`Mean`][] over
        rows, and another one if rows meet in it (a contrastive loss, pairs of rows) or
        in the model's state.
    - `reduce_once`: true to sum gradients over `data` once in a step, and not for each
        microbatch. `loss_fn` is then called for each data shard of each microbatch by
        itself, as it is for microbatches: where rows meet in the loss, the result is
        not that of the whole batch.
        Each shard has a key of its own, so with random numbers the result depends on
        the size of `data`. Under `fsdp`, gradients are still split over it for each
        microbatch. JAX maps the loss by `vmap` over the shards: a `while_loop` runs as
        long as the slowest one needs, and a `cond` computes both branches.
    - `shardings`: `state.shardings`, the layout that the state has; or the tree of
        `shard_rules`, for the model or for the pair `(model, eqx.nn.State)`, to which
        the step then moves the arrays. Parameters, gradients, optimizer state and new
        parameters are constrained to it. Without it, the compiler decides.
    - `reshard_after_forward`: the name and the meaning of PyTorch's FSDP2. `True`:
        gathered weights are split again after use, and gathered again for the gradient.
        `False`: they are kept until the gradient is done, also by `jax.checkpoint`, and
        none is put around the loss; this sends a quarter less, and takes more memory
        for layers in a scan. `None`: as `True`, but on a mesh of CPUs, weights that are
        gathered outside of scans are kept, because the compiler for CPU needs the same
        memory either way.

    **Returns:**

    The new state, and the metrics as [`Mean`][]s: `loss`, the metrics of `loss_fn`,
    `grad_norm` (the global L2 norm before the optimizer), and `learning_rate` if the
    optimizer uses `optax.inject_hyperparams`. If trained arrays have fewer than 32
    bits, `rounded_away` is the share of their elements that have a gradient and an
    update, but stay the same number, because the update is too small for them. Of
    arrays with a million elements or more, it counts a sample: every k-th row or
    column, the same on every mesh. Above a half, most of the training is lost: keep
    float32 parameters, and [`cast`][] them in the loss.

    **Raises:**

    `ValueError` while tracing, in these cases: the loss is not a scalar or a `Mean`; a
    metric has a reserved name; the batch does not divide into the microbatches; under
    `reduce_once`, the model has an `eqx.nn.State`, or the loss lays out an array over
    `data` or cannot be mapped by `vmap`; the state belongs to another optimizer; the
    new state has other shapes or dtypes (statistics of an `eqx.nn.State` that were
    cast, for example); `shardings` does not fit the arrays, or is on another mesh; a
    `jit` is under `jax.set_mesh` of another mesh.
    """
    check_is_one_state(state, "train_step: state")
    check_functions("train_step", loss_fn=loss_fn)
    check_takes_model("train_step", lambda: state.model, loss_fn=loss_fn)
    check_optimizer("train_step", state, optimizer, exactly=False)
    if reduce_once and state.model_state:
        raise ValueError(
            f"train_step: reduce_once=True, but the model has a state "
            f"({first_few(list(state.model_state))}), which data shards by themselves "
            "cannot update together. Pass reduce_once=False."
        )
    layout = None if shardings is None else shardings_by_path(shardings, state)
    params = constrain(state.params, layout)
    key = stream(state, TRAIN)
    mesh = mesh_of(layout, state)
    batch = split_rows(batch, mesh)

    def loss_of(model: Any, batch: Batch, key: Key) -> Any:
        loss, metrics, new_model_state = unpack_loss(
            state, loss_fn(model, batch, key), 1.0
        )
        # Before the scan over microbatches, which would name no array.
        check_unchanged(state, dataclasses.replace(state, model_state=new_model_state))
        return loss.value, (loss, metrics, new_model_state)

    # Traced here, and not in each call: a line search may call it several times.
    differentiate = gradient_of(
        on_arrays(state, loss_of),
        (params, state.frozen, state.model_state, batch, key),
        layout,
        num_microbatches=num_microbatches,
        reduce_once=reduce_once,
        splits=isinstance(loss_fn, SplitActivations),
        reshard=reshard_after_forward,
    )

    def value_and_grad(params: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        found = differentiate(constrain(params, layout))
        return found.loss.value, found.grads

    found = differentiate(params)
    grads, has_gradient = with_gradient(found.grads)
    updates, opt_state = update(
        optimizer, grads, state.opt_state, params, found.loss.value, value_and_grad
    )
    new_params: Any = optax.apply_updates(params, updates)
    model_state = found.model_state
    if layout is not None:
        opt_state = jax.lax.with_sharding_constraint(
            opt_state, like_params(opt_state, params, layout)
        )
        # Place them as `init_state` does. With another split, the next step would be
        # compiled again.
        whole = replicated(next(iter(layout.values())).mesh)
        model_state = jax.lax.with_sharding_constraint(model_state, whole)
    report = {
        "loss": found.loss,
        **found.metrics,
        "grad_norm": as_mean(_global_norm(grads), 1.0, "grad_norm"),
    }
    learning_rate = learning_rate_of(opt_state)
    if learning_rate is not None:
        report["learning_rate"] = as_mean(learning_rate, 1.0, "learning_rate")
    lost = rounded_away(params, new_params, updates, has_gradient)
    if lost is not None:
        report["rounded_away"] = lost
    new_state = dataclasses.replace(
        state,
        params=constrain(new_params, layout),
        model_state=model_state,
        opt_state=opt_state,
        # Stops at the largest number, where + 1 would be negative.
        step=optax.safe_increment(state.step),
    )
    check_unchanged(state, new_state)
    return new_state, report


def _global_norm(grads: dict[str, Array]) -> Array:
    """The L2 norm of all gradients, summed in float32 at least."""
    wide = jax.tree.map(
        lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads
    )
    return optax.tree.norm(wide)


@in_own_context
def eval_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    shardings: PyTree | None = None,
    index: int | Int[AnyArray, ""] | None = None,
) -> Metrics:
    """Compute the loss and metrics of one batch, as [`Mean`][]s that you can add over
    batches.

    The model is in inference mode (`eqx.nn.inference_mode`). If `loss_fn` returns a
    scalar, its weight is the number of examples. The other arguments are those of
    `predict_step`.

    ```python
    step = rx.jit_step(partial(rx.eval_step, loss_fn=loss_fn), donate=False)
    loss = float(step(state, batch)["loss"])
    ```
    """
    check_is_one_state(state, "eval_step: state")
    check_functions("eval_step", loss_fn=loss_fn)
    check_takes_model("eval_step", lambda: state.model, loss_fn=loss_fn)
    size = _num_rows("eval_step", batch)

    def measure(model: Any, batch: Batch, key: Key) -> Metrics:
        loss, metrics, _ = unpack_loss(state, loss_fn(model, batch, key), size)
        return {"loss": loss, **metrics}

    return _infer(state, batch, EVALUATE, index, measure, shardings, loss_fn)


@in_own_context
def predict_step(
    state: TrainState,
    batch: Batch,
    *,
    predict_fn: PredictFn,
    shardings: PyTree | None = None,
    index: int | Int[AnyArray, ""] | None = None,
) -> PyTree[Array]:
    """Compute `predict_fn(model, batch, key)` with the model in inference mode.

    ```python
    step = rx.jit_step(partial(rx.predict_step, predict_fn=predict_fn), donate=False)
    outputs = step(state, batch)
    ```

    **Arguments:**

    - `state`, `batch`, `shardings`: see `train_step`.
    - `predict_fn`: see [`PredictFn`][].
    - `index`: a number that distinguishes the batches that the same state sees (such as
        the step of a rollout), if `predict_fn` draws random numbers. Without it, the
        random numbers are the same for each batch until the next `train_step`.

    **Returns:**

    The outputs of `predict_fn`.

    **Raises:**

    `ValueError` while tracing, naming the leaf, if an output lacks the leading dim of
    the batch.
    """
    check_is_one_state(state, "predict_step: state")
    check_functions("predict_step", predict_fn=predict_fn)
    check_takes_model("predict_step", lambda: state.model, predict_fn=predict_fn)
    size = _num_rows("predict_step", batch)
    outputs = _infer(state, batch, PREDICT, index, predict_fn, shardings, predict_fn)
    if not jax.tree.leaves(outputs):
        raise ValueError("predict_fn returned no array.")
    for path, x in leaves_with_paths(outputs):
        if jnp.shape(x)[:1] != (size,):
            raise ValueError(
                f"predict_fn's output {path or 'array'} has shape {jnp.shape(x)}, but "
                f"its leading dim must be the batch's, {size}. Return one row for each "
                "example."
            )
    return outputs


def _num_rows(where: str, batch: Batch) -> int:
    """The leading dim of a batch. Raises `TypeError`, naming the leaf, if the batch
    does not consist of arrays."""
    x: Any
    path, x = next(iter(leaves_with_paths(batch)), ("", None))
    if not is_array(x) or x.ndim == 0:
        what = (
            describe(x)
            if is_array(x)
            else "nothing"
            if x is None
            else f"a {type(x).__name__}"
        )
        raise TypeError(
            f"{where}: {join('batch', path)} is {what}, but a batch has arrays with a "
            "row for each example, such as collate_fn(examples) makes."
        )
    return x.shape[0]


def _infer(
    state: TrainState,
    batch: Batch,
    tag: int,
    index: int | Int[AnyArray, ""] | None,
    use: Callable[[Any, Any, Key], Any],
    shardings: PyTree | None,
    function: Callable[..., Any],
) -> Any:
    """Compute `use(model, batch, key)`, which calls the user's function, with the model
    in inference mode. The key is that of the `stream` with this tag and index."""
    layout = None if shardings is None else shardings_by_path(shardings, state)
    batch = split_rows(batch, mesh_of(layout, state))

    def run(model: Any, batch: Batch, key: Key) -> Any:
        return use(eqx.nn.inference_mode(model), batch, key)

    arrays = (state.params, state.frozen, state.model_state, batch)
    splits = isinstance(function, SplitActivations)
    program = program_of(
        on_arrays(state, run), (*arrays, state.key), layout, splits=splits
    )
    key = state.key
    if _reads_last_input(program):
        # Few do. To lower what makes a key takes longer than to lower a small model.
        key = stream(state, tag, index)
    return program(*arrays, key)


def _reads_last_input(program: Program) -> bool:
    """True if an operation reads the last input, or if it is returned.

    Unlike for `used`, an operation without a wanted result counts: it may print.
    """
    jaxpr = program.closed.jaxpr
    last = jaxpr.invars[-1]
    readers = [equation.invars for equation in jaxpr.eqns]
    return any(x is last for atoms in (*readers, jaxpr.outvars) for x in atoms)


R = TypeVar("R")


def corrected(step: Callable[..., R]) -> Callable[..., R]:
    """Return the step with the operations replaced that XLA's partitioner gets wrong,
    for a step with gradients of its own."""

    def call(arguments: tuple[Any, ...], named: dict[str, Any]) -> R:
        return step(*arguments, **named)

    def run(*arguments: Any, **named: Any) -> R:
        program = trace(call, arguments, named)
        return for_partitioner(program, traced_mesh(arguments))(arguments, named)

    return run


class JittedStep(Generic[R]):
    """The result of `jit_step`. Call it like the step, or inspect the program with
    `lower(state, batch)`."""

    def __init__(
        self,
        step: Callable[..., R],
        *,
        donate: bool,
        compiler_options: CompilerOptions | None,
    ):
        def checked(*arguments: Any, **named: Any) -> R:
            result = step(*arguments, **named)
            new = result[0] if isinstance(result, tuple) and result else result
            if donate and isinstance(new, TrainState):
                check_unchanged(arguments[0], new)
            return result

        run = corrected(checked)
        run.__doc__ = step.__doc__
        options = checked_options("jit_step", compiler_options)
        self._jitted = jax.jit(
            run, donate_argnums=0 if donate else (), compiler_options=options
        )
        self._donates = donate
        # For a state with frozen arrays, which are an argument of their own.
        self._apart = jax.jit(
            functools.partial(_with_frozen_apart, checked),
            donate_argnums=0,
            compiler_options=options,
        )
        self._taken_over: set[str] = set()
        # A trace knows only the number of devices, so the mesh of `shardings` is
        # compared before.
        named = step.keywords if isinstance(step, functools.partial) else {}
        self._mesh = mesh_in(named.get("shardings"))

    def __call__(self, state: TrainState, *arguments: Any, **named: Any) -> R:
        check_is_state(state, "the first argument of a step")
        check_on_mesh(self._mesh, state)
        # Jaxlib 0.10.2 and 0.11.0 end the process, 0.11.2 raises: openxla/xla#22604.
        check_alive(state)
        with context_of(state):
            if not self._donates or not state.frozen:
                return self._jitted(state, *arguments, **named)
            result, frozen = self._call_apart(self._apart, state, arguments, named)
            return _with_frozen(result, frozen)

    def lower(
        self, state: TrainState, *arguments: Any, **named: Any
    ) -> jax.stages.Lowered:
        """Return `jax.jit(step).lower(...)`. The arguments may be abstract.

        If the state has frozen arrays, and is donated, they are an argument of their
        own: `(state without them, frozen, batch)`.
        """
        with context_of(state):
            if not self._donates or not state.frozen:
                return self._jitted.lower(state, *arguments, **named)
            lower = self._apart.lower
            return self._call_apart(lower, state, arguments, named)[0]

    def _call_apart(
        self,
        function: Callable[..., Any],
        state: TrainState,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Call a function of a state without its frozen arrays, and of these. Also
        return those of them that stay the caller's."""
        while True:
            own = {}
            frozen = {}
            for path, x in state.frozen.items():
                (own if path in self._taken_over else frozen)[path] = x
            rest = dataclasses.replace(state, frozen=own)
            try:
                return function(rest, frozen, *arguments, **named), frozen
            except _ChangesFrozenError as error:
                # Raised by the trace. The next one donates them.
                self._taken_over |= error.paths
                warn(
                    "jit_step: the step does not return the frozen arrays "
                    f"{first_few(sorted(error.paths), most=3)} as they were, so it "
                    "takes them over, and deletes those that it was given, as it does "
                    "parameters. To keep yours, pass a copy of the state."
                )


class _ChangesFrozenError(Exception):
    """A step returns other arrays for the frozen ones at these paths."""

    def __init__(self, paths: set[str]):
        super().__init__(paths)
        self.paths = paths


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _PassedThrough:
    """Stands for an array that a compiled step does not return, because it is the one
    that the step was given."""


def _state_in(result: Any) -> TrainState | None:
    """The state that a step returned, if it returned one."""
    new = result[0] if isinstance(result, tuple) and result else result
    return new if isinstance(new, TrainState) else None


def _replaced_state(result: Any, state: TrainState) -> Any:
    return (state, *result[1:]) if isinstance(result, tuple) else state


def _with_frozen_apart(
    step: Callable[..., Any],
    rest: TrainState,
    frozen: dict[str, Array],
    *arguments: Any,
    **named: Any,
) -> Any:
    """Call a step with a state whose frozen arrays come apart, and return its results
    without those that it only passes through.

    Raises `_ChangesFrozenError` if it does not pass all of them through.
    """

    def call(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return step(*arguments, **named)

    state = dataclasses.replace(rest, frozen={**rest.frozen, **frozen})
    inputs = ((state, *arguments), named)
    program = for_partitioner(trace(call, *inputs), traced_mesh(inputs))
    result = program(*inputs)
    new = _state_in(result)
    if new is None:
        return result
    leaves, structure = jax.tree.flatten(inputs)
    numbered_inputs = jax.tree.unflatten(structure, range(len(leaves)))[0][0]
    num_results = program.results.num_leaves
    numbered_results = jax.tree.unflatten(program.results, range(num_results))
    passed = frozen_passed_through(
        program.closed.jaxpr, numbered_inputs, _state_in(numbered_results) or new
    )
    if changed := frozen.keys() - passed:
        raise _ChangesFrozenError(changed)
    kept = {
        path: _PassedThrough() if path in frozen else x
        for path, x in new.frozen.items()
    }
    return _replaced_state(result, eqx.tree_at(lambda s: s.frozen, new, kept))


def _with_frozen(result: Any, frozen: dict[str, Array]) -> Any:
    """Put the frozen arrays that a compiled step did not return into its result."""
    new = _state_in(result)
    if new is None:
        return result
    return _replaced_state(
        result, dataclasses.replace(new, frozen={**new.frozen, **frozen})
    )


def jit_step(
    step: Callable[..., R],
    *,
    donate: bool = True,
    compiler_options: CompilerOptions | None = None,
) -> JittedStep[R]:
    """Compile a function of a state and a batch as `jax.jit(step, donate_argnums=0)`,
    with two safeguards.

    The first raises an error that names the array if the state was donated before; some
    versions of JAX would end the process instead. The second safeguard makes the
    gradients of a step that you write yourself correct on every mesh, like those of
    `train_step`. (XLA's partitioner makes the gradients of grouped convolutions too
    large if the batch is split over only some of the mesh axes.)

    ```python
    arguments = dict(loss_fn=loss_fn, optimizer=optimizer, shardings=state.shardings)
    train_step = partial(rx.train_step, **arguments)
    step = rx.jit_step(train_step)
    state, metrics = step(state, batch)       # the state that was given is used up
    ```

    **Arguments:**

    - `step`: a pure function `(state, batch) -> ...`, such as
        `functools.partial(train_step, ...)`. Further arrays are passed on, by position
        or by name (such as the `index` of `predict_step`).
    - `donate`: true to let the step reuse the memory of the state, which is then
        deleted, except its `frozen` arrays. A step that passes these through does not
        return them: the new state has the very arrays of the old one. A step that
        returns other arrays for them takes them over, too, and warns once. Pass `False`
        for a step that returns no state, such as `eval_step`.
    - `compiler_options`: options for XLA, as of `jax.jit`, by name.

    **Returns:**

    The compiled step, which also has a method `lower(state, batch)`.

    **Raises:**

    `ValueError` on a call with a state that has been deleted, or that lies on other
    devices than the `shardings` of `functools.partial(train_step, shardings=...)`. With
    `donate`, also if `step` returns a state with another structure, or with arrays of
    other shapes or dtypes.
    """
    return JittedStep(step, donate=donate, compiler_options=compiler_options)
