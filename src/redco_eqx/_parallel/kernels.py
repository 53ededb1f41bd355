"""Kernels of JAX for attention: which of them can compute a call on the devices of its
mesh, and their calls on the rows and heads of each device."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from redco_eqx._parallel.activations import ActivationAxes, activation_axes
from redco_eqx._sharding.mesh import mapped_axes

Kernel: TypeAlias = Literal["cudnn", "splash"]

KERNELS: tuple[tuple[Kernel, str], ...] = (("cudnn", "gpu"), ("splash", "tpu"))
"""Each kernel, and the platform that it is for."""

Implementation: TypeAlias = Literal["xla", "cudnn", "splash"]
"""The names of the ways to compute attention."""

Segments: TypeAlias = tuple[Int[Array, "batch length"], Int[Array, "batch source"]]
"""The numbers of the texts of queries and of keys."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of `attention` that are not queries, keys and values.

    - `is_one_text`: true if queries and keys are of the same tokens, with the same
        segments.
    - `has_bias`, `has_dropout`: true if there is one.
    """

    causal: bool
    window: int | None
    has_window: Bool[Array, ""] | None
    segments: Segments | None
    is_one_text: bool
    has_bias: bool
    cap: float | None
    scale: float
    has_dropout: bool

    @property
    def sees_itself(self) -> bool:
        """True if each query sees a key for certain, its own."""
        is_certain = self.is_one_text or self.segments is None
        return is_certain and not self.has_bias


def kernel_for(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k e"],
    call: Call,
    implementation: Implementation | None,
) -> Kernel | None:
    """Return the kernel that computes this call, or `None` for XLA's attention.

    **Arguments:**

    - `implementation`: a kernel to take in any case.

    **Raises:**

    `ValueError` for a kernel that was asked for but cannot compute this.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            f"attention: implementation={implementation!r}, but it must be one of "
            f"{get_args(Implementation)} or None."
        )
    if implementation == "xla":
        return None
    axes = activation_axes(
        query, key, value, num_rows=query.shape[0], num_heads=key.shape[2]
    )
    if implementation is None:
        # The mesh says which devices the program is for.
        for kernel, platform in KERNELS:
            if axes is not None and _platform(axes) == platform:
                is_worth = kernel == "cudnn" or _is_long(query, key)
                if is_worth and not _hindrance(kernel, query, key, value, call, axes):
                    return kernel
        return None
    reason = _hindrance(implementation, query, key, value, call, axes)
    if reason:
        raise ValueError(
            f"attention: implementation={implementation!r} cannot compute this: "
            f"{reason}. Leave implementation out, or pass 'xla'."
        )
    return implementation


def run_kernel(
    kernel: Kernel,
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k e"],
    call: Call,
) -> Float[Array, "b t h e"]:
    """Compute a call for which `kernel_for` returned this kernel."""
    if call.has_window is None:
        return _on_devices(kernel, query, key, value, call)
    # A kernel needs to know its window when it is compiled.
    near = dataclasses.replace(call, has_window=None)
    far = dataclasses.replace(near, window=None)
    return jax.lax.cond(
        call.has_window,
        lambda q, k, v: _on_devices(kernel, q, k, v, near),
        lambda q, k, v: _on_devices(kernel, q, k, v, far),
        query,
        key,
        value,
    )


def _on_devices(
    kernel: Kernel, query: Array, key: Array, value: Array, call: Call
) -> Array:
    """Run the kernel on the rows and heads of each device."""
    if kernel == "cudnn":
        own = functools.partial(_cudnn, call=call)
    else:
        own = functools.partial(splash, call=call)
    arrays = (query, key, value, *(call.segments or ()))
    axes = activation_axes(
        query, key, value, num_rows=query.shape[0], num_heads=key.shape[2]
    )
    if axes is not None and axes.mesh.size > 1:
        # Rows and heads do not depend on each other, so nothing is communicated.
        spec = PartitionSpec(axes.rows, None, axes.heads)
        of_segments = PartitionSpec(axes.rows)
        own = jax.shard_map(
            own,
            mesh=axes.mesh,
            in_specs=(spec, spec, spec, *[of_segments] * (len(arrays) - 3)),
            out_specs=spec,
            # Splash attention does not say along which axes its results differ.
            check_vma=kernel != "splash",
        )
    return _differentiable_once(own, kernel)(*arrays)


def _hindrance(
    kernel: Kernel,
    query: Array,
    key: Array,
    value: Array,
    call: Call,
    axes: ActivationAxes | None,
) -> str:
    """Say why a kernel cannot compute a call; empty if it can."""
    if call.has_bias:
        return "it takes no bias"
    if call.has_dropout:
        return "it has no dropout"
    if axes is not None and not _splits_evenly(axes):
        return (
            f"{query.shape[0]} rows and {key.shape[2]} key/value heads do not divide "
            f"evenly over a mesh of {dict(axes.mesh.shape)}"
        )
    if kernel == "cudnn":
        return _cudnn_hindrance(query, key, value, call, axes)
    return _splash_hindrance(query, call, axes)


