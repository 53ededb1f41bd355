"""What the tests of this directory share: layouts by the program, and what compiled programs send."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from helpers import QUICK_COMPILE
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from sharding.zoo import BY_NAME, Entry

import redco_eqx as rx
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._sharding.rules import analysis_of, decide_by

TENSOR, ROWS = 4, 8


def abstract_mesh(data: int = 2, fsdp: int = 1, tensor: int = TENSOR) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def abstract(make: Any) -> Any:
    return eqx.filter_eval_shape(make, jax.random.key(0))


def loss_of(entry: Entry) -> Any:
    return lambda model, batch, key: entry.loss(model, batch)


@cache
def analysed(name: str, rows: int = ROWS) -> Analysis:
    """An entry of the zoo on data 2 x tensor 4."""
    entry = BY_NAME[name]
    analysis = analysis_of(abstract(entry.make), abstract_mesh(), loss_of(entry), entry.inputs(rows))
    assert analysis is not None
    return analysis


def specs_of(name: str, rows: int = ROWS) -> dict[str, PartitionSpec]:
    model = abstract(BY_NAME[name].make)
    return {path: d.spec for path, d in decide_by(analysed(name, rows), model, abstract_mesh()).items()}


def compiled_bytes(model: Any, loss: Any, batch: Any, specs: Any, mesh: Any) -> int:
    """Bytes that the loss and its gradient send, on the CPU compiler; each gradient lies as its parameter."""

    def is_abstract(x: Any) -> bool:
        return isinstance(x, jax.ShapeDtypeStruct)

    left = iter([specs[path] for path in rx.to_arrays(model)])
    placed = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*next(left))))
            if is_abstract(x)
            else x
        ),
        model,
    )
    params, rest = eqx.partition(placed, lambda x: is_abstract(x) and jnp.issubdtype(x.dtype, jnp.floating))
    buffers, static = eqx.partition(rest, is_abstract)
    rows = rx.batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)

    def step(params: Any, buffers: Any, batch: Any) -> Any:
        def of_params(params: Any) -> Any:
            return loss(eqx.combine(params, buffers, static), batch, jax.random.key(0))

        return jax.value_and_grad(of_params)(params)

    layout = (None, jax.tree.map(lambda x: x.sharding, params))
    compiled = jax.jit(step, out_shardings=layout).lower(params, buffers, batch).compile(QUICK_COMPILE)
    return rx.communication(compiled, mesh).total.result_bytes


def predicted_bytes(analysis: Analysis) -> float:
    """As the CPU compiler does it, which sums over devices before it adds."""
    return analysis.sent(analysis.layout).num_bytes(merged=False)
