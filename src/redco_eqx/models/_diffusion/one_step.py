"""DDPM (Ho et al. 2020) and DDIM (Song et al. 2021): each step needs only one output of the model."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._diffusion.scheduler import Column, Scheduler, Trajectory


class Step(NamedTuple):
    """One step, or a row for each. The next sample is a weighted sum of the clean sample, the sample before,
    and noise.

    - `signal`, `sigma`: the factors of the clean sample and the noise in the sample before.
    - `of_clean`, `of_sample`, `of_noise`: the factors of the predicted clean sample, the sample before and the
        predicted noise in the next.
    - `deviation`: the standard deviation of new noise.
    """

    timestep: Int[Column, ""]
    signal: Float[Column, ""]
    sigma: Float[Column, ""]
    of_clean: Float[Column, ""]
    of_sample: Float[Column, ""]
    of_noise: Float[Column, ""]
    deviation: Float[Column, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneStepScheduler(Scheduler):
    """The part that DDPM and DDIM share.

    - `rescale_betas_zero_snr`: whether the last timestep is pure noise (Lin et al. 2024, algorithm 1).
    - `clip_sample`, `clip_sample_range`: whether to clip the predicted clean sample, and the range.
    """

    only: ClassVar[Mapping[str, Json]] = {**Scheduler.only, "thresholding": False}

    rescale_betas_zero_snr: bool = False
    clip_sample: bool = True
    clip_sample_range: float = 1.0

    @property
    def alphas_cumprod(self) -> Float[np.ndarray, " t"]:
        alphas = super().alphas_cumprod
        if not self.rescale_betas_zero_snr:
            return alphas
        root = np.sqrt(alphas.astype(np.float64))
        return (((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2).astype(np.float32)

    def step(
        self,
        step: Step,
        output: Float[Array, "b *dims"],
        trajectory: Trajectory,
        noise: Float[Array, "b *dims"] | None = None,
    ) -> Trajectory:
        sample = trajectory.sample
        if self.prediction_type == "epsilon":
            clean, predicted = (sample - step.sigma * output) / step.signal, output
        elif self.prediction_type == "sample":
            clean, predicted = output, (sample - step.signal * output) / step.sigma
        else:
            clean = step.signal * sample - step.sigma * output
            predicted = step.signal * output + step.sigma * sample
        if self.clip_sample:
            clean = jnp.clip(clean, -self.clip_sample_range, self.clip_sample_range)
        following = step.of_clean * clean + step.of_sample * sample + step.of_noise * predicted
        if noise is not None:
            following = following + step.deviation * noise
        return Trajectory(jnp.asarray(following, sample.dtype))

    def _step(self, timesteps: Int[np.ndarray, " n"], alpha: np.ndarray, *factors: np.ndarray | float) -> Step:
        """Make rows in float32 from values of higher precision."""
        columns = np.broadcast_arrays(np.sqrt(alpha), np.sqrt(1 - alpha), *factors)
        return Step(timesteps.astype(np.int32), *(x.astype(np.float32) for x in columns))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(OneStepScheduler):
    """Ancestral sampling (Ho et al. 2020, equation 7), and the training noise of Stable Diffusion.

    - `variance_type`: the variance of the noise that a step adds: `fixed_small` (that of the posterior;
        `fixed_small_log` is the same) or `fixed_large` (`beta`).
    """

    variance_type: str = "fixed_small"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("variance_type", ("fixed_small", "fixed_small_log", "fixed_large"))

    @property
    def is_random(self) -> bool:
        return True

    def steps(self, num_steps: int) -> Step:
        timesteps = self.timesteps(num_steps)
        alpha = self.alphas_cumprod[timesteps].astype(np.float64)
        before = np.append(alpha[1:], 1.0)
        beta = 1 - alpha / before
        variance = np.maximum((1 - before) / (1 - alpha) * beta, 1e-20)
        if self.variance_type == "fixed_large":
            variance = beta
        deviation = np.where(timesteps > 0, np.sqrt(variance), 0.0)
        of_clean = np.sqrt(before) * beta / (1 - alpha)
        of_sample = np.sqrt(alpha / before) * (1 - before) / (1 - alpha)
        return self._step(timesteps, alpha, of_clean, of_sample, 0.0, deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(OneStepScheduler):
    """Deterministic sampling in few steps (Song et al. 2021, equation 12).

    - `set_alpha_to_one`: whether the last step ends at a sample without noise, or at timestep 0.
    - `eta`: the share of DDPM's noise that a step adds, from 0 to 1; not an entry of the file.
    """

    set_alpha_to_one: bool = True
    eta: float = 0.0

    @property
    def is_random(self) -> bool:
        return self.eta != 0

    @classmethod
    def outside(cls) -> tuple[str, ...]:
        return (*super().outside(), "eta")

    def steps(self, num_steps: int) -> Step:
        timesteps = self.timesteps(num_steps)
        table = self.alphas_cumprod.astype(np.float64)
        alpha, before = table[timesteps], timesteps - self.num_train_timesteps // num_steps
        previous = np.where(before >= 0, table[before], 1.0 if self.set_alpha_to_one else table[0])
        deviation = self.eta * np.sqrt((1 - previous) / (1 - alpha) * (1 - alpha / previous))
        of_noise = np.sqrt(1 - previous - deviation**2)
        return self._step(timesteps, alpha, np.sqrt(previous), 0.0, of_noise, deviation)
