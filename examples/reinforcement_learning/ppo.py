"""Proximal policy optimization (PPO, Schulman et al. 2017) on CartPole and Acrobot,
with three seeds each.

    python examples/reinforcement_learning/ppo.py  # minutes on two CPU cores
    # or another with discrete actions
    python examples/reinforcement_learning/ppo.py --env LunarLander-v3

A rollout needs the current parameters, so `predict_step` acts and `train_step` learns
on the same state. The environments are split over the data axis: the data of an
environment stays on its devices, and only gradients are summed. All training steps on a
rollout are one compiled call, a `lax.scan` of `train_step`.
"""

import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float
from tqdm import tqdm

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import environments

# Of future rewards, of later errors, of ratios of probabilities.
DISCOUNT, DECAY, CLIP = 0.98, 0.8, 0.2
NUM_TIMES = 32  # time steps of a rollout


class ActorCritic(eqx.Module):
    """A policy, and an estimate of the return, from an observation."""

    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __call__(self, observation: Float[Array, " inputs"]) -> tuple[Array, Array]:
        """Return the log-probabilities of the actions, and the expected return."""
        return jax.nn.log_softmax(self.actor(observation)), self.critic(observation)


def make_model(key: Any, num_inputs: int, num_actions: int) -> ActorCritic:
    """Make two separate networks."""
    mlp = functools.partial(
        eqx.nn.MLP, num_inputs, width_size=64, depth=2, activation=jnp.tanh
    )
    actor_key, critic_key = jax.random.split(key)
    return ActorCritic(mlp(num_actions, key=actor_key), mlp("scalar", key=critic_key))


def act_fn(model: ActorCritic, observations: Any, key: Any) -> Array:
    """Draw an action for each observation from the policy."""
    return jax.random.categorical(key, jax.vmap(model.actor)(observations))


def predict_fn(model: ActorCritic, observations: Any, key: Any) -> tuple[Array, Array]:
    """Return the model's outputs for each environment at each time."""
    return jax.vmap(jax.vmap(model))(observations)


def loss_fn(
    model: ActorCritic, batch: Any, key: Any
) -> tuple[rx.Mean, dict[str, rx.Mean]]:
    """Return the clipped surrogate, the error of the expected return (equations 7 and
    9) and the entropy."""
    log_probs, values = jax.vmap(model)(batch["observation"])
    ratio = jnp.exp(
        jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
        - batch["log_prob"]
    )
    advantage, weight = batch["advantage"], batch["weight"]
    surrogate = jnp.minimum(
        ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage
    )
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
    losses = 0.5 * (values - batch["target"]) ** 2 - surrogate
    return rx.Mean(losses @ weight, weight.sum()), {
        "entropy": rx.Mean(entropy @ weight, weight.sum())
    }


def advantages(
    rollout: Mapping[str, Array], values: Array
) -> Float[Array, "envs times"]:
    """Return the advantage of each action over the expected return: GAE (Schulman et
    al. 2016, equation 16)."""
    after = DISCOUNT * values[:, 1:] * (1 - rollout["terminated"])
    errors = rollout["reward"] + after - values[:, :-1]

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        error, ended = now
        advantage = error + DISCOUNT * DECAY * (1 - ended) * later
        return advantage, advantage

    _, found = jax.lax.scan(
        back, jnp.zeros(len(errors)), (errors.T, rollout["ended"].T), reverse=True
    )
    return found.T


def learn_from(
    state: rx.TrainState, rollout: Any, *, step: Any, args: Any
) -> tuple[rx.TrainState, Any]:
    """Take all steps on a rollout, as one `scan`. A minibatch has some time steps of
    all environments."""
    log_probs, values = rx.predict_step(
        state, rollout["observation"], predict_fn=predict_fn
    )
    found, action, happened = (
        advantages(rollout, values),
        rollout["action"],
        rollout["weight"] > 0,
    )
    data = rollout | {
        "observation": rollout["observation"][:, :-1],
        "log_prob": jnp.take_along_axis(log_probs[:, :-1], action[..., None], axis=2)[
            ..., 0
        ],
        "target": found + values[:, :-1],
        "advantage": (found - found.mean(where=happened))
        / (found.std(where=happened) + 1e-8),
    }
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), args.epochs)
    times = jax.vmap(lambda key: jax.random.permutation(key, action.shape[1]))(keys)

    def minibatch(
        state: rx.TrainState, times: Array
    ) -> tuple[rx.TrainState, dict[str, rx.Mean]]:
        return step(
            state, jax.tree.map(lambda x: x[:, times].reshape(-1, *x.shape[2:]), data)
        )

    return jax.lax.scan(
        minibatch, state, times.reshape(-1, args.batch_size // args.num_envs)
    )


def learn(name: str, args: Any, mesh: Mesh) -> tuple[list[dict[int, float]], float]:
    """Return the mean return by number of steps for each seed, and the mean return of
    random actions."""
    kind: Any = {"mesh": mesh, "actions": gym.spaces.Discrete}
    trial = environments.Rollouts(name, args.num_envs, **kind, seed=args.seed)
    baseline = trial.random_return()
    make = functools.partial(
        make_model, num_inputs=trial.sizes[0], num_actions=trial.sizes[1]
    )
    rate = optax.linear_schedule(1e-3, 0.0, args.steps * args.epochs // args.batch_size)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))
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
    update = rx.jit_step(functools.partial(learn_from, step=step, args=args))

    def curve(seed: int) -> dict[int, float]:
        rollouts, found = (
            environments.Rollouts(name, args.num_envs, **kind, seed=seed),
            {},
        )
        model_key, key = jax.random.split(jax.random.key(seed))
        state = rx.init_state(
            rx.init_model(make, mesh, key=model_key), optimizer, key=key
        )
        per_rollout = args.num_envs * NUM_TIMES
        bar = tqdm(
            range(per_rollout, args.steps + 1, per_rollout),
            f"{name}, seed {seed}",
            disable=None,
        )
        for num_steps in bar:
            rollout = rollouts(functools.partial(act, state), NUM_TIMES)
            state, metrics = update(state, jax.device_put(rollout, rollouts.place))
            found[num_steps] = rollouts.mean_return
            bar.set_postfix(
                mean_return=found[num_steps],
                entropy=float(metrics["entropy"].value[-1]),
            )
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
        "env": ["CartPole-v1", "Acrobot-v1"],
        "num_envs": 16,
        "batch_size": 512,
        "epochs": 20,
    }
    args, mesh = environments.start(__doc__, argv, **flags, steps=150_000)
    if args.batch_size % args.num_envs or NUM_TIMES % (
        args.batch_size // args.num_envs
    ):
        raise ValueError(
            f"--batch-size {args.batch_size}: not {args.num_envs} times a part of "
            f"{NUM_TIMES}."
        )
    if args.steps < args.num_envs * NUM_TIMES:
        raise ValueError(
            f"--steps {args.steps}: a rollout alone has {args.num_envs * NUM_TIMES}."
        )
    return {name: learn(name, args, mesh) for name in args.env}


if __name__ == "__main__":
    common.run(main)
