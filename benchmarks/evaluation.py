"""`evaluate`, `predict` and `batches` over loops in plain JAX that compute the same.

    python benchmarks/evaluation.py

An MLP of width 64 over 10,000 examples of 32 numbers, on eight virtual devices. The
loops place each batch with `jax.device_put`, call a compiled function, and wait at the
end. `evaluate` and `predict` are called with and without `programs`: without, each call
traces its function. Only the ratios within one run are meaningful.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx

jax.config.update("jax_num_cpu_devices", 8)

NUM_EXAMPLES = 10_000
ROUNDS = 7


def make_model(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(32, 8, 64, 2, key=key)


def collate(examples: Sequence[Any]) -> dict[str, np.ndarray]:
    return {
        "x": np.stack([x for x, _ in examples]),
        "label": np.array([label for _, label in examples]),
    }


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jnp.argmax(jax.vmap(model)(batch["x"]), axis=-1)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def report(name: str, plain: Callable[[], object], ours: Callable[[], object]) -> None:
    """Print the median times, and the median of the ratios of neighbouring runs."""
    seconds(plain)
    seconds(ours)
    pairs = [(seconds(plain), seconds(ours)) for _ in range(ROUNDS)]
    of_plain = statistics.median(one for one, _ in pairs)
    of_ours = statistics.median(other for _, other in pairs)
    ratio = statistics.median(other / one for one, other in pairs)
    times = f"{of_plain * 1e3:8.0f} {of_ours * 1e3:8.0f} {ratio:8.2f}"
    print(f"{name:<40}{times}", flush=True)


def compare(batch_size: int) -> None:
    mesh = rx.make_mesh(data=8)
    sharding = rx.batch_sharding(mesh)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM_EXAMPLES, 32)).astype(np.float32)
    examples = [(row, np.int32(i % 8)) for i, row in enumerate(rows)]
    model = rx.init_model(make_model, mesh, key=jax.random.key(0))
    state = rx.init_state(model, optax.adam(1e-3), key=jax.random.key(1))
    compute_loss = eqx.filter_jit(loss_fn)
    compute_predictions = eqx.filter_jit(predict_fn)

    def placed() -> Any:
        for begin in range(0, NUM_EXAMPLES, batch_size):
            yield jax.device_put(
                collate(examples[begin : begin + batch_size]), sharding
            )

    def plain_batches() -> None:
        for _ in placed():
            pass

    def plain_evaluate() -> float:
        model = state.model
        losses = [(compute_loss(model, b, None), len(b["label"])) for b in placed()]
        return sum(float(loss) * num for loss, num in losses) / NUM_EXAMPLES

    def plain_predict() -> list[Any]:
        model = state.model
        outputs = [compute_predictions(model, batch, None) for batch in placed()]
        return [row for output in outputs for row in np.asarray(output)]

    def our_batches() -> None:
        arguments: Any = {"batch_size": batch_size, "mesh": mesh, "remainder": "split"}
        for _ in rx.batches(examples, collate, **arguments):
            pass

    print(f"\nbatches of {batch_size}{'plain ms':>35}  ours ms    ratio", flush=True)
    report("batches", plain_batches, our_batches)
    options: Any = {"collate_fn": collate, "batch_size": batch_size}
    evaluate = functools.partial(rx.evaluate, state, examples, loss_fn=loss_fn)
    predict = functools.partial(rx.predict, state, examples, predict_fn=predict_fn)
    for name, plain, ours in (
        ("evaluate", plain_evaluate, functools.partial(evaluate, **options)),
        ("predict", plain_predict, functools.partial(predict, **options)),
    ):
        report(f"{name}, programs=", plain, functools.partial(ours, programs={}))
        report(name, plain, ours)


if __name__ == "__main__":
    for batch_size in (64, 256):
        compare(batch_size)
