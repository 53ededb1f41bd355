"""`generate` against repeated forward passes with no cache, rows alone, and the distributions asked for."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count_compilations, filled
from jaxtyping import Array
from scipy import stats

import redco_eqx as rx
from redco_eqx._compiled.communication import communication
from redco_eqx.models import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    generate,
)
from redco_eqx.models._generate.generate import _generate, _Options
from redco_eqx.models._generate.prompt import Prompt, prefill
from redco_eqx.models._generate.sampling import candidates, sample

VOCAB, PROMPT, NEW = 64, 6, 10

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": PROMPT + NEW,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": None,
}
OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": PROMPT + NEW,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": None,
}
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    "mistral": (LlamaForCausalLM, MistralConfig(**LLAMA, sliding_window=4)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT)),
    "gptj": (GPTJForCausalLM, GPTJConfig(**GPT, rotary_dim=4)),
    "opt": (OPTForCausalLM, OPTConfig(**OPT)),
    "opt-350m": (OPTForCausalLM, OPTConfig(**OPT, do_layer_norm_before=False, word_embed_proj_dim=16)),
}


@functools.cache
def make_model(name: str, stacked: bool = True, dtype: Any = jnp.float32) -> Any:
    """A model whose matrices are large, so that what it says depends on every token before."""
    make, config = MODELS[name]
    abstract = eqx.filter_eval_shape(lambda key: make(config, stacked=stacked, key=key), jax.random.key(0))

    def scaled(path: Any, x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        name = jax.tree_util.keystr(path)
        if name.endswith("bias"):
            return 0.2 * x
        return 1 + x if "norm" in name or ".ln_" in name else 2 * x

    return jax.tree_util.tree_map_with_path(scaled, filled(abstract, dtype, 0))


def changed(model: Any, cls: Any = None, **fields: Any) -> Any:
    """A copy with other fields, of another class if one is given."""
    new = object.__new__(cls or type(model))
    for field in dataclasses.fields(model):
        object.__setattr__(new, field.name, fields.get(field.name, getattr(model, field.name)))
    return new


@pytest.fixture(scope="module")
def prompts() -> tuple[np.ndarray, list[int]]:
    """Rows of tokens, and how many of each are real."""
    rows = np.random.default_rng(0).integers(0, VOCAB, (4, PROMPT)).astype(np.int32)
    return rows, [6, 3, 1, 5]


def padded(rows: np.ndarray, lengths: list[int], side: str) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of each row, padded with tokens that mean something, and the mask."""
    ids, mask = np.full_like(rows, 7), np.zeros_like(rows)
    for row, length in enumerate(lengths):
        where = slice(PROMPT - length, None) if side == "left" else slice(length)
        ids[row, where], mask[row, where] = rows[row, :length], 1
    return ids, mask


@eqx.filter_jit
def forward(model: Any, ids: Array) -> Array:
    return model(ids)


def continued(model: Any, rows: np.ndarray, lengths: list[int], num: int = NEW) -> np.ndarray:
    """The greedy continuation of each row: one forward pass per token over the text so far, with no cache and
    no mask. What stands after the text is of no account to a causal model."""
    text = np.zeros((len(rows), rows.shape[1] + num), np.int32)
    for row, length in enumerate(lengths):
        text[row, :length] = rows[row, :length]
    ends = np.array(lengths)
    for _ in range(num):
        logits = np.asarray(forward(model, jnp.asarray(text)), np.float64)[np.arange(len(rows)), ends - 1]
        best, second = np.sort(logits, axis=1)[:, :-3:-1].T
        assert np.all(best - second > 1e-4), "a tie would decide"
        text[np.arange(len(rows)), ends] = logits.argmax(axis=1)
        ends += 1
    return np.stack([text[row, end - num : end] for row, end in enumerate(ends)])


