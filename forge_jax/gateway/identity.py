"""Who a request is from: the session that it names, and the key that it brings.

A request's path and headers flow in, a session's name flows out. The path beats the header,
the header the key; clients' own session headers never name one.
"""

import hmac
from collections.abc import Mapping

from starlette.types import Scope

from forge_jax.gateway.errors import ApiError

MOST_NAME = 2048  # characters of a session's name: keys name sessions, and some are tokens
VERSION = "/v1"  # of the API, with which some clients' base URLs end and which others add
MOST_HEADERS = 64 * 2**10  # bytes of all headers of a request
AGENT = "x-forge-agent"  # which agent of its session makes a call
HINTS = (  # what clients say of their sessions in headers of their own
    AGENT,
    "x-session-id",
    "x-session-affinity",
    "x-parent-session-id",
    "session-id",
    "thread-id",
    "x-codex-window-id",
    "x-codex-turn-metadata",
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
)


def session_name(scope: Scope, headers: Mapping[str, str]) -> str | None:
    """Path, else header, else API key; None if the client gives none of them.

    Raises ApiError(400) for a name that none may have.
    """
    name = (
        scope["path_params"].get("session", "").removesuffix(VERSION)
        or headers.get("x-forge-session")
        or api_key(headers)
        or None
    )
    fault = None if name is None else fault_of(name)
    if fault is not None:
        raise ApiError(400, f"the session's name {fault}", code="invalid_session")
    return name


def fault_of(name: str) -> str | None:
    """What keeps `name` from being a session's; None if nothing does. Never shows the name."""
    if not name:
        return "is empty"
    if len(name) > MOST_NAME:
        return f"has {len(name)} characters, at most {MOST_NAME}"
    if name.endswith(VERSION):
        return f"ends in {VERSION}, which a path would lose"
    return None if name.isprintable() else "has characters that do not print"


def api_key(headers: Mapping[str, str]) -> str:
    """The key of a request, "" if it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def is_key(headers: Mapping[str, str], key: str) -> bool:
    """True if the request brings `key`; how long that takes says nothing of it."""
    return hmac.compare_digest(api_key(headers).encode(), key.encode())


def headers_of(scope: Scope) -> dict[str, str]:
    """Request headers, names in lower case; of one sent twice the last.

    Raises ApiError(431) where there are too many.
    """
    raw = scope["headers"]
    if sum(len(name) + len(value) for name, value in raw) > MOST_HEADERS:
        raise ApiError(431, f"the headers have more than {MOST_HEADERS} bytes")
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}


def session_hints(headers: Mapping[str, str]) -> dict[str, str]:
    """What clients say of their sessions in headers of their own."""
    return {name: headers[name] for name in HINTS if name in headers}


def agent_of(hints: Mapping[str, str]) -> str:
    """Which agent of the session made a call, as it named itself; "" if it did not."""
    return hints.get(AGENT) or hints.get("x-claude-code-agent-id", "")
