"""What is around a training step: the loop, checkpoints, generation, loading."""

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx
import redco_eqx_models as models

from . import ours
from .program import GIB, LEARNING_RATE, measured, peak_gib
from .settings import Setting


def fit_overhead(
    setting: Setting, config: Any, *, rounds: int, num_steps: int
) -> dict[str, Any]:
    """Seconds of a step of `fit` over those of the compiled step by itself."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    program = ours.program(setting, config, mesh)
    bare = measured(program, rounds=rounds, num_steps=num_steps)
    rates: list[float] = []
    num_rows = (rounds + 1) * num_steps * setting.batch
    rx.fit(
        program.make_state(),
        np.zeros((num_rows, setting.length + 1), np.int32),
        collate_fn=np.stack,
        loss_fn=ours.make_loss(setting),
        optimizer=optax.adamw(LEARNING_RATE),
        batch_size=setting.batch,
        num_steps=(rounds + 1) * num_steps,
        log_every=num_steps,
        loggers=[lambda step, row: rates.append(row["train/examples_per_second"])],
    )
    # The first window compiles.
    seconds = statistics.median(setting.batch / rate for rate in rates[1:])
    return {
        **bare,
        "seconds": seconds,
        "bare_seconds": bare["seconds"],
        "ratio": seconds / bare["seconds"],
    }


def save_stall(
    setting: Setting, config: Any, *, rounds: int, num_steps: int
) -> dict[str, Any]:
    """Seconds that a save holds the loop up, the steps that were still running not
    counted; and what a save, its writing in the background included, adds to the steps
    after it."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    program = ours.program(setting, config, mesh)
    state = program.make_state()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    batch = jax.device_put(
        np.zeros(program.batch.shape, np.int32), program.batch.sharding
    )
    compiled = program.step.lower(state, batch).compile()
    blocked: list[float] = []
    times: dict[bool, list[float]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as directory,
        rx.Checkpoints(directory, keep_last=1).open() as writer,
    ):
        for saves in [False, True] * (rounds + 1):
            writer.wait()
            jax.block_until_ready(state)
            begun = time.perf_counter()
            if saves:
                writer.save(state)
                blocked.append(time.perf_counter() - begun)
            for _ in range(num_steps):
                state, _ = compiled(state, batch)
            jax.block_until_ready(state)
            times[saves].append(time.perf_counter() - begun)
    # The first of each warms up.
    without = statistics.median(times[False][1:])
    with_save = statistics.median(times[True][1:])
    return {
        "seconds": statistics.median(blocked[1:]),
        "added_seconds": with_save - without,
        "step_seconds": without / num_steps,
        "state_gib": num_bytes / GIB,
        "peak_gib": peak_gib(),
    }


def generation(setting: Setting, config: Any, *, rounds: int) -> dict[str, Any]:
    """Greedy tokens a second, all rows together, after a prompt of 64 tokens."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    model = rx.init_model(
        lambda key: ours.make_model(setting, config, key=key),
        mesh,
        key=jax.random.key(0),
    )
    prompt = jnp.ones((setting.batch, PROMPT), jnp.int32)

    def run() -> Any:
        return models.generate(
            model, prompt, max_new_tokens=setting.length, eos_token_id=()
        )

    return {
        **_rate(run, jax.block_until_ready, setting, rounds),
        "peak_gib": peak_gib(),
    }


def generation_by_transformers(
    setting: Setting, config: Any, *, rounds: int, is_small: bool
) -> dict[str, Any]:
    from . import of_torch

    model, device = of_torch.load(setting, config, is_small=is_small)
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)

    prompt = torch.ones((setting.batch, PROMPT), dtype=torch.long, device=device)

    def run() -> Any:
        return model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=setting.length,
            max_new_tokens=setting.length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    def wait(result: Any) -> None:
        result.cpu()

    return _rate(run, wait, setting, rounds)


PROMPT = 64


def _rate(
    run: Callable[[], Any], wait: Any, setting: Setting, rounds: int
) -> dict[str, Any]:
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        wait(run())
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[1:])
    return {
        "seconds": seconds,
        "spread": max(times[1:]) / min(times[1:]) - 1,
        "compile_seconds": times[0] - seconds,
        "tokens_per_second": setting.batch * setting.length / seconds,
    }


def loading(setting: Setting, config: Any) -> dict[str, Any]:
    """Seconds from files, that lie in the page cache, to arrays on the device. They are
    made on the spot."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    with tempfile.TemporaryDirectory() as directory:
        model = rx.init_model(
            lambda key: ours.make_model(setting, config, key=key),
            mesh,
            key=jax.random.key(0),
        )
        begun = time.perf_counter()
        models.save_pretrained(model, directory)
        written = time.perf_counter() - begun
        del model
        begun = time.perf_counter()
        jax.block_until_ready(
            models.load_pretrained(directory, mesh, dtype=jnp.bfloat16, stacked=True)
        )
        return {
            "seconds": time.perf_counter() - begun,
            "writing_seconds": written,
            "checkpoint_gib": _size(directory),
        }


def loading_by_transformers(
    setting: Setting, config: Any, *, is_small: bool
) -> dict[str, Any]:
    from . import of_torch

    model, device = of_torch.load(setting, config, is_small=is_small)
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)

    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        model.save_pretrained(directory)
        written = time.perf_counter() - begun
        kind = type(model)
        del model
        begun = time.perf_counter()
        loaded = kind.from_pretrained(directory, dtype=torch.bfloat16).to(device)
        # `item` waits for the device.
        next(loaded.parameters()).sum().item()
        return {
            "seconds": time.perf_counter() - begun,
            "writing_seconds": written,
            "checkpoint_gib": _size(directory),
        }


def _size(directory: str) -> float:
    return sum(path.stat().st_size for path in pathlib.Path(directory).iterdir()) / GIB
