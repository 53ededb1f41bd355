"""Several texts in a row: each is as if it were alone."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from tiny_models import VOCABULARY, make, restack

import redco_eqx as rx
from redco_eqx.layers import cross_entropy
from redco_eqx_models._blocks.model import make_context

LENGTHS = (5, 3, 7, 4)
PADDING = 1
# By row: the texts, in their order. The rows end in five and in two tokens of padding.
ROWS = ((0, 1), (2, 3))
WIDTH = 13
NAMES = ("gpt2", "gptj", "opt_350m", "mistral", "gemma3", "mixtral", "smollm3")
ENCODERS = ("bert_masked", "roberta_masked")


def texts() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    found = [rng.integers(2, VOCABULARY, n).astype(np.int32) for n in LENGTHS]
    # The token of padding may be in a text. RoBERTa does not count its position.
    found[1][0] = PADDING
    return [jnp.asarray(text) for text in found]


def packed() -> tuple[jax.Array, jax.Array]:
    """The rows, and for each token the number of its text."""
    ids = np.full((len(ROWS), WIDTH), PADDING, np.int32)
    segments = np.zeros((len(ROWS), WIDTH), np.int32)
    for row, of_row in enumerate(ROWS):
        at = 0
        for number in of_row:
            text = texts()[number]
            ids[row, at : at + len(text)] = text
            segments[row, at : at + len(text)] = number + 1
            at += len(text)
    return jnp.asarray(ids), jnp.asarray(segments)


def next_in_text(segments: Any) -> Any:
    """Where a token is followed by one of the same text."""
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)


def next_token_loss(model: Any, ids: Any, segments: Any = None) -> rx.Mean:
    """That of rows of several texts, or of rows of one."""
    own = None if segments is None else segments[:, :-1]
    hidden, _ = model.hidden_states(ids[:, :-1], segments=own)
    weights = None
    if segments is not None:
        weights = next_in_text(segments).astype(hidden.dtype)
    return cross_entropy(hidden, model.head, ids[:, 1:], weights=weights)


def labels_loss(model: Any, ids: Any, segments: Any = None) -> rx.Mean:
    """That of an encoder: each token has a label."""
    hidden = model.hidden_states(ids, segments=segments)
    weights = None
    if segments is not None:
        weights = (segments != 0).astype(hidden.dtype)
    labels = (3 * ids + 1) % VOCABULARY
    return cross_entropy(hidden, model.head, labels, weights=weights)


def loss_of_texts(loss_fn: Any, model: Any) -> Any:
    """That of each text alone."""
    total, *others = [loss_fn(model, text[None]) for text in texts()]
    for loss in others:
        total = total + loss
    return total


WITH_LOSSES = [(name, next_token_loss) for name in NAMES]
WITH_LOSSES += [(name, labels_loss) for name in ENCODERS]


@pytest.mark.parametrize(("name", "loss_fn"), WITH_LOSSES, ids=NAMES + ENCODERS)
@pytest.mark.usefixtures("double")
def test_a_text_in_a_row_is_as_if_alone(name: str, loss_fn: Any):
    """Also its loss, and the gradient of all."""
    model = make(name, stacked=True, dtype=jnp.float64)
    batch = packed()
    rows = eqx.filter_jit(lambda m: loss_fn(m, *batch))(model)
    alone = eqx.filter_jit(lambda m: loss_of_texts(loss_fn, m))(model)
    predicted = {
        next_token_loss: sum(LENGTHS) - len(LENGTHS),
        labels_loss: sum(LENGTHS),
    }
    assert rows.weight == alone.weight == predicted[loss_fn]
    np.testing.assert_allclose(rows.value, alone.value, rtol=1e-9)

    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: loss_fn(m, *batch).value))
    wanted = eqx.filter_jit(eqx.filter_grad(lambda m: loss_of_texts(loss_fn, m).value))
    found, expected = rx.to_arrays(gradient(model)), rx.to_arrays(wanted(model))
    for path, x in expected.items():
        floor = 1e-9 * float(jnp.abs(x).max()) + 1e-12
        np.testing.assert_allclose(found[path], x, rtol=1e-6, atol=floor, err_msg=path)


@pytest.mark.parametrize(
    ("name", "loss_fn"), [("mistral", next_token_loss), ("roberta_masked", labels_loss)]
)
def test_rows_are_the_same_on_a_mesh(name: str, loss_fn: Any):
    mesh = mesh_of("2x2x2")
    model = make(name, stacked=True)
    ids, segments = packed()
    # Two rows for each data shard, of eight tokens for each shard of `tensor`.
    batch = (jnp.tile(ids, (4, 1)), jnp.tile(segments, (4, 1)))
    whole = eqx.filter_jit(lambda m: loss_fn(m, *batch).value)(model)
    placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    split = jax.device_put(batch, rx.batch_sharding(mesh))
    found = eqx.filter_jit(lambda m, b: loss_fn(m, *b).value)(placed, split)
    np.testing.assert_allclose(found, whole, rtol=1e-5)


def test_attention_with_a_mask_hides_the_other_texts():
    """As the model asks for cuDNN's, which takes a mask of all pairs of tokens."""
    model = restack(make("mistral"), attention="cudnn")
    ids, segments = packed()
    context, _ = make_context(model, jnp.asarray(ids), None, None, texts=segments)
    behind = np.arange(WIDTH)[:, None] - np.arange(WIDTH)
    same = segments[:, :, None] == segments[:, None]
    seen = same & (behind >= 0) & (segments != 0)[:, None]
    near = seen & (behind < model.config.window)
    assert context.segments is None
    assert context.mask is not None
    np.testing.assert_array_equal(context.mask[:, 0], near)
    places = [[*range(5), *range(3), *range(5)], [*range(7), *range(4), *range(2)]]
    np.testing.assert_array_equal(context.positions, places)


