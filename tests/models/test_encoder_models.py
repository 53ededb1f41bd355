"""Encoders and encoder-decoders: that ways of running one model agree, and how they are laid out. Parity is in
tests/parity."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import QUICK_COMPILE, assert_close, filled, in_long, mesh_of, place
from jax.sharding import PartitionSpec
from jaxtyping import TypeCheckError

import redco_eqx as rx
from redco_eqx import cast, from_arrays, models, shard_rules, to_arrays
from redco_eqx.layers import cross_entropy
from redco_eqx.models._blocks.relative_bias import distance_buckets
from redco_eqx.models._families.registry import read_family
from redco_eqx.models._files.names import entries_of

VOCABULARY, SOURCE, TARGET = 64, 12, 8

_T5 = {
    "model_type": "t5", "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_BERT = {"model_type": "bert", **_HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 20}
_ROBERTA = {**_BERT, "model_type": "roberta"}
_VIT = {"model_type": "vit", **_HIDDEN, "image_size": 8, "patch_size": 4}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "t5_gated": {
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "scale_decoder_outputs": False,
    },
    "bart": {
        "model_type": "bart", "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "max_position_embeddings": 16,
    },
    "bert": _BERT,
    "bert_masked": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "bert_labels": {**_BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 4},
    "roberta_masked": {**_ROBERTA, "architectures": ["RobertaForMaskedLM"]},
    "roberta_labels": {**_ROBERTA, "architectures": ["RobertaForSequenceClassification"], "num_labels": 1},
    "vit_labels": {**_VIT, "architectures": ["ViTForImageClassification"], "num_labels": 4},
    "vit_gpt2": {"model_type": "vision-encoder-decoder", "encoder": _VIT, "decoder": _GPT2},
}  # fmt: skip
DROPOUT: dict[str, tuple[str, ...]] = {
    "t5": ("dropout_rate",),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
    "bert_labels": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    "vit_labels": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
NO_DROPOUT = {name: dict.fromkeys(entries, 0.0) for name, entries in DROPOUT.items()}


def abstract(name: str, *, stacked: bool = False, changes: dict[str, Any] | None = None) -> Any:
    config, kind = read_family({**CONFIGS[name], **(changes or {})})
    return eqx.filter_eval_shape(lambda key: kind(config, stacked=stacked, key=key), jax.random.key(0))


def make(name: str, changes: dict[str, Any] | None = None, *, stacked: bool = False) -> Any:
    """A model with random numbers for its arrays, its layers in a list unless stacked."""
    model = filled(abstract(name, changes=changes), jnp.float32, 0)
    return restack(model) if stacked else model


def restack(model: Any, *, stacked: bool = True, **options: Any) -> Any:
    """The same arrays (layers in a list) in a model of other options."""
    kind, config = type(model), model.config
    shape = eqx.filter_eval_shape(
        lambda key: kind(config, stacked=stacked, key=key, **options), jax.random.key(0)
    )
    arrays = to_arrays(model)
    found = {
        entry.path: arrays[entry.keys[0]] if entry.stack is None else jnp.stack([arrays[k] for k in entry.keys])
        for entry in entries_of(shape)
    }
    return from_arrays(shape, found)


def inputs(name: str, num_rows: int = 2) -> tuple[jax.Array, ...]:
    """Return the inputs of a model, and, for an encoder-decoder, the text to write."""
    generator = np.random.default_rng(0)
    text = jnp.asarray(generator.integers(2, VOCABULARY, (num_rows, SOURCE)), jnp.int32)
    image = jnp.asarray(generator.normal(size=(num_rows, 3, 8, 8)), jnp.float32)
    written = jnp.asarray(generator.integers(2, VOCABULARY, (num_rows, TARGET)), jnp.int32)
    read = image if name.startswith("vit") else text
    return (read, written) if name.startswith(("t5", "bart", "vit_gpt2")) else (read,)


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    if isinstance(model, models.EncoderDecoder):
        hidden = model.hidden_states(*batch, key=key)
        parallel = model.sequence_parallel
        return cross_entropy(hidden, model.head, batch[1], sequence_parallel=parallel).value
    return jnp.mean(jnp.square(model(*batch, key=key)))


gradient_of = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))


# One model, run in several ways.


@pytest.mark.parametrize("name", ["bart", *in_long("t5", "bert_labels", "vit_gpt2")])
def test_stacked_and_rematerialised_equal_a_list_of_layers(name):
    # Dropout too: the same keys must reach the same layers.
    changes = dict.fromkeys(DROPOUT.get(name, ()), 0.3)
    model, batch, key = make(name, changes), inputs(name), jax.random.key(3)
    loss, gradient = gradient_of(model, batch, key)
    assert float(loss) > 0
    others = [(restack(model, remat="full"), restack(gradient))]
    if name == "t5":
        others.append((restack(model, remat="row_out"), restack(gradient)))
        others.append((restack(model, stacked=False, remat="full"), gradient))
    for other, expected in others:
        loss_there, gradient_there = gradient_of(other, batch, key)
        assert_close(loss_there, loss, rtol=1e-5)
        assert_close(to_arrays(gradient_there), to_arrays(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_needs_a_key_and_training_mode(name):
    batch, key = inputs(name), jax.random.key(0)
    run = eqx.filter_jit(lambda model, key: model(*batch, key=key))
    plain = run(make(name, NO_DROPOUT[name]), key)
    every = make(name, dict.fromkeys(DROPOUT[name], 0.3))
    assert_close(run(every, None), plain, rtol=0)
    assert_close(run(eqx.nn.inference_mode(every), key), plain, rtol=0)
    for entry in DROPOUT[name]:
        model = make(name, {**NO_DROPOUT[name], entry: 0.3})
        dropped = run(model, key)
        assert np.abs(dropped - plain).max() > 0.003, entry
        assert_close(run(model, key), dropped, rtol=0)
        assert np.abs(run(model, jax.random.key(1)) - dropped).max() > 0.003, entry


@pytest.mark.parametrize("name", ["t5", "bart", "bert_labels", "roberta_masked"])
def test_padding_on_either_side_changes_nothing(name):
    model, (text, *written), num = make(name), inputs(name), 3
    run = eqx.filter_jit(lambda model, text, mask: model(text, *written, attention_mask=mask))
    alone = run(model, text, jnp.ones_like(text))
    place = np.arange(SOURCE + num)
    for before, after in ((num, 0), (0, num)):
        padded = jnp.pad(text, ((0, 0), (before, after)), constant_values=1)
        mask = np.broadcast_to((place >= before) & (place < before + SOURCE), padded.shape)
        if name.startswith("bert") and before:  # its first token stands for the whole text
            continue
        found = run(model, padded, jnp.asarray(mask))
        if found.shape[1] == SOURCE + num:
            found = found[:, before : before + SOURCE]
        assert_close(found, alone, rtol=1e-4, atol=1e-4)


# The layout, with no overrides.

COLUMN, ROW = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
_SPLIT = {
    r"(shared|word_embeddings|wte|lm_head)\.weight$": COLUMN,
    r"\.(q|k|v|query|key|value|[qkv]_proj|wi|wi_0|wi_1|fc1|intermediate\.dense)\.(weight|bias)$": COLUMN,
    r"(\.o|out_proj|wo|fc2|layer.*output\.dense)\.weight$": ROW,
    # GPT-2 has (in, out), and what is fused apart.
    r"(q_attn|c_fc)\.weight$": ROW,
    r"(q_attn|c_fc)\.bias$": COLUMN,
    r"c_attn\.weight$": PartitionSpec(None, None, "tensor"),
    r"c_attn\.bias$": ROW,
    r"c_proj\.weight$": COLUMN,
}
_ANY = (
    r"relative_attention_bias|final_logits_bias|patch_embeddings|pooler|classifier|^cls\.|^lm_head\.|enc_to_dec"
)
"""Small, or outside the layers: the two engines differ, and either is right."""


@pytest.mark.parametrize(
    ("name", "stacked", "engine"),
    [
        *((name, stacked, "paths") for name in CONFIGS if name != "bert" for stacked in (False, True)),
        ("t5", True, "program"),
        *in_long(*((name, False, "program") for name in ("t5_gated", "bart", "bert_labels", "vit_gpt2"))),
    ],
)
def test_both_engines_give_the_megatron_layout(name, stacked, engine):
    model, mesh = abstract(name, stacked=stacked), mesh_of("data2xtensor4")
    batch = jax.eval_shape(lambda: inputs(name, 8))
    program = {"loss_fn": loss_fn, "batch": batch} if engine == "program" else {}
    shardings = shard_rules(model, mesh, **program)
    seen = set()
    for path, found in jax.tree_util.tree_leaves_with_path(shardings):
        key = jax.tree_util.keystr(path, simple=True, separator=".")
        if re.search(_ANY, key) and not re.search(r"^lm_head\.weight$", key):
            continue
        pattern = next((p for p in _SPLIT if re.search(p, key)), None)
        expected = PartitionSpec() if pattern is None else _SPLIT[pattern]
        is_stacked = stacked and any(key.startswith(f"{stack}.") for stack in model.stacks)
        if is_stacked and pattern is not None:
            expected = PartitionSpec(None, *expected)
        assert found.spec == expected, key
        seen.add(pattern)
    assert len(seen) >= 3  # column, row, whole


@functools.cache
def updated(name: str, mesh_name: str) -> Any:
    """The new parameters after a step of SGD with rate 1, which are the gradient, and the loss."""
    mesh, batch, optimizer = mesh_of(mesh_name), inputs(name, 8), optax.sgd(1.0)
    placed, shardings = place(make(name, stacked=name != "bart"), mesh)
    state = rx.init_state(placed, optimizer, key=jax.random.key(0))
    step = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings)
    rows = jax.device_put(batch, rx.batch_sharding(mesh))
    new, metrics = jax.jit(step).lower(state, rows).compile(compiler_options=QUICK_COMPILE)(state, rows)
    return jax.device_get((to_arrays(new.model), metrics["loss"].value))


@pytest.mark.parametrize(
    ("name", "mesh_name"),
    [
        ("t5", "2x2x2"),
        *in_long(
            *((name, "data2xtensor4") for name in ("t5", "bart", "bert_masked", "vit_gpt2")),
            *((name, "2x2x2") for name in ("bart", "bert_masked", "vit_gpt2")),
        ),
    ],
)
def test_a_step_is_the_same_on_every_mesh(name, mesh_name):
    # float32, in which sums over devices have another order.
    assert_close(updated(name, mesh_name), updated(name, "one"), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["t5", *in_long("bart")])
def test_a_stream_split_along_the_tokens_gives_the_same(name):
    model, mesh = make(name), mesh_of("data2xtensor4")
    batch = jax.device_put(inputs(name, 4), rx.batch_sharding(mesh))
    expected = gradient_of(model, inputs(name, 4), None)
    placed, _ = place(restack(model, sequence_parallel=True), mesh)
    loss, gradient = gradient_of(placed, batch, None)
    assert_close(loss, expected[0], rtol=1e-5)
    assert_close(to_arrays(gradient), to_arrays(restack(expected[1])), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("t5_gated", jnp.float16),
        *in_long(*((name, jnp.bfloat16) for name in ("t5", "bart", "bert_masked", "vit_gpt2"))),
    ],
)
def test_gradients_in_low_precision_over_tensor(name, dtype):
    """`cast` inside the loss, over float32 parameters, as the README has it."""
    model, batch = make(name, stacked=True), inputs(name, 4)
    gradient = eqx.filter_jit(
        eqx.filter_value_and_grad(lambda model, batch: loss_fn(*cast((model, batch), dtype), None))
    )
    mesh = mesh_of("data2xtensor4")
    placed, _ = place(model, mesh)
    expected, wanted = gradient(model, batch)
    value, found = gradient(placed, jax.device_put(batch, rx.batch_sharding(mesh)))
    assert abs(value - expected) < 0.02 * abs(expected)
    for path, g in to_arrays(found).items():
        assert g.dtype == jnp.float32
        # Both are rounded at each layer, to 8 bits or 11, and summed in another order.
        other = np.asarray(to_arrays(wanted)[path])
        error = np.linalg.norm(np.asarray(g) - other)
        assert error < 0.1 * np.linalg.norm(other) + 1e-3, path


def test_a_buffer_is_never_trained(tmp_path):
    model = models.BartForConditionalGeneration(read_family(CONFIGS["bart"])[0], key=jax.random.key(0))
    bias = np.linspace(-1, 1, VOCABULARY, dtype=np.float32)[None]
    models.save_pretrained(eqx.tree_at(lambda m: m.final_logits_bias, model, bias), tmp_path)
    mesh = mesh_of("data2xtensor4")
    loaded = models.load_pretrained(tmp_path, mesh, stacked=True)
    optimizer = optax.adamw(1e-1, weight_decay=0.5)
    state = rx.init_state(loaded, optimizer, key=jax.random.key(0))
    assert list(state.frozen) == ["final_logits_bias"]
    step = jax.jit(functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer))
    state, _ = step(state, jax.device_put(inputs("bart", 4), rx.batch_sharding(mesh)))
    np.testing.assert_array_equal(state.model.final_logits_bias, bias)
    # It is part of the head that a loss is given, though.
    with_it, without = (
        m.head(jnp.ones((1, 32)))
        for m in (loaded, eqx.tree_at(lambda m: m.final_logits_bias, loaded, 0 * bias))
    )
    assert_close(with_it - without, jnp.asarray(bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bart", "vit_gpt2"])
def test_a_buffer_stays_one_where_numpy_is_lost(name):
    """In an abstract model, and in one placed by Equinox: also within a model of the user's."""
    config, kind = read_family(CONFIGS[name])
    model = kind(config, key=jax.random.key(0))
    mesh, optimizer = mesh_of("data2xtensor4"), optax.adamw(1e-3)
    kinds = (
        model,
        eqx.filter_eval_shape(lambda: kind(config, key=jax.random.key(0))),
        eqx.filter_shard(model, shard_rules(model, mesh)),
    )
    for one in kinds:
        state = rx.init_state(one, optimizer, key=jax.random.key(0))
        assert set(state.frozen) == set(model.buffers)
        nested = rx.init_state({"inner": [one]}, optimizer, key=jax.random.key(0))
        assert set(nested.frozen) == {f"inner.0.{path}" for path in model.buffers}


