"""A training step of JAX and its arguments: compiled, for what is here or is not, and
timed."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

LEARNING_RATE = 1e-4
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its arguments.

    - `step`: jitted, `(state, batch) -> (state, metrics)`; takes over the state.
    - `make_state`: on the device; `abstract_state`: the same without numbers.
    - `batch`: abstract tokens, `(rows, length + 1)`.
    - `loss_of`: the loss among the metrics.
    - `num_parameters`: as in 6N.
    """

    step: Any
    make_state: Callable[[], Any]
    abstract_state: Any
    batch: jax.ShapeDtypeStruct
    loss_of: Callable[[Any], Any]
    num_parameters: int


def compiled_for_target(
    program: Program, compiler_options: Mapping[str, bool]
) -> dict[str, Any]:
    """What the compiler says of a step on devices that are not there."""
    begun = time.perf_counter()
    lowered = program.step.lower(program.abstract_state, program.batch)
    compiled = lowered.compile(compiler_options=dict(compiler_options))
    return {**_read(compiled), "compile_seconds": time.perf_counter() - begun}


def _read(compiled: Any) -> dict[str, Any]:
    stats = compiled.memory_analysis()
    kept = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    return {
        "compiled_gib": (kept + stats.temp_size_in_bytes) / GIB,
        "arguments_gib": stats.argument_size_in_bytes / GIB,
        "attention_calls": compiled.as_text().count("__cudnn$fmha"),
    }


def measured(program: Program, *, rounds: int, num_steps: int) -> dict[str, Any]:
    """Seconds of a step: the median of `rounds`, each of `num_steps` steps, which are
    waited for at its end."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, program.batch.shape).astype(np.int32)
    batch = jax.device_put(tokens, program.batch.sharding)
    state = program.make_state()
    begun = time.perf_counter()
    compiled = program.step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - begun
    losses = []
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        metrics: Any = None
        for _ in range(num_steps):
            state, metrics = compiled(state, batch)
        # `float` waits for the device.
        losses.append(float(program.loss_of(metrics)))
        times.append((time.perf_counter() - begun) / num_steps)
    # The first round warms up.
    seconds = times[1:]
    return {
        **_read(compiled),
        "num_parameters": program.num_parameters,
        "seconds": statistics.median(seconds),
        "spread": max(seconds) / min(seconds) - 1,
        "compile_seconds": compile_seconds,
        "peak_gib": peak_gib(),
        "losses": [losses[0], losses[-1]],
    }


def peak_gib() -> float | None:
    """The most that the device has had in use, if it says so."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return None
    return stats["peak_bytes_in_use"] / GIB
