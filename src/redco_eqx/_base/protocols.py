"""Terms of the library: aliases, the three functions that a user writes, `Mean`,
`Logger`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from redco_eqx._base.tree import is_array, is_key, lack_of_value, leaves_with_paths

Key: TypeAlias = PRNGKeyArray
"""A typed PRNG key, as made by `jax.random.key`."""

Batch: TypeAlias = PyTree
"""A PyTree of arrays that share their leading dim."""


Examples: TypeAlias = Any
"""Anything with `len(examples)` and `examples[int]`: a list, a NumPy array, a Hugging
Face dataset."""


class Mean(eqx.Module):
    """A weighted mean to which you can add other means. It holds a weighted sum and the
    sum of the weights.

    Means add up exactly over microbatches, devices and batches, whatever their weights.
    The loss of a batch is `sum(total) / sum(weight)`, not a mean of means. Gradients do
    not flow through `weight`. If a loss has weight `n`, add a term without a weight as
    `Mean(cross_entropy + auxiliary * n, n)`.

    `float(mean)`, `np.asarray(mean)` and `f"{mean:.3f}"` use the value of the mean.
    `json.dumps(metrics, default=float)` turns all metrics of a step into text.

    ```python
    # 8 over 4 tokens, wherever they were: 2.0
    total = rx.Mean(6.0, 3.0) + rx.Mean(2.0, 1.0)

    def masked_loss(model, batch, key):
        errors, counts = (jax.vmap(model)(batch) - batch) ** 2, batch > 0
        return rx.Mean((errors * counts).sum(), counts.sum())
    ```

    **Arguments:**

    - `total`: the weighted sum, a scalar. It is kept in float32 or wider.
    - `weight`: the sum of weights (the number of tokens, for example), a scalar.
    """

    total: Any
    weight: Any

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> Array:
        """`total / weight`, or 0 where the weight is 0 (an [`evaluate`][] over a weight
        of 0 is NaN)."""
        empty = self.weight == 0
        return jnp.where(empty, 0, self.total) / jnp.where(empty, 1, self.weight)

    def __repr__(self) -> str:
        return f"Mean(total={self.total!r}, weight={self.weight!r})"

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __format__(self, spec: str) -> str:
        """Format the value, or the pair under a trace, where the value is not a
        number."""
        is_traced = isinstance(self.total, Tracer) or isinstance(self.weight, Tracer)
        return repr(self) if is_traced else format(float(self), spec)

    def __array__(
        self, dtype: np.dtype | type | None = None, copy: bool | None = None
    ) -> np.ndarray:
        # Use NumPy, because JAX refuses to compute with the results of a step under
        # `jax.set_mesh` of another mesh.
        total = np.asarray(self.total)
        weight = np.asarray(self.weight)
        empty = weight == 0
        numerator = np.where(empty, np.zeros_like(total), total)
        denominator = np.where(empty, np.ones_like(weight), weight)
        return np.array(numerator / denominator, dtype)


Metrics: TypeAlias = dict[str, Mean]
"""The metrics of a step, by name. They are means, so that they can be added over
steps."""

RESERVED_METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "skipped",
    "epoch",
    "mfu",
    "examples_per_second",
)
RESERVED_METRICS += (
    "tokens_per_second",
    "data_wait_seconds",
    "slowest_process",
    "slowest_by_seconds",
)
RESERVED_METRICS += ("rounded_away",)


CollateFn: TypeAlias = Callable[[Sequence[PyTree]], Batch]
"""Turns a list of examples into one batch of NumPy arrays with leading dim
`len(examples)`."""

LossFn: TypeAlias = Callable[[PyTree, Batch, Key], PyTree]
"""The loss of one batch, optionally with further metrics.

