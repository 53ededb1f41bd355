"""Texts, forward passes on both sides, and how far apart two arrays are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from references import TEXT, VOCABULARY, EncoderReference
from transformers.core_model_loading import revert_weight_conversion

from redco_eqx import from_arrays, to_arrays
from redco_eqx.models._files.names import entries_of

TOLERANCE = 1e-4
PADDING = ("none", "left", "right")


def texts(padding: str = "none", seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Three rows of tokens and their mask; with padding two of them are shorter."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, (3, TEXT)).astype(np.int32)
    if padding == "none":
        return ids, None
    missing = np.asarray([0, 5, 11])[:, None]
    place = np.arange(TEXT)
    mask = place >= missing if padding == "left" else place < TEXT - missing
    return np.where(mask, ids, 0), mask.astype(np.int32)


def encoder_inputs(reference: EncoderReference, padding: str = "none", seed: int = 0) -> dict[str, np.ndarray]:
    """Return the inputs of a model that is not decoder-only, under transformers' names."""
    generator = np.random.default_rng(seed + 1)
    found: dict[str, np.ndarray] = {}
    if "image" in reference.reads:
        found["pixel_values"] = generator.normal(size=(3, 3, 16, 16)).astype(np.float32)
    if "text" in reference.reads:
        ids, mask = texts(padding, seed)
        pad = 1 if reference.family in ("Roberta", "Bart") else 0
        found["input_ids"] = ids if mask is None else np.where(mask == 1, ids, pad)
        if mask is not None:
            found["attention_mask"] = mask
    if "segments" in reference.reads:
        found["token_type_ids"] = generator.integers(0, 2, (3, TEXT)).astype(np.int32)
    if "decoder" in reference.reads:
        found["decoder_input_ids"] = generator.integers(3, VOCABULARY, (3, 11)).astype(np.int32)
    return found


def torch_output(model: Any, inputs: dict[str, np.ndarray]) -> Any:
    """Logits by transformers, or hidden states of a bare model, with gradients."""
    given = {name: torch.tensor(x, dtype=None if x.dtype == np.float32 else torch.long)
             for name, x in inputs.items()}  # fmt: skip
    if model.config.model_type == "bert" and "attention_mask" in inputs:
        given["position_ids"] = torch.tensor(positions(inputs["attention_mask"]), dtype=torch.long)
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    found = model(**given)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def as_in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a model of transformers by the keys of its files, which in memory it may call otherwise."""
    if model.config.model_type == "clip_text_model":  # as published; saved anew, some versions leave it out
        return {f"text_model.{key}": x for key, x in tensors.items()}
    return dict(revert_weight_conversion(model, tensors))


def call(model: Any, inputs: dict[str, Any]) -> Any:
    """The same of ours, under a trace."""
    first = ("pixel_values", "input_ids", "decoder_input_ids")
    options = {name: x for name, x in inputs.items() if name not in first}
    return model(*(inputs[name] for name in first if name in inputs), **options)


def output(model: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The same of ours, from a program compiled anew: some tests change functions that it is made of."""
    run = eqx.filter_jit(lambda model, inputs: call(model, inputs))
    return np.asarray(run(model, jax.tree.map(jnp.asarray, inputs)))


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
    arrays, found = to_arrays(tree), {}
    for entry in sorted(entries_of(model), key=lambda entry: entry.start):
        if entry.path in arrays:  # not what is never trained
            pieces = [arrays[entry.path]] if entry.stack is None else arrays[entry.path]
            for key, x in zip(entry.keys, pieces, strict=True):
                joined = [found[key], np.asarray(x)] if key in found else [np.asarray(x)]
                found[key] = joined[0] if len(joined) == 1 else np.concatenate(joined)
    return found


def reconfigured(model: Any, config: Any) -> Any:
    """The arrays of `model` in a model of another configuration that has arrays of the same paths."""
    kind = type(model)
    stacked = not isinstance(model.layers, list)
    abstract = eqx.filter_eval_shape(lambda key: kind(config, stacked=stacked, key=key), jax.random.key(0))
    return from_arrays(abstract, to_arrays(model))
