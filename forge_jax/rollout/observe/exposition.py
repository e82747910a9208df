"""What a rollout engine does, under the metric names that dashboards of vLLM read.

Watched requests and an engine's `stats()` flow in, Prometheus' text format flows out. What
vLLM has no name for begins with `forge_`.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forge_jax.rollout.observe.watched import Seen
from forge_jax.types import Chunk, Finish

Stats = Callable[[], Mapping[str, float]]

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)  # fmt: skip  # noqa: E501
LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0, 3600.0)  # fmt: skip  # noqa: E501

GAUGES = {  # metric: the number of `stats()` that it tells
    "vllm:num_requests_running": ("requests_running", "Requests that have a slot"),
    "vllm:num_requests_waiting": ("requests_waiting", "Requests that wait for one"),
    "forge_weight_version": ("weight_version", "Version of the weights that sample"),
    "forge_slot_utilisation": ("slot_utilisation", "Share of the slots that decode calls used"),
}
COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "Requests that lost their pages for others"),
    "vllm:spec_decode_num_drafts": ("drafts", "Drafts verified"),
    "vllm:spec_decode_num_draft_tokens": ("draft_tokens", "Tokens drafted"),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens accepted"),
    "forge_kv_invalidated": ("tier_invalidated", "Pages of weights that were replaced"),
    "forge_weight_updates": ("swaps", "Weight updates"),
    "forge_decode_calls": ("decode_calls", "Device calls that decoded"),
    "forge_prefilled_tokens": ("tokens_prefilled", "Prompt tokens that were computed"),
}
TIERS = {"device": "pages_used", "host": "tier_host_pages"}  # those that can be counted


class Exposition:
    """An `Observer` of one model's requests, and the numbers of its engine."""

    def __init__(self, model: str, stats: Stats):
        self._model = model
        self._stats = stats
        self._registry = CollectorRegistry()
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self._output = self._counter("vllm:generation_tokens", "Tokens sampled")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens looked up")
        self._hits = self._counter("vllm:prefix_cache_hits", "Of those, tokens found")
        self._stale = self._counter(
            "forge_stale_tokens", "Tokens of weights older than the newest when they were told"
        )
        self._ends = Counter(
            "vllm:request_success", "Requests by the way they ended",
            ("model_name", "finished_reason"), registry=self._registry,
        )  # fmt: skip
        for finish in Finish:
            self._ends.labels(model, str(finish))
        self._failures = self._counter("forge_request_failures", "Requests refused or failed")
        self._first = self._histogram("vllm:time_to_first_token_seconds", SHORT)
        self._between = self._histogram("vllm:inter_token_latency_seconds", SHORT)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", LONG)
        self._queue = self._histogram("vllm:request_queue_time_seconds", LONG)
        self._registry.register(self)

    def text(self) -> str:
        """The exposition."""
        return generate_latest(self._registry).decode()

    def began(self, seen: Seen) -> None:
        pass

    def told(self, seen: Seen, chunk: Chunk, gap: float | None) -> None:
        """Latencies and tokens; tokens that came together share the time before them."""
        if gap is None:
            assert seen.first is not None
            self._first.observe(seen.first - seen.arrived)
            self._queue.observe(seen.queued)
            self._prompt.inc(seen.prompt)
            self._queries.inc(seen.prompt)
            self._hits.inc(seen.cached)
        else:
            for _ in range(len(chunk.ids)):
                self._between.observe(gap / len(chunk.ids))
        self._output.inc(len(chunk.ids))
        newest = self._stats().get("weight_version")
        if newest is not None:
            self._stale.inc(int((chunk.versions < newest).sum()))

    def ended(self, seen: Seen) -> None:
        if seen.finish in tuple(Finish):
            self._ends.labels(self._model, seen.finish).inc()
            if seen.last is not None:
                self._whole.observe(seen.last - seen.arrived)
        else:
            self._failures.inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's own numbers as they are now: those that it has."""
        stats, labels = self._stats(), ("model_name",)
        for name, (source, words) in GAUGES.items():
            if source in stats:
                yield _told(
                    GaugeMetricFamily(name, words, labels=labels), self._model, stats[source]
                )
        for name, (source, words) in COUNTERS.items():
            if source in stats:
                counter = CounterMetricFamily(name, words, labels=labels)
                yield _told(counter, self._model, stats[source])
        if stats.get("pages_total"):
            usage = 1 - (stats["pages_free"] + stats["pages_cached"]) / stats["pages_total"]
            family = GaugeMetricFamily(
                "vllm:kv_cache_usage_perc", "Share of the pages that requests hold", labels=labels
            )
            yield _told(family, self._model, usage)
            yield self._pages(stats)
        if stats.get("draft_tokens"):
            accepted, drafted = stats["accepted_tokens"], stats["draft_tokens"]
            for name, value, words in (
                ("forge_acceptance", accepted / drafted, "Share of drafted tokens accepted"),
                ("forge_tokens_per_verify", 1 + accepted / stats["drafts"], "Tokens a verify"),
            ):
                yield _told(GaugeMetricFamily(name, words, labels=labels), self._model, value)
            yield self._places(stats)
        if stats.get("decode_seconds"):
            speedup = stats["decode_seconds_undrafted"] / stats["decode_seconds"]
            words = "Measured: seconds of decode calls without drafts over those with them"
            family = GaugeMetricFamily("forge_speculation_speedup", words, labels=labels)
            yield _told(family, self._model, speedup)

    def _places(self, stats: Mapping[str, float]) -> Metric:
        """Drafts accepted by their place in a verify, from 0."""
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(
            name, "Drafted tokens accepted, by place", labels=("model_name", "position")
        )
        for key, count in stats.items():
            place = key.removeprefix("accepted_tokens_")
            if place != key:
                family.add_metric((self._model, str(int(place) - 1)), count)
        return family

    def _pages(self, stats: Mapping[str, float]) -> Metric:
        numbers = {**stats, "pages_used": stats["pages_total"] - stats["pages_free"]}
        family = GaugeMetricFamily(
            "forge_kv_pages", "Pages that hold keys and values", labels=("model_name", "tier")
        )
        for tier, source in TIERS.items():
            if source in numbers:
                family.add_metric((self._model, tier), numbers[source])
        return family

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        words = name.partition(":")[2].replace("_", " ")
        return Histogram(
            name, words, ("model_name",), registry=self._registry, buckets=buckets
        ).labels(self._model)


def _told(family: GaugeMetricFamily | CounterMetricFamily, model: str, value: float) -> Metric:
    family.add_metric((model,), value)
    return family
