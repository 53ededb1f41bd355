"""One model, run in several ways, gives the same: stacked, rematerialised, padded, in
pieces, and on meshes."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import compilations
from helpers import assert_close, in_long, mesh_of, place, stepped
from tiny_models import LENGTH, inputs, loss_fn, make, restack

import redco_eqx as rx
from redco_eqx import cast, to_arrays
from redco_eqx_models._blocks.experts import all_for_all, in_groups
from redco_eqx_models._families.llama import LlamaDecoderLayer

NUM = 3
"""Tokens of padding."""


def padded(text: jax.Array, before: int) -> tuple[jax.Array, jax.Array]:
    """A text with padding before it, and after it, and the mask."""
    mask = np.zeros((len(text), LENGTH + NUM), bool)
    mask[:, before : before + LENGTH] = True
    return jnp.pad(
        text, ((0, 0), (before, NUM - before)), constant_values=7
    ), jnp.asarray(mask)


PADDED = [
    *((name, (0, NUM)) for name in ("mistral", "t5")),
    *(
        (name, (NUM,))
        for name in ("gptj", "opt_350m", "smollm3", "olmo2", "bart", "roberta_masked")
    ),
    # The first token or the last stands for the text.
    *((name, (0,)) for name in ("bert_labels", "clip")),
    *((name, ()) for name in ("vit_labels", "vit_gpt2")),
]


@pytest.mark.parametrize(("name", "sides"), PADDED)
def test_stacked_and_padded_equals_a_list_of_layers(name, sides):
    model = make(name)
    read, *written = inputs(name)
    others = [(padded(read, before), before) for before in sides] or [((read, None), 0)]

    @eqx.filter_jit
    def run(model: Any, stacked: Any) -> Any:
        masked = [
            stacked(x, *written, **({} if m is None else {"attention_mask": m}))
            for (x, m), _ in others
        ]
        return model(read, *written), masked

    alone, masked = run(model, restack(model))
    for found, (_, before) in zip(masked, others):
        for x, expected in zip(
            jax.tree.leaves(found), jax.tree.leaves(alone), strict=True
        ):
            if x.shape != expected.shape:
                x = x[:, before : before + LENGTH]
            np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4)


def test_layers_of_a_list_are_traced_once_if_they_are_equal_but_for_their_arrays(
    monkeypatch,
):
    model = make("llama", num_hidden_layers=4)
    (text,) = inputs("llama")
    other = make("llama", num_hidden_layers=4, hidden_act="relu")
    odd = eqx.tree_at(lambda m: m.model.layers[2].mlp, model, other.model.layers[2].mlp)
    call = LlamaDecoderLayer.__call__
    traced = []
    monkeypatch.setattr(
        LlamaDecoderLayer,
        "__call__",
        lambda self, *given: traced.append(self) or call(self, *given),
    )
    run = eqx.filter_jit(lambda model, text: model(text))
    found = run(model, text), run(odd, text)
    assert len(traced) == 1 + 2
    with jax.disable_jit():  # one operation at a time rounds differently
        assert_close(found, (model(text), odd(text)), rtol=1e-4, atol=1e-4)
    assert not jnp.allclose(*found)
    # Calls outside of a trace are not compiled for each call.
    with compilations() as compiled:
        model(text)
        once = len(compiled)
        model(text)
    assert len(compiled) == once


class Watched(eqx.Module):
    """Stores what the module inside returns, doubled if `doubles` is `True`, which
    equals 1."""

    inner: Any
    doubles: bool | int
    stored: list[Any] = eqx.field(static=True)

    def __call__(self, *given: Any) -> Any:
        self.stored.append(self.inner(*given) * (2 if self.doubles is True else 1))
        return self.stored[-1]


def test_a_module_of_ones_own_in_a_layer_is_called_in_each_layer():
    model = make("llama", num_hidden_layers=3)
    (text,) = inputs("llama")
    stored = []
    own = [Watched(x.mlp, i, stored) for x, i in zip(model.model.layers, (1, True, 1))]
    model = eqx.tree_at(lambda m: [x.mlp for x in m.model.layers], model, own)
    arrays, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def run(arrays: Any) -> Any:
        stored.clear()
        return eqx.combine(arrays, static)(text), list(stored)

    found = run(arrays)
    stored.clear()
    expected = model(text), list(stored)
    assert len(expected[1]) == 3
    # One operation at a time rounds differently.
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_in_pieces_with_a_cache_equals_at_once():
    """The model has a window; a row is padded on the left, and has to count from
    there."""
    model = make("mistral")
    (text,) = inputs("mistral")
    mask = jnp.asarray([[1] * LENGTH, [0] * 3 + [1] * (LENGTH - 3)])
    run = eqx.filter_jit(
        lambda model, text, mask, cache=None: model(
            text, attention_mask=mask, cache=cache
        )
    )
    whole = run(model, text, mask)
    cache = model.init_cache(2, LENGTH + 2)
    outputs = []
    for piece in np.split(np.arange(LENGTH), 2):
        output, cache = run(model, text[:, piece], mask[:, piece], cache)
        outputs.append(output)
    real = np.asarray(mask) == 1
    found = np.concatenate(outputs, axis=1)[real]
    np.testing.assert_allclose(found, np.asarray(whole)[real], rtol=1e-4, atol=1e-4)


RATES = {
    "gpt2": ("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
}


@pytest.mark.parametrize(
    ("name", "remats"), [("gpt2", ("full", "row_out")), *in_long(("bart", ("full",)))]
)
def test_stacked_and_rematerialised_has_the_gradient_of_a_list_of_layers(name, remats):
    """With dropout: the same keys must reach the same layers."""
    rates: dict[str, Any] = dict.fromkeys(RATES[name], 0.3)
    model = make(name, **rates)
    batch = inputs(name)
    key = jax.random.key(3)
    gradient_of = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))
    loss, gradient = gradient_of(model, batch, key)
    assert abs(loss - gradient_of(model, batch, jax.random.key(4))[0]) > 1e-3
    for remat in remats:
        found_loss, found = gradient_of(restack(model, remat=remat), batch, key)
        assert_close(found_loss, loss, rtol=1e-5)
        assert_close(
            to_arrays(found), to_arrays(restack(gradient)), rtol=1e-3, atol=1e-5
        )


def test_experts_in_groups_equal_all_experts_for_all_tokens():
    """The first is what TPUs run."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, gate, up, down = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(2, 5, 8), (4, 6, 8), (4, 6, 8), (4, 8, 6)])
    )
    weights, chosen = jax.lax.top_k(
        jax.nn.softmax(jax.random.normal(keys[4], (2, 5, 4))), 2
    )
    # No token goes to one, and some twice to another.
    chosen = jnp.where(chosen == 3, 0, chosen)

    @functools.partial(jax.jit, static_argnums=0)
    def run(mix: Any, *given: Any) -> Any:
        def loss(x: Any, weights: Any, *matrices: Any) -> Any:
            return jnp.sum(mix(jax.nn.silu, x, weights, chosen, *matrices) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(*given)

    given = x, weights, gate, up, down
    # Float32: products of groups and of all experts add up in another order.
    assert_close(run(in_groups, *given), run(all_for_all, *given), rtol=1e-4, atol=1e-5)


# On meshes.


@functools.cache
def updated(name: str, mesh_name: str, sequence_parallel: bool | None = False) -> Any:
    """The new parameters after a step of SGD with rate 1, which show the gradient, and
    the loss."""
    model = make(name)
    if name not in ("unet", "vae", "bart"):
        model = restack(model, sequence_parallel=sequence_parallel)
    new = stepped(model, inputs(name, 8), mesh_of(mesh_name), loss_fn, optax.sgd(1.0))
    params = to_arrays(new.state.model)
    loss = new.metrics["loss"].value
    return jax.device_get((params, loss)), jax.device_get(to_arrays(model))


ON_MESHES = [
    ("t5", "2x2x2", False),
    ("t5", "data2xtensor4", True),
    ("mixtral", "2x2x2", False),
    *in_long(
        *(
            (name, "2x2x2", False)
            for name in ("bart", "bert_masked", "vit_gpt2", "unet", "vae")
        )
    ),
    # 4 heads do not divide.
    *in_long(("qwen3_moe", "data2xtensor4", True), ("unet", "tensor8", False)),
    # The stream is split between the layers alone.
    ("t5", "data2xtensor4", None),
    *in_long(*((name, "data2xtensor4", None) for name in ("mixtral", "bert_masked"))),
]


@pytest.mark.parametrize(("name", "mesh_name", "sequence_parallel"), ON_MESHES)
def test_a_step_is_the_same_on_every_mesh(
    name, mesh_name, sequence_parallel, monkeypatch
):
    monkeypatch.setattr("redco_eqx_models._blocks.model.SPLIT_FROM", 0)
    (found, found_loss), _ = updated(name, mesh_name, sequence_parallel)
    (expected, loss), before = updated(name, "one")
    assert_close(found_loss, loss, rtol=1e-5)
    for path, x in expected.items():
        # float32, in which sums over devices have another order.
        error, gradient = np.abs(found[path] - x).max(), np.abs(x - before[path]).max()
        assert error <= 1e-4 * gradient + 1e-6, (path, error, gradient)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", jnp.float16), *in_long(("t5_gated", jnp.float16))]
)
def test_gradients_in_low_precision_over_tensor(name, dtype):
    """`cast` inside the loss, over float32 parameters, as the README has it."""
    model = make(name, stacked=True)
    batch = inputs(name, 4)
    mesh = mesh_of("data2xtensor4")

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def gradient(model: Any, batch: Any) -> Any:
        model, batch = cast((model, batch), dtype)
        return loss_fn(model, batch, None)

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
