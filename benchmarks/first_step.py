"""The processor seconds before the first step, beside those of plain JAX.

    python benchmarks/first_step.py

Models of 24 layers at width 64, on 8 virtual devices (data 2 x tensor 4). Each
measurement has a separate process. "ours" is what `fit` does before its first step: the
layout from the traced program, the compiled step, and the line that says what it sends.
"plain" traces, lowers and compiles `jax.jit` of the same loss, its gradient and AdamW,
on arrays with the same layout, and donates them. "checked" is "plain" with two things
that a step of `fit` computes as well: the norm of the gradient, and the old state if
loss or norm are not finite. None includes imports (of which only "ours" needs
`scipy.optimize`, 0.8 s), the initialization of the model, or a step.

With `--cache`, both sides run twice with one cache of compiled programs: seconds of
wall time from the start of the process to the end of the first step, without the
cache's programs and with them.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

MODELS = ("LLaMA, list", "LLaMA, stacked", "quickstart, list")
COLUMNS = (
    "layout",
    "step",
    "cost line",
    "plain",
    "checked",
    "ours/plain",
    "ours/checked",
)


def measured(name: str, side: str) -> dict[str, float]:
    """Return the processor seconds of each phase."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import scipy.optimize  # noqa: F401 (imports are not measured)
    from workloads import Sizes, family_case, quickstart

    import redco_eqx as rx
    from redco_eqx._compiled.communication import cost
    from redco_eqx._training.program import train_program

    jax.config.update("jax_num_cpu_devices", 8)
    seconds: dict[str, float] = {}

    def phase(name: str, function: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = function()
        seconds[name] = time.process_time() - began
        return result

    mesh, optimizer = rx.make_mesh(tensor=4), optax.adamw(1e-3)
    if name.startswith("LLaMA"):
        sizes = Sizes(dim=64, num_layers=24, vocabulary=256, length=32)
        case = family_case("LLaMA", sizes, stacked=name.endswith("stacked"))
        make_model, loss_fn, shape = case.make_model, case.loss_fn, case.batch.shape
    else:
        loss_fn, shape = quickstart.loss_fn, (8, 33)

        def make_model(key: Any, /) -> Any:
            return quickstart.Transformer(dim=64, num_layers=24, num_heads=8, key=key)

    rows = np.random.default_rng(0).integers(256, size=shape).astype(np.int32)
    evidence: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batch": jax.ShapeDtypeStruct(shape, np.int32),
    }
    abstract = eqx.filter_eval_shape(make_model, jax.random.key(0))
    if side == "ours":
        phase("layout", lambda: rx.shard_rules(abstract, mesh, **evidence))
    model = rx.init_model(make_model, mesh, key=jax.random.key(0), **evidence)
    batch = jax.device_put(rows, rx.batch_sharding(mesh))
    if side == "ours":
        state = rx.init_state(model, optimizer, key=jax.random.key(1))
        program = phase(
            "step",
            lambda: train_program(
                state, batch, loss_fn=loss_fn, optimizer=optimizer, num_microbatches=1
            ),
        )
        phase("cost line", lambda: cost(program.compiled, mesh))
        jax.block_until_ready(program(jax.tree.leaves(state), program.window, batch))
        return seconds

    params, static = eqx.partition(model, eqx.is_inexact_array)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return loss_fn(eqx.combine(params, static), batch, jax.random.key(0)).value

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        if side == "plain":
            return *new, loss
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm)
        return *jax.tree.map(
            lambda new, old: jnp.where(ok, new, old), new, (params, opt_state)
        ), (loss, norm)

    opt_state = optimizer.init(params)
    compiled = phase(
        "step", lambda: step.trace(params, opt_state, batch).lower().compile()
    )
    jax.block_until_ready(compiled(params, opt_state, batch))
    return seconds


def in_process(name: str, side: str, cache: str = "") -> dict[str, float]:
    """Measure in a process of its own; `wall` is the time of the whole process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    if cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    began = time.perf_counter()
    command = [sys.executable, __file__, "--measure", name, side]
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return {**json.loads(output.splitlines()[-1]), "wall": time.perf_counter() - began}


def one_round(name: str) -> dict[str, float]:
    """Measure each side once."""
    ours, plain, checked = (
        in_process(name, side) for side in ("ours", "plain", "checked")
    )
    total = sum(ours[phase] for phase in COLUMNS[:3])
    others = {"plain": plain["step"], "checked": checked["step"]}
    return {
        **ours,
        **others,
        "ours/plain": total / plain["step"],
        "ours/checked": total / checked["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", action="store_true")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(*args.measure)))
    elif args.cache:
        print(f"{'model':<20}{'side':<8}{'first':>8}{'second':>8}{'ratio':>8}")
        for name in MODELS:
            for side in ("ours", "plain"):
                with tempfile.TemporaryDirectory() as cache:
                    first, second = (
                        in_process(name, side, cache)["wall"] for _ in range(2)
                    )
                print(
                    f"{name:<20}{side:<8}"
                    f"{first:>8.1f}{second:>8.1f}{second / first:>8.2f}",
                    flush=True,
                )
    else:
        print(
            f"{'model':<20}" + "".join(f"{name:>{len(name) + 3}}" for name in COLUMNS)
        )
        for name in MODELS:
            rounds = [one_round(name) for _ in range(args.rounds)]
            row = {
                column: statistics.median(one[column] for one in rounds)
                for column in COLUMNS
            }
            print(
                f"{name:<20}"
                + "".join(f"{x:>{len(n) + 3}.2f}" for n, x in row.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
