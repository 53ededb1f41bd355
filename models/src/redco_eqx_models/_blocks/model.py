"""The base of models, with the keys of Hugging Face's files as paths, and its stack of
layers."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypedDict, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx import to_arrays
from redco_eqx.layers import activation_axes, scan_layers
from redco_eqx.types import Key, Remat
from redco_eqx_models._blocks.attention import Implementation
from redco_eqx_models._blocks.config import BaseConfig
from redco_eqx_models._blocks.context import Cache, Context, Hidden, Ids, Memory


class Options(TypedDict, total=False):
    """Options for running any model.

    - `remat`: the activations that the backward pass keeps: `none` (the default),
        `full`, `products`, `row_out`, or a policy of `jax.checkpoint`, see
        `scan_layers`.
    - `attention`: `"xla"`, `"cudnn"` or `"splash"`, as for
        `redco_eqx.layers.attention`. By default, a kernel on GPUs and TPUs where one
        fits, and XLA's otherwise.
    - `sequence_parallel`: true to split the stream between layers over `tensor` along
        the token dimension, see `scan_layers`. The number of tokens must divide evenly,
        and the input of the head is split, too: also pass it to `cross_entropy`. By
        default, the stream between layers is split if a device has at least a quarter
        as many tokens as the stream has features, `tensor` divides the length and the
        heads, and there is no cache. The input of the head is then whole. False leaves
        the stream whole.
    """

    remat: Remat
    attention: Implementation | None
    sequence_parallel: bool | None


class Model(eqx.Module):
    """A model that `load_pretrained` loads and `save_pretrained` writes.

    A family declares `config`, a static field of its own `Config`, and its arrays under
    their names in files. `Family(config, *, stacked=False, key, **options)` makes it,
    with `Options`; `stacked` is as for `make_layers`, and all arrays are float32. The
    class variables describe the keys that differ from its paths.
    """

    config: eqx.AbstractVar[Any]
    remat: Remat = eqx.field(static=True)
    attention: Implementation | None = eqx.field(static=True)
    sequence_parallel: bool | None = eqx.field(static=True)

    architecture: ClassVar[str | None] = None
    """The model's name in `config.json`, if its configuration serves several."""
    heads: ClassVar[tuple[str, ...]] = ()
    """Modules that the files may lack. `load_pretrained` makes new ones if it has a
    key."""
    stacks: ClassVar[tuple[str, ...]] = ()
    """Paths of the layers, as a list or stacked."""
    inner_stacks: ClassVar[tuple[str, ...]] = ()
    """Paths inside of a layer, of modules whose arrays have a leading dim for the
    number of an expert."""
    in_first_layer: ClassVar[Mapping[str, str]] = {}
    """Modules that all layers share: their place in stacked layers, and in files, where
    the first layer has them.
    """
    fused: ClassVar[tuple[str, ...]] = ()
    """Patterns (`re.search`) of the paths of arrays whose last two dims are one dim in
    files."""
    vocabulary: ClassVar[tuple[str, ...]] = ()
    """Patterns of the paths of modules whose arrays have a row per token, see
    `pad_vocabulary`."""
    prefixes: ClassVar[tuple[str, ...]] = ()
    """The prefix that turns the keys of the bare model, as some files have them, into
    paths."""
    outer: ClassVar[tuple[str, ...]] = ()
    """The prefix of this model's keys in files of a larger model."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Patterns for parts of keys in old files, and their current names."""
    windowed: ClassVar[tuple[str, ...]] = ()
    """Patterns of the keys of matrices that old files store as convolutions of one
    pixel."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of keys in files that are not parameters of this model, or of a whole
    that it is a part of."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Patterns of the keys of heads that this model does not have. `load_pretrained`
    warns about them."""
    tied: ClassVar[Mapping[str, str]] = {}
    """Heads that the model leaves out when the configuration ties them, and the table
    that each one uses."""
    tied_by_file: ClassVar[bool] = False
    """True if the keys in the files decide `tie_word_embeddings`, whatever
    `config.json` says."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Paths of arrays that are never trained, see `init_state`; they are NumPy
    arrays."""

    def __init__(
        self,
        config: BaseConfig,
        *,
        remat: Remat = "none",
        attention: Implementation | None = None,
        sequence_parallel: bool | None = None,
    ):
        _check_options(remat, attention)
        self.config = config
        self.remat = remat
        self.attention = attention
        self.sequence_parallel = sequence_parallel

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...] | None:
        """Return abstract arguments for a call on `batch_size` rows.

        `load_pretrained` traces this call to choose the layout.

        By default, these are the tokens of a model with a vocabulary. `None` leaves the
        layout to the path rules.
        """
        if getattr(self.config, "vocab_size", None) is None:
            return None
        return (self.example_tokens(batch_size),)

    def example_tokens(self, batch_size: int) -> jax.ShapeDtypeStruct:
        """Return an abstract array with at most 128 tokens in each row."""
        num_tokens = min(self.config.max_positions or 128, 128)
        return jax.ShapeDtypeStruct((batch_size, num_tokens), jnp.int32)


