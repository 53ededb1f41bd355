"""DDPM (Ho et al. 2020), DDIM (Song et al. 2021), and PNDM (Liu et al. 2022), Stable
Diffusion's default."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redco_eqx_models._blocks.config import Json
from redco_eqx_models._diffusion.scheduler import Column, Sample, Scheduler, Trajectory


class Step(NamedTuple):
    """One step, or several steps with one row each. The next sample is a weighted sum
    of the clean sample, the previous sample, and noise.

    - `signal`, `sigma`: the factors of the clean sample and the noise in the previous
        sample.
    - `of_clean`, `of_sample`, `of_noise`: the factors of the predicted clean sample,
        the previous sample and the predicted noise in the next.
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

    - `rescale_betas_zero_snr`: whether the last timestep is pure noise (Lin et al.
        2024, algorithm 1).
    - `clip_sample`, `clip_sample_range`: whether to clip the predicted clean sample,
        and the range.
    """

    only = {**Scheduler.only, "thresholding": False}

    rescale_betas_zero_snr: bool = False
    clip_sample: bool = True
    clip_sample_range: float = 1.0

    @property
    def alphas_cumprod(self) -> Float[np.ndarray, " t"]:
        alphas = super().alphas_cumprod
        if not self.rescale_betas_zero_snr:
            return alphas
        # Lin et al. 2024, algorithm 1: shift the roots so that the last one is 0, and
        # stretch them so that the first one stays. The paper then goes back to betas.
        root = np.sqrt(alphas.astype(np.float64))
        shifted = (root - root[-1]) * root[0] / (root[0] - root[-1])
        return (shifted**2).astype(np.float32)

    def step(
        self,
        step: Step,
        output: Sample,
        trajectory: Trajectory,
        noise: Sample | None = None,
    ) -> Trajectory:
        sample = trajectory.sample
        # Each kind of output says both the clean sample and the noise, by
        # `sample = signal clean + sigma noise`.
        if self.prediction_type == "epsilon":
            clean = (sample - step.sigma * output) / step.signal
            predicted = output
        elif self.prediction_type == "sample":
            clean = output
            predicted = (sample - step.signal * output) / step.sigma
        else:
            # Salimans and Ho 2022, appendix D.
            clean = step.signal * sample - step.sigma * output
            predicted = step.signal * output + step.sigma * sample
        if self.clip_sample:
            # As in diffusers, the predicted noise stays that of the sample before it is
            # clipped.
            clean = jnp.clip(clean, -self.clip_sample_range, self.clip_sample_range)
        following = (
            step.of_clean * clean + step.of_sample * sample + step.of_noise * predicted
        )
        if noise is not None:
            following = following + step.deviation * noise
        return Trajectory(jnp.asarray(following, sample.dtype))

    def _step(
        self,
        timesteps: Int[np.ndarray, " n"],
        alpha: np.ndarray,
        *factors: np.ndarray | float,
    ) -> Step:
        """Make rows in float32 from values of higher precision."""
        columns = np.broadcast_arrays(np.sqrt(alpha), np.sqrt(1 - alpha), *factors)
        return Step(
            timesteps.astype(np.int32), *(x.astype(np.float32) for x in columns)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(OneStepScheduler):
    """Ancestral sampling (Ho et al. 2020, equation 7), and the training noise of Stable
    Diffusion.

    - `variance_type`: the variance of the noise that a step adds: `fixed_small` (that
        of the posterior; `fixed_small_log` is the same) or `fixed_large` (`beta`).
    """

    variance_type: str = "fixed_small"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("variance_type", ("fixed_small", "fixed_small_log", "fixed_large"))

    @property
    def is_random(self) -> bool:
        return True

    def steps(self, num_steps: int) -> Step:
        timesteps = self.timesteps(num_steps)
        alpha = self.alphas_cumprod[timesteps].astype(np.float64)
        # Timesteps count down, so the previous timestep is the next step. After the
        # last one, there is no noise.
        previous = np.append(alpha[1:], 1.0)
        # Beta of a step over several timesteps.
        beta = 1 - alpha / previous
        # Ho et al. 2020, equation 7. diffusers has the lower bound for the logarithm
        # that `fixed_small_log` takes of the variance.
        variance = np.maximum((1 - previous) / (1 - alpha) * beta, 1e-20)
        if self.variance_type == "fixed_large":
            variance = beta
        # The last step adds no noise (algorithm 2).
        deviation = np.where(timesteps > 0, np.sqrt(variance), 0.0)
        of_clean = np.sqrt(previous) * beta / (1 - alpha)
        of_sample = np.sqrt(alpha / previous) * (1 - previous) / (1 - alpha)
        return self._step(timesteps, alpha, of_clean, of_sample, 0.0, deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(OneStepScheduler):
    """Deterministic sampling in few steps (Song et al. 2021, equation 12).

    - `set_alpha_to_one`: true if the last step ends at a sample without noise, false if
        it ends at timestep 0.
    - `eta`: the share of DDPM's noise that a step adds, from 0 to 1; not an entry of
        the file.
    """

    outside = ("rest", "eta")

    set_alpha_to_one: bool = True
    eta: float = 0.0

    @property
    def is_random(self) -> bool:
        return self.eta != 0

    def steps(self, num_steps: int) -> Step:
        timesteps = self.timesteps(num_steps)
        table = self.alphas_cumprod.astype(np.float64)
        alpha = table[timesteps]
        # As in diffusers, each step has the same length, also where the spacing of the
        # timesteps differs from it.
        ends = timesteps - self.num_train_timesteps // num_steps
        last = 1.0 if self.set_alpha_to_one else table[0]
        previous = np.where(ends >= 0, table[ends], last)
        # Equations 12 and 16 of the paper.
        variance = (1 - previous) / (1 - alpha) * (1 - alpha / previous)
        deviation = self.eta * np.sqrt(variance)
        of_noise = np.sqrt(1 - previous - deviation**2)
        return self._step(timesteps, alpha, np.sqrt(previous), 0.0, of_noise, deviation)


# The linear multistep method of Adams and Bashforth, of orders 1 to 4, as in
# `step_plms` of diffusers' `PNDMScheduler`. Liu et al. 2022 have order 4.
ADAMS_BASHFORTH = (
    # Weights of the output and those before it, newest first, by their number.
    (1, 0, 0, 0),
    (3 / 2, -1 / 2, 0, 0),
    (23 / 12, -16 / 12, 5 / 12, 0),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


class Memory(NamedTuple):
    """The values that a step needs from earlier ones: the last three outputs, and the
    sample before the first half of the first step, from which the second half starts.
    """

    outputs: tuple[Array, Array, Array]
    sample: Array


class Call(NamedTuple):
    """One call of the model, or a row for each.

    - `signal`, `sigma`: the factors of the clean sample and the noise in the sample
        that the step starts from.
    - `of_sample`, `of_noise`: the factors of that sample and of the noise in the next.
    - `weights`: the factors of the outputs, newest first.
    - `goes_on`: whether the step starts from the sample before, and not the one that
        the model saw.
    - `is_kept`: whether later steps use this output.
    """

    timestep: Int[Column, ""]
    signal: Float[Column, ""]
    sigma: Float[Column, ""]
    of_sample: Float[Column, ""]
    of_noise: Float[Column, ""]
    weights: Float[Column, "4"]
    goes_on: Bool[Column, ""]
    is_kept: Bool[Column, ""]


class _Plan(NamedTuple):
    """The plan of one call: the step leads from timestep `start` to `end`."""

    timestep: int
    start: int
    end: int
    weights: tuple[float, ...] = ADAMS_BASHFORTH[0]
    goes_on: bool = False
    is_kept: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(Scheduler):
    """Pseudo numerical methods (Liu et al. 2022): linear multistep, as in Stable
    Diffusion. The first step is taken in two halves instead of by Runge-Kutta.

    - `skip_prk_steps`: only true is supported: no Runge-Kutta.
    - `set_alpha_to_one`: true if the last step ends at a sample without noise, false if
        it ends at timestep 0.
    """

    predictions = ("epsilon", "v_prediction")

    skip_prk_steps: bool = True
    set_alpha_to_one: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("skip_prk_steps", (True,))

    @classmethod
    def from_json(cls, raw: Mapping[str, Json], base: Any = None) -> "PNDMScheduler":
        # A file without the entry means false, the default of diffusers' class, which
        # is not supported. The default here is what Stable Diffusion has.
        return super().from_json({"skip_prk_steps": False, **raw}, base)

    def steps(self, num_steps: int) -> Call:
        stride = self.num_train_timesteps // num_steps
        timesteps = self.timesteps(num_steps).tolist()
        calls = [
            _Plan(t, t, t - stride, ADAMS_BASHFORTH[min(i, 3)])
            for i, t in enumerate(timesteps)
        ]
        if num_steps > 1:
            # Repeat the first step, by the mean of the outputs at both of its ends. The
            # second of the timesteps is therefore there twice, and `set_timesteps` of
            # diffusers repeats it too.
            t = timesteps[1]
            again = _Plan(
                t, t + stride, t, (1 / 2, 1 / 2, 0, 0), goes_on=True, is_kept=False
            )
            calls.insert(1, again)
        # One array for each field, with a row for each call.
        timestep, start, end, weights, *others = (np.asarray(x) for x in zip(*calls))
        table = self.alphas_cumprod.astype(np.float64)
        alpha = table[start]
        last = 1.0 if self.set_alpha_to_one else table[0]
        previous = np.where(end >= 0, table[end], last)
        # Equation 9 of the paper, as in `_get_prev_sample` of diffusers: the factors of
        # the sample add up to the root of `previous / alpha`.
        divisor = alpha * np.sqrt(1 - previous)
        divisor = divisor + np.sqrt(alpha * (1 - alpha) * previous)
        of_noise = (previous - alpha) / divisor
        floats = (
            np.sqrt(alpha),
            np.sqrt(1 - alpha),
            np.sqrt(previous / alpha),
            -of_noise,
            weights,
        )
        return Call(
            timestep.astype(np.int32), *(x.astype(np.float32) for x in floats), *others
        )

    def start(self, noise: Sample) -> Trajectory:
        # The first steps give outputs that do not exist the weight 0.
        zeros = jnp.zeros_like(noise)
        return Trajectory(noise, Memory((zeros, zeros, zeros), noise))

    def step(
        self,
        step: Call,
        output: Sample,
        trajectory: Trajectory,
        noise: Sample | None = None,
    ) -> Trajectory:
        memory: Memory = trajectory.memory
        outputs = (output, *memory.outputs)
        # A scan runs one program for all calls, so the row selects values.
        sample = jnp.where(step.goes_on, memory.sample, trajectory.sample)
        predicted = sum(step.weights[i] * x for i, x in enumerate(outputs))
        if self.prediction_type == "v_prediction":
            # As in diffusers, the outputs are averaged first, and converted after.
            predicted = step.signal * predicted + step.sigma * sample
        following = jnp.asarray(
            step.of_sample * sample + step.of_noise * predicted, sample.dtype
        )
        kept = jax.tree.map(
            lambda new, old: jnp.where(step.is_kept, new, old), outputs[:3], outputs[1:]
        )
        return Trajectory(following, Memory(kept, sample))