# Greedy


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("mistral", False),
        ("mistral", True),
        ("gpt2", False),
        ("opt-350m", True),
    ],
)
def test_cached_equals_uncached(name, stacked, prompts):
    rows, lengths = prompts
    model = make_model(name, stacked)
    expected = continued(model, rows, lengths)
    assert len(np.unique(expected)) > NEW // 2, "the model says always the same"
    for side in ("left", "right"):
        ids, mask = padded(rows, lengths, side)
        np.testing.assert_array_equal(generate(model, ids, attention_mask=mask, max_new_tokens=NEW), expected)


def test_the_window_matters(prompts):
    rows, lengths = prompts
    narrow, wide = make_model("mistral"), make_model("llama")
    assert not np.array_equal(continued(narrow, rows, lengths), continued(wide, rows, lengths))


def test_no_mask_means_all_tokens_are_real(prompts):
    model, (rows, _) = make_model("llama"), prompts
    expected = generate(model, rows, attention_mask=np.ones_like(rows), max_new_tokens=NEW)
    np.testing.assert_array_equal(generate(model, rows, max_new_tokens=NEW), expected)


def test_what_stands_in_the_padding_is_of_no_account(prompts):
    rows, lengths = prompts
    model = make_model("llama")
    ids, mask = padded(rows, lengths, "left")
    expected = generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
    for padding in (VOCAB + 5, -100):  # a padding token need not be in the vocabulary
        other = np.where(mask == 1, ids, padding)
        np.testing.assert_array_equal(generate(model, other, attention_mask=mask, max_new_tokens=NEW), expected)


def test_a_row_without_tokens_gives_padding_and_harms_no_other(prompts):
    rows, lengths = prompts
    model = make_model("llama")
    ids, mask = padded(rows, lengths, "left")
    expected = np.array(generate(model, ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=5))
    mask[1], expected[1] = 0, 5
    actual = generate(model, ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=5)
    np.testing.assert_array_equal(actual, expected)


def test_the_cache_has_the_dtype_of_the_model(prompts):
    rows, _ = prompts
    real = jnp.ones(rows.shape, bool)
    for dtype in (jnp.float32, jnp.bfloat16):
        model = make_model("llama", dtype=dtype)
        _, cache = jax.eval_shape(
            lambda ids, m=model: prefill(m, Prompt(ids, real), NEW)[:2], jnp.asarray(rows)
        )
        assert cache.key.dtype == cache.value.dtype == dtype


def test_bfloat16(prompts):
    # Sums of other lengths are rounded otherwise, so the token chosen need only be next to the best one.
    rows, _ = prompts
    model = make_model("llama", dtype=jnp.bfloat16)
    new = generate(model, rows, max_new_tokens=NEW)
    logits = np.asarray(forward(model, jnp.concatenate([rows, new], axis=1)), np.float32)[:, PROMPT - 1 : -1]
    chosen = np.take_along_axis(logits, np.asarray(new)[..., None], axis=2)[..., 0]
    rounding = 2**-8 * np.abs(logits).max() * 4
    assert np.all(chosen >= logits.max(axis=2) - rounding)
    assert rounding < logits.std() / 2


# The end


def test_padding_follows_the_end(prompts):
    rows, lengths = prompts
    model = make_model("llama")
    whole = continued(model, rows, lengths)
    ids, mask = padded(rows, lengths, "left")
    ends = (int(whole[0, 3]), int(whole[1, 5]))
    actual = np.asarray(
        generate(model, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=63)
    )
    for row, expected in zip(actual, whole):
        found = np.flatnonzero(np.isin(expected, ends))
        stop = found[0] + 1 if len(found) else NEW
        np.testing.assert_array_equal(row, [*expected[:stop], *[63] * (NEW - stop)])
    assert (actual[0, 4:] == 63).all()


