"""Positions in attention: rotary embeddings (Su et al. 2021) with the scalings of
long-context checkpoints, and relative positions as a bias of the scores (Raffel et al.
2020, T5, section 2.1).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from redco_eqx.layers import activation_axes
from redco_eqx_models._blocks.attention import Bias
from redco_eqx_models._blocks.config import Json
from redco_eqx_models._blocks.layers import Embedding

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The numbers that each type needs."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
}
"""More numbers that a type may have."""

Rotation: TypeAlias = tuple[
    np.ndarray | Float[Array, " pairs"], float | Float[Array, ""]
]
"""Radians per position for each pair of features that turns, and the factor on these
features."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """The conversion of positions into rotation angles.

    - `theta`: the base; feature pair i of `size` turns by `theta ** (-2 i / size)` per
        position.
    - `rope_type`: `default`; `linear`, which divides all frequencies by `factor`;
        `llama3`, which divides those with a wavelength beyond
        `original_max_position_embeddings / low_freq_factor` by `factor`, keeps those
        within `original_max_position_embeddings / high_freq_factor`, and blends
        between; `yarn` (Peng et al. 2023), which divides the pairs that turn less than
        `beta_slow` times in the original length by `factor`, keeps those that turn more
        than `beta_fast` times, blends between, and scales the features that turn.
    - `partial_rotary_factor`: the part of the features of a head that turns, the first
        ones.
    - `attention_factor`: the factor on the features that turn, of queries and of keys,
        with `yarn`; by default it follows from `factor`, `mscale` and `mscale_all_dim`.
    """

    entries = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float = 1.0

    def frequencies(self, size: int) -> np.ndarray:
        """Return radians per position, for each pair of the features that turn of a
        head of `size`."""
        size = int(size * self.partial_rotary_factor)
        # Su et al. 2021, section 3.2.2. The host computes in float64, and `rotate`
        # rounds the result once.
        base = self.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        if self.rope_type == "linear":
            # Position interpolation (Chen et al. 2023): dividing positions is the same
            # as dividing frequencies.
            return base / self.factor
        if self.rope_type == "llama3":
            # `_compute_llama3_parameters` of transformers, which compares wavelengths.
            # The number of turns in the original length is that length over them.
            turns = self.original_max_position_embeddings * base / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
            return kept * base + (1 - kept) * base / self.factor
        if self.rope_type == "yarn":
            # Peng et al. 2023, section 3.2, "NTK-by-parts", with the rounding to whole
            # pairs of `_compute_yarn_parameters` of transformers.
            first = max(math.floor(self._pair_of(self.beta_fast, size)), 0)
            # transformers has this limit, although there are only `size // 2` pairs.
            last = min(math.ceil(self._pair_of(self.beta_slow, size)), size - 1)
            # If both are the same pair, the blend is a step, and not a division by 0.
            span = (last - first) or 1e-3
            divided = np.clip((np.arange(size // 2) - first) / span, 0, 1)
            return (1 - divided) * base + divided * base / self.factor
        return base

    def _pair_of(self, num_turns: float, size: int) -> float:
        """Return the pair that turns `num_turns` times within the original length."""
        # Pair i turns `length * theta ** (-2 i / size) / (2 pi)` times. Solve for i.
        length = self.original_max_position_embeddings
        ratio = math.log(length / (num_turns * 2 * math.pi)) / math.log(self.theta)
        return size * ratio / 2

    @property
    def scale(self) -> float:
        """The factor on the features that turn, of queries and of keys."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def magnitude(scale: float) -> float:
            # Peng et al. 2023, section 3.4, for `scale` 1. The paper's factor on the
            # scores is the square of this one, which queries and keys have both.
            return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0

        if self.mscale and self.mscale_all_dim:
            # transformers ignores one of them without the other.
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Json], default: "Rope | None" = None
    ) -> "Rope":
        """Read `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters`
        (transformers 5). If both are there, only `rope_scaling` counts, as in
        transformers. `default` gives the base and the rotated part if the file does
        not, and the scaling if the file has neither.

        Raises `ValueError` for a rope type that is not supported, or one that lacks a
        number.
        """
        default = default or cls()
        # `rope_scaling or self.rope_parameters` in transformers' `modeling_rope_utils`.
        name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        part: Any = raw.get(name) or {}
        # Gemma 3 has an object for each kind of layer, see `LayerRopes`.
        if not isinstance(part, Mapping) or any(
            isinstance(x, Mapping) for x in part.values()
        ):
            raise ValueError(
                f"config.json: {name}={part!r}, but it must be one object of numbers; "
                "another for each kind of layer is not supported."
            )
        if not raw.keys() & {"rope_scaling", "rope_parameters"}:
            part = default.to_json()["rope_scaling"] or {}
        # In files of transformers 4, these two are beside `rope_scaling`.
        beside = ("rope_theta", "partial_rotary_factor")
        given: dict[str, Any] = {name: raw[name] for name in beside if name in raw}
        length = "original_max_position_embeddings"
        given[length] = raw.get("max_position_embeddings")
        given |= part
        # Old files call it `type`.
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"config.json: the rope type {rope_type!r} is not supported, only "
                f"{', '.join(ROPE_TYPES)}. The logits would be wrong without it."
            )
        missing = [name for name in ROPE_TYPES[rope_type] if given.get(name) is None]
        if missing:
            raise ValueError(
                f"config.json: the rope type {rope_type!r} needs {', '.join(missing)} "
                "in rope_parameters or rope_scaling, which is missing."
            )
        # Without it, yarn does not round to whole pairs, as in gpt-oss.
        if given.get("truncate") not in (None, True):
            raise ValueError(
                "config.json: truncate of yarn is not supported, only true."
            )
        known = (
            "rope_theta",
            "partial_rotary_factor",
            *ROPE_TYPES[rope_type],
            *OPTIONAL.get(rope_type, ()),
        )
        numbers = {name: given[name] for name in known if given.get(name) is not None}
        for name, x in numbers.items():
            if isinstance(x, bool) or not isinstance(x, int | float) or x <= 0:
                raise ValueError(
                    f"config.json: {name}={x!r}, but it must be a positive number."
                )
        if numbers.get("partial_rotary_factor", 1) > 1:
            raise ValueError("config.json: partial_rotary_factor must be at most 1.")
        values: dict[str, Any] = {name: float(x) for name, x in numbers.items()}
        theta = values.pop("rope_theta", default.theta)
        if length in values:
            values[length] = int(values[length])
        return cls(
            theta,
            rope_type,
            **{"partial_rotary_factor": default.partial_rotary_factor, **values},
        )

    def to_json(self) -> dict[str, Json]:
        """Return the entry `rope_parameters` of transformers 5, with `rope_theta` and
        `rope_scaling` of 4."""
        names = (*ROPE_TYPES[self.rope_type], *OPTIONAL.get(self.rope_type, ()))
        numbers = {name: getattr(self, name) for name in names}
        numbers = {name: x for name, x in numbers.items() if x is not None}
        scaling = {"rope_type": self.rope_type, **numbers}
        part = {}
        if self.partial_rotary_factor != 1:
            part["partial_rotary_factor"] = self.partial_rotary_factor
        return {
            "rope_theta": self.theta,
            "rope_scaling": scaling if numbers else None,
            "rope_parameters": {**scaling, "rope_theta": self.theta, **part},
            **part,
        }


