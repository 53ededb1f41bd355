"""A model whose paths are the keys of Hugging Face's files: how one is made, and its stack of layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from redco_eqx._parallel.linear import Remat
from redco_eqx._parallel.scan import scan_layers
from redco_eqx._types import Key
from redco_eqx.models._blocks.attention import Implementation
from redco_eqx.models._blocks.config import Config
from redco_eqx.models._blocks.context import Cache, Context


class Options(TypedDict, total=False):
    """How a model is run, whatever it computes.

    - `remat`: what the backward pass recomputes, see `scan_layers`; by default `none`.
    - `attention`: implementation of `jax.nn.dot_product_attention`.
    - `sequence_parallel`: whether the stream between layers is split over `tensor` along the tokens, see
        `scan_layers`. Their number must divide. Not with a cache.
    """

    remat: Remat
    attention: Implementation | None
    sequence_parallel: bool


class Model(eqx.Module):
    """What `load_pretrained` makes and `save_pretrained` writes.

    A family declares `config`, a static field of its own `Config`, and its arrays under the names that files
    have. It is made by `Family(config, *, stacked=False, key, **options)`, with `Options`; `stacked` is as for
    `make_layers`, and all arrays are float32. What keys are not its paths it says in the class variables.
    """

    config: eqx.AbstractVar[Any]
    remat: Remat = eqx.field(static=True)
    attention: Implementation | None = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ()
    """Paths below which layers lie, as a list or stacked."""
    fused: ClassVar[tuple[str, ...]] = ()
    """Patterns (`re.search`) of the paths of arrays whose last two dims are one in files."""
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Projections that files hold as one, their outputs side by side: its name there, and of which, in the
    order of the fields."""
    prefixes: ClassVar[tuple[str, ...]] = ()
    """With what the keys of the bare model, as some files have them, become paths."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of keys that old files have and that are no parameters."""
    tied: ClassVar[Mapping[str, str]] = {}
    """Heads that the model leaves out when the configuration ties them: whose table each is."""

    def __init__(
        self,
        config: Config,
        *,
        remat: Remat = "none",
        attention: Implementation | None = None,
        sequence_parallel: bool = False,
    ):
        self.config, self.remat, self.attention = config, remat, attention
        self.sequence_parallel = sequence_parallel


def make_layers(make_layer: Callable[..., eqx.Module], config: Config, *, stacked: bool, key: Key) -> PyTree:
    """`config.num_layers` times `make_layer(config, key=key)`.

    A list; or, `stacked`, one layer whose arrays have a leading dim that numbers them.
    """
    keys = jax.random.split(key, config.num_layers)
    if stacked:
        return eqx.filter_vmap(lambda key: make_layer(config, key=key))(keys)
    return [make_layer(config, key=key) for key in keys]


def run_layers(
    layers: PyTree,
    x: Float[Array, "b t size"],
    context: Context,
    cache: Cache | None,
    *,
    num_layers: int,
    remat: Remat,
    key: Key | None,
) -> tuple[Float[Array, "b t size"], tuple[Array, ...]]:
    """All layers, one after another, and the keys and values of the cache with these tokens added.

    Each is called as `layer(x, context, cache, key) -> (x, cache)`, where `cache` is what `Context.attend`
    takes and returns, or `None`.
    """
    keys = None if key is None else jax.random.split(key, num_layers)

    def one(given: Any, flow: tuple[Array, Any]) -> tuple[Array, Any]:
        x, cached = flow
        own = dataclasses.replace(context, layer=given["index"])
        x, piece = given["layer"](x, own, (*cached, given["index"]) if cached else None, given["key"])
        return x, piece[:2] if piece else ()

    given = {"layer": layers, "index": jnp.arange(num_layers), "key": keys}
    if isinstance(layers, list):
        further = {"index": given["index"], "key": keys}
        given = [{"layer": x, **jax.tree.map(lambda a, i=i: a[i], further)} for i, x in enumerate(layers)]
    return scan_layers(
        one,
        given,
        (x, () if cache is None else (cache.key, cache.value)),
        remat=remat,
        batched=(True, None),  # the cache of all layers is changed in place
        sequence_parallel=context.sequence_parallel,
    )