def _check_options(remat: Any, attention: Any) -> None:
    """Raise `ValueError` for an option that is none of its values."""
    names, _policy = get_args(Remat)
    if not callable(remat) and remat not in get_args(names):
        raise ValueError(
            f"remat={remat!r}, but it must be one of {get_args(names)}, or a "
            "policy of jax.checkpoint. Pass 'full' to recompute all layers, as "
            "gradient_checkpointing does in transformers."
        )
    implementations = get_args(Implementation)
    if attention not in (None, *implementations):
        raise ValueError(
            f"attention={attention!r}, but it must be one of {implementations}, or "
            "None for the best one on the devices."
        )


_ELSEWHERE = {
    "labels": "Compute the loss in loss_fn: cross_entropy(hidden, model.head, labels) "
    "of redco_eqx.layers, with labels that are shifted by one token. It leaves out "
    "those that are -100.",
    "position_ids": "Pass it as positions.",
    "past_key_values": "Pass a cache of model.init_cache as cache.",
}
"""Where to pass what the models of `transformers` take under these names."""


def check_names(model: Model, given: Collection[str], taken: Collection[str]) -> None:
    """Raise `TypeError` for the name of an argument that the model does not take."""
    for name in given:
        if name not in taken:
            advice = _ELSEWHERE.get(name, "Leave it out.")
            raise TypeError(
                f"{type(model).__name__}: {name} is no argument of this model, which "
                f"takes {', '.join(taken)}. {advice}"
            )


def check_arrays(name: str, **given: Any) -> None:
    """Raise `TypeError` for tokens, or what belongs to each token, that are not an
    array, and for a mask of floating numbers. `name` is that of the model or function
    that they were given to."""
    for argument, x in given.items():
        if x is None:
            continue
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"{name}: {argument} must be an array, (batch, length), but is a "
                f"{type(x).__name__}. For text, pass tokenizer(texts, padding=True, "
                'return_tensors="np")["input_ids"]. For lists of one length, or a '
                "tensor of another library, pass np.array(ids). Pad other lists, and "
                "pass an attention_mask, too."
            )
        is_floating = jnp.issubdtype(x.dtype, jnp.floating)
        if argument.endswith("mask") and is_floating:
            # 0 and -1e9, to be added to scores, would mean the opposite.
            raise TypeError(
                f"{name}: {argument} is {x.dtype}{list(x.shape)}, but it must be "
                "booleans or integers: 1 for each token, 0 for padding. Of a mask that "
                "is added to scores (0 and a large negative number), pass mask == 0. "
                "Of one with 1.0 and 0.0, pass mask != 0."
            )


def _check_tokens(
    input_ids: Array,
    attention_mask: Array | None,
    max_positions: int | None,
    cache: Cache | None = None,
) -> None:
    """Raise `ValueError` if tokens are not `(batch, t)`, a mask has the wrong shape, or
    a text is too long."""
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids is {input_ids.dtype}{list(input_ids.shape)}, but it must be "
            "integers, (batch, length). A single text is input_ids[None]."
        )
    num_slots = input_ids.shape[1] if cache is None else cache.mask.shape[1]
    shape = input_ids.shape
    by_token = (*input_ids.shape, num_slots)
    if attention_mask is not None and attention_mask.shape not in (shape, by_token):
        raise ValueError(
            f"attention_mask has shape {attention_mask.shape}, but it must be that of "
            f"input_ids, {shape}: 1 for each token, 0 for padding. Or {by_token}: what "
            "each token sees."
        )
    # Texts that branch share positions, so a row may have more tokens than the table.
    is_branching = attention_mask is not None and attention_mask.ndim == 3
    if max_positions is not None and shape[1] > max_positions and not is_branching:
        raise ValueError(
            f"input_ids has {shape[1]} tokens a row, but the model has a table of "
            f"{max_positions} positions. Truncate the texts, or pass them in parts."
        )


