"""PNDM (Liu et al. 2022): linear multistep sampling, the default scheduler of Stable Diffusion 1 and 2."""

import dataclasses
import itertools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redco_eqx.models._diffusion.scheduler import Column, Scheduler, Trajectory

ADAMS_BASHFORTH = (  # weights of the output and those before it, newest first, by their number
    (1, 0, 0, 0),
    (3 / 2, -1 / 2, 0, 0),
    (23 / 12, -16 / 12, 5 / 12, 0),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)
RUNGE_KUTTA = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
NUM_RUNGE_KUTTA = 3
"""The number of steps by Runge-Kutta, of four calls each; after them there are enough outputs for a linear
multistep.
"""


class Memory(NamedTuple):
    """The values that a step needs from earlier ones: the last three outputs, the sample before the step that
    now continues (Runge-Kutta, or the second half of the first step), and Runge-Kutta's sum of four outputs.
    """

    outputs: tuple[Array, Array, Array]
    sample: Array
    total: Array


class Step(NamedTuple):
    """One call of the model, or a row for each.

    - `signal`, `sigma`: the factors of the clean sample and the noise in the sample that the step starts from.
    - `of_sample`, `of_noise`: the factors of that sample and of the noise in the next.
    - `weights`: the factors of the outputs, newest first; `of_total`: the factor of Runge-Kutta's sum.
    - `adds`: the factor of this output in that sum; 0 resets the sum.
    - `goes_on`: whether the step starts from the sample before, and not the one that the model saw.
    - `is_kept`: whether later steps use this output.
    """

    timestep: Int[Column, ""]
    signal: Float[Column, ""]
    sigma: Float[Column, ""]
    of_sample: Float[Column, ""]
    of_noise: Float[Column, ""]
    weights: Float[Column, "4"]
    of_total: Float[Column, ""]
    adds: Float[Column, ""]
    goes_on: Bool[Column, ""]
    is_kept: Bool[Column, ""]


class _Call(NamedTuple):
    """The plan of one call: the step leads from timestep `start` to `end`."""

    timestep: int
    start: int
    end: int
    weights: tuple[float, ...] = ADAMS_BASHFORTH[0]
    of_total: float = 0.0
    adds: float = 0.0
    goes_on: bool = False
    is_kept: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(Scheduler):
    """Pseudo numerical methods (Liu et al. 2022): linear multistep, and before it three Runge-Kutta steps or
    none.

    - `skip_prk_steps`: leave out Runge-Kutta, as Stable Diffusion does; the first step is then taken in two
        halves. With Runge-Kutta, at least four steps are needed.
    - `set_alpha_to_one`: whether the last step ends at a sample without noise, or at timestep 0.
    """

    predictions: ClassVar[tuple[str, ...]] = ("epsilon", "v_prediction")

    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False

    def steps(self, num_steps: int) -> Step:
        calls = self._multistep(num_steps) if self.skip_prk_steps else self._runge_kutta(num_steps)
        timestep, start, end, weights, *others = (np.asarray(x) for x in zip(*calls))
        table = self.alphas_cumprod.astype(np.float64)
        alpha = table[start]
        previous = np.where(end >= 0, table[end], 1.0 if self.set_alpha_to_one else table[0])
        # Equation 9 of the paper.
        of_noise = (previous - alpha) / (
            alpha * np.sqrt(1 - previous) + np.sqrt(alpha * (1 - alpha) * previous)
        )
        floats = np.sqrt(alpha), np.sqrt(1 - alpha), np.sqrt(previous / alpha), -of_noise, weights, *others[:2]
        return Step(timestep.astype(np.int32), *(x.astype(np.float32) for x in floats), *others[2:])

    def _multistep(self, num_steps: int) -> list[_Call]:
        timesteps, stride = self.timesteps(num_steps).tolist(), self.num_train_timesteps // num_steps
        calls = [_Call(t, t, t - stride, ADAMS_BASHFORTH[min(i, 3)]) for i, t in enumerate(timesteps)]
        if num_steps > 1:  # repeat the first step, by the mean of the outputs at both of its ends
            t = timesteps[1]
            again = _Call(t, t + stride, t, (1 / 2, 1 / 2, 0, 0), goes_on=True, is_kept=False)
            calls.insert(1, again)
        return calls

    def _runge_kutta(self, num_steps: int) -> list[_Call]:
        timesteps, stride = self.timesteps(num_steps).tolist(), self.num_train_timesteps // num_steps
        if num_steps <= NUM_RUNGE_KUTTA:
            raise ValueError(
                f"PNDMScheduler: num_steps={num_steps}, but skip_prk_steps=False needs more than "
                f"{NUM_RUNGE_KUTTA}, which Runge-Kutta takes."
            )
        calls = []
        for t, end in itertools.pairwise(timesteps[: NUM_RUNGE_KUTTA + 1]):
            half = end + stride // 2
            calls += [
                _Call(t, t, t - stride // 2, adds=RUNGE_KUTTA[0]),
                _Call(half, t, half, adds=RUNGE_KUTTA[1], goes_on=True, is_kept=False),
                _Call(half, t, half - stride // 2, adds=RUNGE_KUTTA[2], goes_on=True, is_kept=False),
                _Call(end, t, end, (RUNGE_KUTTA[3], 0, 0, 0), of_total=1.0, goes_on=True, is_kept=False),
            ]
        return calls + [_Call(t, t, t - stride, ADAMS_BASHFORTH[3]) for t in timesteps[NUM_RUNGE_KUTTA:]]

    def start(self, noise: Float[Array, "b *dims"]) -> Trajectory:
        zeros = jnp.zeros_like(noise)
        return Trajectory(noise, Memory((zeros, zeros, zeros), noise, zeros))

    def step(
        self,
        step: Step,
        output: Float[Array, "b *dims"],
        trajectory: Trajectory,
        noise: Float[Array, "b *dims"] | None = None,
    ) -> Trajectory:
        memory: Memory = trajectory.memory
        outputs = (output, *memory.outputs)
        sample = jnp.where(step.goes_on, memory.sample, trajectory.sample)
        predicted = sum(step.weights[i] * x for i, x in enumerate(outputs)) + step.of_total * memory.total
        if self.prediction_type == "v_prediction":
            predicted = step.signal * predicted + step.sigma * sample
        following = jnp.asarray(step.of_sample * sample + step.of_noise * predicted, sample.dtype)
        kept = jax.tree.map(lambda new, old: jnp.where(step.is_kept, new, old), outputs[:3], outputs[1:])
        total = jnp.where(step.adds == 0, 0, memory.total + step.adds * output)
        return Trajectory(following, Memory(kept, sample, total.astype(sample.dtype)))
