"""`TrainState`: all arrays of a run, flat and named; sharded birth of models and of optimizer state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx._mesh import one_device_mesh, put, replicated
from redco_eqx._rules import Overrides, shard_rules
from redco_eqx._static import Structure, check_static
from redco_eqx._tree import is_array, is_trainable, join, leaves_with_paths, path_of, to_arrays, to_paths
from redco_eqx._types import Key

M = TypeVar("M")

# Streams of randomness that one key gives, separated before any number is folded in.
TRAIN, EVALUATE, PREDICT, ORDER = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step reads and writes. All leaves are arrays; made by `init_state`.

    It is a PyTree that plain `jax.jit`, `lax.scan`, `vmap`, `grad` and `eval_shape` take without any
    filtering, and `dataclasses.replace` makes a changed copy. Arrays of the model are held flat, by path,
    so a state of a thousand leaves is flattened in C++ and reads like a checkpoint.

    - `params`: the trainable arrays, `{path: array}`.
    - `frozen`: the model's other arrays.
    - `model_state`: the arrays of its `eqx.nn.State`; empty if it has none.
    - `opt_state`: of the optax optimizer, over `params`; `()` without an optimizer.
    - `key`: a typed PRNG key; never consumed, all randomness is folded from it and `step`.
    - `step`: number of steps taken, int32.
    - `structure`: what the model is besides its arrays, and the same of its `eqx.nn.State`.
    """

    params: dict[str, Any]
    frozen: dict[str, Any]
    model_state: dict[str, Any]
    opt_state: PyTree
    key: Any
    step: Any
    structure: tuple[Structure, Structure | None] = dataclasses.field(metadata={"static": True})

    @property
    def model(self) -> Any:
        """The model, or the pair `(model, eqx.nn.State)` if it was given as one."""
        return self.build(self.params, self.model_state)

    def build(self, params: dict[str, Any], model_state: dict[str, Any]) -> Any:
        """The model with these arrays in place of the state's own."""
        structure, state_structure = self.structure
        model = structure.build({**params, **self.frozen})
        return model if state_structure is None else (model, state_structure.build(model_state))


def stream(state: TrainState, tag: int) -> Key:
    """The key of one stream of randomness at this step."""
    return jax.random.fold_in(jax.random.fold_in(state.key, tag), state.step)


def step_of(state: TrainState) -> int:
    """`state.step` as a number. It is read from a copy: JAX 0.11 on CPU donates no array that was read."""
    step = state.step
    return int(jnp.copy(step.addressable_data(0)) if isinstance(step, jax.Array) else step)


def check_alive(state: TrainState) -> None:
    """Refuses, by `ValueError`, a state whose arrays were donated to a step."""
    arrays = {**state.params, **state.frozen, **state.model_state, "step": state.step}
    for path, x in arrays.items():
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise ValueError(
                f"state: its array {path} has been deleted. The state was donated to a step or to fit: use "
                "what that returned, or call fit(..., donate=False)."
            )


def init_model(make_model: Callable[[Key], M], mesh: Mesh, *, key: Key, overrides: Overrides = ()) -> M:
    """`make_model(key)`, born on `mesh` in the layout of `shard_rules`.

    The initialisation is run one operation at a time and each array is placed as soon as it is there, so
    no more than one is unsharded at any moment, and the values are those of `make_model(key)`.

    **Arguments:**

    - `make_model`: makes the model from a key. Its arrays must not depend on anything outside.
    - `mesh`, `overrides`: as for `shard_rules`.
    - `key`: a PRNG key.

    **Returns:**

    The model, or what else `make_model` returns (the pair of `eqx.nn.make_with_state`, say).

    **Raises:**

    `ValueError` as `shard_rules` does, before anything is computed.
    """
    statics = []

    def make_arrays(key: Key) -> list[Any]:
        made = make_model(key)
        dynamic, static = eqx.partition(made, lambda x: isinstance(x, jax.Array))
        statics.append((jax.tree.structure(dynamic), static))
        return jax.tree.leaves(dynamic)

    program = jax.make_jaxpr(make_arrays)(key)
    treedef, static = statics[-1]
    paths = [path for path, _ in leaves_with_paths(jax.tree.unflatten(treedef, range(treedef.num_leaves)))]
    first: dict[Any, str] = {}
    for path, var in zip(paths, program.jaxpr.outvars):
        if not isinstance(var, jex_core.Literal) and first.setdefault(var, path) != path:
            raise ValueError(
                f"init_model: {first[var]} and {path} are one and the same array, which would be updated "
                "twice, apart. Tie them by eqx.nn.Shared, or copy one (jnp.copy)."
            )
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
    abstract = eqx.combine(jax.tree.unflatten(treedef, abstract), static)
    if _is_pair(abstract):
        model, model_state = abstract
        layout = shard_rules(model, mesh, overrides=overrides)
        layout = (layout, jax.tree.map(lambda _: replicated(mesh), model_state))
    else:
        layout = shard_rules(abstract, mesh, overrides=overrides)
    # NumPy constants are not part of the program: they stay as they are.
    layout = eqx.filter(layout, jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), abstract))
    arrays = _evaluate(program, key, jax.tree.leaves(layout))
    return eqx.combine(jax.tree.unflatten(treedef, arrays), static)


