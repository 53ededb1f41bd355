"""Stable Diffusion as one model: sampled, trained in part, saved and loaded, on any
mesh."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import edit_json
from fit_helpers import assert_identical
from tiny_models import LENGTH, abstract, make

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx import to_arrays
from redco_eqx_models import DDIMScheduler, DDPMScheduler, PNDMScheduler, denoise

INDEX = "model_index.json"


@functools.cache
def alone():
    """The model on one device."""
    scheduler = models.DDIMScheduler(
        clip_sample=False, steps_offset=1, prediction_type="v_prediction"
    )
    unet = make("unet", cross_attention_dim=32, sample_size=4)
    return models.StableDiffusion(
        make("clip", max_position_embeddings=LENGTH), unet, make("vae"), scheduler
    )


def batch_of(num=8):
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, (num, 3, 8, 8)).astype(np.float32)
    tokens = random.integers(0, 64, (num, LENGTH)).astype(np.int32)
    return {"images": images, "tokens": tokens, "empty": np.full_like(tokens, 31)}


def loss_fn(model, batch, key):
    return jnp.mean(
        models.noise_losses(model, batch["images"], batch["tokens"], key=key)
    )


def predict_fn(model, batch, key):
    options = {"num_steps": 2, "guidance_scale": 3.0, "key": key}
    return models.sample_images(model, batch["tokens"], batch["empty"], **options)


def run(**axes):
    """Images, the loss of a step, and what it changes, on a mesh."""
    mesh, optimizer = rx.make_mesh(**axes), optax.sgd(1.0)
    model = eqx.filter_shard(alone(), rx.shard_rules(alone(), mesh))
    batch = jax.device_put(batch_of(), rx.batch_sharding(mesh))
    spec = models.parts_spec(model, "unet", "text_encoder")
    state = rx.init_state(model, optimizer, key=jax.random.key(1), trainable=spec)
    images = rx.predict_step(state, batch, predict_fn=predict_fn)
    step = jax.jit(
        functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer)
    )
    after, metrics = step(state, batch)
    assert all(path.startswith("vae.") for path in after.frozen)
    changes = {
        path: np.asarray(x) - to_arrays(alone())[path]
        for path, x in after.params.items()
    }
    return np.asarray(images), float(metrics["loss"]), changes


@pytest.mark.long
def test_images_and_training_do_not_depend_on_the_mesh():
    images, loss, changes = run(data=1)
    found, found_loss, found_changes = run(tensor=2, fsdp=2)
    assert images.shape == (8, 3, 8, 8)
    np.testing.assert_allclose(found, images, atol=1e-3 * images.std())
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for path, change in changes.items():
        assert (
            np.linalg.norm(found_changes[path] - change)
            <= 1e-3 * np.linalg.norm(change) + 1e-6
        ), path
        # The bias of a key has no gradient.
        assert change.any() or path.endswith("k_proj.bias"), path


def test_to_uint8():
    images = np.asarray([-1.0, 1.0, 0.0, 9.0, -9.0], np.float32).reshape(1, 1, 1, 5)
    assert models.to_uint8(images).ravel().tolist() == [0, 255, 128, 255, 0]
    assert models.to_uint8(jnp.zeros((2, 3, 4, 5))).shape == (2, 4, 5, 3)


def test_saved_and_loaded_on_a_mesh_it_is_the_same(tmp_path):
    model = alone()
    (tmp_path / "one" / "tokenizer").mkdir(parents=True)
    (tmp_path / "one" / "tokenizer" / "vocab.json").write_text("{}")
    models.save_stable_diffusion(model, tmp_path / "one")
    index = json.loads((tmp_path / "one" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["tokenizer"] == ["transformers", "CLIPTokenizer"]
    assert index["safety_checker"] == [None, None]
    assert index["requires_safety_checker"] is False
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    loaded = models.load_stable_diffusion(tmp_path / "one", mesh)
    assert_identical(to_arrays(loaded), to_arrays(model))
    assert {x.sharding.mesh for x in to_arrays(loaded).values()} == {mesh}
    assert loaded.scheduler.to_json().items() >= model.scheduler.to_json().items()
    models.save_stable_diffusion(loaded, tmp_path / "two")
    assert (tmp_path / "two" / "tokenizer" / "vocab.json").read_text() == "{}"
    with pytest.raises(
        TypeError, match="expected a StableDiffusion, got a CLIPTextModel"
    ):
        models.save_stable_diffusion(model.text_encoder, tmp_path)


def test_other_dtypes_sizes_and_a_rescaled_scheduler_are_taken(saved):
    half = models.load_stable_diffusion(saved, dtype=jnp.bfloat16)
    options: Any = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    scheduler = models.DDPMScheduler(prediction_type="v_prediction", **options)
    model = dataclasses.replace(half, scheduler=scheduler)
    ids = jnp.asarray(batch_of(2)["tokens"])
    latents = jax.random.normal(jax.random.key(0), (2, 4, 2, 6), jnp.bfloat16)
    given: Any = {
        "latents": latents,
        "guidance_scale": 1.0,
        "num_steps": 2,
        "key": jax.random.key(0),
    }
    found = models.sample_images(model, ids, **given)
    assert (found.shape, found.dtype) == ((2, 3, 4, 12), jnp.bfloat16)
    assert jnp.isfinite(found).all()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    models.save_stable_diffusion(alone(), directory)
    return directory


def test_what_is_not_supported_is_refused_by_name(saved):
    for file, entries, message in (
        (
            INDEX,
            {"_class_name": "StableDiffusionXLPipeline"},
            "_class_name='StableDiffusionXLPipeline'",
        ),
        (
            INDEX,
            {"unet": ["diffusers", "UNet3D"]},
            r"unet=\['diffusers', 'UNet3D'\] is not supported",
        ),
        (
            INDEX,
            {"scheduler": ["diffusers", "LMSDiscreteScheduler"]},
            "scheduler='LMSDiscreteScheduler'",
        ),
        (
            "scheduler/scheduler_config.json",
            {"thresholding": True},
            "thresholding=True is not supported",
        ),
    ):
        text = edit_json(saved / file, **entries)
        with pytest.raises(ValueError, match=message):
            models.load_stable_diffusion(saved)
        if "scheduler" in entries:
            model = models.load_stable_diffusion(
                saved, scheduler=models.DDIMScheduler()
            )
            assert model.scheduler == models.DDIMScheduler()
        (saved / file).write_text(text)
    with pytest.raises(FileNotFoundError, match=r"model_index\.json does not exist"):
        models.load_stable_diffusion(saved / "unet")


def test_folders_are_copied_without_what_lies_elsewhere(saved, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    model = models.load_stable_diffusion(saved)
    index = dataclasses.replace(
        model.index, rest=json.dumps({"tokenizer": ["transformers", "CLIPTokenizer"]})
    )
    model = dataclasses.replace(model, index=index)
    folder = saved / "tokenizer"
    try:
        for place, target in (
            (folder, tmp_path / "private"),
            (folder / "vocab.json", tmp_path / "private" / "key"),
            (folder / "again", folder),  # endless
        ):
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(target)
            with pytest.raises(ValueError, match=f"{place.name} is a link to "):
                models.save_stable_diffusion(model, tmp_path / "new")
            assert not (tmp_path / "new").exists()
            place.unlink()
    finally:
        shutil.rmtree(folder)


def test_old_files_are_read_as_diffusers_reads_them(saved):
    file = saved / "scheduler" / "scheduler_config.json"
    text = edit_json(file, steps_offset=0, clip_sample=True)
    scheduler = models.load_stable_diffusion(saved).scheduler
    file.write_text(text)
    assert isinstance(scheduler, models.DDIMScheduler)
    assert (scheduler.steps_offset, scheduler.clip_sample) == (1, False)


# Schedulers as pure functions.

SHAPE = (2, 3, 4)


def normal(seed):
    return jax.random.normal(jax.random.key(seed), SHAPE)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_noise_has_the_variance_of_its_timestep_and_targets_give_back_what_was_mixed(
    prediction_type,
):
    scheduler = DDIMScheduler(prediction_type=prediction_type)
    clean = normal(0)
    noise = normal(1)
    timesteps = jnp.asarray([10, 700])
    noisy = scheduler.add_noise(clean, noise, timesteps)
    share = scheduler.alphas_cumprod[np.asarray(timesteps)][:, None, None]
    np.testing.assert_allclose(
        noisy, np.sqrt(share) * clean + np.sqrt(1 - share) * noise, atol=1e-6
    )
    target = scheduler.target(clean, noise, timesteps)
    if prediction_type == "v_prediction":
        # Of the clean sample.
        target = np.sqrt(share) * noisy - np.sqrt(1 - share) * target
    np.testing.assert_allclose(
        target, noise if prediction_type == "epsilon" else clean, atol=1e-6
    )
    half = scheduler.add_noise(
        clean.astype(jnp.bfloat16), noise.astype(jnp.bfloat16), timesteps
    )
    assert half.dtype == jnp.bfloat16


def sample(**options):
    """Samples with the options that a case gives."""
    return models.sample_images(alone(), jnp.zeros((2, LENGTH), int), **options)


def sample_with_noise():
    noisy = dataclasses.replace(alone(), scheduler=DDPMScheduler())
    ids, latents = jnp.zeros((2, LENGTH), int), jnp.zeros((2, 4, 4, 4))
    return models.sample_images(noisy, ids, latents=latents, guidance_scale=1.0)


def with_part(**part):
    return dataclasses.replace(alone(), **part)


def pure_noise():
    return DDIMScheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")


KEY = jax.random.key(0)
FREE: dict[str, Any] = {"guidance_scale": 1.0}
MULTISTEP = {"skip_prk_steps": True}
# A call, and words of its refusal.
REFUSED: dict[str, tuple[Any, str]] = {
    "sample_images-negative_ids-missing": (
        lambda: sample(key=KEY),
        "guidance_scale=7.5, and negative_ids is not given",
    ),
    "sample_images-negative_ids-without_guidance": (
        lambda: sample(negative_ids=jnp.zeros((2, LENGTH), int), **FREE, key=KEY),
        "guidance_scale=1.0, and negative_ids is given",
    ),
    "sample_images-negative_ids-of_another_shape": (
        lambda: sample(negative_ids=jnp.zeros((1, LENGTH), int), key=KEY),
        r"negative_ids has shape \(1, 8\)",
    ),
    "sample_images-key-missing": (
        lambda: sample(**FREE),
        "latents are not given, and there is no key",
    ),
    "sample_images-latents-of_another_shape": (
        lambda: sample(latents=jnp.zeros((2, 3, 4, 4)), **FREE),
        r"latents has shape \(2, 3, 4, 4\)",
    ),
    "sample_images-num_steps-zero": (
        lambda: sample(num_steps=0, **FREE, key=KEY),
        "num_steps=0",
    ),
    "sample_images-key-missing_for_noise": (
        sample_with_noise,
        "DDPMScheduler draws noise, and there",
    ),
    "parts_spec-part-unknown": (
        lambda: models.parts_spec(alone(), "encoder"),
        "'encoder' is no part",
    ),
    "StableDiffusion-text_encoder-of_another_size": (
        lambda: with_part(text_encoder=abstract("clip", hidden_size=16)),
        "text_encoder.hidden_size=16",
    ),
    "StableDiffusion-vae-of_other_channels": (
        lambda: with_part(vae=abstract("vae", latent_channels=8)),
        "vae.latent_channels=8",
    ),
    "DDPMScheduler-variance_type-learned": (
        lambda: DDPMScheduler.from_json({"variance_type": "learned_range"}),
        "variance_type='learned_range' is not supported",
    ),
    "DDPMScheduler-beta_schedule-unknown": (
        lambda: DDPMScheduler.from_json({"beta_schedule": "sigmoid"}),
        "beta_schedule='sigmoid' is not supported",
    ),
    "DDIMScheduler-trained_betas-list": (
        lambda: DDIMScheduler.from_json({"trained_betas": [0.1]}),
        r"trained_betas=\[0.1\] is not supported",
    ),
    "DDIMScheduler-clip_sample-int": (
        lambda: DDIMScheduler.from_json({"clip_sample": 1}),
        "clip_sample=1, but it must be: bool",
    ),
    "DDIMScheduler-steps_offset-negative": (
        lambda: DDIMScheduler.from_json({"steps_offset": -1}),
        "steps_offset=-1",
    ),
    "PNDMScheduler-prediction_type-sample": (
        lambda: PNDMScheduler.from_json({**MULTISTEP, "prediction_type": "sample"}),
        "prediction_type='sample' is not supp",
    ),
    "PNDMScheduler-timestep_spacing-unknown": (
        lambda: PNDMScheduler.from_json({**MULTISTEP, "timestep_spacing": "karras"}),
        "timestep_spacing='karras' is not supp",
    ),
    "PNDMScheduler-skip_prk_steps-false": (
        lambda: PNDMScheduler.from_json({}),
        "skip_prk_steps=False is not supported, only True",
    ),
    "DDIMScheduler-num_steps-too_many": (
        lambda: DDIMScheduler().steps(1001),
        "num_steps=1001",
    ),
    "DDIMScheduler-num_steps-too_many_with_offset": (
        lambda: DDIMScheduler(steps_offset=1).steps(1000),
        "steps_offset=1 leads 1000 steps to timestep 1000",
    ),
    "DDIMScheduler-num_steps-from_pure_noise": (
        lambda: pure_noise().steps(5),
        "timestep 999 is pure noise",
    ),
    "denoise-key-missing": (
        lambda: denoise(DDPMScheduler(), lambda x, t: x, normal(0), num_steps=2),
        "needs a key",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_wrong_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
