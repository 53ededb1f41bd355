"""The pair `(model, eqx.nn.State)`, and functions of the user's that expect the other
form."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx


def is_pair(model: Any) -> bool:
    """True for a pair from `eqx.nn.make_with_state`: a model and its `eqx.nn.State`."""
    return (
        isinstance(model, tuple)
        and len(model) == 2
        and isinstance(model[1], eqx.nn.State)
    )


def pair_hint(error: Exception, model: Any) -> str:
    """The remedy for an error of a function that takes a model for a pair, or a pair
    for a model; empty for other errors.

    Python's own words are all that tells such an error from others.
    """
    text = str(error)
    if is_pair(model):
        used_as_model = (
            "'tuple' object is not callable",
            "'tuple' object has no attribute",
            "Expected a callable value, got (",  # by jax.vmap
        )
        if not text.startswith(used_as_model):
            return ""
        return (
            "The model is the pair (model, eqx.nn.State) here, because init_state was "
            "given one. Take it apart: model, model_state = model."
        )
    kind = type(model).__name__
    used_as_pair = (
        f"cannot unpack non-iterable {kind} object",
        f"'{kind}' object is not iterable",
        f"'{kind}' object is not subscriptable",
    )
    if not isinstance(error, TypeError) or not text.startswith(used_as_pair):
        return ""
    return (
        "The model has no eqx.nn.State here, so it is not a pair: use it as it is. For "
        "a model with one (BatchNorm, for example), pass the pair of "
        "eqx.nn.make_with_state."
    )


@contextlib.contextmanager
def noting_pairs(model: Callable[[], Any]) -> Iterator[None]:
    """Add `pair_hint` as a note to an error of a function that is called with the model
    that `model()` returns."""
    try:
        yield
    except Exception as error:
        hint = pair_hint(error, model())
        if hint and hint not in getattr(error, "__notes__", ()):
            error.add_note(hint)
        raise
