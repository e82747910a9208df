"""One queue that all domains share: what is consumed of each is the policy's doing.

Players are fakes; queue, pool and sources are the real ones.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from small_policy import make_turn
from small_run import config

from forge_jax.config import DomainConfig, SchedConfig, TrainConfig, UserError
from forge_jax.rl.collect import Collector, Group, Taken
from forge_jax.rl.mixture import domain_row, lanes_of, sources_of
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Outcome, Status, Task

Player = Callable[[int, Task], Awaitable[Group]]
DOMAINS = {"fast": DomainConfig(family="hop"), "slow": DomainConfig(family="hop_slow")}


def sharing(**sched: Any) -> TrainConfig:
    sizes: dict[str, Any] = {"shares": "admitted", "batch": 4, "in_flight": 12} | sched
    return dataclasses.replace(config(), task=None, domains=DOMAINS, sched=SchedConfig(**sizes))


async def play(number: int, task: Task) -> Group:
    outcome = Outcome(status=Status.COMPLETED, reward=float(task.family == "hop"), metrics={})
    return (
        Episode(
            item=number, replica=0, task=task, outcome=outcome, turns=(make_turn([1], [1], [0]),)
        ),
    )


async def hang_if_slow(number: int, task: Task) -> Group:
    if task.family == "hop_slow":
        await asyncio.Event().wait()
    return await play(number, task)


def consumed(
    cfg: TrainConfig, folder: Path, batches: int, play: Player = play
) -> tuple[list[list[Taken]], Collector]:
    collector = Collector(
        lanes=lanes_of(cfg),
        pool=Pool.open(str(folder / "pool")),
        sources=sources_of(cfg),
        play=play,
        patience=1.0,
    )

    async def run() -> list[list[Taken]]:
        taken = []
        async with asyncio.TaskGroup() as workers:
            collector.fill(workers)
            for _ in range(batches):
                taken.append(await collector.take(workers))
                collector.updated()
            collector.cancel()
        return taken

    return asyncio.run(run()), collector


def families(taken: list[list[Taken]]) -> Counter[str]:
    return Counter(item.episodes[0].task.family for batch in taken for item in batch)


def test_in_order_of_admission_each_domain_has_its_share(tmp_path: Path) -> None:
    taken, _ = consumed(sharing(policy="fifo"), tmp_path, batches=4)
    assert families(taken) == {"hop": 8, "hop_slow": 8}
    assert [item.number for batch in taken for item in batch] == list(range(16))


def test_a_policy_that_drops_goes_on_without_a_domain_that_is_too_slow(tmp_path: Path) -> None:
    cfg = sharing(policy="greedy_drop", drop_updates=1)
    taken, collector = consumed(cfg, tmp_path, batches=6, play=hang_if_slow)
    assert families(taken) == {"hop": 24}
    assert sum(collector.given_up().values()) >= 6


def test_a_row_tells_the_domains_apart(tmp_path: Path) -> None:
    cfg = sharing(policy="fifo")
    [batch], collector = consumed(cfg, tmp_path, batches=1)
    row = domain_row(cfg, batch, collector)
    assert (row["reward_fast"], row["reward_slow"]) == (1, 0)
    assert (row["items_fast"], row["items_slow"]) == (2, 2)
    assert row["admitted_hop"] + row["admitted_hop_slow"] == 16


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (DomainConfig(family="hop"), "a family for each domain"),
        (DomainConfig(family="hop_slow", window=3), "domains.slow.window=3"),
        (DomainConfig(family="hop_slow", in_flight=3), "domains.slow.in_flight=3"),
    ],
)
def test_domains_of_one_queue_have_families_and_no_sizes_of_their_own(
    slow: DomainConfig, said: str
) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        dataclasses.replace(sharing(), domains={**DOMAINS, "slow": slow})
