"""Texts, forward passes on both sides, and how far apart two arrays are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from references import TEXT, VOCABULARY, Reference
from transformers.core_model_loading import revert_weight_conversion

from redco_eqx import to_arrays
from redco_eqx_models._files.names import entries_of

TOLERANCE = 1e-4
Inputs = dict[str, np.ndarray]
COUNT_POSITIONS = ("opt", "roberta", "clip_text_model")
"""The models of transformers that count positions by themselves, as they should be
counted."""


def texts(padding: str = "none", seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Three rows of tokens and their mask; with padding two of them are shorter."""
    ids = (
        np.random.default_rng(seed).integers(3, VOCABULARY, (3, TEXT)).astype(np.int32)
    )
    if padding == "none":
        return ids, None
    missing = np.asarray([0, 5, 11])[:, None]
    place = np.arange(TEXT)
    mask = place >= missing if padding == "left" else place < TEXT - missing
    return np.where(mask, ids, 0), mask.astype(np.int32)


def inputs_of(
    reference: Reference, paddings: tuple[str, ...] = (), seed: int = 0
) -> Inputs:
    """Return inputs of a model under transformers' names: of texts without padding, or
    with each of these."""
    generator = np.random.default_rng(seed + 1)
    parts: list[Inputs] = []
    for padding in paddings or ("none",):
        found: Inputs = {}
        if "image" in reference.reads:
            found["pixel_values"] = generator.normal(size=(3, 3, 16, 16)).astype(
                np.float32
            )
        if "text" in reference.reads:
            ids, mask = texts(padding, seed)
            # It does not count this, mask or not.
            if reference.options["model_type"] == "roberta":
                ids[:, 5:9] = 1
            pad = 1 if reference.options["model_type"] in ("roberta", "bart") else 0
            found["input_ids"] = ids if mask is None else np.where(mask == 1, ids, pad)
            if mask is not None:
                found["attention_mask"] = mask
        if "segments" in reference.reads:
            found["token_type_ids"] = generator.integers(0, 2, (3, TEXT)).astype(
                np.int32
            )
        if "decoder" in reference.reads:
            found["decoder_input_ids"] = generator.integers(
                3, VOCABULARY, (3, 11)
            ).astype(np.int32)
        parts.append(found)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def torch_call(model: Any, inputs: Inputs) -> Any:
    """Logits by transformers, or hidden states of a bare model, with gradients."""
    given = {
        name: torch.tensor(x, dtype=None if x.dtype == np.float32 else torch.long)
        for name, x in inputs.items()
    }
    counts = model.config.model_type in COUNT_POSITIONS or "decoder_input_ids" in inputs
    if "attention_mask" in inputs and not counts:
        positions = np.maximum(np.cumsum(inputs["attention_mask"], axis=1) - 1, 0)
        given["position_ids"] = torch.tensor(positions, dtype=torch.long)
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    found = model(**given)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def torch_output(model: Any, inputs: Inputs) -> np.ndarray:
    """The same in NumPy."""
    with torch.no_grad():
        return torch_call(model, inputs).float().numpy()


def call(model: Any, inputs: dict[str, Any]) -> Any:
    """The same of ours, under a trace."""
    first = ("pixel_values", "input_ids", "decoder_input_ids")
    options = {name: x for name, x in inputs.items() if name not in first}
    return model(*(inputs[name] for name in first if name in inputs), **options)


_outputs = eqx.filter_jit(
    lambda models, inputs: [call(*pair) for pair in zip(models, inputs, strict=True)]
)


def outputs(*pairs: tuple[Any, Inputs]) -> list[np.ndarray]:
    """The outputs of models of ours, each with its inputs, by one program."""
    models, inputs = zip(*pairs, strict=True)
    return [np.asarray(x) for x in _outputs(models, jax.tree.map(jnp.asarray, inputs))]


def real(inputs: Inputs, x: np.ndarray) -> np.ndarray:
    """The part of `x` for tokens that are not padding, if `x` belongs to the tokens of
    a mask."""
    is_of_them = (
        x.ndim == 3 and "attention_mask" in inputs and "decoder_input_ids" not in inputs
    )
    return x[inputs["attention_mask"] == 1] if is_of_them else x


def distance(got: np.ndarray, expected: np.ndarray, inputs: Inputs) -> float:
    """The largest difference of the logits of real tokens, relative to the logits'
    standard deviation."""
    got, expected = real(inputs, got), real(inputs, expected)
    assert expected.std() >= 1, "the reference's weights are too small to tell anything"
    return float(np.abs(got - expected).max() / expected.std())


def as_in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a model of transformers by the keys of its files, which in memory it
    may call otherwise."""
    if not isinstance(model, transformers.PreTrainedModel):
        return tensors
    # As published; saved anew, some versions leave it out.
    if model.config.model_type == "clip_text_model":
        return {f"text_model.{key}": x for key, x in tensors.items()}
    return dict(revert_weight_conversion(model, tensors))


def opened(path: Any, kind: Any) -> Any:
    """The model of torch that a directory holds, which must have exactly its arrays."""
    model, info = kind.from_pretrained(path, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(problem), (problem, info[problem])
    return model.eval()


def assert_bit_equal(model: Any, other: Any) -> None:
    """Compares the arrays of two models of torch, bit for bit."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        assert x.dtype == theirs[key].dtype, key
        assert torch.equal(x, theirs[key]), key


def by_key(model: Any, tree: Any) -> dict[str, np.ndarray]:
    """The arrays of `tree`, which is built like `model`, by the keys of an unstacked
    file."""
    arrays = to_arrays(tree)
    found = {}
    for entry in sorted(entries_of(model), key=lambda entry: entry.start):
        if entry.path in arrays:  # not what is never trained
            for place, key in entry.places:
                x = np.asarray(arrays[entry.path])[place]
                joined = [found[key], x] if key in found else [x]
                found[key] = joined[0] if len(joined) == 1 else np.concatenate(joined)
    return found


def assert_same_gradients(
    model: Any,
    gradients: Any,
    there: Any,
    *,
    tolerance: float = TOLERANCE,
    rounding: float = 0.0,
) -> None:
    """Compares with the gradients of torch, where what nothing reads has none."""
    read = {key: p.grad for key, p in there.named_parameters() if p.grad is not None}
    expected = {key: x.numpy() for key, x in as_in_files(there, read).items()}
    for key, g in by_key(model, gradients).items():
        if key not in getattr(model, "buffers", ()):
            x = expected.pop(key, np.zeros(g.shape, g.dtype))
            # A bias of the keys shifts all scores of a query: its gradient is zero, or
            # rounding.
            floor = 2e-6 if key.endswith(("k_proj.bias", "key.bias")) else rounding
            error = np.linalg.norm(g.reshape(x.shape) - x)
            assert error <= tolerance * np.linalg.norm(x) + floor, (
                key,
                error,
                np.linalg.norm(x),
            )
    assert not expected
