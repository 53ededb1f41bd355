"""The base of models, with the keys of Hugging Face's files as paths, and its stack of layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import Remat
from redco_eqx._parallel.scan import scan_layers
from redco_eqx.models._blocks.attention import Implementation
from redco_eqx.models._blocks.config import BaseConfig
from redco_eqx.models._blocks.context import Cache, Context, Hidden, Memory


class Options(TypedDict, total=False):
    """Options for running any model.

    - `remat`: what the backward pass recomputes, see `scan_layers`. The default is `none`.
    - `attention`: `"xla"` or `"cudnn"`, as for `jax.nn.dot_product_attention`. By default, cuDNN's on GPUs in
        half precision if there is no mask, bias or dropout, and XLA's otherwise.
    - `sequence_parallel`: true to split the stream between layers over `tensor` along the tokens, see
        `scan_layers`. The number of tokens must divide evenly. Do not use it with a cache.
    """

    remat: Remat
    attention: Implementation | None
    sequence_parallel: bool


class Model(eqx.Module):
    """A model that `load_pretrained` loads and `save_pretrained` writes.

    A family declares `config`, a static field of its own `Config`, and its arrays under their names in files.
    `Family(config, *, stacked=False, key, **options)` makes it, with `Options`; `stacked` is as for
    `make_layers`, and all arrays are float32. The class variables describe the keys that differ from its paths.
    """

    config: eqx.AbstractVar[Any]
    remat: Remat = eqx.field(static=True)
    attention: Implementation | None = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)

    architecture: ClassVar[str | None] = None
    """The model's name in `config.json`, if its configuration serves several."""
    heads: ClassVar[tuple[str, ...]] = ()
    """Modules that the files may lack. `load_pretrained` makes new ones if it has a key."""
    stacks: ClassVar[tuple[str, ...]] = ()
    """Paths of the layers, as a list or stacked."""
    inner_stacks: ClassVar[tuple[str, ...]] = ()
    """Paths inside of a layer, of modules whose arrays have a leading dim for the number of an expert."""
    in_first_layer: ClassVar[Mapping[str, str]] = {}
    """Modules that all layers share: their place in stacked layers, and in files, where the first layer has
    them.
    """
    fused: ClassVar[tuple[str, ...]] = ()
    """Patterns (`re.search`) of the paths of arrays whose last two dims are one dim in files."""
    vocabulary: ClassVar[tuple[str, ...]] = ()
    """Patterns of the paths of modules whose arrays have a row per token, see `pad_vocabulary`."""
    prefixes: ClassVar[tuple[str, ...]] = ()
    """The prefix that turns the keys of the bare model, as some files have them, into paths."""
    outer: ClassVar[tuple[str, ...]] = ()
    """The prefix of this model's keys in files of a larger model."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Patterns for parts of keys in old files, and their current names."""
    windowed: ClassVar[tuple[str, ...]] = ()
    """Patterns of the keys of matrices that old files store as convolutions of one pixel."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of keys in old files that are not parameters."""
    tied: ClassVar[Mapping[str, str]] = {}
    """Heads that the model leaves out when the configuration ties them, and the table that each one uses."""
    tied_by_file: ClassVar[bool] = False
    """True if the keys in the files decide `tie_word_embeddings`, whatever `config.json` says."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Paths of arrays that are never trained, see `init_state`; they are NumPy arrays."""

    def __init__(
        self,
        config: BaseConfig,
        *,
        remat: Remat = "none",
        attention: Implementation | None = None,
        sequence_parallel: bool = False,
    ):
        self.config, self.remat, self.attention = config, remat, attention
        self.sequence_parallel = sequence_parallel

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...] | None:
        """Return abstract arguments of a call on `batch_size` rows. `load_pretrained` traces it to choose the
        layout.

        By default, these are the tokens of a model with a vocabulary. `None` leaves the layout to the path
        rules.
        """
        return None if getattr(self.config, "vocab_size", None) is None else (self.example_tokens(batch_size),)

    def example_tokens(self, batch_size: int) -> jax.ShapeDtypeStruct:
        """Return at most 128 tokens in each row, abstract."""
        num_tokens = min(self.config.max_positions or 128, 128)
        return jax.ShapeDtypeStruct((batch_size, num_tokens), jnp.int32)


def make_layers(
    make_layer: Callable[..., eqx.Module],
    config: BaseConfig,
    *,
    stacked: bool,
    key: Key,
    num_layers: int | None = None,
) -> PyTree:
    """Call `make_layer(config, key=key)` `num_layers` times (`config.num_layers` by default).

    Return a list or, if `stacked`, one layer whose arrays have a leading dim for the layer number.
    """
    keys = jax.random.split(key, config.num_layers if num_layers is None else num_layers)
    if stacked:
        return eqx.filter_vmap(lambda key: make_layer(config, key=key))(keys)
    return [make_layer(config, key=key) for key in keys]


def count_layers(layers: PyTree) -> int:
    """Return the number of layers, in a list or stacked."""
    return len(layers) if isinstance(layers, list) else jax.tree.leaves(layers)[0].shape[0]


def unstack(layers: PyTree) -> list[PyTree]:
    """Return stacked layers as a list."""
    arrays, static = eqx.partition(layers, eqx.is_array)
    apart = jax.tree.map(jnp.unstack, arrays)
    return [
        eqx.combine(jax.tree.map(lambda _, x, i=i: x[i], arrays, apart), static)
        for i in range(count_layers(layers))
    ]


def run_layers(
    layers: PyTree,
    x: Hidden,
    context: Context,
    cache: Cache | None,
    *,
    remat: Remat,
    key: Key | None,
    sums: Array | None = None,
) -> tuple[Hidden, tuple[Array, ...]]:
    """Run all layers, one after another. Return the output, and the keys and values of the cache, with these
    tokens added; then `sums`, if it is given, with what the layers return in third place added.

    Each call is `layer(x, context, cache, key) -> (x, cache)`, where `cache` is the one that `Context.attend`
    takes and returns, or `None`, and `context.memory` has the layer's own keys and values.
    """
    num_layers, memory = count_layers(layers), context.memory
    keys = None if key is None else jax.random.split(key, num_layers)

    def one(given: Any, flow: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        x, cached, sums = flow
        own = None if memory is None else Memory(*given["memory"], mask=memory.mask)
        own = dataclasses.replace(context, memory=own, layer=given["index"])
        x, piece, *more = given["layer"](x, own, (*cached, given["index"]) if cached else None, given["key"])
        return x, piece[:2] if piece else (), None if sums is None else sums + more[0]

    further = {
        "index": jnp.arange(num_layers),
        "key": keys,
        "memory": None if memory is None else (memory.key, memory.value),
    }
    given = {"layer": layers, **further}
    if isinstance(layers, list):
        given = [{"layer": x, **jax.tree.map(lambda a, i=i: a[i], further)} for i, x in enumerate(layers)]
    x, cached, sums = scan_layers(
        one,
        given,
        (x, () if cache is None else (cache.key, cache.value), sums),
        remat=remat,
        batched=(True, None, None),  # the cache of all layers is changed in place
        sequence_parallel=context.sequence_parallel,
    )
    return x, cached if sums is None else (*cached, sums)
