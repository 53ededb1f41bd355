"""`generate` against passes with no cache, and the distributions asked for; promises of
both searches."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import compilations
from helpers import in_long
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats
from tiny_models import VOCABULARY, abstract, changed, make, telling

import redco_eqx as rx
from redco_eqx._base.tree import to_arrays, to_paths
from redco_eqx._compiled.communication import communication
from redco_eqx._sharding.mesh import for_use
from redco_eqx_models import T5ForConditionalGeneration, beam_search, generate
from redco_eqx_models._generate.beam_search import Rules, _search, check_options
from redco_eqx_models._generate.generate import _generate, _Options
from redco_eqx_models._generate.prompt import Prompt, prefill, special_tokens
from redco_eqx_models._generate.sampling import candidates, sample

PROMPT, NEW, PAD = 6, 8, 63
LENGTHS = (6, 3, 1, 5)
"""The numbers of real tokens in the rows."""
ROWS = (
    np.random.default_rng(0).integers(2, VOCABULARY - 1, (4, PROMPT)).astype(np.int32)
)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "eos_token_id": (),
    "pad_token_id": PAD,
}
SHORT = {"gpt2": {"n_positions": PROMPT + NEW}}

model_of = functools.cache(
    lambda name, stacked=True: telling(name, stacked=stacked, **SHORT.get(name, {}))
)


def padded(side: str) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of each row, padded with tokens that mean something, and the
    mask."""
    ids, mask = np.full_like(ROWS, 7), np.zeros_like(ROWS)
    for row, length in enumerate(LENGTHS):
        where = slice(PROMPT - length, None) if side == "left" else slice(length)
        ids[row, where] = ROWS[row, :length]
        mask[row, where] = 1
    return ids, mask


@eqx.filter_jit
def log_probabilities(model: Any, text: Any, *source: Any) -> Any:
    """Those of each next token, in one pass with no cache. `source` is the text of an
    encoder, and its mask."""
    logits = model(source[0], text, attention_mask=source[1]) if source else model(text)
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def continued(model: Any, prompt: Any, lengths: Any, *source: Any) -> np.ndarray:
    """The greedy continuation of each row: one pass for each token over the text so
    far, with no cache. What stands after the text is of no account to a causal
    model."""
    text = np.zeros((4, PROMPT + NEW), np.int32)
    rows = np.arange(4)
    ends = np.array(lengths)
    text[:, : prompt.shape[1]] = prompt
    for _ in range(NEW):
        logs = np.asarray(log_probabilities(model, text, *source))[rows, ends - 1]
        best, second = np.sort(logs, axis=1)[:, :-3:-1].T
        assert np.all(best - second > 1e-4), "a tie would decide"
        text[rows, ends] = logs.argmax(axis=1)
        ends += 1
    return np.stack([text[row, end - NEW : end] for row, end in zip(rows, ends)])


@functools.cache
def greedy(name: str, stacked: bool = True) -> np.ndarray:
    """The greedy continuations of the padded rows, or the texts about them."""
    if name != "t5":
        return continued(model_of(name, stacked), ROWS, LENGTHS)
    return continued(
        model_of(name, stacked), np.zeros((4, 1), np.int32), [1] * 4, *padded("right")
    )


# Greedy.


@pytest.mark.parametrize(
    ("name", "stacked"), [("mistral", True), ("gpt2", False), ("t5", True)]
)
def test_cached_equals_uncached(name, stacked):
    model = model_of(name, stacked)
    expected = np.array(greedy(name, stacked))
    assert len(np.unique(expected)) > NEW // 2, "the model says always the same"
    for side in ("left", "right"):
        ids, mask = padded(side)
        np.testing.assert_array_equal(
            generate(model, ids, attention_mask=mask, **OPTIONS), expected
        )
    # A padding token need not be in the vocabulary.
    for padding in (VOCABULARY + 5, -100):
        other = np.where(mask == 1, ids, padding)
        np.testing.assert_array_equal(
            generate(model, other, attention_mask=mask, **OPTIONS), expected
        )
    # a row without tokens harms no other
    mask[1] = 0
    expected[1] = PAD
    np.testing.assert_array_equal(
        generate(model, ids, attention_mask=mask, **OPTIONS), expected
    )
    if name == "gpt2":
        whole = generate(model, ROWS, attention_mask=np.ones_like(ROWS), **OPTIONS)
        np.testing.assert_array_equal(generate(model, ROWS, **OPTIONS), whole)


