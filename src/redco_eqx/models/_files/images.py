"""Images as a vision model reads them, by the `preprocessor_config.json` beside its weights."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._files.directory import read_json

PREPROCESSOR = "preprocessor_config.json"

Image: TypeAlias = Any
"""A `PIL.Image.Image`, or an array uint8 `(height, width, 3)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Resizes, crops, scales and normalises images, in this order, each where it is given.

    - `size`: `(height, width)`; or one number, which the shorter side gets, the shape kept.
    - `resample`: as Pillow numbers its filters; 2 is bilinear, 3 bicubic.
    - `crop`: `(height, width)` around the centre.
    - `scale`: what the numbers from 0 to 255 are multiplied by.
    - `mean`, `std`: of each channel, after `scale`.
    """

    size: tuple[int, int] | int | None = (224, 224)
    resample: int = 2
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    std: tuple[float, ...] | None = (0.5, 0.5, 0.5)

    def __call__(self, images: Sequence[Image]) -> Float[np.ndarray, "b c h w"]:
        """The images as one float32 array; those that are not in colour become so.

        Raises `ValueError` for an array of another kind, a crop larger than an image, or images that end up of
        different sizes; `ImportError` without the package Pillow.
        """
        found = [self._one(image) for image in images]
        shapes = sorted({x.shape for x in found})
        if len(shapes) != 1:
            raise ValueError(
                f"ImageProcessor: {len(found)} images come out as {shapes}, but a batch has one shape. Give a "
                "size (height, width)."
            )
        return np.stack(found)

    def _one(self, image: Image) -> Float[np.ndarray, "c h w"]:
        pillow = _pillow()
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise ValueError(
                    f"ImageProcessor: an image is {image.dtype}{list(image.shape)}, but an array must be uint8 "
                    "(height, width, 3)."
                )
            image = pillow.fromarray(image)
        image = image.convert("RGB")
        if self.size is not None:
            height, width = _target(self.size, image.height, image.width)
            image = image.resize((width, height), resample=self.resample)
        x = np.asarray(image)
        if self.crop is not None:
            x = _crop(x, *self.crop)
        x = x.astype(np.float32)
        if self.scale is not None:
            x = x * np.float32(self.scale)
        if self.mean is not None and self.std is not None:
            x = (x - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.moveaxis(x, -1, 0)


def load_image_processor(directory: str | os.PathLike[str]) -> ImageProcessor:
    """What `preprocessor_config.json` in a directory says.

    Raises `FileNotFoundError` if it is not there, `ValueError` for an entry that is not supported.
    """
    file = Path(directory) / PREPROCESSOR
    if not file.is_file():
        raise FileNotFoundError(
            f"load_image_processor: {file} is not there, which says how images are prepared."
        )
    raw = read_json(file)
    try:
        return _read(raw)
    except ValueError as error:
        raise ValueError(f"load_image_processor: {file}: {error}") from error


def _read(raw: Mapping[str, Json]) -> ImageProcessor:
    for name in ("do_pad", "do_reduce_labels", "do_flip_channel_order"):
        if raw.get(name):
            raise ValueError(f"{name}={raw[name]!r} is not supported. Images would be prepared wrongly.")
    default = ImageProcessor()
    normalises = bool(raw.get("do_normalize", True))
    resample: Any = raw.get("resample", default.resample)
    factor: Any = raw.get("rescale_factor", default.scale)
    crop = _size("crop_size", raw.get("crop_size", 224)) if raw.get("do_center_crop") else None
    if isinstance(crop, int):
        crop = (crop, crop)
    return ImageProcessor(
        size=_size("size", raw.get("size", 224)) if raw.get("do_resize", True) else None,
        resample=resample,
        crop=crop,
        scale=factor if raw.get("do_rescale", True) else None,
        mean=_channels("image_mean", raw.get("image_mean", [0.5] * 3)) if normalises else None,
        std=_channels("image_std", raw.get("image_std", [0.5] * 3)) if normalises else None,
    )


def _size(name: str, value: Json) -> tuple[int, int] | int:
    if isinstance(value, int):
        return (value, value)
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        return (value["height"], value["width"])
    if isinstance(value, Mapping) and set(value) == {"shortest_edge"} and name == "size":
        return value["shortest_edge"]
    raise ValueError(f"{name}={value!r} is not supported, only a number, or an object of height and width.")


def _channels(name: str, value: Json) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{name}={value!r}, but it must be three numbers.")
    return tuple(float(x) for x in value)


def _target(size: tuple[int, int] | int, height: int, width: int) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def _crop(x: np.ndarray, height: int, width: int) -> np.ndarray:
    if height > x.shape[0] or width > x.shape[1]:
        raise ValueError(
            f"ImageProcessor: an image of {x.shape[0]} x {x.shape[1]} is smaller than the crop, "
            f"{height} x {width}."
        )
    top, left = math.floor((x.shape[0] - height) / 2), math.floor((x.shape[1] - width) / 2)
    return x[top : top + height, left : left + width]


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError(
            'Preparing images needs Pillow. Install it by: pip install "redco_eqx[hf]"'
        ) from error
    return PIL.Image
