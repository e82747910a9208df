"""Configurations of how a white-box agent keeps its context small.

Keys of a configuration flow in, a frozen record out. The invariant: a key that would have no
effect beside the others is refused by name.
"""

from dataclasses import dataclass

from forge_jax.loading import check

POLICIES = ("none", "fixed", "threshold", "tool")
# What is done to a context; see the methods of `agents.context.Context`.
OPERATIONS = ("drop_oldest", "drop_tool_results", "truncate", "summarise", "fold", "note")
WRITTEN = ("summarise", "fold", "note")  # that put a text of the model's in the place of others
KEEPING = ("drop_oldest", "drop_tool_results", "note")  # that leave the newest as it is


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """When something is done to a context, and what."""

    policy: str = "none"  # fixed: every so many replies | threshold | tool: when the model calls it
    operation: str | None = None
    every: int | None = None  # fixed: replies from one operation to the next
    budget: int | None = None  # tokens of a context; an episode that needs more ends with reward 0
    share: float | None = None  # threshold: of the budget, from which on the operation is due
    keep: int | None = None  # newest rounds that stay; of drop_tool_results newest results
    characters: int | None = None  # truncate: that stay of a text which is not the model's
    max_tokens: int | None = None  # of a text that the model is asked for; null: of any reply

    def __post_init__(self) -> None:
        check(self.policy in POLICIES, f"policy={self.policy!r} must be one of {POLICIES}")
        managed = self.policy != "none"
        if managed:
            wanted = self.operation in OPERATIONS
            check(wanted, f"operation={self.operation!r} must be one of {OPERATIONS}")
        keeping, written = self.operation in KEEPING, self.operation in WRITTEN
        asked = written and self.policy in ("fixed", "threshold")
        self._goes("operation", managed, "a policy but none")
        self._goes("every", self.policy == "fixed", "policy=fixed")
        self._goes("share", self.policy == "threshold", "policy=threshold")
        self._goes("keep", keeping, f"operation of {KEEPING}")
        self._goes("characters", self.operation == "truncate", "operation=truncate")
        if not asked:
            refused = f"max_tokens={self.max_tokens} goes with a text that the model is asked for"
            check(self.max_tokens is None, refused)
        check(
            self.policy != "threshold" or self.budget is not None,
            "policy=threshold needs budget",
        )
        for name in ("every", "budget", "characters", "max_tokens"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name}={value} must be at least 1")
        check(self.keep is None or self.keep >= 0, f"keep={self.keep} must be >= 0")
        check(self.share is None or 0 < self.share <= 1, f"share={self.share} must be in (0, 1]")

    def _goes(self, name: str, wanted: bool, what: str) -> None:
        """The key `name` is there if and only if it is wanted."""
        value = getattr(self, name)
        check((value is not None) == wanted, f"{name}={value} goes with {what}, which needs it")
