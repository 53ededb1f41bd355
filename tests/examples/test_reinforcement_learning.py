"""Environments, their rollouts, and learning from them: it works, and does not depend
on the mesh."""

import dataclasses
import functools
import types
from typing import Any

import environments
import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reinforcement_learning import ddpg, ppo

import redco_eqx as rx

NUM_ENVS, NUM_TIMES = 8, 128


def rollouts_of(name, actions, **axes):
    return environments.Rollouts(
        name, NUM_ENVS, rx.make_mesh(**axes), actions=actions, seed=3
    )


@pytest.fixture(scope="module")
def rollout():
    """Return a rollout of random actions in CartPole; the fifth, so that episodes are
    at different steps."""
    rollouts = rollouts_of("CartPole-v1", gym.spaces.Discrete)
    for _ in range(4):
        rollouts(rollouts.draw, 10)
    return rollouts(rollouts.draw, NUM_TIMES)


def test_each_step_that_counts_is_one_of_the_environment_alone(rollout):
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset()
    began = np.argwhere(rollout["weight"] == 0)
    assert len(began) > 20
    for i, t in np.argwhere(rollout["weight"] > 0):
        env.state = rollout["observation"][i, t].astype(np.float64)
        env.steps_beyond_terminated = None
        after, reward, terminated, _, _ = env.step(int(rollout["action"][i, t]))
        np.testing.assert_allclose(rollout["observation"][i, t + 1], after, atol=1e-5)
        assert (reward, terminated) == (
            rollout["reward"][i, t],
            rollout["terminated"][i, t],
        )
    for i, t in began:
        assert t == 0 or rollout["ended"][i, t - 1]
        assert np.abs(rollout["observation"][i, t + 1]).max() <= 0.05, (
            "where an episode of CartPole begins"
        )


def advantages_of(rollout, values):
    """The sums of their definition."""
    found = np.zeros((NUM_ENVS, NUM_TIMES))
    for i, t in np.ndindex(found.shape):
        for k in range(t, NUM_TIMES):
            after = 0.0 if rollout["terminated"][i, k] else values[i, k + 1]
            error = rollout["reward"][i, k] + ppo.DISCOUNT * after - values[i, k]
            found[i, t] += (ppo.DISCOUNT * ppo.DECAY) ** (k - t) * error
            if rollout["ended"][i, k]:
                break
    return found


def actor_critic(mesh, optimizer):
    make = functools.partial(ppo.make_model, num_inputs=4, num_actions=2)
    model = rx.init_model(make, mesh, key=jax.random.key(0))
    return rx.init_state(model, optimizer, key=jax.random.key(1)), rx.shard_rules(
        model, mesh
    )


def test_an_update_is_that_of_a_loop_written_by_hand_on_every_mesh(rollout, double):
    args = types.SimpleNamespace(epochs=2, batch_size=256, num_envs=NUM_ENVS)
    rollout = {
        name: x if name == "action" else x.astype(np.float64)
        for name, x in rollout.items()
    }
    rollout["terminated"][0] = 0  # these were cut short
    optimizer = optax.sgd(0.1)
    state, _ = actor_critic(rx.make_mesh(data=1), optimizer)
    model = state.model
    log_probs, values = jax.vmap(jax.vmap(model))(jnp.asarray(rollout["observation"]))
    old = jnp.take_along_axis(log_probs[:, :-1], rollout["action"][..., None], axis=2)[
        ..., 0
    ]
    found = jnp.asarray(advantages_of(rollout, np.asarray(values)))
    counted = found[rollout["weight"] > 0]
    rollout = jax.tree.map(jnp.asarray, rollout)
    normed = (found - counted.mean()) / (counted.std() + 1e-8)
    target = found + values[:, :-1]

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, rows):
        """Return the gradient of the mean over pairs of an environment and a time with
        an action."""
        i, t = rows.T
        acted = rollout["weight"][i, t]
        observation = rollout["observation"][i, t]
        action = rollout["action"][i, t]
        advantage = normed[i, t]
        log_prob = jax.nn.log_softmax(jax.vmap(model.actor)(jnp.asarray(observation)))
        ratio = jnp.exp(log_prob[jnp.arange(len(rows)), action] - old[i, t])
        worse = (
            jnp.where(advantage > 0, jnp.minimum(ratio, 1.2), jnp.maximum(ratio, 0.8))
            * advantage
        )
        error = (
            jax.vmap(model.critic)(jnp.asarray(observation)) - target[i, t]
        ) ** 2 / 2
        return jnp.sum(jnp.where(acted > 0, error - worse, 0)) / jnp.sum(acted)

    for key in jax.random.split(jax.random.fold_in(state.key, 0), 2):
        order = np.asarray(jax.random.permutation(key, NUM_TIMES)).reshape(-1, 32)
        for times in order:
            rows = [(i, t) for i in range(NUM_ENVS) for t in times]
            grads = gradient(model, np.array(rows))
            model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    expected = rx.to_arrays(model)
    for mesh in (rx.make_mesh(data=1), rx.make_mesh(tensor=2, fsdp=2)):
        state, shardings = actor_critic(mesh, optimizer)
        step = functools.partial(
            rx.train_step, loss_fn=ppo.loss_fn, optimizer=optimizer, shardings=shardings
        )
        update = rx.jit_step(functools.partial(ppo.learn_from, step=step, args=args))
        state, metrics = update(state, jax.device_put(rollout, rx.batch_sharding(mesh)))
        assert metrics["loss"].value.shape == (8,)
        for path, x in state.params.items():
            # The library's means are float32, by whose rounding the gradients of a sum
            # and of a mean differ.
            np.testing.assert_allclose(x, expected[path], rtol=1e-5, atol=1e-7)


