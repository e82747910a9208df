"""What there is to tell of a scheduler, under the names that logs and metrics have for it."""

from forge_jax.rollout.scheduler import Scheduler
from forge_jax.types import Finish


def gauges(scheduler: Scheduler) -> dict[str, float]:
    """Gauges and running totals."""
    counts, memory = scheduler.counts, scheduler.memory
    rounds = counts["slot_rounds"]
    return {
        "requests_running": scheduler.running,
        "requests_waiting": scheduler.waiting,
        "requests_submitted": counts["submitted"],
        **{f"requests_{finish}": counts[finish] for finish in Finish},
        "preemptions": counts["preemptions"],
        "tokens_sampled": counts["sampled"],
        "tokens_prefilled": counts["prefill_tokens"],
        "tokens_cached": counts["cached_tokens"],
        "prefill_calls": counts["prefill_calls"],
        "decode_calls": counts["decode_calls"],
        "slot_utilisation": counts["busy_slot_rounds"] / rounds if rounds else 0.0,
        "pages_total": memory.pool.total,
        "pages_free": memory.pool.free,
        "pages_cached": memory.tree.evictable,
        "pages_shared": memory.tree.locked,
    }
