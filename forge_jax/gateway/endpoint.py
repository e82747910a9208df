"""One call from its HTTP request to its recorded end, whatever its protocol.

A request flows in; an answer flows out to the client, and a `Call` into its session.
Each call that was begun ends there exactly once: finished, refused or aborted.
"""

import asyncio
import dataclasses
import logging
import time

import numpy as np
from starlette.types import Receive, Scope, Send

from forge_jax.gateway.answer import Answer
from forge_jax.gateway.ask import Ask
from forge_jax.gateway.branches import talk_of
from forge_jax.gateway.call import Call
from forge_jax.gateway.calling import reply_grammar
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.core import Core
from forge_jax.gateway.errors import ApiError, ClientGone, from_refusal
from forge_jax.gateway.exchange import (
    EventStream,
    read_body,
    unless_gone,
)
from forge_jax.gateway.fields import parse_object
from forge_jax.gateway.history import Prompt, write_prompt
from forge_jax.gateway.identity import headers_of, session_hints, session_name
from forge_jax.gateway.messages import Conversation
from forge_jax.gateway.parsers.formats import reply_parser
from forge_jax.gateway.parsers.protocol import PlainText, ReplyParser
from forge_jax.gateway.session import Session, request_digest
from forge_jax.gateway.structure import schema_of
from forge_jax.gateway.wire import Wire
from forge_jax.models.chat import TemplateError
from forge_jax.types import Branch, Facts, Lineage, Refused, Request, Sampling

LOG = logging.getLogger(__name__)


