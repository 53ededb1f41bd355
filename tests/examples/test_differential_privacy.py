"""DP-SGD: each example is clipped by itself, noise is drawn once, samples are
Poisson's; and it learns."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from differential_privacy import main as dp

import redco_eqx as rx

NUM = 16
RNG = np.random.default_rng(0)
WEIGHT = np.array([1.0] * (NUM - 3) + [0.0] * 3, np.float32)
BATCH = dp.collate_fn(
    [(RNG.random((3, 3), np.float32) * 3, int(RNG.integers(10)), w) for w in WEIGHT]
)
RULE = {"clip": 0.5, "batch_size": 10}


def new_state(optimizer, **axes):
    mesh = rx.make_mesh(**axes)
    model = rx.init_model(
        lambda key: eqx.nn.MLP(9, 10, 16, 1, key=key), mesh, key=jax.random.key(0)
    )
    return rx.init_state(model, optimizer, key=jax.random.key(1))


def stepped(noise, **axes):
    optimizer = optax.sgd(1.0)
    state = new_state(optimizer, **axes)
    before = {path: np.asarray(x) for path, x in state.params.items()}
    step = jax.jit(
        lambda state, batch: dp.private_step(
            state, batch, optimizer=optimizer, noise=noise, **RULE
        )
    )
    batch = jax.device_put(BATCH, rx.batch_sharding(rx.make_mesh(**axes)))
    after, _ = step(state, batch)
    return {path: np.asarray(x) - before[path] for path, x in after.params.items()}


def test_each_gradient_is_clipped_by_itself_as_in_a_loop_over_examples():
    state = new_state(optax.sgd(1.0), data=1)
    expected = {path: np.zeros(x.shape) for path, x in state.params.items()}
    norms = []
    for x, y, weight in zip(BATCH["x"], BATCH["y"], BATCH["weight"]):

        def loss_of(params, x=x, y=y):
            logits = state.build(params, {})(x.ravel())
            return -jax.nn.log_softmax(logits)[y]

        grads = {
            path: np.asarray(g, np.float64)
            for path, g in jax.grad(loss_of)(state.params).items()
        }
        norms.append(np.sqrt(sum((g**2).sum() for g in grads.values())))
        scale = weight * min(1, RULE["clip"] / norms[-1]) / RULE["batch_size"]
        expected = {
            path: total - scale * grads[path] for path, total in expected.items()
        }
    assert max(norms) > RULE["clip"], "something is clipped"
    for path, change in stepped(0.0, tensor=2, fsdp=2).items():
        # Float32, summed in another order.
        np.testing.assert_allclose(change, expected[path], atol=1e-6)


def test_noise_is_drawn_once_on_any_mesh_and_has_the_deviation_accounted_for():
    by_mesh = []
    for axes in ({"data": 1}, {"tensor": 2}):
        noisy, clean = stepped(3.0, **axes), stepped(0.0, **axes)
        by_mesh.append({path: noisy[path] - clean[path] for path in noisy})
    for path, noise in by_mesh[0].items():
        for other in by_mesh[1:]:
            np.testing.assert_allclose(noise, other[path], atol=1e-6)
    noise = np.concatenate([x.ravel() for x in by_mesh[0].values()])
    deviation = 3.0 * RULE["clip"] / RULE["batch_size"]
    # Four standard errors of a deviation.
    assert abs(noise.std() / deviation - 1) < 4 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)


def test_samples_are_poissons():
    examples = [(np.full((1, 1), i), i, 1.0) for i in range(200)]
    samples = [
        dp.poisson_sample(step, examples=examples, rate=0.2, places=90, seed=3)
        for step in range(300)
    ]
    drawn = np.zeros((300, 200))
    for step, sample in enumerate(samples):
        assert len(sample) == 90
        present = [y for _, y, weight in sample if weight]
        assert len(set(present)) == len(present), "no example twice"
        drawn[step, present] = 1
    assert abs(drawn.mean() - 0.2) < 4 * np.sqrt(0.16 / drawn.size)
    # The sizes vary as a binomial's, which those of a shuffled epoch do not.
    assert 0.75 < drawn.sum(axis=1).std() / np.sqrt(200 * 0.16) < 1.25
    with pytest.raises(RuntimeError, match="places"):
        dp.poisson_sample(0, examples=examples, rate=0.9, places=16, seed=0)


def test_it_learns_with_privacy_nearly_what_it_learns_without():
    accuracies, plain = dp.main(["--quick", "--batch-size", "512", "--epsilon", "8"])[
        "private"
    ]
    assert accuracies[-1] > 0.6, "ten digits by chance: 0.1"
    assert plain > accuracies[-1] - 0.05
