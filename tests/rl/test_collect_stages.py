"""Domains one after the other: as many items of each as in the plan, and none played for nothing.

The players are those of `test_collect_domains`; lanes, pool and sources are the real ones.
"""

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_collect_domains import Players, collector, mixed, updates

from forge_jax.config import FilterConfig, StageConfig, TrainConfig
from forge_jax.rl.collect import Taken
from forge_jax.rl.measure import Totals
from forge_jax.rl.mixture import by_domain, lanes_of
from forge_jax.rl.summary import domain_summary
from forge_jax.types import Episode, Outcome, Status, Task

STAGES = (
    StageConfig(shares={"fast": 1}, until=4),
    StageConfig(shares={"fast": 1, "slow": 3}, until=8),
    StageConfig(shares={"slow": 1}),
)
WANTED = [{"fast": 8}] * 4 + [{"fast": 2, "slow": 6}] * 4 + [{"slow": 8}] * 4


def staged(filters: FilterConfig | None = None, **sched: Any) -> TrainConfig:
    return dataclasses.replace(mixed(filters, **sched), stages=STAGES)


def domains(batches: list[list[Taken]]) -> list[Counter[str]]:
    return [Counter(item.domain for item in batch if not item.again) for batch in batches]


@pytest.mark.parametrize("synchronous", [False, True])
def test_stages_have_their_items_and_leave_nothing_over(tmp_path: Path, synchronous: bool) -> None:
    cfg = staged(synchronous=synchronous, in_flight=8 if synchronous else 16)
    players = Players(0)
    one = collector(cfg, tmp_path, players)
    assert domains(asyncio.run(updates(one, 8))) == WANTED[:8]
    # What was played of "fast", which has no stage to come, was trained on.
    assert sum(number % 2 == 0 for number in players.played) == 4 * 8 + 4 * 2
    assert one.lanes.lag_bound is not None


def test_what_says_nothing_is_made_good_within_its_stage(tmp_path: Path) -> None:
    cfg = staged(FilterConfig(constant=True, tries=2))
    batches = asyncio.run(updates(collector(cfg, tmp_path, Players(0, 0.4)), 12))
    assert domains(batches) == WANTED
    assert any(item.again for batch in batches for item in batch)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_run_resumed_in_any_stage_goes_on_in_it(tmp_path: Path, synchronous: bool) -> None:
    cfg = staged(synchronous=synchronous, in_flight=8 if synchronous else 16)
    batches: list[list[Taken]] = []
    state: dict[str, Any] | None = None
    for session in range(4):
        one = collector(cfg, tmp_path, Players(session))
        if state is not None:
            one.restore(state, version=0)
        batches += asyncio.run(updates(one, 3))
        state = json.loads(json.dumps(one.state()))
    assert domains(batches) == WANTED
    numbers = [item.number for batch in batches for item in batch]
    assert len(set(numbers)) == len(numbers)


def test_a_summary_tells_what_was_forgotten() -> None:
    cfg = staged()
    cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, every=4))
    outcomes = [Outcome(status=Status.COMPLETED, reward=float(i % 4 == 0)) for i in range(8)]
    task = Task(family="hop", seed=0)
    episodes = [Episode(item=0, replica=0, task=task, outcome=o, turns=()) for o in outcomes]
    rows = [{"eval_fast": 0.5, "eval_slow": 0.0}, {"reward": 1.0}, {"eval_fast": 0.4}]
    totals = Totals(evals_before={"fast": 0.1, "slow": 0.75})
    found = domain_summary(cfg, rows, totals, by_domain(cfg, episodes), lanes_of(cfg))
    assert found["eval_forgotten_fast"] == 0.5 - 0.25
    assert found["eval_forgotten_slow"] == 0.75 - 0.25
