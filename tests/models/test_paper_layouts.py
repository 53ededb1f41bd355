"""The layouts of the paper's Figures 7 and 8, for GPT-J and LLaMA, leaf by leaf.

RedCoast (Tan et al., arXiv 2310.16355), section 3.1: in a block, consecutive fully-connected layers are split
along their outputs and their inputs in turn, and an attention's output projection along the dim opposite to
that of query, key and value; embeddings are split over the vocabulary, and what is a vector is not. The
figures print that for Flax, whose `kernel` is `(in, out)` and whose `embedding` is `(vocabulary, features)`,
with `mp` for the model axis. The tables here are derived from these rules, in the figures' orientation; the
figures' own text was not at hand. A head is a fully-connected layer of its own, after all blocks: it opens,
and is split along its outputs. The one addition to the paper: a bias of a layer that is split along its
outputs is split with it, which sends nothing.
"""

import jax
import pytest
from jax.sharding import NamedSharding
from published import PUBLISHED
from tiny_models import shapes

import redco_eqx as rx
from redco_eqx._base.tree import to_paths

OUT, IN, WHOLE = (None, "mp"), ("mp", None), ()

FIGURE_7 = {  # GPT-J-6B
    "transformer.wte.embedding": ("mp", None),
    "transformer.h.{i}.ln_1.scale": WHOLE,
    "transformer.h.{i}.ln_1.bias": WHOLE,
    "transformer.h.{i}.attn.q_proj.kernel": OUT,
    "transformer.h.{i}.attn.k_proj.kernel": OUT,
    "transformer.h.{i}.attn.v_proj.kernel": OUT,
    "transformer.h.{i}.attn.out_proj.kernel": IN,
    "transformer.h.{i}.mlp.fc_in.kernel": OUT,
    "transformer.h.{i}.mlp.fc_in.bias": ("mp",),
    "transformer.h.{i}.mlp.fc_out.kernel": IN,
    "transformer.h.{i}.mlp.fc_out.bias": WHOLE,
    "transformer.ln_f.scale": WHOLE,
    "transformer.ln_f.bias": WHOLE,
    "lm_head.kernel": OUT,
    "lm_head.bias": ("mp",),
}
FIGURE_8 = {  # LLaMA-7B
    "model.embed_tokens.embedding": ("mp", None),
    "model.layers.{i}.input_layernorm.scale": WHOLE,
    "model.layers.{i}.self_attn.q_proj.kernel": OUT,
    "model.layers.{i}.self_attn.k_proj.kernel": OUT,
    "model.layers.{i}.self_attn.v_proj.kernel": OUT,
    "model.layers.{i}.self_attn.o_proj.kernel": IN,
    "model.layers.{i}.post_attention_layernorm.scale": WHOLE,
    "model.layers.{i}.mlp.gate_proj.kernel": OUT,
    "model.layers.{i}.mlp.up_proj.kernel": OUT,
    "model.layers.{i}.mlp.down_proj.kernel": IN,
    "model.norm.scale": WHOLE,
    "lm_head.kernel": OUT,
}
FIGURES = {"GPT-J-6B": FIGURE_7, "LLaMA-7B": FIGURE_8}
EMBEDDINGS = ("wte", "embed_tokens")
NORMS = ("ln_1", "ln_f", "norm", "input_layernorm", "post_attention_layernorm")


def in_flax(path: str, spec: jax.sharding.PartitionSpec) -> tuple[str, tuple[str | None, ...]]:
    """A leaf's name and layout as Flax has them."""
    layer, _, kind = path.rpartition(".")
    name = layer.rpartition(".")[2]
    dims = tuple("mp" if entry == "tensor" else entry for entry in spec)
    if kind == "weight" and name not in NORMS:
        dims = (*dims, *[None] * (2 - len(dims)))
    if kind == "weight" and name in EMBEDDINGS:
        kind = "embedding"
    elif kind == "weight" and name in NORMS:
        kind = "scale"
    elif kind == "weight":
        kind, dims = "kernel", dims[::-1]
    return f"{layer}.{kind}", dims if any(dims) else WHOLE


@pytest.mark.parametrize("name", FIGURES)
def test_the_layouts_are_those_of_the_paper(name):
    published = PUBLISHED[name]
    model = shapes(published.config)
    layout = to_paths(rx.shard_rules(model, rx.make_mesh(tensor=8)), lambda x: isinstance(x, NamedSharding))
    found = dict(in_flax(path, x.spec) for path, x in layout.items())
    assert found == {
        key.format(i=i): spec
        for key, spec in FIGURES[name].items()
        for i in (range(published.num_layers) if "{i}" in key else [0])
    }
