"""Captions of pictures: of two handwritten digits and their arrangement, or of COCO's
photographs.

    python examples/image_to_text/main.py  # a small new ViT, read by a small new GPT-2
    python examples/image_to_text/main.py --model vit-gpt2-image-captioning --data \\
        coco --devices 0 --tensor 1

`--model` is a directory with such a pair of models, its tokenizer and
`preprocessor_config.json`. `--data` is a directory with COCO's
`annotations/captions_train2017.json` and the images in `train2017`, and the same for
`val2017`. A beam search writes the captions. The program prints their BLEU, the share
that is right word for word, and the same scores of the most frequent caption.
"""

import collections
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import PIL.Image
import sacrebleu
from sklearn.datasets import load_digits
from transformers import AutoTokenizer, GPT2Tokenizer

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common

WORDS = (
    "a zero",
    "a one",
    "a two",
    "a three",
    "a four",
    "a five",
    "a six",
    "a seven",
    "an eight",
    "a nine",
)
# Where the second digit is, seen from the first, by the rows and columns between them.
RELATIONS = {
    (0, 1): "left of",
    (1, 0): "above",
    (1, 1): "above and left of",
    (1, -1): "above and right of",
}

# --------------------------------------------------------------------------- the three
# functions


def collate_fn(
    examples: Sequence[Any], *, tokenizer: Any, processor: Any, length: int
) -> dict[str, Any]:
    """Collate the images for the model, a caption of each as tokens, and a mask that
    excludes padding."""
    images = [
        x["image"] if isinstance(x["image"], np.ndarray) else PIL.Image.open(x["image"])
        for x in examples
    ]
    texts = [x["captions"][0] + tokenizer.eos_token for x in examples]
    options = {"truncation": True, "padding": "max_length", "return_tensors": "np"}
    found = tokenizer(texts, max_length=length, **options)
    return {
        "images": processor(images),
        "caption": found["input_ids"],
        "mask": found["attention_mask"],
    }


def loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
    """Return the cross-entropy of the tokens of the captions."""
    config, caption = model.config, batch["caption"]
    inputs = models.shift_right(
        caption, config.decoder_start_token_id, pad=config.pad_token_id
    )
    hidden = model.hidden_states(batch["images"], inputs, key=key)
    return rx.layers.cross_entropy(hidden, model.head, caption, weights=batch["mask"])


def predict_fn(model: Any, batch: Any, key: Any, *, num_beams: int) -> Any:
    """Return, for each image, the best caption of a beam search, as tokens."""
    options = {"max_new_tokens": batch["caption"].shape[1], "num_beams": num_beams}
    return models.beam_search(model, batch["images"], **options).tokens[:, 0]


