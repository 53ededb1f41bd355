"""Encoders of text: every token sees all others."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.context import Context, check_tokens, make_context
from redco_eqx.models._blocks.layers import split_key
from redco_eqx.models._blocks.model import Model, run_layers


class EncoderLayers(eqx.Module):
    """The layers, under their name in files of BERT's kind."""

    layer: PyTree


def encode_tokens(
    model: Model,
    input_ids: Int[Array, "b s"],
    embed: Callable[[Context, Key | None], Float[Array, "b s size"]],
    layers: PyTree,
    *,
    attention_mask: Array | None,
    positions: Int[Array, "b s"] | None = None,
    max_positions: int | None,
    bias: Float[Array, "n h s s"] | None = None,
    key: Key | None,
) -> Float[Array, "b s size"]:
    """Return the output of the last layer of an encoder of text.

    **Arguments:**

    - `model`: its `Options` say how to run the layers.
    - `input_ids`: tokens.
    - `embed`, `layers`: a function that computes the input of the first layer, and the layers.
    - `attention_mask`: `(batch, s)`, 0 where a token is padding, on either side.
    - `positions`: by default counted from 0 at the first token that is not padding.
    - `max_positions`: the number of rows in a table of positions; `None` without a table.
    - `bias`: added to the scores in all layers.
    - `key`: for dropout.
    """
    check_tokens(input_ids, attention_mask, max_positions)
    context, _ = make_context(
        input_ids, attention_mask, positions, None,
        implementation=model.attention, sequence_parallel=model.sequence_parallel, causal=False,
    )  # fmt: skip
    context = dataclasses.replace(context, bias=bias)
    embed_key, layers_key = split_key(key, 2)
    x = embed(context, embed_key)
    return run_layers(layers, x, context, None, remat=model.remat, key=layers_key)[0]