def test_buckets_hold_more_the_farther_away():
    buckets = distance_buckets(32, 128)
    assert buckets[:16].tolist() == list(range(16))
    assert buckets[-1] == 31
    assert (np.diff(buckets) >= 0).all()
    assert set(buckets) == set(range(32))


# A family of one's own, of public parts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(models.Config):
    model_type: ClassVar[str] = "own-pair"
    architecture: ClassVar[str] = "OwnPair"

    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4


class OwnLayer(eqx.Module):
    """Normalised after; cross-attention in the decoder; a bias of relative positions, shared by the layers."""

    attention: models.MultiHeadAttention
    crossing: models.MultiHeadAttention
    norms: list[models.LayerNorm]
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = jax.random.split(key)
        self.attention, self.crossing = (
            models.MultiHeadAttention(
                config.hidden_size, config.num_attention_heads, dropout=0.0, std=0.2, key=k
            )
            for k in keys
        )
        self.norms = [models.LayerNorm(config.hidden_size) for _ in range(2)]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, context, cache, key):
        y, cache = self.attention(x, context, cache, key)
        x = models.add_and_norm(x, y, self.norms[0], self.dropout, key)
        if context.memory is not None:
            y = self.crossing.over_memory(x, context, key)
            x = models.add_and_norm(x, y, self.norms[1], self.dropout, key)
        return x, cache


