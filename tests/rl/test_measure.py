"""A row says what was consumed, and totals are sums of rows."""

import dataclasses
import json
from typing import Any

from small_policy import make_turn

from forge_jax.config import TrainConfig
from forge_jax.rl.collect import Taken
from forge_jax.rl.evaluate import summarise
from forge_jax.rl.measure import (
    Totals,
    batch_row,
    drafts_row,
    episode_row,
    lineage_row,
    version_row,
)
from forge_jax.rl.summary import summary_of
from forge_jax.types import Branch, Episode, Lineage, Outcome, Rule, Status, Task


def episode(reward: float, calls: int = 1, **outcome: Any) -> Episode:
    return Episode(
        item=0,
        replica=0,
        task=Task(family="hop", seed=0),
        outcome=Outcome(**{"status": Status.COMPLETED, "reward": reward} | outcome),
        turns=tuple(make_turn([1], [2, 3], [0, 0]) for _ in range(calls)),
    )


BROKEN = episode(1.0, status=Status.AGENT_FAILED, error="KeyError: 'x'", metrics={"wipes": 9.0})
TAKEN = [
    Taken(number=4, lag=2, updates=0, episodes=(episode(1.0, 3, metrics={"wipes": 2.0}), BROKEN)),
    Taken(
        number=3,
        lag=5,
        updates=0,
        episodes=(episode(0.0, 1, metrics={"wipes": 1.0, "turns": 1.0}),),
    ),
    Taken(number=7, lag=0, updates=0, episodes=()),
]


def test_rates_are_of_valid_episodes_and_counts_of_all() -> None:
    row = json.loads(json.dumps(episode_row(TAKEN)))
    assert row["items"] == [4, 3, 7]
    assert (row["lag_mean"], row["lag_max"]) == (7 / 3, 5)
    assert (row["episodes"], row["corrupt_items"]) == (3, 1)
    assert (row["reward"], row["mean_turns"]) == (0.5, 2.0)
    assert row["tokens_sampled"] == 2 * (3 + 1 + 1)
    assert row["failed"] == {"agent_failed": 1}
    assert row["error"] == "KeyError: 'x'"
    assert (row["agent_wipes"], row["agent_turns"]) == (1.5, 1.0)


def test_nothing_valid_has_no_rates() -> None:
    row = episode_row([Taken(number=0, lag=0, updates=0, episodes=(BROKEN,))])
    assert row["reward"] is None
    assert row["mean_turns"] is None
    assert not [name for name in row if name.startswith("agent_")]


def test_totals_are_sums_of_rows() -> None:
    row = episode_row(TAKEN) | batch_row({}, [], []) | {"skipped": None}
    totals = Totals(eval_before=0.25).add(row).add(row | {"skipped": "ess"})
    assert totals.updates_skipped == 1
    assert (totals.episodes, totals.items, totals.tokens_sampled) == (6, 6, 20)
    assert (totals.lag_sum, totals.lag_max) == (14, 5)
    assert totals.eval_before == 0.25


def test_a_summary_tells_faults_where_they_were_measured() -> None:
    after, cfg = summarise([]), TrainConfig(model="quick", task="hop", steps=3)
    assert not [key for key in summary_of(cfg, [], Totals(), after) if "faults" in key]
    faulty = dataclasses.replace(after, faults={"calls": 0.25})
    told = summary_of(cfg, [], Totals(faults_before={"calls": 0.5}), faulty)
    assert (told["eval_before_faults"], told["eval_after_faults"]) == (
        {"calls": 0.5},
        {"calls": 0.25},
    )


def test_a_row_tells_of_the_drafts_of_its_step() -> None:
    before = {
        "drafts": 10, "draft_tokens": 20, "accepted_tokens": 5, "draft_tokens_1": 10,
        "accepted_tokens_1": 5, "decode_seconds": 1.0, "decode_seconds_undrafted": 1.0,
    }  # fmt: skip
    now = {
        "drafts": 14, "draft_tokens": 26, "accepted_tokens": 8, "draft_tokens_1": 14,
        "accepted_tokens_1": 7, "draft_tokens_2": 2, "accepted_tokens_2": 1,
        "decode_seconds": 3.0, "decode_seconds_undrafted": 4.0,
    }  # fmt: skip
    assert drafts_row(before, now) == {
        "acceptance": 0.5, "tokens_per_verify": 1.75, "acceptance_1": 0.5, "acceptance_2": 0.5,
        "speculation_speedup": 1.5,
    }  # fmt: skip
    assert drafts_row(now, now) == {}


def test_a_row_tells_how_its_calls_came_out_of_each_other() -> None:
    lineages = [
        Lineage(branch=Branch.ROOT),
        Lineage(branch=Branch.CONTINUE, replies={Rule.CALL_ID: 1}, spliced_tokens=8, retokenised=2),
        Lineage(
            branch=Branch.TRUNCATED, replies={Rule.FOREIGN: 1, Rule.CONTENT: 1, Rule.NOT_KEPT: 1}
        ),
        Lineage(branch=Branch.RERENDERED, replies={Rule.CALL_ID: 1}, redone=7),
        None,  # written before lineages were
    ]
    turns = [dataclasses.replace(make_turn([1], [2], [0]), lineage=one) for one in lineages]
    taken = [
        Taken(
            number=0, lag=0, updates=0, episodes=(dataclasses.replace(BROKEN, turns=tuple(turns)),)
        )
    ]
    assert json.loads(json.dumps(lineage_row(taken))) == {
        "fork_rate": 2 / 4, "forks": {"truncated": 1, "rerendered": 1}, "splice_rate": 3 / 5,
        "replies": {"call_id": 2, "foreign": 1, "content": 1, "not_kept": 1},
        "retokenised_rate": 2 / 8, "tokens_spliced": 8, "tokens_retokenised": 2,
        "tokens_redone": 7,
    }  # fmt: skip
    assert lineage_row(TAKEN) | {"forks": 0, "replies": 0} == {
        "fork_rate": None, "forks": 0, "splice_rate": None, "replies": 0,
        "retokenised_rate": None, "tokens_spliced": 0, "tokens_retokenised": 0, "tokens_redone": 0,
    }  # fmt: skip


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    turns = [make_turn([1], [2, 3], [4, 6]), make_turn([1], [2], [7])]
    assert version_row(turns, 7) == {
        "version_lag_mean": 1.5,
        "version_lag_max": 3,
        "versions_mixed": 0.5,
    }
    assert set(version_row([], 7).values()) == {None}
