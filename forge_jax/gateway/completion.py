"""One completion of a call, from its first token to the `Turn` it becomes.

Chunks flow in as the engine samples them; read text and tool calls flow out at once,
the exact tokens at the end. What was sampled is kept as it was, whatever is read.
"""

import bisect
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from forge_jax.drawing import Support, joined
from forge_jax.gateway.messages import Message, Piece, Thought, ToolCall
from forge_jax.gateway.parsers.protocol import ReplyParser
from forge_jax.gateway.parsers.thoughts import END_THINK, opens_thought
from forge_jax.gateway.refusals import refused
from forge_jax.gateway.text import TextReader
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.types import NO_ROUTE, Chunk, Facts, Finish, Lineage, PromptLogprobs, Request, Turn

Tops = tuple[tuple[tuple[int, float], ...], ...]  # of each token: ids and log-probs
Place = tuple[int, int]  # number of a call in its session, number of the choice


class Completion:
    """Tokens and text of one of the n completions of a call."""

    def __init__(
        self,
        place: Place,
        name: str,
        request: Request,
        parent: Place | None,
        lineage: Lineage,
        tokenizer: Tokenizer,
        parser: ReplyParser,
    ):
        """`name` is unique among all sessions; ids that clients are told are made from it."""
        self.place = place
        self.name = name
        self.request = request
        self.opened = opens_thought(request.facts.text)  # a thought, for the model to go on with
        self.parent = parent
        self.lineage = lineage
        self.finish: Finish | None = None
        self.stop_text: str | None = None
        self.queue_seconds = 0.0
        self.cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.ended = 0.0  # time of the last token
        self.malformed = 0  # tool calls begun so far that could not be read as such
        self.started = False
        self._chunks: list[Chunk] = []
        self._tokenizer = tokenizer
        self._reader = TextReader(tokenizer, request.sampling)
        self._parser = parser
        self.pieces: list[Piece] = []  # of the reply, as they were told

    def take(self, chunk: Chunk, now: float) -> list[Piece]:
        """Adds newly sampled tokens; gives the parts of the reply read from them.

        What comes after `abort` is nobody's, and changes nothing.
        """
        if self.finish is Finish.ABORT:
            return []
        if not self.started:
            self.started = True
            self.queue_seconds = chunk.queue_seconds
            self.cached_tokens = chunk.cached_tokens
            self.prompt_logprobs = chunk.prompt
        self._chunks.append(chunk)
        self.ended = now
        pieces = self._parser.feed(self._reader.feed(chunk))
        if chunk.finish is not None:
            self.finish, self.stop_text = chunk.finish, chunk.stop_text
            pieces += self._parser.finish()
        self.malformed = self._parser.malformed
        self.pieces += pieces
        return pieces

    def abort(self, now: float) -> None:
        """Marks the completion as one that nobody received; it will not be trained on."""
        if self.finish is None:
            self.ended = now
        self.finish = Finish.ABORT

    def settle(self) -> None:
        """Lets go of all but the record and the reply, once the call was answered."""
        # Read from the chunks, and kept.
        _ = self.output, self.logprobs, self.versions, self.routes, self.support, self.message
        _ = self.refused
        self._chunks, self.pieces = [], []
        self.request = replace(self.request, facts=Facts())
        del self._reader, self._parser

    # What follows is read, and from then on fixed, only once the completion has ended.

    @functools.cached_property
    def message(self) -> Message:
        """The reply as it was told to the client."""
        content = "".join(piece for piece in self.pieces if isinstance(piece, str))
        calls = tuple(piece for piece in self.pieces if isinstance(piece, ToolCall))
        thought = "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))
        return Message(role="assistant", content=content, calls=calls, thought=thought)

    @functools.cached_property
    def refused(self) -> int:
        """How many tool calls of the reply no offered tool takes."""
        return refused(self.message.calls, self.request.facts.tools)

    @functools.cached_property
    def output(self) -> np.ndarray:
        """i32[C], what was sampled."""
        return _joined([c.ids for c in self._chunks], np.int32)

    @functools.cached_property
    def logprobs(self) -> np.ndarray:
        """f32[C], the sampler's."""
        return _joined([c.logprobs for c in self._chunks], np.float32)

    @functools.cached_property
    def versions(self) -> np.ndarray:
        """i32[C], of the weights that sampled each token."""
        return _joined([c.versions for c in self._chunks], np.int32)

    @functools.cached_property
    def routes(self) -> np.ndarray | None:
        """int[P + C, layers, k], of prompt and output; None where the engine records none.

        What was never fed, as the last sampled token, has `NO_ROUTE`; so has all of a prompt
        whose completion never began.
        """
        fed = [c.routes for c in self._chunks if c.routes is not None]
        if not fed:
            return None
        routes = np.full(
            (len(self.request.prompt) + len(self.output), *fed[0].shape[1:]), NO_ROUTE, fed[0].dtype
        )
        np.concatenate(fed, out=routes[: sum(map(len, fed))])
        return routes

    @functools.cached_property
    def support(self) -> Support | None:
        """Of each output token; None where the engine tells of none."""
        found = [c.support for c in self._chunks if c.support is not None]
        return joined(found) if found else None

    @functools.cached_property
    def tops(self) -> Tops | None:
        """The likeliest tokens beside each output token; None where the engine tells none."""
        found = [tops for c in self._chunks if (tops := tops_of(c)) is not None]
        return sum(found, ()) if found else None

    @functools.cached_property
    def raw_text(self) -> str:
        """The sampled tokens as text, what ended them included."""
        return self._tokenizer.decode(self.output.tolist())

    @functools.cached_property
    def thought_tokens(self) -> int:
        """How many of the sampled tokens are reasoning, the tag that ends it among them."""
        if not self.message.thought:
            return 0
        ids = self.output.tolist()
        closed = functools.partial(self._closed, ids)
        return min(len(ids), bisect.bisect_left(range(len(ids) + 1), True, key=closed))

    def _closed(self, ids: list[int], count: int) -> bool:
        return END_THINK in self._tokenizer.decode(ids[:count])

    @functools.cached_property
    def retokenised(self) -> int:
        """How many of the sampled tokens their text would not become again: those between the
        first and the last that differ."""
        return differing(self.output, np.array(self._tokenizer.encode(self.raw_text), np.int32))

    def turn(self, parents: Mapping[Place, int], arrived: float, opened: float, agent: str) -> Turn:
        """The record of this completion; `parents` numbers the turns of the session."""
        return Turn(
            prompt=self.request.prompt,
            output=self.output,
            logprobs=self.logprobs,
            versions=self.versions,
            temperature=self.request.sampling.temperature,
            finish=self.finish or Finish.ABORT,
            parent=None if self.parent is None else parents.get(self.parent),
            start=arrived - opened,
            seconds=max(0.0, self.ended - arrived),
            queue_seconds=self.queue_seconds,
            routes=self.routes,
            support=self.support,
            malformed=self.malformed,
            lineage=self.lineage,
            refused=self.refused,
            agent=agent,
        )


def differing(ids: np.ndarray, other: np.ndarray) -> int:
    """How many of `ids` lie outside the beginning and the end that both have."""
    before = common_prefix(ids, other)
    return len(ids) - before - common_prefix(ids[before:][::-1], other[before:][::-1])


def common_prefix(ids: np.ndarray, other: np.ndarray) -> int:
    """How many ids both begin with."""
    n = min(len(ids), len(other))
    differ = np.flatnonzero(ids[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def tops_of(chunk: Chunk) -> Tops | None:
    """The likeliest tokens beside each of a chunk's."""
    if chunk.top_ids is None or chunk.top_logprobs is None:
        return None
    return tuple(
        tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)
        for ids, logprobs in zip(chunk.top_ids.tolist(), chunk.top_logprobs.tolist(), strict=True)
    )


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
