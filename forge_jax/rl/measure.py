"""Numbers about what was consumed and trained: one row a step, and totals of the run.

Consumed items and packed batches go in, plain JSON comes out; nothing is measured here that
the final weights do not depend on.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.rl.collect import Taken
from forge_jax.rl.credit import LeftOut
from forge_jax.sched.split import forest_of
from forge_jax.types import STEMS, UNSPLICED, Episode, MicroBatch, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Running sums of a run; part of its checkpoints, so a resume continues them."""

    episodes: int = 0
    tokens_sampled: int = 0  # by consumed episodes
    tokens_trained: int = 0  # occurrences in the loss of steps that were taken
    updates_skipped: int = 0  # steps not taken, though there was something to train on
    tokens_total: int = 0  # of all trained samples, one row each
    tokens_unique: int = 0  # of their trees
    lag_sum: int = 0
    lag_max: int = 0
    items: int = 0
    seconds: float = 0.0  # wall time, all sessions
    eval_before: float | None = None  # success of the warm-started policy
    evals_before: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of each domain
    faults_before: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of its calls

    def add(self, row: dict[str, Any]) -> "Totals":
        """The totals after one more step, described by its row."""
        return dataclasses.replace(
            self,
            episodes=self.episodes + row["episodes"],
            tokens_sampled=self.tokens_sampled + row["tokens_sampled"],
            tokens_trained=self.tokens_trained + row["tokens_trained"],
            updates_skipped=self.updates_skipped + (row["skipped"] is not None),
            tokens_total=self.tokens_total + row["tokens_total"],
            tokens_unique=self.tokens_unique + row["tokens_unique"],
            lag_sum=self.lag_sum + sum(row["lags"]),
            lag_max=max([self.lag_max, *row["lags"]]),
            items=self.items + len(row["items"]),
        )


def episode_row(taken: Sequence[Taken]) -> dict[str, Any]:
    """What the consumed items were: rewards, calls, lags, and outcomes that did not complete.

    Rewards, calls and what agents measured themselves (``agent_*``) are means over the valid
    episodes; `calls_parallel` is the share of replies with tool calls that have several, None
    where agents do not tell; `error` is that of the first episode that is not valid.
    """
    episodes = [e for item in taken for e in item.episodes]
    valid = [e for e in episodes if e.outcome.valid]
    lags = [item.lag for item in taken]
    invalid = [e.outcome for e in episodes if not e.outcome.valid]
    measured = [(name, x) for e in valid for name, x in e.outcome.metrics.items()]
    agents = {f"agent_{n}": mean([x for m, x in measured if m == n]) for n in dict(measured)}
    return {
        "items": [item.number for item in taken],
        "lags": lags,
        "lag_mean": float(np.mean(lags)),
        "lag_max": max(lags),
        "lag_updates_max": max(item.updates for item in taken),
        "episodes": len(episodes),
        "reward": mean([e.outcome.reward for e in valid]),
        "mean_turns": mean([len(e.turns) for e in valid]),
        "calls_parallel": parallel_share(valid),
        "failed": Counter(outcome.status.value for outcome in invalid),
        "error": invalid[0].error if invalid else None,
        "corrupt_items": sum(not item.episodes for item in taken),
        "tokens_sampled": sum(len(t.output) for e in episodes for t in e.turns),
        **agents,
    }


def parallel_share(episodes: Sequence[Episode]) -> float | None:
    """Of replies with tool calls the share that have several; None of none."""
    told = [e.outcome.metrics for e in episodes if "calling_replies" in e.outcome.metrics]
    calling = sum(one["calling_replies"] for one in told)
    return sum(one["parallel_replies"] for one in told) / calling if calling else None


def lineage_row(taken: Sequence[Taken]) -> dict[str, Any]:
    """How the consumed calls came out of those before them, of all whose lineage was recorded.

    `fork_rate` is the share of calls that begin a branch, `splice_rate` that of the assistant
    messages in prompts whose sampled tokens stand there, `retokenised_rate` that of these tokens
    which their text would not have become again; None of nothing.
    """
    turns = [turn for item in taken for e in item.episodes for turn in e.turns]
    known = [turn.lineage for turn in turns if turn.lineage is not None]
    forks = Counter(one.branch.value for one in known if one.branch not in STEMS)
    replies: Counter[str] = Counter()
    for one in known:
        replies.update({rule.value: count for rule, count in one.replies.items()})
    spliced = replies.total() - sum(replies[rule] for rule in UNSPLICED)
    tokens = sum(one.spliced_tokens for one in known)
    retokenised = sum(one.retokenised for one in known)
    return {
        "fork_rate": forks.total() / len(known) if known else None,
        "forks": forks,
        "splice_rate": spliced / replies.total() if replies else None,
        "replies": replies,
        "retokenised_rate": retokenised / tokens if tokens else None,
        "tokens_spliced": tokens,
        "tokens_retokenised": retokenised,
        "tokens_redone": sum(one.redone for one in known),
    }


def batch_row(
    left: Mapping[LeftOut, int], samples: Sequence[Sample], batches: Sequence[MicroBatch]
) -> dict[str, Any]:
    """What was trained: token counts of the merged batch, and of what was `left` out of it.

    `tokens_sampled` of the consumed items = `tokens_trained` + all ``tokens_left_out_*``; where
    updates are skipped, their tokens are in `tokens_skipped` and not in `tokens_trained`.
    """
    total = sum(len(s.tokens) for s in samples)
    trees = [forest_of(part) for part in batches]
    unique = sum(tree.n_tokens for tree in trees)
    return {
        "samples": len(samples),
        "tokens_total": total,
        "tokens_unique": unique,
        "tokens_trained": sum(tree.n_occurrences for tree in trees),
        "tree_token_ratio": total / unique if unique else None,
        "micro_batches": len(batches),
        **{f"tokens_left_out_{why}": left.get(why, 0) for why in LeftOut},
    }


def version_row(turns: Sequence[Turn], version: int) -> dict[str, float | None]:
    """How many updates the oldest token of each trained call is behind weights `version`, and the
    share of calls that more than one version sampled; None of nothing."""
    lags = [version - int(turn.versions.min()) for turn in turns]
    mixed = [bool(turn.versions.min() != turn.versions.max()) for turn in turns]
    return {
        "version_lag_mean": mean(lags),
        "version_lag_max": max(lags, default=None),
        "versions_mixed": mean(mixed),
    }


def drafts_row(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What an engine's drafts came to between two of its `stats()`; nothing where none was checked.

    `acceptance` is the share of checked drafts that were accepted, `acceptance_i` of the i-th of a
    verify; `speculation_speedup` compares seconds, see `rollout.speculator`.
    """
    gained = {name: value - before.get(name, 0) for name, value in now.items()}
    if not gained.get("draft_tokens"):
        return {}
    row = {
        "acceptance": gained["accepted_tokens"] / gained["draft_tokens"],
        "tokens_per_verify": 1 + gained["accepted_tokens"] / gained["drafts"],
    }
    for name, tried in gained.items():
        place = name.removeprefix("draft_tokens_")
        if place != name and tried:
            row[f"acceptance_{place}"] = gained[f"accepted_tokens_{place}"] / tried
    if gained["decode_seconds"]:
        row["speculation_speedup"] = gained["decode_seconds_undrafted"] / gained["decode_seconds"]
    return row


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return float(np.mean(values)) if len(values) else None
