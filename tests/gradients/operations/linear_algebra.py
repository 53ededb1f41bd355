"""Decompositions and solves, of matrices with eigenvalues well apart, so that rounding is not amplified."""

import jax
import jax.numpy as jnp

from operations._registry import one_of, operation, rows

OF = one_of("example", "weight", "batch")


def matrix(weight, x, of):
    """A well-conditioned symmetric matrix `(..., n, n)` of each example, of the batch, or of a parameter."""
    x = jnp.tanh(rows(x))
    n = x.shape[-1]
    if of == "weight":
        square = weight("square", n, n)
    else:
        square = jnp.einsum("blc,bld->bcd", x, x @ weight("weight", n, n)) / x.shape[1]
        square = square if of == "example" else square.mean(0)
    square = jnp.tanh(square + jnp.swapaxes(square, -1, -2)) / n
    return jnp.diag(1.0 + jnp.arange(n)) + square


def apply(square, x):
    return jnp.einsum("bcd,bld->blc" if square.ndim == 3 else "cd,bld->blc", square, rows(x))


@operation("linear_algebra", of=OF)
def cholesky(weight, x, index, *, of):
    return apply(jnp.linalg.cholesky(matrix(weight, x, of)), x)


@operation(
    "linear_algebra", of=OF, lower=one_of(True, False), transpose=one_of(False, True), left=one_of(True, False)
)
def triangular_solve(weight, x, index, *, of, lower, transpose, left):
    square = matrix(weight, x, of)
    x = rows(x)
    right = jnp.swapaxes(x, -1, -2) if left else x
    square = jnp.broadcast_to(square, (x.shape[0], *square.shape[-2:]))
    y = jax.lax.linalg.triangular_solve(square, right, left_side=left, lower=lower, transpose_a=transpose)
    return jnp.swapaxes(y, -1, -2) if left else y


@operation("linear_algebra", of=OF)
def solve(weight, x, index, *, of):
    square = matrix(weight, x, of)
    if of == "example":
        return jnp.swapaxes(jnp.linalg.solve(square, jnp.swapaxes(rows(x), -1, -2)), -1, -2)
    flat = rows(x).reshape(-1, x.shape[-1])
    return jnp.linalg.solve(square, flat.T).T.reshape(rows(x).shape)


@operation("linear_algebra", of=OF, vectors=one_of(True, False))
def eigh(weight, x, index, *, of, vectors):
    values, basis = jnp.linalg.eigh(matrix(weight, x, of))
    if not vectors:
        return rows(x) * (values[:, None] if of == "example" else values)
    return apply(basis**2, x)


@operation("linear_algebra", of=OF, how=one_of("q", "r"))
def qr(weight, x, index, *, of, how):
    q, r = jnp.linalg.qr(matrix(weight, x, of))
    return apply(q if how == "q" else r, x)


@operation("linear_algebra", of=OF, how=one_of("inv", "slogdet", "expm", "matrix_power"))
def matrix_function(weight, x, index, *, of, how):
    square = matrix(weight, x, of)
    n = square.shape[-1]
    if how == "slogdet":
        value = jnp.linalg.slogdet(square)[1]
        return rows(x) * (value[:, None, None] if of == "example" else value) / n
    found = {
        "inv": jnp.linalg.inv,
        "expm": lambda a: jax.scipy.linalg.expm(a / n),
        "matrix_power": lambda a: jnp.linalg.matrix_power(a / n, 3),
    }[how](square)
    return apply(found, x)


@operation("linear_algebra", inputs=one_of("same", "other"))
def gaussian_process(weight, x, index, *, inputs):
    """A Cholesky solve of the kernel matrix of the whole batch."""
    flat = jnp.tanh(rows(x).mean(1) @ weight("weight", x.shape[-1], 8))
    other = flat if inputs == "same" else jnp.roll(flat, 1, 0)
    kernel = jnp.exp(-((flat[:, None] - other[None]) ** 2).mean(-1))
    kernel = kernel @ kernel.T / len(flat) + jnp.eye(len(flat))
    return rows(x) + jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(kernel), flat)[:, None, :1]
