"""How a call came out of the calls of its session before it.

Frozen records of plain values; `forge_jax.types` has them too. Invariant: a call either
continues one before it, token by token, or has a branch with a reason.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Branch(enum.StrEnum):
    """Where in the tree of its session a call begins, and why there."""

    ROOT = "root"  # the session's conversation begins
    CONTINUE = "continue"  # its prompt begins with prompt and output of its parent
    # All others are forks.
    RESENT = "resent"  # the same request again: an attempt before was begun and given up
    REPEATED = "repeated"  # the same conversation again, though its answer had arrived
    PARALLEL = "parallel"  # beside a call that still runs, or one of n > 1 completions
    FRESH = "fresh"  # a conversation of its own, under the same system prompt
    SIDE_CALL = "side_call"  # another conversation, without tools or of another system prompt
    COMPACTION = "compaction"  # asks for a summary of the talk, or begins anew behind one
    SYSTEM_CHANGED = "system_changed"  # the talk goes on under another system prompt
    TOOLS_CHANGED = "tools_changed"  # ... with other tools
    TRUNCATED = "truncated"  # messages of the talk were left out or cut
    HISTORY_EDITED = "history_edited"  # messages of the talk are others
    RERENDERED = "rerendered"  # the same messages go on, in other tokens
    UNKNOWN = "unknown"  # a prompt of text or ids that continues none


STEMS = (Branch.ROOT, Branch.CONTINUE)  # that are no forks


class Rule(enum.StrEnum):
    """How an assistant message of a prompt was known as one that the session sampled."""

    CALL_ID = "call_id"  # the id of a tool call
    ITEM_ID = "item_id"  # the id of an item of a response
    CONTENT = "content"  # what it says
    CONTENT_WITH_STOP = "content_with_stop"  # ... with the stop string that was cut off
    TEXT_DROPPED = "text_dropped"  # the id of a tool call; the text beside it is gone
    # Of these the sampled tokens are not in the prompt.
    NOT_KEPT = "not_kept"  # known, but the template does not write all of it
    FOREIGN = "foreign"  # nobody sampled it so


UNSPLICED = (Rule.NOT_KEPT, Rule.FOREIGN)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What a call took over from those before it."""

    branch: Branch
    # Assistant messages of the prompt by the rule they were known by; absent: 0.
    replies: Mapping[Rule, int] = field(default_factory=dict)
    spliced_tokens: int = 0  # of the prompt, put there as they were sampled
    retokenised: int = 0  # of those, how many their text would not have become again
    redone: int = 0  # tokens of the call whose messages go on here that are others in this prompt
