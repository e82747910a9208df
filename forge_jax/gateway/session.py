"""One session: the tree of calls that share an identity.

Calls flow in as they begin and end; `Turn`s flow out. Every completion that was
sampled is in the turns exactly once, and of a request that was sent again only the
last attempt counts as finished.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.config import BudgetConfig
from forge_jax.gateway.branches import Earlier, Talk, branch_of
from forge_jax.gateway.budget import Spending
from forge_jax.gateway.call import Call
from forge_jax.gateway.completion import Completion, Place, common_prefix
from forge_jax.gateway.history import Prompt
from forge_jax.gateway.identity import agent_of
from forge_jax.gateway.messages import Message
from forge_jax.gateway.replies import Replies
from forge_jax.gateway.stored import StoredResponses, response_id
from forge_jax.models.chat import Chat
from forge_jax.types import Branch, Finish, Lineage, Turn

FAILURES_KEPT = 256  # failed attempts remembered while their retries may still come
COMPARED = 256  # newest calls that a call is compared with, to label its branch
DELIVERY = ("stream", "stream_options")  # fields that say how an answer comes, not which


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A request as it arrives: one more attempt at what it asks for."""

    number: int  # of the request in its session, from 0
    draw: int  # like number, but a retry has that of its first attempt
    digest: bytes  # of what is asked
    resent: bool  # attempts before it failed, or were never received


