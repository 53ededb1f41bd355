"""Texts, forward passes on both sides, and how far apart two arrays are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from references import TEXT, VOCABULARY

from redco_eqx import from_arrays, to_arrays

TOLERANCE = 1e-4
PADDING = ("none", "left", "right")


def texts(padding: str = "none") -> tuple[np.ndarray, np.ndarray | None]:
    """Three rows of tokens and their mask; with padding two of them are shorter."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, TEXT)).astype(np.int32)
    if padding == "none":
        return ids, None
    missing = np.asarray([0, 5, 11])[:, None]
    place = np.arange(TEXT)
    mask = place >= missing if padding == "left" else place < TEXT - missing
    return np.where(mask, ids, 0), mask.astype(np.int32)


def positions(mask: np.ndarray) -> np.ndarray:
    """Counted from the first token that is not padding."""
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0)


def torch_inputs(ids: np.ndarray, mask: np.ndarray | None, *, counts_positions: bool) -> dict[str, Any]:
    """Arguments of a forward pass in transformers."""
    inputs = {"input_ids": torch.tensor(ids, dtype=torch.long)}
    if mask is not None:
        inputs["attention_mask"] = torch.tensor(mask, dtype=torch.long)
        if not counts_positions:
            inputs["position_ids"] = torch.tensor(positions(mask), dtype=torch.long)
    return inputs


def torch_logits(model: Any, ids: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Logits by transformers."""
    with torch.no_grad():
        return model(**torch_inputs(ids, mask, **options)).logits.float().numpy()


def logits(model: Any, ids: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Our logits, from a program compiled anew: some tests change functions that it is made of."""
    run = eqx.filter_jit(lambda model, ids, mask: model(ids, attention_mask=mask, **options))
    return np.asarray(run(model, jnp.asarray(ids), None if mask is None else jnp.asarray(mask)))


def distance(got: np.ndarray, expected: np.ndarray, mask: np.ndarray | None = None) -> float:
    """The largest difference of the logits of real tokens, relative to the logits' standard deviation."""
    if mask is not None:
        got, expected = got[mask == 1], expected[mask == 1]
    assert expected.std() >= 1, "the reference's weights are too small to tell anything"
    return float(np.abs(got - expected).max() / expected.std())


def by_key(model: Any, tree: Any) -> dict[str, np.ndarray]:
    """The arrays of `tree`, which is built like `model`, by the keys of an unstacked file."""
    found = {}
    for path, x in to_arrays(tree).items():
        stack = next((s for s in model.stacks if path.startswith(f"{s}.")), None)
        if stack is None or path[len(stack) + 1].isdigit():
            found[path] = np.asarray(x)
        else:
            rest = path[len(stack) + 1 :]
            found |= {f"{stack}.{i}.{rest}": np.asarray(piece) for i, piece in enumerate(x)}
    for name, parts in model.joined.items():
        for key in [key for key in found if f".{parts[0]}." in key]:
            pieces = [found.pop(key.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
            found[key.replace(f".{parts[0]}.", f".{name}.")] = np.concatenate(pieces)
    return found


def reconfigured(model: Any, config: Any) -> Any:
    """The arrays of `model` in a model of another configuration that has arrays of the same paths."""
    kind = type(model)
    stacked = not isinstance(model.layers, list)
    abstract = eqx.filter_eval_shape(lambda key: kind(config, stacked=stacked, key=key), jax.random.key(0))
    return from_arrays(abstract, to_arrays(model))
