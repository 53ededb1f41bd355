"""Layers on rows: chains of Linear layers, gates, norms, the ends of a stream; experts; false friends."""

import itertools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._entry import (
    COL,
    EXPERTS,
    LAYERS,
    NUM_STACKED,
    ROW,
    SEQ,
    STACKED_COL,
    STACKED_ROW,
    WHOLE,
    D,
    Entry,
    F,
    each,
    linear,
    linears,
    mlp,
    norm,
    pairs,
    squared_loss,
    stack,
    through,
)


def _specs(layouts: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Weight and bias of each named Linear: a bias is split with its column weight, else whole."""
    specs: dict[str, Any] = {}
    for path, spec in layouts.items():
        specs |= {f"{path}.weight": spec, f"{path}.bias": COL if spec == COL else WHOLE}
    return specs


# Containers


def nested_sequential(key: Any) -> eqx.nn.Sequential:
    up, down = linears(key, (D, F), (F, D))
    return eqx.nn.Sequential([eqx.nn.Sequential([up, eqx.nn.Lambda(jax.nn.gelu)]), eqx.nn.Sequential([down])])


class ThreeFields(eqx.Module):
    embed: eqx.nn.Linear
    mix: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        self.embed, self.mix, self.head = linears(key, (D, F), (F, F), (F, D))

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.mix(jax.nn.gelu(self.embed(x)))))


def up_and_down(key: Any) -> Any:
    """JAX sorts keys, so `down` comes first, against the order of use: shape decides."""
    return dict(zip(("up", "down"), linears(key, (D, F), (F, D))))


def apply_up_and_down(model: Any, x: Any) -> Any:
    return model["down"](jax.nn.gelu(model["up"](x)))


def norm_between(key: Any, make: Any) -> Any:
    return {**up_and_down(key), "norm": make()}


def apply_norm_between(model: Any, x: Any) -> Any:
    return model["down"](jax.nn.relu(model["norm"](model["up"](x))))


def autoencoder(key: Any) -> Any:
    k1, k2 = jax.random.split(key)
    return {"encoder": mlp(k1, num_out=16), "decoder": mlp(k2, num_in=16)}


# Gates


def gate_in_list(key: Any) -> Any:
    """As in diffusers: what opens is two matrices, in one element of a list."""
    value, gate, down = linears(key, (D, F), (D, F), (F, D))
    return {"net": [{"value": value, "gate": gate}, eqx.nn.Dropout(0.0), down]}


def apply_gate_in_list(model: Any, x: Any) -> Any:
    first, _, down = model["net"]
    return down(first["value"](x) * jax.nn.gelu(first["gate"](x)))


def residual(key: Any, names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> Any:
    """Two pre-norm residual blocks over the tokens of a row."""
    mlps = [dict(zip(names, linears(k, *sizes))) for k in jax.random.split(key, LAYERS)]
    return {"norms": [norm(sizes[0][0]) for _ in range(LAYERS)], "mlps": mlps}


def apply_residual(model: Any, x: Any, names: tuple[str, ...]) -> Any:
    for layer_norm, layers in zip(model["norms"], model["mlps"]):
        *first, down = (layers[name] for name in names)
        opened = [each(layer, each(layer_norm, x)) for layer in first]
        gate, up = jnp.split(opened[0], 2, axis=-1) if len(opened) == 1 else opened
        x = x + each(down, jax.nn.silu(gate) * up)
    return x


# Blocks between what feeds them from outside and a head


def between_ends(key: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """The first matrix feeds the blocks, the others follow; `sizes` are the widths before and after."""
    k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
    after = linears(k2, *itertools.pairwise((D, *sizes[1:])))
    ends = dict(zip(names, (linear(sizes[0], D, k1), *after)))
    return {**ends, "blocks": [{"norm": norm(), "mlp": mlp(k)} for k in keys]}


def apply_between_ends(model: Any, x: Any, names: tuple[str, ...]) -> Any:
    def block(layer, x):
        return x + each(layer["mlp"], each(layer["norm"], x))

    x = through(model["blocks"], block, each(model[names[0]], x))
    for name in names[1:]:
        x = each(model[name], jnp.tanh(x))
    return x


def _ends(name, sizes, layouts, note, free=()):
    names, layers = tuple(layouts), {"*.mlp.layers.0": COL, "*.mlp.layers.1": ROW}
    specs = {"*norm*": WHOLE, **dict.fromkeys(free, ...), **_specs({**layouts, **layers})}
    make, apply = (partial(f, names=names) for f in (between_ends, apply_between_ends))
    batch, all_reduces = pairs(SEQ, sizes[0], out=(SEQ, sizes[-1])), None if len(sizes) > 2 else LAYERS
    return Entry(name, partial(make, sizes=sizes), batch, squared_loss(apply), specs, all_reduces, note)


def _gate(name, names, sizes, all_reduces, note):
    """The first names, or the first in two halves, are the gate and what it multiplies; the last closes."""
    layouts = {f"mlps.*.{n}": COL for n in names[:-1]} | {f"mlps.*.{names[-1]}": ROW}
    specs = {"norms.*": WHOLE, **_specs(layouts)}
    size, loss = sizes[0][0], squared_loss(partial(apply_residual, names=names))
    make = partial(residual, names=names, sizes=sizes)
    return Entry(name, make, pairs(SEQ, size), loss, specs, all_reduces, note, activation_sizes=(SEQ * size,))


def _flat(name, make, layouts, *, apply=None, sizes=(D,), all_reduces=1, out=D, others=None, note=""):
    loss = squared_loss() if apply is None else squared_loss(apply)
    specs = {**(others or {}), **_specs(layouts)}
    return Entry(name, make, pairs(D, out=(out,)), loss, specs, all_reduces, note, activation_sizes=sizes)


UP_DOWN = {"up": COL, "down": ROW}


# Mixtures of experts, computed densely: every token by every expert, weighted by a router. And an ensemble


def expert(key: Any) -> Any:
    up, down = linears(key, (D, F), (F, D))
    return {"up": up, "down": down}


def stacked_experts(key: Any, num_experts: int) -> Any:
    """Experts as one module with a leading dim."""
    k1, k2 = jax.random.split(key)
    return {"router": linear(D, num_experts, k1), "experts": stack(expert, k2, num_experts)}


def apply_stacked_experts(model: Any, x: Any) -> Any:
    def one(layer, x):
        return each(layer["down"], jax.nn.gelu(each(layer["up"], x)))

    weights = jax.nn.softmax(each(model["router"], x))
    every = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None))(model["experts"], x)
    return jnp.einsum("te,etd->td", weights, every)


def mixtral(key: Any, num_experts: int) -> Any:
    """Experts as a list, as on disk: the router is named `gate`."""
    k1, *keys = jax.random.split(key, 1 + num_experts)
    names, sizes = ("w1", "w2", "w3"), ((D, F), (F, D), (D, F))
    experts = [dict(zip(names, linears(k, *sizes, bias=False))) for k in keys]
    return {"gate": linear(D, num_experts, k1, bias=False), "experts": experts}


def apply_mixtral(model: Any, x: Any) -> Any:
    def one(layer, x):
        return each(layer["w2"], jax.nn.silu(each(layer["w1"], x)) * each(layer["w3"], x))

    weights = jax.nn.softmax(each(model["gate"], x))
    return sum(weights[:, [i]] * one(layer, x) for i, layer in enumerate(model["experts"]))


def blocks_of(key: Any, make: Any, *, is_stacked: bool = False) -> Any:
    """A list, or a stack with two leading dims: layers, then experts."""

    def block(key):
        return {"norm": norm(), "moe": make(key)}

    keys = jax.random.split(key, LAYERS)
    return {"blocks": stack(block, key) if is_stacked else [block(k) for k in keys]}


def apply_blocks(model: Any, x: Any, apply: Any) -> Any:
    return through(model["blocks"], lambda block, x: x + apply(block["moe"], each(block["norm"], x)), x)


def critics(key: Any) -> Any:
    """An ensemble: stacked, but not experts, since nothing routes between them."""
    return {"critics": stack(lambda k: eqx.nn.MLP(D, D, F, 1, activation=jnp.tanh, key=k), key)}


def apply_critics(model: Any, x: Any) -> Any:
    in_axes = (eqx.if_array(0), None)
    return eqx.filter_vmap(lambda critic, x: critic(x), in_axes=in_axes)(model["critics"], x)


def _experts(name, make, apply, specs, all_reduces, note, *, is_stacked=False):
    made = partial(blocks_of, make=make, is_stacked=is_stacked)
    loss, routers = squared_loss(partial(apply_blocks, apply=apply)), ("blocks.*router.*", "blocks.*gate.*")
    whole = {"blocks.*norm.*": WHOLE, **dict.fromkeys(routers, WHOLE)}
    return Entry(name, made, pairs(SEQ, D), loss, {**specs, **whole}, all_reduces, note)


# False friends: names, shapes and leaves that look like something else


def actor_critic(key: Any) -> Any:
    """A PRNG key named `key`, keys that could be split, an int `k`, a value head named `value`."""
    trunk, policy, value = linears(key, (8, F), (F, 4), (F, 1))
    keys = {"key": key, "keys": jax.random.split(key, 4), "k": 3, "q": "greedy"}
    return {**keys, "trunk": trunk, "policy": policy, "value": value}


def apply_actor_critic(model: Any, x: Any) -> Any:
    noise = jax.random.normal(model["key"], (8,)) + jax.random.normal(model["keys"][model["k"]], (8,))
    h = jnp.tanh(model["trunk"](x + 0.01 * noise))
    return jnp.concatenate([model["policy"](h), model["value"](h)])


def buffers(key: Any) -> Any:
    """Every kind of leaf that is no parameter."""
    return {
        **up_and_down(key),
        "table": np.linspace(0.5, 1.5, 8 * D, dtype=np.float32).reshape(8, D),
        "ids": jnp.arange(64).reshape(8, 8),
        "weight_ids": np.arange(8, dtype=np.int32),
        "mask": jnp.arange(D) % 2 == 0,
        **{"flag": True, "name": "buffers", "nothing": None, "rate": 0.5, "activation": jax.nn.gelu},
    }


def apply_buffers(model: Any, x: Any) -> Any:
    row = jnp.asarray(model["table"])[jnp.asarray(model["weight_ids"])[model["ids"][3, 2] % 8]]
    x = jnp.where(model["mask"], x, model["rate"] * x) * row
    return model["down"](model["activation"](model["up"](x))) if model["flag"] else x


ENTRIES = [
    _flat(
        "mlp_4",
        partial(mlp, depth=3),
        {"layers.0": COL, "layers.1": ROW, "layers.2": COL, "layers.3": ROW},
        sizes=(F, D),
        all_reduces=2,
    ),
    _flat(
        "mlp_3_indivisible",
        partial(mlp, depth=2, num_out=10),
        {"layers.0": COL, "layers.1": ROW, "layers.2": WHOLE},
        sizes=(F,),
        out=10,
        note="the third opens a pair that nothing closes, and its 10 outputs do not divide: whole",
    ),
    _flat("sequential_nested", nested_sequential, {"layers.0.layers.0": COL, "layers.1.layers.0": ROW}),
    _flat("up_and_down", up_and_down, UP_DOWN, apply=apply_up_and_down, note="shape before order"),
    _flat("three_fields", ThreeFields, {"embed": COL, "mix": ROW, "head": COL}, sizes=(F,)),
    _flat(
        "layernorm_between",
        partial(norm_between, make=partial(norm, F)),
        UP_DOWN,
        apply=apply_norm_between,
        others={"norm.*": WHOLE},
        note="the norm over split features costs one number per row and moment, no activation",
    ),
    _flat(
        "groupnorm_between",
        partial(norm_between, make=partial(eqx.nn.GroupNorm, 8, F)),
        UP_DOWN,
        apply=apply_norm_between,
        others={"norm.*": WHOLE},
    ),
    _flat(
        "decoupled",
        autoencoder,
        {"*.layers.0": COL, "*.layers.1": ROW},
        apply=lambda model, x: model["decoder"](model["encoder"](x)),
        sizes=(16, D),
        all_reduces=2,
    ),
    _flat(
        "gate_in_list",
        gate_in_list,
        {"net.0.value": COL, "net.0.gate": COL, "net.2": ROW},
        apply=apply_gate_in_list,
    ),
    _gate(
        "gate_w123",
        ("w1", "w3", "w2"),
        ((D, F), (D, F), (F, D)),
        LAYERS,
        "as in LLaMA's first release: order would pair w1 with w2 and leave w3 alone",
    ),
    _gate(
        "gate_narrow",
        ("gate", "up", "down"),
        ((64, 32), (64, 32), (32, 64)),
        LAYERS,
        "down's out > in, so by shape alone it would open; but two siblings feed it",
    ),
    _gate(
        "gate_fused",
        ("wi", "wo"),
        ((D, 2 * F), (F, D)),
        None,
        "both halves of wi lie across the devices: permutes before the product",
    ),
    _ends(
        "vision",
        (12, 16),
        {"patch_embed": WHOLE, "head": COL},
        "patches that come flat: the stream stays whole at both ends",
    ),
    _ends(
        "projections",
        (D // 2, D // 2),
        {"project_in": WHOLE, "project_out": WHOLE},
        "as in OPT-350M, before and after the layers: not a pair, though the second's in is the first's out. "
        "The stream stays whole: so is project_in, and project_out is whole, or by columns",
        free=("project_out.*",),
    ),
    _ends(
        "pooled",
        (12, D, 2),
        {"embed": WHOLE, "pooler": COL, "classifier": ROW},
        "as in BERT: pooler and classifier are consecutive after the blocks, a pair",
    ),
    _experts(
        "moe",
        partial(stacked_experts, num_experts=8),
        apply_stacked_experts,
        {"blocks.*.moe.experts.*": EXPERTS},
        LAYERS,
        "2 experts on each device; the weighted sum over experts is the all-reduce",
    ),
    _experts(
        "moe_indivisible",
        partial(stacked_experts, num_experts=6),
        apply_stacked_experts,
        {
            "blocks.*.moe.experts.up.*": STACKED_COL,
            "blocks.*.moe.experts.down.weight": STACKED_ROW,
            "blocks.*.moe.experts.down.bias": WHOLE,
        },
        None,
        "6 experts over 4 devices: each is split inside; its all-reduce comes before the sum over experts "
        "and is 6 activations wide",
    ),
    _experts(
        "moe_stacked",
        partial(stacked_experts, num_experts=8),
        apply_stacked_experts,
        {"blocks.moe.experts.*": (None, "tensor")},
        NUM_STACKED,
        "(layers, experts, ...): the dim of layers is never split, the one of experts is",
        is_stacked=True,
    ),
    _experts(
        "moe_mixtral",
        partial(mixtral, num_experts=4),
        apply_mixtral,
        {"blocks.*.w[13].weight": COL, "blocks.*.w2.weight": ROW},
        None,
        "the router is named `gate`, and is none of a gated MLP; one all-reduce for each expert",
    ),
    Entry(
        "ensemble",
        critics,
        pairs(D, out=(NUM_STACKED, D)),
        squared_loss(apply_critics),
        {
            "critics.layers.0.*": STACKED_COL,
            "critics.layers.1.weight": STACKED_ROW,
            "critics.layers.1.bias": WHOLE,
        },
        1,
        "a stack beside no router: the members are not experts, each is split inside",
        activation_sizes=(NUM_STACKED * D,),
    ),
    Entry(
        "friend_actor_critic",
        actor_critic,
        pairs(8, out=(5,)),
        squared_loss(apply_actor_critic),
        {"key*": WHOLE, "trunk.*": COL, "policy.weight": ROW, "value.weight": ROW, "*.bias": WHOLE},
        2,
        "two heads close what one trunk opens: one small all-reduce each",
        activation_sizes=(4, 1),
    ),
    Entry(
        "friend_buffers",
        buffers,
        pairs(D),
        squared_loss(apply_buffers),
        {
            "up.*": COL,
            "down.weight": ROW,
            "down.bias": WHOLE,
            **dict.fromkeys(("table", "ids", "weight_ids", "mask"), WHOLE),
        },
        1,
        "tables, integers and masks divide, and are not split",
        activation_sizes=(D,),
    ),
]
