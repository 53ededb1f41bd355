"""Stable Diffusion: images, losses, gradients and directories equal those of diffusers'
pipeline."""

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
from references import IMAGE_MODELS, REFERENCES, TEXT

import redco_eqx_models as models

PARTS = ("text_encoder", "unet", "vae")
TEXTS, NEGATIVE = ["a seven", "the number three"], ["", "dark"]
SD = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
DDIM_SD = {**SD, "clip_sample": False, "set_alpha_to_one": False}
V = {"prediction_type": "v_prediction"}
LATENTS = np.random.default_rng(0).normal(size=(2, 4, 8, 8)).astype(np.float32)
COSINE = {"beta_schedule": "squaredcos_cap_v2"}
DDIM = diffusers.DDIMScheduler(**DDIM_SD, **V)
PNDM = diffusers.PNDMScheduler(**SD, skip_prk_steps=True)
SCHEDULERS = {"ddim": DDIM, "pndm": PNDM}


@pytest.fixture(scope="module")
def pipeline():
    """As in Stable Diffusion 1, but tiny: a pipeline of diffusers for each scheduler,
    of the same networks."""
    # Characters, inside of words and at their end.
    letters = [
        *string.ascii_lowercase,
        *(f"{letter}</w>" for letter in string.ascii_lowercase),
    ]
    vocab = {
        token: i
        for i, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])
    }
    tokenizer = transformers.CLIPTokenizer(
        vocab=vocab, merges=[], model_max_length=TEXT
    )
    text = REFERENCES["clip_text"].make()
    options = {
        **IMAGE_MODELS["sd1"].options,
        "cross_attention_dim": text.config.hidden_size,
    }
    unet = diffusers.UNet2DConditionModel(**options)
    vae = diffusers.AutoencoderKL(**IMAGE_MODELS["vae"].options)
    for part in (unet, vae):
        torch.manual_seed(1)
        with torch.no_grad():
            for p in part.parameters():
                p.add_(0.1 * torch.randn(p.shape))
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": text,
        "unet": unet.eval(),
        "vae": vae.eval(),
    }
    none = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
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
    filled = tokenizer(texts, padding="max_length", max_length=TEXT, truncation=True)[
        "input_ids"
    ]
    return jnp.asarray(np.asarray(filled, np.int32))


@pytest.mark.parametrize(("name", "scale"), [("ddim", 3.0), ("pndm", 1.0)])
def test_the_pipeline_makes_the_same_images(name, scale, pipeline, directory):
    model = models.load_stable_diffusion(directory[name])
    there = {
        "num_inference_steps": 6,
        "latents": torch.tensor(LATENTS),
        "output_type": "np",
    }
    expected = pipeline[name](
        TEXTS, negative_prompt=NEGATIVE, guidance_scale=scale, **there
    ).images
    negative = None if scale == 1 else tokens(directory[name], NEGATIVE)
    ids = tokens(directory[name], TEXTS)
    options = {"num_steps": 6, "latents": jnp.asarray(LATENTS)}
    found = models.sample_images(model, ids, negative, guidance_scale=scale, **options)
    assert expected.std() > 0.05, "the reference is too even to tell anything"
    assert found.shape == (2, 3, 16, 16)
    found = np.moveaxis(np.clip(np.asarray(found) / 2 + 0.5, 0, 1), 1, -1)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    rounded = models.to_uint8(2 * np.moveaxis(expected, -1, 1) - 1) / 255
    # Half a step of 255.
    np.testing.assert_array_less(np.abs(rounded - expected), 0.002)


def test_what_is_saved_opens_there_bit_equal(pipeline, directory, tmp_path):
    model = models.load_stable_diffusion(directory["ddim"])
    other = pipeline["ddim"]
    for _ in range(2):  # over itself, too
        models.save_stable_diffusion(model, tmp_path)
        one = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
        for part in PARTS:
            assert_bit_equal(getattr(one, part), getattr(other, part))
        ours, theirs = (
            {k: v for k, v in x.scheduler.config.items() if k[0] != "_"}
            for x in (one, other)
        )
        assert ours == theirs
        assert type(one.scheduler) is type(other.scheduler)
        assert one.tokenizer(TEXTS)["input_ids"] == other.tokenizer(TEXTS)["input_ids"]


