"""Make a model card, the page that the Hugging Face Hub shows for a model."""

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from jax.sharding import NamedSharding

from redco_eqx._base.tree import to_arrays
from redco_eqx.models._blocks.model import Model
from redco_eqx.models._files.names import entries_of
from redco_eqx.models._files.pieces import common_dtype

CARD = "README.md"

_FORM = """---
library_name: {library}
tags:
- redco_eqx
---

# {name}

`{architecture}`, {num_parameters:,} parameters in {dtype}, trained to step {step} with {versions} on {place}.

| metric | step | value |
| --- | ---: | ---: |
"""


@runtime_checkable
class RunHistory(Protocol):
    """The rows and evaluations of a run, each with its `step`, as `fit` returns them."""

    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]: ...


def card_of(model: Model, name: str, history: RunHistory) -> str:
    """Make a card with the model, library versions, the mesh, and the last value of each metric."""
    last = {}
    for row in (*history.rows, *history.evaluations):
        last |= {metric: (row["step"], value) for metric, value in row.items() if metric != "step"}
    arrays = to_arrays(model)
    mesh = next((x.sharding.mesh for x in arrays.values() if isinstance(x.sharding, NamedSharding)), None)
    sizes = {} if mesh is None else mesh.shape
    text = _FORM.format(
        library="diffusers" if "diffusion" in model.config.weights else "transformers",
        name=name,
        architecture=model.architecture or type(model).__name__,
        num_parameters=sum(math.prod(entry.unpadded_shape) for entry in entries_of(model)),
        dtype=common_dtype(arrays),
        step=max((step for step, _ in last.values()), default=0),
        versions=" and ".join(f"{x} {importlib.metadata.version(x)}" for x in ("redco_eqx", "jax")),
        place=" x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device",
    )
    return text + "".join(f"| `{metric}` | {step} | {value:.6g} |\n" for metric, (step, value) in last.items())
