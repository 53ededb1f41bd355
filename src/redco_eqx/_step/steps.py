"""`train_step`, `eval_step`, `predict_step`: pure functions of a state and a batch, not jitted."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from redco_eqx._parallel.mesh import traced_mesh
from redco_eqx._parallel.remat import keep_products
from redco_eqx._program.gather import gather_where_used
from redco_eqx._program.partitioned import for_partitioner
from redco_eqx._program.trace import Program, trace
from redco_eqx._program.unused import zero_outputs
from redco_eqx._sharding.mesh import axes_of, batch_sharding, for_use, num_batch_shards, stored_axes
from redco_eqx._step.optimizer import check_is_optimizer, like_params, update
from redco_eqx._step.state import EVALUATE, PREDICT, TRAIN, TrainState, check_is_state, stream
from redco_eqx._tree import first_few, leaves_with_paths, to_arrays, to_paths
from redco_eqx._types import (
    RESERVED_METRICS,
    AnyArray,
    Batch,
    Key,
    LossFn,
    Mean,
    Metrics,
    PredictFn,
    as_mean,
    check_function,
)

Layout: TypeAlias = dict[str, NamedSharding]
"""The sharding of each array of the model, by path."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    num_microbatches: int = 1,
    shardings: PyTree | None = None,
) -> tuple[TrainState, Metrics]:
    """One update of the parameters: pure, stateless, not jitted.

    Put it under your own `jax.jit` (with `donate_argnums=0`), `lax.scan`, `vmap` or `grad`.

    Where `shardings` splits arrays over `fsdp`, trained or frozen, each is gathered where the loss uses it
    first, in a `lax.scan` over stacked layers one layer at a time, and in a `jax.checkpoint` (such as
    [`scan_layers`][] makes) again for the gradient: so at most one layer is whole (ZeRO-3). If the loss has no
    checkpoint that gathers, nor some that read more than is gathered, all of it is one, which keeps the results
    of matrix products and convolutions. If it has such, what is read outside of them is gathered once, and kept
    until the gradient is done. The gathers have no forward-mode derivative (`jax.jvp`, `jax.hessian`).

    `loss_fn` is traced once. It warns, once, of parameters on which the loss does not depend.

    **Arguments:**

    - `state`: from `init_state`.
    - `batch`: a PyTree of arrays with one leading dim.
    - `loss_fn`: see [`LossFn`][]. The model arrives in training mode.
    - `optimizer`: the one that `state` was made with. It also receives, if it takes them, `value` (the loss),
        `grad`, `value_fn` (the loss of this batch, as a function of the parameters: for a line search) and
        `grad_fn` (its gradient, as `optax.contrib.sam` calls it).
    - `num_microbatches`: the batch is cut into this many parts, whose gradients are accumulated in float32
        and weighted, so that the result is that of the whole batch. Their number must divide the batch.
    - `shardings`: the tree of `shard_rules`. Parameters, gradients, optimizer state and new parameters are
        constrained to it; without it the compiler decides.

    **Returns:**

    The new state, and the metrics as [`Mean`][]s: `loss`, those of `loss_fn`, `grad_norm` (global L2 norm
    before the optimizer), and `learning_rate` if `optax.inject_hyperparams` makes it visible.

    **Raises:**

    `ValueError` while tracing: a loss that is not a scalar or a `Mean`, a reserved metric name, a batch that
    does not divide into the microbatches.
    """
    check_is_state(state, "train_step: state")
    check_function("train_step", "loss_fn", loss_fn, "model", "batch", "key")
    check_is_optimizer("train_step", optimizer)
    layout = None if shardings is None else _layout(shardings, state)
    params, frozen = _constrain(state.params, layout), state.frozen
    key = stream(state, TRAIN)

    def loss_of(
        params: dict[str, Array],
        frozen: dict[str, Array],
        model_state: dict[str, Array],
        batch: Batch,
        key: Key,
    ) -> Any:
        output = loss_fn(state.build(params, model_state, frozen), batch, key)
        loss, metrics, new_model_state = unpack_loss(state, output, 1.0)
        return loss.value, (loss, metrics, new_model_state)

    parts = None if num_microbatches == 1 else _microbatches(batch, num_microbatches, layout)
    first = batch if parts is None else jax.tree.map(lambda x: x[0], parts)
    gradient = _gradient(loss_of, (params, frozen, state.model_state, first, key), layout)

    def differentiate(params: dict[str, Array]) -> tuple[Mean, Metrics, dict[str, Array], dict[str, Array]]:
        """The loss of the whole batch, the metrics, the new model state, and the gradients."""
        if parts is None:
            (_, (loss, metrics, model_state)), grads = gradient(params, frozen, state.model_state, batch, key)
            return loss, metrics, model_state, _constrain(grads, layout)

        def accumulate(carry: tuple[Any, Any], part: tuple[Array, Batch]) -> tuple[tuple[Any, Any], Any]:
            total, model_state = carry
            index, microbatch = part
            (_, (loss, metrics, model_state)), grads = gradient(
                params, frozen, model_state, microbatch, jax.random.fold_in(key, index)
            )
            total = jax.tree.map(lambda t, g: t + g * loss.weight.astype(t.dtype), total, grads)
            return (_constrain(total, layout), model_state), (loss, metrics)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        (total, model_state), stacked = jax.lax.scan(
            accumulate,
            (_constrain(zeros, layout), state.model_state),
            (jnp.arange(num_microbatches), parts),
        )
        loss, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)
        scale = jnp.where(loss.weight == 0, 0, 1 / jnp.where(loss.weight == 0, 1, loss.weight))
        grads = jax.tree.map(lambda t, p: (t * scale.astype(t.dtype)).astype(p.dtype), total, params)
        return loss, metrics, model_state, _constrain(grads, layout)

    loss, metrics, model_state, grads = differentiate(params)

    def value_and_grad(params: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        loss, _, _, grads = differentiate(_constrain(params, layout))
        return loss.value, grads

    updates, opt_state = update(optimizer, grads, state.opt_state, params, loss.value, value_and_grad)
    new_params: Any = optax.apply_updates(params, updates)
    if layout is not None:
        of_params = {path: layout[path] for path in params}
        opt_state = jax.lax.with_sharding_constraint(opt_state, like_params(opt_state, params, of_params))
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    report = {"loss": loss, **metrics, "grad_norm": as_mean(optax.tree.norm(wide), 1.0, "grad_norm")}
    learning_rate = _learning_rate(opt_state)
    if learning_rate is not None:
        report["learning_rate"] = as_mean(learning_rate, 1.0, "learning_rate")
    new_state = dataclasses.replace(
        state,
        params=_constrain(new_params, layout),
        model_state=model_state,
        opt_state=opt_state,
        step=state.step + 1,
    )
    return new_state, report


def eval_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    shardings: PyTree | None = None,
    index: int | Int[AnyArray, ""] | None = None,
) -> Metrics:
    """The loss and metrics of one batch, as [`Mean`][]s to be added over batches.

    The model is in inference mode (`eqx.nn.inference_mode`). A scalar that `loss_fn` returns weighs the
    number of examples. The other arguments are those of `predict_step`.
    """
    check_is_state(state, "eval_step: state")
    check_function("eval_step", "loss_fn", loss_fn, "model", "batch", "key")
    size = jax.tree.leaves(batch)[0].shape[0]

    def measure(model: Any, batch: Batch, key: Key) -> Metrics:
        loss, metrics, _ = unpack_loss(state, loss_fn(model, batch, key), size)
        return {"loss": loss, **metrics}

    return _infer(state, batch, stream(state, EVALUATE, index), measure, shardings)