def test_the_cache_has_the_dtype_of_the_model():
    for dtype in (jnp.float32, jnp.bfloat16):
        model = telling("mistral", dtype=dtype)
        prompt = Prompt(jnp.asarray(ROWS), jnp.ones(ROWS.shape, bool))
        _, cache = eqx.filter_eval_shape(
            lambda m, prompt: prefill(m, prompt, NEW)[:2], model, prompt
        )
        assert cache.key.dtype == cache.value.dtype == dtype


def test_padding_follows_the_end_and_both_are_those_of_generation_config():
    model = model_of("mistral")
    expected = np.array(greedy("mistral"))
    ends = (int(expected[0, 3]), int(expected[1, 5]))
    for row in expected:
        (found,) = np.nonzero(np.isin(row, ends))
        row[found[0] + 1 if len(found) else NEW :] = PAD
    assert (expected[0, 4:] == PAD).all()

    def configured(**entries: Any) -> Any:
        return changed(model, config=model.config.with_generation(entries, None))

    several = configured(eos_token_id=list(ends), pad_token_id=PAD, temperature=0.6)
    ids, mask = padded("left")
    found = generate(several, ids, attention_mask=mask, max_new_tokens=NEW)
    np.testing.assert_array_equal(found, expected)
    endless = changed(
        model, config=dataclasses.replace(model.config, eos_token_id=None)
    )
    for given, arguments, wanted in [
        *(
            (several, *case)
            for case in (((None, None), (ends, PAD)), (((), None), ((), PAD)))
        ),
        *(
            (several, (x, 6), ((5, 7), 6))
            for x in ((5, 7), np.array([5, 7]), [np.int64(5), 7])
        ),
        *((several, (x, None), ((0,), PAD)) for x in (0, np.int64(0), np.array(0))),
        (configured(eos_token_id=3), (None, None), ((3,), 3)),
        (configured(eos_token_id=None), (None, None), ((2,), 2)),  # that of config.json
        (endless, (None, None), ((), 0)),
    ]:
        assert special_tokens("generate", given, *arguments) == wanted


def test_the_encoder_runs_once_and_the_loop_stops_when_all_have_ended():
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

    model = changed(telling("t5", num_layers=1), Counted)
    for search in (generate, functools.partial(beam_search, num_beams=2)):
        for ends, most in (((), NEW), (range(VOCABULARY), 2)):
            calls.clear()
            jax.block_until_ready(
                search(model, ROWS, max_new_tokens=NEW, eos_token_id=ends)
            )
            jax.effects_barrier()
            num = calls.count("logits")
            assert sorted(calls) == ["encoder", *["logits"] * num, "memory"]
            assert num == NEW if most == NEW else num <= most


# Drawing.


def test_which_tokens_may_be_drawn():
    logits, equal = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.2, 0.1], [0.2] * 5]))
    cases: list[tuple[Any, Any, list[int]]] = [
        (None, None, [1, 2, 3, 0, 4]),
        (1, None, [1]),
        (4, None, [1, 2, 3, 0]),
        (8, None, [1, 2, 3, 0, 4]),
        (None, 1e-9, [1]),
        (None, 0.39, [1]),
        (None, 0.41, [1, 2]),
        (None, 0.59, [1, 2]),
        (None, 0.61, [1, 2, 3]),
        (None, 1.0, [1, 2, 3, 0, 4]),
        # top_p counts the probability among the top_k: 0.4 and 0.2 become two thirds
        # and one third.
        (2, 0.65, [1]),
        (2, 0.68, [1, 2]),
    ]
    for given, k, p, expected in [
        *((logits, *case) for case in cases),
        (equal, None, 0.5, [0, 1, 2]),
    ]:
        scores, tokens = candidates(given[None], top_k=k, top_p=p)
        assert tokens[scores > -jnp.inf].tolist() == expected, (k, p)


