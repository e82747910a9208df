"""What observers are told of requests, however these end; metrics, logs and the watchdog."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from experiments.watch import WatchConfig, watched
from forge_jax.config import UserError
from forge_jax.rollout.observe.exposition import Exposition
from forge_jax.rollout.observe.request_log import RequestLog
from forge_jax.rollout.observe.totals import together
from forge_jax.rollout.observe.watchdog import Watchdog
from forge_jax.rollout.observe.watched import Seen, Watched
from forge_jax.types import Chunk, Finish, Refused, Request, Sampling

STATS = {
    "requests_running": 2, "requests_waiting": 3, "weight_version": 7, "swaps": 1,
    "pages_total": 10, "pages_free": 4, "pages_cached": 1, "tier_host_pages": 5,
    "drafts": 10, "draft_tokens": 30, "accepted_tokens": 12, "tier_invalidated": 4,
    "accepted_tokens_1": 8, "accepted_tokens_2": 4, "decode_seconds": 2.0,
    "decode_seconds_undrafted": 3.0,
}  # fmt: skip


class Played:
    """An engine that plays: tokens a chunk, then how it ends."""

    def __init__(self, *chunks: int, end: Finish | Exception | None = Finish.STOP):
        self.chunks, self.end = chunks, end
        self.stuck = asyncio.Event()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        for place, count in enumerate(self.chunks):
            last = place == len(self.chunks) - 1 and isinstance(self.end, Finish)
            yield Chunk(
                ids=np.zeros(count, np.int32),
                logprobs=np.zeros(count, np.float32),
                versions=np.full(count, 6 + place, np.int32),
                finish=self.end if last else None,  # type: ignore[arg-type]
                queue_seconds=0.25,
                cached_tokens=3,
            )
        if isinstance(self.end, Exception):
            raise self.end
        if self.end is None:
            await self.stuck.wait()


def request(length: int = 5) -> Request:
    return Request(prompt=np.zeros(length, np.int32), sampling=Sampling())


async def drained(engine: Watched, closing_after: int | None = None) -> None:
    async with contextlib.aclosing(engine.generate(request())) as chunks:
        count = 0
        async for _ in chunks:
            count += 1
            if count == closing_after:
                return


def lines_of(text: str) -> dict[str, float]:
    found = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    assert len(dict(found)) == len(found), "a series is told twice"
    return {name: float(value) for name, value in found}


def test_every_request_ends_once_whatever_ends_it() -> None:
    lines: list[str] = []
    began: Counter[int] = Counter()

    class Counting(RequestLog):
        def began(self, seen: Seen) -> None:
            began[seen.number] += 1

    async def test() -> None:
        log = Counting(lines.append)
        await drained(Watched(Played(1, 2), [log]))
        await drained(Watched(Played(4, end=Finish.LENGTH), [log]))
        await drained(Watched(Played(1, 1, 1), [log]), closing_after=2)
        with pytest.raises(Refused):
            await drained(Watched(Played(end=Refused(429, "full")), [log]))
        with pytest.raises(ZeroDivisionError):
            await drained(Watched(Played(2, end=ZeroDivisionError()), [log]))
        task = asyncio.create_task(drained(Watched(Played(1, end=None), [log])))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
    told = [json.loads(line) for line in lines]
    assert sum(began.values()) == len(told) == 6
    assert [line["finish"] for line in told] == [
        "stop", "length", "abort", "refused", "failed", "abort",
    ]  # fmt: skip
    assert [line["output_tokens"] for line in told] == [3, 4, 2, 0, 2, 1]
    assert told[0] | {"time": 0, "ttft_seconds": 0, "seconds": 0, "seconds_per_token": 0} == {
        "time": 0, "event": "request", "number": 0, "finish": "stop", "prompt_tokens": 5,
        "cached_tokens": 3, "output_tokens": 3, "queue_seconds": 0.25, "ttft_seconds": 0,
        "seconds": 0, "seconds_per_token": 0, "versions": [6, 7],
    }  # fmt: skip
    assert told[3]["ttft_seconds"] is None is told[3]["versions"]
    assert 0 <= told[0]["ttft_seconds"] <= told[0]["seconds"]


def test_metrics_by_the_names_of_vllm() -> None:
    exposition = Exposition("tiny", lambda: STATS)

    async def test() -> None:
        engine = Watched(Played(1, 4), [exposition])
        await drained(engine)
        await drained(engine)
        with pytest.raises(Refused):
            await drained(Watched(Played(end=Refused(429, "full")), [exposition]))

    asyncio.run(test())
    found = lines_of(exposition.text())
    model = '{model_name="tiny"}'
    assert {name: found[f"{name}{model}"] for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count",
        "vllm:request_queue_time_seconds_sum",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "forge_weight_version", "forge_kv_invalidated_total", "forge_stale_tokens_total",
        "forge_acceptance", "forge_tokens_per_verify", "forge_request_failures_total",
        "forge_speculation_speedup",
    )} == {
        "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": pytest.approx(0.5),
        "vllm:prefix_cache_queries_total": 10, "vllm:prefix_cache_hits_total": 6,
        "vllm:prompt_tokens_total": 10, "vllm:generation_tokens_total": 10,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:spec_decode_num_drafts_total": 10, "vllm:spec_decode_num_draft_tokens_total": 30,
        "vllm:spec_decode_num_accepted_tokens_total": 12,
        "forge_weight_version": 7, "forge_kv_invalidated_total": 4, "forge_stale_tokens_total": 2,
        "forge_acceptance": pytest.approx(0.4), "forge_tokens_per_verify": pytest.approx(2.2),
        "forge_request_failures_total": 1, "forge_speculation_speedup": pytest.approx(1.5),
    }  # fmt: skip
    places = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="%d"}'
    assert [found[places % place] for place in (0, 1)] == [8, 4]
    ends = 'vllm:request_success_total{finished_reason="%s",model_name="tiny"}'
    assert [found[ends % finish] for finish in ("stop", "length", "abort")] == [2, 0, 0]
    pages = 'forge_kv_pages{model_name="tiny",tier="%s"}'
    assert (found[pages % "device"], found[pages % "host"]) == (6, 5)


def test_what_an_engine_does_not_count_is_not_told() -> None:
    found = lines_of(Exposition("tiny", dict).text())
    assert "vllm:prompt_tokens_total" in {name.partition("{")[0] for name in found}
    absent = {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "forge_acceptance"}
    assert not absent & {name.partition("{")[0] for name in found}


def test_the_watchdog_reports_a_stuck_engine_once_and_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "reports"

    async def test() -> None:
        with open(file, "w") as out, Watchdog(0.1, lambda: STATS, out) as dog:
            await asyncio.sleep(0.25)
            assert dog.reports == 0, "nothing runs, so nothing hangs"
            stuck = Played(1, end=None)
            task = asyncio.create_task(drained(Watched(stuck, [dog])))
            await asyncio.sleep(0.5)
            assert dog.reports == 1, "once while nothing moves"
            await drained(Watched(Played(1), [Renumbered(dog)]))
            await asyncio.sleep(0.3)
            assert dog.reports == 2, "it moved, and stood still again"
            stuck.stuck.set()
            await task
            await asyncio.sleep(0.25)
            assert dog.reports == 2

    asyncio.run(test())
    first, *rest = file.read_text().splitlines()
    told = json.loads(first)
    assert told["stats"] == STATS
    assert told["seconds_still"] >= 0.1
    assert [(r["number"], r["output"]) for r in told["requests"]] == [(0, 1)]
    assert any("test_observe.py" in line for line in rest), "stacks of all threads"


class Renumbered:
    """Gives requests of a second engine numbers of their own."""

    def __init__(self, dog: Watchdog):
        self._dog = dog

    def began(self, seen: Seen) -> None:
        seen.number += 1000
        self._dog.began(seen)

    def told(self, seen: Seen, chunk: Chunk, gap: float | None) -> None:
        self._dog.told(seen, chunk, gap)

    def ended(self, seen: Seen) -> None:
        self._dog.ended(seen)


def test_the_watchdog_sees_an_event_loop_that_hangs(tmp_path: Path) -> None:
    async def test() -> None:
        with open(tmp_path / "reports", "w") as out, Watchdog(0.1, dict, out) as dog:
            chunks = Watched(Played(1, end=None), [dog]).generate(request())
            await anext(chunks)
            time.sleep(0.4)
            assert dog.reports == 1
            await chunks.aclose()

    asyncio.run(test())


def test_a_server_watches_as_it_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        cfg = WatchConfig(log=str(tmp_path / "requests.jsonl"))
        with watched(cfg, Played(2), dict, "tiny") as (engine, text):
            await drained(engine)  # type: ignore[arg-type]
            assert lines_of(text())['vllm:generation_tokens_total{model_name="tiny"}'] == 2

    asyncio.run(test())
    [line] = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert json.loads(line)["output_tokens"] == 2
    with (
        pytest.raises(UserError, match=r"watch\.log="),
        watched(WatchConfig(log=str(tmp_path)), Played(1), dict, "tiny"),
    ):
        pass
    with pytest.raises(ValueError, match=r"still_seconds=0\.0"):
        WatchConfig(still_seconds=0.0)


def test_tokens_that_come_together_share_the_time_before_them() -> None:
    exposition = Exposition("tiny", dict)
    chunk = Chunk(
        ids=np.zeros(4, np.int32), logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32)
    )
    exposition.told(Seen(number=0, prompt=1, arrived=0.0), chunk, 2.0)
    found = lines_of(exposition.text())
    name = 'vllm:inter_token_latency_seconds_%s{model_name="tiny"}'
    assert (found[name % "count"], found[name % "sum"]) == (4, 2.0)


def test_counts_of_engines_add_up_and_rates_do_not() -> None:
    quiet = {"drafts": 0, "accepted_tokens": 0, "tokens_per_verify": 1.0, "weight_version": 3}
    busy = {"drafts": 10, "accepted_tokens": 5, "tokens_per_verify": 1.5, "weight_version": 2}
    one = {"acceptance_1": 0.5, "speedup_4": 1.2, "slot_utilisation": 0.25}
    other = {"acceptance_1": 0.7, "speedup_8": 1.4, "slot_utilisation": 0.75}
    assert together([quiet | one, busy | other]) == {
        "drafts": 10, "accepted_tokens": 5, "tokens_per_verify": 1.5, "weight_version": 2,
        "acceptance_1": pytest.approx(0.6), "speedup_4": 1.2, "speedup_8": 1.4,
        "slot_utilisation": 0.5,
    }  # fmt: skip
    assert together([quiet, quiet])["tokens_per_verify"] == 1
    assert together([]) == {}
