"""The GPU compiler's output for a train step in bfloat16, without a GPU: cuDNN's
attention."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import workloads

import redco_eqx as rx
from redco_eqx._planning.targets import find_target

SIZES = workloads.Sizes(
    dim=256, num_layers=2, num_heads=4, vocabulary=512, length=384, batch_size=4
)
CALL = "__cudnn$fmha"
SCORES = "384,384]"
"""The end of the dims of the scores of all pairs of tokens, as a program prints
them."""


@cache
def compiled(
    *,
    target: str = "h100:4",
    dtype: Any = jnp.bfloat16,
    name: str = "LLaMA",
    **options: Any,
) -> tuple[str, Any, Any]:
    """Text, memory and communication of one `train_step` with AdamW over float32
    parameters."""
    sizes = {
        axis: options.pop(axis)
        for axis in ("data", "fsdp", "tensor")
        if axis in options
    }
    on = find_target(target)
    case = workloads.family_case(name, SIZES, stacked=True, **options)
    loss_fn = case.loss_fn
    case = dataclasses.replace(
        case, loss_fn=lambda m, b, key: loss_fn(rx.cast(m, dtype), b, key)
    )
    mesh = rx.make_mesh(devices=on.devices, **sizes)
    program = workloads.lower_step(case, mesh).compile(
        compiler_options=dict(on.compiler_options)
    )
    return (
        program.as_text() or "",
        program.memory_analysis(),
        rx.communication(program, mesh),
    )


@pytest.mark.parametrize("remat", ["none", "products", "full"])
def test_scores_of_all_pairs_are_nowhere(remat: str) -> None:
    text, memory, _ = compiled(target="h100:1", remat=remat)
    other, more, _ = compiled(target="h100:1", remat=remat, attention="xla")
    # Forward, backward, and what is computed again.
    assert text.count(CALL) == {"none": 2, "products": 2, "full": 3}[remat]
    assert SCORES not in text
    assert CALL not in other
    assert SCORES in other
    assert memory.temp_size_in_bytes < more.temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("LLaMA", {"tensor": 4}),
        ("LLaMA", {"data": 2, "tensor": 2}),
        ("LLaMA", {"fsdp": 4}),
        ("LLaMA", {"fsdp": 2, "tensor": 2}),
        ("GPT-J", {"fsdp": 4}),
    ],
)
def test_it_sends_what_the_compilers_own_attention_sends(
    name: str, mesh: dict[str, int]
) -> None:
    text, _, sent = compiled(name=name, **mesh)
    _, _, others = compiled(name=name, attention="xla", **mesh)
    assert CALL in text
    assert sent.total.sent_bytes == others.total.sent_bytes

    def moved(found: Any) -> dict[Any, int]:
        # Into how many all-reduces the gradients of vectors are combined is the
        # compiler's choice.
        return {
            key: count for key, count in found.counts.items() if key[0] != "all-reduce"
        }

    assert moved(sent) == moved(others)


@pytest.mark.parametrize(
    ("target", "dtype"), [("h100:1", jnp.float32), ("v100-16g:1", jnp.float16)]
)
def test_what_cudnn_does_not_take_is_left_to_the_compiler(
    target: str, dtype: Any
) -> None:
    text, _, _ = compiled(target=target, dtype=dtype)
    assert CALL not in text


def test_a_plan_takes_less_where_scores_are_not_kept() -> None:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return workloads.next_token_loss(rx.cast(model, jnp.bfloat16), batch, key)

    batch = jax.ShapeDtypeStruct((SIZES.batch_size, SIZES.length + 1), jnp.int32)

    def plan(attention: Any) -> Any:
        make = workloads.make_model("LLaMA", SIZES, stacked=True, attention=attention)
        common: dict[str, Any] = {
            "loss_fn": loss_fn,
            "optimizer": optax.adamw(1e-3),
            "batch": batch,
        }
        return rx.plan(make, target="h100:1", progress=False, **common)

    found = plan(None)
    other = plan("xla")
    assert found.best.flops == other.best.flops
    assert found.memory.arguments < found.memory.peak < other.memory.peak
