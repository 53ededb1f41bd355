"""Schedulers as pure functions: closed forms, transformations, files, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_eqx.models import DDIMScheduler, DDPMScheduler, PNDMScheduler, Scheduler, denoise

SHAPE = (2, 3, 4)
ALL = [
    DDPMScheduler(),
    DDIMScheduler(prediction_type="v_prediction"),
    DDIMScheduler(eta=0.5),
    PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=True),
    PNDMScheduler(set_alpha_to_one=True, prediction_type="v_prediction"),
]


def normal(seed):
    return jax.random.normal(jax.random.key(seed), SHAPE)


def oracle(scheduler, clean):
    """A model that knows the clean sample, and so all noise."""

    def predict(sample, timestep):
        share = jnp.asarray(scheduler.alphas_cumprod)[timestep]
        noise = (sample - jnp.sqrt(share) * clean) / jnp.sqrt(1 - share)
        return scheduler.target(clean, noise, jnp.full(len(clean), timestep))

    return predict


@pytest.mark.parametrize("scheduler", ALL, ids=lambda x: type(x).__name__)
def test_one_who_knows_the_clean_sample_is_led_to_it(scheduler):
    clean = 0.3 * jnp.clip(normal(0), -1, 1)
    run = jax.jit(
        lambda noise: denoise(scheduler, oracle(scheduler, clean), noise, num_steps=20, key=jax.random.key(1))
    )
    # PNDM is led there by what it saw on the way, and so less exactly.
    np.testing.assert_allclose(run(normal(2)), clean, atol=5e-3)


@pytest.mark.parametrize("scheduler", [ALL[0], ALL[2], ALL[4]], ids=lambda x: type(x).__name__)
def test_a_scan_equals_a_loop_and_schedulers_are_static_arguments(scheduler):
    key, noise, clean = jax.random.key(1), normal(2), 0.3 * normal(0)
    run: Any = jax.jit(
        lambda noise, scheduler: denoise(scheduler, oracle(scheduler, clean), noise, num_steps=6, key=key),
        static_argnums=1,
    )
    found = run(noise, scheduler)
    steps, trajectory = scheduler.steps(6), scheduler.start(noise)
    keys = jax.random.split(key, len(steps.timestep))
    for i, timestep in enumerate(steps.timestep):
        step = jax.tree.map(lambda x, i=i: x[i], steps)
        output = oracle(scheduler, clean)(trajectory.sample, timestep)
        drawn = jax.random.normal(keys[i], SHAPE) if scheduler.is_random else None
        trajectory = scheduler.step(step, output, trajectory, drawn)
    np.testing.assert_allclose(found, trajectory.sample, atol=2e-5)
    run(noise, dataclasses.replace(scheduler))
    assert run._cache_size() == 1


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_noise_has_the_variance_of_its_timestep_and_targets_give_back_what_was_mixed(prediction_type):
    scheduler = DDIMScheduler(prediction_type=prediction_type)
    clean, noise, timesteps = normal(0), normal(1), jnp.asarray([10, 700])
    noisy = scheduler.add_noise(clean, noise, timesteps)
    share = scheduler.alphas_cumprod[np.asarray(timesteps)][:, None, None]
    np.testing.assert_allclose(noisy, np.sqrt(share) * clean + np.sqrt(1 - share) * noise, atol=1e-6)
    target = scheduler.target(clean, noise, timesteps)
    if prediction_type == "v_prediction":
        target = np.sqrt(share) * noisy - np.sqrt(1 - share) * target  # of the clean sample
    expected = noise if prediction_type == "epsilon" else clean
    np.testing.assert_allclose(target, expected, atol=1e-6)
    half = scheduler.add_noise(clean.astype(jnp.bfloat16), noise.astype(jnp.bfloat16), timesteps)
    assert half.dtype == jnp.bfloat16


def test_the_last_timestep_is_pure_noise_where_it_is_rescaled():
    for kind in (DDPMScheduler, DDIMScheduler):
        scheduler = kind(rescale_betas_zero_snr=True, prediction_type="v_prediction")
        assert scheduler.alphas_cumprod[-1] == 0
        assert scheduler.alphas_cumprod[0] == kind().alphas_cumprod[0]
    refused = DDIMScheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    with pytest.raises(ValueError, match="timestep 999 is pure noise"):
        refused.steps(5)


def test_what_would_change_the_numbers_is_refused():
    for kind, entries, message in (
        (DDPMScheduler, {"variance_type": "learned_range"}, "variance_type='learned_range' is not supported"),
        (DDPMScheduler, {"beta_schedule": "sigmoid"}, "beta_schedule='sigmoid' is not supported"),
        (DDIMScheduler, {"thresholding": True}, "thresholding=True is not supported"),
        (DDIMScheduler, {"trained_betas": [0.1]}, r"trained_betas=\[0.1\] is not supported"),
        (DDIMScheduler, {"clip_sample": 1}, "clip_sample=1, but it must be: bool"),
        (DDIMScheduler, {"beta_end": "big"}, "beta_end='big', but it must be: float"),
        (DDIMScheduler, {"steps_offset": -1}, "steps_offset=-1"),
        (PNDMScheduler, {"prediction_type": "sample"}, "prediction_type='sample' is not supported"),
        (PNDMScheduler, {"timestep_spacing": "karras"}, "timestep_spacing='karras' is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            kind.from_json(entries)


def test_what_counts_for_nothing_is_kept():
    # Stable Diffusion's file of PNDM has an entry of DDIM, and its version.
    raw = {"clip_sample": False, "_diffusers_version": "0.6.0", "skip_prk_steps": True, "beta_end": 1}
    scheduler = PNDMScheduler.from_json(raw)
    found = scheduler.to_json()
    assert raw.items() <= found.items()
    assert found["_class_name"] == "PNDMScheduler"
    assert PNDMScheduler.from_json(found) == scheduler
    assert isinstance(scheduler, Scheduler)


def test_bad_numbers_of_steps_are_refused():
    for num_steps in (0, 1001):
        with pytest.raises(ValueError, match=f"num_steps={num_steps}"):
            DDIMScheduler().steps(num_steps)
    with pytest.raises(ValueError, match="steps_offset=1 leads 1000 steps to timestep 1000"):
        DDIMScheduler(steps_offset=1).steps(1000)
    with pytest.raises(ValueError, match="needs more than 3"):
        PNDMScheduler().steps(3)
    with pytest.raises(ValueError, match="needs a key"):
        denoise(DDPMScheduler(), lambda x, t: x, normal(0), num_steps=2)
