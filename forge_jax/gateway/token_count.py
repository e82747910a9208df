"""Anthropic's /v1/messages/count_tokens: how long a prompt is.

A body flows in, a number flows out. Nothing is drawn, and no session changes or begins.
"""

import numpy as np
from starlette.types import Receive, Scope, Send

from forge_jax.gateway.anthropic_conversation import read_conversation
from forge_jax.gateway.core import Core
from forge_jax.gateway.endpoint import session_of
from forge_jax.gateway.errors import ApiError, ClientGone
from forge_jax.gateway.exchange import read_body, send_body
from forge_jax.gateway.fields import parse_object
from forge_jax.gateway.history import write_prompt
from forge_jax.gateway.identity import headers_of
from forge_jax.gateway.messages import encoded
from forge_jax.models.chat import TemplateError


class TokenCount:
    """The ASGI application behind the route."""

    def __init__(self, core: Core):
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(receive, self._core.config.max_body_bytes)
        except ClientGone:
            return  # there is nobody to answer
        try:
            count = self._count(scope, raw)
        except TemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        await send_body(send, 200, encoded({"input_tokens": count}), "application/json", {})

    def _count(self, scope: Scope, raw: bytes) -> int:
        """Tokens of the prompt that a call with this body would have now."""
        conversation = read_conversation(parse_object(raw))
        session = session_of(self._core, scope, headers_of(scope))
        prompt = write_prompt(self._core.chat, conversation, session.replies.find, self._encode)
        return len(prompt.ids)

    def _encode(self, text: str) -> np.ndarray:
        # Not the session's: what that remembers is the prompt of its newest call.
        return np.array(self._core.chat.tokenizer.encode(text), np.int32)