def _evaluate(program: Any, key: Key, shardings: list[NamedSharding]) -> list[Array]:
    """The outputs of a traced program, each placed as soon as it is computed; the rest is dropped early."""
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts))
    env[jaxpr.invars[0]] = key
    last_use = {var: i for i, equation in enumerate(jaxpr.eqns) for var in _variables(equation.invars)}
    results: list[Any] = [None] * len(shardings)

    def keep(var: Any, value: Any) -> None:
        for index, output in enumerate(jaxpr.outvars):
            if output is var:
                results[index] = put(value, shardings[index])

    for var, value in env.items():
        keep(var, value)
    for index, output in enumerate(jaxpr.outvars):
        if isinstance(output, jex_core.Literal):
            results[index] = put(jnp.asarray(output.val), shardings[index])
    for i, equation in enumerate(jaxpr.eqns):
        variables = list(dict.fromkeys(_variables(equation.invars)))
        single = jaxpr.replace(
            constvars=(), invars=variables, outvars=equation.outvars, eqns=[equation], effects=equation.effects
        )
        run = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(single, ()))
        values = run(*(env[var] for var in variables))
        for var, value in zip(equation.outvars, values):
            keep(var, value)
            if var in last_use:
                env[var] = value
        for var in variables:
            if last_use[var] == i:
                del env[var]
        values = value = None  # or the last array would live on, whole, while the next is made
    return results


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def init_state(
    model: Any,
    optimizer: optax.GradientTransformation | None = None,
    *,
    key: Key,
    trainable: Any = is_trainable,
) -> TrainState:
    """The state of a new run of `model`, on the mesh that its arrays lie on.

    The arrays are taken, not copied: a step that donates the state deletes the model's too.

    **Arguments:**

    - `model`: an Equinox model, or the pair `(model, eqx.nn.State)` of `eqx.nn.make_with_state`. Its arrays
        may be abstract (`jax.ShapeDtypeStruct`, with or without a sharding): so is the state then.
    - `optimizer`: its state is born with the shardings of its parameters. Without one, the state serves
        evaluation and prediction.
    - `key`: a PRNG key, of which all randomness of the run comes.
    - `trainable`: a filter spec as in `eqx.filter`: a function of a leaf, or a tree of booleans. By default
        every floating JAX array. NumPy arrays, integers and keys are never trained; `init_model` keeps NumPy
        arrays, but `eqx.filter_shard` makes JAX arrays of them.

    **Raises:**

    `ValueError`, naming the leaf: one buffer held by two leaves, an array or an unhashable value in a static
    field, arrays on different meshes, a deleted array, or no trainable leaf although there is an optimizer.
    """
    model, model_state = model if _is_pair(model) else (model, None)
    check_static(model)
    arrays = to_arrays(model)
    state_arrays = {} if model_state is None else to_arrays(model_state)
    chosen = to_paths(eqx.filter(model, trainable), lambda x: is_array(x) and is_trainable(x))
    if optimizer is not None and not chosen:
        raise ValueError(
            f"init_state: none of the {len(arrays)} arrays of the model is trainable, but an optimizer was "
            "given. Floating JAX arrays can be trained; check `trainable`."
        )
    key = _check_key(key)
    place, layout = _placement(arrays, state_arrays)
    frozen = {path: place(path, x) for path, x in arrays.items() if path not in chosen}
    params = {path: place(path, x) for path, x in chosen.items()}
    return TrainState(
        params=params,
        frozen=frozen,
        model_state={path: place(path, x) for path, x in state_arrays.items()},
        opt_state=() if optimizer is None else _init_optimizer(optimizer, params, layout),
        # A copy: the caller goes on with this key, also once the state is donated.
        key=place(None, key if isinstance(key, jax.ShapeDtypeStruct) else jnp.copy(key)),
        step=place(None, jnp.zeros((), jnp.int32)),
        structure=(Structure(model), None if model_state is None else Structure(model_state)),
    )


def _is_pair(model: Any) -> bool:
    return isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State)


def _check_key(key: Any) -> Any:
    if is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32:
        return jax.random.wrap_key_data(key)
    raise ValueError(f"init_state: key must be a PRNG key (jax.random.key(0)), but is {key!r}.")


