"""Low-rank adapters on column- and row-parallel layers."""

from typing import Any

import equinox as eqx
import jax

from ._entry import COL, LAYERS, ROW, WHOLE, Entry, language_loss, linear, tokens
from .decoders import GPTJ, GPTJ_SPECS

RANK = 4  # divides over tensor=4, so that splitting it is a mistake one can make


class LoRALinear(eqx.Module):
    """Wraps a Linear."""

    linear: eqx.nn.Linear
    lora_a: eqx.nn.Linear
    lora_b: eqx.nn.Linear

    def __init__(self, base, key):
        k1, k2 = jax.random.split(key)
        self.linear = base
        self.lora_a = linear(base.in_features, RANK, k1, bias=False)
        self.lora_b = linear(RANK, base.out_features, k2, bias=False)

    def __call__(self, x):
        return self.linear(x) + self.lora_b(self.lora_a(x))


class RawLoRALinear(eqx.Module):
    """Is a Linear, with two arrays more."""

    weight: jax.Array
    bias: jax.Array | None
    lora_A: jax.Array
    lora_B: jax.Array
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def __init__(self, base, key):
        k1, k2 = jax.random.split(key)
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = 0.2 * jax.random.normal(k1, (RANK, self.in_features))
        self.lora_B = 0.2 * jax.random.normal(k2, (self.out_features, RANK))

    def __call__(self, x):
        out = self.weight @ x + self.lora_B @ (self.lora_A @ x)
        return out if self.bias is None else out + self.bias


def _adapted(wrap: Any) -> Any:
    def make(key):
        model = GPTJ(key)

        def where(m):
            per_block = ([b.attn.q_proj, b.attn.v_proj, b.attn.out_proj, b.mlp.fc_out] for b in m.h)
            return [layer for layers in per_block for layer in layers]

        bases = where(model)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(bases))
        return eqx.tree_at(where, model, [wrap(base, k) for base, k in zip(bases, keys)])

    return make


ENTRIES = [
    Entry(
        "lora",
        _adapted(LoRALinear),
        tokens,
        language_loss,
        {
            "h.*.attn.[qv]_proj.lora_a.weight": WHOLE,
            "h.*.attn.[qv]_proj.lora_b.weight": COL,
            "h.*.attn.[qv]_proj.linear.weight": COL,
            "h.*.attn.k_proj.weight": COL,
            "h.*.attn.out_proj.linear.weight": ROW,
            "h.*.mlp.fc_out.linear.weight": ROW,
            "h.*.mlp.fc_out.linear.bias": WHOLE,
            "h.*.lora_a.weight": ROW,
            "h.*.lora_b.weight": WHOLE,
            **{k: v for k, v in GPTJ_SPECS.items() if not k.startswith(("h.*.attn", "h.*.mlp.fc_out"))},
        },
        1 + 2 * LAYERS,
        "a row-parallel adapter adds an all-reduce of `rank` numbers per token",
    ),
    Entry(
        "lora_raw",
        _adapted(RawLoRALinear),
        tokens,
        language_loss,
        {
            "h.*.attn.[qv]_proj.lora_A": WHOLE,
            "h.*.attn.[qv]_proj.lora_B": COL,
            "h.*.lora_A": ROW,
            "h.*.lora_B": WHOLE,
            **GPTJ_SPECS,
        },
        1 + 2 * LAYERS,
        "A and B are arrays on the module that has the base's weight",
    ),
]
