"""`generate` and `beam_search` with an encoder: against passes with no cache, and what is done once."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count_compilations, filled, in_long
from test_beam_search import on_mesh
from test_generate import changed

import redco_eqx as rx
from redco_eqx._compiled.communication import communication
from redco_eqx.models import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    beam_search,
    generate,
)

VOCAB, SOURCE, NEW, BEAMS, PAD = 64, 9, 8, 3, 63
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "tie_word_embeddings": False,
}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": SOURCE + NEW,
}


def abstract(kind: Any, config: Any, *, stacked: bool) -> Any:
    return eqx.filter_eval_shape(lambda key: kind(config, stacked=stacked, key=key), jax.random.key(0))


@functools.cache
def make(name: str, stacked: bool = True, dtype: Any = jnp.float32) -> Any:
    """A model with such weights that what it says depends on all that it has read."""
    if name == "t5":
        model = filled(abstract(T5ForConditionalGeneration, T5Config(**T5), stacked=stacked), dtype, 0)
        return jax.tree.map(lambda x: 2 * x if eqx.is_array(x) and x.ndim > 1 else x, model)
    model = filled(abstract(BartForConditionalGeneration, BartConfig(**BART), stacked=stacked), dtype, 0)

    def scaled(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not eqx.is_array(x):
            return x
        if name.endswith("bias"):
            return 0.1 * x
        if "norm" in name:
            return 1 + 0.1 * x
        return 4 * x if "embed_positions" in name else 3 * x if "shared" in name else x

    return jax.tree_util.tree_map_with_path(scaled, model)


@pytest.fixture(scope="module")
def sources() -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens and their mask, padded with tokens that mean something."""
    rows = np.random.default_rng(0).integers(3, VOCAB, (4, SOURCE)).astype(np.int32)
    return rows, np.arange(SOURCE) < np.asarray([9, 4, 1, 6])[:, None]


@eqx.filter_jit
def forward(model: Any, inputs: Any, mask: Any, text: Any) -> Any:
    return jax.nn.log_softmax(model(inputs, text, attention_mask=mask).astype(float))


def greedy_by_hand(model: Any, inputs: np.ndarray, mask: np.ndarray, start: np.ndarray) -> np.ndarray:
    """One pass of everything over the whole text for each token."""
    num_before = start.shape[1]
    text = np.pad(start, [(0, 0), (0, NEW)])
    for end in range(num_before, num_before + NEW):
        text[:, end] = np.argmax(np.asarray(forward(model, inputs, mask, text))[:, end - 1], axis=1)
    return text[:, num_before:]


def beams_by_hand(model: Any, source: np.ndarray, mask: np.ndarray, ends: set[int]) -> list[Any]:
    """The best texts of one row and their scores, with no penalty, until no beam can be better."""
    start = model.config.decoder_start_token_id
    inputs, mask = np.repeat(source[None], BEAMS, axis=0), np.repeat(mask[None], BEAMS, axis=0)
    running: list[Any] = [(0.0, [])]
    done: list[Any] = []
    for length in range(NEW):
        text = np.zeros((BEAMS, NEW + 1), np.int32)
        for row, (_, tokens) in enumerate(running):
            text[row, : length + 1] = [start, *tokens]
        logs = np.asarray(forward(model, inputs, mask, text))[:, length]
        longer = [(s + logs[i, t], [*x, t]) for i, (s, x) in enumerate(running) for t in range(VOCAB)]
        longer = sorted(longer, reverse=True)
        done += [x for x in longer[:BEAMS] if x[1][-1] in ends or length == NEW - 1]
        done = sorted(done, reverse=True)[:BEAMS]
        running = [x for x in longer if x[1][-1] not in ends][:BEAMS]
        if len(done) == BEAMS and running[0][0] <= done[-1][0]:
            break
    return done


