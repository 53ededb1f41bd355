"""The `config.json` of a part of a pipeline of diffusers."""

import dataclasses
from typing import ClassVar

from redco_eqx.models._blocks.config import BaseConfig, Json

VERSION = "0.35.0"
"""The version of diffusers whose format is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusersConfig(BaseConfig):
    """The configuration that all parts share: the name of their class is `_class_name` in the file, not
    `model_type`.

    In `only`, a family lists all options of diffusers' class that it does not support and that would change
    numbers.
    """

    type_entry: ClassVar[str] = "_class_name"
    weights: ClassVar[str] = "diffusion_pytorch_model"

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`."""
        return {"_diffusers_version": VERSION, **super().to_json()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagesConfig(DiffusersConfig):
    """A model in stages, one per size of image.

    - `block_out_channels`: the channels of each stage, from the largest images to the smallest.
    - `norm_num_groups`: the number of groups of every norm.
    """

    block_out_channels: tuple[int, ...]
    norm_num_groups: int = 32

    @property
    def num_layers(self) -> int:
        """Number of stages."""
        return len(self.block_out_channels)

    def per_stage(self, name: str) -> tuple[int, ...]:
        """Return an entry as one number per stage. The file has one number for all stages or one for each.

        Raises `ValueError` if there is not one number per stage.
        """
        value = getattr(self, name)
        found = (value,) * self.num_layers if isinstance(value, int) else value
        if len(found) != self.num_layers:
            raise ValueError(
                f"{type(self).__name__}: {name}={value!r} has {len(found)} numbers, but there are "
                f"{self.num_layers} stages in block_out_channels."
            )
        return found

    def check_stages(self, **allowed: tuple[str, ...]) -> None:
        """Raise `ValueError` for kinds of stages that are not `allowed`, a wrong number of them, or channels
        that do not divide into the groups of a norm.
        """
        for entry, kinds in allowed.items():
            found = getattr(self, entry)
            if len(found) != self.num_layers or not set(found) <= set(kinds):
                raise ValueError(
                    f"{type(self).__name__}: {entry}={list(found)}, but it must be {self.num_layers} (as in "
                    f"block_out_channels) of {', '.join(kinds)}."
                )
        for channels in self.block_out_channels:
            if channels % self.norm_num_groups:
                raise ValueError(
                    f"{type(self).__name__}: {channels} of block_out_channels is not a multiple of "
                    f"norm_num_groups={self.norm_num_groups}."
                )
