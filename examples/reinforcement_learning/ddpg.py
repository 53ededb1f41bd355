"""Deep deterministic policy gradient (DDPG, Lillicrap et al. 2016) on Pendulum, with
three seeds.

    python examples/reinforcement_learning/ddpg.py  # minutes on two CPU cores
    # or other bounded actions
    python examples/reinforcement_learning/ddpg.py --env MountainCarContinuous-v0

The model consists of the agent and a copy that follows it slowly. Only the agent is
trained: the copy is among the frozen arrays of the state, and is updated after each
`train_step`. `predict_step` acts with the current parameters. The training steps
between two actions are one compiled call, a `lax.scan`.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from tqdm import tqdm

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import environments

RANDOM_STEPS = 1000  # random steps before the agent acts


class Agent(eqx.Module):
    """A policy with actions between -1 and 1, and an estimate of the return of an
    action."""

    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def act(self, observations: Array) -> Float[Array, "batch actions"]:
        """Return the policy's action for each observation."""
        return jax.vmap(self.actor)(observations)

    def value(self, observations: Array, actions: Array) -> Float[Array, " batch"]:
        """Return the expected return of each action."""
        return jax.vmap(self.critic)(jnp.concatenate([observations, actions], axis=1))


class Learner(eqx.Module):
    """An agent, and a copy that follows it slowly (the paper's target networks)."""

    online: Any
    target: Any


def make_model(key: Any, num_inputs: int, num_actions: int) -> Learner:
    """Make an agent and a copy with the same parameters."""

    def agent() -> Agent:
        mlp = functools.partial(eqx.nn.MLP, width_size=64, depth=2)
        actor_key, critic_key = jax.random.split(key)
        actor = mlp(num_inputs, num_actions, final_activation=jnp.tanh, key=actor_key)
        return Agent(actor, mlp(num_inputs + num_actions, "scalar", key=critic_key))

    return Learner(agent(), agent())


def act_fn(model: Learner, observations: Any, key: Any, *, noise: float = 0.1) -> Array:
    """Return the agent's actions, with noise to explore."""
    actions = model.online.act(observations)
    return jnp.clip(actions + noise * jax.random.normal(key, actions.shape), -1, 1)


def loss_fn(
    model: Learner, batch: Any, key: Any, *, discount: float = 0.98
) -> tuple[Array, dict[str, Array]]:
    """Return the critic's squared error, minus the value of the actor's actions under a
    fixed critic."""
    online, target, observation = model.online, model.target, batch["observation"]
    after = target.value(batch["after"], target.act(batch["after"]))
    goal = batch["reward"] + discount * (1 - batch["terminated"]) * after
    error = jnp.mean((online.value(observation, batch["action"]) - goal) ** 2)
    weights, rest = eqx.partition(online.critic, eqx.is_array)
    still = Agent(online.actor, eqx.combine(jax.lax.stop_gradient(weights), rest))
    value = jnp.mean(still.value(observation, still.act(observation)))
    return error - value, {"error": error, "value": value}


def learn_from(
    state: rx.TrainState, batches: Any, *, step: Any, rate: float = 0.005
) -> tuple[rx.TrainState, dict[str, rx.Mean]]:
    """Take a step on each batch, as one `scan`. After each step, move the copy a little
    towards the agent."""

    def one(
        state: rx.TrainState, batch: Any
    ) -> tuple[rx.TrainState, dict[str, rx.Mean]]:
        state, metrics = step(state, batch)
        online = {
            path: state.params[path.replace("target", "online", 1)]
            for path in state.frozen
        }
        frozen = optax.incremental_update(online, state.frozen, rate)
        return dataclasses.replace(state, frozen=frozen), metrics

    return jax.lax.scan(one, state, batches)