def test_tokens_are_drawn_as_often_as_they_are_probable():
    model = model_of("mistral")
    num = 4000
    temperature = 2.0
    top_k = 5
    ids = np.broadcast_to(ROWS[0], (num, PROMPT))
    options = {"temperature": temperature, "top_k": top_k}
    new = np.asarray(
        generate(model, ids, max_new_tokens=1, key=jax.random.key(3), **options)
    )
    logs = np.asarray(
        log_probabilities(model, np.pad(ROWS, [(0, 0), (0, NEW)])), np.float64
    )[0, PROMPT - 1]
    allowed = sorted(np.argsort(logs)[-top_k:])
    counts = np.bincount(new[:, 0], minlength=VOCABULARY)[allowed]
    assert counts.sum() == num
    # By Pearson's test the true distribution has a lower p-value once in a million;
    # another temperature always.
    weights = [np.exp(logs[allowed] / t) for t in (temperature, 1.0)]
    right, wrong = (stats.chisquare(counts, num * x / x.sum()).pvalue for x in weights)
    assert wrong < 1e-6 < right


def test_ties_are_broken_as_argmax_does_and_low_temperatures_do_not_overflow():
    logits = jnp.asarray(
        np.random.default_rng(0).integers(-50, 50, (64, 50)), jnp.float32
    )
    assert np.any(np.sum(logits == logits.max(axis=1, keepdims=True), axis=1) > 1)
    for temperature, top_k, top_p in [
        (1.0, 1, None),
        (9.0, None, 1e-6),
        (1e-30, 1, 0.5),
    ]:
        drawn = sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            key=jax.random.key(0),
        )
        np.testing.assert_array_equal(drawn, np.argmax(logits, axis=1))
    logits = logits + jnp.arange(50) / 100  # without ties
    drawn = sample(
        logits, temperature=1e-37, top_k=None, top_p=None, key=jax.random.key(0)
    )
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=1))


def test_the_key_decides_and_a_longer_text_begins_with_the_shorter():
    def draw(seed: int, num: int) -> np.ndarray:
        options: Any = {**OPTIONS, "max_new_tokens": num, "key": jax.random.key(seed)}
        return np.asarray(
            generate(model_of("mistral"), ROWS[[0, 0, 1]], temperature=1e6, **options)
        )

    first = draw(0, NEW)
    np.testing.assert_array_equal(first, draw(0, NEW))
    np.testing.assert_array_equal(first[:, :3], draw(0, 3))
    assert not np.array_equal(first, draw(1, NEW))
    assert not np.array_equal(first[0], first[1]), "each row draws for itself"
    assert all(len(np.unique(row)) > NEW // 2 for row in first), "each step draws anew"


# Compiling, and meshes.


def test_no_rows_have_no_texts():
    drawn = {"temperature": 1.0, "top_k": 3, "key": jax.random.key(0)}
    searches: list[tuple[Any, Any]] = [
        (generate, {}),
        (generate, drawn),
        (beam_search, {"num_beams": 2}),
    ]
    for search, options in searches:
        found = search(model_of("gpt2", False), ROWS[:0], max_new_tokens=NEW, **options)
        assert {(x.shape[0], x.size) for x in jax.tree.leaves(found)} == {(0, 0)}


def test_compiles_once_for_all_prompts_weights_keys_and_penalties():
    ids, mask = padded("left")
    model = model_of("mistral")
    other = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, model)

    def draw(model: Any, ids: Any, mask: Any, seed: int) -> Any:
        options: Any = {
            "max_new_tokens": 3,
            "temperature": 1.0,
            "top_k": 3,
            "key": jax.random.key(seed),
        }
        return generate(model, ids, attention_mask=mask, **options)

    def find(model: Any, ids: Any, mask: Any, seed: int) -> Any:
        options: Any = {
            "max_new_tokens": 3,
            "num_beams": 2,
            "length_penalty": seed + 0.3,
        }
        return beam_search(model, ids, attention_mask=mask, **options)

    for function in (draw, find):
        jax.block_until_ready(function(model, ids, mask, 0))
        with compilations() as compiled:
            jax.block_until_ready(function(other, ids + 1, mask[:, ::-1].copy(), 1))
        assert not compiled


