"""Schedulers: whole trajectories, training targets and files equal those of diffusers."""

import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from redco_eqx import models

SHAPE = (2, 3, 4, 4)
MIXING = np.random.default_rng(5).normal(size=(3, 3)).astype(np.float32) / 3**0.5
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
DDIM_SD = {**SD, "clip_sample": False, "set_alpha_to_one": False}
V = {"prediction_type": "v_prediction"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False, **V}

SETTINGS = [
    ("DDPMScheduler", {"variance_type": "fixed_large", **V}, 7),
    ("DDPMScheduler", {"variance_type": "fixed_small_log", "beta_schedule": "squaredcos_cap_v2"}, 9),
    ("DDPMScheduler", {**SD, "clip_sample": False}, 50),
    ("DDPMScheduler", {"prediction_type": "sample", "timestep_spacing": "linspace"}, 6),
    ("DDPMScheduler", ZERO_SNR, 8),
    ("DDPMScheduler", {"num_train_timesteps": 20, "clip_sample_range": 0.5}, 20),
    ("DDIMScheduler", {}, 10),
    ("DDIMScheduler", DDIM_SD, 50),
    ("DDIMScheduler", {**SD, **ZERO_SNR}, 8),
    ("DDIMScheduler", {"prediction_type": "sample", "timestep_spacing": "linspace"}, 6),
    ("DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2", "clip_sample_range": 2.0}, 1),
    ("PNDMScheduler", {**SD, "skip_prk_steps": True, "set_alpha_to_one": True, **V}, 7),
    ("PNDMScheduler", {"skip_prk_steps": True, "timestep_spacing": "trailing"}, 3),
    ("PNDMScheduler", {"skip_prk_steps": True}, 1),
    ("PNDMScheduler", {}, 10),
    ("PNDMScheduler", {"timestep_spacing": "linspace", "beta_schedule": "squaredcos_cap_v2"}, 9),
]  # fmt: skip


def model_of(xp):
    """A stand-in for the network, which mixes channels and depends on the timestep."""
    return lambda x, t: xp.tanh(xp.einsum("bchw,dc->bdhw", x, MIXING if xp is jnp else torch.tensor(MIXING))
                                * (0.5 + t / 700))  # fmt: skip


def start():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def theirs(name, options, num_steps, eta=0.0):
    """The trajectory of diffusers: all its samples, and the noise that its steps drew."""
    scheduler = getattr(diffusers, name)(**options)
    scheduler.set_timesteps(num_steps)
    predict, x, found = model_of(torch), torch.tensor(start()), []
    more = {} if name == "PNDMScheduler" else {"generator": torch.Generator().manual_seed(3)}
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
    predict = model_of(jnp)

    @jax.jit
    def run(x, noise):
        def one(trajectory, given):
            step, drawn = given
            output = predict(trajectory.sample, step.timestep)
            trajectory = scheduler.step(step, output, trajectory, drawn if scheduler.is_random else None)
            return trajectory, trajectory.sample

        return jax.lax.scan(one, scheduler.start(x), (scheduler.steps(num_steps), noise))[1]

    return np.asarray(run(jnp.asarray(start()), jnp.asarray(noise)))


def distance(found, expected):
    return max(np.abs(f - e).max() / max(e.std(), 1) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "options", "num_steps"), SETTINGS)
def test_whole_trajectories_equal_those_of_diffusers(name, options, num_steps):
    reference, expected, noise = theirs(name, options, num_steps)
    scheduler = getattr(models, name)(**options)
    timesteps = scheduler.steps(num_steps).timestep
    np.testing.assert_array_equal(timesteps, reference.timesteps.numpy())
    np.testing.assert_allclose(scheduler.alphas_cumprod, reference.alphas_cumprod.numpy(), rtol=2e-5, atol=1e-8)
    found = ours(scheduler, num_steps, noise)
    assert np.isfinite(expected).all()
    assert distance(found, expected) < 2e-5


def test_ddim_with_noise_equals_that_of_diffusers():
    _, expected, noise = theirs("DDIMScheduler", DDIM_SD, 10, eta=0.7)
    assert distance(ours(models.DDIMScheduler(**DDIM_SD, eta=0.7), 10, noise), expected) < 2e-5


@pytest.mark.parametrize("options", [{}, V, {"prediction_type": "sample"}, {**SD, **ZERO_SNR}])
def test_noise_and_targets_equal_those_of_diffusers(options):
    reference, scheduler = diffusers.DDPMScheduler(**options), models.DDPMScheduler(**options)
    clean, noise, timesteps = start(), start()[::-1].copy(), np.asarray([3, 999])
    tensors = torch.tensor(clean), torch.tensor(noise), torch.tensor(timesteps)
    found = jax.jit(scheduler.add_noise)(clean, noise, timesteps)
    np.testing.assert_allclose(found, reference.add_noise(*tensors).numpy(), atol=1e-5)
    expected = {"epsilon": noise, "sample": clean, "v_prediction": reference.get_velocity(*tensors).numpy()}
    found = jax.jit(scheduler.target)(clean, noise, timesteps)
    np.testing.assert_allclose(found, expected[scheduler.prediction_type], atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, options, _ in SETTINGS[::5]])
def test_files_are_those_of_diffusers(name, options, tmp_path):
    reference = getattr(diffusers, name)(**options)
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "scheduler_config.json").read_text())
    scheduler = getattr(models, name).from_json(raw)
    assert scheduler.to_json() == raw
    assert hash(scheduler) == hash(getattr(models, name).from_json(raw))
    (tmp_path / "scheduler_config.json").write_text(json.dumps(getattr(models, name)(**options).to_json()))
    again = getattr(diffusers, name).from_pretrained(tmp_path)
    for entry in scheduler.to_json():
        assert entry.startswith("_") or again.config[entry] == reference.config[entry]
