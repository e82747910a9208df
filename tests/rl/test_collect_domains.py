"""Several domains in one step: their shares whatever their speeds, curricula, filters and restarts.

The players are fakes that end in a seeded order; lanes, pool and sources are the real ones.
"""

import asyncio
import dataclasses
import json
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_policy import make_turn
from small_run import config

from forge_jax.config import (
    CurriculumConfig,
    DomainConfig,
    FilterConfig,
    SchedConfig,
    TrainConfig,
    UserError,
)
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.rl.credit import says_nothing
from forge_jax.rl.mixture import domain_row, lane_sched, lanes_of, sources_of
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Outcome, Status, Task

SLOWER = 10  # turns of the event loop that an episode of the slow domain takes for one of the fast
TOKENS = {"fast": 5, "slow": 40}
LADDER = CurriculumConfig(levels=(0, 1, 2), promote=0.6, demote=0.3, memory=2)
DOMAINS = {
    "fast": DomainConfig(family="hop", share=3),
    "slow": DomainConfig(family="calc", share=1, curriculum=LADDER),
}


def mixed(filters: FilterConfig | None = None, **sched: Any) -> TrainConfig:
    sizes: dict[str, Any] = {"batch": 8, "in_flight": 16, "window": 8} | sched
    return dataclasses.replace(
        config(),
        task=None,
        domains=DOMAINS,
        sched=SchedConfig(**sizes),
        filter=filters or FilterConfig(),
    )


class Players:
    """Groups of two; what they are follows from the task, when they end from a seed."""

    def __init__(self, seed: int, constant: float = 0.0):
        self.rng, self.constant = np.random.default_rng(seed), constant
        self.played: list[int] = []

    async def play(self, number: int, task: Task) -> Group:
        self.played.append(number)
        slow = task.family == "calc"
        for _ in range(int(self.rng.integers(1, 4)) * (SLOWER if slow else 1)):
            await asyncio.sleep(0)
        drawn = np.random.default_rng([task.seed, task.level])
        equal, best = drawn.random() < self.constant, float(drawn.random() < 0.8)
        length = int(TOKENS["slow" if slow else "fast"] * drawn.uniform(0.5, 1.5))
        rewards = (best, best if equal else 1 - best)
        return tuple(
            Episode(
                item=number,
                replica=i,
                task=task,
                outcome=Outcome(status=Status.COMPLETED, reward=reward),
                turns=(make_turn([number % 100], [1] * length, [0] * length),),
            )
            for i, reward in enumerate(rewards)
        )


def collector(cfg: TrainConfig, folder: Path, players: Players) -> Collector:
    return Collector(
        lanes=lanes_of(cfg),
        pool=Pool.open(str(folder)),
        sources=sources_of(cfg),
        play=players.play,
        patience=60.0,
        filters=cfg.filter,
        constant=says_nothing,
    )


async def updates(one: Collector, count: int) -> list[list[Taken]]:
    found = []
    async with asyncio.TaskGroup() as workers:
        one.resume(workers)
        for _ in range(count):
            one.fill(workers)
            found.append(await one.take(workers))
            one.updated()
        one.cancel()
    return found


def tokens(item: Taken) -> int:
    return sum(len(turn.output) for episode in item.episodes for turn in episode.turns)


@pytest.mark.parametrize("shares", ["items", "tokens"])
def test_a_domain_ten_times_as_slow_keeps_its_share(tmp_path: Path, shares: str) -> None:
    cfg = mixed(shares=shares)
    one = collector(cfg, tmp_path, Players(0))
    batches = asyncio.run(updates(one, 25))
    consumed = [item for batch in batches for item in batch]
    numbers = [item.number for item in consumed]
    assert len(set(numbers)) == len(numbers) == 25 * 8
    counted: Counter[str] = Counter()
    for item in consumed:
        assert item.episodes[0].item == item.number
        assert item.episodes[0].task.family == DOMAINS[item.domain].family
        counted[item.domain] += 1 if shares == "items" else tokens(item)
    for name, share in (("fast", 0.75), ("slow", 0.25)):
        off = abs(counted[name] - share * counted.total())
        assert off <= (0 if shares == "items" else 2 * 1.5 * TOKENS["slow"])  # of one group
        assert off < 0.05 * counted.total()
    row = domain_row(cfg, batches[-1], one)
    assert row[f"share_{shares}_slow"] == counted["slow"] / counted.total()
    assert row["items_fast"] + row["items_slow"] == 8
    assert len({row[f"share_items_{n}"] / row[f"share_tokens_{n}"] for n in DOMAINS}) == 2