def test_end_and_padding_are_those_of_the_configuration(prompts):
    rows, _ = prompts
    model = make_model("llama")
    unended = np.asarray(generate(model, rows, max_new_tokens=NEW))
    end = int(unended[0, 2])

    def with_config(**changes: Any) -> Any:
        return changed(model, config=dataclasses.replace(model.config, **changes))

    several = with_config(eos_token_id=(VOCAB + 1, end), pad_token_id=9)
    for configured, pad in [(with_config(eos_token_id=end), end), (several, 9)]:
        actual = np.asarray(generate(configured, rows, max_new_tokens=NEW))
        after = np.cumsum(unended == end, axis=1) - (unended == end) > 0
        np.testing.assert_array_equal(actual, np.where(after, pad, unended))
        assert (actual[0, 3:] == pad).all()
    np.testing.assert_array_equal(generate(several, rows, max_new_tokens=NEW, eos_token_id=()), unended)


def test_the_loop_stops_when_all_have_ended(prompts):
    rows, _ = prompts
    calls: list[int] = []

    class Counted(LlamaForCausalLM):
        def logits(self, hidden: Any) -> Any:
            jax.debug.callback(lambda: calls.append(1))
            return super().logits(hidden)

    plain = make_model("llama")
    counted = changed(plain, Counted)
    jax.block_until_ready(generate(counted, rows, max_new_tokens=NEW, eos_token_id=()))
    jax.effects_barrier()
    assert len(calls) == NEW
    calls.clear()
    first = [int(x) for x in generate(plain, rows, max_new_tokens=2)[:, 1]]
    jax.block_until_ready(generate(counted, rows, max_new_tokens=NEW, eos_token_id=first))
    jax.effects_barrier()
    assert len(calls) <= 2


# Drawing


def support(logits: list[float], top_k: int | None = None, top_p: float | None = None) -> list[int]:
    scores, tokens = candidates(jnp.array([logits]), top_k=top_k, top_p=top_p)
    return [int(t) for t, s in zip(tokens[0], scores[0]) if s > -np.inf]


def test_which_tokens_may_be_drawn():
    logits = [float(np.log(p)) for p in (0.1, 0.4, 0.2, 0.2, 0.1)]
    assert support(logits) == [1, 2, 3, 0, 4]
    for k in range(1, 9):
        assert support(logits, top_k=k) == [1, 2, 3, 0, 4][:k]
    for p, expected in [
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [1, 2]),
        (0.59, [1, 2]),
        (0.61, [1, 2, 3]),
        (0.79, [1, 2, 3]),
        (0.81, [1, 2, 3, 0]),
        (0.91, [1, 2, 3, 0, 4]),
        (1.0, [1, 2, 3, 0, 4]),
    ]:
        assert support(logits, top_p=p) == expected, p
    # top_p counts the probability among the top_k: 0.4 and 0.2 become two thirds and one third.
    assert support(logits, top_k=2, top_p=0.65) == [1]
    assert support(logits, top_k=2, top_p=0.68) == [1, 2]
    assert support([0.0] * 5, top_k=2) == [0, 1]
    assert support([0.0] * 5, top_p=0.5) == [0, 1, 2]


def test_candidates_on_a_mesh_are_those_of_one_device():
    # Another algorithm is used there. Logits with many ties.
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 9, (8, VOCAB)), jnp.float32)
    mesh = rx.make_mesh(tensor=4)
    spec = jax.sharding.PartitionSpec("data", "tensor")
    split = jax.device_put(logits, jax.sharding.NamedSharding(mesh, spec))
    for options in ({"top_k": 20, "top_p": None}, {"top_k": None, "top_p": 0.8}, {"top_k": 9, "top_p": 0.5}):
        expected = candidates(logits, **options)
        actual = jax.jit(functools.partial(candidates, **options))(split)
        for x, y in zip(actual, expected):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(np.sum((counts - expected) ** 2 / expected))


