"""Attention of an image's pixels over each other, and over a text."""

import equinox as eqx
import jax
from einops import rearrange
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import column, row
from redco_eqx.models._blocks.attention import Implementation, attend, split_heads
from redco_eqx.models._blocks.layers import Linear
from redco_eqx.models._diffusion.layers import GroupNorm, make_linear


def to_tokens(x: Float[Array, "b c h w"]) -> Float[Array, "b t c"]:
    """Flatten the pixels of an image, row by row."""
    return rearrange(x, "b c h w -> b (h w) c")


def to_image(x: Float[Array, "b t c"], like: Float[Array, "b _ h w"]) -> Float[Array, "b c h w"]:
    """Restore an image with the height and width of `like`."""
    return rearrange(x, "b (h w) c -> b c h w", h=like.shape[2])


class Attention(eqx.Module):
    """Multi-head attention of some tokens over others, or over themselves."""

    to_q: Linear
    to_k: Linear
    to_v: Linear
    to_out: list[Linear]
    num_heads: int = eqx.field(static=True)

    def __init__(self, size: int, memory_size: int, num_heads: int, *, use_bias: bool = False, key: Key):
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        self.to_q = make_linear(size, size, use_bias=use_bias, key=q_key)
        self.to_k = make_linear(memory_size, size, use_bias=use_bias, key=k_key)
        self.to_v = make_linear(memory_size, size, use_bias=use_bias, key=v_key)
        self.to_out = [make_linear(size, size, key=out_key)]
        self.num_heads = num_heads

    def read(
        self,
        x: Float[Array, "b t size"],
        memory: Float[Array, "b s _"] | None,
        implementation: Implementation | None,
    ) -> Float[Array, "b t size"]:
        """Compute the attention of the tokens `x` over `memory`, or over themselves without it."""
        unit = self.to_q.out_features // self.num_heads
        if memory is None:
            projected = column(x, self.to_q, self.to_k, self.to_v, unit=unit)
        else:
            # A text is short, so a layout may split keys and values by its features alone: follow that layout.
            projected = self.to_q(x), self.to_k(memory), self.to_v(memory)
        q, k, v = (split_heads(y, unit) for y in projected)
        heads = attend(q, k, v, causal=False, implementation=implementation)
        return row(rearrange(heads, "b t h d -> b t (h d)"), self.to_out[0], unit=unit)


class PixelAttention(Attention):
    """Self-attention of an autoencoder's pixels, in one head, added to the image."""

    group_norm: GroupNorm

    def __init__(self, channels: int, *, num_groups: int, eps: float, key: Key):
        super().__init__(channels, channels, 1, use_bias=True, key=key)
        self.group_norm = GroupNorm(num_groups, channels, eps=eps)

    def __call__(
        self,
        x: Float[Array, "b c h w"],
        memory: Float[Array, "b s _"] | None,
        implementation: Implementation | None,
    ) -> Float[Array, "b c h w"]:
        return x + to_image(self.read(to_tokens(self.group_norm(x)), None, implementation), x)
