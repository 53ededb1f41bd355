"""Layers on rows: chains of Linear layers, gates, norms, the ends of a stream; experts;
false friends."""

import itertools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._entry import LAYERS, NUM_STACKED, SEQ, D, F, of_rows, split
from ._layers import each, mlp, named, norm, repeated, stack, through


def call(model: Any, x: Any) -> Any:
    return model(x)


# Containers


class ThreeFields(eqx.Module):
    embed: Any
    mix: Any
    head: Any

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.mix(jax.nn.gelu(self.embed(x)))))


def three_fields(key: Any) -> ThreeFields:
    return ThreeFields(**named(key, embed=(D, F), mix=(F, F), head=(F, D)))


def up_and_down(key: Any) -> Any:
    """JAX sorts keys, so `down` comes first, against the order of use: shape
    decides."""
    return named(key, up=(D, F), down=(F, D))


def apply_up_and_down(model: Any, x: Any) -> Any:
    return model["down"](jax.nn.gelu(model["up"](x)))


NORMS = {
    "layernorm": partial(eqx.nn.LayerNorm, F),
    "groupnorm": partial(eqx.nn.GroupNorm, 8, F),
}


def norm_between(key: Any, make: Any) -> Any:
    return {**up_and_down(key), "norm": make()}


def apply_norm_between(model: Any, x: Any) -> Any:
    return model["down"](jax.nn.relu(model["norm"](model["up"](x))))


# Gates


def of_gates(name: str, specs: Any, **sizes: Any) -> Any:
    """Two pre-norm residual blocks: the first names, or the first in two halves, are
    the gate and its partner; the last closes."""
    (width, _), *_ = sizes.values()
    names = list(sizes)

    def make(key: Any) -> Any:
        norms = [eqx.nn.LayerNorm(width) for _ in range(LAYERS)]
        return {"norms": norms, "mlps": repeated(lambda k: named(k, **sizes), key)}

    def apply(model: Any, x: Any) -> Any:
        for layer_norm, layers in zip(model["norms"], model["mlps"]):
            *first, down = (layers[name] for name in names)
            opened = [each(layer, each(layer_norm, x)) for layer in first]
            gate, up = jnp.split(opened[0], 2, axis=-1) if len(opened) == 1 else opened
            x = x + each(down, jax.nn.silu(gate) * up)
        return x

    return of_rows(name, make, apply, specs, x=(SEQ, width))


# Blocks between the layer that feeds them from outside and a head


def of_ends(
    name: str, names: tuple[str, ...], widths: tuple[int, ...], specs: Any
) -> Any:
    """The first matrix feeds the blocks, the others follow; `widths` are those before
    and after the blocks."""
    first, *others = names
    before: Any = {first: (widths[0], D)}
    after: Any = dict(zip(others, itertools.pairwise((D, *widths[1:]))))

    def make(key: Any) -> Any:
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        blocks = [{"norm": norm(), "mlp": mlp(k)} for k in keys]
        return {**named(k1, **before), **named(k2, **after), "blocks": blocks}

    def apply(model: Any, x: Any) -> Any:
        def block(layer, x):
            return x + each(layer["mlp"], each(layer["norm"], x))

        x = through(model["blocks"], block, each(model[first], x))
        for name in others:
            x = each(model[name], jnp.tanh(x))
        return x

    return of_rows(
        name, make, apply, OF_BLOCKS | specs, x=(SEQ, widths[0]), y=(SEQ, widths[-1])
    )


# Mixtures of experts, computed densely: every token by every expert, weighted by a
# router. And an ensemble


def stacked_experts(key: Any, num_experts: int = 8) -> Any:
    """Experts as one module with a leading dim."""
    k1, k2 = jax.random.split(key)
    return {
        **named(k1, router=(D, num_experts)),
        "experts": stack(up_and_down, k2, num_experts),
    }


def apply_experts(model: Any, x: Any) -> Any:
    weights = jax.nn.softmax(each(model["router"], x))
    one = eqx.filter_vmap(
        lambda layer, x: each(partial(apply_up_and_down, layer), x), in_axes=MEMBERS
    )
    return jnp.einsum("te,etd->td", weights, one(model["experts"], x))


def mixtral(key: Any, num_experts: int = 4) -> Any:
    """Experts as a list, as on disk: the router is named `gate`."""
    k1, *keys = jax.random.split(key, 1 + num_experts)
    experts = [named(k, w1=(D, F), w2=(F, D), w3=(D, F), bias=False) for k in keys]
    return {**named(k1, gate=(D, num_experts), bias=False), "experts": experts}


def apply_mixtral(model: Any, x: Any) -> Any:
    def one(layer, x):
        return each(
            layer["w2"], jax.nn.silu(each(layer["w1"], x)) * each(layer["w3"], x)
        )

    weights = jax.nn.softmax(each(model["gate"], x))
    return sum(
        weights[:, [i]] * one(layer, x) for i, layer in enumerate(model["experts"])
    )


