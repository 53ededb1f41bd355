"""A vocabulary with more rows than tokens, so that it divides evenly over devices."""

import dataclasses
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx._base.tree import path_of
from redco_eqx.models._blocks.layers import Embedding, Linear, TiedHead
from redco_eqx.models._blocks.model import Model

M = TypeVar("M", bound=Model)


def pad_vocabulary(model: M, multiple: int) -> M:
    """Add rows of zeros to the model's embedding table and head, up to a multiple of `multiple`.

    The logits of the added rows are minus infinity, so these rows are never chosen, do not count in a
    cross-entropy, and have zero gradients. `save_pretrained` does not write them. For example, GPT-2's 50257
    rows are not divisible by any usual axis size, but 50304 rows are divisible by 64.

    ```python
    def make_model(key):
        config = models.GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4)
        return models.pad_vocabulary(models.GPT2LMHeadModel(config, key=key), 64)

    model = rx.init_model(make_model, mesh, key=key)        # 320 rows, divisible by 4
    ```

    **Arguments:**

    - `model`: a decoder-only language model, abstract or not. To make a new model with padding:
        `init_model(lambda key: pad_vocabulary(GPT2LMHeadModel(config, key=key), 128), ...)`.
    - `multiple`: for example, a multiple of the number of devices along `tensor`. 1 adds nothing.

    **Raises:**

    `ValueError` if `multiple` is not positive, or the model's class does not name its `vocabulary`.
    """
    check_can_pad(type(model), multiple)
    num_rows = -(-model.config.vocab_size // multiple) * multiple

    def is_module(x: Any) -> bool:
        return isinstance(x, Embedding | Linear)

    def one(keypath: Any, x: Any) -> Any:
        return _with_rows(x, num_rows) if is_module(x) and is_vocabulary(model, path_of(keypath)) else x

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=is_module)


def check_can_pad(family: type[Model], multiple: int) -> None:
    """Raise `ValueError` for a multiple or a class of models that `pad_vocabulary` does not take."""
    if multiple < 1:
        raise ValueError(f"pad_vocabulary: multiple={multiple}, but it must be positive.")
    if not family.vocabulary:
        raise ValueError(
            f"pad_vocabulary: {family.__name__} does not name the modules that have a row for each token "
            "(`vocabulary`); decoder-only models do."
        )


def is_vocabulary(model: Model, module: str) -> bool:
    """Return true if the arrays of the module at this path have a row per token."""
    return any(re.search(pattern, module) for pattern in model.vocabulary)


def only_tokens(
    head: Linear | Float[Array, "rows size"], num_tokens: int, cap: float | None
) -> Linear | TiedHead | Float[Array, "rows size"]:
    """Return a head, or the table that is one, with capped logits, and with logits of minus infinity beyond the
    number of tokens.
    """
    weight, bias = (head.weight, head.bias) if isinstance(head, Linear) else (head, None)
    num_rows = weight.shape[0]
    if num_rows == num_tokens and cap is None:
        return head
    if num_rows != num_tokens:
        bias = jnp.zeros(num_rows, weight.dtype) if bias is None else bias
        bias = jnp.where(jnp.arange(num_rows) < num_tokens, bias, -jnp.inf)
    return TiedHead(weight, bias, cap)


def _with_rows(module: Any, num_rows: int) -> Any:
    def longer(x: Any) -> Any:
        shape = (num_rows, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return jnp.pad(x, [(0, num_rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])

    longer_module = jax.tree.map(longer, module)
    # A table keeps the number of its rows that are tokens.
    return longer_module if isinstance(module, Embedding) else _changed(longer_module, out_features=num_rows)


def _changed(module: Any, **fields: Any) -> Any:
    """Return a module with other values of fields: also of static ones, which `eqx.tree_at` does not reach."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = fields[field.name] if field.name in fields else getattr(module, field.name)
        object.__setattr__(new, field.name, value)
    return new
