"""`TrainState`: all arrays of a run, in a flat form, by name."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, PyTree

from redco_eqx._base.pairs import is_pair
from redco_eqx._base.protocols import Key
from redco_eqx._base.tree import (
    AnyArray,
    children,
    describe,
    is_array,
    join,
    lack_of_value,
    leaves_with_paths,
    size_text,
    to_arrays,
)
from redco_eqx._sharding.mesh import (
    as_stored,
    check_mesh,
    one_device_mesh,
    put_global,
    trimmed,
)
from redco_eqx._step.buffers import check_buffers
from redco_eqx._step.static import check_static, with_own_static


class Structure:
    """A tree without its arrays, as one hashable value:
    `Structure(tree).build(to_arrays(tree))` is `tree`.

    Two structures are equal if all their values are equal as Python compares them
    (functions by identity), and are also written alike: `1`, `1.0` and `True` differ.

    Static values that could change (lists, dicts) are copies, and each tree that is
    built gets copies of its own.
    """

    def __init__(self, tree: PyTree):
        given = tree
        tree = with_own_static(given)
        self._has_copies = tree is not given
        pairs = leaves_with_paths(tree)
        self._treedef = jax.tree.structure(tree)
        self._paths = tuple(path if is_array(leaf) else None for path, leaf in pairs)
        self._leaves = tuple(None if is_array(leaf) else leaf for _, leaf in pairs)
        self._text = repr(self._leaves)  # now, because an object may change

    def build(self, arrays: Mapping[str, Any]) -> PyTree:
        """The tree with `arrays[path]` at each path."""
        leaves = [
            leaf if path is None else arrays[path]
            for path, leaf in zip(self._paths, self._leaves)
        ]
        tree = jax.tree.unflatten(self._treedef, leaves)
        return with_own_static(tree) if self._has_copies else tree

    def __reduce__(self) -> Any:
        # Pickle a tree: a pickled definition of an Equinox tree does not equal the
        # original.
        place = jax.ShapeDtypeStruct((), bool)
        return Structure, (
            self.build({path: place for path in self._paths if path is not None}),
        )

    def __hash__(self) -> int:
        return hash(self._paths)

    def __eq__(self, other: object) -> bool:
        # They are the same nearly always, when `jit` compares the arguments of a call
        # with earlier ones.
        if self is other or not isinstance(other, Structure):
            return self is other
        ours, theirs = (
            (x._paths, x._text, x._treedef, x._leaves) for x in (self, other)
        )
        return ours == theirs and repr(self._treedef) == repr(other._treedef)

    def __repr__(self) -> str:
        return f"Structure({sum(path is not None for path in self._paths)} arrays)"


# Streams of random numbers from one key. They are separated before any number is folded
# in.
TRAIN, EVALUATE, PREDICT, ORDER = range(4)


class TrainState(eqx.Module):
    """Everything that a training step reads and writes. All leaves are arrays.
    `init_state` creates it.

    The state is a PyTree that you can pass to plain `jax.jit`, `lax.scan`, `vmap`,
    `grad` and `eval_shape` without filtering. `dataclasses.replace` makes a changed
    copy. The arrays of the model are stored flat, by path, so that a state with a
    thousand leaves is flattened in C++, and looks like a checkpoint.

    ```python
    state: rx.TrainState = rx.init_state(model, optimizer, key=jax.random.key(1))
    print(state.step, state.params["layers.0.weight"].sharding)
    half = jax.tree.map(lambda x: x / 2, state.params)
    smaller = dataclasses.replace(state, params=half)
    y = smaller.model(batch[0])
    ```

    - `params`: the trainable arrays, `{path: array}`.
    - `frozen`: the model's other arrays.
    - `model_state`: the arrays of the model's `eqx.nn.State`; empty if there is none.
    - `opt_state`: the state of the optax optimizer, over `params`; `()` without an
        optimizer.
    - `key`: a typed PRNG key. It is never consumed: all random numbers derive from it
        and `step`.
    - `step`: the number of steps taken, int32. It stops at 2**31 - 1, as the counters
        of optax do; `fit` refuses a run that would pass this number.
    - `structure`: everything in the model except its arrays, and the same for the
        `eqx.nn.State`.
    - `stored`: the paths of the model's arrays that `tensor` splits only where they are
        stored, not for use. The shardings of these arrays may not say this, because JAX
        may return them under a different spec that it treats as the same.
    """

    params: dict[str, AnyArray]
    frozen: dict[str, AnyArray]
    model_state: dict[str, AnyArray]
    opt_state: PyTree
    key: AnyArray
    step: Int[AnyArray, "..."]
    structure: tuple[Structure, Structure | None] = eqx.field(static=True)
    stored: tuple[str, ...] = eqx.field(default=(), static=True)

    def __repr__(self) -> str:
        parts = []
        named = {"parameters": self.params, "frozen arrays": self.frozen}
        for name, arrays in {
            **named,
            "arrays of the model's state": self.model_state,
        }.items():
            size = size_text(sum(x.size * x.dtype.itemsize for x in arrays.values()))
            parts += [f"{len(arrays)} {name} of {size}"] if arrays else []
        parts.append(f"{len(jax.tree.leaves(self.opt_state))} arrays of the optimizer")
        return f"TrainState({', '.join(parts)})"

    @property
    def model(self) -> Any:
        """The model, or the pair `(model, eqx.nn.State)` if `init_state` took a
        pair."""
        return self.build(self.params, self.model_state)

    @property
    def shardings(self) -> dict[str, NamedSharding] | None:
        """The layout of the model's arrays by path, for `shardings=`; `None` if a
        trained array is not on a mesh. Read it outside of `jit` and `vmap`, where
        arrays have a layout."""
        layout = {}
        for path, x in {**self.params, **self.frozen}.items():
            if isinstance(x.sharding, NamedSharding):
                mesh = x.sharding.mesh
                spec = trimmed(x.sharding.spec)
                layout[path] = NamedSharding(
                    mesh, as_stored(spec, path in self.stored, mesh)
                )
            elif path in self.params:
                return None
        return layout

    def with_model(self, model: Any) -> "TrainState":
        """Return this state with an edited model, and with everything else as it is:
        optimizer state, key, step and placement.

        ```python
        pruned = eqx.tree_at(lambda m: m.weight, model, replace_fn=lambda w: w * mask)
        state = state.with_model(pruned)
        ```

        **Arguments:**

        - `model`: a model like [`model`][redco_eqx.TrainState.model], with the same
            structure, shapes and dtypes. For a state of a pair, the pair
            `(model, eqx.nn.State)`.

        **Returns:**

        The new state. It shares those arrays of `model` that have their place already.
        The others are placed as those that they replace. The same arrays are trained as
        before.

        **Raises:**

        `ValueError` that names the path: an array has another shape or dtype, or no
        value, two leaves are the same array, something other than an array differs, or
        a static field has a value that `init_state` does not accept.
        """
        parts = {"": model}
        if self.structure[1] is not None:
            if not is_pair(model):
                raise ValueError(
                    "with_model: the state is of a pair (model, eqx.nn.State), but got "
                    f"a {type(model).__name__}. Pass the pair."
                )
            parts = {"the model": model[0], "the eqx.nn.State": model[1]}
        own = [{**self.params, **self.frozen}, self.model_state]
        new = []
        for part, structure, arrays in zip(parts.values(), self.structure, own):
            assert structure is not None
            new.append(_edited(part, structure, arrays))
        model_arrays, *rest = new
        model_state = rest[0] if rest else self.model_state
        arrays = {**model_arrays, **model_state}
        if all(isinstance(x, jax.Array) for x in arrays.values()) and not any(
            isinstance(x, Tracer) for x in arrays.values()
        ):
            check_buffers("with_model", arrays)
        return dataclasses.replace(
            self,
            params={path: model_arrays[path] for path in self.params},
            frozen={path: model_arrays[path] for path in self.frozen},
            model_state=model_state,
        )

    def build(
        self, params: dict[str, AnyArray], model_state: dict[str, AnyArray]
    ) -> Any:
        """Build the model with these arrays instead of those in the state."""
        structure, state_structure = self.structure
        model = structure.build({**params, **self.frozen})
        return (
            model
            if state_structure is None
            else (model, state_structure.build(model_state))
        )


def _edited(
    tree: PyTree, structure: Structure, own: Mapping[str, AnyArray]
) -> dict[str, AnyArray]:
    """The arrays of an edited tree, each placed as the one that it replaces.

    Raises `ValueError`, naming the path, if anything but the values of arrays differs.
    """
    check_static(tree)
    arrays = to_arrays(tree)
    change = first_change(dict(own), arrays)
    if change is not None:
        path, was, became = change
        raise ValueError(
            f"with_model: {path} was {was}, and is {became} in this model. Pass a "
            "model of the same shapes and dtypes. For another one, make a new state "
            "with init_state."
        )
    if Structure(tree) != structure:
        difference = _first_difference(structure.build(own), with_own_static(tree))
        difference = difference or "something else in it is not"
        raise ValueError(
            "with_model: the arrays of this model are like those of the state, but "
            f"{difference}. Change only arrays, as with eqx.tree_at on state.model. "
            "For another model, make a new state with "
            "init_state."
        )
    return {path: _placed(arrays[path], old) for path, old in own.items()}


def _first_difference(before: PyTree, after: PyTree, path: str = "") -> str | None:
    """Describe the first type, static field or leaf that differs and is no array."""
    if is_array(before):
        return None
    parts = [(path or "the tree", before, after)]
    if type(before) is type(after) and dataclasses.is_dataclass(before):
        parts = [
            (join(path, x.name), getattr(before, x.name), getattr(after, x.name))
            for x in dataclasses.fields(before)
            if x.metadata.get("static", False)
        ]
    elif children(before):
        parts = []
    for name, was, became in parts:
        if type(was) is not type(became) or was != became or repr(was) != repr(became):
            return f"{name} was {was!r}, and is {became!r}"
    inner = dict(children(after))
    for name, child in children(before):
        found = _first_difference(child, inner.get(name), join(path, name))
        if found is not None:
            return found
    return None


def _placed(x: Any, old: Any) -> Any:
    """Place an array as `old` is placed. Under a trace, it has no place."""
    if isinstance(x, Tracer) or isinstance(old, Tracer):
        return jnp.asarray(x)
    if isinstance(old, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=old.sharding)
    if isinstance(x, jax.Array) and x.aval.weak_type:
        # The next step would be compiled again, for a state of weak types.
        x = jax.lax.convert_element_type(x, x.dtype)
    return put_global(x, old.sharding)


def stream(
    state: TrainState, tag: int, index: int | Int[AnyArray, ""] | None = None
) -> Key:
    """The key of a stream of random numbers at this step; with `index`, the key of one
    batch in the stream."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, tag), state.step)
    return key if index is None else jax.random.fold_in(key, index)