def of_experts(
    name: str, make: Any, specs: Any, apply: Any = apply_experts, many: Any = repeated
) -> Any:
    """Residual blocks in a list, or in a stack with two leading dims: layers, then
    experts."""

    def blocks(key: Any) -> Any:
        return {"blocks": many(lambda key: {"norm": norm(), "moe": make(key)}, key)}

    def apply_blocks(model: Any, x: Any) -> Any:
        return through(
            model["blocks"],
            lambda block, x: x + apply(block["moe"], each(block["norm"], x)),
            x,
        )

    return of_rows(name, blocks, apply_blocks, specs, x=(SEQ, D))


MEMBERS = (eqx.if_array(0), None)


def critics(key: Any) -> Any:
    """An ensemble: stacked, but not experts, since nothing routes between them."""
    return {
        "critics": stack(
            lambda k: eqx.nn.MLP(D, D, F, 1, activation=jnp.tanh, key=k), key
        )
    }


def apply_critics(model: Any, x: Any) -> Any:
    return eqx.filter_vmap(call, in_axes=MEMBERS)(model["critics"], x)


# False friends: names, shapes and leaves that look like something else


def actor_critic(key: Any) -> Any:
    """A PRNG key named `key`, keys that could be split, an int `k`, a value head named
    `value`."""
    keys = {"key": key, "keys": jax.random.split(key, 4), "k": 3, "q": "greedy"}
    return {**keys, **named(key, trunk=(8, F), policy=(F, 4), value=(F, 1))}


def act(model: Any, x: Any) -> Any:
    noise = jax.random.normal(model["key"], (8,)) + jax.random.normal(
        model["keys"][model["k"]], (8,)
    )
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
        **{
            "flag": True,
            "name": "buffers",
            "nothing": None,
            "rate": 0.5,
            "activation": jax.nn.gelu,
        },
    }


def apply_buffers(model: Any, x: Any) -> Any:
    row = jnp.asarray(model["table"])[
        jnp.asarray(model["weight_ids"])[model["ids"][3, 2] % 8]
    ]
    x = jnp.where(model["mask"], x, model["rate"] * x) * row
    return model["down"](model["activation"](model["up"](x))) if model["flag"] else x


UP_DOWN = split("up", "down")
OF_MEMBERS = split("critics.layers.0", "critics.layers.1", stacked=1)
OF_BLOCKS = split("*.mlp.layers.0", "*.mlp.layers.1")

ENTRIES = [
    of_rows("mlp_4", partial(mlp, depth=3), call, split("layers.[02]", "layers.[13]")),
    # The third opens a pair that nothing closes, and its 10 outputs do not divide:
    # whole.
    of_rows(
        "mlp_3_indivisible",
        partial(mlp, depth=2, num_out=10),
        call,
        split("layers.0", "layers.1"),
        y=(10,),
    ),
    # Shape before order.
    of_rows("up_and_down", up_and_down, apply_up_and_down, UP_DOWN),
    of_rows("three_fields", three_fields, call, split("embed head", "mix")),
    # A norm over split features costs one number per row and moment, no activation.
    *(
        of_rows(
            f"{name}_between",
            partial(norm_between, make=make),
            apply_norm_between,
            UP_DOWN,
        )
        for name, make in NORMS.items()
    ),
    # The out of `down` is above its in, so by shape alone it would open; but two
    # siblings feed it.
    of_gates(
        "gate_narrow",
        split("*.gate *.up", "*.down"),
        gate=(64, 32),
        up=(64, 32),
        down=(32, 64),
    ),
    # Both halves of wi lie across the devices: permutes before the product.
    of_gates("gate_fused", split("*.wi", "*.wo"), wi=(D, 2 * F), wo=(F, D)),
    # Patches that come flat: the stream stays whole at both ends.
    of_ends("vision", ("patch_embed", "head"), (12, 16), split("head")),
    # As in OPT-350M, before and after the layers: not a pair, though the second's in is
    # the first's out. The stream stays whole: so is project_in, and project_out is
    # whole, or by columns.
    of_ends(
        "projections",
        ("project_in", "project_out"),
        (D // 2, D // 2),
        {"project_out.*": ...},
    ),
    # As in BERT: pooler and classifier are consecutive after the blocks, a pair.
    of_ends(
        "pooled",
        ("embed", "pooler", "classifier"),
        (12, D, 2),
        split("pooler", "classifier"),
    ),
    # 2 experts on each device; the weighted sum over experts is the all-reduce.
    of_experts("moe", stacked_experts, split("*.experts")),
    # (layers, experts, ...): the dim of layers is never split, the one of experts is.
    of_experts(
        "moe_stacked", stacked_experts, split("*.experts", stacked=1), many=stack
    ),
    # The router is named `gate`, and is none of a gated MLP; one all-reduce for each
    # expert.
    of_experts("moe_mixtral", mixtral, split("*.w[13]", "*.w2"), apply_mixtral),
    # A stack beside no router: the members are not experts, each is split inside.
    of_rows("ensemble", critics, apply_critics, OF_MEMBERS, y=(NUM_STACKED, D)),
    # Two heads close what one trunk opens: one small all-reduce each.
    of_rows(
        "friend_actor_critic",
        actor_critic,
        act,
        split("trunk", "policy value"),
        x=(8,),
        y=(5,),
    ),
    # Tables, integers and masks divide, and are not split.
    of_rows("friend_buffers", buffers, apply_buffers, UP_DOWN),
]
