"""Fourier transforms over every dim, of data and of parameters; complex parameters."""

import jax.numpy as jnp
from gradients.operations._registry import either, mixed, one_of, operation

AXIS = one_of(1, 2, 0)
COMPLEX = jnp.complex128


@operation("spectral", mixed, axis=AXIS, how=one_of("real", "imag", "abs"))
def fft(weight, x, index, *, axis, how):
    y = jnp.fft.fft(x, axis=axis)
    return jnp.log1p(jnp.abs(y) ** 2) if how == "abs" else getattr(y, how)


@operation("spectral", mixed, axis=one_of(1, 2), norm=one_of("ortho", "backward"))
def filter_rfft(weight, x, index, *, axis, norm):
    """A learned filter between a transform and its inverse."""
    n = x.shape[axis]
    filters = weight("real", n // 2 + 1) + 1j * weight("imag", n // 2 + 1)
    y = jnp.fft.rfft(x, axis=axis, norm=norm) * (
        filters if axis == 2 else filters[:, None]
    )
    return jnp.fft.irfft(y, n, axis=axis, norm=norm)


@operation("spectral", mixed, axes=one_of((1, 2), (0, 1), (0, 2)), real=either)
def fft2(weight, x, index, *, axes, real):
    y = jnp.fft.rfft2(x, axes=axes) if real else jnp.fft.fft2(x, axes=axes)
    return (
        x.mean()
        + (x if y.shape != x.shape else jnp.real(y))
        + jnp.mean(jnp.abs(y) ** 2)
    )


@operation("spectral", axis=one_of(0, 1), inverse=either)
def fft_of_weight(weight, x, index, *, axis, inverse):
    square = weight("weight", x.shape[-1], 16)
    moved = (
        jnp.fft.ifft(square, axis=axis) if inverse else jnp.fft.fft(square, axis=axis)
    )
    return jnp.real(x @ moved) + jnp.imag(x.mean() * moved.mean(0))


@operation("spectral", width=one_of(8, 16, 6), how=one_of("abs", "real", "angle"))
def complex_linear(weight, x, index, *, width, how):
    one = weight("one", x.shape[-1], width, dtype=COMPLEX)
    two = weight("two", width, 8, dtype=COMPLEX)
    y = jnp.tanh(x @ one) @ two
    if how == "abs":
        return jnp.log1p(jnp.abs(y) ** 2)
    return jnp.real(y) if how == "real" else jnp.sin(jnp.angle(y + 3))
