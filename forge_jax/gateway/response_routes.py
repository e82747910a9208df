"""Stored responses over HTTP: read, listed and deleted, each by its own session alone."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import wrong
from forge_jax.gateway.identity import headers_of, session_name
from forge_jax.gateway.messages import encoded
from forge_jax.gateway.response_items import listed
from forge_jax.gateway.sessions import Sessions
from forge_jax.gateway.stored import Stored, StoredResponses

MOST_ITEMS = 100  # of one page


class ResponseRoutes:
    """The routes below /v1/responses."""

    def __init__(self, sessions: Sessions):
        self._sessions = sessions

    def add(self, app: FastAPI, prefix: str) -> None:
        """Adds the routes to `app` behind `prefix`."""
        path = f"{prefix}/v1/responses/{{response}}"
        app.add_route(path, self._read, methods=["GET"])
        app.add_route(path, self._delete, methods=["DELETE"])
        app.add_route(f"{path}/input_items", self._input, methods=["GET"])

    async def _read(self, request: Request) -> Response:
        streamed = request.query_params.get("stream", "false")
        if streamed != "false":
            raise wrong("stream", streamed, "false: what is stored has ended")
        return _json(self._found(request)[1].answer)

    async def _delete(self, request: Request) -> Response:
        responses, stored = self._found(request)
        name = stored.answer["id"]
        responses.discard(name)
        return _json({"id": name, "object": "response", "deleted": True})

    async def _input(self, request: Request) -> Response:
        """Everything the response was given: the talk that it goes on from, and its own items."""
        given, query = self._found(request)[1].given, request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MOST_ITEMS:
            raise wrong("limit", limit, f"a whole number from 1 to {MOST_ITEMS}")
        if order not in ("asc", "desc"):
            raise wrong("order", order, "asc or desc")
        items = [*given.before(), *given.items]
        return _json(listed(items, query.get("after"), int(limit), order == "desc"))

    def _found(self, request: Request) -> tuple[StoredResponses, Stored]:
        session = self._sessions.get(session_name(request.scope, headers_of(request.scope)) or "")
        name = request.path_params["response"]
        stored = None if session is None else session.stored.response(name)
        if session is None or stored is None:
            message = f"response {name!r} is not stored in this session"
            raise ApiError(404, message, code="response_not_found")
        return session.stored, stored


def _json(value: Mapping[str, Any]) -> Response:
    return Response(encoded(value), media_type="application/json")
