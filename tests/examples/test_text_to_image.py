"""Images from texts: captions become words, digits are learnt, and a directory of
theirs is fine-tuned."""

import json

import numpy as np
import PIL.Image
import pytest
from text_to_image import main as example

import redco_eqx_models as models


def test_a_caption_is_a_token_for_each_word():
    tokenizer = example.make_tokenizer()
    for caption in example.CAPTIONS:
        for word in example.WORDS:
            text = caption.format(word)
            tokens = tokenizer(text, padding="max_length", truncation=True)["input_ids"]
            assert tokens[0] == len(tokenizer) - 2
            ends = len(text.split()) + 1
            assert tokens[ends:] == [len(tokenizer) - 1] * (example.LENGTH - ends)
            assert (
                str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() == text
            )
    assert len({tuple(tokenizer(word)["input_ids"]) for word in example.WORDS}) == 10


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return the output of a short run: a directory, its picture, and its results."""
    directory = tmp_path_factory.mktemp("digits")
    picture = directory / "samples.png"
    flags = ["--quick", "--tensor", "1", "--steps", "5", "--picture", str(picture)]
    return directory, picture, example.main([*flags, "--output", str(directory)])


@pytest.mark.long
def test_a_short_run_says_how_many_digits_are_right_and_shows_them(digits):
    """Too short a run to draw them: what is learnt, `run_all.py` holds."""
    _, picture, results = digits
    accuracies, known = results["digits"]
    assert len(accuracies) == 5
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert known > 0.9, "real digits, by the machine that judges"
    assert PIL.Image.open(picture).size == (400, 160)


@pytest.mark.long
def test_a_directory_is_fine_tuned_on_a_folder_of_pictures(digits, tmp_path, capsys):
    directory, _, _ = digits
    index = json.loads((directory / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "CLIPTokenizer"]
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(4):  # a thing that no digit is like, larger than the model's images
        pixels = np.zeros((20, 30, 3), np.uint8)
        pixels[:, :, i % 3] = 255
        PIL.Image.fromarray(pixels).save(folder / f"{i}.png")
    flags = ["--model", str(directory), "--data", str(folder)]
    flags += ["--prompt", "the number", "--class-prompt", "a", "--class-images", "8"]
    flags += ["--batch-size", "8", "--epochs", "20", "--rate", "1e-3", "--steps", "2"]
    flags += ["--sample", "the number", "a three"]
    flags += ["--picture", str(tmp_path / "samples.png"), "--tensor", "1"]
    results = example.main([*flags, "--output", str(tmp_path / "tuned")])
    after, before = results["loss"]
    assert after < 0.9 * before
    assert PIL.Image.open(tmp_path / "samples.png").size == (10, 20)
    assert "loss: " in capsys.readouterr().out
    assert models.load_stable_diffusion(tmp_path / "tuned").unet.config.sample_size == 4
