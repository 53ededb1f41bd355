"""Images from texts: train latent diffusion on captioned digits, or fine-tune Stable
Diffusion.

    python examples/text_to_image/main.py  # digits, all networks from nothing
    python examples/text_to_image/main.py --model DIRECTORY --data FOLDER --prompt "a \\
        photo of sks dog" \\
        --class-prompt "a photo of a dog" --sample "sks dog on a beach" --batch-size \\
        8 --epochs 4

By default, the program trains an autoencoder on scikit-learn's digits. Then it trains a
UNet on the latents, together with a text encoder, on captions such as "a handwritten
three". A classifier that has seen only real digits judges whether an image shows the
digit in its caption. `--model` is a directory of Stable Diffusion 1 or 2 (or one that
this program wrote to `--output`). `--data` is a folder of pictures of one thing, which
the `--prompt` names, as in DreamBooth (Ruiz et al. 2023). The model's own pictures of a
`--class-prompt` keep it from forgetting other things of the same kind.
"""

import pathlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
from sklearn.svm import SVC
from transformers import CLIPTokenizer

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common
import digits_data

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CAPTIONS = [
    "{}",
    "a {}",
    "the number {}",
    "a handwritten {}",
    "a picture of the digit {}",
]
LENGTH = 8  # length of a caption of digits, in tokens

# --------------------------------------------------------------------------- a small
# model of digits


def make_tokenizer() -> CLIPTokenizer:
    """Make a tokenizer for captions, which merges each word letter by letter into one
    token."""
    vocabulary, merges = {}, {}
    for word in " ".join([*WORDS, *CAPTIONS]).replace("{}", "").split():
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for i in range(1, len(pieces)):
            merges[("".join(pieces[:i]), pieces[i])] = None
        vocabulary |= dict.fromkeys([*pieces, *map("".join, merges)])
    names = [*vocabulary, "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        {x: i for i, x in enumerate(names)}, list(merges), model_max_length=LENGTH
    )


