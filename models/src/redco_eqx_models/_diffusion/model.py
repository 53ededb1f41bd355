"""A part of a pipeline of diffusers: its `config.json`, and the model, whose stages
differ."""

import dataclasses
from typing import Unpack

from jaxtyping import Array

from redco_eqx_models._blocks.config import BaseConfig, Json
from redco_eqx_models._blocks.model import Model, Options

VERSION = "0.35.0"
"""The version of diffusers whose format is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagesConfig(BaseConfig):
    """The configuration of a model in stages, one for each size of image. In files, the
    name of its class is `_class_name`, not `model_type`.

    In `only`, a family lists all options of diffusers' class that it does not support
    and that would change numbers.

    - `block_out_channels`: the channels of each stage, from the largest images to the
        smallest.
    - `norm_num_groups`: the number of groups of every norm.
    """

    type_entry = "_class_name"
    weights = "diffusion_pytorch_model"

    block_out_channels: tuple[int, ...]
    norm_num_groups: int = 32

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`."""
        return {"_diffusers_version": VERSION, **super().to_json()}

    @property
    def num_layers(self) -> int:
        """Number of stages."""
        return len(self.block_out_channels)

    def per_stage(self, name: str) -> tuple[int, ...]:
        """Return an entry as one number per stage. The file has one number for all
        stages or one for each.

        Raises `ValueError` if there is not one number per stage.
        """
        value = getattr(self, name)
        num_stages = self.num_layers
        found = value
        if isinstance(value, int):
            found = (value,) * num_stages
        if len(found) != num_stages:
            raise self.error(
                f"{name}={value!r} has {len(found)} numbers, but there are "
                f"{num_stages} stages."
            )
        return found

    def check_stages(self, **allowed: tuple[str, ...]) -> None:
        """Raise `ValueError` for kinds of stages that are not `allowed`, a wrong number
        of them, or channels that do not divide into the groups of a norm.
        """
        for entry, kinds in allowed.items():
            found = getattr(self, entry)
            if len(found) != self.num_layers or not set(found) <= set(kinds):
                expected = (
                    f"{self.num_layers} (as in block_out_channels) of "
                    f"{', '.join(kinds)}"
                )
                raise self.error(f"{entry}={list(found)}, but it must be {expected}.")
        for channels in self.block_out_channels:
            if channels % self.norm_num_groups:
                groups = f"norm_num_groups={self.norm_num_groups}"
                raise self.error(
                    f"{channels} of block_out_channels is not a multiple of {groups}."
                )


class ImageModel(Model):
    """A model that `load_pretrained` makes of one folder of a pipeline of diffusers,
    and `save_pretrained` writes.
    """

    def __init__(
        self, config: StagesConfig, *, stacked: bool, **options: Unpack[Options]
    ):
        name = type(self).__name__
        if stacked:
            raise ValueError(
                f"{name}: stacked=True, but its stages differ. Leave it out."
            )
        if options.get("sequence_parallel"):
            raise ValueError(
                f"{name}: sequence_parallel=True, but images have no sequence. Leave "
                "it out."
            )
        super().__init__(config, **options)


def check_image(name: str, x: Array, num_channels: int, multiple: int = 1) -> None:
    """Raise `ValueError` unless `x` is images of `num_channels` channels, with height
    and width multiples of `multiple`.
    """
    if x.ndim != 4 or x.shape[1] != num_channels:
        raise ValueError(
            f"{name} has shape {x.shape}, but it must be (batch, channels, height, "
            f"width) with {num_channels} channels."
        )
    if x.shape[2] % multiple or x.shape[3] % multiple:
        raise ValueError(
            f"{name} has shape {x.shape}, but height and width must be multiples of "
            f"{multiple}."
        )
