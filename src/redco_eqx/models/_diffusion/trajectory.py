"""The whole trajectory from noise to a sample."""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._diffusion.scheduler import Scheduler, Trajectory

Predict: TypeAlias = Callable[[Float[Array, "b *dims"], Int[Array, ""]], Float[Array, "b *dims"]]
"""A function that returns the model's output for samples at the same timestep."""


def denoise(
    scheduler: Scheduler,
    predict: Predict,
    noise: Float[Array, "b *dims"],
    *,
    num_steps: int,
    key: Key | None = None,
) -> Float[Array, "b *dims"]:
    """Turn noise into samples, step by step, in one `lax.scan`.

    **Arguments:**

    - `scheduler`: the scheduler that takes the steps.
    - `predict`: the model. PNDM calls it once more than the number of steps, or nine more with Runge-Kutta.
    - `noise`: normally distributed, in the dtype for the steps.
    - `num_steps`: the number of steps.
    - `key`: for the noise that a step adds, if the scheduler `is_random`.

    Raises `ValueError` if a needed key is missing, or for a number of steps that the scheduler refuses.
    """
    if scheduler.is_random and key is None:
        raise ValueError(f"denoise: {type(scheduler).__name__} draws noise in each step, and needs a key.")
    steps = scheduler.steps(num_steps)

    def one(trajectory: Trajectory, given: tuple[PyTree, Key | None]) -> tuple[Trajectory, None]:
        step, key = given
        output = predict(trajectory.sample, step.timestep).astype(noise.dtype)
        drawn = None if key is None else jax.random.normal(key, noise.shape, noise.dtype)
        return scheduler.step(step, output, trajectory, drawn), None

    keys = jax.random.split(key, len(steps.timestep)) if scheduler.is_random and key is not None else None
    trajectory, _ = jax.lax.scan(one, scheduler.start(noise), (steps, keys))
    return trajectory.sample
