"""What there is to tell of a scheduler, under the names that logs and metrics have for it."""

from forge_jax.rollout.scheduler import Scheduler
from forge_jax.types import Finish


def gauges(scheduler: Scheduler) -> dict[str, float]:
    """Gauges and running totals."""
    counts, places = scheduler.counts, scheduler.places.all
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
        "pages_total": sum(place.pool.total for place in places),
        "pages_free": sum(place.pool.free for place in places),
        "pages_cached": sum(place.tree.evictable for place in places),
        "pages_shared": sum(place.tree.locked for place in places),
    }
