"""The definition of an entry of the zoo, and the small pieces that its models share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx

D, F, HEADS, VOCAB, SEQ, LAYERS = 32, 64, 8, 64, 8, 2
NUM_STACKED = 4  # divides over tensor=4, so that splitting the dim of layers is a mistake one can make

COL = ("tensor",)  # dim 0 of an (out, in) weight, or of its bias; the vocabulary dim of a table
ROW = (None, "tensor")  # dim 1 of an (out, in) weight
WHOLE = ()
VOCABULARY = COL
STACKED_COL = (None, "tensor")
STACKED_ROW = (None, None, "tensor")
EXPERTS = COL


@dataclass(frozen=True)
class Entry:
    """A tiny model and the layout that every one of its arrays should get.

    - `make`: key -> the model, an `eqx.Module` or a plain list, tuple or dict.
    - `inputs`: number of rows -> a batch of NumPy arrays with that leading dim.
    - `loss`: (model, batch) -> the mean loss. Every floating parameter has a gradient.
    - `specs`: glob over the leaf's path (`*` also crosses dots; the first match wins) -> the spec on a mesh
        with tensor=4 and fsdp=1. Trailing `None`s do not count. `...` means that any layout is right.
    - `activation_sizes`: elements per row of the batch of what a row-parallel layer gives.
    - `activation_all_reduces`: number of all-reduces in the compiled forward loss over the tensor axis
        whose result has one of those sizes (times the rows on a device), loops multiplied out. A lookup in
        a split vocabulary is one of them. `None` where the layout is not clean: `note` says why.
    """

    name: str
    make: Callable[[Any], Any]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    specs: dict[str, Any]
    activation_all_reduces: int | None = None
    note: str = ""
    activation_sizes: tuple[int, ...] = (SEQ * D,)


def strip(spec: Any) -> tuple[Any, ...]:
    """A spec (tuple or `PartitionSpec`) without its trailing `None`s, for comparison."""
    spec = tuple(spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


def goldens(entry: Entry, model: Any = None) -> dict[str, Any]:
    """`{path: spec}` for every array leaf; `...` where any layout is right."""
    model = eqx.filter_eval_shape(entry.make, jax.random.key(0)) if model is None else model
    specs = {
        path: next(spec for pattern, spec in entry.specs.items() if fnmatchcase(path, pattern))
        for path in rx.to_arrays(model)
    }
    return {path: spec if spec is ... else strip(spec) for path, spec in specs.items()}


# Layers


def linear(num_in: int, num_out: int, key: Any, *, bias: bool = True) -> eqx.nn.Linear:
    layer = eqx.nn.Linear(num_in, num_out, use_bias=bias, key=key)
    if bias:  # far enough from zero to matter in a comparison of gradients
        new = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (num_out,))
        layer = eqx.tree_at(lambda x: x.bias, layer, new)
    return layer


def linears(key: Any, *sizes: tuple[int, int], bias: bool = True) -> list[eqx.nn.Linear]:
    """A Linear for each pair of the numbers of its inputs and outputs."""
    keys = jax.random.split(key, len(sizes))
    return [linear(num_in, num_out, k, bias=bias) for (num_in, num_out), k in zip(sizes, keys)]


def mlp(key: Any, *, depth: int = 1, num_in: int = D, num_out: int = D) -> eqx.nn.MLP:
    return eqx.nn.MLP(num_in, num_out, F, depth, activation=jax.nn.gelu, key=key)


def norm(size: int = D) -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(size)


def rms_norm(size: int = D) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(size, use_bias=False)


def each(layer: Any, x: Any) -> Any:
    """A layer applied to every token."""
    return jax.vmap(layer)(x)


def stack(make: Any, key: Any, num: int = NUM_STACKED) -> Any:
    return eqx.filter_vmap(make)(jax.random.split(key, num))


def through(layers: Any, apply: Callable[[Any, Any], Any], x: Any) -> Any:
    """`x` after the layers of a list, or of a stack that a scan runs."""
    if isinstance(layers, list):
        for layer in layers:
            x = apply(layer, x)
        return x
    arrays, rest = eqx.partition(layers, eqx.is_array)
    return jax.lax.scan(lambda x, one: (apply(eqx.combine(one, rest), x), None), x, arrays)[0]


def rotate(x: Any) -> Any:
    """Rotary positions over the last dim of (time, heads, head dim)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[0])[:, None] * 10.0 ** -jnp.arange(half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    q: Any,
    k: Any,
    v: Any,
    num_heads: int,
    num_key_value_heads: int | None = None,
    *,
    causal: bool = False,
    rotary: bool = False,
    bias: Any = None,
    scale: bool = True,
) -> Any:
    """Attention of (time, heads * head dim) arrays."""
    num_key_value_heads = num_key_value_heads or num_heads
    q = q.reshape(len(q), num_heads, -1)
    k, v = (x.reshape(len(x), num_key_value_heads, -1) for x in (k, v))
    if rotary:
        q, k = rotate(q), rotate(k)

    def repeat(x):
        shape = (*x.shape[:2], num_heads // num_key_value_heads, x.shape[2])
        return jnp.broadcast_to(x[:, :, None], shape).reshape(len(x), num_heads, -1)

    k, v = repeat(k), repeat(v)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (math.sqrt(q.shape[-1]) if scale else 1.0)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(len(q), -1)


# Batches and losses


def tokens(batch_size: int, *, vocab: int = VOCAB, seq: int = SEQ, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, vocab, (batch_size, seq + 1), dtype=np.int32)}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def language_loss(apply: Callable[[Any, Any], Any]) -> Any:
    """Mean next-token cross-entropy of `apply: model, (time,) ints -> (time, vocab)`."""

    def loss(model: Any, batch: Any) -> Any:
        logits = jax.vmap(lambda ids: apply(model, ids))(batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:])

    return loss


def pairs(*shape: int, out: tuple[int, ...] | None = None) -> Callable[[int], dict[str, Any]]:
    """Batches of `x` with rows of `shape`, and `y` with rows of `out`."""

    def inputs(batch_size: int) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(batch_size, *shape)).astype(np.float32)
        y = rng.normal(size=(batch_size, *(shape if out is None else out))).astype(np.float32)
        return {"x": x, "y": y}

    return inputs


def squared_loss(apply: Callable[[Any, Any], Any] = lambda model, x: model(x)) -> Any:
    """Mean squared error of `apply(model, row)`."""

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((jax.vmap(lambda x: apply(model, x))(batch["x"]) - batch["y"]) ** 2)

    return loss
