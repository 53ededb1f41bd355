"""The effect of workers on a slow `collate_fn`: one waits 20 ms, and one computes for
20 ms in Python.

    python benchmarks/collation.py

Prints the seconds for each batch, over those of one thread. Nothing is done with the
batches. Only the ratios within one run are meaningful. Threads that share Python's lock
gain nothing for a function that computes.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

import redco_eqx as rx

SECONDS = 0.02
WAYS: dict[str, dict[str, Any]] = {
    "one thread": {},
    "2 threads": {"num_workers": 2},
    "8 threads": {"num_workers": 8},
}


def waiting(examples: Any) -> np.ndarray:
    time.sleep(SECONDS)
    return np.asarray(examples)


def computing(examples: Any) -> np.ndarray:
    # The time of this thread: waiting for Python's lock does not count.
    end = time.thread_time() + SECONDS
    while time.thread_time() < end:
        pass
    return np.asarray(examples)


def seconds_per_batch(
    collate_fn: Any, num_batches: int, options: dict[str, Any]
) -> float:
    examples = rx.Data(range(8 * num_batches), **options)
    made = rx.batches(examples, collate_fn, batch_size=8, mesh=rx.make_mesh())
    for _ in range(num_batches // 4):
        next(made)
    start = time.perf_counter()
    num_left = sum(1 for batch in made if jax.block_until_ready(batch) is not None)
    return (time.perf_counter() - start) / num_left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for collate_fn in (waiting, computing):
        print(
            f"{collate_fn.__name__} for {1000 * SECONDS:.0f} ms in collate_fn, over "
            "one thread",
            flush=True,
        )
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(args.rounds):
            for name, options in WAYS.items():
                found[name].append(seconds_per_batch(collate_fn, args.batches, options))
        for name, seconds in found.items():
            ratios = [x / y for x, y in zip(seconds, found["one thread"])]
            shown = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"  {name:12} {statistics.median(ratios):5.2f}  ({shown}; "
                f"{1000 * min(seconds):.1f} ms)",
                flush=True,
            )


if __name__ == "__main__":
    main()
