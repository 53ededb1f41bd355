"""Stable Diffusion (Rombach et al. 2022): its three networks as one model, its loss,
and images from texts."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from jaxtyping import Array, Float, Int, UInt8

from redco_eqx.types import Key
from redco_eqx_models._diffusion.scheduler import Scheduler, denoise
from redco_eqx_models._families.autoencoder_kl import AutoencoderKL
from redco_eqx_models._families.clip import CLIPTextModel
from redco_eqx_models._families.unet_2d_condition import UNet2DConditionModel


@dataclasses.dataclass(frozen=True)
class PipelineIndex:
    """The other entries of a `model_index.json`, as JSON, and the directory that it
    came from.

    `source` is the directory that the model was loaded from; `save_stable_diffusion`
    copies its other folders. Comparisons ignore it.
    """

    rest: str = "{}"
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)


class StableDiffusion(eqx.Module):
    """A text encoder, a denoiser of latents, and an autoencoder between latents and
    images, as one PyTree.

    Paths begin with the names of the folders: `unet.down_blocks...`. `parts_spec`
    selects the parts to train.

    - `scheduler`: adds and removes noise. For another one with the same weights:
        `entries = {**model.scheduler.to_json(), "clip_sample":
        False}` (latents have no range), then `dataclasses.replace(model,
        scheduler=DDIMScheduler.from_json(entries))`.

    Raises `ValueError` for parts that do not fit each other.
    """

    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    scheduler: Scheduler = eqx.field(static=True)
    index: PipelineIndex = eqx.field(static=True, default=PipelineIndex())

    def __check_init__(self) -> None:
        text = self.text_encoder.config
        unet = self.unet.config
        vae = self.vae.config
        wanted = unet.cross_attention_dim
        sizes = wanted if isinstance(wanted, tuple) else (wanted,)
        if any(size != text.hidden_size for size in sizes):
            raise ValueError(
                f"StableDiffusion: unet.cross_attention_dim={wanted}, but "
                f"text_encoder.hidden_size={text.hidden_size}, but the two must be "
                "equal."
            )
        for name in ("in_channels", "out_channels"):
            if getattr(unet, name) != vae.latent_channels:
                raise ValueError(
                    f"StableDiffusion: unet.{name}={getattr(unet, name)}, but "
                    f"vae.latent_channels={vae.latent_channels}. A unet that reads or "
                    "gives more (for inpainting) is not supported."
                )

    def encode(
        self, images: Float[Array, "b c height width"], *, key: Key
    ) -> Float[Array, "b latent h w"]:
        """Draw latents for the unet from the autoencoder's distribution for images of
        -1 to 1."""
        dtype = self.vae.encoder.conv_in.weight.dtype
        mean, log_variance = self.vae.encode(images.astype(dtype))
        # Kingma and Welling 2014, section 2.4. Half of the logarithm of the variance is
        # that of the standard deviation.
        noise = jax.random.normal(key, mean.shape, mean.dtype)
        latents = mean + jnp.exp(0.5 * log_variance) * noise
        # Rombach et al. 2022 scale latents to about unit variance.
        return self.vae.config.scaling_factor * latents

    def decode(
        self, latents: Float[Array, "b latent h w"]
    ) -> Float[Array, "b c height width"]:
        """Decode the unet's latents into images, about from -1 to 1."""
        return self.vae.decode(latents / self.vae.config.scaling_factor)


def parts_spec(model: StableDiffusion, *parts: str) -> StableDiffusion:
    """Return a tree of booleans for `trainable` of `init_state`: true for the arrays of
    these parts.

    `parts_spec(model, "unet")` is the choice for training and for fine-tuning Stable
    Diffusion. Raises `ValueError` for a name that is not a part.
    """
    names = ("text_encoder", "unet", "vae")
    if unknown := [part for part in parts if part not in names]:
        raise ValueError(
            f"parts_spec: {unknown[0]!r} is no part, only {', '.join(names)}."
        )
    trees = {
        name: jax.tree.map(lambda _, name=name: name in parts, getattr(model, name))
        for name in names
    }
    return dataclasses.replace(model, **trees)


def noise_losses(
    model: StableDiffusion,
    images: Float[Array, "b c height width"],
    input_ids: Int[Array, "b t"],
    *,
    key: Key,
) -> Float[Array, " b"]:
    """Return the squared error of the prediction for each image in float32. Each image
    gets the noise of its own timestep.

    **Arguments:**

    - `model`: the model. No gradients are computed for parts that `trainable` of
        `init_state` freezes.
    - `images`: from -1 to 1.
    - `input_ids`: their texts. If `sample_images` will use guidance, use the empty text
        for some of them.
    - `key`: for latents, timesteps, noise, and dropout.
    """
    latent_key, time_key, noise_key, text_key, unet_key = jax.random.split(key, 5)
    scheduler = model.scheduler
    latents = model.encode(images, key=latent_key)
    timesteps = jax.random.randint(
        time_key, images.shape[:1], 0, scheduler.num_train_timesteps
    )
    noise = jax.random.normal(noise_key, latents.shape, latents.dtype)
    texts = model.text_encoder(input_ids, key=text_key)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    # Ho et al. 2020, equation 14, for a scheduler that predicts the noise.
    found = model.unet(noisy, timesteps, texts, key=unet_key)
    error = (found - scheduler.target(latents, noise, timesteps)).astype(jnp.float32)
    return jnp.mean(jnp.square(error), axis=(1, 2, 3))


