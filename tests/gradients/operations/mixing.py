"""Products: einsums with batch and repeated dims, attention, experts, ragged products."""

import jax
import jax.numpy as jnp

from operations._registry import one_of, operation, rows


@operation("mixing", width=one_of(16, 8, 6), bias=one_of(False, True), gate=one_of(False, True))
def mlp(weight, x, index, *, width, bias, gate):
    h = x @ weight("up", x.shape[-1], width)
    h = h + weight("up_bias", width) if bias else h
    h = jnp.tanh(h) * (x @ weight("gate", x.shape[-1], width)) if gate else jnp.tanh(h)
    return x + h @ weight("down", width, x.shape[-1])


@operation("mixing", how=one_of("blc,lcd->bld", "blc,cc->blc", "blc,lc->bl", "blc,bmc->blm", "blc,bld->bcd",
                                "blc,alc->bac", "blc,bcl->blc"))  # fmt: skip
def einsum(weight, x, index, *, how):
    x = rows(x)
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


@operation("mixing", heads=one_of(2, 4, 3), causal=one_of(False, True), how=one_of("plain", "linear"))
def attention(weight, x, index, *, heads, causal, how):
    """Not `jax.nn.dot_product_attention`, which computes in float32 whatever it is given."""
    x = rows(x)
    b, length, c = x.shape
    width = heads * 4
    q, k, v = (
        (x @ weight(name, c, width)).reshape(b, length, heads, 4) for name in ("q_proj", "k_proj", "v_proj")
    )
    if how == "linear":
        state = jnp.cumsum(jnp.einsum("blhd,blhe->blhde", jax.nn.elu(k) + 1, v), 1)
        y = jnp.einsum("blhd,blhde->blhe", jax.nn.elu(q) + 1, state) / length
    else:
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9) if causal else scores
        y = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)
    return x + y.reshape(b, length, width) @ weight("o_proj", width, c)


@operation("mixing", experts=one_of(4, 8, 3), how=one_of("dense", "top1", "capacity"))
def mixture_of_experts(weight, x, index, *, experts, how):
    x = rows(x)
    c = x.shape[-1]
    gates = jax.nn.softmax(x @ weight("router", c, experts))
    up, down = weight("up", experts, c, 8), weight("down", experts, 8, c)
    if how == "capacity":
        flat, gates = x.reshape(-1, c), gates.reshape(-1, experts)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        dispatch = jax.nn.one_hot(place, 8) * chosen[..., None]  # (token, expert, place)
        inputs = jnp.einsum("tek,tc->ekc", dispatch, flat)
        outputs = jnp.einsum("ekc,ecd,edf->ekf", inputs, up, down)
        y = jnp.einsum("tek,ekf,te->tf", dispatch, outputs, gates)
        return x + y.reshape(x.shape)
    if how == "top1":
        gates = jnp.where(gates == gates.max(-1, keepdims=True), gates, 0)
    return x + jnp.einsum("ble,blc,ecd,edf->blf", gates, x, up, down)


@operation("mixing", groups=one_of(4, 2, 3), sort=one_of(True, False))
def ragged_dot(weight, x, index, *, groups, sort):
    """Rows in order of their group, each group with its own matrix."""
    x = rows(x)
    flat = x.reshape(-1, x.shape[-1])
    group = jnp.broadcast_to(index[:, :1] % groups, x.shape[:2]).reshape(-1)
    order = jnp.argsort(group, stable=True) if sort else jnp.arange(len(flat))
    sizes = jnp.bincount(group, length=groups).astype(jnp.int32)
    y = jax.lax.ragged_dot(flat[order], weight("weight", groups, x.shape[-1], 8), sizes)
    return y[jnp.argsort(order)].reshape(*x.shape[:2], 8)


@operation("mixing", kind=one_of("shared", "own", "each"))
def hypernetwork(weight, x, index, *, kind):
    """Matrices made from the input, or one for each position."""
    x = rows(x)
    c = x.shape[-1]
    if kind == "each":
        return jax.vmap(lambda x, w: x @ w, (1, 0), 1)(x, weight("weight", x.shape[1], c, 8))
    made = jnp.tanh(x.mean(1) @ weight("make", c, c * 8)).reshape(-1, c, 8)
    made = made.mean(0, keepdims=True) + 0 * made if kind == "shared" else made
    return jax.vmap(lambda x, w: x @ w)(x, made)


@operation("mixing", rank=one_of(4, 2))
def bilinear(weight, x, index, *, rank):
    x = rows(x)
    left, right = x @ weight("left", x.shape[-1], rank), x @ weight("right", x.shape[-1], rank)
    outer = jnp.einsum("blr,bls->blrs", left, right)
    return (
        jnp.einsum("blrs,rsd->bld", outer, weight("core", rank, rank, 8))
        + jnp.einsum("blrr->bl", outer)[..., None]
    )
