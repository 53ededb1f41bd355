"""All families: where they drop, their layouts, parts of their own. Arrays and parity
are in tests/parity."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, in_long, mesh_of
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError
from tiny_models import (
    CONFIGS,
    DECODERS,
    ENCODERS,
    IMAGES,
    abstract,
    inputs,
    loss_fn,
    make,
    shapes,
)

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx import shard_rules
from redco_eqx._base.tree import to_paths


def test_every_family_takes_the_example_that_it_gives():
    for name in CONFIGS:
        model = abstract(name)
        outputs = jax.tree.leaves(
            eqx.filter_eval_shape(lambda m, x: m(*x), model, model.example(6))
        )
        assert {x.shape[0] for x in outputs} == {6}, name


# Dropout.

SITES = {
    "gpt2": {"embd_pdrop": 1, "attn_pdrop": 1, "resid_pdrop": 2},
    "gptj": {"embd_pdrop": 1, "attn_pdrop": 1, "resid_pdrop": 2},
    "gpt_neox": {"hidden_dropout": 1 + 2, "attention_dropout": 1},
    "opt_125m": {"dropout": 2, "attention_dropout": 1},
    "llama": {"attention_dropout": 1},
    "t5": {"dropout_rate": 2 + 4 + 2 + 6},  # around stacks; in each layer
    "bart": {"dropout": 2 + 2 + 3, "attention_dropout": 3, "activation_dropout": 2},
    "bert_labels": {
        "hidden_dropout_prob": 3,
        "attention_probs_dropout_prob": 1,
        "classifier_dropout": 1,
    },
    "roberta_labels": {"classifier_dropout": 2},
    "vit_labels": {"hidden_dropout_prob": 3, "attention_probs_dropout_prob": 1},
    "clip": {"attention_dropout": 1},
    "unet": {"dropout": 2 + 2 + 4},  # its residual blocks: down, between, up
}
"""The places in a model at which each rate drops something: once outside of the layers,
and in one layer."""


def count_draws(program: Any) -> int:
    """The number of operations of a program that draw random numbers."""
    own = [equation.primitive.name == "random_bits" for equation in program.eqns]
    return sum(own) + sum(
        count_draws(x) for one in program.eqns for x in jaxprs_in_params(one.params)
    )


@pytest.mark.parametrize("name", SITES)
def test_each_rate_drops_at_its_places_with_a_key_in_training_mode(name):
    batch = inputs(name)
    stacked = name != "unet"
    zero = dict.fromkeys(
        [*SITES[name], *(SITES["bert_labels"] if "roberta" in name else ())], 0.0
    )

    def draws(model: Any, key: Any) -> int:
        closed = eqx.filter_make_jaxpr(lambda model, key: model(*batch, key=key))(
            model, key
        )[0]
        return count_draws(closed.jaxpr)

    key = jax.random.key(0)
    every = abstract(name, stacked=stacked, **dict.fromkeys(zero, 0.3))
    assert draws(every, None) == draws(eqx.nn.inference_mode(every), key) == 0
    for entry, expected in SITES[name].items():
        assert (
            draws(abstract(name, stacked=stacked, **{**zero, entry: 0.3}), key)
            == expected
        ), entry


# The layout, with no overrides.

COLUMN, ROW = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
SPLIT = {  # the first pattern that fits
    # Experts are stacked: each is split inside.
    r"experts\.(w1|w3|gate_proj|up_proj)\.weight$": ROW,
    r"experts\.(w2|down_proj)\.weight$": PartitionSpec(None, None, "tensor"),
    r"(shared|word_embeddings|wte|embed_(tokens|in|out)|token_embedding|lm_head|"
    r"project_out)\.weight$": COLUMN,
    r"\.(q|k|v|query|key|value|[qkv]_proj|wi|wi_0|wi_1)\.(weight|bias)$": COLUMN,
    r"\.(fc1|fc_in|gate_proj|up_proj|intermediate\.dense)\.(weight|bias)$": COLUMN,
    r"(\.o|o_proj|out_proj|wo|fc2|fc_out|down_proj|layer.*output\.dense)\.weight$": ROW,
    r"\.(query_key_value|dense_h_to_4h)\.(weight|bias)$": COLUMN,
    r"\.(attention\.dense|dense_4h_to_h)\.weight$": ROW,
    r"^lm_head\.bias$": COLUMN,
    # GPT-2 has (in, out), and what is fused apart.
    r"(q_attn|c_fc)\.weight$": ROW,
    r"(q_attn|c_fc)\.bias$": COLUMN,
    r"c_attn\.weight$": PartitionSpec(None, None, "tensor"),
    r"c_attn\.bias$": ROW,
    r"c_proj\.weight$": COLUMN,
    # A UNet: pairs, whose inner features stay split, around a stream that is whole.
    r"(conv1|to_[qkv]|net\.0\.(value|gate))\.weight$": COLUMN,
    r"(conv2|to_out\.0|net\.2)\.weight$": ROW,
    r"(conv_shortcut|proj_in|proj_out)\.weight$": PartitionSpec(),
}
ANY = (
    r"relative_attention_bias|final_logits_bias|patch_embeddings|pooler|classifier|^cls\.|enc_to_dec"
    r"|^lm_head\.(dense|decoder|layer_norm)"
)
"""Small, or outside the layers: the two engines differ, and either is right. So is the
bias of a tied head."""
LARGE = {
    "block_out_channels": [320, 640],
    "cross_attention_dim": 768,
    "norm_num_groups": 32,
}
"""Wide enough that weights count."""


def check_layout(name: str, model: Any, stacked: bool = False, **program: Any) -> None:
    shardings = to_paths(
        shard_rules(model, mesh_of("data2xtensor4"), **program), lambda x: x is not None
    )
    seen = set()
    for path, found in shardings.items():
        pattern = next((p for p in SPLIT if re.search(p, path)), None)
        if re.search(ANY, path) or (
            name.startswith("roberta") and path == "lm_head.bias"
        ):
            continue
        if name in IMAGES and pattern is None:
            continue
        expected = PartitionSpec() if pattern is None else SPLIT[pattern]
        if (
            expected
            and stacked
            and path.startswith(tuple(f"{x}." for x in model.stacks))
        ):
            expected = PartitionSpec(None, *expected)
        # Trailing dims that are whole may be named.
        assert found.is_equivalent_to(NamedSharding(found.mesh, expected), 4), (
            name,
            path,
            found.spec,
        )
        seen.add(expected)
    assert len(seen) >= 3, name  # column, row, whole


# Shortcuts and projections of a UNet: 4% of the bytes.
@pytest.mark.filterwarnings("ignore:shard_rules")
def test_the_rules_give_the_megatron_layout():
    for name in (*DECODERS, *ENCODERS):
        if name != "bert":
            check_layout(name, abstract(name))
            check_layout(name, abstract(name, stacked=True), stacked=True)
    # Whole: leaf by leaf the layouts of Figures 7 and 8 of RedCoast's paper.
    for name in ("gptj", "llama"):
        check_layout(name, shapes({"model_type": name}))
    for name in ("unet", "unet_linear"):
        check_layout(name, abstract(name, **LARGE))


TRACED = [
    ("t5", True),
    ("qwen3_moe", True),
    *in_long(("gpt_neox", True)),
    *in_long(
        *(
            (name, False)
            for name in ("mixtral", "t5_gated", "bart", "bert_labels", "vit_gpt2")
        )
    ),
]


@pytest.mark.parametrize(("name", "stacked"), TRACED)
def test_the_program_gives_the_megatron_layout(name, stacked):
    batch = jax.eval_shape(lambda: inputs(name, 8))
    check_layout(
        name, abstract(name, stacked=stacked), stacked, loss_fn=loss_fn, batch=batch
    )


# Parts of families.


def test_a_buffer_is_never_trained_and_part_of_the_head():
    """In a model, an abstract one, and one placed by Equinox, where NumPy is lost; also
    in another model."""
    frozen = functools.partial(
        rx.init_state, optimizer=optax.sgd(1.0), key=jax.random.key(0)
    )
    for name in ("bart", "vit_gpt2"):
        shape = abstract(name)
        model = make(name)
        placed = eqx.filter_shard(model, shard_rules(model, mesh_of("data2xtensor4")))
        for one in (shape, model, placed):
            assert set(frozen(one).frozen) == set(shape.buffers) != set()
            assert set(frozen({"inner": [one]}).frozen) == {
                f"inner.0.{path}" for path in shape.buffers
            }
    model = make("bart")
    x, bias = jnp.ones((1, 32)), np.asarray(model.final_logits_bias)
    without = eqx.tree_at(lambda m: m.final_logits_bias, model, 0 * bias)
    assert_close(
        model.head(x) - without.head(x), jnp.asarray(bias), rtol=1e-4, atol=1e-5
    )


def test_labels_are_shifted_to_the_right():
    assert models.shift_right(jnp.asarray([[5, 6, -100, 7]]), 2, pad=1).tolist() == [
        [2, 5, 6, 1]
    ]


def test_rotation_in_float64_is_one():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8), jnp.float64)
        positions = jnp.broadcast_to(jnp.arange(5) + 1000, (2, 5))
        for interleaved in (False, True):
            turned = models.rotate(
                x, positions, models.Rope().frequencies(8), interleaved=interleaved
            )
            assert turned.dtype == jnp.float64
            # Float64 rounds at 2e-16: a few products and a sum of eight.
            np.testing.assert_allclose(
                jnp.sum(turned**2, axis=-1), jnp.sum(x**2, axis=-1), rtol=1e-14
            )


# Bad input.


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


ids = functools.partial(array, dtype=jnp.int32)


def call(model, *given):
    return model(*given)


def encode(model, x, mask=None):
    return model.encode(x, attention_mask=mask)


# A bad call and its message.
BAD_INPUT = [
    pytest.param(
        "gpt2",
        lambda m, x, mask: m(x, attention_mask=mask),
        (ids(2, 4), ids(2, 5)),
        r"\(2, 5\).*\(2, 4\)",
        id="gpt2-attention_mask-of_another_shape",
    ),
    pytest.param(
        "gpt2",
        call,
        (ids(2, 17),),
        "17 tokens a row, but the model has a table of 16 positions",
        id="gpt2-input_ids-too_long",
    ),
    pytest.param(
        "bart",
        encode,
        (ids(1, 17),),
        "17 tokens a row, but the model has a table of 16",
        id="bart-input_ids-too_long",
    ),
    pytest.param(
        "t5",
        encode,
        (ids(2, 12), ids(2, 3)),
        r"attention_mask has shape \(2, 3\), but it must be that of input_ids",
        id="t5-attention_mask-of_another_shape",
    ),
    pytest.param(
        "t5",
        lambda m, x, text: m.decode(text, m.encode(x)),
        (ids(2, 4), ids(3, 2)),
        "3 rows, which is not a multiple of the 2 that were encoded",
        id="t5-decode-rows_of_another_number",
    ),
    pytest.param(
        "vit_gpt2",
        encode,
        (array(2, 3, 9, 8),),
        r"pixel_values has shape \(2, 3, 9, 8\)",
        id="vit_gpt2-pixel_values-of_another_shape",
    ),
    pytest.param(
        "vit_gpt2",
        encode,
        (array(2, 3, 8, 8), ids(2, 5)),
        "images have no padding",
        id="vit_gpt2-attention_mask-of_images",
    ),
    pytest.param(
        "bert_masked",
        lambda m, x: m.bert.pool(x),
        (array(1, 2, 32),),
        "this model has no pooler",
        id="bert_masked-pool-without_pooler",
    ),
    pytest.param(
        "unet",
        call,
        (array(8, 3, 16, 16), ids(8), array(8, 7, 24)),
        r"sample has shape \(8, 3, 16, 16\).* with 4 channels",
        id="unet-sample-of_other_channels",
    ),
    pytest.param(
        "unet",
        call,
        (array(8, 4, 16, 16), ids(8), array(8, 7, 20)),
        "encoder_hidden_states has shape .* cross_attention_dim=24",
        id="unet-encoder_hidden_states-of_another_size",
    ),
    pytest.param(
        "vae",
        lambda m, x: m.encode(x),
        (array(8, 4, 16, 16),),
        r"images has shape .*with 3 channels",
        id="vae-images-of_other_channels",
    ),
    pytest.param(
        "vae",
        lambda m, x: m.encode(x),
        (array(8, 3, 15, 16),),
        "images has shape .*15.* multiples of 2",
        id="vae-images-of_odd_height",
    ),
    pytest.param(
        "vae",
        lambda m, x: m.decode(x),
        (array(8, 3, 16, 16),),
        r"latents has shape .* with 4 channels",
        id="vae-latents-of_other_channels",
    ),
]


@pytest.mark.parametrize(("name", "f", "arrays", "message"), BAD_INPUT)
def test_bad_input_is_refused(name, f, arrays, message):
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(f, abstract(name), *arrays)


def test_floats_for_tokens_are_refused():
    with pytest.raises((ValueError, TypeCheckError)):
        eqx.filter_eval_shape(call, abstract("t5"), array(2, 4), ids(2, 4))


@pytest.mark.parametrize("option", ["stacked", "sequence_parallel"])
@pytest.mark.parametrize("name", ["unet", "vae"])
def test_an_option_that_a_model_of_images_lacks_is_refused(name, option):
    with pytest.raises(ValueError, match=f"{option}=True"):
        shapes(IMAGES[name], **{option: True})
