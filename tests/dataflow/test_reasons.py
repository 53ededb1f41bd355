"""The words and numbers of reasons: they are true, and agree with the totals."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import MESH, PROGRAMS, explained, loss_of
from helpers import abstract, abstract_mesh

import redco_eqx as rx

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def reasons(model: Any, run: Any, batch: Any, tensor: int) -> dict[str, str]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(lambda x: run(model, x))(batch) ** 2)

    mesh = abstract_mesh(tensor=tensor)
    found = rx.explain(model, mesh, loss_fn=loss_fn, batch=batch)
    return {path: d.reason for path, d in found.decisions.items()}


# By the factors of a dim that the program uses apart: the devices, and the words.
FACTORS = {
    (30,): (4, "30, is not divisible by 4"),
    (3, 64): (4, r"192 \(3 x 64\), has the leading factor 3, which is not divisible"),
    (2, 3, 16): (
        4,
        r"96 \(2 x 3 x 16\), has the leading factors 2 x 3, which are not divisible",
    ),
    (3, 10): (4, r"30 \(3 x 10\), is not divisible by 4"),
}


@pytest.mark.parametrize("sizes", FACTORS)
def test_a_size_that_divides_is_not_called_indivisible(sizes):
    tensor, words = FACTORS[sizes]
    model = {"weight": array(int(jnp.prod(jnp.asarray(sizes))), 7)}

    def run(model: Any, x: Any) -> Any:
        # Each piece is used apart from the others.
        pieces = (model["weight"] @ x).reshape(sizes)
        for axis in range(len(sizes)):
            pieces = jnp.sort(pieces, axis=axis) if axis else jnp.cumsum(pieces, axis)
        return pieces

    found = reasons(model, run, array(8, 7), tensor)
    assert re.search(words, found["weight"]), found


# `gru`: its splits meet. `residual`: its sums over devices are added up.
@pytest.mark.parametrize("name", ["gru", "gpt2", "moe", "fused_qkv", "residual"])
def test_no_split_sends_more_than_the_whole_step(name):
    if name == "residual":
        model = [{"weight": array(32, 32), "bias": array(32)}] * 3

        def run(model: Any, x: Any) -> Any:
            for layer in model:
                x = x + (layer["weight"] @ x + layer["bias"])
            return x

        def loss_fn(model: Any, batch: Any, key: Any) -> Any:
            return jnp.mean(jax.vmap(lambda x: run(model, x))(batch) ** 2)

        found = rx.explain(model, MESH, loss_fn=loss_fn, batch=array(16, 32))
    else:
        found = explained(name)
    total = found.communication
    assert total is not None
    for d in found.decisions.values():
        sent = re.search(r"is split.*: ([\d.]+) (\w+) a step", d.reason)
        if sent:
            # It is rounded to one digit after the point.
            least = (float(sent[1]) - 0.06) * UNITS[sent[2]]
            assert least <= total.num_bytes, (d.reason, total)


def test_bytes_of_a_loss_that_splits_activations_are_said_to_be_those_without():
    entry = PROGRAMS["gru"]
    loss_fn = rx.split_activations(loss_of(entry))
    found = rx.explain(
        abstract(entry.make), MESH, loss_fn=loss_fn, batch=entry.inputs(8)
    )
    split = [d.reason for d in found.decisions.values() if "is split," in d.reason]
    assert split
    assert all("a step before activations are split" in reason for reason in split)


@pytest.mark.parametrize("folder", ["/home/me/jax", "/home/me/equinox/redco_eqx"])
def test_a_folder_named_as_a_library_is_the_users(folder):
    names: dict[str, Any] = {}
    code = "def run(model, x):\n    return model['out'] @ (model['up'] @ x)\n"
    exec(compile(code, f"{folder}/train.py", "exec"), names)
    model = {"up": array(16, 8), "out": array(8, 16)}
    found = reasons(model, names["run"], array(8, 8), 4)
    assert "at train.py:2" in found["up"]