def rotate(
    x: Float[Array, "b t h d"],
    positions: Int[Array, "b t"],
    frequencies: np.ndarray | Float[Array, " pairs"],
    scale: float | Float[Array, ""] = 1.0,
    *,
    interleaved: bool = False,
) -> Float[Array, "b t h d"]:
    """Turn the first `2 * len(frequencies)` features of each head; the others do not
    change.

    **Arguments:**

    - `scale`: the factor on the features that turn.
    - `interleaved`: true if the two features of a pair are neighbours (GPT-J), false if
        one is in the first half and one in the second (LLaMA).
    """
    size = 2 * len(frequencies)
    # bfloat16 has 8 significant bits, which do not tell positions 256 and 257 apart.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[:, :, None, None].astype(dtype) * jnp.asarray(frequencies, dtype)
    cos = scale * jnp.cos(angles)
    sin = scale * jnp.sin(angles)
    # Su et al. 2021 turn neighbours (`rotate_every_two` of transformers). In the files
    # of LLaMA, the features are in another order, for halves (`rotate_half`).
    pair = "(i two)" if interleaved else "(two i)"
    turning = x[..., :size].astype(dtype)
    first, second = rearrange(turning, f"b t h {pair} -> two b t h i", two=2)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin])
    turned = rearrange(turned, f"two b t h i -> b t h {pair}").astype(x.dtype)
    return jnp.concatenate([turned, x[..., size:]], axis=-1)


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance from 0 to `max_distance`. The latter is always
    in the last bucket.

    Half of the buckets have one distance each; the other half grow logarithmically.
    """
    # `_relative_position_bucket` of transformers' T5.
    num_exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    # In float32, because the models were trained with the rounding of float32 at the
    # borders between buckets. Distance 0 has a bucket of its own, so the 1 in its place
    # only avoids the logarithm of 0.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(num_exact)
    growth = (
        np.log(ratio)
        / np.float32(np.log(max_distance / num_exact))
        * np.float32(num_buckets - num_exact)
    )
    beyond = np.minimum(num_exact + growth.astype(np.int32), num_buckets - 1)
    return np.where(distance < num_exact, distance, beyond).astype(np.int32)


def relative_bias(
    table: Embedding,
    query: Int[Array, "r t"],
    key: Int[Array, "r s"],
    *,
    bidirectional: bool,
    max_distance: int,
    batch_size: int = 1,
) -> Bias:
    """Return the bias on the scores of each head, from the distance between the two
    tokens, or, for long texts whose rows share their positions, the function that
    computes it for a block of tokens.

    Compute it once, and pass it to all layers as `Context.bias`.

    If all rows share their positions, the bias on a mesh has a row per part of the
    batch. Each device therefore adds its gradients, which have the size of the scores,
    over the layers, and computes the gradient of the table. Only the table's gradient
    is reduced.

    **Arguments:**

    - `table`: a row per bucket, a column per head.
    - `query`, `key`: positions of the tokens, in one row if all rows share them.
        Padding may be counted or not, because only differences matter.
    - `bidirectional`: true if the second half of the buckets is for the tokens after a
        token (an encoder). Otherwise, all tokens after it have the bucket of distance
        0.
    - `max_distance`: all distances beyond it share the last bucket.
    - `batch_size`: the number of rows of the batch. From positions in one row, the bias
        has one row for each part of the batch on the mesh, or a single row if the batch
        does not divide evenly.
    """
    if len(query) > 1 or len(key) > 1:
        ahead = key[:, None] - query[:, :, None]
        buckets = _buckets(table.num_embeddings, ahead, bidirectional, max_distance)
        return jnp.moveaxis(table(buckets), -1, 1)
    tables = _for_each_part(table.weight, batch_size)
    bias = RelativeBias(tables, query[0], key[0], bidirectional, max_distance)
    num_tokens = query.shape[1]
    num_keys = key.shape[1]
    if num_tokens * num_keys > MOST_PAIRS:
        return bias
    heads = jnp.arange(table.weight.shape[1])
    return bias(jnp.arange(num_tokens), jnp.arange(num_keys), heads)


MOST_PAIRS = 1024 * 1024
"""Pairs of tokens for which one bias of all pairs is computed for all layers. Beyond
that, each layer computes it again, for one block of tokens after another."""


class RelativeBias(eqx.Module):
    """The bias of any block of tokens of texts that share their positions.

    - `tables`: the table, once for each part of the batch.
    - `query`, `key`: the positions of the tokens.
    """

    tables: Float[Array, "n buckets heads"]
    query: Int[Array, " t"]
    key: Int[Array, " s"]
    bidirectional: bool = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)

    def __call__(
        self,
        query_positions: Int[Array, " q"],
        key_positions: Int[Array, " k"],
        heads: Int[Array, " heads"],
    ) -> Float[Array, "n heads q k"]:
        """Return the bias of all heads, for the tokens with these indices."""
        ahead = self.key[key_positions] - self.query[query_positions][:, None]
        buckets = _buckets(
            self.tables.shape[1], ahead, self.bidirectional, self.max_distance
        )
        return jnp.moveaxis(jnp.take(self.tables, buckets, axis=1), -1, 1)


def _buckets(
    num_buckets: int,
    ahead: Int[Array, "*any"],
    bidirectional: bool,
    max_distance: int,
) -> Int[Array, "*any"]:
    """Return the bucket of each pair, from how far the key is ahead of the query."""
    distance = jnp.maximum(-ahead, 0)
    if bidirectional:
        num_buckets = num_buckets // 2
        distance = jnp.abs(ahead)
    # The buckets are constants of the program. On the device, the logarithm of another
    # compiler could round differently at a border between two of them.
    of_distances = jnp.asarray(distance_buckets(num_buckets, max_distance))
    buckets = of_distances[jnp.minimum(distance, max_distance)]
    if bidirectional:
        buckets = buckets + jnp.where(ahead > 0, num_buckets, 0)
    return buckets


def _for_each_part(
    weight: Float[Array, "buckets heads"], batch_size: int
) -> Float[Array, "n buckets heads"]:
    """Return the table once for each part of the batch, on the devices of that part."""
    axes = activation_axes(weight, num_rows=batch_size)
    if axes is None or axes.rows is None:
        return weight[None]
    parts = jnp.broadcast_to(weight, (axes.num_row_shards, *weight.shape))
    # The other two dims stay as the compiler has them.
    spec = PartitionSpec(axes.rows, *[PartitionSpec.UNCONSTRAINED] * 2)
    return jax.lax.with_sharding_constraint(parts, NamedSharding(axes.mesh, spec))