`(model, batch, key) -> loss` or `(loss, {name: metric})`, each a scalar or a
[`Mean`][]. A model with an `eqx.nn.State` is passed as the pair `(model, state)`, and
the function returns `(loss, metrics, new_state)`.
"""

PredictFn: TypeAlias = Callable[[PyTree, Batch, Key], PyTree]
"""`(model, batch, key) -> PyTree of arrays`, each with the leading dim of the batch."""

OutputFn: TypeAlias = Callable[[PyTree, PyTree], Any]
"""`(example, prediction) -> anything`: makes a prediction of `predict_fn` readable."""

Logger: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Receives a row of numbers at a step. `fit` calls it only on process 0."""


@dataclasses.dataclass(frozen=True)
class SplitActivations:
    """A function of `(model, batch, key)` whose activations the steps lay out: see
    `split_activations`."""

    function: Callable[..., PyTree]

    def __call__(self, model: PyTree, batch: Batch, key: Key, /) -> PyTree:
        return self.function(model, batch, key)


def split_activations(function: Callable[..., PyTree]) -> SplitActivations:
    """Mark a loss or predict function, so that its activations are split over `tensor`,
    too.

    Without the mark, a layout says only how parameters are split, and the compiler
    decides the rest. With it, the steps decide for each other value of the traced
    gradient. A value stays whole or is split along one of its dimensions, which can be
    a token, pixel or row dimension. The parameters keep the layout that they have
    without the mark. Without `shardings=`, a step leaves the choices to the compiler.
    The choice weighs the bytes that are sent and the work that `tensor` divides. If a
    device would send more with it than without, or a loop has operations about which
    nothing is known, a step leaves the activations to the compiler, and warns with
    `ShardingWarning`. `explain` predicts the bytes with and without the mark.

    ```python
    shardings = rx.shard_rules(model, mesh, loss_fn=loss_fn, batch=batch)
    loss_fn = rx.split_activations(loss_fn)
    state, metrics = rx.train_step(
        state, batch, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings
    )
    ```

    **Arguments:**

    - `function`: a loss function or a predict function that takes
        `(model, batch, key)`.

    **Returns:**

    A function with the same results as `function`.

    **Raises:**

    `TypeError` if `function` does not take these arguments.
    """
    check_functions("split_activations", function=function)
    return SplitActivations(function)


_CALLED_WITH = {
    "collate_fn": ("examples",),
    **dict.fromkeys(("loss_fn", "predict_fn", "function"), ("model", "batch", "key")),
    "make_model": ("key",),
    "train_examples": ("epoch",),
    "logger": ("step", "row"),
    "state_fn": ("state",),
    "output_fn": ("example", "prediction"),
    "metric_fn": ("examples", "predictions"),
    "hook": ("run", "row", "state"),
    "step_fn": ("state", "batch"),
}

_CALLED_WITH_NAMED = {
    "step_fn": ("loss_fn", "optimizer", "num_microbatches", "shardings"),
}


def as_key(where: str, key: Any) -> Any:
    """Return one typed PRNG key. A raw key, such as `jax.random.PRNGKey` makes, becomes
    a typed key.

    Raises `TypeError` for anything else, `ValueError` for several keys.
    """
    is_jax_key = is_key(key) and isinstance(key, jax.Array)
    if is_jax_key and (lack := lack_of_value(key)):
        raise ValueError(f"{where}: key {lack}.")
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        key = jax.random.wrap_key_data(key)
    if not is_key(key):
        raise TypeError(
            f"{where}: key must be a PRNG key, jax.random.key(0), but is {_short(key)}."
        )
    if key.shape != ():
        raise ValueError(
            f"{where}: key must be one PRNG key, but is {key.shape} of them. Pass one: "
            "keys[0]."
        )
    return key


def check_integers(where: str, **counts: object) -> None:
    """Raise `TypeError` unless the value is a whole number."""
    for name, x in counts.items():
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            value = f"={x!r}"
            hint = ""
            if hasattr(x, "__len__") and not isinstance(x, str):
                value = ""
                hint = " Pass its len()."
            kind = type(x).__name__
            raise TypeError(
                f"{where}: {name}{value} must be a whole number, but is a {kind}.{hint}"
            )


