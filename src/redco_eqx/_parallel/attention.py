"""Flash attention of cuDNN on GPUs, each device on its own rows and heads."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float

from redco_eqx._parallel.linear import batch_axes, tensor_size, traced_mesh
from redco_eqx._sharding.mesh import AXES


def flash_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    *,
    causal: bool,
    scale: float | None,
) -> Float[Array, "b t h d"] | None:
    """Self-attention by cuDNN, which never holds the scores of all pairs of tokens; `None` where it cannot be.

    It can be on GPUs with compute capability 8.0 (Ampere) or later, in bfloat16 or float16, for heads of a size
    that cuDNN takes, and where rows divide over `data` and `fsdp`, and heads over `tensor`. For which devices
    a program is says the mesh that the arrays lie on; without a mesh it is not known.

    It is differentiated once, in reverse: not by `jax.jvp`, nor a second time.

    **Arguments:**

    - `causal`: whether a token sees those up to its own, or all.
    - `scale`: of the scores; `1 / sqrt(d)` by default.
    """
    mesh = traced_mesh(query, key, value)
    if mesh is None or query.dtype not in (jnp.bfloat16, jnp.float16) or query.shape[1] != key.shape[1]:
        return None
    spec, device = _spec(mesh, query, key), mesh.abstract_device
    if spec is None or device is None or device.platform != "gpu":
        return None
    own = functools.partial(jax.nn.dot_product_attention, scale=scale, is_causal=causal, implementation="cudnn")
    try:
        jax.eval_shape(own, query, key, value)
    except RuntimeError:  # no cuDNN here, or none that takes such heads: JAX says so when it is traced
        return None
    if not _is_recent(device.device_kind):
        return None
    if mesh.size == 1:
        return own(query, key, value)
    return jax.shard_map(own, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)(query, key, value)


def _spec(mesh: AbstractMesh, query: Array, key: Array) -> PartitionSpec | None:
    """Rows over the axes of the batch, and heads over `tensor`, where both divide; otherwise `None`."""
    rows = batch_axes(mesh, query.shape[0])
    if rows is None or key.shape[2] % tensor_size(mesh) or not set(mesh.axis_names) <= set(AXES):
        return None
    return PartitionSpec(rows, None, "tensor" if "tensor" in mesh.shape else None)


def _is_recent(device_kind: str) -> bool:
    """True of an NVIDIA GPU of compute capability 8.0, for which cuDNN's flash attention is written."""
    for present in jax.devices():
        if present.device_kind == device_kind:
            return int(present.compute_capability.partition(".")[0]) >= 8
    return "V100" not in device_kind  # planned for, and not here: its name is all there is
