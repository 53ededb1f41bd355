"""Models that read something whole and write a text about it: an encoder, a decoder with cross-attention."""

import abc
import functools
import itertools
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import column, tensor_size, traced_mesh
from redco_eqx._parallel.scan import keep_products_and_row_out
from redco_eqx._sharding.mesh import axis_size
from redco_eqx.models._blocks.config import BaseConfig
from redco_eqx.models._blocks.context import Cache, Memory
from redco_eqx.models._blocks.decoder import Decoder
from redco_eqx.models._blocks.layers import split_key
from redco_eqx.models._blocks.model import Options, unstack


class EncoderDecoder(Decoder):
    """An encoder, and a decoder whose layers read it by cross-attention (`Context.cross_attend`).

    A family says what a `Decoder` says of the decoder, whose layers lie at the last path of `stacks`, and how
    the encoder runs.
    """

    def __init__(self, config: BaseConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    @abc.abstractmethod
    def encoder_states(
        self, inputs: Array, *, attention_mask: Array | None = None, key: Key | None = None
    ) -> Float[Array, "b s size"]:
        """What the encoder makes of the inputs."""

    @abc.abstractmethod
    def cross_projections(self, layer: PyTree) -> tuple[PyTree, ...]:
        """The layers inside one of the decoder's that make keys and values of what the encoder made: two, or
        one that makes both, `(..., 2, width)`.
        """

    def encode(self, inputs: Array, *, attention_mask: Array | None = None, key: Key | None = None) -> Memory:
        """What the decoder reads of some inputs: keys and values of the cross-attention of all its layers.

        Computed for all layers at once, their gradient by what the encoder made is summed before it is reduced
        over `tensor`: once, instead of once a layer.

        **Arguments:**

        - `inputs`: tokens `(batch, source)`, or images `(batch, channels, height, width)`.
        - `attention_mask`: `(batch, source)`, 0 where a token is padding, on either side.
        - `key`: for dropout.
        """
        hidden = self.encoder_states(inputs, attention_mask=attention_mask, key=key)
        real = jnp.ones(hidden.shape[:2], bool) if attention_mask is None else attention_mask.astype(bool)
        return self.memorise(hidden, real)

    def memorise(self, hidden: Float[Array, "b s size"], mask: Bool[Array, "b s"]) -> Memory:
        """What the decoder reads of `encoder_states`."""
        layers, size = self.layers, self.config.head_size
        mesh = traced_mesh(layers, hidden)
        project = functools.partial(column, unit=size, sequence_parallel=self.sequence_parallel)
        if mesh is not None and axis_size(mesh, "fsdp") > 1:  # weights that were gathered are not kept
            project = eqx.filter_checkpoint(project, policy=keep_products_and_row_out)
        if not isinstance(layers, list) and tensor_size(mesh) == 1:
            # With nothing to add up over `tensor`, one layer's weights after another are gathered.
            arrays, static = eqx.partition(self.cross_projections(layers), eqx.is_array)
            _, outputs = jax.lax.scan(
                lambda _, own: (_, project(hidden, *eqx.combine(own, static))), None, arrays
            )
        else:
            if isinstance(layers, list):
                projections = [self.cross_projections(layer) for layer in layers]
            else:
                projections = unstack(self.cross_projections(layers))
            found = project(hidden, *itertools.chain(*projections))
            outputs = [jnp.stack(found[i :: len(projections[0])]) for i in range(len(projections[0]))]
        if len(outputs) == 1:
            outputs = [outputs[0][..., i, :] for i in range(2)]
        key, value = (rearrange(x, "l b s (h d) -> l b s h d", d=size) for x in outputs)
        return Memory(key, value, mask)

    def decode(
        self,
        decoder_input_ids: Int[Array, "b t"],
        memory: Memory,
        *,
        attention_mask: Array | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
    ) -> tuple[Float[Array, "b t size"], Cache | None]:
        """What the head reads, and the cache with these tokens added.

        **Arguments:**

        - `decoder_input_ids`: tokens, of which the first is `config.decoder_start_token_id`.
        - `memory`: from `encode`. If it has fewer rows, neighbouring rows of tokens share one.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `cache`: of the tokens before these, from `init_cache` or an earlier call.
        - `key`: for dropout.
        """
        if decoder_input_ids.shape[0] % memory.mask.shape[0]:
            raise ValueError(
                f"decode: decoder_input_ids has {decoder_input_ids.shape[0]} rows, which is not a multiple of "
                f"the {memory.mask.shape[0]} that were encoded."
            )
        return self._run(
            decoder_input_ids, memory,
            attention_mask=attention_mask, positions=positions, cache=cache, key=key,
        )  # fmt: skip

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        tokens = self.example_tokens(batch_size)
        return tokens, tokens

    def hidden_states(
        self,
        inputs: Array,
        decoder_input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        decoder_attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b t size"]:
        """What the head reads. Arguments as for calling the model."""
        encoder_key, decoder_key = split_key(key, 2)
        memory = self.encode(inputs, attention_mask=attention_mask, key=encoder_key)
        return self.decode(decoder_input_ids, memory, attention_mask=decoder_attention_mask, key=decoder_key)[0]

    def __call__(
        self,
        inputs: Array,
        decoder_input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        decoder_attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b t vocab"]:
        """The logits of the next token after each token of the decoder.

        **Arguments:**

        - `inputs`: tokens `(batch, source)`, or images `(batch, channels, height, width)`.
        - `decoder_input_ids`: tokens, of which the first is `config.decoder_start_token_id`; see
            `shift_right`.
        - `attention_mask`, `decoder_attention_mask`: 0 where a token is padding, on either side.
        - `key`: for dropout, which is applied only where a key is given and the model is not in inference
            mode (`eqx.nn.inference_mode`).
        """
        hidden = self.hidden_states(
            inputs, decoder_input_ids,
            attention_mask=attention_mask, decoder_attention_mask=decoder_attention_mask, key=key,
        )  # fmt: skip
        return self.logits(hidden)


def shift_right(
    labels: Int[Array, "b t"], start: int, *, pad: int, ignore_label: int = -100
) -> Int[Array, "b t"]:
    """What a decoder reads to predict `labels`: a start token, then all labels but the last.

    **Arguments:**

    - `start`: `config.decoder_start_token_id`.
    - `pad`: what stands for a label that is `ignore_label`.
    """
    shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    return jnp.where(shifted == ignore_label, pad, shifted)
