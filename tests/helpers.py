"""Code that the tests of the core share: meshes, two small models, losses, and a
counter of compilations."""

import pathlib
import struct
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import BODY, MESHES, STEP, compilations, host, paired
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from quickstart import Transformer

from redco_eqx import (
    Mean,
    batch_sharding,
    explain,
    init_state,
    make_mesh,
    shard_rules,
    train_step,
)


def in_long(*cases: Any) -> list[Any]:
    """Cases of a parametrised test that only `nox -s long` runs: they ask the same of
    more models or sizes."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.long)
        for x in cases
    ]


KEY = jax.random.key(0)


def mesh_of(name: str) -> Mesh:
    return make_mesh(**MESHES[name])


def abstract_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    return AbstractMesh(
        (data, fsdp, tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
    )


def mesh_on(platform: str, kind: str, **sizes: int) -> AbstractMesh:
    """A mesh of devices that are not there, of this platform and kind."""
    axes = {"data": 1, "fsdp": 1, "tensor": 1, **sizes}
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        (AxisType.Auto,) * len(axes),
        abstract_device=AbstractDevice(
            device_kind=kind, num_cores=1, platform=platform
        ),
    )


def abstract(make: Any) -> Any:
    """`make(key)` with shapes for its arrays."""
    return eqx.filter_eval_shape(make, jax.random.key(0))


def decide(
    model: Any, mesh: Any, overrides: Any = (), loss_fn: Any = None, batch: Any = None
) -> Any:
    """The decision for each array, by path."""
    return explain(
        model, mesh, overrides=overrides, loss_fn=loss_fn, batch=batch
    ).decisions


def place(model: Any, mesh: Mesh) -> tuple[Any, Any]:
    """`model` on `mesh` by the rules, on buffers of its own, and its layout. NumPy
    constants stay such."""
    shardings = shard_rules(model, mesh)

    def put(x: Any, sharding: Any) -> Any:
        return jax.device_put(jnp.copy(x), sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(put, model, shardings), shardings


class Stepped(NamedTuple):
    before: Any
    state: Any
    metrics: Any
    compiled: Any


def stepped(
    model: Any, batch: Any, mesh: Mesh, loss_fn: Any, optimizer: Any, **options: Any
) -> Stepped:
    """One `train_step` of a model on a mesh, in the layout of the rules, or in
    `shardings`."""
    if "shardings" not in options:
        options["shardings"] = shard_rules(model, mesh)
    before = init_state(
        eqx.filter_shard(model, options["shardings"]), optimizer, key=jax.random.key(1)
    )
    step = partial(train_step, loss_fn=loss_fn, optimizer=optimizer, **options)
    rows = jax.device_put(batch, batch_sharding(mesh))
    compiled = jax.jit(step).lower(before, rows).compile()
    state, metrics = compiled(before, rows)
    return Stepped(before, state, metrics, compiled)


def compiled_step(loss_fn: Any, optimizer: Any, **options: Any) -> Any:
    return jax.jit(partial(train_step, loss_fn=loss_fn, optimizer=optimizer, **options))


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves by the path that JAX spells."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in pairs
    }


def ratio(loss_fn: Any, name: str | None = None) -> Any:
    """The loss (or a metric) as plain division of sums."""

    def f(model: Any, batch: Any) -> Any:
        loss, metrics = loss_fn(model, batch, None)
        mean = loss if name is None else metrics[name]
        return mean.total / mean.weight

    return f


def assert_same_layout(tree: Any, other: Any) -> None:
    """Each array of `tree` lies as the one of `other` does (however the spec is
    spelled)."""
    for path, x, y in paired(tree, other):
        assert x.shape == y.shape, path
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (
            path,
            x.sharding,
            y.sharding,
        )


def refused(name: str, call: Any, words: str, *more: Any) -> Any:
    """A case of a test of bad arguments, with its id: what is called, and what the
    message must name, with ` ... ` between."""
    return pytest.param(call, words, *more, id=name)


def assert_refused_early(call: Any, exception: type[Exception], words: str) -> None:
    """The call raises exactly this exception, whose message and notes name all `words`,
    and no step was compiled before."""
    with compilations() as compiled, pytest.raises(exception) as caught:
        call()
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert caught.type is exception
    missing = [part for part in words.split(" ... ") if part not in message]
    assert not missing, message
    assert not {BODY, STEP} & set(compiled)


def assert_close(tree: Any, other: Any, *, rtol: float, atol: float = 0.0) -> None:
    """The same structure, and equal arrays to a tolerance."""
    for path, x, y in paired(tree, other):
        np.testing.assert_allclose(
            host(x), host(y), rtol=rtol, atol=atol, err_msg=str(path)
        )


def filled(model: Any, dtype: Any, seed: int) -> Any:
    """An abstract model with random numbers for its arrays: compiles nothing, unlike an
    initialisation."""
    rng = np.random.default_rng(seed)

    def one(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jnp.asarray(rng.normal(size=x.shape, scale=x.shape[-1] ** -0.5), dtype)

    return jax.tree.map(one, model)


def make_mlp(dtype: Any = jnp.float32, seed: int = 0) -> eqx.nn.MLP:
    """64 -> 128 -> 64: large enough that `fsdp` splits it."""
    return filled(
        abstract(lambda key: eqx.nn.MLP(64, 64, 128, 1, key=key)), dtype, seed
    )


def make_transformer(dtype: Any = jnp.float32, seed: int = 0) -> Transformer:
    return filled(
        abstract(lambda key: Transformer(dim=64, num_heads=8, num_layers=1, key=key)),
        dtype,
        seed,
    )


def mlp_batch(
    seed: int, size: int = 16, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """Rows of unequal weight, some of them 0."""
    rng = np.random.default_rng(seed)
    rows = {name: rng.normal(size=(size, 64)).astype(dtype) for name in ("x", "y")}
    return {**rows, "weight": rng.integers(0, 4, size).astype(dtype)}


def token_batch(
    seed: int, size: int = 16, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (size, 5)).astype(np.int32)
    return {"tokens": tokens, "weight": rng.integers(0, 3, (size, 4)).astype(dtype)}


def squared_error(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Mean]]:
    """The weighted mean of squared errors, and of absolute ones."""
    error = jax.vmap(model)(batch["x"]) - batch["y"]
    weight = batch["weight"]
    total, absolute = (
        jnp.sum(weight * jnp.mean(x, axis=1)) for x in (error**2, jnp.abs(error))
    )
    return Mean(total, jnp.sum(weight)), {"absolute": Mean(absolute, jnp.sum(weight))}


def cross_entropy(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Mean]]:
    """Next-token cross-entropy, weighted by token, and the share of hits."""
    tokens, weight = batch["tokens"], batch["weight"]
    logits = jax.vmap(model)(tokens[:, :-1])
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1
    )[..., 0]
    hits = jnp.argmax(logits, axis=-1) == tokens[:, 1:]
    count = jnp.sum(weight)
    return Mean(-jnp.sum(weight * picked), count), {
        "hits": Mean(jnp.sum(weight * hits), count)
    }


def events(directory: pathlib.Path) -> list[Any]:
    """Return the events in TensorBoard's files."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    found = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        at = 0
        # Length (8 bytes), its checksum (4), the event, its checksum (4).
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found
