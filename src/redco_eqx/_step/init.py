"""`init_state`: make a state from a model, with the layout of the model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding

from redco_eqx._base.captured import check_captured
from redco_eqx._base.pairs import is_pair
from redco_eqx._base.protocols import Key, as_key
from redco_eqx._base.tree import (
    buffer_paths,
    first_few,
    is_array,
    is_trainable,
    path_of,
    to_arrays,
    to_paths,
)
from redco_eqx._base.warn import warn
from redco_eqx._sharding.mesh import (
    STORED,
    in_own_context,
    one_device_mesh,
    put_global,
    replicated,
)
from redco_eqx._step.buffers import check_buffers
from redco_eqx._step.optimizer import check_is_optimizer, init_optimizer
from redco_eqx._step.state import Structure, TrainState
from redco_eqx._step.static import check_static


@in_own_context
def init_state(
    model: Any,
    optimizer: optax.GradientTransformation | None = None,
    *,
    key: Key,
    trainable: Any = is_trainable,
) -> TrainState:
    """Create the state of a new run, on the mesh of the model's arrays.

    The state shares the model's arrays without a copy, so a step that donates the state
    also deletes the model's arrays, except those that are not trained.

    ```python
    state = rx.init_state(model, optimizer, key=jax.random.key(1))

    # The last matrix alone:
    frozen = jax.tree.map(lambda _: False, model)
    last = eqx.tree_at(lambda m: m.layers[-1].weight, frozen, True)
    state = rx.init_state(model, optimizer, key=jax.random.key(1), trainable=last)
    ```

    **Arguments:**

    - `model`: an Equinox model, or the pair `(model, eqx.nn.State)` of
        `eqx.nn.make_with_state`. If the arrays are abstract (`jax.ShapeDtypeStruct`,
        with or without a sharding), the state is abstract too. The state copies each
        list, dict or set in a static field: a later change of it has no effect on the
        state.
    - `optimizer`: an optax optimizer. Its state is created with the shardings of the
        parameters. Without an optimizer, you can use the state only for evaluation and
        prediction.
    - `key`: the PRNG key for all randomness of the run.
    - `trainable`: a filter spec as in `eqx.filter`: a function of a leaf, or a tree of
        booleans. By default, every floating JAX array is trained. NumPy arrays,
        integers, keys, and floats of less than 16 bits are never trained. (`init_model`
        keeps NumPy arrays as they are, but `eqx.filter_shard` and
        `eqx.filter_eval_shape` do not.) Arrays that the class of a module lists in a
        tuple `buffers`, by their paths in the module, are never trained either.

    **Raises:**

    `ValueError` that names the leaf: two leaves share a buffer, a static field has an
    array or a value that can be neither hashed nor compared with a copy of it, a
    function in the model holds an array (in a closure, for example), arrays are on
    different meshes, an array is deleted, or no leaf is trainable although you passed
    an optimizer. `TypeError` for an argument of another type.
    """
    if isinstance(model, TrainState):
        raise TypeError(
            "init_state: this is a TrainState already. For a new one, pass state.model."
        )
    if isinstance(model, type):
        raise TypeError(
            f"init_state: model is the class {model.__name__}. Pass "
            f"{model.__name__}(..., key=key)."
        )
    if optimizer is not None:
        check_is_optimizer("init_state", optimizer)
    model, model_state = model if is_pair(model) else (model, None)
    check_static(model)
    check_static(model_state)
    if constants := check_captured("init_state", model):
        warn(
            f"init_state: {first_few(constants)} is a function that holds a JAX "
            "array. A step takes it as a constant: it is not trained, and no "
            "checkpoint has it. To train it, make it a field of the module. To say "
            "that it is a constant, make it a NumPy array."
        )
    if model_state is None:
        _check_no_index(model)
    arrays = to_arrays(model)
    state_arrays = {} if model_state is None else to_arrays(model_state)
    chosen = to_paths(
        _filtered(model, trainable), lambda x: is_array(x) and is_trainable(x)
    )
    for path in buffer_paths(model):
        chosen.pop(path, None)
    if optimizer is not None and not arrays:
        raise ValueError(
            f"init_state: model is a {type(model).__name__} without arrays, so an "
            "optimizer has nothing to train. Pass an Equinox model. (A model of "
            "another library, such as PyTorch, is none.)"
        )
    if optimizer is not None and not chosen:
        raise ValueError(
            f"init_state: none of the {len(arrays)} arrays of the model is trainable, "
            "but an optimizer was given. Floating JAX arrays can be trained; check "
            "`trainable`."
        )
    key = as_key("init_state", key)
    place, layout = _placement(arrays, state_arrays)
    frozen = {path: place(path, x) for path, x in arrays.items() if path not in chosen}
    params = {path: place(path, x) for path, x in chosen.items()}
    return TrainState(
        params=params,
        frozen=frozen,
        model_state={path: place(path, x) for path, x in state_arrays.items()},
        opt_state=()
        if optimizer is None
        else init_optimizer(optimizer, params, layout),
        # Copy the key, because the caller may use it after the state is donated.
        key=place(
            None, key if isinstance(key, jax.ShapeDtypeStruct) else jnp.copy(key)
        ),
        step=place(None, np.zeros((), np.int32)),
        structure=(
            Structure(model),
            None if model_state is None else Structure(model_state),
        ),
        stored=tuple(
            path
            for path in arrays
            if layout is not None and STORED in tuple(layout[path].spec)
        ),
    )


def _check_no_index(model: Any) -> None:
    """Raise `ValueError` if layers of the model need an `eqx.nn.State` that was not
    passed."""
    for keypath, x in jax.tree.leaves_with_path(
        model, is_leaf=lambda x: isinstance(x, eqx.nn.StateIndex)
    ):
        if isinstance(x, eqx.nn.StateIndex):
            raise ValueError(
                f"init_state: {path_of(keypath)} keeps a value between steps (such as "
                "BatchNorm's statistics), but there is no eqx.nn.State. Make both with "
                "model, model_state = eqx.nn.make_with_state(...)(...), and pass the "
                "pair (model, model_state)."
            )


def _placement(
    arrays: dict[str, Any], state_arrays: dict[str, Any]
) -> tuple[Callable[[str | None, Any], Any], dict[str, NamedSharding] | None]:
    """Return a function that places an array by path (`None`: replicated), and the
    layout of `arrays`.

    The arrays of an `eqx.nn.State` (`state_arrays`) are replicated.

    Under a trace, and for abstract arrays without a mesh, nothing is placed, and the
    layout is `None`.
    """
    if any(isinstance(x, Tracer) for x in arrays.values()):
        return lambda _, x: jnp.asarray(x), None
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays.values())
    if not abstract:
        check_buffers("init_state", {**arrays, **state_arrays})
    shardings = {path: getattr(x, "sharding", None) for path, x in arrays.items()}
    layout = {
        path: sharding
        for path, sharding in shardings.items()
        if isinstance(sharding, NamedSharding)
    }
    if abstract and not layout:
        return lambda _, x: jax.ShapeDtypeStruct(x.shape, x.dtype), None
    meshes = {path: sharding.mesh for path, sharding in layout.items()}
    for path, x in arrays.items():
        if isinstance(x, jax.Array) and path not in layout:
            meshes[path] = one_device_mesh(next(iter(x.devices())))
    source, mesh = next(
        iter(meshes.items()), ("", one_device_mesh(jax.local_devices()[0]))
    )
    for path, other in meshes.items():
        if other != mesh and (other.size > 1 or _described(other) != _described(mesh)):
            raise ValueError(
                f"init_state: {source} lies on {_described(mesh)}, but {path} on "
                f"{_described(other)}. Place the whole model with "
                "eqx.filter_shard(model, shard_rules(model, mesh))."
            )
    whole = replicated(mesh)
    layout = {path: layout.get(path, whole) for path in arrays}

    def place(path: str | None, x: Any) -> Any:
        sharding = whole if path is None else layout.get(path, whole)
        if abstract:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.Array) and x.aval.weak_type:
            # It would no longer be weak after the first update.
            x = jax.lax.convert_element_type(x, x.dtype)
        return put_global(x, sharding)

    return place, layout


def _described(mesh: Any) -> str:
    return (
        str(mesh.devices.item())
        if mesh.size == 1
        else f"a mesh of {mesh.size} devices, {dict(mesh.shape)}"
    )


def _filtered(model: Any, trainable: Any) -> Any:
    """`eqx.filter(model, trainable)`. Raises `TypeError` for something else than a
    function of a leaf, or a tree of booleans like the model."""
    try:
        return eqx.filter(model, trainable)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "init_state: trainable must be a function of a leaf that returns a "
            "boolean, or a tree like the model with booleans for leaves, but is a "
            f"{type(trainable).__name__}. To train one layer: eqx.tree_at(lambda "
            "m: m.layer, jax.tree.map(lambda _: False, model), True). (eqx.filter: "
            f"{str(error).splitlines()[0]})"
        ) from error