class OwnPair(models.EncoderDecoder):
    table: models.Embedding
    places: models.Embedding
    reader: Any
    writer: Any
    lm_head: None
    config: OwnConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("reader", "writer")
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "table.weight"}

    def __init__(self, config, *, stacked=False, key, **options):
        super().__init__(config, **options)
        keys = jax.random.split(key, 4)
        self.table = models.Embedding(config.vocab_size, config.hidden_size, key=keys[0])
        self.places = models.Embedding(8, config.num_attention_heads, std=1.0, key=keys[1])
        self.reader = models.make_layers(OwnLayer, config, stacked=stacked, key=keys[2])
        self.writer = models.make_layers(OwnLayer, config, stacked=stacked, key=keys[3])
        self.lm_head = None

    def encoder_states(self, inputs, *, attention_mask=None, key=None):
        return models.encode_tokens(
            self, inputs, lambda context, key: context.embed(self.table, inputs), self.reader,
            attention_mask=attention_mask, max_positions=None, key=key,
        )  # fmt: skip

    def cross_projections(self, layer):
        return layer.crossing.k_proj, layer.crossing.v_proj

    def bias(self, query, key, batch_size):
        return models.relative_bias(
            self.places, query, key, bidirectional=False, max_distance=10, batch_size=batch_size
        )

    def embed(self, input_ids, context, key):
        return context.embed(self.table, input_ids)

    def finish(self, x, key):
        return x


