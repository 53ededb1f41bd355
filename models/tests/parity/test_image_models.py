"""The UNet and the autoencoder of Stable Diffusion: outputs, gradients and files equal
those of diffusers."""

import json
from typing import Any

import diffusers
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison import assert_bit_equal, assert_same_gradients, opened
from fit_helpers import assert_identical
from references import IMAGE_MODELS
from safetensors.numpy import load_file, save_file

from redco_eqx import to_arrays
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._families.registry import PARTS

WEIGHTS = "diffusion_pytorch_model.safetensors"
IMAGES = np.random.default_rng(1).uniform(-1, 1, (2, 3, 16, 12)).astype(np.float32)
TOLERANCE = 1e-4  # of the standard deviation of what is compared


def assert_near(found: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    assert np.abs(np.asarray(found) - expected).max() <= TOLERANCE * expected.std()


def assert_same(there, loss, expected, model, loss_fn):
    """The outputs, the loss and its gradient."""
    there.zero_grad()
    loss.backward()
    (value, found), gradient = eqx.filter_jit(
        eqx.filter_value_and_grad(loss_fn, has_aux=True)
    )(model)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y.detach())
    # A float32 sum in another order.
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    # A norm follows some biases and takes away what they add: there are gradients that
    # are but rounding.
    assert_same_gradients(model, gradient, there, tolerance=3e-4, rounding=1e-6)


UNETS = [("sd1", 8, "none"), ("sd2", 8, "full"), ("other", 7, "none")]


@pytest.mark.parametrize(("name", "height", "remat"), UNETS)
def test_predictions_and_gradients_equal_those_of_diffusers(
    name, height, remat, directory, reference
):
    generator = np.random.default_rng(0)
    sample = generator.normal(size=(2, 4, height, 8))
    texts = generator.normal(size=(2, 5, 24))
    sample = np.float32(sample)
    times = np.asarray([3, 901], np.int32)
    texts = np.float32(texts)
    noise = np.random.default_rng(2).normal(size=sample.shape).astype(np.float32)
    there = reference(name)
    expected = there(*map(torch.tensor, (sample, times, texts))).sample
    assert expected.std() > 0.3
    loss = torch.nn.functional.mse_loss(expected, torch.tensor(noise))

    def loss_fn(model):
        found = model(*map(jnp.asarray, (sample, times, texts)))
        return jnp.mean(jnp.square(found - noise)), (found,)

    assert_same(
        there, loss, (expected,), load_pretrained(directory(name), remat=remat), loss_fn
    )


@pytest.mark.parametrize("name", ["vae", "vae_bare"])
def test_latents_images_and_gradients_of_the_autoencoder_equal_those_of_diffusers(
    name, directory, reference
):
    there = reference(name)
    latents = there.encode(torch.tensor(IMAGES)).latent_dist
    decoded = there.decode(latents.mean + 0.5 * latents.std).sample
    loss = (
        torch.mean((decoded - torch.tensor(IMAGES)) ** 2) + 1e-2 * latents.kl().mean()
    )
    expected = latents.mean, latents.logvar, decoded

    def loss_fn(model):
        mean, log_variance = model.encode(jnp.asarray(IMAGES))
        decoded = model.decode(mean + 0.5 * jnp.exp(0.5 * log_variance))
        kl = 0.5 * jnp.sum(
            mean**2 + jnp.exp(log_variance) - 1 - log_variance, axis=(1, 2, 3)
        )
        return jnp.mean((decoded - IMAGES) ** 2) + 1e-2 * jnp.mean(kl), (
            mean,
            log_variance,
            decoded,
        )

    assert_same(there, loss, expected, load_pretrained(directory(name)), loss_fn)


def test_the_variance_is_cut_as_in_diffusers(directory, tmp_path):
    # Above what latents of real images have, so that both ends are met.
    arrays = load_file(directory("vae") / WEIGHTS)
    arrays["quant_conv.weight"] = 60 * arrays["quant_conv.weight"]
    save_file(arrays, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes(
        (directory("vae") / "config.json").read_bytes()
    )
    with torch.no_grad():
        encoded = diffusers.AutoencoderKL.from_pretrained(tmp_path).encode(
            torch.tensor(IMAGES)
        )
    expected = encoded.latent_dist.logvar.numpy()
    assert (expected.min(), expected.max()) == (-30, 20)
    _, found = eqx.filter_jit(lambda model, x: model.encode(x))(
        load_pretrained(tmp_path), IMAGES
    )
    assert_near(found, expected)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_files_come_back_bit_for_bit_with_their_configuration(
    name, directory, tmp_path, reference
):
    save_pretrained(load_pretrained(directory(name)), tmp_path)
    before, after = load_file(directory(name) / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(x.tobytes() == after[key].tobytes() for key, x in before.items())
    one, other = (
        json.loads((where / "config.json").read_text())
        for where in (tmp_path, directory(name))
    )
    assert one == other
    assert_bit_equal(opened(tmp_path, type(reference(name))), reference(name))


def test_an_option_that_is_left_out_means_the_same():
    for model_type, (kind, _) in PARTS.items():
        channels = (32,) * len(kind().block_out_channels)
        theirs = dict(
            getattr(diffusers, model_type)(block_out_channels=channels).config
        )
        del theirs["block_out_channels"]
        for name, x in kind().to_json().items():
            if name in theirs:
                assert x == (
                    list(theirs[name])
                    if isinstance(theirs[name], tuple)
                    else theirs[name]
                ), name
        for name, x in kind.only.items():
            assert theirs[name] == x, name


OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


@pytest.mark.parametrize("shape", [(), (1, 1)], ids=["matrices", "convolutions"])
def test_old_files_of_autoencoders_are_read(shape, directory, tmp_path):
    arrays = {}
    for key, x in load_file(directory("vae") / WEIGHTS).items():
        old = next((new for new in OLD if f".{new}." in key), None)
        if old is not None and key.endswith("weight"):
            x = x.reshape(*x.shape, *shape)
        arrays[key if old is None else key.replace(old, OLD[old])] = x
    assert any(".query." in key for key in arrays)
    save_file(arrays, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes(
        (directory("vae") / "config.json").read_bytes()
    )
    assert_identical(
        to_arrays(load_pretrained(tmp_path)),
        to_arrays(load_pretrained(directory("vae"))),
    )
