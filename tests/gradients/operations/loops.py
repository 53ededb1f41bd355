"""Scans and loops, with gradients of their own, implicit ones, or none."""

import jax
import jax.numpy as jnp
from gradients.operations._registry import either, one_of, operation, rows


@operation(
    "loops", rows, width=one_of(8, 6), reverse=either, unroll=one_of(1, 2), remat=either
)
def recurrent(weight, x, index, *, width, reverse, unroll, remat):
    into = weight("weight_ih", x.shape[-1], width)
    over = weight("weight_hh", width, width)

    def step(h, x):
        h = jnp.tanh(x @ into + h @ over)
        return h, h

    step = jax.checkpoint(step) if remat else step
    start = jnp.zeros((x.shape[0], width))
    ys = jax.lax.scan(
        step, start, jnp.swapaxes(x, 0, 1), reverse=reverse, unroll=unroll
    )[1]
    return jnp.swapaxes(ys, 0, 1)


@operation("loops", layers=one_of(2, 3, 4), width=one_of(8, 16), remat=either)
def stacked_layers(weight, x, index, *, layers, width, remat):
    up = weight("up", layers, x.shape[-1], width)
    down = weight("down", layers, width, x.shape[-1])

    def layer(x, weights):
        return x + jnp.tanh(x @ weights[0]) @ weights[1], None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (up, down))[0]


@operation(
    "loops", layers=one_of(2, 4), size=one_of(3, 1), groups=one_of(1, "depthwise")
)
def stacked_convolutions(weight, x, index, *, layers, size, groups):
    from gradients.operations.convolution import convolve, grouping, window

    channels = x.shape[-1]
    number = grouping(groups, 1, channels)[0]
    kernels = weight("weight", layers, *window(x, size), channels // number, channels)
    return jax.lax.scan(
        lambda x, k: (jnp.tanh(convolve(x, k, groups=number)), None), x, kernels
    )[0]


@operation("loops")
def power_iteration(weight, x, index):
    """A weight over its largest singular value, found by a `while_loop` that has no
    gradient."""
    square = weight("weight", x.shape[-1], x.shape[-1])
    fixed = jax.lax.stop_gradient(square)

    def step(carry):
        i, v = carry
        v = fixed.T @ (fixed @ v)
        return i + 1, v / jnp.linalg.norm(v)

    v = jax.lax.while_loop(
        lambda carry: carry[0] < 5, step, (0, jnp.ones(square.shape[-1]))
    )[1]
    return x @ square / jnp.linalg.norm(square @ v)


@operation("loops")
def fixed_point(weight, x, index):
    """`z = tanh(z W / 8 + x)`, and the gradient by the implicit function theorem (a
    `while_loop` in each)."""
    square = weight("weight", x.shape[-1], x.shape[-1]) / 8

    def contract(square, x, z):
        return jnp.tanh(z @ square + x)

    def iterate(update, start):
        return jax.lax.while_loop(
            lambda c: c[0] < 30, lambda c: (c[0] + 1, update(c[1])), (0, start)
        )[1]

    @jax.custom_vjp
    def solve(square, x):
        return iterate(lambda z: contract(square, x, z), jnp.zeros_like(x))

    def forward(square, x):
        z = solve(square, x)
        return z, (square, x, z)

    def backward(residual, gradient):
        square, x, z = residual
        pull = jax.vjp(contract, square, x, z)[1]
        adjoint = iterate(lambda u: gradient + pull(u)[2], gradient)
        return pull(adjoint)[:2]

    solve.defvjp(forward, backward)
    return solve(square, x)


@operation("loops", branches=one_of(2, 3), each=either)
def switch(weight, x, index, *, branches, each):
    squares = [weight(f"weight{i}", x.shape[-1], x.shape[-1]) for i in range(branches)]

    def one(x, i):
        return jax.lax.switch(
            i % branches, [lambda x, w=w: jnp.tanh(x @ w) for w in squares], x
        )

    return jax.vmap(one)(x, index[:, 0]) if each else one(x, index[0, 0])
