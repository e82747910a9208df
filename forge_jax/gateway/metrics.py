"""Counters of a gateway, in Prometheus' text format."""

from collections import Counter

from forge_jax.gateway.call import Call
from forge_jax.types import Branch, Finish, Rule

HELP = {
    "calls_running": ("gauge", "Calls being served"),
    "sessions": ("gauge", "Sessions in memory"),
    "calls_total": ("counter", "Calls that began"),
    "calls_over_budget_total": ("counter", "Calls refused because their session's budget is spent"),
    "completions_total": ("counter", "Completions by the way they ended"),
    "prompt_tokens_total": ("counter", "Tokens fed, each prompt once"),
    "cached_tokens_total": ("counter", "Of those, tokens read from a cache"),
    "sampled_tokens_total": ("counter", "Tokens sampled"),
    "tool_calls_malformed_total": ("counter", "Tool calls of replies that had to stay text"),
    "branches_total": ("counter", "Completions begun, by why they begin where they do"),
    "replies_total": ("counter", "Assistant messages in prompts, by the rule they were known by"),
    "spliced_tokens_total": ("counter", "Tokens of prompts put there as they were sampled"),
    "retokenised_tokens_total": (
        "counter",
        "Of those, tokens that their text had not become again",
    ),
    "redone_tokens_total": ("counter", "Tokens of talks that came back in other tokens"),
}
LABELS = {"completions_total": "finish", "branches_total": "branch", "replies_total": "rule"}


class Metrics:
    """Running totals over all calls."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._labelled: dict[str, Counter[str]] = {
            "completions_total": Counter(dict.fromkeys(Finish, 0)),
            "branches_total": Counter(dict.fromkeys(Branch, 0)),
            "replies_total": Counter(dict.fromkeys(Rule, 0)),
        }

    def begin(self, call: Call) -> None:
        """A call is about to be drawn."""
        self._counts["calls_running"] += 1
        self._counts["calls_total"] += 1
        for completion in call.completions:
            lineage = completion.lineage
            self._labelled["branches_total"][lineage.branch] += 1
            self._labelled["replies_total"].update(lineage.replies)
            self._counts["spliced_tokens_total"] += lineage.spliced_tokens
            self._counts["retokenised_tokens_total"] += lineage.retokenised
            self._counts["redone_tokens_total"] += lineage.redone

    def refuse(self) -> None:
        """A call's session has nothing left to spend."""
        self._counts["calls_over_budget_total"] += 1

    def end(self, call: Call) -> None:
        """A call has ended, however."""
        self._counts["calls_running"] -= 1
        self._counts["prompt_tokens_total"] += len(call.prompt.ids)
        self._counts["cached_tokens_total"] += call.completions[0].cached_tokens
        for completion in call.completions:
            self._labelled["completions_total"][completion.finish or Finish.ABORT] += 1
            self._counts["sampled_tokens_total"] += len(completion.output)
            self._counts["tool_calls_malformed_total"] += completion.malformed

    def text(self, sessions: int) -> str:
        """The exposition."""
        counts = {**self._counts, "sessions": sessions}
        lines = []
        for name, (kind, words) in HELP.items():
            lines += [f"# HELP forge_{name} {words}", f"# TYPE forge_{name} {kind}"]
            if name in LABELS:
                for value, count in self._labelled[name].items():
                    lines.append(f'forge_{name}{{{LABELS[name]}="{value}"}} {count}')
            else:
                lines.append(f"forge_{name} {counts.get(name, 0)}")
        return "\n".join(lines) + "\n"