class Session:
    """Calls of one identity, in order of arrival."""

    def __init__(
        self,
        name: str,
        chat: Chat,
        budget: BudgetConfig = BudgetConfig(),  # noqa: B008  (frozen)
        *,
        seed: int | None = None,
        temperature: float | None = None,
        ids: str | None = None,
        declared: bool = False,
        anonymous: bool = False,
    ):
        """`seed` and `temperature` are those of calls that bring none; ids of calls are made of
        `ids`, else of the name.

        Nobody can ask for an `anonymous` session again.
        """
        self.name = name
        self.seed = seed
        self.temperature = temperature
        self.declared = declared
        self.anonymous = anonymous
        self.opened = time.monotonic()
        self.spending = Spending(budget, self.opened)
        self.replies = Replies()
        self.stored = StoredResponses()
        self.calls: dict[int, Call] = {}
        self.closed = False
        self._chat = chat
        self.ids = name if ids is None else ids
        self._requests = 0
        self._draws = 0
        self._children: dict[Place, Call] = {}  # the first call that goes on from a completion
        self._failed: dict[bytes, list[int]] = {}  # digest -> draws whose retry may come
        self._pieces: dict[str, np.ndarray] = {}  # ids of the text in the newest prompt
        self._read: dict[str, np.ndarray] = {}

    def arrive(self, digest: bytes, retried: bool) -> Attempt:
        """Takes note of a call that arrives; `retried`: the client says it is a retry.

        A failed or aborted attempt at the same request makes this its retry. So does the
        client's word, and then the newest attempt, finished or running, is taken as never
        received.
        """
        number = self._requests
        self._requests += 1
        draws = self._failed.get(digest)
        if draws is None and retried:
            attempts = [c for c in self.calls.values() if c.digest == digest and not c.aborted]
            if attempts:
                self._give_up(attempts[-1])
                draws = self._failed[digest]
        if draws is None:
            draw = self._draws
            self._draws += 1
            return Attempt(number=number, draw=draw, digest=digest, resent=False)
        draw = draws.pop(0)
        if not draws:
            del self._failed[digest]
        return Attempt(number=number, draw=draw, digest=digest, resent=True)

    def lineage(
        self,
        attempt: Attempt,
        prompt: Prompt,
        parent: Completion | None,
        talk: Talk | None,
        messages: Sequence[Message],
    ) -> Lineage:
        """What a call that begins takes over from those before it; `parent`: the completion
        that its prompt goes on from, token by token."""
        branch, gone_on = self._branch(attempt, parent, talk, messages)
        redone = 0
        if gone_on is not None:
            before = np.concatenate([gone_on.request.prompt, gone_on.output])
            redone = len(before) - common_prefix(before, prompt.ids)
        return Lineage(
            branch=branch,
            replies=dict(Counter(reply.rule for reply in prompt.replies)),
            spliced_tokens=sum(reply.tokens for reply in prompt.replies),
            retokenised=sum(reply.retokenised for reply in prompt.replies),
            redone=redone,
        )

    def _branch(
        self,
        attempt: Attempt,
        parent: Completion | None,
        talk: Talk | None,
        messages: Sequence[Message],
    ) -> tuple[Branch, Completion | None]:
        """The label, and the completion whose talk goes on in other tokens."""
        calls = [call for call in self.calls.values() if not call.aborted]
        same = [call for call in self.calls.values() if call.digest == attempt.digest]
        if attempt.resent and any(call.aborted for call in same):
            return Branch.RESENT, None
        same = [call for call in same if not call.aborted]
        if same:
            return Branch.REPEATED if same[-1].finished else Branch.PARALLEL, None
        if parent is not None and not self.gone_on(parent):
            return Branch.CONTINUE, None
        if talk is None:
            return Branch.UNKNOWN if calls else Branch.ROOT, None
        compared = [(call.talk, call) for call in calls if call.talk is not None][-COMPARED:]
        earlier = [_earlier(talk_before, call) for talk_before, call in compared]
        found = branch_of(talk, messages, earlier)
        if found.goes_on is None:
            return found.branch, None
        index, choice = found.goes_on
        return found.branch, ended(compared[index][1])[choice]

    def gone_on(self, completion: Completion) -> bool:
        """Whether a call continues a completion already."""
        return self._continued(completion.place)

    def _continued(self, place: Place) -> bool:
        child = self._children.get(place)
        return child is not None and not child.aborted

    def seed_of(self, draw: int) -> int | None:
        """The seed of a call that brings none; None if the session has none either."""
        return None if self.seed is None else stable_seed(self.seed, draw)

    def call_id(self, number: int) -> str:
        """24 characters that no other call has, if no other session's ids are made of the same."""
        return hashlib.blake2b(f"{self.ids}/{number}".encode(), digest_size=12).hexdigest()

    def read_anew(self) -> None:
        """Another prompt is read; that of a call that never began is forgotten."""
        self._read = {}

    def encode(self, text: str) -> np.ndarray:
        """i32[n], ids of a piece of a prompt; the newest prompt's pieces are remembered."""
        ids = self._pieces.get(text)
        if ids is None:
            ids = np.array(self._chat.tokenizer.encode(text), np.int32)
        self._read[text] = ids
        return ids

    def begin(self, call: Call) -> None:
        """Takes a call that is about to be drawn."""
        self.calls[call.number] = call
        parent = call.completions[0].parent
        if parent is not None and not self._continued(parent):
            self._children[parent] = call
        self._pieces, self._read = self._read, {}

    def learn(self, completion: Completion) -> None:
        """Lets a completion be found again, once it has finished."""
        if completion.finish not in (None, Finish.ABORT):
            self.replies.add(completion)

    def refuse(self, call: Call) -> None:
        """The engine would not serve the call: there is nothing to record but its failure."""
        self.abort(call)
        if not any(completion.started for completion in call.completions):
            self.calls.pop(call.number, None)

    def abort(self, call: Call) -> None:
        """The call failed or nobody received it: what was sampled stays, as aborted."""
        if self.closed or call.delivered or call.aborted:
            return
        for completion in call.completions:
            self.replies.discard(completion)
        self.stored.discard(response_id(call.id))
        call.abort()
        self._failed.setdefault(call.digest, []).append(call.draw)
        while len(self._failed) > FAILURES_KEPT:
            del self._failed[next(iter(self._failed))]

    def _give_up(self, call: Call) -> None:
        """Nobody waits for the answer of `call` any more, whatever was sent of it."""
        call.delivered = False
        self.abort(call)
        if call.task is not None:
            call.task.cancel()

    def forget(self, call: Call) -> None:
        """Drops a call from the record."""
        for completion in call.completions:
            self._children.pop(completion.place, None)
            self.replies.discard(completion)
        self.stored.discard(response_id(call.id))
        self.calls.pop(call.number, None)

    def close(self) -> tuple[Turn, ...]:
        """Ends the session, aborting the calls nobody has the whole answer of; gives its turns."""
        self.closed = True
        for call in self.calls.values():
            if not call.delivered:
                call.abort()
                if call.task is not None:
                    call.task.cancel()
        return tuple(turn for _, _, turn in self.turns())

    def turns(self) -> list[tuple[Call, Completion, Turn]]:
        """Every completion that ended, in order of arrival, between its call and its turn."""
        ended = [
            (call, completion)
            for call in self.calls.values()
            for completion in call.completions
            if completion.finish is not None
        ]
        parents = {completion.place: i for i, (_, completion) in enumerate(ended)}
        return [
            (call, c, c.turn(parents, call.arrived, self.opened, agent_of(call.hints)))
            for call, c in ended
        ]


def ended(call: Call) -> list[Completion]:
    """The completions of a call that came to their end."""
    return [c for c in call.completions if c.finish not in (None, Finish.ABORT)]


def _earlier(talk: Talk, call: Call) -> Earlier:
    return Earlier(
        talk=talk,
        branch=call.completions[0].lineage.branch,
        replies=tuple(completion.message for completion in ended(call)),
        running=not call.finished,
    )


def stable_seed(*words: int) -> int:
    """A 31-bit seed, the same for the same words in every process."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def request_digest(path: str, body: Mapping[str, Any]) -> bytes:
    """Equal for two attempts at one request, streamed or not."""
    asked = {name: value for name, value in body.items() if name not in DELIVERY}
    text = json.dumps(asked, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16, person=path.encode()[-16:]).digest()
