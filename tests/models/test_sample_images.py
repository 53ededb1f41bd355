"""Stable Diffusion as one model: sampled, trained in part, saved and loaded, on any mesh."""

import dataclasses
import json
import shutil
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redco_eqx as rx
from redco_eqx import models, to_arrays

SIZE, LENGTH = 16, 6
INDEX = "model_index.json"


def make(key, **scheduler):
    text_key, unet_key, vae_key = jax.random.split(key, 3)
    text = models.CLIPTextConfig(
        vocab_size=32, hidden_size=SIZE, intermediate_size=2 * SIZE, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    unet = models.UNet2DConditionConfig(
        sample_size=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=SIZE,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = models.AutoencoderKLConfig(
        block_out_channels=(8, 8), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return models.StableDiffusion(
        models.CLIPTextModel(text, key=text_key),
        models.UNet2DConditionModel(unet, key=unet_key),
        models.AutoencoderKL(vae, key=vae_key),
        models.DDIMScheduler(clip_sample=False, steps_offset=1, prediction_type="v_prediction", **scheduler),
    )


@cache
def on(**axes):
    """The same model on a mesh."""
    return rx.init_model(make, rx.make_mesh(**axes), key=jax.random.key(0))


ALONE = {"devices": tuple(jax.devices()[:1])}


def alone():
    return on(**ALONE)


def batch_of(num=8):
    random = np.random.default_rng(0)
    return {
        "images": random.uniform(-1, 1, (num, 3, 8, 8)).astype(np.float32),
        "tokens": random.integers(0, 32, (num, LENGTH)).astype(np.int32),
        "empty": np.full((num, LENGTH), 31, np.int32),
    }


def loss_fn(model, batch, key):
    return jnp.mean(models.noise_losses(model, batch["images"], batch["tokens"], key=key))


def predict_fn(model, batch, key):
    return models.sample_images(
        model, batch["tokens"], batch["empty"], num_steps=2, guidance_scale=3.0, key=key
    )


@pytest.mark.long
@pytest.mark.parametrize("axes", [{}, {"tensor": 2, "fsdp": 2}])
def test_images_and_training_do_not_depend_on_the_mesh(axes):
    batch, optimizer, key = batch_of(), optax.sgd(1.0), jax.random.key(1)
    steps = []
    layouts: list[Any] = [ALONE, axes]
    for layout in layouts:
        model, mesh = on(**layout), rx.make_mesh(**layout)
        placed = jax.device_put(batch, rx.batch_sharding(mesh))
        spec = models.parts_spec(model, "unet", "text_encoder")
        state = rx.init_state(model, optimizer, key=key, trainable=spec)
        before = {path: np.asarray(x) for path, x in to_arrays(model).items()}
        images = rx.predict_step(state, placed, predict_fn=predict_fn)
        after, metrics = jax.jit(lambda s, b: rx.train_step(s, b, loss_fn=loss_fn, optimizer=optimizer))(
            state, placed
        )
        changes = {path: np.asarray(x) - before[path] for path, x in to_arrays(after.model).items()}
        steps.append((np.asarray(images), float(metrics["loss"]), changes))
    (images, loss, changes), (found, found_loss, found_changes) = steps
    assert images.shape == (8, 3, 8, 8)
    np.testing.assert_allclose(found, images, atol=1e-3 * images.std())
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for path, change in changes.items():
        assert np.linalg.norm(found_changes[path] - change) <= 1e-3 * np.linalg.norm(change) + 1e-6, path
        # The autoencoder is frozen, and all else is not; a bias of keys has no gradient.
        if path.startswith("vae."):
            assert not change.any(), path
        elif not path.endswith("k_proj.bias"):
            assert change.any(), path


@pytest.mark.long
def test_guidance_goes_from_one_prediction_to_the_other_and_beyond():
    model, batch, key = alone(), batch_of(2), jax.random.key(3)

    def sample(ids, away=None, scale=1.0):
        return np.asarray(
            models.sample_images(
                model, jnp.asarray(ids), None if away is None else jnp.asarray(away), guidance_scale=scale,
                num_steps=1, key=key,
            )
        )  # fmt: skip

    with_text, without = sample(batch["tokens"]), sample(batch["empty"])
    assert np.abs(with_text - without).max() > 1e-4
    np.testing.assert_allclose(sample(batch["tokens"], batch["empty"], 0.0), without, atol=1e-5)
    # The same texts on both sides: whatever the scale, nothing to go towards.
    np.testing.assert_allclose(sample(batch["tokens"], batch["tokens"], 5.0), with_text, atol=1e-4)
    assert np.abs(sample(batch["tokens"], batch["empty"], 5.0) - with_text).max() > 1e-4


def test_a_rescaled_scheduler_and_other_sizes_are_taken():
    model = dataclasses.replace(
        alone(),
        scheduler=models.DDPMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    )
    ids = jnp.asarray(batch_of(2)["tokens"])
    latents = jax.random.normal(jax.random.key(0), (2, 4, 2, 6))
    found = models.sample_images(
        model, ids, latents=latents, guidance_scale=1.0, num_steps=2, key=jax.random.key(0)
    )
    assert found.shape == (2, 3, 4, 12)
    assert np.isfinite(found).all()


@pytest.mark.long
def test_the_loss_in_half_precision_is_nearly_the_same():
    batch, key = jax.tree.map(jnp.asarray, batch_of(4)), jax.random.key(2)
    exact = loss_fn(alone(), batch, key)
    half = loss_fn(rx.cast(alone(), jnp.bfloat16), batch, key)
    assert half.dtype == exact.dtype == jnp.float32
    np.testing.assert_allclose(half, exact, rtol=0.05)


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
    arrays = to_arrays(model)
    for path, x in to_arrays(loaded).items():
        np.testing.assert_array_equal(x, arrays[path], err_msg=path)
        assert x.sharding.mesh == mesh
    assert loaded.scheduler.to_json().items() >= model.scheduler.to_json().items()
    models.save_stable_diffusion(loaded, tmp_path / "two")
    assert (tmp_path / "two" / "tokenizer" / "vocab.json").read_text() == "{}"
    half = models.load_stable_diffusion(tmp_path / "two", dtype=jnp.bfloat16)
    images = models.sample_images(
        half, jnp.asarray(batch_of(1)["tokens"]), guidance_scale=1.0, num_steps=1, key=jax.random.key(0)
    )
    assert images.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="expected a StableDiffusion, got a CLIPTextModel"):
        models.save_stable_diffusion(model.text_encoder, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    models.save_stable_diffusion(alone(), directory)
    return directory


def changed(file, **entries):
    """A file with other entries; what it was."""
    text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), **entries}))
    return text


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        (INDEX, {"_class_name": "StableDiffusionXLPipeline"}, "_class_name='StableDiffusionXLPipeline'"),
        (INDEX, {"unet": ["diffusers", "UNet3D"]}, r"unet=\['diffusers', 'UNet3D'\] is not supported"),
        (INDEX, {"scheduler": ["diffusers", "LMSDiscreteScheduler"]}, "scheduler='LMSDiscreteScheduler'"),
        ("scheduler/scheduler_config.json", {"thresholding": True}, "thresholding=True is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(file, entries, message, saved):
    text = changed(saved / file, **entries)
    try:
        with pytest.raises(ValueError, match=message):
            models.load_stable_diffusion(saved)
        if "scheduler" in message:
            model = models.load_stable_diffusion(saved, scheduler=models.DDIMScheduler())
            assert model.scheduler == models.DDIMScheduler()
    finally:
        (saved / file).write_text(text)
    with pytest.raises(FileNotFoundError, match=r"model_index\.json is not there"):
        models.load_stable_diffusion(saved / "unet")


def test_folders_are_copied_without_what_lies_elsewhere(saved, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    model = models.load_stable_diffusion(saved)
    index = dataclasses.replace(model.index, rest=json.dumps({"tokenizer": ["transformers", "CLIPTokenizer"]}))
    model = dataclasses.replace(model, index=index)
    folder = saved / "tokenizer"
    try:
        for place, target in (
            (folder, "private"),
            (folder / "vocab.json", "private/key"),
            (folder / "all", "private"),
        ):
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(tmp_path / target)
            with pytest.raises(ValueError, match=f"{place.name} is a link to .*private"):
                models.save_stable_diffusion(model, tmp_path / "new")
            assert not (tmp_path / "new").exists()
            place.unlink()
        (folder / "again").symlink_to(folder)  # endless
        with pytest.raises(ValueError, match="again is a link to"):
            models.save_stable_diffusion(model, tmp_path / "new")
    finally:
        shutil.rmtree(folder)


def test_old_files_are_read_as_diffusers_reads_them(saved):
    file = saved / "scheduler" / "scheduler_config.json"
    text = changed(file, steps_offset=0, clip_sample=True)
    scheduler = models.load_stable_diffusion(saved).scheduler
    file.write_text(text)
    assert isinstance(scheduler, models.DDIMScheduler)
    assert (scheduler.steps_offset, scheduler.clip_sample) == (1, False)


def test_bad_arguments_are_refused():
    model, ids = alone(), jnp.zeros((2, LENGTH), int)
    key = jax.random.key(0)
    free: Any = {"guidance_scale": 1.0}
    for options, message in [
        ({"key": key}, "guidance_scale=7.5, and negative_ids is not given"),
        ({"negative_ids": ids, **free, "key": key}, "guidance_scale=1.0, and negative_ids is given"),
        ({"negative_ids": ids[:1], "key": key}, r"negative_ids has shape \(1, 6\)"),
        ({**free}, "latents are not given, and there is no key"),
        ({"latents": jnp.zeros((2, 3, 4, 4)), **free}, r"latents has shape \(2, 3, 4, 4\)"),
        ({"num_steps": 0, **free, "key": key}, "num_steps=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.sample_images(model, ids, **options)
    noisy = dataclasses.replace(model, scheduler=models.DDPMScheduler())
    with pytest.raises(ValueError, match="DDPMScheduler draws noise, and there is no key"):
        models.sample_images(noisy, ids, latents=jnp.zeros((2, 4, 4, 4)), **free)
    with pytest.raises(ValueError, match="'encoder' is no part"):
        models.parts_spec(model, "encoder")


def test_parts_that_do_not_fit_are_refused():
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    narrow = dataclasses.replace(model.text_encoder.config, hidden_size=8)
    wide = dataclasses.replace(model.vae.config, latent_channels=8)
    kinds = {"text_encoder": (models.CLIPTextModel, narrow), "vae": (models.AutoencoderKL, wide)}
    for (name, (kind, config)), message in zip(
        kinds.items(), ("text_encoder.hidden_size=8", "vae.latent_channels=8")
    ):
        other = eqx.filter_eval_shape(
            lambda key, kind=kind, config=config: kind(config, key=key), jax.random.key(0)
        )
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(model, **{name: other})
