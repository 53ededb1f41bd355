"""Reading a `config.json` into a small frozen dataclass, and writing it back."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, get_args, get_origin

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
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names under which an entry may be found in a file."""

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
    raw = {**{own: raw[name] for name, own in cls.aliases.items() if name in raw}, **raw}
    names = {f.name for f in fields} - {"rest"}
    required = {f.name for f in fields if f.default is nothing and f.default_factory is nothing}
    missing = sorted(required - {*raw, *given})
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} is missing, which {cls.__name__} needs.")
    values = {f.name: _read(f, raw[f.name]) for f in fields if f.name in names & raw.keys() - given.keys()}
    written = names | cls.aliases.keys() | {"model_type", "architectures"}
    rest = {name: x for name, x in raw.items() if name not in written}
    return cls(**{**values, **given, "rest": json.dumps(rest, sort_keys=True)})


def _read(field: dataclasses.Field, value: Any) -> Any:
    """The value as the field has it. JSON knows no tuple, and not everyone writes `0.0` for a float's 0."""
    kinds: tuple[Any, ...] = tuple(get_origin(k) or k for k in get_args(field.type) or (field.type,))
    if isinstance(value, list):
        value = tuple(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"config.json: {field.name}={value!r}, but it must be: {expected}.")
    return value


def check_divides(config: Config, size: str, heads: str) -> None:
    """Refuses, by `ValueError`, a size that is not a multiple of the number of heads."""
    features, number = getattr(config, size), getattr(config, heads)
    if number <= 0 or features % number:
        raise ValueError(f"config.json: {size}={features} is not a multiple of {heads}={number}.")


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
