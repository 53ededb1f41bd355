"""A training step of the quickstart's transformer with `eqx.nn.MultiheadAttention` and
with `rx.layers.attention`: memory, and bytes sent, for devices that are not present.

    python benchmarks/attention.py v5e:2x4 h100:8 [--tokens 4096 32768] [--tensor 4]

One layer of width 1024, with 8 heads, and AdamW; parameters are float32, products
bfloat16, and each data shard has one row. `layers.attention` is the quickstart's model
with the layer of docs/pages/howto/attention.md. Temporaries are those of a device, as
the compiler gives them. `predicted` is the prediction of `rx.explain` for the bytes
sent, with its lower bound.

Needed: `python -m pip install "jax[tpu]" "jax[cuda12]"`, for the targets that are
asked for.
"""

import argparse
import dataclasses
import functools
import re
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import quickstart
from jax.sharding import Mesh
from workloads import MIB, Case, table

import redco_eqx as rx
from redco_eqx._compiled.communication import attention_of
from redco_eqx._planning.targets import Target, find_target
from redco_eqx.types import Explanation

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

SIZES = {"dim": 1024, "num_heads": 8, "num_layers": 1}

# Collectives that are fused with other work are printed in pieces: keep them apart to
# count them.
TPU_OPTIONS: dict[str, Any] = {"xla_tpu_enable_async_collective_fusion": "false"}


class Block(quickstart.Block):
    """The quickstart's layer for a whole batch, with `rx.layers.attention`."""

    def __call__(self, x: Any) -> Any:
        def each(layer: Any) -> Any:
            return jax.vmap(jax.vmap(layer))

        a = self.attention
        h = each(self.norm1)(x)
        projections = (a.query_proj, a.key_proj, a.value_proj)
        q, k, v = rx.layers.column(h, *projections, unit=a.qk_size)
        q, k, v = (y.reshape(*x.shape[:2], a.num_heads, -1) for y in (q, k, v))
        rotated = jax.vmap(jax.vmap(self.rope, in_axes=1, out_axes=1))
        heads = rx.layers.attention(rotated(q), rotated(k), v, causal=True)
        x = x + rx.layers.row(heads.reshape(x.shape), a.output_proj, unit=a.vo_size)
        h = each(self.norm2)(x)
        (h,) = rx.layers.column(h, self.up)
        return x + rx.layers.row(jax.nn.gelu(h), self.down)


def with_blocks(model: quickstart.Transformer) -> quickstart.Transformer:
    """Return the model with the layers of this file, which have the same arrays."""
    layers = []
    for layer in model.layers:
        block = object.__new__(Block)
        for field in dataclasses.fields(layer):
            object.__setattr__(block, field.name, getattr(layer, field.name))
        layers.append(block)
    return eqx.tree_at(lambda model: model.layers, model, layers)


def loss_fn(model: quickstart.Transformer, tokens: Any, key: Any) -> rx.Mean:
    """The loss of the model as it is in the quickstart, over one sequence."""
    return quickstart.loss_fn(rx.cast(model, jnp.bfloat16), tokens, key)


def loss_of_batch(model: quickstart.Transformer, tokens: Any, key: Any) -> rx.Mean:
    """The same loss of a model whose layers take the whole batch."""
    model = rx.cast(model, jnp.bfloat16)
    x = jax.vmap(jax.vmap(model.embedding))(tokens[:, :-1])
    for layer in model.layers:
        x = layer(x)
    logits = jax.vmap(jax.vmap(model.head))(jax.vmap(jax.vmap(model.norm))(x))
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return rx.Mean(nats.sum() / jnp.log(2), nats.size)


def case_of(name: str, num_rows: int, num_tokens: int) -> Case:
    """Make the case of the model with the attention of this name."""
    is_ours = name == "layers.attention"

    def make_model(key: Any) -> quickstart.Transformer:
        model = quickstart.Transformer(**SIZES, key=key)
        return with_blocks(model) if is_ours else model

    return Case(
        make_model=make_model,
        loss_fn=loss_of_batch if is_ours else loss_fn,
        batch=jax.ShapeDtypeStruct((num_rows, num_tokens + 1), jnp.int32),
        activation=(num_rows, num_tokens, SIZES["dim"]),
        reductions=2 * SIZES["num_layers"] + 1,
    )


def lowered(
    case: Case, model: quickstart.Transformer, explained: Explanation
) -> jax.stages.Lowered:
    """Lower a training step in the layout that the program decides."""

    def placed(x: Any, sharding: Any) -> Any:
        if sharding is None:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    model = jax.tree.map(placed, model, explained.shardings)
    optimizer = optax.adamw(1e-3)
    state = rx.init_state(model, optimizer, key=jax.random.key(0))
    batch = placed(case.batch, rx.batch_sharding(explained.mesh))
    step = functools.partial(
        rx.train_step,
        loss_fn=case.loss_fn,
        optimizer=optimizer,
        shardings=explained.shardings,
    )
    return jax.jit(step, donate_argnums=0).lower(state, batch)


NAMES = ("MultiheadAttention", "layers.attention")
HEADER = ["target", "tokens", "attention", "by", "temporaries, MiB", "sent, MiB"]
HEADER += ["predicted, MiB", "at least, MiB", "s"]


def row(target: Target, mesh: Mesh, name: str, num_tokens: int) -> list[str]:
    """Compile a step, and return the row of the table."""
    case = case_of(name, mesh.shape["data"], num_tokens)
    options: dict[str, Any] = dict(target.compiler_options)
    if target.compiler == "tpu":
        options = TPU_OPTIONS
    cells = [target.name, f"{num_tokens:,}", name]
    begun = time.monotonic()
    model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
    explained = rx.explain(model, mesh, loss_fn=case.loss_fn, batch=case.batch)
    found = explained.communication
    assert found is not None
    predicted = [f"{found.num_bytes / MIB:,.1f}", f"{found.at_least / MIB:,.1f}"]
    try:
        program = lowered(case, model, explained).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"Used [\d.]+\w of [\d.]+\w", str(error))
        if needed is None:
            raise
        seconds = f"{time.monotonic() - begun:.0f}"
        return [*cells, "", f"does not fit: {needed[0]}", "", *predicted, seconds]
    memory = program.memory_analysis()
    assert memory is not None
    sent = rx.communication(program, mesh).total.sent_bytes
    return [
        *cells,
        attention_of(program.as_text() or ""),
        f"{memory.temp_size_in_bytes / MIB:,.0f}",
        f"{sent / MIB:,.1f}",
        *predicted,
        f"{time.monotonic() - begun:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", help='as for `rx.plan`: "v5e:2x4"')
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--attention", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    rows = []
    for name in given.targets:
        target = find_target(name)
        mesh = rx.make_mesh(devices=target.devices, tensor=given.tensor)
        for num_tokens in given.tokens:
            for attention in given.attention:
                rows.append(row(target, mesh, attention, num_tokens))
                print("  ".join(rows[-1]), flush=True)
    print(table([HEADER, *rows], num_left=4))


if __name__ == "__main__":
    main()