def predict_step(
    state: TrainState,
    batch: Batch,
    *,
    predict_fn: PredictFn,
    shardings: PyTree | None = None,
    index: int | Int[AnyArray, ""] | None = None,
) -> PyTree[Array]:
    """`predict_fn(model, batch, key)` with the model in inference mode.

    **Arguments:**

    - `state`, `batch`, `shardings`: see `train_step`.
    - `predict_fn`: see [`PredictFn`][].
    - `index`: which of the batches this is that the same state sees, where `predict_fn` draws random numbers:
        the step of a rollout, say. Without it they are the same for each batch, until the next `train_step`.

    **Returns:**

    What `predict_fn` returns.

    **Raises:**

    `ValueError` while tracing, naming the leaf, if an output lacks the leading dim of the batch.
    """
    check_is_state(state, "predict_step: state")
    check_function("predict_step", "predict_fn", predict_fn, "model", "batch", "key")
    outputs = _infer(state, batch, stream(state, PREDICT, index), predict_fn, shardings)
    size = jax.tree.leaves(batch)[0].shape[0]
    if not jax.tree.leaves(outputs):
        raise ValueError("predict_fn returned no array.")
    for path, x in leaves_with_paths(outputs):
        if jnp.shape(x)[:1] != (size,):
            raise ValueError(
                f"predict_fn's output {path or 'array'} has shape {jnp.shape(x)}, but its leading dim must be "
                f"the batch's, {size}. Return one row for each example."
            )
    return outputs