def test_a_family_of_ones_own_is_saved_loaded_and_run(tmp_path):
    made = OwnPair(OwnConfig(vocab_size=VOCABULARY), key=jax.random.key(0))
    models.save_pretrained(made, tmp_path)
    model = models.load_pretrained(
        tmp_path, mesh_of("data2xtensor4"), family=(OwnConfig, OwnPair), stacked=True, remat="row_out"
    )
    batch = inputs("t5")
    whole = eqx.filter_jit(lambda model: model(*batch))
    # float32; on the mesh features are summed in another order
    assert_close(whole(model), whole(made), rtol=1e-4, atol=1e-5)
    cache, found = made.init_cache(2, TARGET), []
    memory = made.encode(batch[0])
    step = eqx.filter_jit(lambda token, cache: made.decode(token, memory, cache=cache))
    for i in range(TARGET):
        hidden, cache = step(batch[1][:, i : i + 1], cache)
        found.append(made.logits(hidden))
    assert_close(jnp.concatenate(found, axis=1), whole(made), rtol=1e-4, atol=1e-5)


def test_labels_are_shifted_to_the_right():
    labels = jnp.asarray([[5, 6, -100, 7]])
    assert models.shift_right(labels, 2, pad=1).tolist() == [[2, 5, 6, 1]]