def test_the_actor_and_the_critic_learn_each_from_their_own_term():
    model = ddpg.make_model(jax.random.key(0), 3, 1)
    random = np.random.default_rng(0)
    batch = {
        name: random.normal(size=(16, 3)).astype(np.float32)
        for name in ("observation", "after")
    }
    batch["action"] = random.uniform(-1, 1, (16, 1)).astype(np.float32)
    batch |= {
        "reward": random.normal(size=16).astype(np.float32),
        "terminated": np.zeros(16, np.float32),
    }
    seen = batch["observation"]
    losses = (
        lambda model: ddpg.loss_fn(model, batch, None)[0],
        lambda model: ddpg.loss_fn(model, batch, None)[1]["error"],
        lambda model: jnp.mean(model.online.value(seen, model.online.act(seen))),
    )
    both, error, value = (
        rx.to_arrays(eqx.filter_jit(eqx.filter_grad(f))(model)) for f in losses
    )
    for path, gradient in both.items():
        if path.startswith("online.actor"):
            assert np.abs(gradient).max() > 0
            np.testing.assert_allclose(gradient, -value[path], atol=1e-6)
        elif path.startswith("online.critic"):
            np.testing.assert_allclose(gradient, error[path], atol=1e-6)


def test_the_copy_follows_after_each_step(double):
    mesh, optimizer = rx.make_mesh(tensor=2), optax.sgd(0.1)
    model = rx.init_model(
        lambda key: ddpg.make_model(key, 3, 1), mesh, key=jax.random.key(0)
    )
    spec = ddpg.Learner(online=True, target=False)
    state = rx.init_state(model, optimizer, key=jax.random.key(1), trainable=spec)
    assert {path.split(".")[0] for path in state.params} == {"online"}
    for path, x in state.frozen.items():
        np.testing.assert_array_equal(x, state.params[path.replace("target", "online")])
    before, copy = dict(state.frozen), dict(state.frozen)
    replay = ddpg.Replay(64, seed=0)
    rollouts = rollouts_of("Pendulum-v1", gym.spaces.Box)
    replay.add(rollouts(rollouts.draw, 8))
    batches = replay.sample(3, 16)
    step = functools.partial(rx.train_step, loss_fn=ddpg.loss_fn, optimizer=optimizer)
    after, _ = jax.jit(functools.partial(ddpg.learn_from, step=step, rate=0.25))(
        state, batches
    )
    one = jax.jit(step)
    for i in range(3):
        state, _ = one(state, {name: x[i] for name, x in batches.items()})
        for path in copy:
            copy[path] = (
                0.75 * copy[path]
                + 0.25 * state.params[path.replace("target", "online")]
            )
        # Its value is what the next step aims at.
        state = dataclasses.replace(state, frozen=copy)
    for path, x in after.frozen.items():
        np.testing.assert_allclose(x, copy[path], rtol=1e-9)
    assert max(np.abs(copy[path] - x).max() for path, x in before.items()) > 0.01


def test_what_is_replayed_happened():
    rollouts = rollouts_of("CartPole-v1", gym.spaces.Discrete)
    replay = ddpg.Replay(1000, seed=0)
    seen = [rollouts(rollouts.draw, num_steps) for num_steps in (1, 50, 3)]
    for rollout in seen:
        replay.add(rollout)
    assert (
        replay.num_seen
        == sum(int(rollout["weight"].sum()) for rollout in seen)
        < 54 * NUM_ENVS
    )
    happened = {
        tuple(np.ravel(rollout["observation"][i, t : t + 2]))
        for rollout in seen
        for i, t in np.argwhere(rollout["weight"] > 0)
    }
    sample = replay.sample(5, 40)
    assert sample["reward"].shape == (5, 40)
    assert sample["weight"].min() == 1
    pairs = np.concatenate([sample["observation"], sample["after"]], axis=2).reshape(
        200, 8
    )
    assert {tuple(pair) for pair in pairs} <= happened
    assert len({tuple(pair) for pair in pairs}) > 80


def test_it_learns_to_balance_a_pole():
    (curve,), random = ppo.main(["--quick"])["CartPole-v1"]
    assert random < 30
    assert list(curve.values())[-1] > 4 * random


def test_what_was_learnt_is_saved(tmp_path):
    (curve,), random = ddpg.main(
        ["--steps", "1200", "--seeds", "1", "--output", str(tmp_path)]
    )["Pendulum-v1"]
    assert -2000 < random < -900
    assert list(curve) == list(range(1008, 1201, 8))
    assert [
        checkpoint.step
        for checkpoint in rx.list_checkpoints(tmp_path / "Pendulum-v1-0")
    ] == [25 * 4]