class Replay:
    """All transitions so far, on the host."""

    def __init__(self, size: int, seed: int):
        self.size, self.num_seen, self.random = size, 0, np.random.default_rng(seed)
        self.data: dict[str, np.ndarray] = {}

    def add(self, rollout: dict[str, np.ndarray]) -> None:
        """Add a rollout, without the steps in which an episode began."""
        observation, happened = rollout["observation"], rollout["weight"] > 0
        rows = self.num_seen + np.arange(happened.sum())
        for name, x in {
            **rollout,
            "observation": observation[:, :-1],
            "after": observation[:, 1:],
        }.items():
            kept = self.data.setdefault(
                name, np.zeros((self.size, *x.shape[2:]), np.float32)
            )
            kept[rows] = x[happened]
        self.num_seen += len(rows)

    def sample(self, *shape: int) -> dict[str, np.ndarray]:
        """Draw transitions at random, in this shape: number of batches, transitions in
        each."""
        rows = self.random.integers(self.num_seen, size=shape)
        return {name: x[rows] for name, x in self.data.items()}


def learn(name: str, args: Any, mesh: Mesh) -> tuple[list[dict[int, float]], float]:
    """Return the mean return by number of steps for each seed, and the mean return of
    random actions."""
    kind: Any = {"mesh": mesh, "actions": gym.spaces.Box}
    trial = environments.Rollouts(name, args.num_envs, **kind, seed=args.seed)
    baseline = trial.random_return()
    make = functools.partial(
        make_model, num_inputs=trial.sizes[0], num_actions=trial.sizes[1]
    )
    optimizer, num_batches = (
        optax.adam(1e-3),
        args.epochs * args.num_envs // args.batch_size,
    )
    layout: Any = {
        "shardings": rx.shard_rules(
            eqx.filter_eval_shape(make, jax.random.key(0)), mesh
        )
    }
    act = rx.jit_step(
        functools.partial(rx.predict_step, predict_fn=act_fn, **layout), donate=False
    )
    step = functools.partial(
        rx.train_step, loss_fn=loss_fn, optimizer=optimizer, **layout
    )
    update = rx.jit_step(functools.partial(learn_from, step=step))
    place = NamedSharding(mesh, PartitionSpec(None, *trial.place.spec))

    def curve(seed: int) -> dict[int, float]:
        rollouts, found = (
            environments.Rollouts(name, args.num_envs, **kind, seed=seed),
            {},
        )
        model_key, key = jax.random.split(jax.random.key(seed))
        model = rx.init_model(make, mesh, key=model_key)
        state = rx.init_state(
            model, optimizer, key=key, trainable=Learner(online=True, target=False)
        )
        replay = Replay(args.steps, seed)
        replay.add(rollouts(rollouts.draw, RANDOM_STEPS // args.num_envs))
        ends = range(RANDOM_STEPS + args.num_envs, args.steps + 1, args.num_envs)
        for num_steps in tqdm(ends, f"{name}, seed {seed}", disable=None):
            replay.add(rollouts(functools.partial(act, state), 1))
            batches = jax.device_put(replay.sample(num_batches, args.batch_size), place)
            state, _ = update(state, batches)
            found[num_steps] = rollouts.mean_return
        if args.output:
            rx.save(args.output / f"{name}-{seed}", state)
        print(
            f"{name}, seed {seed}: {rollouts.mean_return:.1f}; by random actions "
            f"{baseline:.1f}"
        )
        return found

    return [curve(seed) for seed in range(args.seed, args.seed + args.seeds)], baseline


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return, for each environment, the mean return over time for each seed, and that
    of random actions."""
    flags: Any = {
        "env": ["Pendulum-v1"],
        "num_envs": 8,
        "batch_size": 128,
        "epochs": 64,
    }
    args, mesh = environments.start(__doc__, argv, **flags, steps=20_000)
    if args.epochs * args.num_envs < args.batch_size or args.batch_size % (
        mesh.size // mesh.shape["tensor"]
    ):
        got = (
            f"--batch-size {args.batch_size} --epochs {args.epochs} --num-envs "
            f"{args.num_envs}"
        )
        raise ValueError(
            f"{got}: no whole batch for each step, or the devices cannot share one."
        )
    if args.steps < RANDOM_STEPS + args.num_envs:
        raise ValueError(
            f"--steps {args.steps}: the first {RANDOM_STEPS} are random, so there must "
            "be more."
        )
    return {name: learn(name, args, mesh) for name in args.env}


if __name__ == "__main__":
    common.run(main)