def distribution(logits: np.ndarray, temperature: float, allowed: list[int]) -> np.ndarray:
    weights = np.where(np.isin(np.arange(len(logits)), allowed), np.exp(logits / temperature), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": None, "top_p": None}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 4, "top_p": None}, [0, 2, 3, 5]),
        ({"top_k": None, "top_p": 0.7}, [0, 3, 5]),
        ({"top_k": 3, "top_p": 0.6}, [3, 5]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_probable(options, allowed):
    logits, temperature, num = np.array([0.5, -1.0, 0.0, 1.0, -0.5, 1.5]), 1.5, 20_000
    keys = jax.random.split(jax.random.key(1), num)

    @jax.jit
    @jax.vmap
    def draw(key: Array) -> Array:
        return sample(jnp.asarray(logits[None], jnp.float32), temperature=temperature, key=key, **options)[0]

    counts = np.bincount(np.asarray(draw(keys)), minlength=len(logits))
    assert [int(i) for i in np.flatnonzero(counts)] == allowed
    # Pearson's statistic of the true distribution is beyond this bound once in a million; of another
    # temperature it is far beyond.
    bound = stats.chi2.ppf(1 - 1e-6, len(allowed) - 1)
    right, wrong = (distribution(logits, t, allowed)[allowed] for t in (temperature, 1.0))
    assert chi_square(counts[allowed], right) < bound < chi_square(counts[allowed], wrong)


def test_rows_are_drawn_independently_from_the_model(prompts):
    rows, _ = prompts
    model, num = make_model("llama"), 4000
    ids = jnp.broadcast_to(rows[0], (num, PROMPT))
    new = np.asarray(generate(model, ids, max_new_tokens=1, temperature=2.0, top_k=5, key=jax.random.key(3)))
    logits = np.asarray(forward(model, rows[:1])[0, -1], np.float64)
    allowed = sorted(np.argsort(logits)[-5:])
    counts = np.bincount(new[:, 0], minlength=VOCAB)
    assert counts[allowed].sum() == num
    probabilities = distribution(logits, 2.0, allowed)[allowed]
    assert chi_square(counts[allowed], probabilities) < stats.chi2.ppf(1 - 1e-6, 4)


def test_one_candidate_is_greedy(prompts):
    rows, _ = prompts
    model = make_model("llama")
    drawn = generate(model, rows, max_new_tokens=NEW, temperature=3.0, top_k=1, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn, generate(model, rows, max_new_tokens=NEW))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_k": 1, "top_p": None},
        {"temperature": 9.0, "top_k": None, "top_p": 1e-6},
        {"temperature": 1e-30, "top_k": 1, "top_p": 0.5},
    ],
    ids=str,
)
def test_ties_are_broken_as_argmax_does(options):
    logits = jnp.asarray(np.random.default_rng(0).integers(-50, 50, (64, 50)), jnp.float32)
    assert np.any(np.sum(logits == logits.max(axis=1, keepdims=True), axis=1) > 1)
    drawn = sample(logits, key=jax.random.key(0), **options)
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=1))


def test_a_low_temperature_does_not_overflow():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 50), scale=50), jnp.float32)
    drawn = sample(logits, temperature=1e-37, top_k=None, top_p=None, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=1))