def output_fn(example: Any, tokens: Any, *, tokenizer: Any) -> str:
    """Return a caption as text."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


def metric_fn(examples: Sequence[Any], captions: Sequence[str]) -> dict[str, float]:
    """Return the share of captions that equal one written by people, and BLEU (Papineni
    et al. 2002)."""
    exact = np.mean(
        [caption in x["captions"] for x, caption in zip(examples, captions)]
    )
    references = [*itertools.zip_longest(*(x["captions"] for x in examples))]
    return {
        "exact": float(exact),
        "bleu": sacrebleu.corpus_bleu(captions, references).score,
    }


# --------------------------------------------------------------------------------------
# the data


def compose(num: int, held_out: int) -> tuple[list[Any], list[Any]]:
    """Compose pictures of two of scikit-learn's digits, in different quarters, and
    their captions.

    The caption names the upper or left one first. The held-out pictures show only the
    last fifth of the digits, which are mostly by other writers.
    """
    data: Any = load_digits()
    random, examples = np.random.default_rng(0), []
    for i in range(num + held_out):
        image, words = np.zeros((20, 20, 3), np.uint8), []
        quarters = [
            divmod(int(x), 2) for x in sorted(random.choice(4, 2, replace=False))
        ]
        for row, column in quarters:
            which = (
                random.integers(1437)
                if i < num
                else random.integers(1437, len(data.target))
            )
            top, left = random.integers(3, size=2) + (10 * row, 10 * column)
            image[top : top + 8, left : left + 8] = (
                255 / 16 * data.images[which][..., None]
            )
            words.append(WORDS[data.target[which]])
        relation = RELATIONS[tuple(np.subtract(quarters[1], quarters[0]).tolist())]
        examples.append(
            {"image": image, "captions": [f"{words[0]} {relation} {words[1]}"]}
        )
    return examples[:num], examples[num:]


def coco(directory: str, split: str) -> list[Any]:
    """Return the file of each image, and the captions that people wrote for it."""
    file = pathlib.Path(directory, "annotations", f"captions_{split}.json")
    try:
        raw = json.loads(file.read_text("utf-8"))
        names, captions = (
            {x["id"]: x["file_name"] for x in raw["images"]},
            collections.defaultdict(list),
        )
        for x in raw["annotations"]:
            captions[names[x["image_id"]]].append(x["caption"].strip())
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not in COCO's form: {error!r}") from None
    return [
        {"image": str(pathlib.Path(directory, split, name)), "captions": c}
        for name, c in captions.items()
    ]


# -----------------------------------------------------------------------------------
# the program


def load_or_make(args: Any, mesh: Any, train: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Load the model, tokenizer and image processor from a directory, or make new
    ones."""
    if args.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        processor = models.load_image_processor(args.model)
        return (
            models.load_pretrained(args.model, mesh, stacked=True, remat="full"),
            tokenizer,
            processor,
        )
    tokenizer = GPT2Tokenizer(pad_token="<pad>").train_new_from_iterator(
        (x["captions"][0] for x in train), 512
    )
    processor = models.ImageProcessor(size=None)
    size: Any = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    encoder = models.ViTConfig(
        **size, image_size=20, patch_size=10, initializer_range=0.06
    )
    size = {
        "n_positions": 2 * args.length,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 128,
    }
    tokens = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    decoder = models.GPT2Config(
        vocab_size=len(tokenizer), **tokens, **size, initializer_range=0.06
    )
    config = models.VisionEncoderDecoderConfig(encoder=encoder, decoder=decoder)
    make, key = (
        partial(models.VisionEncoderDecoderModel, config),
        jax.random.key(args.seed),
    )
    first = train[: args.batch_size]
    batch = collate_fn(
        first, tokenizer=tokenizer, processor=processor, length=args.length
    )
    model = rx.init_model(
        lambda key: make(key=key), mesh, key=key, loss_fn=loss_fn, batch=batch
    )
    return model, tokenizer, processor


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return the scores of the captions after each epoch, and those of the most
    frequent caption."""
    parser = common.flags(__doc__, batch_size=32, epochs=5)
    parser.add_argument(
        "--model", help="directory of a checkpoint; by default, a new model"
    )
    parser.add_argument("--data", help="directory in COCO's format, instead of digits")
    parser.add_argument(
        "--length", type=int, default=16, help="tokens per caption (16)"
    )
    parser.add_argument("--beams", type=int, default=4, help="number of beams (4)")
    parser.add_argument(
        "--rate", type=float, help="learning rate (checkpoint: 2e-5, new model: 3e-3)"
    )
    args, mesh = common.start(parser, argv)
    if args.data:
        train, held_out = coco(args.data, "train2017"), coco(args.data, "val2017")
        train = [
            {**x, "captions": [caption]} for x in train for caption in x["captions"]
        ]
    else:
        train, held_out = compose(1600 if args.quick else 12000, 400)
    [(frequent, _)] = collections.Counter(x["captions"][0] for x in train).most_common(
        1
    )
    baseline = metric_fn(held_out, [frequent] * len(held_out))

    model, tokenizer, processor = load_or_make(args, mesh, train)
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=args.epochs
    )
    rate = args.rate or (2e-5 if args.model else 3e-3)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, num_steps // 10, num_steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )
    collate = partial(
        collate_fn, tokenizer=tokenizer, processor=processor, length=args.length
    )
    functions: Any = {
        "collate_fn": collate,
        "loss_fn": loss_fn,
        "batch_size": args.batch_size,
    }
    evaluation = rx.Evaluation(
        rx.Data(held_out, num_workers=4),
        predict_fn=partial(predict_fn, num_beams=args.beams),
        output_fn=partial(output_fn, tokenizer=tokenizer),
        metric_fn=metric_fn,
        predictions_directory=args.output,
        **functions,
    )
    state, history = rx.fit(
        rx.init_state(model, optimizer, key=jax.random.key(args.seed + 1)),
        rx.Data(train, num_workers=4),
        **functions,
        optimizer=optimizer,
        num_epochs=args.epochs,
        evaluation=evaluation,
        checkpoints=args.checkpoints
        and rx.Checkpoints(args.checkpoints, keep_best={"eval/bleu": "max"}),
    )
    if args.output:
        models.save_pretrained(state.model, args.output)
        tokenizer.save_pretrained(args.output)
    results = {}
    for name, score in {"exact match": "exact", "BLEU": "bleu"}.items():
        reached = history[f"eval/{score}"]
        results[name] = reached, baseline[score]
        print(f"{name}: {reached[-1]:.3f}, and {baseline[score]:.3f} by {frequent!r}")
    return results


if __name__ == "__main__":
    common.run(main)
