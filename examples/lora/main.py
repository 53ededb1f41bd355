"""Low-rank adaptation (LoRA, Hu et al. 2021): only small branches beside the projections are trained.

    python examples/lora/main.py                  # a small LLaMA, made here of the standard library's code
    python examples/lora/main.py --model llama-7b --data alpaca.json --targets q_proj v_proj

The model learns to write the signature that belongs to a docstring. The branches are merged into the
projections afterwards, so what lies in `--output` is an ordinary checkpoint. Without `--model` the same is done
by training everything, for comparison.
"""

import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import redco_eqx as rx
from redco_eqx import models

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import code_data
import common
from language_modeling.main import RATES, collate_fn, load_or_make, loss_fn, tune

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRA(eqx.Module):
    """A projection with a branch beside it: `base(x) + scale * lora_b @ lora_a @ x`.

    The sharding rules know it by the names `lora_a` and `lora_b`: the factor that meets the split dim of the
    base is split with it, the other one is replicated. A leading dim of stacked layers is carried along.
    """

    base: Any
    lora_a: Any  # (rank, in)
    lora_b: Any  # (out, rank), zeros: training starts from the base
    scale: float = eqx.field(static=True)

    def __init__(self, base: Any, *, rank: int, scale: float, key: Any):
        *stack, num_out, num_in = base.weight.shape
        dtype = base.weight.dtype
        self.base = base
        self.lora_a = jax.random.normal(key, (*stack, rank, num_in), dtype) / num_in**0.5
        self.lora_b = jnp.zeros((*stack, num_out, rank), dtype)
        self.scale = scale

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """The projection of the last dim."""
        low = jnp.einsum("...i,ri->...r", x, self.lora_a)
        return self.base(x) + self.scale * jnp.einsum("...r,or->...o", low, self.lora_b)

    def merge(self) -> Any:
        """The projection alone, with what the branch adds in its weight."""
        weight = self.base.weight + self.scale * self.lora_b @ self.lora_a
        return eqx.tree_at(lambda base: base.weight, self.base, weight)


def adapt(
    model: Any, mesh: Any, *, targets: tuple[str, ...], rank: int, scale: float, key: Any, **program: Any
) -> Any:
    """The model with a branch beside each projection of these names, laid out on the mesh.

    Raises `ValueError` if a name is that of no projection.
    """
    number, found = itertools.count(), set()

    def is_projection(node: Any) -> bool:
        return isinstance(node, models.Linear)

    def wrap(path: Any, node: Any) -> Any:
        if not is_projection(node) or getattr(path[-1], "name", None) not in targets:
            return node
        found.add(path[-1].name)
        return LoRA(node, rank=rank, scale=scale, key=jax.random.fold_in(key, next(number)))

    adapted = jax.tree_util.tree_map_with_path(wrap, model, is_leaf=is_projection)
    if missing := set(targets) - found:
        raise ValueError(f"--targets: the model has no projections named {sorted(missing)}.")
    return eqx.filter_shard(adapted, rx.shard_rules(adapted, mesh, **program))


def branches(model: Any) -> Any:
    """What is trained: true for the factors of the branches, false for every other leaf."""

    def in_branch(path: Any, _: Any) -> bool:
        return getattr(path[-1], "name", None) in ("lora_a", "lora_b")

    return jax.tree_util.tree_map_with_path(in_branch, model)


def merge(model: Any) -> Any:
    """The model with its branches in its weights: of the type and the shapes that it had before."""

    def one(node: Any) -> Any:
        return node.merge() if isinstance(node, LoRA) else node

    return jax.tree.map(one, model, is_leaf=lambda node: isinstance(node, LoRA))


def num_parameters(arrays: dict[str, Any]) -> int:
    """How many numbers there are."""
    return sum(x.size for x in arrays.values())


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[Any, float]]:
    """Bits per byte of held-out answers by branches, in full, and merged; the number of parameters trained."""
    parser = common.flags(__doc__, batch_size=8, epochs=1)
    parser.add_argument("--model", help="directory of a checkpoint; by default a new model is made")
    parser.add_argument("--data", help="JSON list of objects with instruction, output and perhaps input")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="names of the projections to adapt")
    parser.add_argument("--rank", type=int, default=8, help="of the branches")
    parser.add_argument("--rate", type=float, help="of learning; 3e-4 for a checkpoint, 5e-3 for a new model")
    parser.add_argument("--full-rate", type=float, help="of training in full; --rate / 5 by default")
    parser.add_argument("--length", type=int, default=128, help="of an example, in tokens")
    parser.add_argument("--compare", action="store_true", help="train a checkpoint in full, too")
    args, mesh = common.start(parser, argv)
    rate = args.rate or (3e-4 if args.model else 5e-3)
    records = args.data and code_data.read_records(args.data)
    texts = code_data.modules(10 if args.quick else 3)
    model, tokenizer = load_or_make(args, mesh, texts[0])
    key = jax.random.key(args.seed + 2)
    branch = {"targets": args.targets, "rank": args.rank, "scale": 2.0, "key": key}
    adapt(model, mesh, **branch)  # refuses a wrong name before anything is trained
    if not args.model:
        args.rate = RATES["code"]
        windows = (code_data.encode(tokenizer, part, args.length) for part in texts)
        model = tune(args, "code", model, *windows)[0].model
    records = records or [code_data.signatures(part) for part in texts]
    train, test = (code_data.encode(tokenizer, part, args.length) for part in records)

    results = {}
    if args.compare or not args.model:  # from a copy: training takes its arrays over
        copy = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
        args.rate = args.full_rate or rate / 5
        results["full"] = tune(args, "full", copy, train, test)[1]

    args.rate = rate
    program: Any = {"loss_fn": loss_fn, "batch": collate_fn(train[: args.batch_size])}
    adapted = adapt(model, mesh, **branch, **program)
    print(rx.explain(adapted, mesh, **program))
    state, (scores, bigram) = tune(args, "branches", adapted, train, test, trainable=branches(adapted))

    merged = rx.init_state(merge(state.model), key=key)
    metrics = rx.evaluate(merged, test, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=args.batch_size)
    in_full = results["full"][0][-1] if results else bigram
    results |= {"branches": (scores, in_full), "merged": (metrics["loss"], scores[-1])}
    results["trained"] = num_parameters(state.params), num_parameters(merged.params)
    for name, (reached, reference) in results.items():
        print(f"{name}: {np.ravel(reached)[-1]:.7g}, to compare with {reference:.7g}")
    if args.output:
        np.savez(args.output / "branches.npz", **state.params)
        models.save_pretrained(merged.model, args.output)
        tokenizer.save_pretrained(args.output)
    return results


if __name__ == "__main__":
    common.run(main)
