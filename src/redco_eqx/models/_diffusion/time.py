"""The diffusion time as features that the blocks read."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.layers import Linear
from redco_eqx.models._diffusion.layers import make_linear


def sinusoids(
    timesteps: Int[Array, " b"], size: int, *, flip_sin_to_cos: bool, freq_shift: int
) -> Float[Array, "b {size}"]:
    """Compute sines and cosines of each time at `size // 2` frequencies, from 1 down to about 1 / 10,000, in
    float32.

    The frequencies of denoising diffusion (Ho et al. 2020, appendix B) end at exactly 1 / 10,000: that is a
    `freq_shift` of 1.

    **Arguments:**

    - `flip_sin_to_cos`: true if the cosines come first.
    - `freq_shift`: the number subtracted from the number of frequencies in the spacing of their exponents.
    """
    num = size // 2
    frequencies = jnp.exp(-math.log(10_000) / (num - freq_shift) * jnp.arange(num, dtype=jnp.float32))
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    parts = [jnp.sin(angles), jnp.cos(angles)]
    return jnp.concatenate(parts[::-1] if flip_sin_to_cos else parts, axis=-1)


class TimeEmbedding(eqx.Module):
    """An MLP over the sinusoids."""

    linear_1: Linear
    linear_2: Linear

    def __init__(self, in_features: int, size: int, *, key: Key):
        first_key, second_key = jax.random.split(key)
        self.linear_1 = make_linear(in_features, size, key=first_key)
        self.linear_2 = make_linear(size, size, key=second_key)

    def __call__(self, x: Float[Array, "b in"]) -> Float[Array, "b size"]:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))
