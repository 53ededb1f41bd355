"""Stable Diffusion: images, losses, gradients and directories equal those of diffusers' pipeline."""

import json
import string

import diffusers
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from comparison import assert_bit_equal, assert_same_gradients
from helpers import assert_identical
from references import REFERENCES, TEXT, UNETS, VAES

from redco_eqx import models, to_arrays

PARTS = ("text_encoder", "unet", "vae")
TEXTS, NEGATIVE = ["a seven", "the number three"], ["", "dark"]
SCHEDULERS = {
    "ddim": diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1, prediction_type="v_prediction",
    ),
    "pndm": diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    ),
}  # fmt: skip


def make_tokenizer():
    """Characters, inside of words and at their end."""
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    tokens = [*letters, "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=TEXT
    )


@pytest.fixture(scope="module")
def pipeline():
    """As in Stable Diffusion 1, but tiny: a pipeline of diffusers for each scheduler, of the same networks."""
    tokenizer = make_tokenizer()
    text = REFERENCES["clip_text"].make()
    unet = diffusers.UNet2DConditionModel(**{**UNETS["sd1"], "cross_attention_dim": text.config.hidden_size})
    vae = diffusers.AutoencoderKL(**VAES["vae"])
    for part in (unet, vae):
        torch.manual_seed(1)
        with torch.no_grad():
            for p in part.parameters():
                p.add_(0.1 * torch.randn(p.shape))
    parts = {"tokenizer": tokenizer, "text_encoder": text, "unet": unet.eval(), "vae": vae.eval()}
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return {
        name: diffusers.StableDiffusionPipeline(**parts, scheduler=scheduler, **none)
        for name, scheduler in SCHEDULERS.items()
    }


@pytest.fixture(scope="module")
def directory(pipeline, tmp_path_factory):
    """Return the directories where diffusers has written the pipelines."""
    found = {}
    for name, one in pipeline.items():
        one.set_progress_bar_config(disable=True)
        found[name] = tmp_path_factory.mktemp(name)
        one.save_pretrained(found[name])
    return found


def tokens(directory, texts):
    tokenizer = transformers.CLIPTokenizer.from_pretrained(directory / "tokenizer")
    filled = tokenizer(texts, padding="max_length", max_length=TEXT, truncation=True)["input_ids"]
    return jnp.asarray(np.asarray(filled, np.int32))


def latents(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 4, 8, 8)).astype(np.float32)


@pytest.mark.parametrize(("name", "scale"), [("ddim", 3.0), ("pndm", 1.0)])
def test_the_pipeline_makes_the_same_images(name, scale, pipeline, directory):
    model = models.load_stable_diffusion(directory[name])
    expected = pipeline[name](
        TEXTS, negative_prompt=NEGATIVE, num_inference_steps=6, guidance_scale=scale,
        latents=torch.tensor(latents()), output_type="np",
    ).images  # fmt: skip
    negative = None if scale == 1 else tokens(directory[name], NEGATIVE)
    ids = tokens(directory[name], TEXTS)
    options = {"num_steps": 6, "latents": jnp.asarray(latents())}
    found = models.sample_images(model, ids, negative, guidance_scale=scale, **options)
    assert expected.std() > 0.05, "the reference is too even to tell anything"
    assert found.shape == (2, 3, 16, 16)
    found = np.moveaxis(np.clip(np.asarray(found) / 2 + 0.5, 0, 1), 1, -1)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_array_less(
        np.abs(models.to_uint8(2 * np.moveaxis(expected, -1, 1) - 1) / 255 - expected), 0.002
    )


def assert_equal_there(one, other):
    for part in PARTS:
        assert_bit_equal(getattr(one, part), getattr(other, part))
    entries = [dict(x.scheduler.config) for x in (one, other)]
    assert {k: v for k, v in entries[0].items() if k[0] != "_"} == {
        k: v for k, v in entries[1].items() if k[0] != "_"
    }
    assert type(one.scheduler) is type(other.scheduler)
    assert one.tokenizer(TEXTS)["input_ids"] == other.tokenizer(TEXTS)["input_ids"]


def test_what_is_saved_opens_there_bit_equal(pipeline, directory, tmp_path):
    model = models.load_stable_diffusion(directory["ddim"])
    target = tmp_path / "saved"
    for _ in range(2):  # over itself, too
        models.save_stable_diffusion(model, target)
        opened = diffusers.StableDiffusionPipeline.from_pretrained(target)
        assert_equal_there(opened, pipeline["ddim"])
    again = models.load_stable_diffusion(target)
    assert again.scheduler == model.scheduler
    assert_identical(to_arrays(again), to_arrays(model))


def test_a_safety_checker_is_copied_and_not_run(directory, tmp_path):
    source = tmp_path / "source"
    models.save_stable_diffusion(models.load_stable_diffusion(directory["pndm"]), source)
    index = json.loads((source / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]  # and no folder
    (source / "safety_checker").mkdir()
    (source / "safety_checker" / "model.safetensors").write_bytes(b"weights")
    (source / "model_index.json").write_text(json.dumps(index))
    models.save_stable_diffusion(models.load_stable_diffusion(source), tmp_path / "target")
    assert (tmp_path / "target" / "safety_checker" / "model.safetensors").read_bytes() == b"weights"
    found = json.loads((tmp_path / "target" / "model_index.json").read_text())
    assert found["safety_checker"] == index["safety_checker"]
    assert found["feature_extractor"] == [None, None]


def test_the_training_loss_and_its_gradients_equal_torchs(pipeline, directory):
    model, there, key = models.load_stable_diffusion(directory["ddim"]), pipeline["ddim"], jax.random.key(4)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 3, 16, 16)).astype(np.float32)
    ids = tokens(directory["ddim"], TEXTS)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean(models.noise_losses(model, jnp.asarray(images), ids, key=key))

    value, gradients = loss(model)
    # The same draws, by hand.
    keys = jax.random.split(key, 5)
    draws = [jax.random.normal(keys[0], (2, 4, 8, 8)), jax.random.randint(keys[1], (2,), 0, 1000),
             jax.random.normal(keys[2], (2, 4, 8, 8))]  # fmt: skip
    drawn, timesteps, noise = (torch.tensor(np.asarray(x)) for x in draws)
    found = there.vae.encode(torch.tensor(images)).latent_dist
    clean = there.vae.config.scaling_factor * (found.mean + found.std * drawn)
    noisy = there.scheduler.add_noise(clean, noise, timesteps)
    texts = there.text_encoder(torch.tensor(np.asarray(ids), dtype=torch.long)).last_hidden_state
    target = there.scheduler.get_velocity(clean, noise, timesteps)
    expected = torch.nn.functional.mse_loss(there.unet(noisy, timesteps, texts).sample, target)
    for part in PARTS:
        getattr(there, part).zero_grad()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
    for part in PARTS:
        each = (getattr(x, part) for x in (model, gradients, there))
        assert_same_gradients(*each, rounding=1e-6)