@pytest.mark.parametrize(
    ("name", "axes"), [("mistral", {"tensor": 4}), ("t5", {"tensor": 2, "fsdp": 2})]
)
def test_predict_on_a_mesh_equals_one_device(name, axes):
    """In float64, in which no tie decides; and 5 examples fill no batch of 4."""
    rows = (
        np.random.default_rng(1).integers(1, VOCABULARY, (5, PROMPT)).astype(np.int32)
    )
    rows[:, 0] = [0, 3, 0, 2, 0]
    drawn: Any = (
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9} if name == "mistral" else {}
    )

    def predict_fn(model: Any, ids: Any, key: Any) -> Any:
        options: Any = {
            "attention_mask": ids != 0,
            "max_new_tokens": NEW,
            "eos_token_id": (5, 9),
        }
        found = beam_search(model, ids, num_beams=3, **options)
        text = generate(model, ids, **drawn, key=key if drawn else None, **options)
        return {"text": text, "tokens": found.tokens, "scores": found.scores}

    results = []
    with jax.enable_x64(True):
        model = telling(name, dtype=jnp.float64)
        for mesh in (rx.make_mesh(data=1), rx.make_mesh(**axes)):
            placed = eqx.filter_shard(model, rx.shard_rules(model, mesh))
            state = rx.init_state(placed, key=jax.random.key(5))
            found = rx.predict(
                state, rows, collate_fn=np.stack, predict_fn=predict_fn, batch_size=4
            )
            results.append({key: np.stack([x[key] for x in found]) for key in found[0]})
    one, other = results
    assert one["tokens"].shape == (5, 3, NEW)
    assert len(np.unique(one["tokens"])) > NEW
    for key in ("text", "tokens"):
        np.testing.assert_array_equal(other[key], one[key])
    # The softmax of `jax.nn.dot_product_attention` is in float32.
    np.testing.assert_allclose(other["scores"], one["scores"], rtol=1e-7)


