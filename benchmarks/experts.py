"""Mixtures of experts on data 2 x tensor 4, beside a layout of experts by hand. Nothing
is run, or in memory.

    python benchmarks/experts.py

Mixtral-8x7B and Qwen3-30B-A3B at their widths, with two layers, and 16 texts of 128
tokens: bytes that a device sends in a `train_step` with AdamW over `tensor` (by the
ring algorithm), and the peak of its temporary arrays. "ours" is the layout of
`shard_rules`, which splits each expert inside. "by hand" gives each device whole
experts: it computes its own experts for all tokens of its rows, and one sum joins them.
"""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from workloads import COMPILER_OPTIONS, MIB, Case, Overrides, lower_step, table

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx._parallel.linear import psum, vary
from redco_eqx_models._families import mixtral

LAYERS, ROWS, LENGTH = 2, 16, 128
CONFIGS = {
    "Mixtral-8x7B": models.MixtralConfig(num_hidden_layers=LAYERS),
    "Qwen3-30B-A3B": models.Qwen3MoeConfig(num_hidden_layers=LAYERS, head_dim=128),
}
WHOLE_EXPERTS = [("*.experts.*.weight", PartitionSpec(None, "tensor"))]


def by_hand(
    mesh: Mesh,
    x: Any,
    scores: Any,
    *projections: Any,
    num_chosen: int,
    normalise: bool,
    activation: Any,
    **_: Any,
) -> Any:
    """The function `mix_experts` by hand: each device has some of the experts,
    whole."""

    def body(x: Any, scores: Any, gate: Any, up: Any, down: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), num_chosen)
        weights = (
            weights / jnp.sum(weights, axis=-1, keepdims=True) if normalise else weights
        )
        x, weights = vary(x, "tensor"), vary(weights, "tensor").reshape(-1)
        own = chosen.reshape(-1) - jax.lax.axis_index("tensor") * len(gate)
        is_own = (own >= 0) & (own < len(gate))
        order = jnp.argsort(jnp.where(is_own, own, len(gate)), stable=True)
        sizes = jnp.bincount(jnp.where(is_own, own, len(gate)), length=len(gate) + 1)[
            :-1
        ].astype(jnp.int32)
        product = lambda rows, w: jax.lax.ragged_dot(rows, jnp.swapaxes(w, 1, 2), sizes)  # noqa: E731
        rows = x.reshape(-1, x.shape[-1])[order // num_chosen]
        hidden = activation(product(rows, gate)) * product(rows, up)
        hidden = hidden * jnp.where(is_own, weights, 0)[order][:, None]
        outputs = product(hidden, down)[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return psum(jnp.sum(outputs, axis=2), "tensor"), chosen

    rows, experts = PartitionSpec(("data", "fsdp")), PartitionSpec("tensor")
    specs = (rows, rows, experts, experts, experts)
    body = jax.shard_map(
        body, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=(rows, rows)
    )
    return body(x, scores, *(p.weight for p in projections))


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    hidden, balance = model.hidden_states_and_balance(batch[:, :-1])
    return (
        rx.layers.cross_entropy(hidden, model.head, batch[:, 1:]).value + 0.01 * balance
    )


def measured(config: Any, mesh: Mesh, overrides: Overrides = ()) -> list[str]:
    case = Case(
        lambda key: models.MixtralForCausalLM(config, stacked=True, key=key),
        loss_fn,
        jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32),
        (ROWS, LENGTH, config.hidden_size),
        2 * LAYERS + 1,
    )
    program = lower_step(case, mesh, overrides=overrides).compile(
        compiler_options=COMPILER_OPTIONS
    )
    found = rx.communication(program, mesh)
    over_tensor = sum(c.sent_bytes for c in found if "tensor" in c.axes)
    memory: Any = program.memory_analysis()
    return [f"{x / MIB:,.0f}" for x in (over_tensor, memory.temp_size_in_bytes)]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = rx.make_mesh(tensor=4)
    rows = [["model", "layout of experts", "sent over tensor, MiB", "temporary, MiB"]]
    for name, config in CONFIGS.items():
        rows.append([name, "ours", *measured(config, mesh)])
        with mock.patch.object(
            mixtral, "mix_experts", functools.partial(by_hand, mesh)
        ):
            rows.append([name, "by hand", *measured(config, mesh, WHOLE_EXPERTS)])
    print(table(rows, 2))
