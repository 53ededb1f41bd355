"""Products, norms and decompositions: over channels, length and the batch, of data and
of parameters."""

import jax
import jax.numpy as jnp
from gradients.operations._registry import either, one_of, operation, rows

WITH_WEIGHTS = "blc,lcd->bld", "blc,cc->blc", "blc,lc->bl"
WITH_ITSELF = "blc,bmc->blm", "blc,bld->bcd", "blc,alc->bac", "blc,bcl->blc"


@operation("products", rows, how=one_of(*WITH_WEIGHTS, *WITH_ITSELF))
def einsum(weight, x, index, *, how):
    length, c = x.shape[1:]
    other = x @ weight("weight", c, c)
    if how == "blc,lcd->bld":
        return jnp.einsum(how, x, weight("other", length, c, 8))
    if how == "blc,cc->blc":
        return jnp.einsum(how, x, weight("other", c, c))
    if how == "blc,lc->bl":
        return jnp.einsum(how, other, weight("other", length, c))[..., None] * x
    if how == "blc,bcl->blc":
        return jnp.einsum(how, x, other.swapaxes(1, 2))
    return jnp.einsum(how, x, other) / c


@operation("products", rows, heads=one_of(2, 4, 3), causal=either)
def attention(weight, x, index, *, heads, causal):
    """Not `jax.nn.dot_product_attention`, which computes in float32 whatever it is
    given."""
    b, length, c = x.shape
    width = heads * 4
    q, k, v = (
        (x @ weight(f"{name}_proj", c, width)).reshape(b, length, heads, 4)
        for name in "qkv"
    )
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / 2
    scores = (
        jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        if causal
        else scores
    )
    y = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)
    return x + y.reshape(b, length, width) @ weight("o_proj", width, c)


@operation("products", rows, experts=one_of(4, 8, 3), capacity=one_of(True, False))
def mixture_of_experts(weight, x, index, *, experts, capacity):
    c = x.shape[-1]
    gates = jax.nn.softmax(x @ weight("router", c, experts))
    up, down = weight("up", experts, c, 8), weight("down", experts, 8, c)
    if not capacity:
        gates = jnp.where(gates == gates.max(-1, keepdims=True), gates, 0)
        return x + jnp.einsum("ble,blc,ecd,edf->blf", gates, x, up, down)
    flat, gates = x.reshape(-1, c), gates.reshape(-1, experts)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    place = jnp.cumsum(chosen, 0) * chosen - 1
    # (token, expert, place).
    dispatch = jax.nn.one_hot(place.astype(jnp.int32), 8) * chosen[..., None]
    outputs = jnp.einsum("tek,tc,ecd,edf->ekf", dispatch, flat, up, down)
    return x + jnp.einsum("tek,ekf,te->tf", dispatch, outputs, gates).reshape(x.shape)


@operation("products", rows, groups=one_of(4, 2, 3), sort=one_of(True, False))
def ragged_dot(weight, x, index, *, groups, sort):
    """Rows in order of their group, each group with its own matrix."""
    flat = x.reshape(-1, x.shape[-1])
    group = jnp.broadcast_to(index[:, :1] % groups, x.shape[:2]).reshape(-1)
    order = jnp.argsort(group, stable=True) if sort else jnp.arange(len(flat))
    sizes = jnp.bincount(group, length=groups).astype(jnp.int32)
    y = jax.lax.ragged_dot(flat[order], weight("weight", groups, x.shape[-1], 8), sizes)
    return y[jnp.argsort(order)].reshape(*x.shape[:2], 8)


@operation("products", rows, own=one_of(True, False))
def hypernetwork(weight, x, index, *, own):
    """Matrices made from the input, or one for each position."""
    c = x.shape[-1]
    if own:
        made = jnp.tanh(x.mean(1) @ weight("make", c, c * 8)).reshape(-1, c, 8)
        return jax.vmap(lambda x, w: x @ w)(x, made)
    return jax.vmap(lambda x, w: x @ w, (1, 0), 1)(
        x, weight("weight", x.shape[1], c, 8)
    )


@operation("products", over=one_of("batch", "layer", "instance", "all"), after=either)
def norm(weight, x, index, *, over, after):
    x = x @ weight("weight", x.shape[-1], 8) if after else x
    inner = tuple(range(1, x.ndim - 1))
    axes = {
        "batch": (0, *inner),
        "layer": (-1,),
        "instance": inner,
        "all": (0, *inner, x.ndim - 1),
    }[over]
    x = x - x.mean(axes, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(axes, keepdims=True) + 1e-3)
    return x * weight("scale", x.shape[-1]) + weight("bias", x.shape[-1])


@operation("products", axis=one_of(0, 1), order=one_of(2, 1))
def weight_norm(weight, x, index, *, axis, order):
    direction = weight("direction", x.shape[-1], 16)
    size = jnp.linalg.norm(direction, ord=order, axis=axis, keepdims=True)
    return x @ (direction / size) * weight("size", 16)


@operation("products", rows, temperature=one_of(1.0, 0.3))
def contrast(weight, x, index, *, temperature):
    """Every example against every other, normalised over the batch."""
    z = x.mean(1) @ weight("weight", x.shape[-1], 8)
    z = z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1e-3)
    return (
        x
        + jnp.diagonal(jax.nn.log_softmax(z @ z.T / temperature, axis=-1))[
            :, None, None
        ]
    )


@operation(
    "products",
    rows,
    how=one_of("cholesky", "inv", "eigh", "qr"),
    of=one_of("example", "weight", "batch"),
)
def decomposition(weight, x, index, *, how, of):
    """Decomposes a symmetric matrix with eigenvalues far apart: of each example, the
    batch, a parameter."""
    x = jnp.tanh(x)
    n = x.shape[-1]
    square = weight("square", n, n)
    if of != "weight":
        square = jnp.einsum("blc,bld->bcd", x, x @ square) / x.shape[1]
        square = square if of == "example" else square.mean(0)
    square = (
        jnp.diag(1.0 + jnp.arange(n))
        + jnp.tanh(square + jnp.swapaxes(square, -1, -2)) / n
    )
    found = getattr(jnp.linalg, how)(square)
    found = (
        found
        if how in ("cholesky", "inv")
        else found[1] ** 2
        if how == "eigh"
        else found[0]
    )
    return jnp.einsum("bcd,bld->blc" if found.ndim == 3 else "cd,bld->blc", found, x)


@operation(
    "products",
    rows,
    lower=one_of(True, False),
    transpose=either,
    left=one_of(True, False),
)
def triangular_solve(weight, x, index, *, lower, transpose, left):
    """Solves with one matrix, whose right-hand side each example is."""
    n = x.shape[-1]
    square = jnp.diag(1.0 + jnp.arange(n)) + jnp.tanh(weight("square", n, n)) / n
    right = jnp.swapaxes(x, -1, -2) if left else x
    y = jax.lax.linalg.triangular_solve(
        jnp.broadcast_to(square, (len(x), n, n)),
        right,
        left_side=left,
        lower=lower,
        transpose_a=transpose,
    )
    return jnp.swapaxes(y, -1, -2) if left else y
