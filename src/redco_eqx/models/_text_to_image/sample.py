"""`sample_images`: images from texts."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx.models._diffusion.trajectory import denoise
from redco_eqx.models._text_to_image.stable_diffusion import StableDiffusion


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
    """Sample images for texts with the model's scheduler and classifier-free guidance (Ho and Salimans 2022).

    It is compiled once per shape and number of steps, by itself or inside your own `jax.jit`. You can use
    it as a `predict_fn` with a sharded model. No dropout is applied, and nothing checks the content of an
    image.

    **Arguments:**

    - `model`: a model of any layout; its scheduler takes the steps.
    - `input_ids`: the texts, padded by the tokenizer in the model's directory.
    - `negative_ids`: the texts to steer away from; pass the empty text if you have no other.
    - `num_steps`: the number of steps of the scheduler.
    - `guidance_scale`: how far to go from the prediction without the text towards the prediction with it, and
        beyond. With 1, there is no guidance; then leave out `negative_ids`.
    - `latents`: the initial noise. By default, it is drawn, with the height and width
        `unet.config.sample_size`.
    - `key`: for that noise, and for the noise that a scheduler draws at each step.

    **Returns:**

    Images, about from -1 to 1, `vae.config.downscale` times as high and wide as latents; see `to_uint8`.

    **Raises:**

    `ValueError`, before anything is compiled, for guidance without `negative_ids` or the reverse, shapes that
    do not fit, no `key` where one is needed, or a number of steps that the scheduler refuses.
    """
    if (guidance_scale != 1) != (negative_ids is not None):
        raise ValueError(
            f"sample_images: guidance_scale={guidance_scale}, and negative_ids is "
            f"{'not ' if negative_ids is None else ''}given. Pass those of the empty text, or neither: "
            "guidance_scale=1."
        )
    if negative_ids is not None and negative_ids.shape != input_ids.shape:
        raise ValueError(
            f"sample_images: negative_ids has shape {negative_ids.shape}, but input_ids {input_ids.shape}."
        )
    if key is None and (latents is None or model.scheduler.is_random):
        why = "latents are not given" if latents is None else f"{type(model.scheduler).__name__} draws noise"
        raise ValueError(f"sample_images: {why}, and there is no key.")
    first = (len(input_ids), model.unet.config.in_channels)
    if latents is not None and latents.shape[:2] != first:
        raise ValueError(
            f"sample_images: latents has shape {latents.shape}, but it must begin with {first}: a row for "
            "each text, of so many channels."
        )
    if latents is None:
        _latent_shape(model, len(input_ids))  # raises for an unknown one
    model.scheduler.steps(num_steps)  # raises for a number that it cannot take
    return _sample(model, input_ids, negative_ids, num_steps, jnp.asarray(guidance_scale), latents, key)


def _latent_shape(model: StableDiffusion, num_images: int) -> tuple[int, ...]:
    size = model.unet.config.sample_size
    if size is None:
        raise ValueError("sample_images: unet.config.sample_size is not known. Pass latents.")
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
    first_key, way_key = (None, None) if key is None else jax.random.split(key)
    if latents is None:
        assert first_key is not None
        latents = jax.random.normal(first_key, _latent_shape(model, num_images))
    texts = model.text_encoder(input_ids)
    if negative_ids is not None:
        # Side by side in the batch, so that both are on the device that has the image.
        texts = rearrange([model.text_encoder(negative_ids), texts], "n b t d -> (b n) t d")

    def predict(sample: Float[Array, "b latent h w"], timestep: Int[Array, ""]) -> Float[Array, "b latent h w"]:
        given = sample.astype(texts.dtype)
        if negative_ids is None:
            return model.unet(given, jnp.full(num_images, timestep), texts)
        found = model.unet(repeat(given, "b ... -> (b 2) ..."), jnp.full(2 * num_images, timestep), texts)
        away, towards = rearrange(found, "(b n) ... -> n b ...", n=2).astype(sample.dtype)
        return away + scale.astype(sample.dtype) * (towards - away)

    latents = denoise(model.scheduler, predict, latents, num_steps=num_steps, key=way_key)
    return model.decode(latents.astype(texts.dtype))
