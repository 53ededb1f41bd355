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
# By row: the texts, in their order. The rows end in five and in two tokens of padding.
ROWS = ((0, 1), (2, 3))
WIDTH = 13
NAMES = ("gpt2", "gptj", "opt_350m", "mistral", "gemma3", "mixtral", "smollm3")


def texts() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    found = [rng.integers(2, VOCABULARY, n).astype(np.int32) for n in LENGTHS]
    return [jnp.asarray(text) for text in found]


def packed() -> tuple[jax.Array, jax.Array]:
    """The rows, and for each token the number of its text."""
    ids = np.full((len(ROWS), WIDTH), 1, np.int32)
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


def loss_of_rows(model: Any, batch: Any, key: Any = None) -> Any:
    ids, segments = batch
    hidden, _ = model.hidden_states(ids[:, :-1], segments=segments[:, :-1])
    weights = next_in_text(segments).astype(jnp.float32)
    return cross_entropy(hidden, model.head, ids[:, 1:], weights=weights)


def loss_of_texts(model: Any) -> Any:
    """The same, of each text alone."""
    losses = []
    for text in texts():
        hidden, _ = model.hidden_states(text[None, :-1])
        losses.append(cross_entropy(hidden, model.head, text[None, 1:]))
    return sum(losses[1:], losses[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_text_in_a_row_is_as_if_alone(name: str):
    """Also its loss, and the gradient of all."""
    model = make(name, stacked=True)
    batch = packed()
    rows = eqx.filter_jit(lambda m: loss_of_rows(m, batch))(model)
    alone = eqx.filter_jit(loss_of_texts)(model)
    assert rows.weight == alone.weight == sum(LENGTHS) - len(LENGTHS)
    np.testing.assert_allclose(rows.value, alone.value, rtol=2e-6)

    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: loss_of_rows(m, batch).value))
    wanted = eqx.filter_jit(eqx.filter_grad(lambda m: loss_of_texts(m).value))
    # Float32 sums over other parts of the texts.
    found, expected = rx.to_arrays(gradient(model)), rx.to_arrays(wanted(model))
    for path, x in expected.items():
        floor = 1e-5 * float(jnp.abs(x).max()) + 1e-7
        np.testing.assert_allclose(found[path], x, rtol=1e-4, atol=floor, err_msg=path)


def test_rows_are_the_same_on_a_mesh():
    mesh = mesh_of("2x2x2")
    model = make("mistral", stacked=True)
    ids, segments = packed()
    # Two rows for each data shard, of eight tokens for each shard of `tensor`.
    batch = (jnp.tile(ids, (4, 1)), jnp.tile(segments, (4, 1)))
    whole = eqx.filter_jit(lambda m: loss_of_rows(m, batch).value)(model)
    placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    split = jax.device_put(batch, rx.batch_sharding(mesh))
    found = eqx.filter_jit(lambda m, b: loss_of_rows(m, b).value)(placed, split)
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


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("annotations_unchecked")
def test_segments_that_do_not_fit_are_refused(name: str):
    given, message = REFUSED[name]
    ids, segments = packed()
    with pytest.raises(ValueError, match=message):
        make("gpt2").hidden_states(ids, **given(segments))


def test_segments_with_a_cache_are_refused():
    model = make("gpt2")
    ids, segments = packed()
    with pytest.raises(ValueError, match="segments and a cache are both given"):
        model.hidden_states(ids, segments=segments, cache=model.init_cache(2, WIDTH))


def test_texts_of_a_model_with_an_encoder_are_refused():
    model = make("t5")
    ids, segments = packed()
    memory = model.encode(ids)
    with pytest.raises(ValueError, match="segments is for models without an encoder"):
        model.decode(ids, memory, segments=segments)