def to_uint8(
    images: Float[Array | np.ndarray, "b c height width"],
) -> UInt8[np.ndarray, "b height width c"]:
    """Convert images with values from -1 to 1 into values from 0 to 255 with channels
    last, as in Pillow, on the host."""
    x = np.clip(np.asarray(images, np.float32) / 2 + 0.5, 0, 1)
    return np.moveaxis((255 * x).round().astype(np.uint8), 1, -1)


def sample_images(
    model: StableDiffusion,
    input_ids: Int[Array, "b t"],
    negative_ids: Int[Array, "_ _"] | None = None,
    *,
    num_steps: int = 50,
    guidance_scale: float = 7.5,
    latents: Float[Array, "b latent h w"] | None = None,
    key: Key | None = None,
) -> Float[Array, "b c height width"]:
    """Sample images for texts with the model's scheduler and classifier-free guidance
    (Ho and Salimans 2022).

    It is compiled once per shape and number of steps, by itself or inside your own
    `jax.jit`. You can use it as a `predict_fn` with a sharded model. No dropout is
    applied, and nothing checks the content of an image.

    **Arguments:**

    - `model`: a model of any layout; its scheduler takes the steps.
    - `input_ids`: the texts, padded by the tokenizer in the model's directory.
    - `negative_ids`: the texts to steer away from; pass the empty text if you have no
        other.
    - `num_steps`: the number of steps of the scheduler.
    - `guidance_scale`: the factor on the step from the prediction without the text
        towards the prediction with it. With 1, there is no guidance, so leave out
        `negative_ids`.
    - `latents`: the initial noise. By default, it is drawn, with the height and width
        `unet.config.sample_size`.
    - `key`: for that noise, and for the noise that a scheduler draws at each step.

    **Returns:**

    Images, about from -1 to 1, `vae.config.downscale` times as high and wide as
    latents; see `to_uint8`.

    **Raises:**

    `ValueError`, before anything is compiled, for guidance without `negative_ids` or
    the reverse, shapes that do not fit, no `key` where one is needed, or a number of
    steps that the scheduler rejects.
    """
    if (guidance_scale != 1) != (negative_ids is not None):
        raise ValueError(
            f"sample_images: guidance_scale={guidance_scale}, and negative_ids is "
            f"{'not ' if negative_ids is None else ''}given. Pass those of the empty "
            "text, or neither: guidance_scale=1."
        )
    if negative_ids is not None and negative_ids.shape != input_ids.shape:
        raise ValueError(
            f"sample_images: negative_ids has shape {negative_ids.shape}, but "
            f"input_ids {input_ids.shape}."
        )
    if key is None and (latents is None or model.scheduler.is_random):
        why = "latents are not given"
        if latents is not None:
            why = f"{type(model.scheduler).__name__} draws noise"
        raise ValueError(f"sample_images: {why}, and there is no key.")
    first = (len(input_ids), model.unet.config.in_channels)
    if latents is not None and latents.shape[:2] != first:
        raise ValueError(
            f"sample_images: latents has shape {latents.shape}, but it must begin with "
            f"{first}: a row for each text, of so many channels."
        )
    # The next two calls raise errors, which inside of a jitted function would come
    # after the tracing of the text encoder.
    if latents is None:
        _latent_shape(model, len(input_ids))
    model.scheduler.steps(num_steps)
    return _sample(
        model,
        input_ids,
        negative_ids,
        num_steps,
        jnp.asarray(guidance_scale),
        latents,
        key,
    )


def _latent_shape(model: StableDiffusion, num_images: int) -> tuple[int, ...]:
    size = model.unet.config.sample_size
    if size is None:
        raise ValueError(
            "sample_images: unet.config.sample_size is not known. Pass latents."
        )
    height, width = (size, size) if isinstance(size, int) else size
    return num_images, model.unet.config.in_channels, height, width


@eqx.filter_jit
def _sample(
    model: StableDiffusion,
    input_ids: Int[Array, "b t"],
    negative_ids: Int[Array, "b t"] | None,
    num_steps: int,
    scale: Float[Array, ""],
    latents: Float[Array, "b latent h w"] | None,
    key: Key | None,
) -> Float[Array, "b c height width"]:
    num_images = len(input_ids)
    first_key = way_key = None
    if key is not None:
        first_key, way_key = jax.random.split(key)
    if latents is None:
        assert first_key is not None
        latents = jax.random.normal(first_key, _latent_shape(model, num_images))
    texts = model.text_encoder(input_ids)
    if negative_ids is not None:
        # Side by side in the batch, so that both are on the device that has the image.
        texts = rearrange(
            [model.text_encoder(negative_ids), texts], "n b t d -> (b n) t d"
        )

    def predict(
        sample: Float[Array, "b latent h w"], timestep: Int[Array, ""]
    ) -> Float[Array, "b latent h w"]:
        given = sample.astype(texts.dtype)
        if negative_ids is None:
            return model.unet(given, jnp.full(num_images, timestep), texts)
        found = model.unet(
            repeat(given, "b ... -> (b 2) ..."),
            jnp.full(2 * num_images, timestep),
            texts,
        )
        found = rearrange(found, "(b n) ... -> n b ...", n=2).astype(sample.dtype)
        away, towards = found
        # Ho and Salimans 2022, equation 6, whose w is `scale - 1`.
        return away + scale.astype(sample.dtype) * (towards - away)

    latents = denoise(
        model.scheduler, predict, latents, num_steps=num_steps, key=way_key
    )
    return model.decode(latents.astype(texts.dtype))
