"""Many environments of gymnasium at a time, and the start of programs that learn in
them."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import common
import gymnasium as gym
import jax
import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics, RescaleAction
from jax.sharding import Mesh

import redco_eqx as rx


class Rollouts:
    """Environments that continue from one rollout to the next. When an episode ends, a
    new one begins.

    Beginning an episode takes an extra step, which ignores the action and therefore has
    weight 0. So the observation after every other step is the one that the step led to,
    even at the end of an episode.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        mesh: Mesh,
        *,
        actions: type[gym.Space],
        seed: int,
    ):
        """Make the environments. Raises `ValueError` for actions of a different kind,
        and for observations that are not vectors.
        """
        try:
            envs = gym.make_vec(name, num_envs=num_envs)
        except gym.error.Error as error:
            raise ValueError(f"--env {name}: {error}") from None
        observation, action = envs.single_observation_space, envs.single_action_space
        if not isinstance(action, actions) or (
            isinstance(action, gym.spaces.Box) and not action.is_bounded()
        ):
            raise ValueError(
                f"--env {name}: its actions are {action}, and not a (bounded) "
                f"{actions.__name__}."
            )
        if not isinstance(observation, gym.spaces.Box) or len(observation.shape) != 1:
            raise ValueError(
                f"--env {name}: its observations are {observation}, and not vectors of "
                "numbers."
            )
        if envs.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"--env {name}: its episodes do not begin in a step of their own."
            )
        one: Any = np.float32(1)
        envs = (
            RescaleAction(envs, -one, one)
            if isinstance(action, gym.spaces.Box)
            else envs
        )
        self.envs = RecordEpisodeStatistics(envs, buffer_length=2 * num_envs)
        self.sizes = gym.spaces.flatdim(observation), gym.spaces.flatdim(action)
        self.envs.action_space.seed(seed)
        self.place, self.ended = rx.batch_sharding(mesh), np.zeros(num_envs, bool)
        self.observation, _ = self.envs.reset(seed=seed)

    def __call__(
        self, act: Callable[..., Any], num_steps: int
    ) -> dict[str, np.ndarray]:
        """Take `num_steps` steps in each environment, with the actions that
        `act(observation, index=step)` returns.

        Return arrays of shape `(num_envs, num_steps, ...)`: `action`, `reward`,
        `terminated`, `ended` (terminated or cut short) and `weight`. `observation` has
        one step more. Actions for a Box are between -1 and 1.
        """
        observations, actions, rows = [self.observation], [], []
        for step in range(num_steps):
            actions.append(
                np.asarray(
                    act(jax.device_put(self.observation, self.place), index=step)
                )
            )
            weight = ~self.ended
            self.observation, reward, terminated, truncated, _ = self.envs.step(
                actions[-1]
            )
            self.ended = terminated | truncated
            observations.append(self.observation)
            rows.append(np.array([reward, terminated, self.ended, weight], np.float32))
        numbers = dict(
            zip(("reward", "terminated", "ended", "weight"), np.stack(rows, axis=2))
        )
        return {
            "observation": np.stack(observations, axis=1),
            "action": np.stack(actions, axis=1),
            **numbers,
        }

    def draw(self, observation: Any, index: int) -> np.ndarray:
        """Draw random actions."""
        return self.envs.action_space.sample()

    @property
    def mean_return(self) -> float:
        """Return the mean return of the last episodes, two per environment (NaN if none
        has ended yet)."""
        return float(np.mean(self.envs.return_queue or [np.nan]))

    def random_return(self) -> float:
        """Return the mean return of random actions."""
        while len(self.envs.return_queue) < 2 * len(self.ended):
            self(self.draw, 100)
        return self.mean_return


def start(
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    env: list[str],
    num_envs: int,
    steps: int,
    **defaults: Any,
) -> tuple[argparse.Namespace, Mesh]:
    """Call `common.start` with more flags: the environments, how many of each run at a
    time, and the steps."""
    parser = common.flags(doc, **defaults)
    parser.add_argument(
        "--env", nargs="+", default=env, help="gymnasium environments (%(default)s)"
    )
    parser.add_argument(
        "--num-envs",
        type=int,
        default=num_envs,
        help="environments at a time (%(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        help="total over the environments (%(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds, from --seed (3)"
    )
    args, mesh = common.start(parser, argv)
    if args.checkpoints:
        raise ValueError(
            "--checkpoints: environments cannot be saved, so no run could go on. There "
            "is --output."
        )
    shards = mesh.size // mesh.shape["tensor"]
    if args.num_envs < 1 or args.num_envs % shards:
        raise ValueError(
            f"--num-envs {args.num_envs}: it must be a multiple of {shards}, which "
            "share them."
        )
    if args.quick:
        args.env, args.seeds, args.steps = args.env[:1], 1, steps // 5
    return args, mesh
