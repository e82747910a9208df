"""The strict loader: from mappings to frozen dataclasses, and the caller's mistakes."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """The caller's mistake: one line that names the key or field and the value.

    Commands print it and exit with status 2.
    """


def load(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Builds the frozen dataclass `cls`; lists become tuples, nested mappings dataclasses.

    Raises UserError on an unknown or missing key, a value of the wrong type, or a
    value that the class itself refuses.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            known = ", ".join(sorted(fields))
            raise UserError(f"unknown key {path}{key}={mapping[key]!r}; known: {known}")
    values = {k: _convert(hints[k], v, f"{path}{k}") for k, v in mapping.items()}
    for name, f in fields.items():
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"missing key {path}{name}")
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{path.rstrip('.') or cls.__name__}: {error}") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        if type(value) in kinds:
            return value
        if len(kinds) > 1:
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{path}={value!r} must be one of {names}")
        return _convert(kinds[0], value, path)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return load(typing.cast(type, hint), value, f"{path}.")
    if origin is Mapping and isinstance(value, Mapping) and dataclasses.is_dataclass(args[1]):
        return {k: _convert(args[1], v, f"{path}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = origin or hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{path}={value!r} must be {_told(wanted)}")
    return value


def _told(kind: type) -> str:
    """A type as who writes a configuration knows it."""
    if kind is Mapping or dataclasses.is_dataclass(kind):
        return "a mapping of keys to values"
    return "a list" if kind is tuple else kind.__name__


def check(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds; for `__post_init__`."""
    if not condition:
        raise ValueError(message)
