"""What a run came to, in one object: the contents of summary.json.

Rows of metrics, totals and evaluations flow in, plain JSON flows out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.config import TrainConfig
from forge_jax.rl.evaluate import Evaluation
from forge_jax.rl.measure import Totals, mean
from forge_jax.rl.mixture import lag_bound, shared, shares_row
from forge_jax.sched.lanes import Lanes


def summary_of(
    cfg: TrainConfig, rows: Sequence[Mapping[str, Any]], totals: Totals, after: Evaluation
) -> dict[str, Any]:
    """What holds of the run as a whole."""
    rewards = [row["reward"] for row in rows]  # None where no episode was valid
    tenth = max(1, len(rewards) // 10)
    faults = {"eval_before_faults": totals.faults_before, "eval_after_faults": after.faults}
    return {
        "steps": cfg.steps,
        "reward_first": mean([r for r in rewards[:tenth] if r is not None]),
        "reward_last": mean([r for r in rewards[-tenth:] if r is not None]),
        "eval_before": totals.eval_before,
        "eval_after": after.success,
        "eval_after_ci": after.success_ci,
        **(faults if after.faults else {}),
        "mean_turns": after.mean_turns,
        "episodes": totals.episodes,
        "tokens_sampled": totals.tokens_sampled,
        "tokens_trained": totals.tokens_trained,
        "updates_skipped": totals.updates_skipped,
        "tree_token_ratio": totals.tokens_total / max(1, totals.tokens_unique),
        "lag_mean": totals.lag_sum / max(1, totals.items),
        "lag_max": totals.lag_max,
        "lag_bound": lag_bound(cfg),
    }


def domain_summary(
    cfg: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    totals: Totals,
    after: Mapping[str, Evaluation],
    lanes: Lanes,
) -> dict[str, Any]:
    """What holds of each domain, under names that end in the domain's; nothing of one task."""
    if cfg.domains is None:
        return {}
    found: dict[str, Any] = {}
    for name, evaluation in after.items():
        found[f"eval_before_{name}"] = totals.evals_before.get(name)
        found[f"eval_after_{name}"] = evaluation.success
        found[f"eval_after_ci_{name}"] = evaluation.success_ci
        if cfg.eval.every is not None:
            past = [row[f"eval_{name}"] for row in rows if f"eval_{name}" in row]
            best = max([*past, totals.evals_before[name]])
            found[f"eval_forgotten_{name}"] = best - evaluation.success
    return found if shared(cfg) else found | shares_row(lanes)
