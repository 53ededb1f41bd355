"""Image to text: it learns more than the commonest caption, also a model from a
directory on COCO's form."""

import json

import numpy as np
import PIL.Image
import PIL.ImageStat
import pytest
from image_to_text import main as example

import redco_eqx as rx

COLOURS = {"red": (200, 30, 20), "green": (20, 180, 40), "blue": (10, 30, 220)}
TINY = ["--quick", "--beams", "2", "--batch-size", "16"]


def write_coco(directory, split, num, seed):
    """Photographs of one colour, some of them upright, with captions of four words or
    more, as BLEU needs."""
    random = np.random.default_rng(seed)
    images = []
    annotations = []
    (directory / split).mkdir(parents=True)
    for i in range(num):
        name = random.choice([*COLOURS])
        height, width = random.integers(20, 60, 2)
        pixels = COLOURS[name] + random.integers(-10, 11, (height, width, 3))
        images.append(
            {
                "id": 100 + i,
                "file_name": f"{i:012}.png",
                "height": int(height),
                "width": int(width),
            }
        )
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(
            directory / split / images[-1]["file_name"]
        )
        for j, caption in enumerate(
            (f"a one of {name} ", f"a one of {name} left")[: 1 + i % 2]
        ):
            annotations.append(
                {"image_id": 100 + i, "id": 10 * i + j, "caption": caption}
            )
    (directory / "annotations").mkdir(exist_ok=True)
    content = {"info": {}, "licenses": [], "images": images, "annotations": annotations}
    (directory / "annotations" / f"captions_{split}.json").write_text(
        json.dumps(content)
    )


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    directory = tmp_path_factory.mktemp("coco")
    write_coco(directory, "train2017", 64, 0)
    write_coco(directory, "val2017", 16, 1)
    return directory


@pytest.mark.long
def test_it_learns_more_than_the_commonest_caption_then_from_files_in_cocos_form(
    coco, tmp_path
):
    flags = [
        "--output",
        str(tmp_path),
        "--checkpoints",
        str(tmp_path / "checkpoints"),
        "--epochs",
        "4",
    ]
    scores, baseline = example.main([*TINY, *flags])["BLEU"]
    assert len(scores) == 4
    assert scores[-1] > baseline + 5, (
        "after 400 steps it knows how digits lie, and not yet which they are"
    )
    assert len((tmp_path / "step-400.jsonl").read_text().splitlines()) == 400
    best = 100 * (1 + int(np.argmax(scores)))
    assert best in {info.step for info in rx.list_checkpoints(tmp_path / "checkpoints")}

    size = {
        "size": {"height": 20, "width": 20},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    flags = ["--model", str(tmp_path), "--data", str(coco)]
    flags += ["--rate", "3e-3", "--epochs", "15", "--fsdp", "2"]
    results = example.main([*TINY, *flags])
    scores, commonest = results["exact match"]
    assert 0.1 < commonest < 0.6
    assert scores[-1] > commonest + 0.2
    assert results["BLEU"][0][-1] > results["BLEU"][1]


def test_images_and_captions_are_those_of_the_annotations(coco):
    found = example.coco(str(coco), "val2017")
    raw = json.loads((coco / "annotations" / "captions_val2017.json").read_text())
    assert len(found) == len(raw["images"])
    assert sum(len(x["captions"]) for x in found) == len(raw["annotations"])
    for x in found:
        (colour,) = {caption.split()[3] for caption in x["captions"]}
        assert PIL.ImageStat.Stat(PIL.Image.open(x["image"])).mean == pytest.approx(
            COLOURS[colour], abs=3
        )


@pytest.mark.parametrize(
    "content", ["[", "[]", '{"images": [{"id": 1}], "annotations": []}']
)
def test_annotations_in_another_form_are_named(tmp_path, content):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "captions_train2017.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"captions_train2017.json: not in COCO's form"
    ):
        example.coco(str(tmp_path), "train2017")


def test_pictures_are_what_their_captions_say():
    train, held_out = example.compose(200, 20)
    assert (len(train), len(held_out)) == (200, 20)
    for x in train:
        assert x["image"].shape == (20, 20, 3)
        quarters = x["image"].reshape(2, 10, 2, 10, 3).any(axis=(1, 3, 4))
        rows, columns = np.nonzero(quarters)
        (caption,) = x["captions"]
        assert len(rows) == 2
        assert ("above" in caption) == (rows[0] != rows[1])
        assert ("left of" in caption) == (columns[0] < columns[1])
        assert ("right of" in caption) == (columns[0] > columns[1])
    again, _ = example.compose(200, 0)
    assert all((x["image"] == y["image"]).all() for x, y in zip(train, again))


def test_a_caption_may_be_any_of_those_that_people_gave():
    examples = [
        {"captions": ["a cat sat on it", "one cat sits on that"]},
        {"captions": ["a dog ran to me"]},
    ]
    right = example.metric_fn(examples, ["one cat sits on that", "a dog ran to me"])
    assert right == {"exact": 1.0, "bleu": pytest.approx(100)}
    half = example.metric_fn(examples, ["a cat sat on it", "the end of all things"])
    assert half["exact"] == 0.5
    assert half["bleu"] < 60
