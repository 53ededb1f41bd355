"""Chains of Linear layers: `eqx.nn.MLP`, containers, gates, norms between, nesting."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import COL, HEADS, LAYERS, ROW, SEQ, WHOLE, D, Entry, F, each, linear, pairs, squared_loss


def _linear_specs(*layouts: tuple[str, tuple[Any, ...]], bias: bool = True) -> dict[str, Any]:
    """Weight and bias of each named Linear: a bias is split with its column weight, else whole."""
    specs: dict[str, Any] = {}
    for path, spec in layouts:
        specs[f"{path}.weight"] = spec
        if bias:
            specs[f"{path}.bias"] = COL if spec == COL else WHOLE
    return specs


def _mlp(key, *, depth, size_in=D, out=D):
    return eqx.nn.MLP(size_in, out, F, depth, activation=jax.nn.gelu, key=key)


# Containers


def _sequential(key):
    k1, k2 = jax.random.split(key)
    return eqx.nn.Sequential([linear(D, F, k1), eqx.nn.Lambda(jax.nn.gelu), linear(F, D, k2)])


def _nested_sequential(key):
    k1, k2 = jax.random.split(key)
    first = eqx.nn.Sequential([linear(D, F, k1), eqx.nn.Lambda(jax.nn.gelu)])
    return eqx.nn.Sequential([first, eqx.nn.Sequential([linear(F, D, k2)])])


def _sequential_of_blocks(key):
    return eqx.nn.Sequential([_sequential(k) for k in jax.random.split(key, 2)])


def _list(key):
    k1, k2 = jax.random.split(key)
    return [linear(D, F, k1), linear(F, D, k2)]


def _tuple(key):
    return tuple(_list(key))


def _dict(key):
    up, down = _list(key)
    return {"down": down, "up": up}


def _apply_list(model, x):
    return model[1](jax.nn.gelu(model[0](x)))


def _apply_dict(model, x):
    return model["down"](jax.nn.gelu(model["up"](x)))


class ThreeFields(eqx.Module):
    embed: eqx.nn.Linear
    mix: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed, self.mix, self.head = linear(D, F, k1), linear(F, F, k2), linear(F, D, k3)

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.mix(jax.nn.gelu(self.embed(x)))))


class SquareFields(eqx.Module):
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.linear1, self.linear2 = linear(D, D, k1), linear(D, D, k2)

    def __call__(self, x):
        return self.linear2(jax.nn.gelu(self.linear1(x)))


class Reversed(eqx.Module):
    """The fields stand in the order opposite to their use: shape decides."""

    down: eqx.nn.Linear
    up: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = _list(key)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


# Gates


class T5Gate(eqx.Module):
    wi_0: eqx.nn.Linear
    wi_1: eqx.nn.Linear
    wo: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.wi_0, self.wi_1 = linear(D, F, k1, bias=False), linear(D, F, k2, bias=False)
        self.wo = linear(F, D, k3, bias=False)

    def __call__(self, x):
        return self.wo(jax.nn.gelu(self.wi_0(x)) * self.wi_1(x))


class GEGLU(eqx.Module):
    value: eqx.nn.Linear
    gate: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.value, self.gate = linear(D, F, k1), linear(D, F, k2)

    def __call__(self, x):
        return self.value(x) * jax.nn.gelu(self.gate(x))


class GateInList(eqx.Module):
    """As in diffusers: what opens is two matrices, in one element of a list."""

    net: list

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.net = [GEGLU(k1), eqx.nn.Dropout(0.0), linear(F, D, k2)]

    def __call__(self, x):
        return self.net[2](self.net[0](x))


class LlamaGate(eqx.Module):
    """As in LLaMA's first release: w1 the gate, w2 down, w3 up, in this order."""

    w1: eqx.nn.Linear
    w2: eqx.nn.Linear
    w3: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.w1, self.w3 = linear(D, F, k1, bias=False), linear(D, F, k3, bias=False)
        self.w2 = linear(F, D, k2, bias=False)

    def __call__(self, x):
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class NarrowGate(eqx.Module):
    """Fewer inner than outer features: the siblings still open, and `down` still closes."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.gate, self.up, self.down = linear(64, 32, k1), linear(64, 32, k2), linear(32, 64, k3)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class FusedGate(eqx.Module):
    wi: eqx.nn.Linear
    wo: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.wi, self.wo = linear(D, 2 * F, k1), linear(F, D, k2)

    def __call__(self, x):
        gate, up = jnp.split(self.wi(x), 2)
        return self.wo(jax.nn.silu(gate) * up)


class Residual(eqx.Module):
    """Two pre-norm residual blocks of some MLP, over the tokens of a row."""

    norms: list[eqx.nn.LayerNorm]
    mlps: list[Any]

    def __init__(self, key, make: Callable[[Any], Any], size: int):
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(LAYERS)]
        self.mlps = [make(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for norm, mlp in zip(self.norms, self.mlps):
            x = x + each(mlp, each(norm, x))
        return x


def _gate(name, make, layouts, all_reduces, note="", *, bias=True, size=D):
    specs = _linear_specs(*((f"mlps.*.{path}", spec) for path, spec in layouts), bias=bias)
    return Entry(
        name,
        partial(Residual, make=make, size=size),
        pairs(SEQ, size),
        squared_loss(),
        {"norms.*": WHOLE, **specs},
        all_reduces,
        note,
        activation_sizes=(SEQ * size,),
    )


# Attention and norms of Equinox


class EquinoxBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key, bias):
        k1, k2 = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS,
            D,
            use_query_bias=bias,
            use_key_bias=bias,
            use_value_bias=bias,
            use_output_bias=bias,
            key=k1,
        )
        self.mlp = _mlp(k2, depth=1)

    def __call__(self, x):
        h = each(self.norm1, x)
        x = x + self.attention(h, h, h)
        return x + each(self.mlp, each(self.norm2, x))


class EquinoxTransformer(eqx.Module):
    blocks: list[EquinoxBlock]

    def __init__(self, key, bias=False):
        self.blocks = [EquinoxBlock(k, bias) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MHA_SPECS = {
    "blocks.*.norm?.*": WHOLE,
    "blocks.*.attention.query_proj.*": COL,
    "blocks.*.attention.key_proj.*": COL,
    "blocks.*.attention.value_proj.*": COL,
    "blocks.*.attention.output_proj.weight": ROW,
    **_linear_specs(("blocks.*.mlp.layers.0", COL), ("blocks.*.mlp.layers.1", ROW)),
}


class NormBetween(eqx.Module):
    up: eqx.nn.Linear
    norm: Any
    down: eqx.nn.Linear

    def __init__(self, key, norm):
        self.up, self.down = _list(key)
        self.norm = norm()

    def __call__(self, x):
        return self.down(jax.nn.relu(self.norm(self.up(x))))


def _nested(key):
    return {"body": [Reversed(k) for k in jax.random.split(key, 2)], "scale": jnp.ones(D)}


def _apply_nested(model, x):
    for block in model["body"]:
        x = x + block(x)
    return x * model["scale"]


class AutoEncoder(eqx.Module):
    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.encoder = _mlp(k1, depth=1, out=16)
        self.decoder = _mlp(k2, depth=1, size_in=16)

    def __call__(self, x):
        return self.decoder(self.encoder(x))


def _flat(name, make, layouts, *, sizes=(D,), all_reduces: int | None = 1, note="", apply=None, out=D):
    loss = squared_loss() if apply is None else squared_loss(apply)
    return Entry(
        name,
        make,
        pairs(D, out=(out,)),
        loss,
        _linear_specs(*layouts.items()),
        all_reduces,
        note,
        activation_sizes=sizes,
    )


ENTRIES = [
    _flat("mlp_2", partial(_mlp, depth=1), {"layers.0": COL, "layers.1": ROW}),
    _flat(
        "mlp_3",
        partial(_mlp, depth=2),
        {"layers.0": COL, "layers.1": ROW, "layers.2": COL},
        sizes=(F,),
    ),
    _flat(
        "mlp_4",
        partial(_mlp, depth=3),
        {"layers.0": COL, "layers.1": ROW, "layers.2": COL, "layers.3": ROW},
        sizes=(F, D),
        all_reduces=2,
    ),
    _flat(
        "mlp_3_indivisible",
        partial(_mlp, depth=2, out=10),
        {"layers.0": COL, "layers.1": ROW, "layers.2": WHOLE},
        sizes=(F,),
        out=10,
        note="the third opens a pair that nothing closes, and its 10 outputs do not divide: whole",
    ),
    _flat("gate_in_list", GateInList, {"net.0.value": COL, "net.0.gate": COL, "net.2": ROW}),
    _flat("sequential", _sequential, {"layers.0": COL, "layers.2": ROW}),
    _flat("sequential_nested", _nested_sequential, {"layers.0.layers.0": COL, "layers.1.layers.0": ROW}),
    _flat(
        "sequential_of_blocks",
        _sequential_of_blocks,
        {"layers.*.layers.0": COL, "layers.*.layers.2": ROW},
        all_reduces=2,
    ),
    _flat("linear_list", _list, {"0": COL, "1": ROW}, apply=_apply_list),
    _flat("linear_tuple", _tuple, {"0": COL, "1": ROW}, apply=_apply_list),
    _flat(
        "linear_dict",
        _dict,
        {"up": COL, "down": ROW},
        apply=_apply_dict,
        note="JAX sorts keys, so `down` comes first: shape decides",
    ),
    _flat("reversed_fields", Reversed, {"up": COL, "down": ROW}, note="shape before order"),
    _flat("three_fields", ThreeFields, {"embed": COL, "mix": ROW, "head": COL}, sizes=(F,)),
    _flat("square_fields", SquareFields, {"linear1": COL, "linear2": ROW}, note="order decides"),
    Entry(
        "mha",
        EquinoxTransformer,
        pairs(SEQ, D),
        squared_loss(),
        MHA_SPECS,
        2 * LAYERS,
    ),
    Entry(
        "mha_bias",
        partial(EquinoxTransformer, bias=True),
        pairs(SEQ, D),
        squared_loss(),
        {"blocks.*.attention.output_proj.bias": WHOLE, **MHA_SPECS},
        2 * LAYERS,
    ),
    _gate(
        "gate_t5",
        T5Gate,
        (("wi_0", COL), ("wi_1", COL), ("wo", ROW)),
        LAYERS,
        bias=False,
    ),
    _gate(
        "gate_w123",
        LlamaGate,
        (("w1", COL), ("w2", ROW), ("w3", COL)),
        LAYERS,
        "order would pair w1 with w2 and leave w3 alone",
        bias=False,
    ),
    _gate(
        "gate_narrow",
        NarrowGate,
        (("gate", COL), ("up", COL), ("down", ROW)),
        LAYERS,
        "down's out > in, so by shape alone it would open; but two siblings feed it",
        size=64,
    ),
    _gate(
        "gate_fused",
        FusedGate,
        (("wi", COL), ("wo", ROW)),
        None,
        "both halves of wi lie across the devices: permutes before the product",
    ),
    _flat(
        "layernorm_between",
        partial(NormBetween, norm=partial(eqx.nn.LayerNorm, F)),
        {"norm": WHOLE, "up": COL, "down": ROW},
        note="the norm over split features costs one number per row and moment, no activation",
    ),
    _flat(
        "groupnorm_between",
        partial(NormBetween, norm=partial(eqx.nn.GroupNorm, 8, F)),
        {"norm": WHOLE, "up": COL, "down": ROW},
    ),
    Entry(
        "nested_containers",
        _nested,
        pairs(D),
        squared_loss(_apply_nested),
        {"scale": WHOLE, **_linear_specs(("body.*.up", COL), ("body.*.down", ROW))},
        2,
        "dict -> list -> module, with a bare 1-D array beside",
        activation_sizes=(D,),
    ),
    _flat(
        "decoupled",
        AutoEncoder,
        {
            "encoder.layers.0": COL,
            "encoder.layers.1": ROW,
            "decoder.layers.0": COL,
            "decoder.layers.1": ROW,
        },
        sizes=(16, D),
        all_reduces=2,
    ),
]