@functools.partial(jax.jit, static_argnames="begin")
def _fold_order(key: Key, begin: int) -> Key:
    # Jitted, so that the numbers are constants of a program. Otherwise, they would be
    # moved to the devices silently, which `jax.transfer_guard("disallow")` forbids.
    return jax.random.fold_in(jax.random.fold_in(key, ORDER), begin)


def order_key(state: TrainState, begin: int) -> Key:
    """The key for the order of the examples in a run of `fit` that began at step
    `begin`."""
    return _fold_order(state.key, begin)


def step_of(state: TrainState) -> int:
    """`state.step` as a Python int."""
    return int(jax.device_get(state.step))


MOST_STEPS = 2**31 - 1
"""The last number of a step: `state.step` is int32, as are the counters of optax."""


def check_steps(where: str, state: TrainState, num_steps: int | None) -> None:
    """Raise `ValueError` if a run would pass the last number of a step. There, a step
    stops counting."""
    step = step_of(state)
    if step + (num_steps or 0) > MOST_STEPS:
        raise ValueError(
            f"{where}: the state is at step {step}, and {num_steps} more would pass "
            f"{MOST_STEPS}, the last number that state.step can hold. Begin at 0 "
            "again: dataclasses.replace(state, step=jnp.zeros_like(state.step))."
        )


