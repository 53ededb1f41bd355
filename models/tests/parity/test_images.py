"""Images are prepared as transformers prepares them, by the same file."""

import json

import numpy as np
import PIL.Image
import pytest
import transformers

from redco_eqx_models import load_image_processor

IMAGES = [
    np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)
    for i, shape in enumerate([(40, 60, 3), (33, 21, 3), (16, 16, 3)])
]
ROUNDING = (
    1e-5  # of float32: the rescaled mean is subtracted before the division, or after it
)


def load(path, entries):
    """Our processor by a file with these entries."""
    (path / "preprocessor_config.json").write_text(json.dumps(entries))
    return load_image_processor(path)


ODD = {
    "size": {"height": 20, "width": 30},
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}
FILES = [
    *((kind, {}) for kind in ("ViT", "DeiT", "CLIP")),
    ("ViT", {"do_rescale": False, "size": 16}),
    ("ViT", {**ODD, "resample": 3}),
    ("ViT", {"do_normalize": False, "rescale_factor": 0.01}),
    ("CLIP", {"size": 24, "crop_size": {"height": 16, "width": 20}}),
]


@pytest.mark.parametrize(("kind", "entries"), FILES)
def test_images_equal_those_of_transformers(kind, entries, tmp_path):
    ours = [
        load(tmp_path, {"image_processor_type": f"{kind}ImageProcessor", **entries})
    ]
    there = getattr(transformers, f"{kind}ImageProcessorPil").from_pretrained(tmp_path)
    there.save_pretrained(tmp_path)  # with all its entries
    ours.append(load_image_processor(tmp_path))
    images = [PIL.Image.fromarray(x) for x in IMAGES]
    expected = np.stack(
        [there(x, return_tensors="np")["pixel_values"][0] for x in images]
    )
    for processor, given in zip(ours, (images, IMAGES), strict=True):
        found = processor(given)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


REFUSED = [
    pytest.param(
        {"image_processor_type": "LevitImageProcessor"},
        "image_processor_type='Levit.*' is not.*ViT, DeiT, CLIP",
        id="image_processor_type-unknown",
    ),
    pytest.param(
        {"size": {"longest_edge": 9}},
        "size={'longest_edge': 9} is not supported",
        id="size-longest_edge",
    ),
    pytest.param({"do_pad": True}, "do_pad=True is not supported", id="do_pad-true"),
    *(
        pytest.param(
            {"image_mean": x},
            "image_mean=.*must be three numbers",
            id=f"image_mean-{len(x)}_numbers",
        )
        for x in ([0.5], [0.5, 0.5, float("nan")])
    ),
    pytest.param(
        {"image_std": [0.5, 0, 0.5]},
        "image_std=.*must be three positive numbers",
        id="image_std-zero",
    ),
    pytest.param(
        {"rescale_factor": "1/255"},
        "rescale_factor='1/255', but it must be a positive number",
        id="rescale_factor-str",
    ),
    pytest.param(
        {"resample": "bicubic"},
        "resample='bicubic', but it must be a filter of Pillow, from 0 to 5",
        id="resample-str",
    ),
    *(
        pytest.param(
            {"size": x},
            "size=.*, but it must be of integers from 1 to 4096",
            id=f"size-{type(x).__name__}",
        )
        for x in ({"height": 9, "width": 9.5}, True, [224, 224])
    ),
    pytest.param(
        {"do_center_crop": True, "crop_size": -1},
        "crop_size=-1, but it must be of integers",
        id="crop_size-negative",
    ),
]


def test_a_directory_without_the_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="preprocessor_config"):
        load_image_processor(tmp_path)


@pytest.mark.parametrize(("entries", "message"), REFUSED)
def test_files_that_are_not_supported_are_refused(entries, message, tmp_path):
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json: {message}"):
        load(tmp_path, entries)


def test_bad_images_are_refused(tmp_path):
    ours = load(tmp_path, {"size": {"shortest_edge": 224}})
    assert ours([np.zeros((1, 300, 3), np.uint8)]).shape == (1, 3, 224, 67200)
    with pytest.raises(
        ValueError, match="1 x 10000 to 224 x 2240000, but the limit is 16777216 pixels"
    ):
        ours([np.zeros((1, 10000, 3), np.uint8)])
    ours = load(tmp_path, {"do_resize": False})
    with pytest.raises(ValueError, match="a batch has one shape"):
        ours(IMAGES)
    with pytest.raises(ValueError, match="must be uint8"):
        ours([np.zeros((4, 4, 3))])