@pytest.mark.parametrize("shares", ["items", "tokens"])
def test_a_synchronous_run_resumed_is_the_uninterrupted_one(tmp_path: Path, shares: str) -> None:
    """Batch by batch, whatever finishes first: its items, their tasks and levels, the quotas."""
    cfg = mixed(FilterConfig(constant=True, tries=3), synchronous=True, in_flight=8, shares=shares)

    def told(batches: list[list[Taken]]) -> list[Any]:
        return [
            sorted(
                (item.number, item.domain, item.episodes[0].task.level, item.again) for item in b
            )
            for b in batches
        ]

    calm = told(asyncio.run(updates(collector(cfg, tmp_path / "calm", Players(0, 0.4)), 14)))
    broken: list[Any] = []
    state: dict[str, Any] | None = None
    for session in range(7):
        one = collector(cfg, tmp_path / "broken", Players(session + 1, 0.4))
        if state is not None:
            one.restore(state, version=0)
        broken += told(asyncio.run(updates(one, 2)))
        state = json.loads(json.dumps(one.state()))
    assert broken == calm
    assert {level for batch in calm for _, _, level, _ in batch} >= {0, 1}
    assert any(again for batch in calm for *_, again in batch)


def test_what_says_nothing_is_made_good_by_its_own_domain(tmp_path: Path) -> None:
    cfg = mixed(FilterConfig(constant=True, tries=4))
    batches = asyncio.run(updates(collector(cfg, tmp_path, Players(0, 0.5)), 20))
    lacking = 0
    for batch in batches:
        again = Counter(item.domain for item in batch if item.again)
        assert max(again.values(), default=0) <= 4
        assert all(says_nothing(item.episodes) for item in batch if item.again)
        kept = Counter(item.domain for item in batch if not item.again)
        assert kept == {"fast": 6, "slow": 2}
        for name in DOMAINS:
            silent = sum(
                says_nothing(item.episodes)
                for item in batch
                if item.domain == name and not item.again
            )
            lacking += silent
            assert not silent or again[name] == 4, "one was kept with tries left"
    assert lacking, "the tries never ran out"


def test_an_asynchronous_restart_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    cfg = mixed()
    first = collector(cfg, tmp_path, Players(0))
    early = asyncio.run(updates(first, 3))
    state = first.state()
    players = Players(1)
    second = collector(cfg, tmp_path, players)
    held = set(Pool.open(str(tmp_path)).items())
    second.restore(state, version=0)
    numbers = [i.number for b in early + asyncio.run(updates(second, 12)) for i in b]
    assert len(set(numbers)) == len(numbers)
    assert not held & set(players.played)
    for lane in (0, 1):  # all that the first session had admitted was consumed
        own = sorted(n // 2 for n in numbers if n % 2 == lane)
        admitted = state["lanes"]["queues"][("fast", "slow")[lane]]["admitted"]
        assert own[:admitted] == list(range(admitted))


def test_a_checkpoint_of_other_domains_is_refused(tmp_path: Path) -> None:
    state = collector(mixed(), tmp_path, Players(0)).state()
    alone = dataclasses.replace(mixed(), domains={"fast": DOMAINS["fast"]})
    with pytest.raises(UserError, match="has the domains"):
        collector(alone, tmp_path, Players(0)).restore(state, version=0)
    with pytest.raises(UserError, match="earlier program"):
        collector(mixed(), tmp_path, Players(0)).restore({"window": {}}, version=0)


def test_sizes_of_a_domain_are_its_share_unless_it_has_its_own() -> None:
    fast, slow = (lane_sched(domain, mixed()) for domain in mixed().mixture)
    assert (fast.batch, fast.places, fast.window) == (6, 12, 6)
    assert (slow.batch, slow.places, slow.window) == (2, 4, 2)
    own = DomainConfig(family="calc", in_flight=7, window=0, head_seconds=3.0, requeue=True)
    cfg = dataclasses.replace(mixed(), domains={**DOMAINS, "slow": own})
    sized = lane_sched(cfg.mixture[1], cfg)
    assert (sized.places, sized.window, sized.head_seconds, sized.requeue) == (7, 0, 3.0, True)
    assert lane_sched(config().mixture[0], config()) == dataclasses.replace(
        config().sched, in_flight=config().sched.places
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"share": 0.5}, "slow: share=0.14.* is less than an item"),
        ({"in_flight": 1}, "domain slow: in_flight=1 < batch=2"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change: dict[str, Any], named: str) -> None:
    share = {"share": 1.0} | change
    cfg = dataclasses.replace(
        mixed(batch=6 if "share" in change else 8),
        domains={**DOMAINS, "slow": DomainConfig(family="calc", **share)},
    )
    with pytest.raises(UserError, match=named):
        lanes_of(cfg)
    assert math.isclose(sum(domain.share for domain in cfg.mixture), 1)


@pytest.mark.parametrize("shares", ["items", "tokens"])
def test_updates_are_of_the_whole_batch_whatever_a_domain_has_of_it(shares: str) -> None:
    lanes = lanes_of(mixed(shares=shares, updates=8))
    assert sum(lanes.left) == 8


def test_the_filter_looks_at_a_group_beside_the_event_loop(tmp_path: Path) -> None:
    asked: list[int] = []
    one = collector(mixed(FilterConfig(constant=True, tries=1)), tmp_path, Players(0))
    one._constant = lambda group: bool(asked.append(threading.get_ident()))
    asyncio.run(updates(one, 1))
    assert len(asked) == 8
    assert threading.get_ident() not in asked
