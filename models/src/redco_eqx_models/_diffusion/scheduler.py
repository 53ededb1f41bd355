"""The base of diffusion schedulers: the noise at each timestep, their files, and the
whole trajectory."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.config import Entries, Json

Column: TypeAlias = Array | np.ndarray
"""A number for each row of `steps`, or the number of a single row."""

Sample: TypeAlias = Float[Array, "b *dims"]
"""Noisy or clean samples, or a model's output for them."""

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
SPACINGS = ("leading", "linspace", "trailing")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


class Trajectory(NamedTuple):
    """The values passed from step to step: `sample`, and other values that a scheduler
    remembers."""

    sample: Sample
    memory: PyTree = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler(Entries, abc.ABC):
    """A scheduler adds noise to training samples, and removes noise step by step.

    Field names are those of diffusers' `scheduler_config.json`. A scheduler contains no
    arrays and has no state, so you can pass it to a compiled function as a static
    argument. A whole trajectory is one `lax.scan`:

    ```python
    def take(trajectory, step):
        predicted = predict(trajectory.sample, step.timestep)
        return scheduler.step(step, predicted, trajectory), None

    trajectory, _ = jax.lax.scan(take, scheduler.start(noise), scheduler.steps(50))
    ```

    With `a` the product of `1 - beta` up to a timestep, a noisy sample is
    `sqrt(a) clean + sqrt(1 - a) noise`.

    - `num_train_timesteps`: the number of noise levels, from 0 on.
    - `beta_schedule`: the schedule of the variances: `linear` or `scaled_linear`
        (linear in the root) from `beta_start` to `beta_end`, or `squaredcos_cap_v2`
        (Nichol and Dhariwal 2021).
    - `prediction_type`: the model's output: the noise (`epsilon`); `v_prediction`, see
        `target`; or the clean `sample`.
    - `timestep_spacing`, `steps_offset`: the choice of a trajectory's timesteps (Lin et
        al. 2024, table 2).
    - `rest`: the entries of the file that are not fields here, as JSON, written back
        unchanged. Those of other schedulers have no effect, as in diffusers.
    """

    file = "scheduler_config.json"
    type_entry = "_class_name"
    only = {"trained_betas": None}
    predictions: ClassVar[tuple[str, ...]] = PREDICTIONS

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0

    def __post_init__(self) -> None:
        self.check("beta_schedule", BETA_SCHEDULES)
        self.check("timestep_spacing", SPACINGS)
        self.check("prediction_type", self.predictions)
        if self.num_train_timesteps < 1 or self.steps_offset < 0:
            found = (
                f"num_train_timesteps={self.num_train_timesteps} and "
                f"steps_offset={self.steps_offset}"
            )
            raise self.error(f"{found}, but they must be at least 1 and 0.")

    @property
    def is_random(self) -> bool:
        """True if a step adds noise."""
        return False

    @property
    def betas(self) -> Float[np.ndarray, " t"]:
        """Return the variance of the noise that each timestep adds. It is in float32,
        as in other libraries."""
        num = self.num_train_timesteps
        if self.beta_schedule == "squaredcos_cap_v2":
            # Nichol and Dhariwal 2021, equation 17, with their offset of 0.008. They
            # bound beta so that the last steps are not singular.
            times = np.arange(num + 1) / num
            alphas = np.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
            betas = np.minimum(1 - alphas[1:] / alphas[:-1], 0.999)
        elif self.beta_schedule == "scaled_linear":
            # The schedule of latent diffusion. diffusers squares in float32 too.
            roots = np.linspace(
                self.beta_start**0.5, self.beta_end**0.5, num, dtype=np.float32
            )
            betas = roots**2
        else:
            betas = np.linspace(self.beta_start, self.beta_end, num)
        return betas.astype(np.float32)

    @property
    def alphas_cumprod(self) -> Float[np.ndarray, " t"]:
        """Return the share of the clean sample in the variance at each timestep."""
        # A thousand products in float32 would add up a thousand roundings.
        return np.cumprod(1 - self.betas, dtype=np.float64).astype(np.float32)

    def timesteps(self, num_steps: int) -> Int[np.ndarray, " steps"]:
        """Return the timesteps of `num_steps` steps, in descending order.

        Raises `ValueError` for more steps than timesteps, or if `steps_offset` points
        outside the table.
        """
        num = self.num_train_timesteps
        if not 1 <= num_steps <= num:
            raise self.error(
                f"num_steps={num_steps}, but there are {num} timesteps to choose from."
            )
        # As `set_timesteps` in diffusers, in ascending order. Only `leading` has the
        # offset.
        if self.timestep_spacing == "linspace":
            found = np.linspace(0, num - 1, num_steps).round()
        elif self.timestep_spacing == "leading":
            found = np.arange(num_steps) * (num // num_steps) + self.steps_offset
        else:
            found = np.round(np.arange(num, 0, -num / num_steps))[::-1] - 1
        timesteps = found.astype(np.int32)[::-1]
        if timesteps[0] >= num:
            raise self.error(
                f"steps_offset={self.steps_offset} leads {num_steps} steps to timestep "
                f"{timesteps[0]}, but the last of num_train_timesteps={num} is "
                f"{num - 1}. Use fewer steps."
            )
        if self.prediction_type == "epsilon" and self.alphas_cumprod[timesteps[0]] == 0:
            raise self.error(
                f"timestep {timesteps[0]} is pure noise, from which "
                "prediction_type='epsilon' says nothing. Use 'v_prediction' with "
                "rescale_betas_zero_snr."
            )
        return timesteps

    @abc.abstractmethod
    def steps(self, num_steps: int) -> PyTree:
        """Return the inputs of a trajectory of `num_steps` steps: a row per call of the
        model, with its `timestep`.
        """

    def start(self, noise: Sample) -> Trajectory:
        """Return the start of a trajectory; `noise` is normally distributed."""
        return Trajectory(noise)

    @abc.abstractmethod
    def step(
        self,
        step: PyTree,
        output: Sample,
        trajectory: Trajectory,
        noise: Sample | None = None,
    ) -> Trajectory:
        """Return the trajectory after a row of `steps`.

        **Arguments:**

        - `output`: the model's output for `trajectory.sample` and `step.timestep`.
        - `noise`: normal noise, if the scheduler `is_random`.
        """

    def add_noise(
        self, clean: Sample, noise: Sample, timesteps: Int[Array, " b"]
    ) -> Sample:
        """Return the noisy samples at their timesteps."""
        # Ho et al. 2020, equation 4.
        alpha, sigma = self._scales(clean, timesteps)
        return (alpha * clean + sigma * noise).astype(clean.dtype)

    def target(
        self, clean: Sample, noise: Sample, timesteps: Int[Array, " b"]
    ) -> Sample:
        """Return the target of the model for `add_noise` with the same arguments,
        according to `prediction_type`.

        `v_prediction` is `sqrt(a) noise - sqrt(1 - a) clean` (Salimans and Ho 2022,
        section 4).
        """
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = self._scales(clean, timesteps)
        return (alpha * noise - sigma * clean).astype(clean.dtype)

    def _scales(self, like: Array, timesteps: Int[Array, " b"]) -> tuple[Array, Array]:
        """Return the factors of the clean sample and of the noise, for each row of the
        batch."""
        dims = (-1,) + (1,) * (like.ndim - 1)
        share = jnp.asarray(self.alphas_cumprod)[timesteps].reshape(dims)
        return jnp.sqrt(share), jnp.sqrt(1 - share)

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `scheduler_config.json`."""
        return {**super().to_json(), "_class_name": type(self).__name__}


Predict: TypeAlias = Callable[[Sample, Int[Array, ""]], Sample]
"""A function that returns the model's output for samples at the same timestep."""


def denoise(
    scheduler: Scheduler,
    predict: Predict,
    noise: Sample,
    *,
    num_steps: int,
    key: Key | None = None,
) -> Sample:
    """Turn noise into samples, step by step, in one `lax.scan`.

    **Arguments:**

    - `scheduler`: the scheduler that takes the steps.
    - `predict`: the model. PNDM calls it once more than the number of steps, or nine
        more with Runge-Kutta.
    - `noise`: normally distributed, in the dtype for the steps.
    - `num_steps`: the number of steps.
    - `key`: for the noise that a step adds, if the scheduler `is_random`.

    Raises `ValueError` if a needed key is missing, or for a number of steps that the
    scheduler rejects.
    """
    if scheduler.is_random and key is None:
        raise ValueError(
            f"denoise: {type(scheduler).__name__} draws noise in each step, and needs "
            "a key."
        )
    steps = scheduler.steps(num_steps)

    def one(
        trajectory: Trajectory, given: tuple[PyTree, Key | None]
    ) -> tuple[Trajectory, None]:
        step, key = given
        # The model may run in half precision. The steps keep the dtype of the noise,
        # because a scan carries arrays of one dtype.
        output = predict(trajectory.sample, step.timestep).astype(noise.dtype)
        drawn = None
        if key is not None:
            drawn = jax.random.normal(key, noise.shape, noise.dtype)
        return scheduler.step(step, output, trajectory, drawn), None

    keys = None
    if scheduler.is_random and key is not None:
        keys = jax.random.split(key, len(steps.timestep))
    trajectory, _ = jax.lax.scan(one, scheduler.start(noise), (steps, keys))
    return trajectory.sample
