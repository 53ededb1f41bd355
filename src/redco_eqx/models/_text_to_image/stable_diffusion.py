"""Stable Diffusion (Rombach et al. 2022): its three networks as one model, and the scheduler between them."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from redco_eqx._base.protocols import Key
from redco_eqx.models._diffusion.scheduler import Scheduler
from redco_eqx.models._families.autoencoder_kl import AutoencoderKL
from redco_eqx.models._families.clip import CLIPTextModel
from redco_eqx.models._families.unet_2d_condition import UNet2DConditionModel


@dataclasses.dataclass(frozen=True)
class PipelineIndex:
    """The other entries of a `model_index.json`, as JSON, and the directory that it came from.

    `source` is the directory that the model was loaded from; `save_stable_diffusion` copies its other folders.
    Comparisons ignore it.
    """

    rest: str = "{}"
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)


class StableDiffusion(eqx.Module):
    """A text encoder, a denoiser of latents, and an autoencoder between latents and images, as one PyTree.

    Paths begin with the names of the folders: `unet.down_blocks...`. `parts_spec` selects the parts to train.

    - `scheduler`: adds and removes noise. For another one with the same weights:
        `entries = {**model.scheduler.to_json(), "clip_sample": False}` (latents have no range), then
        `dataclasses.replace(model, scheduler=DDIMScheduler.from_json(entries))`.

    Raises `ValueError` for parts that do not fit each other.
    """

    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    scheduler: Scheduler = eqx.field(static=True)
    index: PipelineIndex = eqx.field(static=True, default=PipelineIndex())

    def __check_init__(self) -> None:
        text, unet, vae = self.text_encoder.config, self.unet.config, self.vae.config
        wanted = unet.cross_attention_dim
        if any(size != text.hidden_size for size in (wanted if isinstance(wanted, tuple) else (wanted,))):
            raise ValueError(
                f"StableDiffusion: unet.cross_attention_dim={wanted}, but text_encoder.hidden_size="
                f"{text.hidden_size}, but the two must be equal."
            )
        for name in ("in_channels", "out_channels"):
            if getattr(unet, name) != vae.latent_channels:
                raise ValueError(
                    f"StableDiffusion: unet.{name}={getattr(unet, name)}, but vae.latent_channels="
                    f"{vae.latent_channels}. A unet that reads or gives more (for inpainting) is not supported."
                )

    def encode(self, images: Float[Array, "b c height width"], *, key: Key) -> Float[Array, "b latent h w"]:
        """Draw latents for the unet from the autoencoder's distribution for images of -1 to 1."""
        mean, log_variance = self.vae.encode(images.astype(self.vae.encoder.conv_in.weight.dtype))
        noise = jax.random.normal(key, mean.shape, mean.dtype)
        return self.vae.config.scaling_factor * (mean + jnp.exp(0.5 * log_variance) * noise)

    def decode(self, latents: Float[Array, "b latent h w"]) -> Float[Array, "b c height width"]:
        """Decode the unet's latents into images, about from -1 to 1."""
        return self.vae.decode(latents / self.vae.config.scaling_factor)


def parts_spec(model: StableDiffusion, *parts: str) -> StableDiffusion:
    """Return a tree of booleans for `trainable` of `init_state`: true for the arrays of these parts.

    `parts_spec(model, "unet")` is the choice for training and for fine-tuning Stable Diffusion. Raises
    `ValueError` for a name that is not a part.
    """
    names = ("text_encoder", "unet", "vae")
    if unknown := [part for part in parts if part not in names]:
        raise ValueError(f"parts_spec: {unknown[0]!r} is no part, only {', '.join(names)}.")
    trees = {name: jax.tree.map(lambda _, name=name: name in parts, getattr(model, name)) for name in names}
    return dataclasses.replace(model, **trees)


def noise_losses(
    model: StableDiffusion,
    images: Float[Array, "b c height width"],
    input_ids: Int[Array, "b t"],
    *,
    key: Key,
) -> Float[Array, " b"]:
    """Return the squared error of the prediction for each image, noisy at its own timestep; in float32.

    **Arguments:**

    - `model`: the model. No gradients are computed for parts that `trainable` of `init_state` freezes.
    - `images`: from -1 to 1.
    - `input_ids`: their texts. If `sample_images` will use guidance, use the empty text for some of them.
    - `key`: for latents, timesteps, noise, and dropout.
    """
    latent_key, time_key, noise_key, text_key, unet_key = jax.random.split(key, 5)
    scheduler = model.scheduler
    latents = model.encode(images, key=latent_key)
    timesteps = jax.random.randint(time_key, images.shape[:1], 0, scheduler.num_train_timesteps)
    noise = jax.random.normal(noise_key, latents.shape, latents.dtype)
    texts = model.text_encoder(input_ids, key=text_key)
    found = model.unet(scheduler.add_noise(latents, noise, timesteps), timesteps, texts, key=unet_key)
    error = (found - scheduler.target(latents, noise, timesteps)).astype(jnp.float32)
    return jnp.mean(jnp.square(error), axis=(1, 2, 3))


def to_uint8(images: Float[Array | np.ndarray, "b c height width"]) -> UInt8[np.ndarray, "b height width c"]:
    """Convert images of -1 to 1 to 0 to 255 with channels last, as Pillow has them; on the host."""
    x = np.clip(np.asarray(images, np.float32) / 2 + 0.5, 0, 1)
    return np.moveaxis((255 * x).round().astype(np.uint8), 1, -1)