def check_positive(where: str, **counts: int | None) -> None:
    """Raise `TypeError` unless the value is a whole number or `None`, and `ValueError`
    if it is below 1."""
    for name, value in counts.items():
        if value is not None:
            check_integers(where, **{name: value})
            if value < 1:
                raise ValueError(f"{where}: {name}={value}, but it must be positive.")


def check_functions(where: str, **functions: object) -> None:
    """Raise `TypeError` unless each value is a function that takes the arguments that
    belong to its name."""
    for name, function in functions.items():
        named = _CALLED_WITH_NAMED.get(name, ())
        check_call(where, name, function, _CALLED_WITH[name], named)


def check_call(
    where: str,
    name: str,
    function: object,
    arguments: Sequence[str],
    named: Sequence[str] = (),
) -> None:
    """Raise `TypeError` unless `function` is a function that takes these arguments, the
    last ones by name."""
    listed = [*arguments, *(f"{x}=..." for x in named)]
    form = f"{name}({', '.join(listed)})"
    if not callable(function):
        raise TypeError(
            f"{where}: {name} must be a function, {form}, but is {_short(function)}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        hint = " Take those that it does not use as **_." if named else ""
        raise TypeError(
            f"{where}: {name} is called as {form}, but this function takes "
            f"{signature}: {error}.{hint}"
        ) from None


def without_options(function: Any) -> Any:
    """The function that `functools.partial` was given, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_takes_model(
    where: str, make_model: Callable[[], PyTree], **functions: object
) -> None:
    """Raise `TypeError`, naming the leaf, if a function is compiled by `jax.jit`, which
    takes only arrays, and the model has something else."""
    for name, function in functions.items():
        if not isinstance(without_options(function), jax.stages.Wrapped):
            continue
        for path, leaf in leaves_with_paths(make_model()):
            if not is_array(leaf) and not isinstance(leaf, int | float | complex):
                raise TypeError(
                    f"{where}: {name} is compiled by jax.jit, which takes only arrays, "
                    f"but the model has {path}, {_short(leaf)}. Pass the function "
                    "itself, because the step compiles it, or compile it with "
                    "eqx.filter_jit."
                )


def _short(x: object) -> str:
    text = repr(x)
    kind = type(x).__name__
    if len(text) > 40 or "\n" in text:
        return f"a {kind}"
    return f"{text} ({kind})"


def as_mean(x: Mean | ArrayLike, weight: ArrayLike, what: str) -> Mean:
    """Return `x` as a `Mean` in float32 or wider. A scalar gets the given weight; a
    `Mean` keeps its weight.

    Raises `ValueError` naming `what` if `x` is not a scalar.
    """
    is_mean = isinstance(x, Mean)
    if not is_mean and (x is None or isinstance(x, Mapping | Sequence | eqx.Module)):
        hint = (
            "Does the function return it? Metrics have one level of names: "
            '{"group/name": value}.'
        )
        if isinstance(x, list):
            hint = "A function with metrics returns a tuple: return loss, metrics."
        raise TypeError(
            f"{what} must be a scalar or a Mean(total, weight), but is {_short(x)}. "
            f"{hint}"
        )
    if is_mean:
        parts = {"total": x.total, "weight": x.weight}
    else:
        parts = {"total": x, "weight": weight}
    for part, number in parts.items():
        if jnp.shape(number) != ():
            raise ValueError(
                f"{what} must be a scalar or a Mean of scalars, but its {part} has "
                f"shape {jnp.shape(number)}. Sum it, and return Mean(total, weight)."
            )
    total, weight = map(jnp.asarray, parts.values())
    dtype = jnp.promote_types(total.dtype, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{what} must be a real number, but has dtype {total.dtype}.")
    total = total.astype(dtype)
    weight = jax.lax.stop_gradient(weight).astype(dtype)
    if not is_mean:
        # Widened before, because the product may not fit into the dtype of a metric.
        total = total * weight
    return Mean(total, weight)