@pytest.mark.parametrize(("name", "stacked"), [("t5", True), ("bart", False)])
def test_cached_equals_uncached(name, stacked, sources):
    inputs, mask = sources
    model = make(name, stacked)
    start = np.full((4, 1), model.config.decoder_start_token_id, np.int32)
    expected = greedy_by_hand(model, inputs, mask, start)
    assert len(np.unique(expected)) > NEW // 2, "the model says always the same"
    options: Any = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": ()}
    np.testing.assert_array_equal(generate(model, inputs, **options), expected)
    hidden = np.where(mask, inputs, -100)  # padding need not be in the vocabulary
    np.testing.assert_array_equal(generate(model, hidden, **options), expected)

    ends = {int(expected[0, 3]), int(expected[1, 5])}
    options |= {"eos_token_id": sorted(ends), "pad_token_id": PAD}
    found = beam_search(model, inputs, num_beams=BEAMS, length_penalty=0.0, **options)
    for row in range(len(inputs)):
        wanted = beams_by_hand(model, inputs[row], mask[row], ends)
        for tokens, score, (total, text) in zip(found.tokens[row], found.scores[row], wanted, strict=True):
            np.testing.assert_array_equal(tokens, [*text, *[PAD] * (NEW - len(text))])
            # A sum of as many float32 log-probabilities as the text is long, of logits summed in another order.
            np.testing.assert_allclose(score, total, rtol=1e-5)


@pytest.mark.parametrize(("name", "dtype", "rtol"), [("t5", jnp.float16, 0.01), ("bart", jnp.bfloat16, 0.05)])
def test_a_score_in_low_precision_is_what_the_model_says_of_the_text(name, dtype, rtol, sources):
    """To the rounding of its dtype, with the cache and without; scores are summed in float32 always."""
    inputs, mask = sources
    model = make(name, dtype=dtype)
    options: Any = {"attention_mask": mask, "max_new_tokens": NEW, "num_beams": BEAMS, "eos_token_id": ()}
    found = beam_search(model, inputs, length_penalty=0.0, **options)
    assert found.scores.dtype == np.float32
    new = np.reshape(found.tokens, (-1, NEW))
    text = np.pad(new, ((0, 0), (1, 0)), constant_values=model.config.decoder_start_token_id)[:, :-1]
    logs = forward(model, np.repeat(inputs, BEAMS, 0), np.repeat(mask, BEAMS, 0), text)
    totals = np.take_along_axis(np.asarray(logs), new[..., None], axis=-1)[..., 0].sum(axis=1)
    np.testing.assert_allclose(np.ravel(found.scores), totals, rtol=rtol)


def test_a_text_begins_with_what_is_given(sources):
    inputs, mask = sources
    model = make("t5")
    start = np.random.default_rng(1).integers(3, VOCAB, (4, 3)).astype(np.int32)
    options: Any = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": ()}
    expected = greedy_by_hand(model, inputs, mask, start)
    found = generate(model, inputs, decoder_input_ids=start, **options)
    np.testing.assert_array_equal(found, expected)
    best = beam_search(model, inputs, decoder_input_ids=start, num_beams=1, **options)
    np.testing.assert_array_equal(best.tokens[:, 0], expected)


def test_a_row_without_a_source_gives_padding_and_harms_no_other(sources):
    inputs, mask = sources
    options: Any = {"max_new_tokens": NEW, "eos_token_id": (), "pad_token_id": PAD}
    for search in (generate, functools.partial(beam_search, num_beams=BEAMS)):
        whole = search(make("t5"), inputs, attention_mask=mask, **options)
        gap = search(
            make("t5"), inputs, attention_mask=np.where(np.arange(4)[:, None] == 1, 0, mask), **options
        )
        tokens, expected = (np.asarray(jax.tree.leaves(x)[0]) for x in (gap, whole))
        np.testing.assert_array_equal(tokens[[0, 2, 3]], expected[[0, 2, 3]])
        np.testing.assert_array_equal(tokens[1], PAD)


def test_the_encoder_and_its_keys_run_once(sources):
    inputs, mask = sources
    calls: list[str] = []

    class Counted(T5ForConditionalGeneration):
        def encoder_states(self, *args: Any, **options: Any) -> Any:
            jax.debug.callback(lambda: calls.append("encoder"))
            return super().encoder_states(*args, **options)

        def memorise(self, *args: Any, **options: Any) -> Any:
            jax.debug.callback(lambda: calls.append("memory"))
            return super().memorise(*args, **options)

        def logits(self, hidden: Any) -> Any:
            jax.debug.callback(lambda: calls.append("logits"))
            return super().logits(hidden)

    model = changed(make("t5"), Counted)
    for search in (generate, functools.partial(beam_search, num_beams=BEAMS)):
        calls.clear()
        found = search(model, inputs, attention_mask=mask, max_new_tokens=NEW, eos_token_id=())
        jax.block_until_ready(found)
        jax.effects_barrier()
        assert sorted(calls) == ["encoder", *["logits"] * NEW, "memory"]


