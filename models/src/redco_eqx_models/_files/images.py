"""Prepare images for a vision model, as the `preprocessor_config.json` beside its
weights says."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from jaxtyping import Float

from redco_eqx_models._blocks.config import Json
from redco_eqx_models._files.directory import local_directory, read_json

PREPROCESSOR = "preprocessor_config.json"

KINDS: dict[str, dict[str, Json]] = {
    "ViT": {},
    "DeiT": {"size": 256, "resample": 3, "do_center_crop": True},
    "CLIP": {
        "size": {"shortest_edge": 224},
        "resample": 3,
        "do_center_crop": True,
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
    },
}
"""The types of processors that do these steps, and the values of entries that a file
leaves out."""

MAX_SIDE = 4096
"""The limit on the size of resized images: at most the square of this in pixels, some
200 MB an image."""

Image: TypeAlias = Any
"""A `PIL.Image.Image`, or an array uint8 `(height, width, 3)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Resizes, crops, scales and normalises images, in this order. Each step runs only
    if its field is set.

    - `size`: `(height, width)`; or one number for the shorter side, with the shape
        kept.
    - `resample`: Pillow's number of a filter; 2 is bilinear, 3 bicubic.
    - `crop`: `(height, width)` around the centre.
    - `scale`: the factor on the numbers from 0 to 255.
    - `mean`, `std`: the mean and standard deviation of each channel, after `scale`.
    """

    size: tuple[int, int] | int | None = (224, 224)
    resample: int = 2
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    std: tuple[float, ...] | None = (0.5, 0.5, 0.5)

    def __call__(self, images: Sequence[Image]) -> Float[np.ndarray, "b c h w"]:
        """Return the images as one float32 array. Greyscale images are converted to
        colour.

        Raises `ValueError` for an array of a different kind, an image whose resized
        form would have more than 2**24 pixels (one of 1 x 10000 to a shorter side of
        224), a crop larger than an image, or images that end up with different sizes;
        `ImportError` without the package Pillow.
        """
        found = [self._one(image) for image in images]
        shapes = sorted({x.shape for x in found})
        if len(shapes) != 1:
            raise ValueError(
                f"ImageProcessor: {len(found)} images come out as {shapes}, but a "
                "batch has one shape. Give a size (height, width)."
            )
        return np.stack(found)

    def _one(self, image: Image) -> Float[np.ndarray, "c h w"]:
        try:
            import PIL.Image
        except ImportError as error:
            raise ImportError(
                "Images need Pillow. Install it with: pip install "
                '"redco_eqx_models[pillow]"'
            ) from error
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise ValueError(
                    f"ImageProcessor: an image is {image.dtype}{list(image.shape)}, "
                    "but an array must be uint8 (height, width, 3)."
                )
            image = PIL.Image.fromarray(image)
        image = image.convert("RGB")
        if self.size is not None:
            height, width = _target(self.size, image.height, image.width)
            if height * width > MAX_SIDE**2:
                raise ValueError(
                    f"ImageProcessor: size={self.size} resizes an image of "
                    f"{image.height} x {image.width} to {height} x {width}, but the "
                    f"limit is {MAX_SIDE**2} pixels. Crop it, or leave it out."
                )
            image = image.resize((width, height), resample=self.resample)
        x = np.asarray(image)
        if self.crop is not None:
            x = _crop(x, *self.crop)
        x = x.astype(np.float32)
        if self.scale is not None:
            x = x * np.float32(self.scale)
        if self.mean is not None and self.std is not None:
            mean = np.asarray(self.mean, np.float32)
            std = np.asarray(self.std, np.float32)
            x = (x - mean) / std
        # Pillow has the channels last, and torch's models have them first.
        return np.moveaxis(x, -1, 0)


def load_image_processor(directory: str | os.PathLike[str]) -> ImageProcessor:
    """Read the image processor from `preprocessor_config.json` in a directory.

    Raises `FileNotFoundError` if the file does not exist, `ValueError` for an entry
    that is not supported, or of a wrong type or range, or for a directory that is an
    address (`gs://bucket`).
    """
    file = local_directory("load_image_processor", directory) / PREPROCESSOR
    if not file.is_file():
        raise FileNotFoundError(
            f"load_image_processor: {file} is missing. It says how to prepare images."
        )
    raw = read_json(file)
    try:
        return _read(raw)
    except ValueError as error:
        raise ValueError(f"load_image_processor: {file}: {error}") from error


def _read(raw: Mapping[str, Json]) -> ImageProcessor:
    # Image processors were called feature extractors in old versions of transformers.
    name = (
        raw.get("image_processor_type")
        or raw.get("feature_extractor_type")
        or "ViTImageProcessor"
    )
    kind = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", str(name))
    if kind not in KINDS:
        raise ValueError(
            f"image_processor_type={name!r} is not known, only {', '.join(KINDS)}. "
            "Make an ImageProcessor."
        )
    raw = {**KINDS[kind], **raw}
    # A number is the shorter side in old files of CLIP, and a square in the other two.
    if kind == "CLIP" and type(raw["size"]) is int:
        raw["size"] = {"shortest_edge": raw["size"]}
    for name in ("do_pad", "do_reduce_labels", "do_flip_channel_order"):
        if raw.get(name):
            raise ValueError(
                f"{name}={raw[name]!r} is not supported. Images would be prepared "
                "wrongly."
            )
    steps = ("do_resize", "do_rescale", "do_normalize")
    does = {name: raw.get(name, True) for name in steps}
    does["do_center_crop"] = raw.get("do_center_crop") or False
    for name, x in does.items():
        if not isinstance(x, bool):
            raise ValueError(f"{name}={x!r}, but it must be true or false.")
    given = {name: x for name, x in raw.items() if x is not None}
    resample = given.get("resample", 2)
    factor = given.get("rescale_factor", 1 / 255)
    if type(resample) is not int or not 0 <= resample <= 5:
        raise ValueError(
            f"resample={resample!r}, but it must be a filter of Pillow, from 0 to 5."
        )
    if not _is_number(factor) or factor <= 0:
        raise ValueError(
            f"rescale_factor={factor!r}, but it must be a positive number."
        )
    size = crop = mean = std = None
    if does["do_resize"]:
        size = _size("size", given.get("size", 224))
    if does["do_center_crop"]:
        crop = _size("crop_size", given.get("crop_size", 224))
        if isinstance(crop, int):
            crop = (crop, crop)
    if does["do_normalize"]:
        mean = _channels("image_mean", given.get("image_mean", [0.5] * 3))
        std = _channels("image_std", given.get("image_std", [0.5] * 3))
    return ImageProcessor(
        size=size,
        resample=resample,
        crop=crop,
        scale=factor if does["do_rescale"] else None,
        mean=mean,
        std=std,
    )


def _size(name: str, value: Json) -> tuple[int, int] | int:
    size: Any = (value, value)
    if isinstance(value, dict) and set(value) == {"height", "width"}:
        size = value["height"], value["width"]
    elif isinstance(value, dict) and set(value) == {"shortest_edge"} and name == "size":
        size = value["shortest_edge"]
    elif isinstance(value, dict):
        raise ValueError(
            f"{name}={value!r} is not supported, only a number, or an object of height "
            "and width."
        )
    sides = size if isinstance(size, tuple) else (size,)
    if not all(type(x) is int and 0 < x <= MAX_SIDE for x in sides):
        raise ValueError(
            f"{name}={value!r}, but it must be of integers from 1 to {MAX_SIDE}."
        )
    return size


def _channels(name: str, value: Json) -> tuple[float, ...]:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(map(_is_number, value))
    ):
        raise ValueError(f"{name}={value!r}, but it must be three numbers.")
    if name == "image_std" and not all(np.float32(x) > 0 for x in value):
        raise ValueError(f"{name}={value!r}, but it must be three positive numbers.")
    return tuple(float(x) for x in value)


def _is_number(x: Json) -> TypeGuard[int | float]:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e9


def _target(size: tuple[int, int] | int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width of a resized image."""
    if isinstance(size, tuple):
        return size
    # The longer side is rounded down, as by `get_resize_output_image_size` of
    # transformers' `image_transforms`.
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def _crop(x: np.ndarray, height: int, width: int) -> np.ndarray:
    if height > x.shape[0] or width > x.shape[1]:
        raise ValueError(
            f"ImageProcessor: an image of {x.shape[0]} x {x.shape[1]} is smaller than "
            f"the crop, {height} x {width}."
        )
    # With an odd number of rows to cut, one more goes below, as in transformers.
    top = math.floor((x.shape[0] - height) / 2)
    left = math.floor((x.shape[1] - width) / 2)
    return x[top : top + height, left : left + width]
