"""Summaries of functions of the standard library (the first line of a docstring), or of
news, as in XSum.

    python examples/text_to_text/main.py  # a small new T5, and a small new BART
    python examples/text_to_text/main.py --model flan-t5-xl --data xsum --lengths 512 \\
        64 --devices 0 --tensor 8

Run the same on many hosts, under SLURM (the file says how many) or by their addresses:

    export SCRIPT=examples/text_to_text/main.py
    FLAGS="--model flan-t5-xxl --data xsum --lengths 512 64 --devices 0 --tensor 8"
    sbatch examples/launch/slurm.sh $FLAGS
    examples/launch/nodes.sh HOST0 HOST1 -- python $SCRIPT $FLAGS

`--model` is the directory of a T5 or BART. `--data` is a directory with `train` and
`validation`, as .parquet, .csv or .jsonl. A beam search writes the summaries. The
program prints their ROUGE scores beside those of the lead, which is the first words of
the document. `--checkpoints` keeps the best model by each score.
"""

import ast
import pathlib
import sys
import sysconfig
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from pyarrow.csv import ParseOptions
from pyarrow.dataset import CsvFileFormat, dataset
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Regex, normalizers
from transformers import AutoTokenizer, BartTokenizer, PreTrainedTokenizerFast

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import common

CSV = CsvFileFormat(ParseOptions(newlines_in_values=True))
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".csv": CSV}
RATES = {"T5": 2e-3, "BART": 2e-3}  # learning rates, for new models
# Words alone, with names split into words, in lower case.
WORDS = [
    normalizers.Replace(Regex(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])"), " "),
    normalizers.Lowercase(),
]
BEST: Any = {"eval/rouge2": "max", "eval/rougeL": "max"}

# --------------------------------------------------------------------------- the three
# functions


def collate_fn(
    examples: Sequence[Any], *, tokenizer: Any, lengths: Sequence[int]
) -> dict[str, Any]:
    """Collate both texts as tokens, `(batch, length)`, with masks that exclude
    padding."""
    batch, options = (
        {},
        {"truncation": True, "padding": "max_length", "return_tensors": "np"},
    )
    for name, length in zip(("document", "summary"), lengths):
        found = tokenizer([x[name] for x in examples], max_length=length, **options)
        batch[name], batch[f"{name}_mask"] = found["input_ids"], found["attention_mask"]
    return batch


def loss_fn(model: Any, batch: Any, key: Any) -> rx.Mean:
    """Return the cross-entropy of the tokens of the summaries."""
    config, summary = model.config, batch["summary"]
    inputs = models.shift_right(
        summary, config.decoder_start_token_id, pad=config.pad_token_id
    )
    hidden = model.hidden_states(
        batch["document"], inputs, attention_mask=batch["document_mask"], key=key
    )
    return rx.layers.cross_entropy(
        hidden, model.head, summary, weights=batch["summary_mask"]
    )


def predict_fn(model: Any, batch: Any, key: Any, *, num_beams: int) -> Any:
    """Return, for each document, the best summary of a beam search, as tokens."""
    options = {
        "attention_mask": batch["document_mask"],
        "max_new_tokens": batch["summary"].shape[1],
    }
    return models.beam_search(
        model, batch["document"], num_beams=num_beams, **options
    ).tokens[:, 0]


def output_fn(example: Any, tokens: Any, *, tokenizer: Any) -> str:
    """Return a summary as text."""
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def metric_fn(examples: Sequence[Any], summaries: Sequence[str]) -> dict[str, float]:
    """Return ROUGE-2 (pairs of words) and ROUGE-L (longest common subsequence) as
    F-measures (Lin 2004)."""
    rouge = RougeScorer(["rouge2", "rougeL"], use_stemmer=True)
    scores = [
        rouge.score(x["summary"], summary) for x, summary in zip(examples, summaries)
    ]
    return {
        name: float(np.mean([score[name].fmeasure for score in scores]))
        for name in rouge.rouge_types
    }


# --------------------------------------------------------------------------------------
# the data


def docstrings(every: int) -> tuple[list[Any], list[Any]]:
    """Return bodies of functions, and the one-line summaries of their docstrings.

    They come from one in `every` modules of the standard library. One in ten of these
    modules is held out.
    """
    root, parts = pathlib.Path(sysconfig.get_path("stdlib")), ({}, {})
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if {"site-packages", "test", "tests"}.isdisjoint(f.parts)
    ]
    for i, file in enumerate(files[::every]):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if (
                isinstance(node, ast.FunctionDef)
                and node.body[1:]
                and (docstring := ast.get_docstring(node))
            ):
                summary = docstring.partition("\n\n")[0]
                if "\n" not in summary:
                    parts[i % 10 == 0]["\n".join(map(ast.unparse, node.body[1:]))] = (
                        summary
                    )
    train, held_out = (
        [{"document": d, "summary": s} for d, s in part.items()] for part in parts
    )
    return train, [x for x in held_out if x["document"] not in parts[0]]


def read(directory: str, split: str) -> list[Any]:
    """Read documents with their summaries, from the files of a split."""
    files = [
        f
        for f in sorted(pathlib.Path(directory).glob(f"{split}*"))
        if f.suffix in FORMATS
    ]
    if not files:
        raise ValueError(
            f"--data {directory}: there is no {split} as {', '.join(FORMATS)} in it."
        )
    table = dataset(files, format=FORMATS[files[0].suffix]).to_table()
    if not {"document", "summary"} <= set(table.column_names):
        raise ValueError(
            f"{files[0]}: no document and summary among "
            f"{', '.join(table.column_names)}."
        )
    return table.select(["document", "summary"]).to_pylist()