def make_context(
    model: Model,
    input_ids: Ids,
    attention_mask: Array | None,
    positions: Ids | None,
    cache: Cache | None = None,
    *,
    causal: bool = True,
    texts: Ids | None = None,
) -> tuple[Context, Cache | None]:
    """Make the context of some tokens, and the cache with these tokens but without
    their keys and values, which the layers add. Raises `ValueError` for arrays that do
    not fit, and `TypeError` for what is not an array.

    **Arguments:**

    - `model`: its `Options` say how to run the layers, and its configuration which of
        them have a window.
    - `attention_mask`: `(batch, t)`, 0 for padding, on either side; or
        `(batch, t, slots)`, the slots (without a cache: the tokens of this call) that
        each token sees.
    - `positions`: positions of the tokens; by default counted from the mask.
    - `causal`: whether a token sees only the tokens up to itself, or, without a cache,
        all.
    - `texts`: `(batch, t)`, for each token the number of its text, 0 for padding, in
        place of `attention_mask`.
    """
    check_arrays(
        type(model).__name__,
        input_ids=input_ids,
        attention_mask=attention_mask,
        positions=positions,
        segments=texts,
    )
    max_positions = model.config.max_positions
    if texts is not None:
        _check_texts(texts, input_ids, attention_mask, cache)
        # Positions begin anew in each text, so a row may be longer than the table.
        max_positions = None
    _check_tokens(input_ids, attention_mask, max_positions, cache)
    window = model.config.window
    windowed = model.config.windowed
    size, num_tokens = input_ids.shape
    sequence_parallel = splits_stream(model, size, num_tokens, cache)
    given = jnp.ones((size, num_tokens), bool)
    if attention_mask is not None and attention_mask.ndim == 2:
        given = attention_mask.astype(bool)
    if texts is not None:
        given = texts != 0
        if positions is None:
            positions = _places(texts)
    num_before: Array | int = 0
    if cache is not None:
        # Padding takes a slot, but no position.
        num_before = jnp.sum(cache.mask, axis=1, keepdims=True, dtype=jnp.int32)
    is_plain = attention_mask is None and positions is None and cache is None
    if window is not None and is_plain and window >= num_tokens:
        # A window as long as the text hides nothing. Without a mask, flash attention
        # can compute it.
        window = None
    # Texts, padding and windows need no mask of all pairs of tokens, unless a token's
    # place in the row is not its position, or the model asks for cuDNN's attention,
    # which knows neither.
    is_masked = attention_mask is not None and attention_mask.ndim == 3
    is_moved = window is not None and positions is not None and texts is None
    by_cudnn = model.attention == "cudnn"
    needs_mask = cache is not None or is_masked or is_moved or by_cudnn
    if positions is None:
        counted = num_before + jnp.cumsum(given, axis=1, dtype=jnp.int32) - 1
        # Padding on the left would have position -1, which reads a table's last row.
        positions = jnp.maximum(counted, 0)
    if cache is None:
        valid = given
        slot_positions = positions
        length = None
        first = jnp.zeros((), jnp.int32)
    else:
        first = length = cache.length
        valid = _fill_slots(cache.mask, given, first)
        slot_positions = _fill_slots(cache.positions, positions, first)
        cache = Cache(cache.key, cache.value, valid, slot_positions, first + num_tokens)
    # Masks are true where a token may look, unlike the additive masks of transformers.
    if attention_mask is not None and attention_mask.ndim == 3:
        mask = attention_mask.astype(bool)[:, None]
    elif not needs_mask or (
        cache is None and attention_mask is None and window is None and texts is None
    ):
        mask = None
    elif not causal:
        mask = valid[:, None, None, :]
    else:
        # The order of slots is that of the tokens, also where positions repeat.
        before = jnp.arange(valid.shape[1]) <= first + jnp.arange(num_tokens)[:, None]
        mask = before[None, None] & valid[:, None, None, :]
    if mask is not None and texts is not None:
        mask = mask & (texts[:, :, None] == texts[:, None, :])[:, None]
    near = mask
    if mask is not None and window is not None:
        # By position, because padding may lie between two slots. A token sees `window`
        # tokens with itself among them, as in transformers (`sliding_window_overlay`).
        oldest = positions[:, None, :, None] - window
        near = mask & (slot_positions[:, None, None, :] > oldest)
    segments = None
    if texts is not None and not needs_mask:
        segments = texts
    elif attention_mask is not None and not needs_mask:
        segments = given.astype(jnp.int32)
    context = Context(
        positions,
        near if windowed is None else mask,
        length,
        model.attention,
        sequence_parallel,
        causal,
        window_mask=near,
        windowed=windowed,
        real=given,
        segments=segments,
        window=None if needs_mask else window,
    )
    return context, cache


