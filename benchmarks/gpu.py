"""The library on an accelerator, compared with torch and a step written by hand in JAX,
by one command.

    python benchmarks/gpu.py [PART ...] [--out gpu.jsonl] [--seconds 1500]
    # Run everything at a tiny size, on the CPU:
    python benchmarks/gpu.py --small
    # Compile steps for a GPU that is not present:
    python benchmarks/gpu.py --compile h200:1 llama paper

Parts: `llama` (7B at 4096 tokens), `paper` (the sizes of the paper's Figure 3), `fit`,
`saving`, `generation`, `loading` (the work around a step), `tests`. Each row
(`accelerator/settings.py`) is a separate process with a time limit: a failure or a hang
costs only that row. A finished row is appended to `--out`, with all measured numbers
and the versions; the table comes at the end. A row that could run past `--seconds` is
not begun.

MFU counts 6N + 12 L d s operations for a token, with all pairs of tokens and without
recomputation, over the products in the chip's data sheet. One device. `torch` needs the
group `parity`, with CUDA.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from accelerator.settings import SETTINGS, Setting, small
from workloads import run_alone, table

PARTS = tuple(dict.fromkeys(setting.part for setting in SETTINGS))


def run(setting: Setting, *, is_small: bool, target: str | None) -> dict[str, Any]:
    """Return the result of a row, or the error of its process."""
    with tempfile.TemporaryDirectory() as directory:
        row = pathlib.Path(directory, "row.json")
        given = {
            "setting": dataclasses.asdict(setting),
            "is_small": is_small,
            "target": target,
        }
        row.write_text(json.dumps(given))
        return run_alone(["-m", "accelerator.worker", str(row)], setting.limit)


HEADER = ["part", "library", "model", "precision", "remat", "attention"]
HEADER += ["rows x tokens", "s", "tokens/s", "MFU", "peak GiB", ""]
MORE = {
    "ratio": "x {:.3f} of the step alone",
    "added_seconds": "adds {:.2f} s in all",
    "checkpoint_gib": "{:.1f} GiB of files",
    "attention_calls": "{} calls of cuDNN's attention",
    "failed": "{} failed",
    "broken": "{} broken",
    "skipped": "{} left out",
    "passed": "{} passed",
    "error": "{}",
}
"""The texts for other results of a row."""


TRAINING = ("llama", "paper", "fit", "saving")


def cells(found: dict[str, Any]) -> list[str]:
    names = [found[key] for key in ("part", "library", "model", "precision")]
    names += [found["remat"] if found["part"] in TRAINING else "", found["attention"]]
    size = f"{found['batch']} x {found['length']}"
    if found["chunks"] > 1:
        size += f", {found['chunks']} chunks"
    if found["part"] in ("loading", "tests"):
        size = names[-1] = ""
    peak = found.get("peak_gib") or found.get("compiled_gib")
    numbers = [
        f"{found['seconds']:.4g}" if "seconds" in found else "",
        f"{found['tokens_per_second']:,.0f}" if "tokens_per_second" in found else "",
        f"{found['mfu']:.1%}" if "mfu" in found else "",
        "" if peak is None else f"{peak:.2f}",
    ]
    more = "; ".join(
        form.format(found[key]) for key, form in MORE.items() if key in found
    )
    return [*names, size, *numbers, more]


COMPILING = 900
"""The time limit in seconds for a row that is only compiled, which needs no time of an
accelerator."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="all without any"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument(
        "--compile", metavar="TARGET", help='as for `rx.plan`: "h200:1"'
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu.jsonl"))
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="for all rows"
    )
    given = parser.parse_args()
    begun, rows = time.monotonic(), []
    for setting in SETTINGS:
        if setting.part not in (given.parts or PARTS):
            continue
        setting = small(setting) if given.small else setting
        if given.compile:
            setting = dataclasses.replace(setting, limit=COMPILING)
        if time.monotonic() - begun + setting.limit > given.seconds:
            result: dict[str, Any] = {"error": "not begun: --seconds would be over"}
        else:
            result = run(setting, is_small=given.small, target=given.compile)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {
            **dataclasses.asdict(setting),
            **result,
            "date": date,
            "small": given.small,
        }
        with given.out.open("a") as file:
            file.write(json.dumps({**found, "target": given.compile}) + "\n")
        rows.append(cells(found))
        print("  ".join(cell for cell in rows[-1] if cell), file=sys.stderr, flush=True)
    print(table([HEADER, *rows], num_left=7))


if __name__ == "__main__":
    main()
