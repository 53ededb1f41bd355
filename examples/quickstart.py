"""A small language model of Python's own source code, trained on a mesh of eight
devices.

    python examples/quickstart.py            # nothing to download
    python examples/quickstart.py --quick    # to see that it works

The model is ordinary Equinox: no base class, no annotations, no code about devices.
Three functions (collate, loss, predict) and one mesh are all that the library needs.
The eight devices are virtual CPU devices; pass `--devices 0` to use the devices of the
machine.
"""

import argparse
import functools
import pathlib
import sysconfig
import time
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, UInt8

import redco_eqx as rx

VOCABULARY = 256  # bytes are the tokens
LENGTH = 128  # length of the context, in bytes
PROMPTS = ("\n\nimport ", "\n\ndef get_", "\n\nclass ", "\n\n    def __init__(self, ")

# -------------------------------------------------------------------------------------
# the model


class Block(eqx.Module):
    """Causal self-attention and an MLP, each with a norm before it and a residual path
    around it."""

    norm1: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding
    norm2: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, dim: int, num_heads: int, *, key: Key[Array, ""]):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.norm1 = eqx.nn.RMSNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(num_heads, dim, key=attention_key)
        self.rope = eqx.nn.RotaryPositionalEmbedding(dim // num_heads)
        self.norm2 = eqx.nn.RMSNorm(dim)
        self.up = eqx.nn.Linear(dim, 4 * dim, key=up_key)
        self.down = eqx.nn.Linear(4 * dim, dim, key=down_key)

    def __call__(self, x: Float[Array, "length dim"]) -> Float[Array, "length dim"]:
        """Return the output for one sequence."""

        def rotate(
            query: Array, key: Array, value: Array
        ) -> tuple[Array, Array, Array]:
            per_head = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return per_head(query), per_head(key), value

        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask=causal, process_heads=rotate)
        h = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))


class Transformer(eqx.Module):
    """A decoder-only transformer, which computes the logits of each next token."""

    embedding: eqx.nn.Embedding
    layers: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        *,
        dim: int = 96,
        num_heads: int = 4,
        num_layers: int = 3,
        key: Key[Array, ""],
    ):
        embedding_key, head_key, *layer_keys = jax.random.split(key, 2 + num_layers)
        self.embedding = eqx.nn.Embedding(VOCABULARY, dim, key=embedding_key)
        self.layers = [Block(dim, num_heads, key=layer_key) for layer_key in layer_keys]
        self.norm = eqx.nn.RMSNorm(dim)
        self.head = eqx.nn.Linear(dim, VOCABULARY, use_bias=False, key=head_key)

    def __call__(
        self, tokens: Int[Array, " length"]
    ) -> Float[Array, "length vocabulary"]:
        """Return the logits for one sequence; `jax.vmap(model)` takes a batch."""
        x = jax.vmap(self.embedding)(tokens)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


# --------------------------------------------------------------------------- the three
# functions


def collate_fn(
    examples: Sequence[UInt8[np.ndarray, " length"]],
) -> Int[np.ndarray, "batch length"]:
    """Collate examples into a batch of NumPy arrays."""
    return np.stack(examples).astype(np.int32)