# Bad input.


def test_bad_input_is_refused():
    t5, bart, vit = make("t5"), make("bart"), make("vit_gpt2")
    text, written = inputs("t5")
    with pytest.raises(ValueError, match=r"input_ids has 17 tokens a row, but the model has a table of 16"):
        bart.encode(jnp.zeros((1, 17), jnp.int32))
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(2, 3\), but it must be that of input_ids"
    ):
        t5.encode(text, attention_mask=jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="3 rows, which is not a multiple of the 2 that were encoded"):
        t5.decode(jnp.zeros((3, 2), jnp.int32), t5.encode(text))
    with pytest.raises(ValueError, match=r"pixel_values has shape \(2, 3, 9, 8\)"):
        vit.encode(jnp.zeros((2, 3, 9, 8)))
    with pytest.raises(ValueError, match="images have no padding"):
        vit.encode(jnp.zeros((2, 3, 8, 8)), attention_mask=jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="this model has no pooler"):
        make("bert_masked").bert.pool(jnp.zeros((1, 2, 32)))
    with pytest.raises((ValueError, TypeCheckError)):
        t5(text.astype(jnp.float32), written)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-step"}, "feed_forward_proj='gated-step' is not supported"),
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1 is not supported"),
        ("bart", {"decoder_attention_heads": 5}, "d_model=32 is not a multiple of decoder_attention_heads=5"),
        ("bert", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("bert_labels", {"num_labels": 0}, "num_labels=0, but it must be an integer from 1 to 2**20"),
        ("bert_labels", {"id2label": {"1": "a"}, "num_labels": None}, "must name the labels from 0 on"),
        ("roberta_masked", {"pad_token_id": None}, "pad_token_id is None"),
        ("vit_labels", {"patch_size": 3}, "image_size=8 is not a multiple of patch_size=3"),
        ("vit_gpt2", {"decoder": {"model_type": "bert"}}, "decoder: model_type='bert' is not supported"),
        ("vit_gpt2", {"encoder": None}, "encoder: model_type=None is not supported, only 'vit'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_family({**CONFIGS[name], **changes})
