"""Read a `config.json` into a small frozen dataclass, and write it back."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args, get_origin

from redco_eqx_models._blocks.layers import ACTIVATIONS

Json: TypeAlias = bool | int | float | str | list | dict | None
"""A value in a parsed JSON file."""

C = TypeVar("C", bound="BaseConfig")
E = TypeVar("E", bound="Entries")

ACTIVATION_ENTRIES = {
    "hidden_activation": "",
    "hidden_act": "",
    "activation_function": "",
    "feed_forward_proj": "gated-",
}
"""Entries that name an activation function, and the prefix that the name may have."""

ELSEWHERE = {"problem_type", "task_specific_params", "prefix", "tokenizer_class"}
"""Entries that only other libraries read, from the files that are saved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entries:
    """A dataclass whose fields are the entries of a JSON file.

    A field may also be a dataclass that stands for several entries of the file (its
    `entries`), such as `Rope`. It then has its own `to_json` and `from_json`, which
    also gets the family's default. Or a field may be the configuration of a part of the
    model, which is an object in the file.

    - `rest`: the entries of the file that are not fields here, as JSON, written back
        unchanged.
    """

    file: ClassVar[str] = "config.json"
    type_entry: ClassVar[str] = "model_type"
    """The entry that names the kind: `model_type` as in transformers, or `_class_name`
    as in diffusers."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Common names of entries, mapped to this family's own names. A file may use
    either."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Entries with a value for each layer, and the entry of the rule that holds if
    there is none."""
    only: ClassVar[Mapping[str, Json]] = {}
    """Entries for which only one value is supported. Any other value would change the
    numbers."""
    outside: ClassVar[tuple[str, ...]] = ("rest",)
    """Fields that are not entries of the file."""

    rest: str = "{}"

    def error(self, text: str) -> ValueError:
        """Return the error for a value that does not fit."""
        return ValueError(f"{type(self).__name__}: {text}")

    def check(self, name: str, supported: Iterable[str | bool]) -> None:
        """Raise `ValueError` if the value of a field is not one of those that are
        supported."""
        if (x := getattr(self, name)) not in supported:
            raise self.error(
                f"{name}={x!r} is not supported, only {', '.join(map(str, supported))}."
            )

    @classmethod
    def from_json(cls: type[E], raw: Mapping[str, Json], base: Any = None) -> E:
        """Read the fields from a parsed file. Entries that are not fields are kept in
        `rest`. With `base`, return it with these entries instead of its own, under any
        of their names.

        Raises `ValueError`, naming the entry, if an entry is missing or its value is
        not supported, or if it is to replace one of `base` but no field reads it.
        """
        for name, value in cls.only.items():
            if name in raw and raw[name] != value:
                raise ValueError(
                    f"{cls.file}: {name}={raw[name]!r} is not supported, only "
                    f"{value!r}. The numbers would be wrong."
                )
        renamed = {own: raw[name] for name, own in cls.aliases.items() if name in raw}
        # A file may have both names of an entry. The family's own then counts.
        raw = {**renamed, **raw}
        if base is not None:
            # The values for each layer that `base` has would hide a new rule.
            replaced = {name: None for name, rule in cls.instead.items() if rule in raw}
            raw = {**replaced, **raw}
        values = {}
        read = {*cls.aliases, cls.type_entry, "architectures"}
        missing = []
        for field in dataclasses.fields(cls):
            if isinstance(field.type, type) and issubclass(field.type, Entries):
                if field.name in raw:
                    values[field.name] = _read_part(
                        field.name, field.type, raw[field.name]
                    )
                read.add(field.name)
            elif isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
                part: Any = field.type
                if any(name in raw for name in part.entries):
                    if base is None:
                        # A family's default may differ from that of the part's class:
                        # a quarter of each head turns in GPT-NeoX, for example.
                        make: Any = field.default_factory
                        default = make()
                    else:
                        default = getattr(base, field.name)
                    values[field.name] = part.from_json(raw, default)
                read |= set(part.entries)
            elif field.name in raw and field.name not in cls.outside:
                values[field.name] = _read(field, raw[field.name], cls.file)
                read.add(field.name)
            elif (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                missing.append(field.name)
        if missing and base is None:
            raise ValueError(
                f"{cls.file}: {', '.join(missing)} is missing, but {cls.__name__} "
                "needs it."
            )
        rest = {name: x for name, x in raw.items() if name not in read}
        if base is not None:
            if unread := sorted(rest.keys() - cls.only.keys() - ELSEWHERE):
                raise ValueError(
                    f"entries: {cls.__name__} does not read {', '.join(unread)}. Leave "
                    "that out."
                )
            return dataclasses.replace(base, **values)
        return cls(**values, rest=json.dumps(rest, sort_keys=True))

    def to_json(self) -> dict[str, Json]:
        """Return the entries of the file."""
        entries: dict[str, Json] = json.loads(self.rest)
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if isinstance(x, Entries):
                entries[field.name] = x.to_json()
            elif dataclasses.is_dataclass(x):
                part: Any = x
                entries |= part.to_json()
            elif field.name in self.outside:
                continue
            elif isinstance(x, tuple):
                # JSON has no tuples. A dataclass with a list could not be hashed.
                entries[field.name] = list(x)
            else:
                entries[field.name] = x
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig(Entries):
    """The base of all configurations, with or without text. Field names are those of
    `config.json`.

    A family checks its own values in `__post_init__`.

    - `generation`: the entries of `generation_config.json`, as JSON. `generate` reads
        the start, end and padding tokens first from here, and then from the
        configuration.
    - `source`: the directory that the model was loaded from. `save_pretrained` copies
        its other files. Comparisons ignore it.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    weights: ClassVar[str] = "model"
    """The stem of the names of weight files, before `.safetensors`."""
    multiples: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of sizes, besides width and heads, in which the first must be a multiple of
    the second."""
    has_positions: ClassVar[bool] = False
    """True if the model has a table of positions."""
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Projections that files store as one matrix, with outputs side by side: the name
    in the file, and the projections in the order of the fields.
    """
    outside = ("rest", "generation", "source")

    generation: str = "{}"
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, prefix in ACTIVATION_ENTRIES.items():
            if getattr(self, name, "relu").removeprefix(prefix) not in ACTIVATIONS:
                self.check(name, ACTIVATIONS)
        if not self.entry("head_dim", None):
            # With the entry, the size of a head does not follow from the width: Gemma 2
            # has 8 heads of 256 features beside a stream of 2304.
            self._check_multiple("hidden_size", "num_attention_heads")
        for size, count in self.multiples:
            self._check_multiple(size, count)

    def _check_multiple(self, size: str, count: str) -> None:
        """Raise `ValueError` if one entry is not a multiple of the other. A family may
        lack one of them."""
        features = self.entry(size, None)
        number = self.entry(count, None)
        if features is None or number is None:
            return
        if number <= 0 or features % number:
            own_size = self.aliases.get(size, size)
            own_count = self.aliases.get(count, count)
            raise self.error(
                f"{own_size}={features} is not a multiple of {own_count}={number}."
            )

    def entry(self, name: str, *default: Any) -> Any:
        """Return the entry that most families call `name`, or the default if this
        family has no such entry.

        Raises `AttributeError` without a default.
        """
        return getattr(self, self.aliases.get(name, name), *default)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.entry("num_hidden_layers")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        found = self.entry("num_key_value_heads", None)
        return found or self.entry("num_attention_heads")

    @property
    def head_size(self) -> int:
        """Features of one head."""
        found = self.entry("head_dim", None)
        if found:
            return found
        return self.entry("hidden_size") // self.entry("num_attention_heads")

    @property
    def window(self) -> int | None:
        """The number of tokens that a token can attend to, up to and including itself;
        `None` for no limit."""
        return self.entry("sliding_window", None)

    @property
    def windowed(self) -> tuple[bool, ...] | None:
        """For each layer, true if it has the window; `None` if all have it."""
        return None

    @property
    def max_positions(self) -> int | None:
        """The number of positions in the model's table; `None` if there is none, as
        with rotary embeddings."""
        if not self.has_positions:
            # Rotary families have the entry too, but their angles have no end.
            return None
        return self.entry("max_position_embeddings")

    @property
    def generation_tokens(self) -> dict[str, Any]:
        """Return the tokens that `generate` reads, of `generation_config.json`, else of
        `config.json`."""
        given = json.loads(self.generation)
        found = {}
        for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
            # `null` in `generation_config.json` is the same as no entry.
            found[name] = given.get(name)
            if found[name] is None:
                found[name] = getattr(self, name, None)
        return found

    def with_generation(self: C, raw: Mapping[str, Json], source: str | None) -> C:
        """Return the configuration with the entries of a `generation_config.json`, and
        the directory of the model.

        Raises `ValueError` for values that are not tokens.
        """
        for field in dataclasses.fields(self):
            if field.name in self.generation_tokens and field.name in raw:
                _read(field, raw[field.name], "generation_config.json")
        return dataclasses.replace(
            self, generation=json.dumps(raw, sort_keys=True), source=source
        )

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`."""
        entries = {**super().to_json(), self.type_entry: self.model_type}
        if self.type_entry == "model_type":
            # In diffusers, `_class_name` alone names the class.
            entries["architectures"] = [self.architecture]
        return entries

    def to_file(self, *, dtype: str, architecture: str | None) -> dict[str, Json]:
        """Return `to_json`, with the entries that transformers adds for the dtype and,
        if there are several, the architecture.
        """
        entries = self.to_json()
        if self.type_entry == "model_type":
            # transformers 5 reads `dtype`, and older versions `torch_dtype`.
            entries |= {"dtype": dtype, "torch_dtype": dtype}
            if architecture is not None:
                entries["architectures"] = [architecture]
        return entries


def _read_part(name: str, kind: Any, raw: Json) -> Any:
    """Read the configuration of a part of a model."""
    found = raw
    if isinstance(raw, Mapping):
        found = raw.get("model_type")
        if found == kind.model_type:
            return kind.from_json(raw)
    raise ValueError(
        f"config.json: {name}: model_type={found!r} is not supported, only "
        f"{kind.model_type!r}."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """The base of configurations for models that read or write text.

    - `bos_token_id`, `eos_token_id`, `pad_token_id`: as the tokenizer numbers them.
        Several tokens may end a text.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class Labels:
    """The names of a classifier's outputs, in order. A regression has one output.

    They are the entry `id2label` of `config.json`; by default `LABEL_0` and `LABEL_1`.
    """

    entries: ClassVar[tuple[str, ...]] = ("id2label", "label2id", "num_labels")

    names: tuple[str, ...] = ("LABEL_0", "LABEL_1")

    @classmethod
    def of(cls, num_labels: int) -> "Labels":
        """Return `num_labels` outputs with default names."""
        return cls(tuple(f"LABEL_{i}" for i in range(num_labels)))

    @classmethod
    def from_json(cls, raw: Mapping[str, Json], default: "Labels") -> "Labels":
        """Read the names. Raises `ValueError` if they are not numbered from 0."""
        names = raw.get("id2label")
        num = raw.get("num_labels")
        # transformers writes only the names. A number beside names that it does not fit
        # is a change that the caller asks for.
        if num is not None and (not isinstance(names, Mapping) or len(names) != num):
            if type(num) is not int or not 1 <= num <= 2**20:
                raise ValueError(
                    f"config.json: num_labels={num!r}, but it must be an integer from "
                    "1 to 2**20."
                )
            if names is None and num == len(default.names):
                return default
            return cls.of(num)
        if names is None:
            # Older versions of transformers did not write the names of two labels.
            return default
        if not isinstance(names, Mapping) or set(names) != set(_numbers(len(names))):
            raise ValueError(
                f"config.json: id2label={names!r}, but it must name the labels from 0 "
                "on."
            )
        # By number, because files are written with sorted keys: "10" before "2".
        return cls(tuple(str(names[key]) for key in _numbers(len(names))))

    def to_json(self) -> dict[str, Json]:
        """Return the entries `id2label` and `label2id`."""
        return {
            "id2label": {str(i): name for i, name in enumerate(self.names)},
            "label2id": {name: i for i, name in enumerate(self.names)},
        }


def _numbers(count: int) -> list[str]:
    """Return the numbers from 0 on as texts, because the keys of JSON are texts."""
    return [str(i) for i in range(count)]


def _read(field: dataclasses.Field, value: Json, file: str) -> Json | tuple:
    """Convert the value to the field's type. JSON has no tuples, and some files write
    `0` for a float `0.0`."""
    kinds: tuple[Any, ...] = (field.type,)
    if isinstance(field.type, UnionType):
        kinds = get_args(field.type)
    found = value
    if isinstance(value, list):
        found = tuple(value)
    if float in kinds and isinstance(found, int) and not isinstance(found, bool):
        found = float(found)
    if not any(_fits(found, kind) for kind in kinds):
        expected = " or ".join(map(_name_of, kinds))
        raise ValueError(f"{file}: {field.name}={value!r}, but it must be: {expected}.")
    # Python's JSON reader accepts NaN and Infinity, which the format does not have.
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError(f"{file}: {field.name}={found}, but it must be finite.")
    # Where the default is 0, as for `freq_shift`, a file may have 0 too.
    least = field.metadata.get("least", 0 if field.default == 0 else 1)
    parts = found if isinstance(found, tuple) else (found,)
    # `True` is an `int` for `isinstance`, but no count.
    counts = [x for x in parts if type(x) is int]
    is_count = not field.name.endswith("token_id")
    if is_count and any(not least <= x < 2**30 for x in counts):
        lower = "positive" if least else "0 or more"
        raise ValueError(
            f"{file}: {field.name}={value}, but it must be {lower}, and less than "
            "2**30."
        )
    return found


def _name_of(kind: Any) -> str:
    """Return the name of a kind for an error message."""
    if get_origin(kind) is tuple:
        return f"list of {_name_of(get_args(kind)[0])}"
    return "null" if kind is type(None) else kind.__name__


def _fits(value: Json | tuple, kind: Any) -> bool:
    """Return true if a value is of a kind that a field may have; `True` is not a
    number."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(
            _fits(x, get_args(kind)[0]) for x in value
        )
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
