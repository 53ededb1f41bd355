"""Steps with activations laid out by `split_activations`, compared with the same steps
without: a table.

    python benchmarks/activations.py [WORDS OF A ROW ...]
    # Use the compiler of a TPU slice that is not there:
    python benchmarks/activations.py --target v5e:2x4

Each row compiles two steps of AdamW for eight devices; nothing is run. The last rows
are models in the style of users, see `strangers.py`. MB are those
that a device sends by the ring algorithm: in the step without, and in the step with
split activations, as predicted and as compiled. `work` is the compiler's count of
operations of a device, with over without. `temporaries` are in MiB of a device, without
and with. `s` is the processor time of the choice, the trace of the gradient included.
Fails after the last row if a step sends over 2% more with split activations.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from strangers import strangers
from workloads import COMPILER_OPTIONS, table

import redco_eqx as rx
from redco_eqx._base.compiler import merges
from redco_eqx._planning.targets import find_target

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import quickstart

MOST = 1.02
"""The bytes that a step may send with split activations, compared with those that it
sends without."""


class Mlps(eqx.Module):
    """Two MLPs with residuals, for each token of a row."""

    layers: list[eqx.nn.MLP]

    def __init__(self, key: Any):
        self.layers = [
            eqx.nn.MLP(64, 64, 256, 1, key=key) for key in jax.random.split(key, 2)
        ]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        for layer in self.layers:
            tokens = tokens + jax.vmap(layer)(tokens)
        return tokens


class Recomputed(eqx.Module):
    """A layer whose activations are computed again for the gradient."""

    layer: Any

    def __call__(self, x: Any) -> Any:
        return eqx.filter_checkpoint(lambda layer, x: layer(x))(self.layer, x)


def transformer(
    key: Any, *, dim: int = 256, num_layers: int = 2, recomputed: bool = False
) -> Any:
    model = quickstart.Transformer(dim=dim, num_layers=num_layers, num_heads=8, key=key)
    if recomputed:
        model = eqx.tree_at(
            lambda m: m.layers, model, [Recomputed(layer) for layer in model.layers]
        )
    return model


class Row(NamedTuple):
    """A model, its loss and batch, and the size of `tensor`."""

    name: str
    make: Callable[[Any], Any]
    loss_fn: Callable[..., Any]
    batch: Any
    tensor: int = 4


def _text(
    name: str, num_rows: int, length: int, *, tensor: int = 4, **sizes: Any
) -> Row:
    batch = jax.ShapeDtypeStruct((num_rows, length + 1), jnp.int32)
    return Row(
        name, functools.partial(transformer, **sizes), quickstart.loss_fn, batch, tensor
    )


ROWS = [
    Row(
        "MLPs, 8192 tokens",
        Mlps,
        lambda m, b, key: jnp.mean(jax.vmap(m)(b) ** 2),
        jax.ShapeDtypeStruct((4, 8192, 64), jnp.float32),
    ),
    _text("transformer, 8 rows of 512", 8, 512),
    _text("transformer, 3 layers, 8 rows of 512", 8, 512, num_layers=3),
    _text("transformer, tensor 8", 8, 512, tensor=8),
    _text("transformer, tensor 8, recomputed", 8, 512, tensor=8, recomputed=True),
    _text(
        "transformer, 3 layers, tensor 8, recomputed",
        8,
        512,
        tensor=8,
        num_layers=3,
        recomputed=True,
    ),
    _text("transformer, a row for each data shard, 512", 2, 512),
    _text("transformer, a row for each data shard, 2048", 2, 2048),
    _text("transformer, width 128, 8 rows of 64", 8, 64, dim=128),
    *(Row(each.name, each.make, each.loss, each.batch) for each in strangers()[0]),
]


def measured(row: Row, target: str | None) -> list[str]:
    """Return the cells of a row."""
    devices: Any = jax.devices()[:8]
    options: Any = COMPILER_OPTIONS
    if target is not None:
        on = find_target(target)
        devices, options = on.devices, dict(on.compiler_options)
    mesh, optimizer, key = (
        rx.make_mesh(tensor=row.tensor, devices=devices),
        optax.adamw(1e-3),
        jax.random.key(0),
    )
    abstract = eqx.filter_eval_shape(row.make, key)
    sent, flops, temporaries, predicted, seconds = [], [], [], 0.0, 0.0
    for loss_fn in (row.loss_fn, rx.split_activations(row.loss_fn)):
        begun = time.process_time()
        explanation = rx.explain(abstract, mesh, loss_fn=loss_fn, batch=row.batch)
        assert explanation.communication is not None
        found = explanation.communication
        predicted = found.num_bytes if merges(mesh) else found.num_bytes_unmerged
        seconds = time.process_time() - begun

        def lay(x: Any, sharding: Any) -> Any:
            return (
                x
                if sharding is None
                else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            )

        state = rx.init_state(
            jax.tree.map(lay, abstract, explanation.shardings), optimizer, key=key
        )
        step = functools.partial(
            rx.train_step,
            loss_fn=loss_fn,
            optimizer=optimizer,
            shardings=explanation.shardings,
        )
        lowered = jax.jit(step, donate_argnums=0).lower(
            state, jax.tree.map(lambda x: lay(x, rx.batch_sharding(mesh)), row.batch)
        )
        compiled: Any = lowered.compile(compiler_options=options)
        sent.append(rx.communication(compiled, mesh).total.sent_bytes)
        flops.append(compiled.cost_analysis()["flops"])
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    memory = [f"{x / 2**20:.1f}" for x in temporaries]
    numbers = [f"{x / 1e6:.3f}" for x in (sent[0], predicted, sent[1])]
    return [row.name, *numbers, f"{flops[1] / flops[0]:.2f}", *memory, f"{seconds:.1f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="WORDS",
        help="rows whose name has one of these words",
    )
    parser.add_argument("--target", help='as for `rx.plan`: "v5e:2x4"')
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rx.make_mesh()  # before JAX is used
    header = ["", "without", "predicted", "with", "work", "temporaries", "with", "s"]
    chosen = [
        row
        for row in ROWS
        if not args.rows or any(word in row.name for word in args.rows)
    ]
    rows = [measured(row, args.target) for row in chosen]
    print(table([header, *rows]))
    more = [
        name
        for name, without, _, with_activations, *_ in rows
        if float(with_activations) > MOST * float(without)
    ]
    if more:
        sys.exit(f"sends more with split activations: {'; '.join(more)}")
