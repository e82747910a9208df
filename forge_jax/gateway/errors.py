"""What goes wrong with a call, and how clients are told: OpenAI's error shape.

Every error a client sees is made here, so none is a bare string or an HTML page.
"""

from collections.abc import Mapping
from typing import Any

from forge_jax.types import Refused

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER = {429: "1", 503: "1", 529: "1"}  # seconds, for the clients that ask before they retry


class ApiError(Exception):
    """A call that is answered with an error.

    `param` names the field at fault as a path (``messages[2].content``); a `final` one comes
    again however often the call is sent.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "",
        final: bool = False,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or None
        self.final = final


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def from_refusal(refusal: Refused) -> ApiError:
    """The error that says why the engine would not serve a request."""
    return ApiError(refusal.status, str(refusal), param=refusal.param, code=refusal.code or "")


def error_body(error: ApiError) -> Mapping[str, Any]:
    """The JSON object of `error`."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": TYPES.get(error.status, kind),
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: ApiError) -> dict[str, str]:
    """Headers that go with `error`."""
    if error.final:
        return {"x-should-retry": "false"}  # the official SDKs heed it
    seconds = RETRY_AFTER.get(error.status)
    return {} if seconds is None else {"retry-after": seconds}