def _check_texts(
    texts: Array, input_ids: Ids, attention_mask: Array | None, cache: Cache | None
) -> None:
    """Raise `ValueError` for numbers of texts that do not fit."""
    if texts.shape != input_ids.shape or not jnp.issubdtype(texts.dtype, jnp.integer):
        raise ValueError(
            f"segments is {texts.dtype}{list(texts.shape)}, but it must be integers of "
            f"the shape of input_ids, {input_ids.shape}: for each token the number of "
            "its text, and 0 for padding."
        )
    if attention_mask is not None or cache is not None:
        other = "a cache" if attention_mask is None else "attention_mask"
        raise ValueError(
            f"segments and {other} are both given. Texts that share a row are for "
            "training: leave attention_mask and cache out. Padding has the number 0."
        )


def _places(texts: Ids) -> Ids:
    """The place of each token in its text, from 0."""
    places = jnp.arange(texts.shape[1], dtype=jnp.int32)
    is_first = jnp.diff(texts, axis=1, prepend=texts[:, :1] - 1) != 0
    begins = jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    return places - begins


SPLIT_FROM = 0.25
"""The tokens on a device, for each feature of the stream, from which it is split.

With fewer, there is little memory to save, because the matrices of a layer are much
larger than its activations."""


def splits_stream(
    model: Model, num_rows: int, num_tokens: int, cache: Cache | None = None
) -> bool:
    """Return true if the stream between layers is split over `tensor` along the tokens.

    `model.sequence_parallel` says so. If it is `None`, the shapes decide: the stream is
    split if a device has at least a quarter as many tokens as the stream has features,
    and `tensor` divides the number of tokens in a row and the number of heads. Warns if
    the number of tokens in a row alone prevents it.
    """
    # With a cache, a call often has a single token, which cannot be split.
    if cache is not None:
        return False
    if model.sequence_parallel is not None:
        return model.sequence_parallel
    axes = activation_axes(model, num_rows=num_rows)
    if axes is None or axes.mesh.shape.get("tensor", 1) == 1:
        return False
    tensor = axes.mesh.shape["tensor"]
    config = model.config
    width = config.entry("hidden_size", None)
    num_heads = config.entry("num_attention_heads", None)
    if width is None or num_heads is None:
        # A family of the user with other names.
        return False
    num_own = num_rows // axes.num_row_shards * num_tokens
    # Heads that are not split read the whole stream: each device would gather it.
    if num_own < SPLIT_FROM * width or math.gcd(num_heads, config.kv_heads) % tensor:
        return False
    if num_tokens % tensor:
        longer = num_tokens + -num_tokens % tensor
        warnings.warn(
            f"{type(model).__name__}: each device keeps the whole stream between "
            f"layers, because tensor={tensor} does not divide the number of tokens in "
            f"a row, {num_tokens}. For less memory, pass rows of {longer} tokens (a "
            "loss on shifted tokens needs one more in each example). "
            "sequence_parallel=False says nothing.",
            stacklevel=2,
        )
        return False
    return True


def whole_output(model: Model, x: Hidden, context: Context) -> Hidden:
    """Return the stream after the last layer whole over `tensor`, unless
    `model.sequence_parallel` is true: code that reads it knows nothing of the split."""
    axes = activation_axes(x, num_rows=x.shape[0])
    if axes is None or not context.sequence_parallel or model.sequence_parallel:
        return x
    sharding = NamedSharding(axes.mesh, PartitionSpec(axes.rows))
    return jax.lax.with_sharding_constraint(x, sharding)


def _fill_slots(slots: Array, new: Array, first: Array) -> Array:
    """Return values of slots, `(batch, slots)`, with the new ones from slot `first`
    on."""
    new = new.astype(slots.dtype)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, first, axis=1)


