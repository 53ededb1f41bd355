"""`beam_search` against a search written by hand, all texts there are, other meshes, and its own promises."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count_compilations, filled, in_long
from jax.sharding import NamedSharding, PartitionSpec
from test_generate import LLAMA, NEW, PROMPT, VOCAB, changed, forward, make_model, padded

import redco_eqx as rx
from redco_eqx._compiled.communication import communication
from redco_eqx._sharding.mesh import for_use
from redco_eqx.models import LlamaConfig, LlamaForCausalLM, beam_search, generate
from redco_eqx.models._generate.beam_search import _search, check_options
from redco_eqx.models._generate.beams import Rules
from redco_eqx.models._generate.prompt import Prompt

BEAMS, PAD = 3, 63
KINDS = (False, True, "never")
Text = tuple[int, ...]


@pytest.fixture(scope="module")
def prompts() -> tuple[np.ndarray, list[int]]:
    """Rows of tokens, and how many of each are real."""
    rows = np.random.default_rng(0).integers(0, VOCAB, (4, PROMPT)).astype(np.int32)
    return rows, [6, 3, 1, 5]


def log_probabilities(model: Any, prompt: np.ndarray, texts: list[Text], width: int, num: int) -> np.ndarray:
    """Return the log-probabilities of the token after each text: one forward pass, with no cache or mask."""
    whole = np.zeros((width, len(prompt) + num), np.int32)
    for row, text in enumerate(texts):
        whole[row, : len(prompt) + len(text)] = [*prompt, *text]
    logits = np.asarray(forward(model, jnp.asarray(whole)), np.float64)
    ends = [len(prompt) + len(text) - 1 for text in texts]
    logits = logits[np.arange(len(texts)), ends]
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def searched(
    model: Any, prompt: np.ndarray, *, num: int, width: int, penalty: float, kind: Any, ends: Text
) -> list[tuple[float, Text]]:
    """The best texts and their scores."""
    running: list[tuple[float, Text]] = [(0.0, ())]
    done: list[tuple[float, Text]] = []
    for length in range(1, num + 1):
        after = log_probabilities(model, prompt, [text for _, text in running], width, num)
        longer = [
            (total + one, (*text, token))
            for (total, text), row in zip(running, after)
            for token, one in enumerate(row)
        ]
        longer.sort(reverse=True)
        ended = [x for x in longer[:width] if x[1][-1] in ends or length == num]
        done += [(total / length**penalty, text) for total, text in ended]
        done = sorted(done, reverse=True)[:width]
        running = [x for x in longer if x[1][-1] not in ends][:width]
        reach = num if kind == "never" and penalty > 0 else length
        if len(done) == width and (kind is True or running[0][0] / reach**penalty <= done[-1][0]):
            break
    return done


def assert_found(tokens: Any, scores: Any, expected: list[tuple[float, Text]]) -> None:
    for row, score, (wanted, text) in zip(np.asarray(tokens), np.asarray(scores), expected, strict=True):
        np.testing.assert_array_equal(row, [*text, *[PAD] * (len(row) - len(text))])
        # A sum of as many float32 log-probabilities as the text is long, of logits summed in another order.
        np.testing.assert_allclose(score, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("gpt2", True), *in_long(("mistral", True), ("gptj", False), ("opt-350m", True))],
)
def test_equals_a_search_by_hand_without_a_cache(name, stacked, prompts):
    rows, lengths = prompts
    model = make_model(name, stacked)
    greedy = np.asarray(generate(model, rows, max_new_tokens=NEW))
    ends = (int(greedy[0, 4]), int(greedy[3, 6]))
    results = set()
    for kind, penalty in [(False, 1.0), (False, -0.5), (True, 1.0), ("never", 2.0)]:
        options: Any = {"kind": kind, "penalty": penalty, "ends": ends}
        expected = [
            searched(model, row[:length], num=NEW, width=BEAMS, **options) for row, length in zip(rows, lengths)
        ]
        for side in ("left", "right") if penalty == 1 else ("left",):
            ids, mask = padded(rows, lengths, side)
            found = beam_search(
                model, ids, attention_mask=mask, max_new_tokens=NEW, num_beams=BEAMS,
                length_penalty=penalty, early_stopping=kind, eos_token_id=ends, pad_token_id=PAD,
            )  # fmt: skip
            for row in range(len(rows)):
                assert_found(found.tokens[row], found.scores[row], expected[row])
        results.add(str(expected))
    assert len(results) >= 3, "the options make no difference"


TINY: dict[str, Any] = {**LLAMA, "vocab_size": 4}


@functools.cache
def tiny() -> Any:
    config = LlamaConfig(**TINY)
    abstract = eqx.filter_eval_shape(
        lambda key: LlamaForCausalLM(config, stacked=True, key=key), jax.random.key(0)
    )
    return filled(abstract, jnp.float32, 0)


@pytest.mark.parametrize(("ends", "penalty"), [((), -1.0), ((2,), 0.0), ((0, 3), 2.0)])
def test_a_search_of_all_prefixes_finds_every_text(ends, penalty):
    """With 4 tokens, at most 3 long, there are no more than 64 texts, and as many beams."""
    num, width = 3, 64
    prompt = np.asarray([1, 3, 0, 2], np.int32)
    totals: dict[Text, float] = {(): 0.0}
    texts: list[tuple[float, Text]] = []
    for length in range(1, num + 1):
        after = log_probabilities(tiny(), prompt, list(totals), width, num)
        longer = {
            (*text, token): total + after[row, token]
            for row, (text, total) in enumerate(totals.items())
            for token in range(4)
        }
        done = [text for text in longer if text[-1] in ends or length == num]
        texts += [(longer[text] / length**penalty, text) for text in done]
        totals = {text: total for text, total in longer.items() if text not in done}
    texts.sort(reverse=True)
    for kind in KINDS:
        found = beam_search(
            tiny(), prompt[None], max_new_tokens=num, num_beams=width, length_penalty=penalty,
            early_stopping=kind, eos_token_id=ends, pad_token_id=PAD,
        )  # fmt: skip
        assert_found(found.tokens[0, : len(texts)], found.scores[0, : len(texts)], texts)
        assert (np.asarray(found.scores[0, len(texts) :]) == -np.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy(kind, prompts):
    rows, lengths = prompts
    model = make_model("llama")
    ids, mask = padded(rows, lengths, "left")
    greedy = generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    options: Any = {"max_new_tokens": NEW, "eos_token_id": int(greedy[0, 4]), "pad_token_id": PAD}
    expected = generate(model, ids, attention_mask=mask, **options)
    for penalty in (0.0, 3.0):
        found = beam_search(
            model, ids, attention_mask=mask, num_beams=1, early_stopping=kind, length_penalty=penalty, **options
        )
        np.testing.assert_array_equal(found.tokens[:, 0], expected)


@pytest.mark.parametrize(
    ("name", "dtype", "rtol"),
    [
        ("llama", jnp.float32, 1e-5),
        ("llama", jnp.bfloat16, 0.05),
        ("gpt2", jnp.float16, 0.01),
    ],
)
def test_a_score_is_what_the_model_says_of_the_text(name, dtype, rtol, prompts):
    """To the rounding of its dtype, with the cache and without; scores are summed in float32 always."""
    rows, _ = prompts
    model = make_model(name, dtype=dtype)
    found = beam_search(model, rows, max_new_tokens=NEW, num_beams=BEAMS, length_penalty=0.7)
    assert found.scores.dtype == np.float32
    assert (np.diff(found.scores, axis=1) <= 0).all()
    whole = np.concatenate([np.repeat(rows, BEAMS, 0), np.reshape(found.tokens, (-1, NEW))], axis=1)
    logits = np.asarray(forward(model, jnp.asarray(whole)), np.float64)[:, PROMPT - 1 : -1]
    logits -= np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    totals = np.take_along_axis(logits, whole[:, PROMPT:, None], axis=-1)[..., 0].sum(axis=1)
    np.testing.assert_allclose(np.ravel(found.scores), totals / NEW**0.7, rtol=rtol)


def test_rows_do_not_know_of_each_other(prompts):
    rows, lengths = prompts
    model = make_model("llama")
    ids, mask = padded(rows, lengths, "left")
    ends = [int(x) for x in generate(model, rows, max_new_tokens=NEW)[:, 2]]
    options: Any = {"max_new_tokens": NEW, "num_beams": BEAMS, "eos_token_id": ends, "pad_token_id": PAD}
    whole = beam_search(model, ids, attention_mask=mask, **options)
    for row in range(len(rows)):
        alone = beam_search(model, ids[row : row + 1], attention_mask=mask[row : row + 1], **options)
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row])
    mask[1] = 0
    found = beam_search(model, np.where(mask == 1, ids, -100), attention_mask=mask, **options)
    np.testing.assert_array_equal(found.tokens[1], PAD)
    np.testing.assert_array_equal(found.scores[1], -np.inf)
    np.testing.assert_array_equal(found.tokens[2:], whole.tokens[2:])


def test_the_loop_stops_when_nothing_better_is_to_be_found(prompts):
    rows, _ = prompts
    calls: list[int] = []

    class Counted(LlamaForCausalLM):
        def logits(self, hidden: Any) -> Any:
            jax.debug.callback(lambda: calls.append(1))
            return super().logits(hidden)

    model = changed(make_model("llama"), Counted)

    def count(kind: Any, ends: Any, penalty: float) -> int:
        calls.clear()
        found = beam_search(
            model, rows, max_new_tokens=NEW, num_beams=BEAMS, eos_token_id=ends, early_stopping=kind,
            length_penalty=penalty,
        )  # fmt: skip
        jax.block_until_ready(found)
        jax.effects_barrier()
        return len(calls)

    assert count(False, (), 1.0) == NEW
    often = range(0, VOCAB, 2)  # soon all beams have ended
    assert count(True, often, 1.0) <= 4
    assert count(True, often, 1.0) <= count(False, often, 1.0) <= count("never", often, 1.0) <= NEW
    # Without a penalty a text can only get worse.
    assert count(False, often, 0.0) == count("never", often, 0.0) < NEW


def test_compiles_once_for_all_prompts_and_penalties(prompts):
    rows, lengths = prompts
    _, mask = padded(rows, lengths, "left")
    model = make_model("llama")
    options: Any = {"max_new_tokens": 5, "num_beams": 2}
    jax.block_until_ready(beam_search(model, rows, attention_mask=np.ones_like(rows), **options))
    other = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, model)
    with count_compilations() as compilations:
        jax.block_until_ready(beam_search(other, rows, attention_mask=mask, length_penalty=0.3, **options))
    assert not compilations


# Meshes


def on_mesh(model: Any, mesh: Any) -> Any:
    """The model's arrays as structs that lie on a mesh by the rules."""
    return jax.tree.map(
        lambda x, s: x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        model,
        rx.shard_rules(model, mesh),
    )


