"""Counters of a gateway, in Prometheus' text format."""

from collections import Counter

from forge_jax.gateway.call import Call
from forge_jax.types import Finish

HELP = {
    "calls_running": ("gauge", "Calls being served"),
    "sessions": ("gauge", "Sessions in memory"),
    "calls_total": ("counter", "Calls that began"),
    "completions_total": ("counter", "Completions by the way they ended"),
    "prompt_tokens_total": ("counter", "Tokens fed, each prompt once"),
    "cached_tokens_total": ("counter", "Of those, tokens read from a cache"),
    "sampled_tokens_total": ("counter", "Tokens sampled"),
    "tool_calls_malformed_total": ("counter", "Tool calls of replies that had to stay text"),
    "replies_spliced_total": ("counter", "Replies in prompts that are the sampled tokens"),
    "replies_foreign_total": ("counter", "Assistant messages in prompts that nobody sampled so"),
}


class Metrics:
    """Running totals over all calls."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._finishes: Counter[str] = Counter({str(finish): 0 for finish in Finish})

    def begin(self, call: Call) -> None:
        """A call is about to be drawn."""
        self._counts["calls_running"] += 1
        self._counts["calls_total"] += 1
        self._counts["replies_spliced_total"] += call.prompt.spliced
        self._counts["replies_foreign_total"] += call.prompt.foreign

    def end(self, call: Call) -> None:
        """A call has ended, however."""
        self._counts["calls_running"] -= 1
        self._counts["prompt_tokens_total"] += len(call.prompt.ids)
        self._counts["cached_tokens_total"] += call.completions[0].cached_tokens
        for completion in call.completions:
            self._finishes[str(completion.finish or Finish.ABORT)] += 1
            self._counts["sampled_tokens_total"] += len(completion.output)
            self._counts["tool_calls_malformed_total"] += completion.malformed

    def text(self, sessions: int) -> str:
        """The exposition."""
        counts = {**self._counts, "sessions": sessions}
        lines = []
        for name, (kind, words) in HELP.items():
            lines += [f"# HELP forge_{name} {words}", f"# TYPE forge_{name} {kind}"]
            if name == "completions_total":
                for finish, count in self._finishes.items():
                    lines.append(f'forge_{name}{{finish="{finish}"}} {count}')
            else:
                lines.append(f"forge_{name} {counts.get(name, 0)}")
        return "\n".join(lines) + "\n"