class Endpoint:
    """The ASGI application behind the routes of one protocol."""

    def __init__(self, core: Core, wire: Wire):
        self._core = core
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        try:
            body = await read_body(receive, self._core.config.max_body_bytes)
            try:
                session, call, ask = self._begin(scope, body, arrived)
            except TemplateError as error:
                raise ApiError(400, str(error), param="messages") from error
            except RecursionError:
                raise ApiError(400, "the body is nested too deeply") from None
            self._core.sessions.begin(session, call)
            await self._serve(session, call, ask, receive, send)
        except ClientGone:
            pass  # there is nobody to answer

    def _begin(self, scope: Scope, body: bytes, arrived: float) -> tuple[Session, Call, Ask]:
        """The call that a request is, and what it asks; the session does not know of it yet."""
        fields = parse_object(body)
        core, headers = self._core, headers_of(scope)
        session = session_of(core, scope, headers)
        ask = session.spending.bounded(self._wire.parse(fields, session.stored))
        prompt = self._prompt(session, ask)
        sampling = self._sampling(session, ask, prompt)
        digest = request_digest(scope["path"], fields)
        self._spend(session)  # a call that can be drawn
        retries = headers.get("x-stainless-retry-count", "")
        retried = retries.isdecimal() and int(retries) > 0
        attempt = session.arrive(digest, retried)
        conversation = ask.source if isinstance(ask.source, Conversation) else None
        call = Call(
            number=attempt.number,
            draw=attempt.draw,
            id=session.call_id(attempt.number),
            digest=digest,
            prompt=prompt,
            talk=None if conversation is None else talk_of(conversation),
            arrived=arrived,
            hints=session_hints(headers),
            stored_bytes=0 if ask.given is None else len(body) + ask.given.kept_bytes,
        )
        parent = session.replies.parent(prompt.ids, session.gone_on)
        messages = () if conversation is None else conversation.messages
        lineage = session.lineage(attempt, prompt, parent, call.talk, messages)
        call.completions = self._completions(session, call, ask, sampling, parent, lineage)
        return session, call, ask

    def _spend(self, session: Session) -> None:
        try:
            session.spending.request()
        except ApiError:
            self._core.metrics.refuse()
            raise

    def _prompt(self, session: Session, ask: Ask) -> Prompt:
        session.read_anew()
        if isinstance(ask.source, Conversation):
            prompt = write_prompt(self._core.chat, ask.source, session.replies.find, session.encode)
        elif isinstance(ask.source, str):
            prompt = Prompt(ids=session.encode(ask.source), text=ask.source)
        else:
            ids = np.array(ask.source, np.int32)
            prompt = Prompt(ids=ids, text=self._core.chat.tokenizer.decode(ask.source))
        if len(prompt.ids) == 0:
            raise ApiError(400, "the prompt has no tokens", code="empty_prompt")
        return prompt

    def _sampling(self, session: Session, ask: Ask, prompt: Prompt) -> Sampling:
        """How the first completion is drawn, but for a seed of the session's.

        Raises ApiError(400).
        """
        chat = self._core.chat
        temperature = session.temperature if ask.temperature is None else ask.temperature
        grammar = ask.answer
        if isinstance(ask.source, Conversation):
            grammar = reply_grammar(ask.source, grammar, chat.format, prompt.text)
        try:
            return Sampling(
                temperature=1.0 if temperature is None else temperature,
                max_tokens=1 if ask.echo_only else ask.max_tokens,
                seed=ask.seed,
                stop=ask.stop,
                stop_ids=(*chat.stop_ids, *ask.stop_ids),
                ignore_eos=ask.ignore_eos,
                top_logprobs=0 if ask.echo_only else ask.top_logprobs,
                prompt_logprobs=ask.prompt_tops,
                grammar=grammar,
                **ask.shaping,
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition("=")[0]) from error

    def _completions(
        self,
        session: Session,
        call: Call,
        ask: Ask,
        sampling: Sampling,
        parent: Completion | None,
        lineage: Lineage,
    ) -> tuple[Completion, ...]:
        facts = _facts(session, call, ask)
        seed = session.seed_of(call.draw) if ask.seed is None else ask.seed
        told = sampling.prompt_logprobs
        completions = []
        for choice in range(ask.n):
            drawn = dataclasses.replace(
                sampling,
                seed=seed,
                choice=choice,
                prompt_logprobs=None if choice else told,  # of one for all
            )
            completions.append(
                Completion(
                    place=(call.number, choice),
                    name=f"{call.id}_{choice}",
                    request=Request(prompt=call.prompt.ids, sampling=drawn, facts=facts),
                    parent=None if parent is None else parent.place,
                    lineage=Lineage(branch=Branch.PARALLEL) if choice else lineage,
                    tokenizer=self._core.chat.tokenizer,
                    parser=self._parser(ask, call, choice),
                )
            )
        return tuple(completions)

    def _parser(self, ask: Ask, call: Call, choice: int) -> ReplyParser:
        if not isinstance(ask.source, Conversation):
            return PlainText()
        prefix = f"call_{call.id}_{choice}"
        return reply_parser(self._core.chat.format, ask.source, call.prompt.text, prefix)

    async def _serve(
        self, session: Session, call: Call, ask: Ask, receive: Receive, send: Send
    ) -> None:
        """Draws and answers a call, and records how it ended."""
        core = self._core
        headers: dict[str, str] = {}
        stream = EventStream(send, headers, self._wire.keep_alive) if ask.stream else None
        answer = Answer(core, self._wire, session, call, ask)
        core.metrics.begin(call)
        try:
            await unless_gone(
                receive,
                answer.stream(stream) if stream else answer.whole(send, headers),
                call.begin,
                core.config.keep_alive_seconds,
                stream.keep_alive if stream else None,
            )
        except Refused as refusal:
            session.refuse(call)
            await answer.fail(stream, from_refusal(refusal))
        except asyncio.CancelledError:
            session.abort(call)
            current = asyncio.current_task()
            stops = current is not None and current.cancelling() > 0
            why = "the session was closed" if session.closed else "the request was sent again"
            ended = ApiError(503, "the server stops") if stops else ApiError(410, why)
            await answer.fail(stream, ended)
        except ClientGone:
            session.abort(call)
        except Exception:
            session.abort(call)
            LOG.exception("a call failed")
            await answer.fail(stream, ApiError(500, "the server failed"))
        finally:
            call.task = None
            core.metrics.end(call)
            call.settle()
            core.sessions.ended(session, call)


def session_of(core: Core, scope: Scope, headers: dict[str, str]) -> Session:
    """The session that a request names. Raises ApiError(404) if it is not open."""
    name = session_name(scope, headers)
    session = core.sessions.of(name, core.config.undeclared)
    if session is None:
        raise ApiError(404, f"session {name!r} is not open", code="session_not_found")
    return session


def _facts(session: Session, call: Call, ask: Ask) -> Facts:
    schema = schema_of(ask.answer)
    facts = Facts(text=call.prompt.text, session=session.ids, call=call.number, json_schema=schema)
    if not isinstance(ask.source, Conversation):
        return facts
    tool_result = ask.source.messages[-1].role == "tool"
    return dataclasses.replace(facts, tools=ask.source.tools, tool_result=tool_result)