def state_mesh(state: TrainState) -> Mesh:
    """The mesh of a state.

    Raises `ValueError` if the state was donated or deleted, or if this kind of mesh
    cannot be used.
    """
    check_alive(state)
    sharding = state.step.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        check_mesh(sharding.mesh)
        return sharding.mesh
    return one_device_mesh(next(iter(state.step.devices())))


def check_is_state(x: object, what: str) -> None:
    """Raise `TypeError`, naming the argument as `what`, if it is not a state."""
    if isinstance(x, TrainState):
        return
    if isinstance(x, eqx.Module) or is_pair(x):
        hint = (
            "Make a state from a model: init_state(model, optimizer, "
            "key=jax.random.key(0))."
        )
    elif isinstance(x, tuple) and x and isinstance(x[0], TrainState):
        hint = "train_step returns the pair (state, metrics): take it apart."
    else:
        hint = "The state comes first, then the examples or the batch."
    raise TypeError(f"{what} must be a TrainState, but is a {type(x).__name__}. {hint}")


def check_is_one_state(x: object, what: str) -> None:
    """As `check_is_state`; also raise `ValueError` for several states in one, stacked
    for `vmap`."""
    check_is_state(x, what)
    shape = getattr(getattr(x, "step", None), "shape", ())
    if shape:
        raise ValueError(
            f"{what} must be one TrainState, but its step has the shape {shape}, as if "
            "several were stacked. Take one: jax.tree.map(lambda x: x[0], state); or "
            "call a step under jax.vmap."
        )


