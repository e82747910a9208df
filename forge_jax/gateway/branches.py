"""Why a call is no continuation: its talk compared with those of earlier calls.

Canonical messages and tools of a call and of the calls before it flow in, a label flows out.
The invariant: the label depends on what was said and on what had ended, not on ids, headers
or names of clients. Texts are compared as messages are (`gateway.messages`): arguments as
values, text without white space around it, and beside a tool call not at all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forge_jax.gateway.messages import Conversation, Message, encoded
from forge_jax.types import Branch

SUMMARY = re.compile(r"summar(?:y|i[sz])|compaction", re.IGNORECASE)
SHORTEST = 12  # characters of a line that is taken for the same line elsewhere


@dataclass(frozen=True, kw_only=True, eq=False)
class Talk:
    """What a call told its model, as far as it has to be compared."""

    system: int  # key of the system messages that it begins with
    tools: int  # key of the tools
    has_tools: bool
    messages: np.ndarray  # i64[m], keys of all other messages
    lengths: np.ndarray  # i64[m], characters of each
    asked: bool  # the last message is a user's, and asks for a summary
    instructed: bool  # the system messages do


@dataclass(frozen=True, kw_only=True, eq=False)
class Earlier:
    """A call before, and how it stands now."""

    talk: Talk
    branch: Branch
    replies: tuple[Message, ...]  # of its completions, as they were told
    running: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """A label, and where the talk goes on from if only its tokens are others."""

    branch: Branch
    goes_on: tuple[int, int] | None = None  # which earlier call, which of its replies


def talk_of(conversation: Conversation) -> Talk:
    """A conversation, as far as it has to be compared."""
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    system, rest = [m.content.strip() for m in messages[:first]], messages[first:]
    last = rest[-1] if rest else None
    return Talk(
        system=hash(tuple(system)),
        tools=hash(encoded(conversation.tools)),
        has_tools=bool(conversation.tools),
        messages=np.array([message_key(m) for m in rest], np.int64),
        lengths=np.array([len(m.content) for m in rest], np.int64),
        asked=last is not None and last.role == "user" and bool(SUMMARY.search(last.content)),
        instructed=any(SUMMARY.search(text) for text in system),
    )


def message_key(message: Message) -> int:
    """Equal for messages that say the same."""
    text, calls = message.key
    return hash((message.role, "" if calls else text, calls))


def branch_of(talk: Talk, messages: Sequence[Message], earlier: Sequence[Earlier]) -> Found:
    """Why a call that continues none of the `earlier` ones begins where it does.

    `messages` are those of the call, its leading system messages included; `earlier` is in
    order of arrival.
    """
    if not earlier:
        return Found(branch=Branch.ROOT)
    shares = [_shared(talk, e.talk) for e in earlier]
    index = max(
        range(len(earlier)),
        key=lambda i: (shares[i], _same_system(talk, earlier[i]), _same_tools(talk, earlier[i]), i),
    )
    nearest, shared = earlier[index], shares[index]
    own = messages[len(messages) - len(talk.messages) :]
    if _compacts(talk, nearest, shared, earlier) or _behind_summary(own[shared:], earlier):
        return Found(branch=Branch.COMPACTION)
    if shared == 0:
        return Found(branch=_apart(talk, earlier))
    if not _same_system(talk, nearest):
        aside = not _same_tools(talk, nearest) and not talk.has_tools
        return Found(branch=Branch.SIDE_CALL if aside else Branch.SYSTEM_CHANGED)
    if not _same_tools(talk, nearest):
        return Found(branch=Branch.TOOLS_CHANGED)
    if nearest.running:
        return Found(branch=Branch.PARALLEL)
    return _rewritten(talk, nearest, shared, index)


def _rewritten(talk: Talk, nearest: Earlier, shared: int, index: int) -> Found:
    """The same system prompt and tools, and at least the first message."""
    kept = len(nearest.talk.messages)
    if shared == kept == len(talk.messages):
        return Found(branch=Branch.REPEATED)
    if shared == kept:
        said = int(talk.messages[kept])
        choice = next((i for i, r in enumerate(nearest.replies) if said in _reply_keys(r)), None)
        if choice is not None:
            return Found(branch=Branch.RERENDERED, goes_on=(index, choice))
    elif _shortened(talk, nearest.talk, shared):
        return Found(branch=Branch.TRUNCATED)
    return Found(branch=Branch.HISTORY_EDITED)


def _reply_keys(reply: Message) -> tuple[int, ...]:
    """What a reply may come back as: one of a thought alone may have been told as text."""
    alone = reply.thought and not reply.calls and not reply.content.strip()
    told = [replace(reply, content=reply.thought)] if alone else []
    return tuple(message_key(message) for message in (reply, *told))


def _shortened(talk: Talk, before: Talk, shared: int) -> bool:
    """True if messages were left out of the middle, or all that differ were cut."""
    rest, old = talk.messages[shared:], before.messages[shared:]
    if len(rest) and rest[0] in old[1:]:
        return True
    n = len(old)
    changed = rest[:n] != old[: len(rest)]
    cut = talk.lengths[shared:][:n] < before.lengths[shared:][: len(rest)]
    return n <= len(rest) and bool(np.all(cut[changed]))


def _apart(talk: Talk, earlier: Sequence[Earlier]) -> Branch:
    """Not even the first message is one that an earlier call began with."""
    alike = [e.talk for e in earlier if _same_system(talk, e) and _same_tools(talk, e)]
    if len(talk.messages) and any(talk.messages[0] in t.messages[1:] for t in alike):
        return Branch.TRUNCATED
    tools_before = any(e.talk.has_tools for e in earlier)
    if talk.has_tools and not tools_before:
        return Branch.ROOT  # what came before were side calls
    if talk.has_tools == tools_before and any(_same_system(talk, e) for e in earlier):
        return Branch.FRESH
    return Branch.SIDE_CALL


def _compacts(talk: Talk, nearest: Earlier, shared: int, earlier: Sequence[Earlier]) -> bool:
    """True for a request to sum up what was said, under other tools or another system prompt."""
    same = _same_system(talk, nearest) and _same_tools(talk, nearest)
    if talk.asked and shared > 0 and not same:
        return True
    new = not any(_same_system(talk, e) for e in earlier)
    return talk.instructed and new and not talk.has_tools


def _behind_summary(new: Sequence[Message], earlier: Sequence[Earlier]) -> bool:
    """True if one of the `new` messages holds a line of a summary that an earlier call wrote.

    A summary may come back as the assistant's own words only if nothing else was asked of it.
    """
    for call in earlier:
        if not (call.talk.asked or call.branch is Branch.COMPACTION):
            continue
        said = [line.strip() for reply in call.replies for line in reply.content.splitlines()]
        lines = [line for line in said if len(line) >= SHORTEST]
        alone = call.branch is Branch.COMPACTION
        heard = [m.content for m in new if alone or m.role != "assistant"]
        if any(line in text for text in heard for line in lines):
            return True
    return False


def _shared(one: Talk, other: Talk) -> int:
    """How many messages both begin with."""
    n = min(len(one.messages), len(other.messages))
    differ = np.flatnonzero(one.messages[:n] != other.messages[:n])
    return int(differ[0]) if len(differ) else n


def _same_system(talk: Talk, earlier: Earlier) -> bool:
    return talk.system == earlier.talk.system


def _same_tools(talk: Talk, earlier: Earlier) -> bool:
    return talk.tools == earlier.talk.tools
