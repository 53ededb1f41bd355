"""Run the examples with their defaults, and write their results into
`examples/README.md`, with pictures.

    python examples/run_all.py                            # all of them
    python examples/run_all.py differential_privacy ...   # some; the other rows stay

Each example is a row of `EXAMPLES`. It fails if it does not reach the number stated
there.
"""

import ast
import dataclasses
import importlib
import io
import itertools
import multiprocessing
import pathlib
import re
import sys
import time
import tokenize
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

HERE = pathlib.Path(__file__).parent
Results = Mapping[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Example:
    """The target of an example.

    - `stated`: for each result, its measure and baseline, and its bound: a minimum
        (`">= 0.9"`), a maximum (`"<= 2.5"`), or a distance from the baseline
        (`"within 1%"`).
    - `upstream`: the number of lines of code in the programs of redco 0.4.23 for the
        same task.
    - `flags`: the arguments of its `main`, with `{here}` for its folder.
    - `more`: the reason why the example has more lines than those programs, if it does.
    - `official`: the program that Figure 6 of redco's paper probably compares with, and
        its number of lines.
    - `along`: the name of the horizontal axis for a list of numbers, and its first
        value.

    Its `main` returns `{name: (number or list of numbers, baseline or list of equal
    length)}`. A list shows the progress of the run. Instead of a list, there may be
    several runs, each as `{progress: number}`: the worst of their last numbers counts.
    """

    stated: Mapping[str, tuple[str, str]]
    upstream: Sequence[int] = ()
    flags: Sequence[str] = ()
    more: str = ""
    official: str = ""
    along: tuple[str, int] = ("evaluation", 1)


EXAMPLES = {
    "custom_loop": Example(
        {
            "ensemble of 8": ("accuracy; that of one member", ">= 0.9"),
            "until accuracy stops rising": (
                "last accuracy; logistic regression's",
                ">= 0.86",
            ),
            "tuned loss": ("held-out loss; that before tuning", "<= 0.7"),
            "hypergradient": ("by grad; by finite difference", "within 1%"),
            "equimo's VisionTransformer": (
                "accuracy; logistic regression's",
                ">= 0.89",
            ),
        }
    ),
    "classification_regression": Example(
        {
            "digits": ("accuracy; logistic regression's", ">= 0.93"),
            "classification": ("accuracy; logistic regression's", ">= 0.9"),
            "regression": ("R²; ridge regression's", ">= 0.42"),
        },
        upstream=(168, 80),
        official=(
            "huggingface/transformers@6cbc136, "
            "examples/flax/text-classification/run_flax_glue.py: 514"
        ),
    ),
    "glue": Example(
        {
            "classification": ("accuracy; logistic regression's", ">= 0.915"),
            "regression": ("R²; ridge regression's", ">= 0.45"),
        },
        upstream=(168,),
        official=(
            "huggingface/transformers@6cbc136, "
            "examples/flax/text-classification/run_flax_glue.py: 514"
        ),
        more="reads tables and pretrains a model, where upstream downloads both",
    ),
    "language_modeling": Example(
        {
            "code": ("bits per byte; a bigram's", "<= 2.16"),
            "instructions": ("bits per byte; a bigram's", "<= 1.85"),
            "code, inference": ("perplexity; a bigram's", "<= 55"),
            "instructions, inference": ("perplexity; a bigram's", "<= 20"),
        },
        upstream=(214,),
        official=(
            "huggingface/transformers@6cbc136, "
            "examples/flax/language-modeling/run_clm_flax.py: 665"
        ),
        more=(
            "makes texts, a tokenizer and a baseline; also has plain text, beam search "
            "and perplexity"
        ),
    ),
    "lora": Example(
        {
            "full": ("bits per byte; a bigram's", "<= 1.85"),
            "branches": ("bits per byte; full training's", "<= 1.85"),
            "merged": ("bits per byte; that of the branches", "within 0.01%"),
        },
        upstream=(478,),
        official=(
            "microsoft/LoRA@3f5c193, examples/NLG/src/gpt2_ft.py and its imports "
            "there: 1183"
        ),
    ),
    "preference_tuning": Example(
        {
            "compiles": ("share of new answers that compile; before", ">= 0.85"),
            "ranked right": (
                "share of pairs, by reward; by likelihood before",
                ">= 0.6",
            ),
            "margin": ("margin of the rewards; before", ">= 0.4"),
        },
    ),
    "text_to_text": Example(
        {
            "T5, ROUGE-2": ("ROUGE-2; the lead's", ">= 0.02"),
            "T5, ROUGE-L": ("ROUGE-L; the lead's", ">= 0.135"),
            "BART, ROUGE-2": ("ROUGE-2; the lead's", ">= 0.02"),
            "BART, ROUGE-L": ("ROUGE-L; the lead's", ">= 0.135"),
        },
        upstream=(184,),
        official=(
            "huggingface/transformers@6cbc136, "
            "examples/flax/summarization/run_summarization_flax.py: 789"
        ),
    ),
    "image_to_text": Example(
        {
            "exact match": ("share of captions; the most common caption's", ">= 0.8"),
            "BLEU": ("BLEU; the most common caption's", ">= 90"),
        },
        upstream=(193,),
        official=(
            "huggingface/transformers@6cbc136, examples/flax/image-captioning: 958 + 66"
        ),
    ),
    "differential_privacy": Example(
        {
            "private": (
                "accuracy at epsilon 3, delta 1e-4; that without privacy",
                ">= 0.86",
            )
        },
        upstream=(165,),
        official=(
            "google/jax@47a76df, examples/differentially_private_sgd.py and "
            "datasets.py: 150 + 49"
        ),
    ),
    "text_to_image": Example(
        {
            "digits": (
                "share of digits drawn as requested; share of real digits recognised",
                ">= 0.9",
            )
        },
        upstream=(262,),
        official=(
            "huggingface/diffusers@958e17d, "
            "examples/text_to_image/train_text_to_image.py: 853"
        ),
        flags=("--picture", "{here}/samples.png"),
    ),
    "reinforcement_learning/ppo": Example(
        {
            "CartPole-v1": ("return in CartPole; that of random actions", ">= 475"),
            "Acrobot-v1": ("return in Acrobot; that of random actions", ">= -100"),
        },
        upstream=(218,),
        official="openai/baselines@ea25b9e, baselines/ppo2 without shared files: 331",
        along=("steps of the environments", 0),
    ),
    "reinforcement_learning/ddpg": Example(
        {"Pendulum-v1": ("return in Pendulum; that of random actions", ">= -200")},
        upstream=(240,),
        official="openai/baselines@ea25b9e, baselines/ddpg without shared files: 676",
        along=("steps of the environments", 0),
    ),
    "federated_learning": Example(
        {
            "IID": ("accuracy; central training's", ">= 0.88"),
            "not IID": ("accuracy; central training's", ">= 0.84"),
            "by fit": ("accuracy with one fit per client; with vmap", "within 1%"),
        },
        upstream=(216,),
        official="AshwinRJ/Federated-Learning-PyTorch@26eaec4, src: 510",
        along=("round", 1),
    ),
    "meta_learning": Example(
        {
            "sinusoids": (
                "squared error after adapting; that of a pretrained model",
                "<= 0.1",
            ),
            "sinusoids, first order": (
                "squared error after adapting; that of a pretrained model",
                "<= 0.2",
            ),
            "images": (
                "error rate after adapting; that of a pretrained model",
                "<= 0.225",
            ),
            "images, first order": (
                "error rate after adapting; that of a pretrained model",
                "<= 0.22",
            ),
        },
        upstream=(161,),
        official="cbfinn/maml@a7f45f1: 639 + 40 to prepare images",
        more="reads images from three sources and trains a second model for comparison",
        along=("inner steps", 0),
    ),
}


def file_of(name: str) -> pathlib.Path:
    """Return the program of an example: the file with its name, or `main.py` in the
    folder with its name."""
    file = HERE / f"{name}.py"
    return file if file.exists() else HERE / name / "main.py"


def curves_of(reached: Any, first: int = 1) -> list[Mapping[int, float]]:
    """Return all runs of a result, each by its progress; none if it is one number."""
    if not isinstance(reached, list):
        return []
    return (
        reached
        if isinstance(reached[0], Mapping)
        else [dict(enumerate(reached, start=first))]
    )


def last_of(reached: Any, bound: str) -> float:
    """Return the last number of a result; of several runs, that of the worst."""
    lasts = [list(curve.values())[-1] for curve in curves_of(reached)]
    return (min if bound.startswith(">=") else max)(lasts) if lasts else reached


def is_met(bound: str, number: float, baseline: float) -> bool:
    """Return true if a number meets its bound."""
    kind, limit = bound.split()
    if kind == "within":
        return abs(number - baseline) <= float(limit.rstrip("%")) / 100 * abs(baseline)
    return number >= float(limit) if kind == ">=" else number <= float(limit)


def code_lines(source: str) -> int:
    """Return the number of lines of code, without blank lines, comments and
    docstrings."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
    }
    tokens = [
        t
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type not in skipped
    ]
    lines = {
        line for t in tokens for line in range(t.start[0], t.end[0] + 1) if t.string
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(
            getattr(node.value, "value", None), str
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def files_of(file: pathlib.Path) -> set[pathlib.Path]:
    """Return a program and every file of this folder that it imports."""
    imports = re.findall(
        r"^(?:import|from) ([\w.]+)(?: import (\w+))?", file.read_text(), re.MULTILINE
    )
    names = {x for module, name in imports for x in (module, f"{module}.{name}")}
    candidates = [HERE / f"{name.replace('.', '/')}.py" for name in names]
    return {file}.union(*(files_of(path) for path in candidates if path.exists()))


def picture(file: pathlib.Path, results: Results, example: Example) -> None:
    """Draw the curves, with baselines as dashed lines. Curves of the same measure share
    a panel."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measures = {
        name: measure.split("; ") for name, (measure, _) in example.stated.items()
    }
    along, first = example.along
    panels: dict[str, list[str]] = {}
    for name, (reached, _) in results.items():
        # A curve that is not in the table belongs to the first that is.
        if curves_of(reached):
            panels.setdefault(
                measures.get(name, next(iter(measures.values())))[0], []
            ).append(name)
    figure = Figure(figsize=(4.5 * len(panels), 3.2), layout="constrained")
    for axes, (unit, names) in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels.items()
    ):
        for name in names:
            reached, baseline = results[name]
            curves, color = curves_of(reached, first), None
            style: Any = {"marker": "."} if len(curves) == 1 else {"linewidth": 1}
            for curve in curves:
                label = name if curve is curves[0] else None
                (line,) = axes.plot(
                    list(curve), list(curve.values()), color=color, label=label, **style
                )
                color = line.get_color()
            if name in measures:
                broken: Any = {"color": color, "linestyle": "dashed", "linewidth": 1}
                ends = (
                    baseline
                    if isinstance(baseline, list)
                    else [baseline] * len(curves[0])
                )
                axes.plot(list(curves[0]), ends, label=measures[name][1], **broken)
        axes.set(xlabel=along, ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def lines_of(name: str) -> str:
    """Return an example's row in the table of lines."""
    example, file = EXAMPLES[name], file_of(name)
    lines = sum(code_lines(file.read_text()) for file in files_of(file))
    upstream = " + ".join(map(str, example.upstream)) or "–"
    reason = example.more and f": {example.more}"
    link = f"[{name}]({file.relative_to(HERE).as_posix()})"
    row = " | ".join([link, str(lines), upstream + reason, example.official or "–"])
    return f"| {row} |"


def run(name: str) -> tuple[list[str], list[str]]:
    """Run an example. Return its rows of the table, and the bounds that it missed."""
    example, file, start = EXAMPLES[name], file_of(name), time.perf_counter()
    where = file.relative_to(HERE)
    sys.path.insert(0, str(HERE))
    module = importlib.import_module(".".join(where.with_suffix("").parts))
    results: Results = module.main(
        [flag.format(here=file.parent) for flag in example.flags]
    )
    seconds = time.perf_counter() - start
    picture(
        file.with_name("scores.png" if file.stem == "main" else f"{file.stem}.png"),
        results,
        example,
    )
    table, short = [], []
    for what, (measure, bound) in example.stated.items():
        reached, baseline = results[what]
        number, baseline = last_of(reached, bound), last_of(baseline, bound)
        if not is_met(bound, number, baseline):
            short.append(f"{name}, {what}: {number:.4g}, stated {bound}")
        cells = (
            f"[{name}]({where.as_posix()})",
            what,
            measure,
            f"{number:.3f}",
            f"{baseline:.3f}",
            bound,
        )
        table.append("| " + " | ".join([*cells, f"{seconds:.0f}"]) + " |")
    return table, short


def run_apart(name: str) -> tuple[list[str], list[str]]:
    """Call `run` in another process. Raise errors as text, because some errors cannot
    be pickled."""
    try:
        return run(name)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None


def with_rows(page: str, *tables: Mapping[str, list[str]]) -> str:
    """Put these rows of examples into the tables of a page, one after the other. Keep
    the other rows, and sort by `EXAMPLES`.
    """

    def name_of(row: str) -> str:
        return row[3 : row.index("]")]

    lines, order, rest = [], list(EXAMPLES), iter(tables)
    for are_rows, group in itertools.groupby(
        page.splitlines(), lambda line: line.startswith("| [")
    ):
        group = list(group)
        if are_rows:
            new = next(rest)
            kept = [row for row in group if name_of(row) not in new]
            group = sorted(
                [*kept, *itertools.chain(*new.values())],
                key=lambda row: order.index(name_of(row)),
            )
        lines += group
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> None:
    """Run the examples one after the other, each in a separate process, and replace
    their rows."""
    unknown = sorted(set(names) - set(EXAMPLES))
    if unknown:
        sys.exit(
            f"error: no example is called {unknown[0]!r}; there are "
            f"{', '.join(EXAMPLES)}."
        )
    page = HERE / "README.md"
    lines = {name: lines_of(name) for name in EXAMPLES}
    short: list[str] = []
    for name in names or EXAMPLES:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            table, missed = process.submit(run_apart, name).result()
        short += missed
        tables = {name: table}, {other: [row] for other, row in lines.items()}
        page.write_text(
            with_rows(page.read_text(encoding="utf-8"), *tables), encoding="utf-8"
        )
    if short:
        sys.exit("error: " + "; ".join(short))


if __name__ == "__main__":
    main(sys.argv[1:])