def loss_fn(
    model: Transformer, batch: Int[Array, "batch length"], key: Key[Array, ""]
) -> rx.Mean:
    """Return the loss of a batch in bits per byte. A `Mean` adds up exactly over
    batches of any size."""
    logits = jax.vmap(model)(batch[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return rx.Mean(nats.sum() / jnp.log(2), nats.size)


def predict_fn(
    model: Transformer,
    prompts: Int[Array, "batch length"],
    key: Key[Array, ""],
    *,
    num_bytes: int,
    temperature: float = 0.6,
) -> Int[Array, "batch num_bytes"]:
    """Generate text after each prompt, with a sliding context."""

    def write(context: Array, key: Key[Array, ""]) -> tuple[Array, Array]:
        logits = jax.vmap(model)(context)[:, -1]
        token = jax.random.categorical(key, logits / temperature)
        return jnp.append(context[:, 1:], token[:, None], axis=1), token

    _, tokens = jax.lax.scan(write, prompts, jax.random.split(key, num_bytes))
    return tokens.T


# --------------------------------------------------------------------------------------
# the data


def standard_library() -> tuple[
    UInt8[np.ndarray, "n length+1"], UInt8[np.ndarray, "m length+1"]
]:
    """Return windows of the standard library's modules. Every twentieth module is held
    out."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))

    def windows(files: list[pathlib.Path]) -> np.ndarray:
        text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        return np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[::LENGTH]

    held_out = files[::20]
    return windows([file for file in files if file not in held_out]), windows(held_out)


def bigram_bits_per_byte(
    train: UInt8[np.ndarray, "n length"], test: UInt8[np.ndarray, "m length"]
) -> float:
    """Return the baseline, which predicts each byte from the one before it, by counts
    of the training bytes."""

    def pairs(windows: np.ndarray) -> np.ndarray:
        return (windows[:, :-1].astype(int) * VOCABULARY + windows[:, 1:]).ravel()

    counts = (
        np.bincount(pairs(train), minlength=VOCABULARY**2).reshape(
            VOCABULARY, VOCABULARY
        )
        + 0.1
    )
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits.ravel()[pairs(test)].mean())


# -----------------------------------------------------------------------------------
# the program


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, evaluate and generate. Return the numbers and the text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, help="number of training steps (800; quick: 100)"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--tensor", type=int, default=4, help="devices that split each layer's matrices"
    )
    parser.add_argument(
        "--fsdp", type=int, default=1, help="devices that split the stored parameters"
    )
    parser.add_argument(
        "--devices", type=int, default=8, help="virtual CPU devices; 0: real devices"
    )
    parser.add_argument(
        "--quick", action="store_true", help="short run, to check that it works"
    )
    args = parser.parse_args(argv)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    num_steps = args.steps or (100 if args.quick else 800)
    train, held_out = standard_library()
    held_out = held_out[: 2048 : 16 if args.quick else 1]

    # Create the model directly on the mesh. The traced loss decides which array is
    # split over which axis.
    mesh = rx.make_mesh(tensor=args.tensor, fsdp=args.fsdp)
    program: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batch": collate_fn(list(train[: args.batch_size])),
    }
    model = rx.init_model(
        lambda key: Transformer(key=key), mesh, key=jax.random.key(0), **program
    )
    print(rx.explain(model, mesh, **program), end="\n\n")

    # Any optax optimizer works. Its state is sharded like the parameters.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 6e-3, num_steps // 20, num_steps, 3e-4
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)
    )
    state = rx.init_state(model, optimizer, key=jax.random.key(1))

    # Show a progress bar on a terminal, and a row of numbers every hundred steps.
    start = time.perf_counter()
    state, _ = rx.fit(
        state,
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=args.batch_size,
        num_steps=num_steps,
        log_every=100,
    )
    seconds = time.perf_counter() - start

    # Compute exact means over the held-out bytes, for any batch size. Then compute the
    # baseline on the same bytes.
    metrics = rx.evaluate(
        state, held_out, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=64
    )
    bits, bigram_bits = metrics["loss"], bigram_bits_per_byte(train, held_out)

    # Take each prompt from the end of a held-out text, so that there is a context to
    # continue.
    context = held_out[len(held_out) // 2]
    prompts = [
        np.append(context, np.frombuffer(p.encode(), np.uint8))[-LENGTH:]
        for p in PROMPTS
    ]
    written = rx.predict(
        state,
        prompts,
        collate_fn=collate_fn,
        predict_fn=functools.partial(predict_fn, num_bytes=32 if args.quick else 160),
        batch_size=args.batch_size,
    )
    texts = [
        p + bytes(w.tolist()).decode(errors="replace") for p, w in zip(PROMPTS, written)
    ]
    sample = "\n\n".join(text.strip() for text in texts)

    print(
        f"\n{sample}\n\nTrained on {num_steps * args.batch_size * LENGTH:,} bytes with "
        f"{mesh.size} devices in {seconds:.0f} s. On {held_out[:, 1:].size:,} held-out "
        f"bytes: {bits:.2f} bits per byte, and {bigram_bits:.2f} by a bigram."
    )
    return {
        "bits_per_byte": bits,
        "bigram_bits_per_byte": bigram_bits,
        "sample": sample,
    }


if __name__ == "__main__":
    main()
