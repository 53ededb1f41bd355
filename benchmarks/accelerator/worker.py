"""One row, in a process of its own:
`python -m accelerator.worker ROW.json RESULT.json`.

A row is a `Setting` by its fields, `is_small`, and `target`: the name of devices that
are not there and for which the step is compiled, or null: then it is run on those that
are.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

from redco_eqx._planning.targets import GPUS

from . import around, of_torch, ours, plain, tests
from .program import compiled_for_target, measured
from .settings import MODELS, SMALL, Setting, flops_per_token


@dataclasses.dataclass(frozen=True)
class Row:
    """What is to be done: see above."""

    setting: Setting
    is_small: bool
    target: str | None

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        configs = SMALL if self.is_small else MODELS
        return configs[self.setting.model]

    @property
    def amount(self) -> dict[str, int]:
        """How much is measured."""
        if self.is_small:
            return {"rounds": 1, "num_steps": 2}
        if self.setting.part in ("llama", "paper"):
            return {"rounds": 3, "num_steps": 2}
        return {"rounds": 3, "num_steps": 5}


def main() -> None:
    given = json.loads(pathlib.Path(sys.argv[1]).read_text())
    row = Row(Setting(**given["setting"]), given["is_small"], given["target"])
    try:
        result = result_of(row)
    except (ImportError, ValueError, RuntimeError) as error:
        # The lack of a device or of a package is a result too.
        line = next((line for line in str(error).splitlines() if line), "")
        result = {"error": f"{type(error).__name__}: {line}"[:200]}
    pathlib.Path(sys.argv[2]).write_text(json.dumps(result))


def result_of(row: Row) -> dict[str, Any]:
    if row.setting.part == "tests":
        return tests.run(row.setting, is_small=row.is_small)
    if row.setting.library in ("redco_eqx", "plain JAX"):
        result = _of_jax(row)
    else:
        result = _of_torch(row)
    if "num_parameters" not in result:
        return result
    return {**result, **_rates(row, result)}


def _of_jax(row: Row) -> dict[str, Any]:
    import jax

    import redco_eqx as rx
    from redco_eqx._planning.targets import find_target

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if row.target is not None or row.is_small:
        jax.config.update("jax_platforms", "cpu")
    if row.target is None:
        device = jax.devices()[0]
        options = {}
    else:
        target = find_target(row.target)
        device = target.devices[0]
        options = target.compiler_options
    about = {"device": device.device_kind, "jax": jax.__version__}
    setting = row.setting
    config = row.config
    if setting.part in ("llama", "paper"):
        make = ours.program if setting.library == "redco_eqx" else plain.program
        program = make(setting, config, rx.make_mesh(devices=[device]))
        if row.target is not None:
            return {**compiled_for_target(program, options), **about}
        return {**measured(program, **row.amount), **about}
    if row.target is not None:
        return {"error": "is run, not compiled for what is not there", **about}
    if setting.part == "loading":
        return {**around.loading(setting, config), **about}
    if setting.part == "generation":
        found = around.generation(setting, config, rounds=row.amount["rounds"])
        return {**found, **about}
    measure = {"fit": around.fit_overhead, "saving": around.save_stall}[setting.part]
    return {**measure(setting, config, **row.amount), **about}


def _of_torch(row: Row) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)
    import transformers

    if row.target is not None:
        return {"error": "torch is run, not compiled for what is not there"}
    has_gpu = torch.cuda.is_available()
    about = {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    setting = row.setting
    given: dict[str, Any] = {"is_small": row.is_small}
    if setting.part == "loading":
        found = around.loading_by_transformers(setting, row.config, **given)
    elif setting.part == "generation":
        given["rounds"] = row.amount["rounds"]
        found = around.generation_by_transformers(setting, row.config, **given)
    else:
        found = of_torch.measured(setting, row.config, **row.amount, **given)
    return {**found, **about}


def _rates(row: Row, result: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, and which part that is of what the chip can do (MFU): of its
    products in bfloat16, or of half as many in TF32 for `float32`. Also without the
    table of embeddings, which takes no products."""
    setting = row.setting
    config = row.config
    rate = setting.batch * setting.length / result["seconds"]
    chip = next((x for x in GPUS.values() if x.name == result["device"]), None)
    if chip is None:
        return {"tokens_per_second": rate}
    peak = chip.flops
    if setting.precision == "float32":
        peak = peak / 2

    def mfu(num_parameters: int) -> float:
        return rate * flops_per_token(num_parameters, config, setting.length) / peak

    num_parameters = result["num_parameters"]
    num_without_table = num_parameters
    if not config.tie_word_embeddings:
        # A table that is also the head takes the products of the head.
        num_without_table -= config.vocab_size * config.entry("hidden_size")
    return {
        "tokens_per_second": rate,
        "mfu": mfu(num_parameters),
        "mfu_without_table": mfu(num_without_table),
    }


if __name__ == "__main__":
    main()