def _splits_evenly(axes: ActivationAxes) -> bool:
    """Return true if rows and heads divide evenly, and no other axis of the mesh has a
    say."""
    splits_heads = axes.heads is not None or "tensor" not in axes.mesh.shape
    # The map around this call splits a dim of its own over the mapped axes.
    known = {*(axes.rows or ()), "tensor", *mapped_axes()}
    others = set(axes.mesh.axis_names) - known
    return axes.rows is not None and splits_heads and not others


def _platform(axes: ActivationAxes | None) -> str:
    """Return the platform of the mesh, or of JAX's default device without one."""
    if axes is None:
        return jax.default_backend()
    device = axes.mesh.abstract_device
    return "unknown" if device is None else device.platform


# No kernel of ours, and none of JAX's, has a second derivative. Their own errors do not
# say what to do.


def _differentiable_once(
    function: Callable[..., Array], kernel: Kernel
) -> Callable[..., Array]:
    """Return a function like `function`, of which a second derivative raises
    `ValueError` with the remedy. Arguments that are not floating have no derivative."""

    def refuse(*_: Any) -> Any:
        raise ValueError(
            f"attention: implementation={kernel!r} has a first derivative in reverse "
            "mode, and no other. Pass implementation='xla' (or attention='xla' to a "
            "model that has this option)."
        )

    def without_derivative(run: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = jax.custom_jvp(run)
        wrapped.defjvp(refuse)
        return wrapped

    @jax.custom_vjp
    def once(*arrays: Array) -> Array:
        return function(*arrays)

    def forward(*arrays: Array) -> tuple[Array, Any]:
        floating = arrays[:3]
        others = arrays[3:]

        def run(*floating: Array) -> tuple[Array, Any]:
            return jax.vjp(lambda *x: function(*x, *others), *floating)

        return without_derivative(run)(*floating)

    def backward(pull: Any, gradient: Array) -> tuple[Array | None, ...]:
        leaves, structure = jax.tree.flatten(pull)

        def run(gradient: Array, *leaves: Array) -> tuple[Array, ...]:
            return jax.tree.unflatten(structure, leaves)(gradient)

        gradients = without_derivative(run)(gradient, *leaves)
        return (*gradients, *[None] * num_others)

    def call(*arrays: Array) -> Array:
        nonlocal num_others
        num_others = len(arrays) - 3
        return once(*arrays)

    num_others = 0
    once.defvjp(forward, backward)
    return call


# cuDNN's flash attention on GPUs.


def _cudnn_hindrance(
    query: Array, key: Array, value: Array, call: Call, axes: ActivationAxes | None
) -> str:
    if _platform(axes) != "gpu":
        return f"it is for GPUs, and the program is for {_platform(axes)}"
    if call.segments is not None:
        return "it takes no segments"
    if call.cap is not None:
        return "it has no cap"
    if call.window is not None and not call.causal:
        return "it has windows for causal attention alone"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {query.dtype}"
    if query.shape[1] != key.shape[1]:
        return f"it has {query.shape[1]} queries, but {key.shape[1]} keys"
    if value.shape != key.shape:
        return f"keys of shape {key.shape} and values of {value.shape} differ"
    try:
        # JAX checks the version of cuDNN and the heads while it traces.
        jax.eval_shape(functools.partial(_cudnn, call=call), query, key, value)
    except RuntimeError as error:
        # JAX raises this if there is no cuDNN here, or none for such heads.
        return str(error)
    kind = jax.devices()[0].device_kind
    if axes is not None and axes.mesh.abstract_device is not None:
        kind = axes.mesh.abstract_device.device_kind
    if not _is_recent(kind):
        return f"{kind} is older than Ampere"
    return ""


def _cudnn(query: Array, key: Array, value: Array, *, call: Call) -> Array:
    window = None
    if call.window is not None:
        # JAX counts the tokens before a token, without itself.
        window = (call.window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=call.scale,
        is_causal=call.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def _is_recent(device_kind: str) -> bool:
    """Return true for an NVIDIA GPU of compute capability 8.0 or later, which cuDNN's
    flash attention needs."""
    for present in jax.devices():
        if present.device_kind == device_kind:
            return int(present.compute_capability.partition(".")[0]) >= 8
    # For a planned device that is not present, only its name is known.
    return "V100" not in device_kind


# Splash attention, JAX's kernel for TPUs. It is not part of JAX's stable interface, so
# it is imported where it is used.

FEWEST_TOKENS = 512
"""Queries and keys for which splash attention is taken, at least. For shorter texts the
scores are small, and the kernel would fill its blocks up with padding."""

BLOCKS = (512, 256, 128)
"""Sizes of blocks, the best first. All are multiples of the lanes of a TPU."""

LANES = 128

HIDDEN_SEGMENT = np.iinfo(np.int32).min
"""The number of the text of tokens that fill up a block."""


def _is_long(query: Array, key: Array) -> bool:
    return min(query.shape[1], key.shape[1]) >= FEWEST_TOKENS


def _splash_hindrance(query: Array, call: Call, axes: ActivationAxes | None) -> str:
    if _platform(axes) != "tpu":
        return f"it is for TPUs, and the program is for {_platform(axes)}"
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {query.dtype}"
    if not call.is_one_text and (call.causal or call.window is not None):
        # A query may see no key then, of which the kernel makes NaN.
        return "it takes no pair of segments with causal or window"
    if _splash_module() is None:
        return f"JAX {jax.__version__} has no splash attention"
    return ""


def _splash_module() -> ModuleType | None:
    try:
        from jax.experimental.pallas.ops.tpu import splash_attention
    except ImportError:
        return None
    return splash_attention


def splash(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k e"],
    query_segments: Int[Array, "b t"] | None = None,
    key_segments: Int[Array, "b s"] | None = None,
    *,
    call: Call,
    interpret: bool = False,
) -> Float[Array, "b t h e"]:
    """Compute attention by splash attention.

    **Arguments:**

    - `interpret`: true runs the kernel on any device, slowly.
    """
    module: Any = _splash_module()
    num_rows, length, num_heads, _ = query.shape
    source = key.shape[1]
    value_size = value.shape[3]
    block_q = _block(length)
    block_kv = _block(source)
    # The kernel has no scale. In the dtype of the query, this rounds once more.
    query = query * jnp.asarray(call.scale, query.dtype)
    query = _filled(query, 1, block_q)
    key = _filled(key, 1, block_kv)
    value = _filled(value, 1, block_kv)
    is_filled = key.shape[1] != source
    if query_segments is None and is_filled:
        query_segments = jnp.zeros((num_rows, length), jnp.int32)
        key_segments = jnp.zeros((num_rows, source), jnp.int32)
    segments = None
    if query_segments is not None and key_segments is not None:
        # Tokens that fill up a block see each other, and no other token sees them.
        segments = module.SegmentIds(
            q=_filled(query_segments.astype(jnp.int32), 1, block_q, HIDDEN_SEGMENT),
            kv=_filled(key_segments.astype(jnp.int32), 1, block_kv, HIDDEN_SEGMENT),
        )
    shape = (query.shape[1], key.shape[1])
    before = None
    after = 0 if call.causal else None
    if call.window is not None:
        before = call.window - 1
        after = 0 if call.causal else before
    if before is None and after is None:
        mask = module.FullMask(shape)
    else:
        mask = _band_mask()(shape, (before, after), 0)
    sizes = module.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    kernel = module.make_splash_mha(
        module.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.cap,
        interpret=interpret,
    )
    # The kernel takes one row, heads first.
    by_head = [jnp.swapaxes(_filled(x, 3, LANES), 1, 2) for x in (query, key, value)]
    heads = jax.vmap(kernel)(*by_head, segments)
    heads = jnp.swapaxes(heads, 1, 2)[:, :length, :, :value_size]
    if call.sees_itself or query_segments is None or key_segments is None:
        return heads
    # Of a query that sees no key, the kernel makes numbers without a meaning.
    has_key = jnp.any(query_segments[:, :, None] == key_segments[:, None], axis=-1)
    return jnp.where(has_key[..., None, None], heads, 0)


@functools.cache
def _band_mask() -> Any:
    """Return the class of masks that JAX asks for each block of queries and keys."""
    module: Any = _splash_module()

    class BandMask(module.LocalMask):
        """JAX's mask, which computes all pairs of tokens on the host: for 131,072
        tokens, minutes. A block that is all visible or all hidden is told by its
        corners."""

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = index
            before, after = self.window_size
            least = queries.start - (keys.stop - 1)
            most = queries.stop - 1 - keys.start
            lowest = -np.inf if after is None else -after
            highest = np.inf if before is None else before
            if lowest <= least and most <= highest:
                return np.ones((1, 1), bool)
            if most < lowest or highest < least:
                return np.zeros((1, 1), bool)
            return super().__getitem__(index)

    return BandMask


def _block(length: int) -> int:
    """Return the largest block that fills a length up by at most an eighth, or else the
    smallest one."""
    for size in BLOCKS:
        if -length % size <= length // 8:
            return size
    return BLOCKS[-1]


def _filled(x: Array, dim: int, multiple: int, value: int = 0) -> Array:
    """Fill a dim up to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % multiple)
    return jnp.pad(x, padding, constant_values=value)