def make_layers(
    make_layer: Callable[..., eqx.Module],
    config: BaseConfig,
    *,
    stacked: bool,
    key: Key,
    num_layers: int | None = None,
) -> PyTree:
    """Call `make_layer(config, key=key)` `num_layers` times (`config.num_layers` by
    default).

    Return a list or, if `stacked`, one layer whose arrays have a leading dim for the
    layer number.
    """
    if num_layers is None:
        num_layers = config.num_layers
    # Both forms get the same keys, and therefore the same numbers.
    keys = jax.random.split(key, num_layers)
    if stacked:
        return eqx.filter_vmap(lambda key: make_layer(config, key=key))(keys)
    return [make_layer(config, key=key) for key in keys]


def count_layers(layers: PyTree) -> int:
    """Return the number of layers, in a list or stacked."""
    if isinstance(layers, list):
        return len(layers)
    first_array = next(iter(to_arrays(layers).values()))
    return first_array.shape[0]


def unstack(layers: PyTree) -> list[PyTree]:
    """Return stacked layers as a list."""
    arrays, static = eqx.partition(layers, eqx.is_array)
    apart = jax.tree.map(jnp.unstack, arrays)
    return [
        eqx.combine(jax.tree.map(lambda _, x, i=i: x[i], arrays, apart), static)
        for i in range(count_layers(layers))
    ]


def _is_foreign(x: object) -> bool:
    """True for a module of neither these libraries nor Equinox: it may depend on more
    than its arrays, or store values."""
    own = ("redco_eqx", "redco_eqx_models", "equinox")
    return isinstance(x, eqx.Module) and type(x).__module__.partition(".")[0] not in own


def _traced_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `run`. It traces `run` once for all parts that are equal
    but for their arrays."""

    # `jax.jit`, not `eqx.filter_jit`, whose cache would keep `run`, and the values that
    # it captures, alive.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def traced(static: Any, arrays: Any, flow: Any) -> Any:
        return run(eqx.combine(arrays, jax.tree.unflatten(*static)), flow)

    def apply(parts: Any, flow: Any) -> Any:
        arrays, static = eqx.partition(parts, eqx.is_array)
        leaves, structure = jax.tree.flatten(static)
        return traced((structure, tuple(leaves)), arrays, flow)

    return apply


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
    """Run all layers, one after another. Return the output, and the keys and values of
    the cache with these tokens added. If you pass `sums`, also return it, with the
    third result of each layer added.

    Each call is `layer(x, context, cache, key) -> (x, cache)`, where `cache` is the one
    that `Context.attend` takes and returns, or `None`, and `context.memory` has the
    layer's own keys and values.
    """
    num_layers = count_layers(layers)
    memory = context.memory
    keys = None if key is None else jax.random.split(key, num_layers)

    def one(given: Any, flow: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        x, cached, sums = flow
        own_memory = None
        if memory is not None:
            # The mask is the same in all layers, so it is not stacked.
            own_memory = Memory(*given["memory"], mask=memory.mask)
        own = dataclasses.replace(context, memory=own_memory, layer=given["index"])
        layer_cache = None
        if cached:
            layer_cache = (*cached, given["index"])
        x, layer_cache, *more = given["layer"](x, own, layer_cache, given["key"])
        cached = ()
        if layer_cache:
            # The number of the layer comes from `given`, and does not flow.
            cached = layer_cache[:2]
        if sums is not None:
            sums = sums + more[0]
        return x, cached, sums

    further = {
        "index": jnp.arange(num_layers),
        "key": keys,
        "memory": None if memory is None else (memory.key, memory.value),
    }
    # The cache of all layers flows from layer to layer, because XLA changes the carry
    # of a loop in place, but would write what each layer returns into new memory. The
    # batch is not its leading dim, so its layout stays open (`None`).
    options: Any = {
        "batched": (True, None, None),
        "sequence_parallel": context.sequence_parallel,
    }
    run = functools.partial(scan_layers, one, remat=remat, **options)
    parts = [{"layer": layers, **further}]
    if isinstance(layers, list):
        has_foreign = any(
            map(_is_foreign, jax.tree.leaves(layers, is_leaf=_is_foreign))
        )
        if isinstance(further["index"], Tracer) and not has_foreign:
            # Outside a trace, each call would compile.
            run = _traced_once(run)
        parts = []
        for i, layer in enumerate(layers):
            own_further = jax.tree.map(lambda a, i=i: a[i], further)
            parts.append([{"layer": layer, **own_further}])
    flow = (x, () if cache is None else (cache.key, cache.value), sums)
    for part in parts:
        flow = run(part, flow)
    x, cached, sums = flow
    if sums is None:
        return x, cached
    return x, (*cached, sums)
