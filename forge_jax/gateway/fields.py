"""Typed reading of JSON bodies: one field in, one value of the right type out.

A null counts as absent. What has the wrong type or range is refused with a 400 that
names the field and shows the value; fields nobody reads are never looked at.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.errors import ApiError

SHOWN = 80  # characters of an offending value in an error message
MOST_MESSAGES = 20_000  # or items, of one request
MOST_TOOLS = 2_000


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body."""
    try:
        body = _DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is none of its values")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # it could not be told again
        raise ValueError(f"{text[:SHOWN]} is beyond all numbers here")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def shown(value: Any) -> str:
    """`value` for an error message, cut to a readable length."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def wrong(path: str, value: Any, wanted: str) -> ApiError:
    """The 400 for a field that is not what it must be."""
    return ApiError(400, f"{path}={shown(value)} must be {wanted}", param=path)


def flag(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    """A boolean, False where absent."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(path + name, value, "true or false")
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number in [low, high], None where absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}")
    return value


def number(body: Mapping[str, Any], name: str, low: float) -> float | None:
    """A finite number >= low, None where absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, value, "a number")
    try:
        real = float(value)
    except OverflowError:
        raise wrong(name, value, "a finite number") from None
    if not math.isfinite(real) or real < low:
        raise wrong(name, value, f"a finite number >= {low:g}")
    return real


def text(body: Mapping[str, Any], name: str, path: str = "") -> str | None:
    """A string, None where absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(path + name, value, "a string")
    return value


def mapping(body: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """An object, empty where absent."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(path + name, value, "an object")
    return value


def sequence(body: Mapping[str, Any], name: str, path: str = "") -> Sequence[Any]:
    """A list, empty where absent."""
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(path + name, value, "a list")
    return value


def bounded(values: Sequence[Any], path: str, most: int) -> Sequence[Any]:
    """`values`, of which there may be `most`."""
    if len(values) > most:
        raise ApiError(400, f"{path} has {len(values)} entries, at most {most}", param=path)
    return values


def strings(body: Mapping[str, Any], name: str, most: int, path: str = "") -> tuple[str, ...]:
    """One string or a list of at most `most`, none of them empty; () where absent."""
    value = body.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for item in bounded(values, path + name, most):
        if not isinstance(item, str) or not item:
            raise wrong(path + name, value, "a string or a list of strings, none empty")
    return tuple(values)


def token_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of token ids, () where absent; the engine knows its own vocabulary."""
    values = sequence(body, name)
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise wrong(f"{name}[{i}]", value, "a token id")
    return tuple(values)
