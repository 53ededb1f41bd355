"""What every peer is measured at, and how. Needs JAX alone: each peer has an
environment of its own.

Decoders and encoder-decoders in float32 with AdamW and no dropout, on eight virtual CPU
devices.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

DIM, MLP, LLAMA_MLP = 256, 1024, 688
LAYERS, HEADS, VOCABULARY, LENGTH, BATCH = 4, 8, 1024, 128, 8
LEARNING_RATE = 1e-3
MODELS = ("LLaMA", "GPT-2", "GPT-J", "OPT", "T5", "T5 v1.1", "BART")
MESHES: dict[str, dict[str, Any]] = {
    "data 2 x tensor 4": {"data": 2, "tensor": 4},
    "fsdp 8": {"fsdp": 8},
}
NUM_STEPS = 20


def start() -> None:
    """Before the first use of JAX."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def tokens(length: int = LENGTH) -> np.ndarray[Any, Any]:
    return (
        np.random.default_rng(0)
        .integers(VOCABULARY, size=(BATCH, length))
        .astype(np.int32)
    )


def measure(
    peer: str,
    model: str,
    mesh: str,
    step: Any,
    arguments: tuple[Any, ...],
    advance: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]],
    loss_of: Callable[[Any], Any],
) -> None:
    """Compile a jitted `step(*arguments)` and run it; `advance(output, arguments)`
    gives the next arguments.

    Write `PEER-MODEL-MESH.json` and the compiled program beside it, in the directory
    that the command names.
    """
    begun = time.perf_counter()
    lowered = step.lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    stats = compiled.memory_analysis()
    losses, seconds = [], []
    for _ in range(NUM_STEPS):
        at = time.perf_counter()
        output = compiled(*arguments)
        losses.append(float(loss_of(output)))
        seconds.append(time.perf_counter() - at)
        arguments = advance(output, arguments)
    kept = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    found = {
        "peer": peer,
        "model": model,
        "mesh": mesh,
        "trace": traced - begun,
        "compile": done - traced,
        "memory": kept + stats.temp_size_in_bytes,
        "step": min(seconds),
        "losses": [losses[0], losses[-1]],
    }
    write(found, compiled.as_text())


def write(found: dict[str, Any], program: str = "") -> None:
    directory = pathlib.Path(sys.argv[1])
    name = "-".join(found[key] for key in ("peer", "model", "mesh")).replace(" ", "_")
    (directory / f"{name}.hlo").write_text(program)
    (directory / f"{name}.json").write_text(json.dumps(found))
    print(json.dumps(found), flush=True)


def each(
    peer: str, mesh: str, one: Callable[[str], None], models: Sequence[str] = MODELS
) -> None:
    """Measure each model by `one`; what a peer cannot do is a row with its error."""
    start()
    for model in models:
        try:
            one(model)
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0][:200]
            write(
                {
                    "peer": peer,
                    "model": model,
                    "mesh": mesh,
                    "error": f"{type(error).__name__}: {line}",
                }
            )