def test_the_key_decides_and_a_longer_text_begins_with_the_shorter(prompts):
    rows, _ = prompts

    def draw(seed: int, num: int) -> np.ndarray:
        key = jax.random.key(seed)
        return np.asarray(generate(make_model("llama"), rows, max_new_tokens=num, temperature=1e6, key=key))

    first = draw(0, NEW)
    np.testing.assert_array_equal(first, draw(0, NEW))
    np.testing.assert_array_equal(first[:, :3], draw(0, 3))
    assert not np.array_equal(first, draw(1, NEW))
    assert all(len(np.unique(row)) > NEW // 2 for row in first), "each step draws anew"


# Compiling, and meshes


def test_compiles_once(prompts):
    rows, lengths = prompts
    ids, mask = padded(rows, lengths, "left")
    model = make_model("llama")
    other = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, model)

    @eqx.filter_jit
    def step(model: Any, ids: Any, mask: Any, key: Any) -> Any:
        return generate(model, ids, attention_mask=mask, max_new_tokens=4, temperature=1.0, top_k=3, key=key)

    def call(model: Any, ids: Any, mask: Any, key: Any) -> Any:
        return generate(model, ids, attention_mask=mask, max_new_tokens=5, temperature=1.0, top_k=3, key=key)

    for function in (step, call):
        jax.block_until_ready(function(model, ids, mask, jax.random.key(0)))
        other_key, other_ids, other_mask = jax.random.key(1), ids + 1, mask[:, ::-1].copy()
        with count_compilations() as compilations:
            jax.block_until_ready(function(other, other_ids, other_mask, other_key))
        assert not compilations


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}], ids=str)
def test_predict_on_a_mesh_equals_one_device(options, prompts):
    # In float64 no tie decides, and 5 examples fill no batch of 4.
    rows = np.random.default_rng(1).integers(1, VOCAB, (5, PROMPT)).astype(np.int32)
    rows[:, 0] = [0, 3, 0, 2, 0]

    def collate(examples: Any) -> Any:
        ids = np.stack(list(examples))
        return {"ids": ids, "mask": ids != 0}

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        given = {**options, "key": key} if options else {}
        return generate(model, batch["ids"], attention_mask=batch["mask"], max_new_tokens=NEW, **given)

    with jax.enable_x64(True):
        _, config = MODELS["llama"]
        config = dataclasses.replace(config, num_attention_heads=8, num_key_value_heads=4)
        abstract = eqx.filter_eval_shape(
            lambda key: LlamaForCausalLM(config, stacked=True, key=key), jax.random.key(0)
        )
        model = filled(abstract, jnp.float64, 0)
        results = []
        for mesh in (rx.make_mesh(data=1), rx.make_mesh(tensor=4)):
            placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
            state = rx.init_state(placed, key=jax.random.key(5))
            results.append(rx.predict(state, rows, collate_fn=collate, predict_fn=predict_fn, batch_size=4))
    assert len(results[0]) == len(results[1]) == 5
    np.testing.assert_array_equal(np.stack(results[1]), np.stack(results[0]))
    assert len(np.unique(results[0])) > NEW


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_token_costs_two_sums_a_layer(options):
    """On data 2 x tensor 4, with the cache split like the heads: no weight, cache or hidden state is gathered,
    and of the logits of one position at most what is drawn from."""
    mesh = rx.make_mesh(tensor=4)
    config = LlamaConfig(**{**LLAMA, "vocab_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4})
    abstract = eqx.filter_eval_shape(
        lambda key: LlamaForCausalLM(config, stacked=False, key=key), jax.random.key(0)
    )
    model = jax.tree.map(
        lambda x, s: x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract,
        rx.shard_rules(abstract, mesh),
    )
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    ids = jax.ShapeDtypeStruct((4, PROMPT), jnp.int32, sharding=rx.batch_sharding(mesh))

    @jax.jit
    def run(arrays: Any, ids: Any, key: Any) -> Any:
        given = {**options, "key": key} if options else {}
        return generate(eqx.combine(arrays, static), ids, max_new_tokens=NEW, eos_token_id=3, **given)

    found = communication(run.lower(arrays, ids, jax.random.key(0)).compile(), mesh)
    inside = [c for c in found if "while/body" in c.operation]
    sums = [c.shapes for c in inside if c.kind == "all-reduce" and c.shapes != ("f32[2]",)]
    assert sums == [("f32[2,1,32]",)] * (2 * config.num_layers + 1)
    gathered = {c.shapes for c in inside if c.kind != "all-reduce"}
    # Greedy: the best of each shard and which it is.
    assert gathered == ({("f32[2,1024]",)} if options else {("f32[2,4]",), ("s32[2,4]",)})


@pytest.mark.parametrize("stacked", [False, True])
def test_the_cache_is_there_once(stacked):
    """A token changes it in place: the program holds no second copy, nor one of a layer for each layer."""
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": 8, "num_key_value_heads": 4})
    model = LlamaForCausalLM(config, stacked=stacked, key=jax.random.key(0))
    ids, num_new = jnp.ones((16, 4), jnp.int32), 252
    options = _Options(num_new, 0.0, None, None, (), 0)
    jitted: Any = _generate
    program = jitted.lower(model, Prompt(ids, ids == 1), None, options).compile()
    cache = jax.eval_shape(lambda: model.init_cache(16, 4 + num_new))
    in_cache = 4 * (cache.key.size + cache.value.size)
    assert in_cache <= program.compiled.memory_analysis().temp_size_in_bytes <= 1.5 * in_cache


# Bad input


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_table_of_positions_has_an_end(name, prompts):
    rows, _ = prompts
    assert generate(make_model(name), rows, max_new_tokens=NEW).shape == (4, NEW)
    with pytest.raises(ValueError, match=r"^generate: a prompt of 6 and max_new_tokens=11.*16 positions"):
        generate(make_model(name), rows, max_new_tokens=NEW + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens=0.*at least 1"),
        ({"temperature": -0.5}, r"temperature=-0.5"),
        ({"temperature": float("nan")}, r"temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, r"top_k=0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p=0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1.5"),
        ({"temperature": 1.0, "key": None}, r"key is None.*key=jax.random.key"),
        ({"top_k": 3}, r"top_k=3 does nothing at temperature 0"),
        ({"top_p": 0.5}, r"top_p=0.5 does nothing at temperature 0"),
        ({"attention_mask": np.ones((4, PROMPT + 1))}, r"attention_mask has shape \(4, 7\).*\(4, 6\)"),
        ({"decoder_input_ids": np.ones((4, 1), np.int32)}, r"decoder_input_ids is for models with an encoder"),
        ({"attention_mask": np.ones(PROMPT)}, r"attention_mask has shape \(6,\)"),
        ({"inputs": np.ones((4, PROMPT), np.float32)}, r"inputs has dtype float32"),
        ({"inputs": np.ones((4, PROMPT), bool)}, r"inputs has dtype bool"),
        ({"inputs": np.ones(PROMPT, np.int32)}, r"inputs has shape \(6,\)"),
        ({"inputs": np.ones((4, 0), np.int32)}, r"inputs has shape \(4, 0\)"),
        ({"inputs": np.full((4, PROMPT), VOCAB)}, r"inputs\[0, 0\] is 64, but the model's tokens are 0 to 63"),
        (
            {"inputs": np.full((4, 2), [-1, -2]), "attention_mask": np.full((4, 2), [0, 1])},
            r"inputs\[0, 1\] is -2, but",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_refused_before_compilation(changes, message, prompts):
    given = {"inputs": prompts[0], "max_new_tokens": NEW, "key": jax.random.key(0), **changes}
    model = make_model("llama")
    with count_compilations() as compilations, pytest.raises(ValueError, match=rf"^generate: .*{message}"):
        generate(model, given.pop("inputs"), **given)
    assert not compilations


def test_the_end_tokens_of_generation_config_are_taken():
    model = make_model("llama")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, PROMPT)), jnp.int32)
    endless = np.asarray(generate(model, ids, max_new_tokens=NEW))
    ends = [int(endless[0, 2]), int(endless[1, 5])]
    expected = generate(model, ids, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=7)
    assert (np.asarray(expected) == 7).any()

    def configured(**entries: Any) -> Any:
        return changed(model, config=model.config.with_generation(entries, None))

    found = generate(configured(eos_token_id=ends, pad_token_id=7, temperature=0.6), ids, max_new_tokens=NEW)
    np.testing.assert_array_equal(found, expected)
    first = configured(eos_token_id=ends[0])
    np.testing.assert_array_equal(generate(first, ids, max_new_tokens=NEW, eos_token_id=()), endless)
    np.testing.assert_array_equal(generate(configured(eos_token_id=None), ids, max_new_tokens=NEW), endless)
