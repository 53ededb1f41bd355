"""The `config.json` of a part of a pipeline of diffusers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from redco_eqx.models._blocks.config import BaseConfig, Json

VERSION = "0.35.0"
"""Of diffusers, whose format is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusersConfig(BaseConfig):
    """What parts have in common: their class's name is `_class_name` in the file, not `model_type`.

    A family names in `only` all options of diffusers' class that would change numbers and that it has not.
    """

    type_entry: ClassVar[str] = "_class_name"
    weights: ClassVar[str] = "diffusion_pytorch_model"

    def to_json(self) -> dict[str, Json]:
        """The entries of `config.json`."""
        return {"_diffusers_version": VERSION, **super().to_json()}


def per_stage(config: Any, name: str) -> tuple[int, ...]:
    """An entry with one number for all stages, or one for each, as one for each.

    Raises `ValueError` if there are not as many as stages.
    """
    value, num = getattr(config, name), len(config.block_out_channels)
    found = (value,) * num if isinstance(value, int) else value
    if len(found) != num:
        raise ValueError(
            f"{type(config).__name__}: {name}={value!r} has {len(found)} numbers, but there are {num} stages "
            "in block_out_channels."
        )
    return found


def check_stages(config: Any, allowed: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses, by `ValueError`, kinds of stages that are not known, too few or too many of them, and channels
    that do not divide into the groups of a norm."""
    num = len(config.block_out_channels)
    for entry, kinds in allowed.items():
        found = getattr(config, entry)
        unknown = [kind for kind in found if kind not in kinds]
        if unknown or len(found) != num:
            raise ValueError(
                f"{type(config).__name__}: {entry}={list(found)}, but it must be {num} (as in "
                f"block_out_channels) of {', '.join(kinds)}."
            )
    for channels in config.block_out_channels:
        if channels % config.norm_num_groups:
            raise ValueError(
                f"{type(config).__name__}: {channels} of block_out_channels is not a multiple of "
                f"norm_num_groups={config.norm_num_groups}."
            )