def test_a_safety_checker_is_copied_and_not_run(directory, tmp_path):
    source = tmp_path / "source"
    models.save_stable_diffusion(
        models.load_stable_diffusion(directory["pndm"]), source
    )
    index = json.loads((source / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]  # and no folder
    (source / "safety_checker").mkdir()
    (source / "safety_checker" / "model.safetensors").write_bytes(b"weights")
    (source / "model_index.json").write_text(json.dumps(index))
    models.save_stable_diffusion(
        models.load_stable_diffusion(source), tmp_path / "target"
    )
    assert (
        tmp_path / "target" / "safety_checker" / "model.safetensors"
    ).read_bytes() == b"weights"
    found = json.loads((tmp_path / "target" / "model_index.json").read_text())
    assert found["safety_checker"] == index["safety_checker"]
    assert found["feature_extractor"] == [None, None]


def test_the_training_loss_and_its_gradients_equal_torchs(pipeline, directory):
    model = models.load_stable_diffusion(directory["ddim"])
    there = pipeline["ddim"]
    key = jax.random.key(4)
    images = np.random.default_rng(1).uniform(-1, 1, (2, 3, 16, 16)).astype(np.float32)
    ids = tokens(directory["ddim"], TEXTS)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean(models.noise_losses(model, jnp.asarray(images), ids, key=key))

    value, gradients = loss(model)
    # The same draws, by hand.
    keys = jax.random.split(key, 5)
    first, second = (jax.random.normal(keys[i], (2, 4, 8, 8)) for i in (0, 2))
    draws = (first, jax.random.randint(keys[1], (2,), 0, 1000), second)
    drawn, timesteps, noise = (torch.tensor(np.asarray(x)) for x in draws)
    found = there.vae.encode(torch.tensor(images)).latent_dist
    clean = there.vae.config.scaling_factor * (found.mean + found.std * drawn)
    noisy = there.scheduler.add_noise(clean, noise, timesteps)
    texts = there.text_encoder(
        torch.tensor(np.asarray(ids), dtype=torch.long)
    ).last_hidden_state
    target = there.scheduler.get_velocity(clean, noise, timesteps)
    expected = torch.nn.functional.mse_loss(
        there.unet(noisy, timesteps, texts).sample, target
    )
    for part in PARTS:
        getattr(there, part).zero_grad()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
    for part in PARTS:
        assert_same_gradients(
            *(getattr(x, part) for x in (model, gradients, there)), rounding=1e-6
        )


# Schedulers: whole trajectories, training targets and files equal those of diffusers.

SHAPE = (2, 3, 4, 4)
START = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
MIXING = np.random.default_rng(5).normal(size=(3, 3)).astype(np.float32) / 3**0.5
ZERO_SNR = {
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
    **V,
}

SETTINGS = [
    ("DDPMScheduler", {"variance_type": "fixed_large", **V}, 7),
    (
        "DDPMScheduler",
        {"variance_type": "fixed_small_log", "beta_schedule": "squaredcos_cap_v2"},
        9,
    ),
    ("DDPMScheduler", {**SD, "clip_sample": False}, 50),
    ("DDPMScheduler", {"prediction_type": "sample", "timestep_spacing": "linspace"}, 6),
    ("DDPMScheduler", ZERO_SNR, 8),
    ("DDPMScheduler", {"num_train_timesteps": 20, "clip_sample_range": 0.5}, 20),
    ("DDIMScheduler", {}, 10),
    ("DDIMScheduler", DDIM_SD, 50),
    ("DDIMScheduler", {**SD, **ZERO_SNR}, 8),
    ("DDIMScheduler", {"prediction_type": "sample", "timestep_spacing": "linspace"}, 6),
    (
        "DDIMScheduler",
        {"beta_schedule": "squaredcos_cap_v2", "clip_sample_range": 2.0},
        1,
    ),
    ("PNDMScheduler", {**SD, "skip_prk_steps": True, "set_alpha_to_one": True, **V}, 7),
    ("PNDMScheduler", {"skip_prk_steps": True, "timestep_spacing": "trailing"}, 3),
    ("PNDMScheduler", {"skip_prk_steps": True}, 1),
    (
        "PNDMScheduler",
        {"skip_prk_steps": True, "timestep_spacing": "linspace", **COSINE},
        9,
    ),
]


def model_of(xp):
    """A stand-in for the network, which mixes channels and depends on the timestep."""
    return lambda x, t: xp.tanh(
        xp.einsum("bchw,dc->bdhw", x, MIXING if xp is jnp else torch.tensor(MIXING))
        * (0.5 + t / 700)
    )


def theirs(name, options, num_steps, eta=0.0):
    """The trajectory of diffusers: all its samples, and the noise that its steps
    drew."""
    scheduler = getattr(diffusers, name)(**options)
    scheduler.set_timesteps(num_steps)
    predict = model_of(torch)
    x = torch.tensor(START)
    found = []
    more = (
        {}
        if name == "PNDMScheduler"
        else {"generator": torch.Generator().manual_seed(3)}
    )
    if eta:
        more["eta"] = eta
    for t in scheduler.timesteps:
        x = scheduler.step(predict(x, t), t, x, **more).prev_sample
        found.append(x.numpy())
    # DDPM draws no noise at timestep 0.
    drawing = torch.Generator().manual_seed(3)
    drawn = [torch.randn(SHAPE, generator=drawing).numpy() for _ in scheduler.timesteps]
    return scheduler, np.stack(found), np.stack(drawn)


def ours(scheduler, num_steps, noise):
    """All samples of ours, from one scan."""

    @jax.jit
    def run(x, noise):
        def one(trajectory, given):
            step, drawn = given
            output = model_of(jnp)(trajectory.sample, step.timestep)
            trajectory = scheduler.step(
                step, output, trajectory, drawn if scheduler.is_random else None
            )
            return trajectory, trajectory.sample

        return jax.lax.scan(
            one, scheduler.start(x), (scheduler.steps(num_steps), noise)
        )[1]

    return np.asarray(run(jnp.asarray(START), jnp.asarray(noise)))


def distance(found, expected):
    return max(
        np.abs(f - e).max() / max(e.std(), 1)
        for f, e in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("name", "options", "num_steps"), SETTINGS)
def test_whole_trajectories_equal_those_of_diffusers(name, options, num_steps):
    reference, expected, noise = theirs(name, options, num_steps)
    scheduler = getattr(models, name)(**options)
    np.testing.assert_array_equal(
        scheduler.steps(num_steps).timestep, reference.timesteps.numpy()
    )
    np.testing.assert_allclose(
        scheduler.alphas_cumprod, reference.alphas_cumprod.numpy(), rtol=2e-5, atol=1e-8
    )
    found = ours(scheduler, num_steps, noise)
    assert np.isfinite(expected).all()
    assert distance(found, expected) < 2e-5


def test_ddim_with_noise_equals_that_of_diffusers():
    _, expected, noise = theirs("DDIMScheduler", DDIM_SD, 10, eta=0.7)
    assert (
        distance(ours(models.DDIMScheduler(**DDIM_SD, eta=0.7), 10, noise), expected)
        < 2e-5
    )


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, options, _ in SETTINGS[::5]]
)
def test_files_are_those_of_diffusers(name, options, tmp_path):
    reference = getattr(diffusers, name)(**options)
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "scheduler_config.json").read_text())
    scheduler = getattr(models, name).from_json(raw)
    assert scheduler.to_json() == raw
    assert hash(scheduler) == hash(getattr(models, name).from_json(raw))
    (tmp_path / "scheduler_config.json").write_text(
        json.dumps(getattr(models, name)(**options).to_json())
    )
    again = getattr(diffusers, name).from_pretrained(tmp_path)
    for entry in scheduler.to_json():
        assert entry.startswith("_") or again.config[entry] == reference.config[entry]
