"""Reading a `config.json` into a small frozen dataclass, and writing it back."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from redco_eqx.models._layers import ACTIVATIONS

C = TypeVar("C", bound="Config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What all families have. Field names are those of `config.json`.

    - `bos_token_id`, `eos_token_id`, `pad_token_id`: as the tokenizer numbers them; several tokens may end a
        text.
    - `rest`: the entries of the file that are not fields here, as JSON, written back unchanged.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    rest: str = "{}"

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        raise NotImplementedError

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        raise NotImplementedError

    @property
    def head_size(self) -> int:
        """Features of one head."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """How many tokens back, itself included, a token may see; `None` for all."""
        return None

    @property
    def max_positions(self) -> int | None:
        """How many positions the model has a table for; `None` for none, as with rotary embeddings."""
        return None

    @classmethod
    def from_json(cls: type[C], raw: Mapping[str, Any]) -> C:
        """The configuration in a parsed `config.json`.

        Raises `ValueError` naming an entry whose value is not supported.
        """
        return read_config(cls, raw)

    def to_json(self) -> dict[str, Any]:
        """The entries of `config.json`."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rest"}
        return {
            **json.loads(self.rest),
            **{name: list(x) if isinstance(x, tuple) else x for name, x in own.items()},
            "model_type": self.model_type,
            "architectures": [self.architecture],
        }


def read_config(cls: type[C], raw: Mapping[str, Any], **given: Any) -> C:
    """`cls` with the entries of `raw` that are its fields; `given` comes first."""
    fields, nothing = dataclasses.fields(cls), dataclasses.MISSING
    names = {f.name for f in fields} - {"rest"}
    required = {f.name for f in fields if f.default is nothing and f.default_factory is nothing}
    missing = sorted(required - {*raw, *given})
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} is missing, which {cls.__name__} needs.")
    values = {name: raw[name] for name in names if name in raw}
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    rest = {name: x for name, x in raw.items() if name not in names}
    return cls(**{**values, **given, "rest": json.dumps(rest, sort_keys=True)})


def check_activation(name: str, entry: str) -> None:
    """Refuses, by `ValueError`, an activation function that is not known."""
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json: {entry}={name!r} is not supported, only {', '.join(ACTIVATIONS)}.")


def refuse(raw: Mapping[str, Any], **supported: Any) -> None:
    """Refuses, by `ValueError`, an entry that is there with another value than the supported one."""
    for name, value in supported.items():
        if name in raw and raw[name] != value:
            raise ValueError(
                f"config.json: {name}={raw[name]!r} is not supported, only {value!r}. Logits would be wrong."
            )
