"""Frozen dataclasses as PyTrees, whose annotations may say what their leaves are."""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import jax

C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True)
def pytree_dataclass(cls: C) -> C:
    """A frozen dataclass that is a PyTree; a field with `metadata={"static": True}` is no child.

    Unlike what `jax.tree_util.register_dataclass` makes, it is not initialised when JAX puts it together
    again, which JAX also does with shardings, shapes or `None` for leaves. So types that are checked at run
    time hold where an instance is made.
    """
    dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    static = tuple(field.name for field in fields if field.metadata.get("static", False))
    dynamic = tuple(field.name for field in fields if field.name not in static)
    keys = tuple(map(jax.tree_util.GetAttrKey, dynamic))

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(x, name) for name in dynamic), tuple(getattr(x, name) for name in static)

    def flatten_with_keys(x: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, auxiliary = flatten(x)
        return tuple(zip(keys, children)), auxiliary

    def unflatten(auxiliary: tuple[Any, ...], children: Iterable[Any]) -> Any:
        x = object.__new__(cls)
        x.__dict__.update(zip(dynamic, children))
        x.__dict__.update(zip(static, auxiliary))
        return x

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
