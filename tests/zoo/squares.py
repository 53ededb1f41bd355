"""Square matrices of one size, in the fields of a module: their shapes do not say which
follow one another."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import SEQ, D, Entry, of_rows, split
from ._layers import attend, each, named

Apply = Callable[[list[Any], Any], Any]


def of_squares(
    names: str, apply: Apply, specs: Any, *, kind: type[Any] = eqx.Module
) -> Entry:
    """With a square Linear in each field, in the order of `names`.

    `apply`: (the layers, (time, D)) -> (time, D), to which the input is added. `kind`:
    a dict has its fields in the order of the alphabet instead.
    """
    fields = names.split()
    sizes: Any = dict.fromkeys(fields, (D, D))
    module: Any = dict
    if kind is eqx.Module:
        annotations = {"__annotations__": dict.fromkeys(fields, Any)}
        module = type("Squares", (eqx.Module,), annotations)

    def call(model: Any, x: Any) -> Any:
        by_name = model if kind is dict else vars(model)
        return x + apply([by_name[name] for name in fields], x)

    return of_rows(
        f"squares_{'_'.join(fields)}",
        lambda key: module(**named(key, **sizes)),
        call,
        specs,
        x=(SEQ, D),
    )


def in_order(layers: list[Any], x: Any) -> Any:
    for layer in layers:
        x = each(layer, jax.nn.gelu(x))
    return x


def of_attention(layers: list[Any], x: Any) -> Any:
    *inputs, output = layers
    return each(output, attend(*(each(layer, x) for layer in inputs)))


def beside(layers: list[Any], x: Any) -> Any:
    """All read the input, and their outputs meet elementwise."""
    return jnp.prod(jnp.stack([jnp.tanh(each(layer, x)) for layer in layers]), axis=0)


def last(names: str) -> dict[str, Any]:
    *columns, row = names.split()
    return split(" ".join(columns), row)


ATTENTIONS = ["theta phi g o", "theta phi g out", "theta phi g output"]
SIBLINGS = [
    "gate up",
    "mu logvar",
    "mean std",
    "encode_image encode_text",
    "w_src w_dst",
    "q k v",
    "query key value",
]
ENTRIES = [
    # Two or three follow one another, whatever they are called.
    of_squares("a b", in_order, split("a", "b")),
    of_squares("inp mid fin", in_order, split("inp fin", "mid")),
    # A dict has them in the order of the alphabet, so that a name has to say which is
    # the last.
    of_squares("up down", in_order, split("up", "down"), kind=dict),
    # An attention with names of its own, of which one says that it is the last.
    *(of_squares(names, of_attention, last(names)) for names in ATTENTIONS),
    # Names that say that they read one input.
    *(of_squares(names, beside, split(names)) for names in SIBLINGS),
    of_squares(
        "gate_proj up_proj down_proj",
        lambda layers, x: each(layers[2], beside(layers[:2], x)),
        split("gate_proj up_proj", "down_proj"),
    ),
    # No name says what they are. By names, they alternate, with a warning.
    of_squares("wa wb wc wd", of_attention, last("wa wb wc wd")),
]
