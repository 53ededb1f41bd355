"""An ordinary training script, for one host or many. The launchers in this folder start
it.

    python examples/launch/train.py                                      # one process
    # two, inside a SLURM job
    srun --nodes=2 --ntasks-per-node=1 python examples/launch/train.py

Only the first line of `main` is about many hosts, and it does nothing if there is a
single process. The task is artificial: the model tells in which of eight directions a
randomly rotated point lies.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx

DIM, NUM_CLASSES = 16, 8


def collate_fn(examples):
    """Collate examples into a batch of NumPy arrays."""
    points, classes = zip(*examples)
    return {"points": np.stack(points), "classes": np.asarray(classes, np.int32)}


def loss_fn(model, batch, key):
    """Return the cross-entropy and the accuracy."""
    logits = jax.vmap(model)(batch["points"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["classes"]).mean()}


def make_examples(number, seed):
    """Make all examples, in every process. A process collates only the rows of its own
    devices."""
    directions = np.random.default_rng(0).normal(size=(DIM, NUM_CLASSES))
    points = np.random.default_rng(seed).normal(size=(number, DIM)).astype(np.float32)
    return list(zip(points, (points @ directions).argmax(-1)))


def main():
    """Train, evaluate, and print one line."""
    rx.initialize_distributed()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--tensor", type=int, default=1, help="devices that split each layer's matrices"
    )
    parser.add_argument(
        "--fsdp", type=int, default=1, help="devices that split the stored parameters"
    )
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    mesh = rx.make_mesh(tensor=args.tensor, fsdp=args.fsdp)
    examples = make_examples(2000, 1)
    model = rx.init_model(
        lambda key: eqx.nn.MLP(
            DIM, NUM_CLASSES, 128, 2, activation=jax.nn.gelu, key=key
        ),
        mesh,
        key=jax.random.key(0),
        loss_fn=loss_fn,
        batch=collate_fn(examples[:32]),
    )
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    functions = {"collate_fn": collate_fn, "loss_fn": loss_fn}
    state, _ = rx.fit(
        state,
        examples,
        optimizer=optimizer,
        batch_size=32,
        num_epochs=args.epochs,
        **functions,
    )
    metrics = rx.evaluate(state, make_examples(501, 2), batch_size=64, **functions)
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in state.params.values()))
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, {mesh.size} devices: loss "
            f"{metrics['loss']:.6f}, accuracy {metrics['accuracy']:.4f}, norm of the "
            f"parameters {norm:.6f}"
        )


if __name__ == "__main__":
    main()