def lead(examples: Sequence[Any]) -> dict[str, float]:
    """Return the scores of the first words of each document, in the number that is best
    for ROUGE-L."""
    words = [x["document"].split() for x in examples]
    scores = [
        metric_fn(examples, [" ".join(x[:num]) for x in words])
        for num in range(4, 33, 4)
    ]
    return max(scores, key=lambda score: score["rougeL"])


# -----------------------------------------------------------------------------------
# the program


def load_or_make(
    family: str, args: Any, mesh: Any, train: Sequence[Any]
) -> tuple[Any, Any]:
    """Load the model and tokenizer from a directory, or make new ones."""
    if args.model:
        # For large ones.
        model = models.load_pretrained(args.model, mesh, stacked=True, remat="full")
        return model, AutoTokenizer.from_pretrained(args.model)
    size = 64 if args.quick else 128
    base: Any = BartTokenizer(add_prefix_space=True)
    base.backend_tokenizer.normalizer = normalizers.Sequence(WORDS)
    base = base.train_new_from_iterator(
        (text for x in train for text in x.values()), 16 * size
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer, **base.special_tokens_map
    )
    end = {
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }
    same: Any = {
        "vocab_size": len(tokenizer),
        "d_model": size,
        "pad_token_id": tokenizer.pad_token_id,
        **end,
    }
    if family == "T5":
        config = models.T5Config(
            **same, d_kv=32, d_ff=2 * size, num_heads=4, num_layers=2
        )
        make = partial(models.T5ForConditionalGeneration, config)
    else:
        each = {"layers": 2, "ffn_dim": 2 * size, "attention_heads": 4}
        sides: Any = {
            f"{side}_{name}": x
            for side in ("encoder", "decoder")
            for name, x in each.items()
        }
        config = models.BartConfig(
            **same, **sides, max_position_embeddings=sum(args.lengths), init_std=0.06
        )
        make = partial(models.BartForConditionalGeneration, config)
    batch = collate_fn(
        train[: args.batch_size], tokenizer=tokenizer, lengths=args.lengths
    )
    key = jax.random.key(args.seed)
    return rx.init_model(
        lambda key: make(key=key), mesh, key=key, loss_fn=loss_fn, batch=batch
    ), tokenizer


def learn(
    family: str, args: Any, mesh: Any, train: Sequence[Any], held_out: Sequence[Any]
) -> rx.types.History:
    """Train a model of this family, and return its history."""
    model, tokenizer = load_or_make(family, args, mesh, train)
    num_steps = rx.num_train_steps(
        len(train), batch_size=args.batch_size, num_epochs=args.epochs
    )
    rate = args.rate or (2e-5 if args.model else RATES[family])
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, num_steps // 10, num_steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )
    collate = partial(collate_fn, tokenizer=tokenizer, lengths=args.lengths)
    functions: Any = {
        "collate_fn": collate,
        "loss_fn": loss_fn,
        "batch_size": args.batch_size,
    }
    evaluation = rx.Evaluation(
        held_out,
        predict_fn=partial(predict_fn, num_beams=args.beams),
        output_fn=partial(output_fn, tokenizer=tokenizer),
        metric_fn=metric_fn,
        predictions_directory=args.output and args.output / family,
        **functions,
    )
    state, history = rx.fit(
        rx.init_state(model, optimizer, key=jax.random.key(args.seed + 1)),
        train,
        **functions,
        optimizer=optimizer,
        num_epochs=args.epochs,
        evaluation=evaluation,
        checkpoints=args.checkpoints
        and rx.Checkpoints(args.checkpoints / family, keep_best=BEST),
    )
    if args.output:
        models.save_pretrained(state.model, args.output / family)
        tokenizer.save_pretrained(args.output / family)
    return history


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[list[float], float]]:
    """Return the ROUGE scores of each model's summaries after each epoch, and those of
    the lead."""
    rx.initialize_distributed()
    parser = common.flags(__doc__, batch_size=32, epochs=8)
    parser.add_argument(
        "--family",
        nargs="+",
        choices=RATES,
        default=RATES,
        help="families of new models (both)",
    )
    parser.add_argument(
        "--model",
        type=pathlib.Path,
        help="directory of a checkpoint, instead of new models",
    )
    parser.add_argument("--data", help="directory with your own data")
    parser.add_argument(
        "--lengths",
        nargs=2,
        type=int,
        default=[32, 16],
        help="tokens per text, per summary",
    )
    parser.add_argument("--beams", type=int, default=4, help="number of beams (4)")
    parser.add_argument("--rate", type=float, help="learning rate (checkpoint: 2e-5)")
    args, mesh = common.start(parser, argv)
    train, held_out = docstrings(10 if args.quick else 1)
    if args.data:
        train, held_out = read(args.data, "train"), read(args.data, "validation")
    baseline, results = lead(held_out), {}
    for family in [args.model.name] if args.model else args.family:
        history = learn(family, args, mesh, train, held_out)
        for name, score in {"ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}.items():
            reached = history[f"eval/{score}"]
            results[f"{family}, {name}"] = reached, baseline[score]
            print(
                f"{family}, {name}: {reached[-1]:.3f}, and {baseline[score]:.3f} by "
                "the lead"
            )
    return results


if __name__ == "__main__":
    common.run(main)