def collectives_of_a_step(
    model: Any, mesh: Any, num_rows: int, search: Any
) -> list[tuple[str, Any, Any]]:
    """Kind, axes and shapes of what one token communicates. The model and the prompt
    are abstract."""
    struct = jax.ShapeDtypeStruct
    layout = rx.shard_rules(model, mesh)
    placed = jax.tree.map(
        lambda x, s: x if s is None else struct(x.shape, x.dtype, sharding=s),
        model,
        layout,
    )
    arrays, static = eqx.partition(
        placed, lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    divides = num_rows % (mesh.size // mesh.shape["tensor"]) == 0
    sharding = (
        rx.batch_sharding(mesh) if divides else NamedSharding(mesh, PartitionSpec())
    )
    ids = jax.ShapeDtypeStruct((num_rows, PROMPT), jnp.int32, sharding=sharding)

    @jax.jit
    def run(arrays: Any, ids: Any, key: Any) -> Any:
        model = eqx.combine(arrays, static)
        options = {"key": key} if search is generate_drawn else {}
        return search(model, ids, max_new_tokens=NEW, eos_token_id=3, **options)

    found = communication(run.lower(arrays, ids, jax.random.key(0)).compile(), mesh)
    return sorted(
        (c.kind, c.axes, c.shapes) for c in found if "while/body" in c.operation
    )


generate_drawn = functools.partial(generate, temperature=1.0, top_p=0.9)
beams_of_5 = functools.partial(beam_search, num_beams=5)
"""Of 10 candidates in each of the 4 shards."""


@pytest.mark.parametrize(
    ("name", "num_rows", "search", "sums", "others"),
    [
        # The best of each shard and which it is; all logits where they are drawn from.
        ("llama", 4, generate, ["f32[2,1,32]"] * 3, ["f32[2,4]", "s32[2,4]"]),
        ("llama", 4, generate_drawn, ["f32[2,1,32]"] * 3 + ["f32[2]"], ["f32[2,1024]"]),
        # Two numbers a beam for the softmax; nothing is gathered over `data`, nor is
        # the memory or any cache.
        (
            "t5",
            4,
            beams_of_5,
            ["f32[2,5,32]"] * 4 + ["f32[2,5]"] * 2,
            ["f32[2,40]", "s32[2,40]"],
        ),
        *in_long(
            (
                "llama",
                3,
                beams_of_5,
                ["f32[3,5,32]"] * 3 + ["f32[3,5]"] * 2,
                ["f32[3,40]", "s32[3,40]"],
            )
        ),
    ],
)
def test_a_token_costs_two_sums_a_layer_and_candidates(
    name, num_rows, search, sums, others
):
    """On data 2 x tensor 4, and one for the embedding; three with an encoder."""
    layers: Any = {"num_hidden_layers": 1} if name == "llama" else {"num_layers": 1}
    model = abstract(name, vocab_size=1024, **layers)
    found = collectives_of_a_step(model, rx.make_mesh(tensor=4), num_rows, search)
    assert {axes for _, axes, _ in found} == {("tensor",)}
    assert [shapes for kind, _, shapes in found if kind == "all-reduce"] == sorted(
        (x,) for x in sums
    )
    assert [shapes for kind, _, shapes in found if kind != "all-reduce"] == [
        (x,) for x in others
    ]


def test_over_fsdp_only_weights_are_gathered():
    """Neither activations nor the cache; and what goes over `tensor` is as without
    it."""
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    model = abstract(
        "llama",
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
    )
    found = collectives_of_a_step(model, mesh, 8, beams_of_5)
    weights = set()
    layout = to_paths(
        rx.shard_rules(model, mesh), lambda x: isinstance(x, NamedSharding)
    )
    for path, x in to_arrays(model).items():
        shape = NamedSharding(mesh, for_use(layout[path].spec)).shard_shape(x.shape)
        weights.add((f"f32[{','.join(map(str, shape))}]",))
    assert {(kind, axes) for kind, axes, _ in found if axes != ("tensor",)} == {
        ("all-gather", ("fsdp",))
    }
    assert {shapes for _, axes, shapes in found if axes == ("fsdp",)} <= weights
    sums, gathers = ("f32[2,5,64]", "f32[2,5]"), ("f32[2,20]", "s32[2,20]")
    expected = {
        *(("all-reduce", x) for x in sums),
        *(("all-gather", x) for x in gathers),
    }
    assert {
        (kind, *shapes) for kind, axes, shapes in found if axes == ("tensor",)
    } == expected


def test_the_cache_is_there_once():
    """A token changes it in place: the program holds no second copy, nor one of a layer
    for each layer; and no copy of the prompt for each beam, nor a second cache,
    reordered."""
    prompt = Prompt(jnp.ones((16, 24), jnp.int32), jnp.ones((16, 24), bool))

    def bytes_of(model: Any, num_slots: int) -> int:
        cache = eqx.filter_eval_shape(lambda m: m.init_cache(16, 24 + num_slots), model)
        return 4 * (cache.key.size + cache.value.size)

    def memory_of(function: Any, *arguments: Any) -> int:
        return (
            function.lower(*arguments)
            .compile()
            .compiled.memory_analysis()
            .temp_size_in_bytes
        )

    for stacked, num_layers in ((True, 8), (False, 3)):
        model = make("llama", stacked=stacked, num_hidden_layers=num_layers)
        found = memory_of(
            _generate, model, prompt, None, _Options(232, 0.0, None, None, (), 0)
        )
        assert 1 <= found / bytes_of(model, 232) <= 1.5
    model = make("llama", stacked=True, num_hidden_layers=16)
    new = 4
    beams = 8
    found = memory_of(
        _search, model, prompt, jnp.ones(()), Rules(new, beams, False, (), 0)
    )
    assert beams * (24 + new) > 3 * (24 + beams * new)  # as it would be elsewhere
    assert 1 <= found / bytes_of(model, beams * new) <= 2


# Bad input.

IMAGES = {
    "inputs": np.ones((4, 3, 8, 8), np.float32),
    "attention_mask": np.ones((4, 64), bool),
}
PADDED = {"inputs": np.array([[-1, -2]]), "attention_mask": np.array([[0, 1]])}
# An id, a model, what is changed, and the message.
BAD_INPUT: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "max_new_tokens-zero",
        "all",
        {"max_new_tokens": 0},
        r"max_new_tokens=0.*at least 1",
    ),
    (
        "inputs-floats",
        "all",
        {"inputs": np.ones((4, PROMPT), np.float32)},
        r"inputs has dtype float32",
    ),
    (
        "inputs-bools",
        "all",
        {"inputs": np.ones((4, PROMPT), bool)},
        r"inputs has dtype bool",
    ),
    (
        "inputs-one_row",
        "all",
        {"inputs": np.ones(PROMPT, np.int32)},
        r"inputs has shape \(6,\)",
    ),
    (
        "inputs-empty",
        "all",
        {"inputs": np.ones((4, 0), np.int32)},
        r"inputs has shape \(4, 0\)",
    ),
    (
        "inputs-too_large",
        "all",
        {"inputs": np.full((4, 6), VOCABULARY)},
        r"inputs\[0, 0\] is 64, but .* tokens are 0 to 63",
    ),
    (
        "attention_mask-of_another_shape",
        "all",
        {"attention_mask": np.ones((4, 7), bool)},
        r"attention_mask has shape \(4, 7\).*\(4, 6\)",
    ),
    (
        "attention_mask-one_row",
        "all",
        {"attention_mask": np.ones(6, bool)},
        r"attention_mask has shape \(6,\)",
    ),
    ("inputs-negative", "all", PADDED, r"inputs\[0, 1\] is -2, but"),
    (
        "max_new_tokens-too_many",
        "gpt2",
        {"max_new_tokens": NEW + 1},
        "a prompt of 6 and max_new_tokens=9.*14 positions",
    ),
    (
        "decoder_input_ids-without_encoder",
        "gpt2",
        {"decoder_input_ids": np.ones((4, 1), np.int32)},
        "decoder_input_ids is for models with an enc",
    ),
    (
        "max_new_tokens-too_many",
        "bart",
        {"max_new_tokens": 16},
        "a prompt of 1 and max_new_tokens=16.*16 positions",
    ),
    (
        "decoder_input_ids-of_other_rows",
        "bart",
        {"decoder_input_ids": np.ones((3, 1), np.int32)},
        "decoder_input_ids has 3 rows, but inputs 4",
    ),
    (
        "decoder_input_ids-empty",
        "bart",
        {"decoder_input_ids": np.ones((4, 0), np.int32)},
        r"decoder_input_ids has shape \(4, 0\)",
    ),
    (
        "attention_mask-of_images",
        "bart",
        IMAGES,
        r"attention_mask is for texts, but inputs has shape \(4, 3, 8, 8\)",
    ),
    (
        "decoder_input_ids-missing",
        "no start",
        {},
        r"no decoder_start_token_id\. Pass decoder_input_ids",
    ),
]
BAD_OPTIONS = [
    *(
        pytest.param(
            generate,
            {"temperature": x},
            f"temperature={x}",
            id=f"generate-temperature-{x}",
        )
        for x in (-0.5, float("nan"))
    ),
    *(
        pytest.param(
            generate,
            {"temperature": 1.0, "top_p": x},
            f"top_p={x}",
            id=f"generate-top_p-{x}",
        )
        for x in (0.0, 1.5)
    ),
    pytest.param(
        generate, {"temperature": 1.0, "top_k": 0}, r"top_k=0", id="generate-top_k-zero"
    ),
    pytest.param(
        generate,
        {"temperature": 1.0, "key": None},
        r"key is None.*key=jax.random.key",
        id="generate-key-none",
    ),
    pytest.param(
        generate,
        {"top_k": 3},
        r"top_k=3 does nothing at temperature 0",
        id="generate-top_k-without_temperature",
    ),
    pytest.param(
        generate,
        {"top_p": 0.5},
        r"top_p=0.5 does nothing at temperature 0",
        id="generate-top_p-without_temperature",
    ),
    pytest.param(
        beam_search,
        {"num_beams": 0},
        r"num_beams=0.*at least 1",
        id="beam_search-num_beams-zero",
    ),
    pytest.param(
        beam_search,
        {"num_beams": 2, "length_penalty": float("inf")},
        r"length_penalty=inf.*finite",
        id="beam_search-length_penalty-inf",
    ),
]