def make_model(key: Any, *, num_tokens: int, size: int = 64) -> models.StableDiffusion:
    """Make a model like Stable Diffusion, with two stages instead of four. Latents are
    half as high and wide as images.
    """
    text_key, unet_key, vae_key = jax.random.split(key, 3)
    text = models.CLIPTextConfig(
        vocab_size=num_tokens,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=num_tokens - 2,
        eos_token_id=num_tokens - 1,
        pad_token_id=num_tokens - 1,
    )
    unet = models.UNet2DConditionConfig(
        sample_size=4,
        block_out_channels=(size, 2 * size),
        layers_per_block=1,
        norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=size,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )
    vae = models.AutoencoderKLConfig(
        sample_size=8,
        block_out_channels=(size // 2, size),
        norm_num_groups=16,
        scaling_factor=1.0,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return models.StableDiffusion(
        models.CLIPTextModel(text, key=text_key),
        models.UNet2DConditionModel(unet, key=unet_key),
        models.AutoencoderKL(vae, key=vae_key),
        models.DDIMScheduler(
            beta_schedule="squaredcos_cap_v2",
            steps_offset=1,
            clip_sample=False,
            prediction_type="v_prediction",
        ),
    )


# ------------------------------------------------------------------------------- the
# three functions


def collate_fn(
    examples: Sequence[tuple[Any, str, Any]],
    *,
    tokenizer: CLIPTokenizer,
    processor: models.ImageProcessor,
) -> dict[str, np.ndarray]:
    """Collate images, their texts, and the weight of each one's loss."""
    images, texts, weights = (list(x) for x in zip(*examples))
    fill: Any = {"padding": "max_length", "truncation": True, "return_tensors": "np"}
    empty, tokens = (
        tokenizer(x, **fill)["input_ids"].astype(np.int32)
        for x in ([""] * len(texts), texts)
    )
    return {
        "images": processor(images),
        "tokens": tokens,
        "empty": empty,
        "weight": np.array(weights, np.float32),
    }


def autoencoder_loss(model: models.StableDiffusion, batch: Any, key: Any) -> Any:
    """Return the squared error of decoded images, and the latents' distance from a
    normal distribution."""
    mean, log_variance = model.vae.encode(batch["images"])
    latents = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
    error = jnp.mean((model.vae.decode(latents) - batch["images"]) ** 2)
    divergence = jnp.mean(mean**2 + jnp.exp(log_variance) - 1 - log_variance) / 2
    return error + 3e-3 * divergence, {"error": error, "deviation": jnp.std(latents)}


def loss_fn(
    model: models.StableDiffusion, batch: Any, key: Any, *, empty_rate: float
) -> rx.Mean:
    """Return the error of the predicted noise. Drop the text of some examples, as
    guidance needs."""
    empty_key, noise_key = jax.random.split(key)
    is_empty = jax.random.bernoulli(empty_key, empty_rate, (len(batch["tokens"]), 1))
    tokens = jnp.where(is_empty, batch["empty"], batch["tokens"])
    losses = models.noise_losses(model, batch["images"], tokens, key=noise_key)
    return rx.Mean(jnp.sum(losses * batch["weight"]), jnp.float32(len(losses)))


def predict_fn(
    model: models.StableDiffusion, batch: Any, key: Any, **options: Any
) -> jax.Array:
    """Return images of the texts."""
    return models.sample_images(
        model, batch["tokens"], batch["empty"], key=key, **options
    )


def grid(
    images: Sequence[np.ndarray], file: str, *, num_columns: int, scale: int
) -> None:
    """Draw images side by side in rows, with a margin, and enlarge each `scale`
    times."""
    pixels = models.to_uint8(
        np.stack(images[: len(images) // num_columns * num_columns])
    )
    pixels = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=64)
    rows = [
        np.concatenate(list(row), axis=1)
        for row in pixels.reshape(-1, num_columns, *pixels.shape[1:])
    ]
    Image.fromarray(
        np.concatenate(rows).repeat(scale, axis=0).repeat(scale, axis=1)
    ).save(file)


# --------------------------------------------------------------------------------------
# the program


def read_folder(args: Any) -> list[tuple[Any, str, float]]:
    """Read the pictures in a folder, all with one text."""
    files, kinds = (
        sorted(pathlib.Path(args.data).glob("*")),
        Image.registered_extensions(),
    )
    examples = [
        (Image.open(x).convert("RGB"), args.prompt, 1.0)
        for x in files
        if x.suffix.lower() in kinds
    ]
    if not examples:
        raise ValueError(f"--data {args.data}: it contains no picture.")
    return examples


def tune(
    model: Any,
    examples: Any,
    args: Any,
    parts: Sequence[str],
    rate: float,
    num_epochs: int,
    **options: Any,
) -> tuple[rx.TrainState, rx.types.History]:
    """Train some parts of the model on these examples, with Adam and a falling learning
    rate."""
    num_steps = rx.num_train_steps(
        len(examples), batch_size=args.batch_size, num_epochs=num_epochs
    )
    schedule = optax.warmup_cosine_decay_schedule(0, rate, num_steps // 20, num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    trainable = models.parts_spec(model, *parts)
    return rx.fit(
        rx.init_state(
            model, optimizer, key=jax.random.key(args.seed + 1), trainable=trainable
        ),
        examples,
        optimizer=optimizer,
        num_epochs=num_epochs,
        checkpoints=args.checkpoints and args.checkpoints / "-".join(parts),
        **options,
    )


def learn_digits(args: Any, mesh: Any, predict: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model of digits and its tokenizer, and two shares: of images with the
    digit of their caption, and of real digits that the classifier knows.
    """
    train, held_out = (list(zip(*part)) for part in digits_data.digits())
    pixels = [np.reshape(images, (len(images), -1)) for images, _ in (train, held_out)]
    classifier = SVC(C=10).fit(pixels[0], train[1])
    known = classifier.score(pixels[1], held_out[1])
    draw, tokenizer = np.random.default_rng(args.seed), make_tokenizer()

    def example(pixels: np.ndarray, digit: int) -> tuple[Any, str, float]:
        return (
            Image.fromarray(np.uint8(255 * pixels)),
            draw.choice(CAPTIONS).format(WORDS[digit]),
            1.0,
        )

    examples = [example(x, y) for x, y in zip(*train)]
    by_digit = [[x for x, y in zip(*held_out) if y == digit] for digit in range(10)]
    orders = [
        example(by_digit[i % 10][i // 10], i % 10)
        for i in range(40 if args.quick else 200)
    ]
    collate = partial(
        collate_fn, tokenizer=tokenizer, processor=models.ImageProcessor(size=None)
    )
    make = partial(make_model, num_tokens=len(tokenizer))
    model = rx.init_model(make, mesh, key=jax.random.key(args.seed))

    def metric_fn(ordered: Any, images: Any) -> dict[str, float]:
        grid(images[:100], args.picture, num_columns=10, scale=4)
        grey = (
            models.to_uint8(np.stack(images)).mean(axis=-1).reshape(len(images), -1)
            / 255
        )
        digits = [WORDS.index(text.split()[-1]) for _, text, _ in ordered]
        return {"accuracy": classifier.score(grey, digits)}

    options: Any = {"collate_fn": collate, "batch_size": args.batch_size}
    num_epochs = 5 if args.quick else args.epochs
    state, _ = tune(
        model,
        examples,
        args,
        ["vae"],
        2e-3,
        -(-num_epochs // 2),
        loss_fn=autoencoder_loss,
        **options,
    )
    evaluation = rx.Evaluation(
        orders,
        every_steps=5 * num_epochs,
        batch_size=len(orders),
        collate_fn=collate,
        predict_fn=predict,
        metric_fn=metric_fn,
    )
    state, history = tune(
        state.model,
        examples,
        args,
        ["text_encoder", "unet"],
        1e-3,
        num_epochs,
        evaluation=evaluation,
        loss_fn=partial(loss_fn, empty_rate=0.1),
        **options,
    )
    return state.model, tokenizer, {"digits": (history["eval/accuracy"], known)}


def fine_tune(args: Any, mesh: Any, predict: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model and its tokenizer, and its loss on the pictures after training
    and before."""
    examples = read_folder(args)
    model = models.load_stable_diffusion(args.model, mesh)
    tokenizer = CLIPTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    size: Any = model.unet.config.sample_size
    size *= model.vae.config.downscale
    processor = models.ImageProcessor(size=size, crop=(size, size))
    options: Any = {
        "collate_fn": partial(collate_fn, tokenizer=tokenizer, processor=processor)
    }
    options["batch_size"] = args.batch_size
    loss = partial(loss_fn, empty_rate=0.0)

    def draw(state: rx.TrainState, texts: Sequence[str]) -> Any:
        asked = [(examples[0][0], text, 1.0) for text in texts]
        return rx.predict(state, asked, predict_fn=predict, **options)

    state, pictures = rx.init_state(model, key=jax.random.key(args.seed)), examples
    before = rx.evaluate(state, examples, loss_fn=loss, **options)["loss"]
    if args.class_prompt:  # the same number of both kinds
        own = models.to_uint8(
            np.stack(draw(state, [args.class_prompt] * args.class_images))
        )
        pictures = examples * -(-len(own) // len(examples))
        pictures += [
            (Image.fromarray(x), args.class_prompt, args.prior_weight) for x in own
        ]
    state, _ = tune(
        model, pictures, args, ["unet"], args.rate, args.epochs, loss_fn=loss, **options
    )
    after = rx.evaluate(state, examples, loss_fn=loss, **options)["loss"]
    grid(
        draw(state, args.sample or [args.prompt]), args.picture, num_columns=1, scale=1
    )
    return state.model, tokenizer, {"loss": (after, before)}


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Return the results, each with its baseline, of `learn_digits` or `fine_tune`."""
    parser = common.flags(__doc__, batch_size=64, epochs=16)
    parser.add_argument(
        "--model", help="directory of Stable Diffusion; by default, a model of digits"
    )
    parser.add_argument(
        "--data", default=".", help="folder of pictures to fine-tune on"
    )
    parser.add_argument(
        "--prompt", default="a photo of sks dog", help="text for these pictures"
    )
    parser.add_argument(
        "--class-prompt",
        help="text for pictures by the model itself, also for training",
    )
    parser.add_argument(
        "--class-images",
        type=int,
        default=100,
        help="number of such pictures (%(default)s)",
    )
    parser.add_argument(
        "--prior-weight",
        type=float,
        default=1.0,
        help="weight of their loss (%(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, default=5e-6, help="for fine-tuning (%(default)s)"
    )
    parser.add_argument(
        "--sample", nargs="+", help="texts to draw pictures for (--prompt)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="sampling steps (%(default)s)"
    )
    parser.add_argument(
        "--guidance", type=float, help="guidance scale (7.5; digits: 2)"
    )
    parser.add_argument(
        "--picture", default="samples.png", help="file for the pictures (%(default)s)"
    )
    args, mesh = common.start(parser, argv)
    guidance = args.guidance or (7.5 if args.model else 2.0)
    predict = partial(predict_fn, num_steps=args.steps, guidance_scale=guidance)
    model, tokenizer, results = (fine_tune if args.model else learn_digits)(
        args, mesh, predict
    )
    for name, (reached, reference) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.4g}, to compare with {reference:.4g}")
    if args.output:
        tokenizer.save_pretrained(args.output / "tokenizer")
        models.save_stable_diffusion(model, args.output)
    return results


if __name__ == "__main__":
    common.run(main)
