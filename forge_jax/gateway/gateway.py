"""The gateway: agents' HTTP calls in, token-exact `Turn`s out.

An engine and a chat are passed in; agents see models only. Every token an agent's
model was fed or sampled is in the turns of its session, exactly as it was.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from forge_jax.config import BudgetConfig
from forge_jax.gateway.anthropic_messages import MESSAGES
from forge_jax.gateway.anthropic_messages import error_body as anthropic_error
from forge_jax.gateway.chat_completions import CHAT_COMPLETIONS
from forge_jax.gateway.completions import COMPLETIONS
from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.core import Core
from forge_jax.gateway.endpoint import Endpoint
from forge_jax.gateway.errors import ApiError, error_body, error_headers
from forge_jax.gateway.identity import fault_of, headers_of, is_key
from forge_jax.gateway.messages import encoded
from forge_jax.gateway.metrics import Metrics
from forge_jax.gateway.openapi import document
from forge_jax.gateway.response_routes import ResponseRoutes
from forge_jax.gateway.response_stream import RESPONSES
from forge_jax.gateway.server import serving
from forge_jax.gateway.session import Session
from forge_jax.gateway.sessions import Sessions
from forge_jax.gateway.token_count import TokenCount
from forge_jax.models.chat import Chat
from forge_jax.types import Engine, Turn

MESSAGES_PATH = "/v1/messages"
CALLS = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    MESSAGES_PATH: MESSAGES,
    "/v1/responses": RESPONSES,
}


class Gateway:
    """Serves one model to agents and records their calls by session."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        model_name: str,
        admin_key: str,
        config: GatewayConfig = GatewayConfig(),  # noqa: B008  (frozen)
        exposition: Callable[[], str] | None = None,
    ):
        """`admin_key` opens the records of sessions over HTTP. What `exposition` gives, in
        Prometheus' text format, is told by /metrics beside the gateway's own counters.
        """
        self._exposition = exposition
        self._admin_key = admin_key
        self._config = config
        self.restarts = 0  # servers that were lost, and begun again
        self._sessions = Sessions(chat, config.keep_tokens, config.budget)
        self._core = Core(
            engine=engine,
            chat=chat,
            model=model_name,
            config=config,
            sessions=self._sessions,
            metrics=Metrics(),
        )
        self.app = self._build()

    def open(
        self,
        session: str,
        seed: int | None = None,
        temperature: float | None = None,
        ids: str | None = None,
        budget: BudgetConfig | None = None,
    ) -> None:
        """Declares a session and how its calls are drawn where they do not say.

        Call k gets a seed of its own from (`seed`, k), so a session that is played again
        samples the same tokens. What ids of calls are made of is `ids`, else the session's name:
        a template may show them to the model. `budget` is in place of the gateway's. Raises
        ValueError if the session is already open, or for a name that none may have.
        """
        fault = fault_of(session)
        if fault is not None:
            raise ValueError(f"the session's name {fault}")
        self._sessions.open(session, seed, temperature, ids, budget)

    def over_budget(self, session: str) -> bool:
        """True if a call of an open session was refused or cut by its budget.

        Raises KeyError if there is no such session.
        """
        return self._sessions[session].spending.exceeded

    def close(self, session: str) -> tuple[Turn, ...]:
        """Ends a session, aborting calls still running; gives its turns and forgets it.

        Raises KeyError if there is no such session.
        """
        return self._sessions.close(session)

    def running(self, host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[str]:
        """Serves HTTP for as long as the block runs; gives the root URL.

        A server that is lost serves again, with all sessions, at the same URL; one that goes on
        being lost ends the block with its fault. Leaving the block lets running calls end
        (`drain_seconds`). Raises UserError where the address cannot be had.
        """
        return serving(self.app, host, port, self._config.drain_seconds, self._restarted)

    def _restarted(self) -> None:
        self.restarts += 1

    def _build(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for path, wire in CALLS.items():
            endpoint = Endpoint(self._core, wire)
            for prefix in ("", "/s/{session:path}"):
                app.add_route(prefix + path, endpoint, methods=["POST"])  # type: ignore[arg-type]
        stored = ResponseRoutes(self._sessions)
        for prefix in ("", "/s/{session:path}"):
            path = f"{prefix}{MESSAGES_PATH}/count_tokens"
            app.add_route(path, TokenCount(self._core), methods=["POST"])  # type: ignore[arg-type]
            stored.add(app, prefix)
            app.add_route(f"{prefix}/v1/models", self._models, methods=["GET"])
            app.add_route(f"{prefix}/v1/models/{{model:path}}", self._model, methods=["GET"])
        app.add_route("/sessions/{session:path}", self._session, methods=["GET"])
        app.add_route("/openapi.json", _openapi, methods=["GET"])
        app.add_route("/health", self._health, methods=["GET"])
        app.add_route("/metrics", self._metrics, methods=["GET"])
        app.add_exception_handler(ApiError, _told)
        app.add_exception_handler(HTTPException, _not_routed)
        app.add_exception_handler(Exception, _failed)
        return app

    def _described(self) -> Mapping[str, Any]:
        return {"id": self._core.model, "object": "model", "created": 0, "owned_by": "forge_jax"}

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._core.model:
            raise ApiError(404, f"model {name!r} is not served", code="model_not_found")
        return _json(self._described())

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        text = self._core.metrics.text(len(self._sessions))
        if self._exposition is not None:
            text += self._exposition()
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _session(self, request: Request) -> Response:
        if not is_key(headers_of(request.scope), self._admin_key):
            raise ApiError(401, "this route needs the admin key", code="invalid_api_key")
        name = request.path_params["session"]
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(404, f"session {name!r} is not known", code="session_not_found")
        return _json({"session": name, "turns": _recorded(session)})


def _recorded(session: Session) -> list[Mapping[str, Any]]:
    turns = session.turns()
    numbers = {completion.place: number for number, (_, completion, _) in enumerate(turns)}
    return [
        {
            "prompt_ids": turn.prompt.tolist(),
            "output_ids": turn.output.tolist(),
            "logprobs": turn.logprobs.tolist(),
            "versions": turn.versions.tolist(),
            "finish_reason": str(turn.finish),
            "parent": turn.parent,
            "seconds": turn.seconds,
            "start": turn.start,
            "queue_seconds": turn.queue_seconds,
            "temperature": turn.temperature,
            "malformed": turn.malformed,
            "refused": turn.refused,
            "agent": turn.agent,
            "hints": call.hints,
            "branch": completion.lineage.branch,
            "redone_tokens": completion.lineage.redone,
            "replies": [
                {
                    "rule": reply.rule,
                    "turn": None if reply.place is None else numbers.get(reply.place),
                    "tokens": reply.tokens,
                    "retokenised": reply.retokenised,
                }
                for reply in call.prompt.replies
            ],
        }
        for call, completion, turn in turns
    ]


async def _openapi(request: Request) -> Response:
    return _json(document())


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        encoded(value), status_code=status, headers=headers, media_type="application/json"
    )


def _refused(request: Request, error: ApiError, headers: Mapping[str, str] | None) -> Response:
    """An error, in the shape of the protocol that the path belongs to."""
    route = request.url.path[request.url.path.rfind("/v1/") :]  # behind any session's name
    if route != MESSAGES_PATH and not route.startswith(f"{MESSAGES_PATH}/"):
        return _json(error_body(error), error.status, headers)
    body = anthropic_error(error)
    return _json(body, error.status, {**(headers or {}), "request-id": body["request_id"]})


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refused(request, error, error_headers(error))


async def _failed(request: Request, error: Exception) -> Response:
    """What nobody expected; the server logs it."""
    return _refused(request, ApiError(500, "the server failed"), None)


async def _not_routed(request: Request, error: Exception) -> Response:
    """404 and 405, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return _refused(request, told, error.headers)
