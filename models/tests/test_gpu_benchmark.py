"""`benchmarks/gpu.py` at a tiny size on the CPU: its rows, and the two steps of JAX
that it compares."""

import dataclasses

import equinox as eqx
import gpu
import jax
import numpy as np
import pytest
from accelerator import ours, plain
from accelerator.settings import MODELS, SETTINGS, SMALL, flops_per_token, small

import redco_eqx_models as models

LLAMA = small(next(x for x in SETTINGS if x.part == "llama"))
CONFIG = SMALL["LLaMA-7B"]


def test_every_row_has_a_model_and_counts_operations_as_others_do():
    for setting in SETTINGS:
        assert setting.part == "tests" or (
            setting.model in MODELS and setting.model in SMALL
        )
        assert setting.limit <= 600
    # KempnerForge's log of one H200: 8.03 billion parameters, 10,471 tokens a second,
    # 57.8% of 989 TFLOP/s.
    config = models.LlamaConfig(hidden_size=4096, num_hidden_layers=32)
    assert 10_471 * flops_per_token(
        8_030_261_248, config, 4096
    ) / 989e12 == pytest.approx(0.578, abs=5e-4)


def test_the_step_written_by_hand_computes_the_same_loss_and_gradient():
    setting = dataclasses.replace(LLAMA, precision="float32")
    model = eqx.filter_jit(ours.make_model)(setting, CONFIG, key=jax.random.key(0))
    # Larger than at the start, so that attention is not flat.
    model = jax.tree.map(lambda x: 3 * np.asarray(x) if eqx.is_array(x) else x, model)
    layers = model.model.layers
    # Every matrix of ours is (out, in).
    parts = {x: getattr(layers.self_attn, f"{x}_proj") for x in "qkvo"}
    parts |= {x: getattr(layers.mlp, f"{x}_proj") for x in ("gate", "up", "down")}
    stack = {name: np.swapaxes(part.weight, 1, 2) for name, part in parts.items()}
    stack["before_attention"] = layers.input_layernorm.weight
    stack["before_mlp"] = layers.post_attention_layernorm.weight
    ends = {"embed": model.model.embed_tokens.weight, "head": model.lm_head.weight.T}
    params = {**ends, "layers": stack, "norm": model.model.norm.weight}
    tokens = np.random.default_rng(1).integers(
        0, CONFIG.vocab_size, (2, setting.length + 1)
    )
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss_of(arrays, tokens):
        return ours.make_loss(setting)(eqx.combine(arrays, static), tokens, None).value

    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(arrays, tokens)
    expected, other = jax.jit(
        jax.value_and_grad(plain.make_loss(setting, CONFIG, "xla"))
    )(params, tokens)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    own = np.asarray(gradient.model.layers.self_attn.q_proj.weight)
    np.testing.assert_allclose(
        own, np.swapaxes(other["layers"]["q"], 1, 2), atol=1e-5 * own.max()
    )


@pytest.mark.long
def test_a_row_comes_from_a_process_of_its_own_and_costs_itself_if_it_fails():
    found = gpu.run(LLAMA, is_small=True, target=None)
    assert found["tokens_per_second"] == pytest.approx(
        LLAMA.batch * LLAMA.length / found["seconds"]
    )
    size = CONFIG.hidden_size
    inner = CONFIG.intermediate_size
    vocabulary = CONFIG.vocab_size
    by_layer = 4 * size**2 + 3 * size * inner + 2 * size
    assert found["num_parameters"] == 2 * by_layer + 2 * vocabulary * size + size
    assert found["losses"][1] < found["losses"][0]
    assert "mfu" not in found  # a CPU has no number that it could be a part of
    assert len(gpu.cells({**dataclasses.asdict(LLAMA), **found})) == len(gpu.HEADER)

    late = gpu.run(dataclasses.replace(LLAMA, limit=0), is_small=True, target=None)
    assert late == {"error": "took more than 0 s"}
    wrong = gpu.run(
        dataclasses.replace(LLAMA, attention="cudnn"), is_small=True, target=None
    )
    assert "cuDNN" in wrong["error"] or "ended with" in wrong["error"]