def test_a_row_may_be_longer_than_the_table_of_positions():
    model = make("gpt2", n_positions=8)
    ids, segments = packed()
    hidden, _ = model.hidden_states(ids, segments=segments)
    assert bool(jnp.all(jnp.isfinite(hidden)))


REFUSED = {
    "shape": (lambda s: {"segments": s[:, :-1]}, r"segments is int32\[2, 12\], but it"),
    "dtype": (lambda s: {"segments": s != 0}, r"segments is bool\[2, 13\], but it"),
    "mask": (
        lambda s: {"segments": s, "attention_mask": s != 0},
        "segments and attention_mask are both given",
    ),
}


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("annotations_unchecked")
def test_segments_that_do_not_fit_are_refused(name: str, family: str):
    given, message = REFUSED[name]
    ids, segments = packed()
    with pytest.raises(ValueError, match=message):
        make(family).hidden_states(ids, **given(segments))


def test_segments_with_a_cache_are_refused():
    model = make("gpt2")
    ids, segments = packed()
    with pytest.raises(ValueError, match="segments and a cache are both given"):
        model.hidden_states(ids, segments=segments, cache=model.init_cache(2, WIDTH))


READERS: dict[str, Any] = {
    "call": lambda model, ids, segments: model(ids, ids, segments=segments),
    "encode": lambda model, ids, segments: model.encode(ids, segments=segments),
    "decode": lambda model, ids, segments: model.decode(
        ids, model.encode(ids), segments=segments
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_texts_of_a_model_that_writes_what_it_reads_are_refused(name: str):
    with pytest.raises(ValueError, match="segments is for models that only read or"):
        READERS[name](make("t5"), *packed())


@pytest.mark.parametrize("name", ["bert_labels", "roberta_labels"])
def test_a_classifier_of_rows_refuses_several_texts(name: str):
    """It reads the first token of a row."""
    ids, segments = packed()
    with pytest.raises(ValueError, match="segments is given, but the classifier reads"):
        make(name)(ids, segments=segments)