def _infer(
    state: TrainState, batch: Batch, key: Key, use: Callable[[Any, Any, Key], Any], shardings: PyTree | None
) -> Any:
    """`use(model, batch, key)` with the model in inference mode."""
    layout = None if shardings is None else _layout(shardings, state)

    def run(
        params: dict[str, Array],
        frozen: dict[str, Array],
        model_state: dict[str, Array],
        batch: Batch,
        key: Key,
    ) -> Any:
        return use(eqx.nn.inference_mode(state.build(params, model_state, frozen)), batch, key)

    arguments = (state.params, state.frozen, state.model_state, batch, key)
    program, _ = _program(run, arguments, layout)
    return _for_mesh(program, arguments, layout)(*arguments)


def _gradient(loss_of: Callable[..., Any], arguments: tuple[Any, ...], layout: Layout | None) -> Program:
    """The program of `jax.value_and_grad(loss_of, has_aux=True)`; `loss_of` itself is traced once."""
    program, keeps_weights = _program(loss_of, arguments, layout)
    loss = jax.checkpoint(program, policy=keep_products) if keeps_weights else program
    gradient = trace(jax.value_and_grad(loss, has_aux=True), *arguments)
    _warn_unused(gradient, sorted(arguments[0]))
    return _for_mesh(gradient, arguments, layout)


def _program(
    function: Callable[..., Any], arguments: tuple[Any, ...], layout: Layout | None
) -> tuple[Program, bool]:
    """A function of parameters, frozen arrays and more, traced, with [`gather_where_used`][]."""
    program = trace(function, *arguments)
    known = layout or {}
    of_arrays = [known.get(path) for arrays in arguments[:2] for path in sorted(arrays)]  # as JAX sorts a dict
    num_others = len(program.closed.jaxpr.invars) - len(of_arrays)
    return gather_where_used(program, [*of_arrays, *[None] * num_others])


def _for_mesh(program: Program, arguments: tuple[Any, ...], layout: Layout | None) -> Program:
    """`for_partitioner` on the mesh of the layout, or else on that where the arrays lie."""
    if not layout:
        return for_partitioner(program, traced_mesh(arguments))
    kernels: dict[int, set[str]] = {}
    arrays = {**arguments[0], **arguments[1]}
    for path, sharding in layout.items():
        shape = arrays[path].shape
        # What is gathered for use is still made split, as a gradient.
        axes = {*axes_of(for_use(sharding.spec)), *stored_axes(sharding.spec)[:1]}
        for part in (shape, shape[1:]):  # alone, or of a stack
            if len(part) > 2 and axes:
                kernels.setdefault(math.prod(part), set()).update(axes)
    return for_partitioner(program, next(iter(layout.values())).mesh, kernels)


