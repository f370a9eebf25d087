"""What a field of a resource may say, as annotations, and how its values are read; `schema` writes the same as YAML."""

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from oasiskv.core.errors import ConfigError

Resource = TypeVar("Resource")

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGTP", 1)
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest value of a number."""

    least: int | float
    most: int | float


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that a whole text matches, in the syntax that RE2 and Python share."""

    regex: str
    example: str


@dataclass(frozen=True, slots=True)
class QuantityText:
    """A quantity of Kubernetes; a number of YAML is taken as its text."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement on several fields together; the API server evaluates `cel`, the operator `holds`, to one result."""

    cel: str
    message: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class SettingsOf:
    """A mapping of the settings of a dataclass of `core`, which checks them; sizes are quantities here."""

    cls: Any
    omitted: frozenset[str]
    """Fields that are not for users of the resource."""

    def names(self) -> Mapping[str, str]:
        """Return what Kubernetes calls each field."""
        return {camel(field.name): field.name for field in fields(self.cls) if field.name not in self.omitted}

    def read(self, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the settings by the names of the dataclass, which has checked them.

        Raises:
            ConfigError: A key is unknown or a value is wrong; the message begins with its path.
        """
        names = self.names()
        for key in values.keys() - names.keys():
            raise ConfigError(f"{path}.{key}: expected one of {', '.join(names)}")
        made = {
            names[key]: _num_bytes(value, f"{path}.{key}") if names[key].endswith("_bytes") else value
            for key, value in values.items()
            if value is not None
        }
        try:
            self.cls(**made)
        except ConfigError as cause:
            name, _, rest = str(cause).partition(":")
            raise ConfigError(f"{path}.{camel(name)}:{rest}") from cause
        return made


Quantity = Annotated[str, QuantityText()]


@lru_cache(4096)
def quantity(text: str) -> Fraction:
    """Return the value of a Kubernetes quantity, such as `16Gi` or `500m`.

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match[2] not in {*SUFFIXES, "m"}:
        raise ConfigError(f"quantity: expected a number such as 500m, 16 or 128Gi, got {text!r}")
    return Fraction(match[1]) * (Fraction(1, 1000) if match[2] == "m" else SUFFIXES[match[2]])


def camel(name: str) -> str:
    """Return a field's name as Kubernetes writes it."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


@cache
def hints(cls: Any) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields, with what is annotated beside the type."""
    return get_type_hints(cls, include_extras=True)


def optional(hint: Any) -> tuple[Any, bool]:
    """Return a hint without None, and whether it had it."""
    if get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint):
        rest = tuple(each for each in get_args(hint) if each is not types.NoneType)
        return Union[rest], True  # noqa: UP007 - of as many as there are
    return hint, False


def read(cls: type[Resource], values: object, path: str) -> Resource:
    """Return a dataclass from the mapping of a resource; absent and null mean the default.

    Args:
        cls: The dataclass.
        values: What the resource says at `path`.
        path: Where that is, for messages.

    Raises:
        ConfigError: A key is unknown or absent, or a value is wrong; the message begins with its path.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected an object, got {values!r}")
    known = {camel(field.name): field for field in fields(cls)}  # type: ignore[arg-type]
    for key in values.keys() - known.keys():
        raise ConfigError(f"{path}.{key}: expected one of {', '.join(known)}")
    arguments, types_of = {}, hints(cls)  # type: ignore[arg-type]
    for key, field in known.items():
        if values.get(key) is not None:
            arguments[field.name] = _value(optional(types_of[field.name])[0], values[key], f"{path}.{key}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{path}.{key}: expected a value, got none")
    made = cls(**arguments)
    for rule in getattr(cls, "RULES", ()):
        if not rule.holds(made):
            raise ConfigError(f"{path}: {rule.message}")
    return made


def write(value: Any) -> Any:
    """Return what `read` makes the same dataclass from; None is left out."""
    if is_dataclass(value):
        pairs = ((camel(field.name), getattr(value, field.name)) for field in fields(value))
        return {name: write(each) for name, each in pairs if each is not None}
    if isinstance(value, tuple):
        return [write(each) for each in value]
    if isinstance(value, Mapping):
        return {key: write(each) for key, each in value.items()}
    return value


def differing(value: Any) -> Any:
    """Return what `write` would, without the fields that have their default value."""
    if not is_dataclass(value):
        return write(value)
    made = {}
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (here := getattr(value, field.name)) != default:
            made[camel(field.name)] = differing(here)
    return made


def _num_bytes(value: object, path: str) -> int:
    return int(quantity(_value(Quantity, value, path)))


def _value(hint: Any, value: object, path: str) -> Any:
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        if isinstance(marks[0], SettingsOf):
            return marks[0].read(_value(base, value, path), path)
        if QuantityText() in marks and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        made = _value(base, value, path)
        for mark in marks:
            _check(mark, made, path)
        return made
    if is_dataclass(hint):
        return read(hint, value, path)  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{path}: expected one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        return tuple(_value(get_args(hint)[0], each, f"{path}[{index}]") for index, each in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected an object, got {value!r}")
        return {str(key): _value(get_args(hint)[1], each, f"{path}.{key}") for key, each in value.items()}
    if hint is Any:
        return value
    wanted = (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path}: expected {_word(hint)}, got {value!r}")
    return value


def _check(mark: object, value: Any, path: str) -> None:
    match mark:
        case Bounds(least, most) if not least <= value <= most:
            raise ConfigError(f"{path}: expected {least} to {most}, got {value!r}")
        case Pattern(regex, example) if not _matches(regex, value):
            raise ConfigError(f"{path}: expected something like {example}, got {value!r}")
        case QuantityText() if not _matches(QUANTITY, value):
            raise ConfigError(f"{path}: expected a quantity such as 500m, 16 or 128Gi, got {value!r}")


def _matches(regex: str, value: str) -> bool:
    """Return what RE2 would: letters are those of ASCII, and `$` is the end, not also a newline before it."""
    return re.search(re.sub(r"\$$", r"\\Z", regex), value, re.ASCII) is not None


def _word(hint: Any) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]
