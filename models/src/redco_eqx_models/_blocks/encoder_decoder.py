"""Models that read a whole input and write a text: an encoder, and a decoder with
cross-attention."""

import abc
import itertools
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PyTree

from redco_eqx.layers import activation_axes, column, scan_layers
from redco_eqx.types import Key
from redco_eqx_models._blocks.config import BaseConfig
from redco_eqx_models._blocks.context import Cache, Hidden, Ids, Memory
from redco_eqx_models._blocks.decoder import Decoder, Reading, check_one_text
from redco_eqx_models._blocks.dropout import split_key
from redco_eqx_models._blocks.model import (
    Options,
    check_arrays,
    check_names,
    unstack,
)


class EncoderDecoder(Decoder):
    """An encoder, and a decoder whose layers read it by cross-attention
    (`Context.cross_attend`).

    A family defines the methods of a `Decoder` for its decoder, whose layers lie at the
    last path of `stacks`, and `encoder_states` for its encoder.
    """

    def __init__(self, config: BaseConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    @abc.abstractmethod
    def encoder_states(
        self,
        inputs: Array,
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b s size"]:
        """Return the output of the encoder for the inputs."""

    @abc.abstractmethod
    def cross_projections(self, layer: PyTree) -> tuple[PyTree, ...]:
        """Return the projections, inside one decoder layer, that make keys and values
        of the encoder's output: two, or one that makes both, `(..., 2, width)`.
        """

    def encode(
        self,
        inputs: Array,
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
        segments: Ids | None = None,
    ) -> Memory:
        """Return the encoder's output in the form that the decoder reads: keys and
        values for the cross-attention of all its layers.

        They are computed for all layers at once, so the gradient with respect to the
        encoder's output is reduced over `tensor` once, instead of once per layer.

        **Arguments:**

        - `inputs`: tokens `(batch, source)`, or images
            `(batch, channels, height, width)`.
        - `attention_mask`: `(batch, source)`, 0 where a token is padding, on either
            side.
        - `key`: for dropout.
        - `segments`: refused, because cross-attention would mix the texts in a row.
        """
        check_one_text(self, segments)
        hidden = self.encoder_states(inputs, attention_mask=attention_mask, key=key)
        if attention_mask is None:
            real = jnp.ones(hidden.shape[:2], bool)
        else:
            real = attention_mask.astype(bool)
        return self.memorise(hidden, real)

    def memorise(
        self, hidden: Float[Array, "b s size"], mask: Bool[Array, "b s"]
    ) -> Memory:
        """Return keys and values of the decoder's cross-attention for
        `encoder_states`."""
        layers = self.layers
        size = self.config.head_size
        # By default, `encoder_states` is whole.
        is_split_along_tokens = self.sequence_parallel is True
        axes = activation_axes(layers, hidden, num_rows=hidden.shape[0])

        def project(hidden: Array, *projections: PyTree) -> tuple[Array, ...]:
            def one(own: tuple[PyTree, ...], hidden: Any) -> Any:
                return column(
                    hidden, *own, unit=size, sequence_parallel=is_split_along_tokens
                )

            # As a single layer of `scan_layers`, which keeps no gathered weights for
            # the backward pass.
            found: Any = scan_layers(one, [projections], hidden, batched=None)
            return found

        is_split = axes is not None and axes.mesh.shape.get("tensor", 1) > 1
        if not isinstance(layers, list) and not is_split:
            arrays, static = eqx.partition(self.cross_projections(layers), eqx.is_array)

            def of_layer(own: Any) -> Any:
                return project(hidden, *eqx.combine(own, static))

            if axes is None:
                # One product for all layers. Without a mesh there are no weights to
                # gather.
                outputs = jax.vmap(of_layer)(arrays)
            else:
                # With no sum over `tensor`, gather the weights of one layer after
                # another.
                _, outputs = jax.lax.scan(
                    lambda _, own: (_, of_layer(own)), None, arrays
                )
        else:
            if isinstance(layers, list):
                projections = [self.cross_projections(layer) for layer in layers]
            else:
                projections = unstack(self.cross_projections(layers))
            # Siblings of one `column`, whose gradients are added before one sum over
            # `tensor`.
            found = project(hidden, *itertools.chain(*projections))
            num_kinds = len(projections[0])
            outputs = [jnp.stack(found[i::num_kinds]) for i in range(num_kinds)]
        if len(outputs) == 1:
            # GPT-2 has one matrix for both, see `Conv1D`.
            outputs = [outputs[0][..., 0, :], outputs[0][..., 1, :]]
        key, value = (rearrange(x, "l b s (h d) -> l b s h d", d=size) for x in outputs)
        return Memory(key, value, mask)

    def decode(
        self, decoder_input_ids: Ids, memory: Memory, **reading: Unpack[Reading]
    ) -> tuple[Hidden, Cache | None]:
        """Return the input of the head, and the cache with these tokens added.

        **Arguments:**

        - `decoder_input_ids`: tokens; the first is `config.decoder_start_token_id`.
        - `memory`: from `encode`. If it has fewer rows, neighbouring rows of tokens
            share one.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `cache`: the cache of the tokens before these, from `init_cache` or an earlier
            call.
        - `key`: for dropout.
        """
        if decoder_input_ids.shape[0] % memory.mask.shape[0]:
            raise ValueError(
                f"decode: decoder_input_ids has {decoder_input_ids.shape[0]} rows, "
                f"which is not a multiple of the {memory.mask.shape[0]} that were "
                "encoded."
            )
        return self._run(decoder_input_ids, memory, **reading)[:2]

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        tokens = self.example_tokens(batch_size)
        return tokens, tokens

    def hidden_states(
        self,
        inputs: Array,
        decoder_input_ids: Ids,
        *,
        attention_mask: Array | None = None,
        decoder_attention_mask: Array | None = None,
        key: Key | None = None,
        segments: Ids | None = None,
    ) -> Hidden:
        """Return the input of the head. Arguments as for calling the model."""
        check_one_text(self, segments)
        check_arrays(
            type(self).__name__,
            inputs=inputs,
            decoder_input_ids=decoder_input_ids,
            attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
        )
        encoder_key, decoder_key = split_key(key, 2)
        memory = self.encode(inputs, attention_mask=attention_mask, key=encoder_key)
        return self.decode(
            decoder_input_ids,
            memory,
            attention_mask=decoder_attention_mask,
            key=decoder_key,
        )[0]

    def __call__(
        self, inputs: Array, decoder_input_ids: Ids, **options: Any
    ) -> Float[Array, "b t vocab"]:
        """Compute the logits of the next token after each token of the decoder.

        **Arguments:**

        - `inputs`: tokens `(batch, source)`, or images
            `(batch, channels, height, width)`.
        - `decoder_input_ids`: tokens; the first is `config.decoder_start_token_id`. See
            `shift_right`.
        - `attention_mask`, `decoder_attention_mask`: 0 where a token is padding, on
            either side.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).
        - `segments`: refused, because cross-attention would mix the texts in a row.
        """
        taken = ("attention_mask", "decoder_attention_mask", "key", "segments")
        check_names(self, options, taken)
        return self.logits(self.hidden_states(inputs, decoder_input_ids, **options))


def shift_right(labels: Ids, start: int, *, pad: int, ignore_label: int = -100) -> Ids:
    """Return the decoder's input for predicting `labels`: a start token, then all
    labels except the last.

    **Arguments:**

    - `start`: `config.decoder_start_token_id`.
    - `pad`: the token in place of a label that is `ignore_label`.
    """
    # `shift_tokens_right` of transformers' BART. An ignored label is no token, so it
    # cannot be embedded.
    shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return jnp.where(shifted == ignore_label, pad, shifted)