def abstract_llama(**changes: Any) -> Any:
    config = LlamaConfig(**{**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, **changes})
    return eqx.filter_eval_shape(
        lambda key: LlamaForCausalLM(config, stacked=False, key=key), jax.random.key(0)
    )


MESHES: dict[str, Any] = {
    "data8": {},
    "tensor4": {"tensor": 4},
    "2x2x2": {"tensor": 2, "fsdp": 2},
}


@pytest.mark.parametrize(("vocabulary", "num_rows"), [(64, 8), *in_long((61, 4), (64, 3))])
def test_every_mesh_finds_the_same(vocabulary, num_rows):
    """In float64, in which no tie decides. Neither the vocabulary nor the batch has to divide."""
    rows = np.random.default_rng(1).integers(1, vocabulary, (num_rows, PROMPT)).astype(np.int32)
    mask = np.arange(PROMPT) >= np.arange(num_rows)[:, None] % 4
    results = []
    with jax.enable_x64(True):
        model = filled(abstract_llama(vocab_size=vocabulary), jnp.float64, 0)
        for mesh in [rx.make_mesh(data=1), *(rx.make_mesh(**sizes) for sizes in MESHES.values())]:
            placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
            divides = num_rows % (mesh.size // mesh.shape["tensor"]) == 0
            sharding = rx.batch_sharding(mesh) if divides else NamedSharding(mesh, PartitionSpec())
            found = beam_search(
                placed, *jax.device_put([rows], sharding), attention_mask=jax.device_put(mask, sharding),
                max_new_tokens=NEW, num_beams=BEAMS, eos_token_id=(3, 5, 7, 9), pad_token_id=60,
            )  # fmt: skip
            results.append(jax.tree.map(np.asarray, found))
    assert len(np.unique(results[0].tokens)) > NEW
    for other in results[1:]:
        np.testing.assert_array_equal(other.tokens, results[0].tokens)
        # The softmax of `jax.nn.dot_product_attention` is in float32.
        np.testing.assert_allclose(other.scores, results[0].scores, rtol=1e-7)


def test_it_is_a_predict_fn():
    """With 5 examples in batches of 4, the output of the tail is as long as the tail."""
    rows = np.random.default_rng(1).integers(1, VOCAB, (5, PROMPT)).astype(np.int32)
    mesh, model = rx.make_mesh(tensor=4), filled(abstract_llama(), jnp.float32, 0)
    placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    options: Any = {"max_new_tokens": NEW, "num_beams": BEAMS}

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return beam_search(model, batch, **options)

    found = rx.predict(
        rx.init_state(placed, key=jax.random.key(5)), rows,
        collate_fn=np.stack, predict_fn=predict_fn, batch_size=4,
    )  # fmt: skip
    expected = beam_search(model, rows, **options)
    assert len(found) == 5
    for row, own in enumerate(found):
        np.testing.assert_array_equal(own.tokens, expected.tokens[row])
        # In float32; over `tensor` features are summed in another order.
        np.testing.assert_allclose(own.scores, expected.scores[row], rtol=1e-5)


def collectives_of_a_step(model: Any, mesh: Any, num_rows: int, *, num_beams: int) -> Any:
    """Return the communication of one pass of the loop."""
    arrays, static = eqx.partition(on_mesh(model, mesh), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    divides = num_rows % (mesh.size // mesh.shape["tensor"]) == 0
    sharding = rx.batch_sharding(mesh) if divides else NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((num_rows, PROMPT), jnp.int32, sharding=sharding)

    @jax.jit
    def run(arrays: Any, ids: Any) -> Any:
        model = eqx.combine(arrays, static)
        return beam_search(model, ids, max_new_tokens=NEW, num_beams=num_beams, eos_token_id=3)

    found = communication(run.lower(arrays, ids).compile(), mesh)
    return [c for c in found if "while/body" in c.operation]


@pytest.mark.parametrize("num_rows", [4, 3])
def test_a_step_gathers_candidates_alone(num_rows):
    """On data 2 x tensor 4: two sums a layer and one of the embedding, two numbers a beam for the softmax, and
    a value and a place of each shard's candidates. Nothing is gathered over `data`, nor is any cache."""
    mesh, num_beams = rx.make_mesh(tensor=4), 5
    model = abstract_llama(vocab_size=1024)
    found = collectives_of_a_step(model, mesh, num_rows, num_beams=num_beams)
    own = num_rows // 2 if num_rows % 2 == 0 else num_rows
    num_candidates = 4 * 2 * num_beams
    hidden, beams = (f"f32[{own},{num_beams},32]",), own * num_beams
    sums = [c for c in found if c.kind == "all-reduce"]
    assert [c.shapes for c in sums if c.shapes == hidden] == [hidden] * (2 * model.config.num_layers + 1)
    assert sum(c.result_bytes for c in sums if c.shapes != hidden) <= 2 * 4 * beams
    gathered = sorted(c.shapes for c in found if c.kind != "all-reduce")
    assert gathered == [(f"f32[{own},{num_candidates}]",), (f"s32[{own},{num_candidates}]",)]
    assert sum(c.result_bytes for c in found if c.kind != "all-reduce") == 8 * own * num_candidates
    assert {c.axes for c in found} == {("tensor",)}


def test_a_vocabulary_that_does_not_divide_costs_nothing_more():
    mesh = rx.make_mesh(tensor=4)
    model = abstract_llama(vocab_size=1021)
    found = collectives_of_a_step(model, mesh, 4, num_beams=5)
    assert [(c.kind, c.axes, c.shapes) for c in found] == [("all-reduce", ("tensor",), ("f32[2,5,32]",))] * (
        2 * model.config.num_layers
    )


def test_over_fsdp_only_weights_are_gathered():
    """Neither activations nor the cache; and what goes over `tensor` is as without it."""
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    model = abstract_llama(vocab_size=1024, hidden_size=64, intermediate_size=96)
    found = collectives_of_a_step(model, mesh, 8, num_beams=5)
    placed = [x for x in jax.tree.leaves(on_mesh(model, mesh)) if isinstance(x, jax.ShapeDtypeStruct)]
    weights = set()
    for x in placed:
        assert isinstance(x.sharding, NamedSharding)
        shape = NamedSharding(mesh, for_use(x.sharding.spec)).shard_shape(x.shape)
        weights.add((f"f32[{','.join(map(str, shape))}]",))
    assert {(c.kind, c.axes) for c in found if c.axes != ("tensor",)} == {("all-gather", ("fsdp",))}
    assert {c.shapes for c in found if c.axes == ("fsdp",)} <= weights
    assert {(c.kind, c.shapes) for c in found if c.axes == ("tensor",)} == {
        ("all-reduce", ("f32[2,5,64]",)),
        ("all-reduce", ("f32[2,5]",)),
        ("all-gather", ("f32[2,20]",)),
        ("all-gather", ("s32[2,20]",)),
    }


def test_the_prompt_is_in_the_cache_once():
    """Not once for each beam; and no second cache is there, reordered."""
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": 16, "num_key_value_heads": 4})
    model = LlamaForCausalLM(config, stacked=True, key=jax.random.key(0))
    length, num_new, num_beams = 24, 4, 8
    ids = jnp.ones((16, length), jnp.int32)
    jitted: Any = _search
    rules = Rules(num_new, num_beams, False, (), 0)
    program = jitted.lower(model, Prompt(ids, ids == 1), jnp.ones(()), rules).compile()
    cache = jax.eval_shape(lambda: model.init_cache(16, length + num_beams * num_new))
    in_cache = 4 * (cache.key.size + cache.value.size)
    found = program.compiled.memory_analysis().temp_size_in_bytes
    assert num_beams * (length + num_new) > 3 * (length + num_beams * num_new)  # as it would be elsewhere
    assert in_cache <= found <= 2 * in_cache


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_beams": 0}, r"num_beams=0.*at least 1"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0.*at least 1"),
        ({"length_penalty": float("inf")}, r"length_penalty=inf.*finite"),
        ({"attention_mask": np.ones((4, PROMPT + 1))}, r"attention_mask has shape \(4, 7\)"),
        ({"inputs": np.ones((4, PROMPT), np.float32)}, r"inputs has dtype float32"),
        ({"inputs": np.ones((4, 0), np.int32)}, r"inputs has shape \(4, 0\)"),
        ({"inputs": np.full((4, 2), 10**6)}, r"inputs\[0, 0\] is 1000000, but the model's tokens are 0 to"),
        ({"max_new_tokens": NEW + 1}, r"a prompt of 6 and max_new_tokens=11.*16 positions"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_refused_before_compilation(changes, message, prompts):
    given = {"inputs": prompts[0], "max_new_tokens": NEW, "num_beams": BEAMS, **changes}
    model = make_model("gpt2")
    with count_compilations() as compilations, pytest.raises(ValueError, match=rf"^beam_search: .*{message}"):
        beam_search(model, given.pop("inputs"), **given)
    assert not compilations


@pytest.mark.parametrize("value", ["always", 1, None])
def test_another_early_stopping_is_refused(value):
    with pytest.raises(ValueError, match=rf"early_stopping={value!r}, but it must be True, False or 'never'"):
        check_options(2, 1.0, value)  # by `beam_search`, whose annotation is checked before it here


def test_end_and_padding_are_those_of_the_configuration(prompts):
    rows, _ = prompts
    model = make_model("llama")
    end = tuple(range(0, VOCAB, 2))
    configured = changed(model, config=dataclasses.replace(model.config, eos_token_id=end, pad_token_id=9))
    options: Any = {"max_new_tokens": NEW, "num_beams": BEAMS}
    expected = beam_search(model, rows, eos_token_id=end, pad_token_id=9, **options)
    np.testing.assert_array_equal(beam_search(configured, rows, **options).tokens, expected.tokens)
    assert (np.asarray(expected.tokens)[:, :, -1] == 9).any()
