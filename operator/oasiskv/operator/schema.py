"""Writes the dataclasses of `api` as structural OpenAPI schemas and as tables of the documentation."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from oasiskv.operator.kinds import (
    QUANTITY,
    Bounds,
    Pattern,
    Quantity,
    QuantityText,
    SettingsOf,
    camel,
    hints,
    optional,
    write,
)

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
MAX_RULED_ITEMS = 256
"""Most items of a list and length of a text: the API server refuses rules over what has no end."""


@cache
def docs(cls: type) -> Mapping[str, str]:
    """Return the docstring under each field of a dataclass, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for here, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[here.target.id] = " ".join(text.split())
    return found


def schema(cls: Any) -> dict[str, Any]:
    """Return the structural schema of a dataclass."""
    made: dict[str, Any] = {"type": "object", "properties": {}}
    required = []
    for field in fields(cls):
        hint, _ = optional(hints(cls)[field.name])
        made["properties"][camel(field.name)] = {"description": docs(cls)[field.name]} | _type(hint) | _default(field)
        if field.default is MISSING and field.default_factory is MISSING:
            required.append(camel(field.name))
    if required:
        made["required"] = required
    if rules := getattr(cls, "RULES", ()):
        made["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in rules]
    return made


def rows(cls: Any, path: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, type, default and description of every leaf below a dataclass, depth first."""
    for field in fields(cls):
        here = f"{path}.{camel(field.name)}"
        hint, _ = optional(hints(cls)[field.name])
        item = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if is_dataclass(item):
            yield from rows(item, here + ("[]" if item is not hint else ""))
            continue
        yield here, _words(hint), _shown(field), docs(cls)[field.name]
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for mark in marks:
            if isinstance(mark, SettingsOf):
                for name, each in mark.names().items():
                    kind = _words(_setting(mark, each))
                    yield f"{here}.{name}", kind, "", docs(mark.cls)[each]


def _type(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin is Annotated:
        base, *marks = get_args(hint)
        if isinstance(marks[0], SettingsOf):
            return _settings(marks[0])
        made = _type(base)
        for mark in marks:
            made |= _mark(mark)
            if isinstance(mark, QuantityText):
                del made["type"]
        return made
    if is_dataclass(hint):
        return schema(hint)
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if origin is Union:
        # A whole number or one of some words.
        (words,) = (get_args(each) for each in get_args(hint) if get_origin(each) is Literal)
        return {"x-kubernetes-int-or-string": True, "pattern": f"^({'|'.join(words)})$"}
    if origin is tuple:
        return {"type": "array", "maxItems": MAX_RULED_ITEMS, "items": _type(get_args(hint)[0])}
    if origin is not None and issubclass(origin, Mapping):
        value = get_args(hint)[1]
        if value is Any:
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        return {"type": "object", "additionalProperties": _type(value)}
    return {"type": NAMES[hint]}


def _mark(mark: object) -> dict[str, Any]:
    match mark:
        case Bounds(least, most):
            return {"minimum": least, "maximum": most}
        case Pattern(regex, _):
            return {"pattern": regex, "maxLength": 512}
        case _:
            return {"x-kubernetes-int-or-string": True, "pattern": QUANTITY}


def _settings(mark: SettingsOf) -> dict[str, Any]:
    properties = {
        name: {"description": docs(mark.cls)[field]} | _type(_setting(mark, field))
        for name, field in mark.names().items()
    }
    return {"type": "object", "properties": properties}


def _setting(mark: SettingsOf, name: str) -> Any:
    return Quantity if name.endswith("_bytes") else optional(hints(mark.cls)[name])[0]


def _default(field: "Field[Any]") -> dict[str, Any]:
    if field.default_factory is not MISSING:
        # In full: the API server holds a default against the rules before it fills in those of its fields.
        return {"default": write(field.default_factory())}
    if field.default is MISSING or field.default is None:
        return {}
    return {"default": list(field.default) if isinstance(field.default, tuple) else field.default}


def _shown(field: "Field[Any]") -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    made = _default(field).get("default")
    return "" if made is None or isinstance(made, dict) or made in ([], "") else json.dumps(made).strip(chr(34))


def _words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        base, *marks = get_args(hint)
        match marks[0]:
            case Bounds(least, most):
                return f"{_words(base)}, {least} to {most}"
            case QuantityText():
                return "quantity"
        return _words(base)
    if origin is Literal:
        return " or ".join(get_args(hint))
    if origin is Union:
        return " or ".join(_words(each) for each in get_args(hint))
    if origin is tuple:
        return f"list of {_words(get_args(hint)[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return "object"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[hint]