@functools.cache
def named(name: str) -> Any:
    if name != "no start":
        return model_of(name, name == "bart")
    config = dataclasses.replace(model_of("bart").config, decoder_start_token_id=None)
    return changed(model_of("bart"), config=config)


def assert_refused(match: str, call: Any, *arguments: Any, **options: Any) -> None:
    """The call is refused, and compiles nothing."""
    with compilations() as compiled, pytest.raises(ValueError, match=match):
        call(*arguments, **options)
    assert not compiled


@pytest.mark.parametrize("search", ["generate", "beam_search"])
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param(one, changes, message, id=f"{one}-{what}")
        for what, name, changes, message in BAD_INPUT
        for one in (("gpt2", "bart", "no start") if name == "all" else (name,))
    ],
)
def test_bad_input_is_refused_before_compilation(name, changes, message, search):
    model = named(name)
    call = generate if search == "generate" else beam_search
    beams: dict[str, Any] = {} if search == "generate" else {"num_beams": 2}
    given: dict[str, Any] = {"inputs": ROWS, "max_new_tokens": NEW, **changes}
    assert_refused(rf"^{search}: .*{message}", call, model, **beams, **given)


@pytest.mark.parametrize(("search", "changes", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_before_compilation(search, changes, message):
    model = named("gpt2")
    given = {"key": jax.random.key(0)} if search is generate else {}
    options = {"max_new_tokens": NEW, **given, **changes}
    assert_refused(rf"^{search.__name__}: .*{message}", search, model, ROWS, **options)


@pytest.mark.parametrize("value", ["always", 1, None])
def test_early_stopping_that_is_no_bool_is_refused(value):
    # By `beam_search`, whose annotation is checked before it here.
    message = f"early_stopping={value!r}, but it must be True, False or"
    assert_refused(message, check_options, 2, 1.0, value)


@pytest.mark.parametrize("value", ["5", [5.0], True, 64, (3, -1)], ids=repr)
def test_ends_that_are_no_tokens_are_refused(value):
    model = named("gpt2")
    message = r"^generate: eos_token_id=.*be a token, from 0 to 63, or sev"
    assert_refused(message, special_tokens, "generate", model, value, None)
