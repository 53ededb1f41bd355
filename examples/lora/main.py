"""Low-rank adaptation (LoRA, Hu et al. 2021): train only small branches beside the
projections.

    # a small LLaMA, made here of the standard library's code
    python examples/lora/main.py
    python examples/lora/main.py --model llama-7b --data alpaca.json --targets q_proj \\
        v_proj

The model learns to write the signature that belongs to a docstring. Afterwards the
branches are merged into the projections, so `--output` contains an ordinary checkpoint.
Without `--model` the program also trains all parameters, for comparison.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import redco_eqx as rx
import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import code_data
import common
from language_modeling.main import RATES, collate_fn, load_or_make, loss_fn, tune

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapt(
    model: Any,
    mesh: Any,
    *,
    targets: tuple[str, ...],
    rank: int,
    scale: float,
    key: Any,
    **program: Any,
) -> Any:
    """Add a branch beside each projection with one of these names, and shard the model
    on the mesh.

    Raises `ValueError` if a name matches no projection.
    """
    adapted = models.add_lora(model, targets=targets, rank=rank, scale=scale, key=key)
    return eqx.filter_shard(adapted, rx.shard_rules(adapted, mesh, **program))


def num_parameters(arrays: dict[str, Any]) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in arrays.values())


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Return the bits per byte of held-out answers (full, branches, merged) and the
    number of trained parameters.
    """
    parser = common.flags(__doc__, batch_size=8, epochs=1)
    parser.add_argument(
        "--model", help="directory of a checkpoint; by default, a new model"
    )
    parser.add_argument(
        "--data",
        help="JSON list of objects with instruction, output and optionally input",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        default=TARGETS,
        help="names of the projections to adapt",
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the branches")
    parser.add_argument(
        "--rate", type=float, help="learning rate (checkpoint: 3e-4, new model: 5e-3)"
    )
    parser.add_argument(
        "--full-rate", type=float, help="learning rate of full training (--rate / 5)"
    )
    parser.add_argument("--length", type=int, default=128, help="tokens per example")
    parser.add_argument(
        "--compare", action="store_true", help="also train a checkpoint in full"
    )
    args, mesh = common.start(parser, argv)
    rate = args.rate or (3e-4 if args.model else 5e-3)
    records = args.data and code_data.read_records(args.data)
    texts = code_data.modules(10 if args.quick else 3)
    model, tokenizer = load_or_make(args, mesh, texts[0])
    key = jax.random.key(args.seed + 2)
    branch = {"targets": args.targets, "rank": args.rank, "scale": 2.0, "key": key}
    adapt(model, mesh, **branch)  # raises for a wrong name before anything is trained
    if not args.model:
        args.rate = RATES["code"]
        windows = (code_data.encode(tokenizer, part, args.length) for part in texts)
        model = tune(args, "code", model, *windows)[0].model
    records = records or [code_data.signatures(part) for part in texts]
    train, test = (code_data.encode(tokenizer, part, args.length) for part in records)

    results = {}
    if args.compare or not args.model:  # a copy, because training donates its arrays
        copy = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
        args.rate = args.full_rate or rate / 5
        results["full"] = tune(args, "full", copy, train, test)[1]

    args.rate = rate
    program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[: args.batch_size])}
    adapted = adapt(model, mesh, **branch, **program)
    print(rx.explain(adapted, mesh, **program))
    state, (scores, bigram) = tune(
        args, "branches", adapted, train, test, trainable=models.lora_spec(adapted)
    )

    merged = rx.init_state(models.merge_lora(state.model), key=key)
    metrics = rx.evaluate(
        merged, test, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=args.batch_size
    )
    in_full = results["full"][0][-1] if results else bigram
    results |= {"branches": (scores, in_full), "merged": (metrics["loss"], scores[-1])}
    results["trained"] = num_parameters(state.params), num_parameters(merged.params)
    for name, (reached, reference) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.7g}, to compare with {reference:.7g}")
    if args.output:
        models.save_lora(state.model, args.output / "branches")
        models.save_pretrained(merged.model, args.output)
        tokenizer.save_pretrained(args.output)
    return results


if __name__ == "__main__":
    common.run(main)
