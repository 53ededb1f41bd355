"""A model of images whose stages differ, so that no layers can be stacked."""

from typing import Unpack

from jaxtyping import Array

from redco_eqx.models._blocks.model import Model, Options
from redco_eqx.models._diffusion.config import DiffusersConfig


class ImageModel(Model):
    """A model that `load_pretrained` makes of one folder of a pipeline of diffusers, and `save_pretrained`
    writes.
    """

    def __init__(self, config: DiffusersConfig, *, stacked: bool, **options: Unpack[Options]):
        name = type(self).__name__
        if stacked:
            raise ValueError(f"{name}: stacked=True, but its stages differ. Leave it out.")
        if options.get("sequence_parallel"):
            raise ValueError(f"{name}: sequence_parallel=True, but images have no sequence. Leave it out.")
        super().__init__(config, **options)


def check_image(name: str, x: Array, num_channels: int, multiple: int = 1) -> None:
    """Raise `ValueError` unless `x` is images of `num_channels` channels, with height and width multiples of
    `multiple`.
    """
    if x.ndim != 4 or x.shape[1] != num_channels:
        raise ValueError(
            f"{name} has shape {x.shape}, but it must be (batch, channels, height, width) with {num_channels} "
            "channels."
        )
    if x.shape[2] % multiple or x.shape[3] % multiple:
        raise ValueError(f"{name} has shape {x.shape}, but height and width must be multiples of {multiple}.")
