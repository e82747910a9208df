"""An engine whose replies a test chooses, and what tests of the gateway share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
from openai import AsyncOpenAI

from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.types import Chunk, Engine, Finish, PromptLogprobs, Refused, Request, Turn

ADMIN = "admin-key"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks a key up",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


def chat_of(name: str) -> Chat:
    return Chat(tokenizer=ByteTokenizer(), format=built_in(name))


@dataclass
class FakeEngine:
    """Answers with the ids that `reply` gives; every token comes from weights 7."""

    reply: Callable[[Request], list[int] | Refused]
    chunk: int = 5  # tokens a chunk
    pause: float = 0.0  # seconds between chunks
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    aborted: int = 0

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        ids = self.reply(request)
        if isinstance(ids, Refused):
            raise ids
        limit = request.sampling.max_tokens or len(ids)
        finish = Finish.STOP if len(ids) <= limit else Finish.LENGTH
        ids = ids[:limit]
        self.running += 1
        done = False
        try:
            for start in range(0, max(1, len(ids)), self.chunk):
                await asyncio.sleep(self.pause)
                part = ids[start : start + self.chunk]
                done = start + self.chunk >= len(ids)
                yield Chunk(
                    ids=np.array(part, np.int32),
                    logprobs=-np.arange(start, start + len(part), dtype=np.float32) / 8,
                    versions=np.full(len(part), 7, np.int32),
                    finish=finish if done else None,
                    queue_seconds=0.25,
                    cached_tokens=1,
                    prompt=None if start else prompt_logprobs(request),
                )
        finally:
            self.running -= 1
            self.aborted += not done


def prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """The k-th token has the log-prob -k, rank 1 + k; the likeliest are "A", "B" ..."""
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    count = np.arange(1, len(request.prompt))
    best = np.broadcast_to(np.arange(top), (len(count), top))
    return PromptLogprobs(
        logprobs=-count.astype(np.float32),
        ranks=1 + count.astype(np.int32),
        top_ids=(65 + best).astype(np.int32),
        top_logprobs=-best.astype(np.float32) / 2,
    )


def text_engine(chat: Chat, *texts: str, **options) -> FakeEngine:
    """Answers the k-th request with the k-th text and the end of a turn; then the last again."""
    end = chat.stop_ids[0]
    replies = [[*chat.tokenizer.encode(text), end] for text in texts]
    engine = FakeEngine(lambda _: replies[min(len(engine.requests), len(replies)) - 1], **options)
    return engine


def slow(pause: float = 0.05, tokens: int = 100) -> FakeEngine:
    """Replies so slowly that a test may do something meanwhile."""
    return FakeEngine(lambda _: [*b"x" * tokens, 258], chunk=1, pause=pause)


@dataclass
class Served:
    """A running gateway and ways to talk to it."""

    gateway: Gateway
    url: str
    http: httpx.AsyncClient
    client: AsyncOpenAI  # of no particular session

    def of(self, session: str) -> AsyncOpenAI:
        return self.client.with_options(base_url=f"{self.url}/s/{session}/v1")

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def turns(self, session: str) -> list[dict]:
        answer = await self.http.get(
            f"/sessions/{session}", headers={"authorization": f"Bearer {ADMIN}"}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["turns"]


@asynccontextmanager
async def served(engine: Engine, chat: Chat, **config: object) -> AsyncIterator[Served]:
    gateway = Gateway(engine, chat, "tiny", ADMIN, GatewayConfig(**config))
    async with (
        gateway.running() as url,
        httpx.AsyncClient(base_url=url) as http,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield Served(gateway, url, http, client)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Runs an async test with a limit of its own."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def sequence(turn: Turn) -> list[int]:
    return [*turn.prompt.tolist(), *turn.output.tolist()]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another task is about to bring about."""
    while not condition():
        await asyncio.sleep(0.005)