def _warn_unused(gradient: Program, paths: list[str]) -> None:
    """Warns of parameters on which the loss does not depend."""
    first = gradient.results.num_leaves - len(paths)
    unused = [paths[i - first] for i in zero_outputs(gradient) if i >= first]
    if unused:
        warnings.warn(
            f"the loss does not depend on {len(unused)} trainable arrays, whose gradient is always zero: "
            f"{first_few(unused)}. Leave them out by `trainable` of init_state, or use them.",
            stacklevel=4,
        )


def unpack_loss(state: TrainState, output: Any, weight: Any) -> tuple[Mean, Metrics, dict[str, Array]]:
    """What `loss_fn` returned, as `(loss, metrics, model_state)`."""
    has_state = state.structure[1] is not None
    expected = "(loss, metrics, new_state)" if has_state else "a loss, or (loss, metrics)"
    parts: list[Any] = list(output) if isinstance(output, tuple) else [output]
    if len(parts) not in ((3,) if has_state else (1, 2)):
        what = f"a tuple of {len(parts)}" if isinstance(output, tuple) else type(output).__name__
        raise ValueError(f"loss_fn must return {expected}, but returned {what}.")
    metrics = parts[1] if len(parts) > 1 else {}
    if not isinstance(metrics, dict):
        raise ValueError(
            f"loss_fn must return {expected}, with metrics a dict of names, not {type(metrics).__name__}."
        )
    reserved = [name for name in metrics if name in RESERVED_METRICS]
    if reserved:
        raise ValueError(f"loss_fn: the metric name {reserved[0]!r} is reserved. Choose another.")
    loss = as_mean(parts[0], weight, "the loss")
    metrics = {name: as_mean(x, weight, f"the metric {name!r}") for name, x in metrics.items()}
    model_state = to_arrays(parts[2]) if has_state else state.model_state
    return loss, metrics, model_state


def _layout(shardings: PyTree, state: TrainState) -> Layout:
    found = to_paths(shardings, lambda x: isinstance(x, NamedSharding))
    missing = [path for path in state.params if path not in found]
    if missing:
        raise ValueError(
            f"shardings has no NamedSharding for {first_few(missing)}. Pass shard_rules(model, mesh) of the "
            "same model."
        )
    return {path: found[path] for path in (*state.params, *state.frozen) if path in found}


def _constrain(params: dict[str, Array], layout: Layout | None) -> dict[str, Array]:
    if layout is None:
        return params
    return jax.lax.with_sharding_constraint(params, {path: layout[path] for path in params})


def _microbatches(batch: Batch, number: int, layout: Layout | None) -> Batch:
    """`(number, size / number, ...)`: example i goes to microbatch i % number.

    Taking neighbours instead would put each microbatch on a part of the devices only.
    """
    mesh = None if layout is None else next(iter(layout.values())).mesh
    shards = 1 if mesh is None else num_batch_shards(mesh)

    def one(path: str, x: Any) -> Any:
        if number < 1 or x.shape[0] % (number * shards) != 0:
            raise ValueError(
                f"num_microbatches={number}: the batch's {path or 'array'} has {x.shape[0]} rows, which do not "
                f"divide into {number} microbatches on {shards} data shards."
            )
        x = rearrange(x, "(b k) ... -> k b ...", k=number)
        if mesh is None:
            return x
        spec = PartitionSpec(None, *batch_sharding(mesh).spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    leaves = [one(path, x) for path, x in leaves_with_paths(batch)]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _learning_rate(opt_state: PyTree) -> Array | None:
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    return next((value for _, value in found if jnp.shape(value) == ()), None)
