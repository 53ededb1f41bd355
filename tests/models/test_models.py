"""Decoder-only models: what they hold, and that ways of running one model agree. Parity is in tests/parity."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, filled, in_long, mesh_of
from jax.sharding import PartitionSpec
from published import PUBLISHED

from redco_eqx import batch_sharding, cast, from_arrays, models, shard_rules, to_arrays
from redco_eqx.layers import cross_entropy
from redco_eqx.models._blocks.attention import attend
from redco_eqx.models._families.registry import read_family
from redco_eqx.models._files.names import entries_of

LENGTH, LAYERS = 8, 2

_GPT = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
_OPT = {
    "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gptj": {"model_type": "gptj", "rotary_dim": 4, **_GPT},
    "opt_125m": _OPT,
    "opt_350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 3},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "phi3": {**_LLAMA, "model_type": "phi3"},
    "smollm3": {
        **_LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


def abstract(config: dict[str, Any], **options: Any) -> Any:
    read, kind = read_family(config)
    return eqx.filter_eval_shape(lambda key: kind(read, key=key, **options), jax.random.key(0))


def make(name: str, **changes: Any) -> Any:
    """A model with random numbers for its arrays, its layers in a list."""
    return filled(abstract({**CONFIGS[name], **changes}), jnp.float32, 0)


def restack(model: Any, *, stacked: bool = True, **options: Any) -> Any:
    """The same arrays (layers in a list) in a model of other options."""
    (where,) = model.stacks
    shape = abstract(model.config.to_json(), stacked=stacked, **options)
    arrays = to_arrays(model)

    def one(path: str) -> Any:
        if path in arrays:
            return arrays[path]
        rest = path.removeprefix(f"{where}.")
        return jnp.stack([arrays[f"{where}.{i}.{rest}"] for i in range(LAYERS)])

    return from_arrays(shape, {path: one(path) for path in to_arrays(shape)})


def tokens(num_rows: int = 2, length: int = LENGTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, (num_rows, length)), jnp.int32)


@eqx.filter_jit
def run(model: Any, ids: Any, mask: Any = None, key: Any = None) -> Any:
    return model(ids, attention_mask=mask, key=key)


# What they hold.


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_full_size_models_hold_the_published_arrays(name, stacked):
    config, num_layers, num_parameters, keys = PUBLISHED[name]
    model = abstract(config, stacked=stacked)
    arrays = to_arrays(model)
    expected = [key.replace("{i}", str(i)) for key in keys for i in range(num_layers if "{i}" in key else 1)]
    assert sorted(key for entry in entries_of(model) for key in entry.keys) == sorted(expected)
    if not stacked:
        assert sorted(arrays) == sorted(expected)
    counted = [x for path, x in arrays.items() if path not in model.buffers]
    assert sum(math.prod(x.shape) for x in counted) == num_parameters


PARTS = [
    {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768},
    {"_class_name": "AutoencoderKL"},
    {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"},
     "decoder": {"model_type": "gpt2", "add_cross_attention": True, "is_decoder": True}},
]  # fmt: skip


def test_every_family_takes_the_example_that_it_gives():
    for config in [*(published.config for published in PUBLISHED.values()), *PARTS]:
        model = abstract(config, **({} if "_class_name" in config else {"stacked": True}))
        outputs = jax.tree.leaves(eqx.filter_eval_shape(lambda m, x: m(*x), model, model.example(6)))
        assert {x.shape[0] for x in outputs} == {6}, config


# One model, run in several ways.


@pytest.mark.parametrize("name", ["gpt2", "opt_350m", "mistral"])
def test_in_pieces_with_a_cache_equals_at_once(name):
    # Left padding, which the window of a row has to count from the right place.
    model, ids = make(name), tokens()
    mask = jnp.asarray([[1] * LENGTH, [0] * 3 + [1] * (LENGTH - 3)])
    whole = run(model, ids, mask)

    @eqx.filter_jit
    def piece(model, ids, mask, cache):
        return model(ids, attention_mask=mask, cache=cache)

    cache, outputs = model.init_cache(2, LENGTH + 2), []
    for start in range(0, LENGTH, 4):
        output, cache = piece(model, ids[:, start : start + 4], mask[:, start : start + 4], cache)
        outputs.append(output)
    real = np.asarray(mask) == 1
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1)[real], np.asarray(whole)[real], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["gpt2", "opt_350m", "mistral"])
def test_padding_on_either_side_changes_nothing(name):
    model, ids, num = make(name), tokens(), 3
    alone = run(model, ids)
    left = jnp.pad(ids, ((0, 0), (num, 0)), constant_values=7)
    right = jnp.pad(ids, ((0, 0), (0, num)), constant_values=7)
    place = np.arange(LENGTH + num)
    mask = np.repeat(np.stack([place >= num, place < LENGTH]), 2, axis=0)
    padded = run(model, jnp.concatenate([left, right]), jnp.asarray(mask))
    found = np.asarray(padded)[mask].reshape(2, *alone.shape)
    np.testing.assert_allclose(found, [alone, alone], rtol=1e-4, atol=1e-4)


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_gradient(model: Any, ids: Any, key: Any) -> Any:
    logs = jax.nn.log_softmax(model(ids, key=key)[:, :-1])
    return -jnp.take_along_axis(logs, ids[:, 1:, None], axis=-1).mean()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stacked_and_rematerialised_equal_a_list_of_layers(name):
    # Dropout too: the same keys must reach the same layers.
    model, ids, key = make(name, **DROPOUT[name]), tokens(), jax.random.key(3)
    loss, gradient = loss_and_gradient(model, ids, key)
    assert float(loss) > 1
    others = [(restack(model, remat="full"), restack(gradient))]
    if name == "llama":
        others.append((restack(model), restack(gradient)))
        others.append((restack(model, remat="row_out"), restack(gradient)))
        others.append((restack(model, stacked=False, remat="full"), gradient))
    for other, expected in others:
        loss_there, gradient_there = loss_and_gradient(other, ids, key)
        assert_close(loss_there, loss, rtol=1e-5)
        assert to_arrays(gradient_there).keys() == to_arrays(expected).keys()
        assert_close(to_arrays(gradient_there), to_arrays(expected), rtol=1e-3, atol=1e-5)


def test_the_implementation_of_attention_is_an_argument():
    model = make("llama")
    other = restack(model, attention="xla")
    np.testing.assert_allclose(run(other, tokens()), run(model, tokens()), rtol=1e-5, atol=1e-5)


# Dropout.

DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "gptj": {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "opt_125m": {"dropout": 0.3, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
}
NO_DROPOUT = {name: dict.fromkeys(options, 0.0) for name, options in DROPOUT.items()}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_needs_a_key_and_training_mode(name):
    # Not compiled: the many small programs are shared by all these models.
    key, ids = jax.random.key(0), tokens()
    plain = make(name, **NO_DROPOUT[name])(ids, key=key)
    every = make(name, **DROPOUT[name])
    assert_close(every(ids), plain, rtol=0)
    assert_close(eqx.nn.inference_mode(every)(ids, key=key), plain, rtol=0)
    for entry in DROPOUT[name]:
        model = make(name, **{**NO_DROPOUT[name], entry: 0.3})
        dropped = model(ids, key=key)
        assert np.abs(dropped - plain).max() > 0.01, entry
        assert_close(model(ids, key=key), dropped, rtol=0)
        assert np.abs(model(ids, key=jax.random.key(1)) - dropped).max() > 0.01, entry


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_of_almost_nothing_equals_attention(masked):
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(q_key, (2, 5, 8, 4))
    key, value = (jax.random.normal(k, (2, 5, 2, 4)) for k in (k_key, v_key))
    mask = jnp.tril(jnp.ones((2, 1, 5, 5), bool)).at[1, :, 2:, 0].set(False) if masked else None
    plain = attend(query, key, value, mask=mask, scale=0.3)
    barely = attend(
        query, key, value, mask=mask, scale=0.3,
        dropout=eqx.nn.Dropout(1e-7), dropout_key=jax.random.key(1),
    )  # fmt: skip
    assert_close(barely, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_in_float64_is_one(interleaved):
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8), jnp.float64)
        positions = jnp.broadcast_to(jnp.arange(5) + 1000, (2, 5))
        turned = models.rotate(x, positions, models.Rope().frequencies(8), interleaved=interleaved)
        assert turned.dtype == jnp.float64
        # Float64 rounds at 2e-16: a few products and a sum of eight.
        np.testing.assert_allclose(jnp.sum(turned**2, axis=-1), jnp.sum(x**2, axis=-1), rtol=1e-14)


# A family of one's own, of public parts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(models.Config):
    model_type: ClassVar[str] = "own"
    architecture: ClassVar[str] = "OwnLM"
    aliases: ClassVar[Mapping[str, str]] = {"hidden_size": "width", "num_hidden_layers": "depth"}

    width: int = 16
    depth: int = 2
    num_attention_heads: int = 4
    rope: models.Rope = dataclasses.field(default_factory=models.Rope)


class OwnLayer(eqx.Module):
    norm: models.RMSNorm
    query: models.Linear
    key: models.Linear
    value: models.Linear
    output: models.Linear
    config: OwnConfig = eqx.field(static=True)

    def __init__(self, config, *, key):
        keys = jax.random.split(key, 4)
        self.norm = models.RMSNorm(config.width)
        self.query, self.key, self.value, self.output = (
            models.Linear(config.width, config.width, key=k) for k in keys
        )
        self.config = config

    def __call__(self, x, context, cache, key):
        size = self.config.head_size
        qkv = context.column(self.norm(x), self.query, self.key, self.value, unit=size)
        q, k, v = (models.split_heads(y, size) for y in qkv)
        frequencies = self.config.rope.frequencies(size)
        q, k = (models.rotate(y, context.positions, frequencies) for y in (q, k))
        heads, cache = context.attend(q, k, v, cache)
        return x + context.row(heads, self.output, unit=size), cache


class OwnLM(models.DecoderLM):
    table: models.Embedding
    blocks: Any
    lm_head: None
    config: OwnConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("blocks",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "table.weight"}

    def __init__(self, config, *, stacked=False, key, **options):
        super().__init__(config, **options)
        table_key, blocks_key = jax.random.split(key)
        self.table = models.Embedding(config.vocab_size, config.width, key=table_key)
        self.blocks = models.make_layers(OwnLayer, config, stacked=stacked, key=blocks_key)
        self.lm_head = None

    def embed(self, input_ids, context, key):
        return context.embed(self.table, input_ids)

    def finish(self, x, key):
        return x


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_a_family_of_ones_own_is_saved_loaded_and_run(stacked, tmp_path):
    made = OwnLM(OwnConfig(vocab_size=64), stacked=stacked, key=jax.random.key(0))
    models.save_pretrained(made, tmp_path)
    with pytest.raises(ValueError, match="model_type='own' is not known, only bart"):
        models.load_pretrained(tmp_path)
    model = models.load_pretrained(
        tmp_path, mesh_of("data2xtensor4"), family=(OwnConfig, OwnLM), stacked=True, remat="full"
    )
    assert (model.remat, model.config) == ("full", dataclasses.replace(made.config, rest=model.config.rest))
    assert not model.blocks.query.weight.sharding.is_fully_replicated
    # float32; on the mesh features are summed in another order
    assert_close(run(model, tokens()), run(made, tokens()), rtol=1e-4, atol=1e-6)
    new = models.generate(model, tokens(), max_new_tokens=3)
    text = jnp.concatenate([tokens(), new], axis=1)
    np.testing.assert_array_equal(np.argmax(run(made, text)[:, LENGTH - 1 : -1], axis=-1), new)
    with pytest.raises(TypeError, match="remats"):
        OwnLM(OwnConfig(vocab_size=64), key=jax.random.key(0), remats="full")


# The layout, with no overrides.

COLUMN, ROW, WHOLE = PartitionSpec("tensor"), PartitionSpec(None, "tensor"), PartitionSpec()
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "transformer.wte.weight": COLUMN,
        "transformer.wpe.weight": WHOLE,
        "attn.c_attn.weight": PartitionSpec(None, None, "tensor"),
        "attn.c_attn.bias": PartitionSpec(None, "tensor"),
        "attn.c_proj.weight": COLUMN,  # (in, out): over its inputs
        "mlp.c_fc.weight": PartitionSpec(None, "tensor"),
        "mlp.c_fc.bias": COLUMN,
        "mlp.c_proj.weight": COLUMN,
    },
    "gptj": {
        "transformer.wte.weight": COLUMN,
        "attn.q_proj.weight": COLUMN,
        "attn.k_proj.weight": COLUMN,
        "attn.v_proj.weight": COLUMN,
        "attn.out_proj.weight": ROW,
        "mlp.fc_in.weight": COLUMN,
        "mlp.fc_in.bias": COLUMN,
        "mlp.fc_out.weight": ROW,
        "lm_head.weight": COLUMN,
        "lm_head.bias": COLUMN,
    },
    "opt_125m": {
        "embed_tokens.weight": COLUMN,
        **{f"self_attn.{name}_proj.{array}": COLUMN for name in "qkv" for array in ("weight", "bias")},
        "self_attn.out_proj.weight": ROW,
        "fc1.weight": COLUMN,
        "fc1.bias": COLUMN,
        "fc2.weight": ROW,
    },
    "llama": {
        "embed_tokens.weight": COLUMN,
        **{f"self_attn.{name}_proj.weight": COLUMN for name in "qkv"},
        "self_attn.o_proj.weight": ROW,
        "mlp.gate_proj.weight": COLUMN,
        "mlp.up_proj.weight": COLUMN,
        "mlp.down_proj.weight": ROW,
        "lm_head.weight": COLUMN,
    },
}
for _variant in ("mistral", "qwen3", "olmo2", "phi3", "smollm3"):
    LAYOUTS[_variant] = LAYOUTS["llama"]
LAYOUTS["opt_350m"] = {**LAYOUTS["opt_125m"], "project_in.weight": WHOLE, "project_out.weight": COLUMN}
LAYOUTS["qwen2"] = {
    **LAYOUTS["llama"],
    "lm_head.weight": None,
    **{f"self_attn.{name}_proj.bias": COLUMN for name in "qkv"},
}


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_rules_give_the_megatron_layout(name, stacked):
    mesh = mesh_of("data2xtensor4")
    model = abstract(CONFIGS[name], stacked=stacked)
    shardings = to_specs(shard_rules(model, mesh))
    seen = set()
    for path, spec in shardings.items():
        ending = next((e for e in LAYOUTS[name] if path.endswith(e)), None)
        seen.add(ending)
        expected = LAYOUTS[name].get(ending or "", WHOLE)
        if stacked and path.startswith(model.stacks) and expected != WHOLE:
            expected = PartitionSpec(None, *expected)
        assert spec == expected, path
    assert {e for e, spec in LAYOUTS[name].items() if spec is not None} <= seen  # a tied head is not there


def to_specs(shardings: Any) -> dict[str, PartitionSpec]:
    found = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.spec for path, x in found}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", jnp.float16),
        *in_long(*((name, jnp.bfloat16) for name in ("gptj", "opt_350m", "qwen2")), ("llama", jnp.float16)),
    ],
)
def test_gradients_in_low_precision_over_tensor(name, dtype):
    """`cast` inside the loss, over float32 parameters, as the README has it."""
    one_layer = {"n_layer" if name in ("gpt2", "gptj") else "num_hidden_layers": 1}
    model, ids = make(name, **one_layer), tokens(4)

    def loss(model: Any, ids: Any) -> Any:
        model = cast(model, dtype)
        hidden, _ = model.hidden_states(ids[:, :-1], key=None)
        return cross_entropy(hidden, model.head, ids[:, 1:]).value

    mesh = mesh_of("data2xtensor4")
    placed = eqx.filter_shard(model, shard_rules(model, mesh))
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    expected, wanted = gradient(model, ids)
    value, found = gradient(placed, jax.device_put(ids, batch_sharding(mesh)))
    assert abs(value - expected) < 0.02 * abs(expected)
    for path, g in to_arrays(found).items():
        assert g.dtype == jnp.float32
        # Both are rounded at each layer, to 8 bits or 11, and summed in another order.
        error = np.linalg.norm(np.asarray(g) - np.asarray(to_arrays(wanted)[path]))
        assert error < 0.1 * np.linalg.norm(np.asarray(to_arrays(wanted)[path])) + 1e-4, path