def _placement(
    arrays: dict[str, Any],
    state_arrays: dict[str, Any],
) -> tuple[Callable[[str | None, Any], Any], dict[str, NamedSharding] | None]:
    """A function that places an array by path (`None`: replicated), and where each of `arrays` lies.

    What an `eqx.nn.State` holds (`state_arrays`) is replicated.

    Under a trace, and for abstract arrays without a mesh, nothing is placed and the layout is `None`.
    """
    if any(isinstance(x, Tracer) for x in arrays.values()):
        return lambda _, x: jnp.asarray(x), None
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays.values())
    if not abstract:
        _check_buffers({**arrays, **state_arrays})
    mesh, source = None, ""
    layout = {}
    for path, x in arrays.items():
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            if mesh is not None and sharding.mesh != mesh:
                raise ValueError(
                    f"init_state: {source} and {path} lie on different meshes: {mesh} and {sharding.mesh}. "
                    "Place the whole model by eqx.filter_shard(model, shard_rules(model, mesh))."
                )
            mesh, source = sharding.mesh, path
            layout[path] = sharding
    if mesh is None:
        if abstract:
            return lambda _, x: jax.ShapeDtypeStruct(x.shape, x.dtype), None
        devices = {d for x in arrays.values() if isinstance(x, jax.Array) for d in x.devices()}
        if len(devices) > 1:
            raise ValueError(
                f"init_state: the model's arrays lie on {len(devices)} devices without a mesh. Place the "
                "whole model by eqx.filter_shard(model, shard_rules(model, mesh))."
            )
        mesh = one_device_mesh(next(iter(devices), jax.local_devices()[0]))
    whole = replicated(mesh)
    for path, x in arrays.items():
        if isinstance(x, jax.Array) and path not in layout and layout and mesh.size > 1:
            raise ValueError(
                f"init_state: {source} lies on a mesh of {mesh.size} devices, but {path} on one device. "
                "Place the whole model by eqx.filter_shard(model, shard_rules(model, mesh))."
            )
    layout = {path: layout.get(path, whole) for path in arrays}

    def place(path: str | None, x: Any) -> Any:
        sharding = whole if path is None else layout.get(path, whole)
        if abstract:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.Array) and x.aval.weak_type:  # it would not be weak after the first update
            x = jax.lax.convert_element_type(x, x.dtype)
        return put(x, sharding)

    return place, layout


def _check_buffers(arrays: dict[str, Any]) -> None:
    owners: dict[Any, str] = {}
    for path, x in arrays.items():
        if not isinstance(x, jax.Array):
            continue
        if x.is_deleted():
            raise ValueError(
                f"init_state: {path} has been deleted. It was donated, perhaps with an earlier state."
            )
        for buffer in _buffers(x):
            if owners.setdefault(buffer, path) != path:
                raise ValueError(
                    f"init_state: {owners[buffer]} and {path} are one and the same array, which would be "
                    "updated twice, apart. Tie them by eqx.nn.Shared, or copy one (jnp.copy)."
                )


def _buffers(x: jax.Array) -> list[Any]:
    """What tells whether two arrays share any memory: the address of each piece, and its device."""
    if x.size == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [id(x)]
    return [(piece.device, piece.data.unsafe_buffer_pointer()) for piece in x.addressable_shards]


def _init_optimizer(
    optimizer: optax.GradientTransformation,
    params: dict[str, Any],
    layout: dict[str, NamedSharding] | None,
) -> PyTree:
    def init(params: dict[str, Any]) -> PyTree:
        # Weak types would change at the first update, and compile the step twice.
        return jax.tree.map(
            lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), optimizer.init(params)
        )

    if layout is None:
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in params.values())
        return jax.eval_shape(init, params) if abstract else init(params)
    shapes = jax.eval_shape(init, params)
    shardings = like_params(shapes, params, {path: layout[path] for path in params})
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in params.values()):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return jax.jit(init, out_shardings=shardings)(params)


def like_params(
    opt_state: PyTree, params: dict[str, Any], shardings: dict[str, NamedSharding]
) -> PyTree[NamedSharding]:
    """For each array of an optimizer state, the sharding of the parameter that it belongs to.

    An array with a parameter's shape takes its sharding. One that lacks a single dim (Adafactor's factored
    moments) takes what is left of it, if that is unambiguous. All else is replicated.
    """
    whole = replicated(next(iter(shardings.values())).mesh)

    def one(keypath: tuple[Any, ...], x: Any) -> NamedSharding:
        owner = next((e.key for e in reversed(keypath) if getattr(e, "key", None) in shardings), None)
        if owner is None:
            return whole
        shape, sharding = params[owner].shape, shardings[owner]
        if x.shape == shape:
            return sharding
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        left = {
            spec[:dim] + spec[dim + 1 :]
            for dim in range(len(shape))
            if shape[:dim] + shape[dim + 1 :] == x.shape
        }
        return NamedSharding(whole.mesh, PartitionSpec(*left.pop())) if len(left) == 1 else whole

    return jax.tree_util.tree_map_with_path(one, opt_state)


def check_optimizer(state: TrainState, optimizer: optax.GradientTransformation) -> None:
    """Refuses, by `ValueError`, an optimizer whose state is not the one that `state` holds."""

    def describe_all(tree: PyTree) -> dict[str, str]:
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {path_of(keypath): f"{x.dtype}{list(x.shape)}" for keypath, x in flat}

    expected = describe_all(jax.eval_shape(optimizer.init, state.params))
    found = describe_all(state.opt_state)
    for path in sorted({*expected, *found}):
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"the optimizer does not fit the state: at {join('opt_state', path)} it keeps "
                f"{expected.get(path, 'nothing')}, but the state holds {found.get(path, 'nothing')}. Pass the "
                "optimizer that was given to init_state."
            )