MESHES: tuple[dict[str, Any], ...] = ({"data": 1}, {"tensor": 4}, {"tensor": 2, "fsdp": 2})


@pytest.mark.parametrize("name", ["t5", *in_long("bart")])
def test_every_mesh_says_the_same(name, sources):
    inputs, mask = sources
    results = []
    with jax.enable_x64(True):
        model = make(name, True, jnp.float64)
        for mesh in [rx.make_mesh(**sizes) for sizes in MESHES]:
            placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
            batch = jax.device_put((inputs, mask), rx.batch_sharding(mesh))
            options: Any = {"attention_mask": batch[1], "max_new_tokens": NEW, "eos_token_id": (5, 9)}
            greedy = generate(placed, batch[0], **options)
            results.append((greedy, beam_search(placed, batch[0], num_beams=BEAMS, **options).tokens))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_a_step_costs_three_sums_a_layer():
    """On data 2 x tensor 4, and besides only candidates: neither the memory nor the cache is gathered."""
    mesh = rx.make_mesh(tensor=4)
    model = abstract(T5ForConditionalGeneration, T5Config(**{**T5, "vocab_size": 1024}), stacked=False)
    arrays, static = eqx.partition(on_mesh(model, mesh), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    ids = jax.ShapeDtypeStruct((4, SOURCE), jnp.int32, sharding=rx.batch_sharding(mesh))

    @jax.jit
    def run(arrays: Any, ids: Any) -> Any:
        return beam_search(eqx.combine(arrays, static), ids, max_new_tokens=NEW, num_beams=5)

    found = communication(run.lower(arrays, ids).compile(), mesh)
    inside = [(c.kind, c.axes, c.shapes) for c in found if "while/body" in c.operation]
    hidden = ("all-reduce", ("tensor",), ("f32[2,5,32]",))
    assert inside.count(hidden) == 3 * model.config.num_decoder_layers + 1
    assert set(inside) - {hidden} == {
        ("all-reduce", ("tensor",), ("f32[2,5]",)),
        ("all-gather", ("tensor",), ("f32[2,40]",)),
        ("all-gather", ("tensor",), ("s32[2,40]",)),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": np.ones((4, SOURCE), np.float32)}, r"inputs has dtype float32"),
        ({"inputs": np.ones((4, 3, 8), np.int32)}, r"inputs has shape \(4, 3, 8\)"),
        ({"attention_mask": np.ones((4, 2))}, r"attention_mask has shape \(4, 2\).*\(4, 9\)"),
        (
            {"inputs": np.ones((4, 3, 8, 8), np.float32), "attention_mask": np.ones((4, 64))},
            r"attention_mask is for texts, but inputs has shape \(4, 3, 8, 8\)",
        ),
        ({"decoder_input_ids": np.ones((3, 1), np.int32)}, r"decoder_input_ids has 3 rows, but inputs 4"),
        ({"decoder_input_ids": np.ones((4, 0), np.int32)}, r"decoder_input_ids has shape \(4, 0\)"),
        ({"max_new_tokens": SOURCE + NEW}, r"a prompt of 1 and max_new_tokens=17.*17 positions"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_refused_before_compilation(changes, message, sources):
    given: Any = {"inputs": sources[0], "max_new_tokens": NEW, **changes}
    inputs, model = given.pop("inputs"), make("bart")
    for name, search in (("generate", generate), ("beam_search", functools.partial(beam_search, num_beams=2))):
        with count_compilations() as compilations, pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
            search(model, inputs, **given)
        assert not compilations


def test_a_model_that_does_not_say_how_texts_begin_is_refused(sources):
    model = make("t5")
    model = changed(model, config=dataclasses.replace(model.config, decoder_start_token_id=None))
    with pytest.raises(ValueError, match=r"no decoder_start_token_id\. Pass decoder_input_ids"):
        generate(model, sources[0], max_new_tokens=NEW)