def first_change(before: PyTree, after: PyTree) -> tuple[str, str, str] | None:
    """The first leaf that differs between two trees by shape or dtype: its path, and
    the leaf before and after."""

    def described(tree: PyTree) -> dict[str, str]:
        pairs = leaves_with_paths(tree)
        return {
            path: describe(x) if is_array(x) else f"a {type(x).__name__}"
            for path, x in pairs
        }

    old = described(before)
    new = described(after)
    for path in {**old, **new}:
        was = old.get(path, "missing")
        became = new.get(path, "missing")
        if was != became:
            return path, was, became
    return None


def check_unchanged(before: TrainState, after: TrainState) -> None:
    """Raise `ValueError`, naming the array, if a step changed the structure, a shape or
    a dtype of its state.

    The next step would be compiled again, for a state of another kind. Statistics in
    fewer bits would also stop moving.
    """
    change = first_change(before, after)
    if change is None:
        return
    path, was, became = change
    hint = (
        "A step returns a state like the one that it was given. To make a state of "
        "another kind, use jit_step(..., donate=False)."
    )
    if path.startswith("model_state"):
        hint = (
            "Return the eqx.nn.State with the dtypes and shapes that it had. To "
            "compute in low precision, cast the model and the batch, as in model = "
            "rx.cast(model, dtype), but not the State."
        )
    raise ValueError(
        f"the step changes the state: {path} was {was} and became {became}. {hint}"
    )


def check_alive(state: TrainState) -> None:
    """Raise `ValueError` if arrays of the state were donated to a step."""
    arrays = {**state.params, **state.frozen, **state.model_state, "step": state.step}
    for path, x in arrays.items():
        lack = lack_of_value(x)
        if lack is not None and isinstance(x, jax.Array):
            raise ValueError(
                f"state: its array {path} {lack}. Use what the step or fit returned, "
                "or pass it a copy, jax.tree.map(jnp.copy, state)."
            )
