"""The comparison of contexts: what is measured, and that it goes on where it ended."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import context_drift, contexts
from experiments.comparing import Run
from experiments.context_report import by_lookups, draw, falls, reduction, tables
from experiments.head_tail_agent import shown
from experiments.models import preset
from forge_jax.agents.tasks import trail
from forge_jax.config import ContextConfig, ProgramConfig, RolloutConfig, TrainConfig, UserError
from forge_jax.models.load import build
from forge_jax.rl.evaluate import held_out
from forge_jax.types import Episode, Outcome, Status

PROGRAM = ProgramConfig(command=("p", "{prompt}"))
TASKS = held_out("trail", 6, 0, 1)


def config(**changed: Any) -> contexts.Config:
    base = {
        "runs": ("a",), "managed": "note", "levels": (0,), "episodes": 4, "seed": 0, "plot": None,
        "scaffolds": {"full": contexts.Scaffold(), "note": contexts.Scaffold(context=trail.NOTE)},
        "out": "x", "concurrency": 4, "episode_seconds": 1.0, "rollout": RolloutConfig(),
    }  # fmt: skip
    return contexts.Config(**base | changed)


def test_pairs_are_the_same_replies_behind_prompts_that_differ() -> None:
    chat = preset("quick")[1]
    found = context_drift.pairs(TASKS, trail.NOTE, chat)
    replies = [trail.lookups_of(task) + 1 for task in TASKS]
    assert len(found) == sum(replies) - 2 * len(TASKS)  # of the first two nothing is dropped
    for pair in found:
        whole, managed = (chat.tokenizer.decode(p.tolist()) for p in (pair.whole, pair.managed))
        assert whole.split("\n")[0] == managed.split("\n")[0]
        assert whole.endswith(managed[-5:])
        assert len(managed) < len(whole)
    assert not context_drift.pairs(TASKS, trail.WHOLE, chat)


def test_drift_is_the_divergence_of_two_prompts_and_none_of_one() -> None:
    cfg, chat = preset("quick")
    model = build(cfg, chat, 0, "quick")
    found = context_drift.pairs(TASKS[:2], trail.NOTE, chat)[:3]
    kl, moved = context_drift.drift(model, found)
    assert len(kl) == len(moved) == sum(len(pair.reply) for pair in found)
    assert kl.min() > 0
    pair, behind = found[1], len(found[0].reply)
    tokens = np.full((context_drift.ROWS, 96), 7, np.int32)  # what stands behind says nothing
    ends = [len(prompt) + len(pair.reply) for prompt in (pair.managed, pair.whole)]
    for row, prompt, end in zip(tokens, (pair.managed, pair.whole), ends, strict=False):
        row[:end] = np.concatenate([prompt, pair.reply])
    logp = np.asarray(context_drift.next_logp(model.params, tokens, cfg))
    p, q = (one[end - len(pair.reply) - 1 : end - 1] for one, end in zip(logp, ends, strict=False))
    want = (np.exp(p) * (p - q)).sum(axis=-1)
    np.testing.assert_allclose(kl[behind : behind + len(want)], want, rtol=1e-3, atol=1e-6)
    assert np.abs(np.exp(p).sum(axis=-1) - 1).max() < 1e-5
    same = [context_drift.Pair(managed=x.whole, whole=x.whole, reply=x.reply) for x in found]
    assert context_drift.drift(model, same)[0].tolist() == [0.0] * len(kl)


def row(run: str, trained: str, scaffold: str, level: int, solved: int) -> dict[str, Any]:
    lengths = {"2": [solved, 10], "3": [0, 10]}
    return {
        "run": run, "trained": trained, "own": trained, "scaffold": scaffold, "level": level,
        "success": solved / 20, "by_lookups": lengths,
    }  # fmt: skip


def test_falls_are_of_the_same_run_and_reductions_of_means(tmp_path: Path) -> None:
    rows = [
        row("a", "full", "full", 0, 10), row("a", "full", "note", 0, 4),
        row("b", "full", "full", 0, 8), row("b", "full", "note", 0, 6),
        row("c", "note", "full", 0, 5), row("c", "note", "note", 0, 9),
    ]  # fmt: skip
    assert falls(rows, "full", "note", 0).mean == pytest.approx(0.2)
    assert falls(rows, "note", "full", 0).mean == pytest.approx(0.2)
    assert falls(rows, "full", "full", 0).mean == 0
    lengths, found = by_lookups(rows, "full", "note")
    assert (lengths, found[0].mean, found[1].mean) == ([2, 3], 0.5, 0.0)
    drifts = [
        {"run": "a", "trained": kind, "seed": 0, "level": 0, "kl": kl, "kl_ci": (kl, kl),
         "moved": 0.1, "tokens": 3}
        for kind, kl in (("full", 0.3), ("full", 0.5), ("note", 0.1))
    ]  # fmt: skip
    assert reduction(drifts, "note", "full", 0) == pytest.approx(75)
    assert reduction(drifts, "note", "base", 0) is None
    assert "KL of note against that of full: -75 %" in tables(rows, drifts)
    draw(tmp_path / "p.png", rows, drifts, "note")
    assert (tmp_path / "p.png").stat().st_size > 0


def test_episodes_are_counted_by_their_lookups() -> None:
    outcomes = [Outcome(status=Status.COMPLETED, reward=reward) for reward in (1.0, 0.0, 0.0)]
    broken = Outcome(status=Status.ENVIRONMENT_FAILED)
    episodes = [
        Episode(item=0, replica=0, task=task, outcome=outcome, turns=())
        for task, outcome in zip(TASKS, [*outcomes, broken], strict=False)
    ]
    told = contexts.row_of(episodes)
    assert sum(n for _, n in told["by_lookups"].values()) == 3
    assert told["by_lookups"][str(trail.lookups_of(TASKS[0]))][0] == 1
    assert (told["success"], told["failures"]) == (pytest.approx(1 / 3), 1)


def test_a_book_goes_on_and_refuses_other_settings(tmp_path: Path) -> None:
    cfg = config(levels=(0, 1))
    book = contexts.Book(tmp_path, cfg.played)
    assert len(list(book.missing("a", cfg))) == 6
    book.add({"run": "a", "scaffold": "full", "level": 1})
    book.add({"run": "a", "level": 0, "kl": 0.1})
    again = contexts.Book(tmp_path, cfg.played)
    assert list(again.missing("a", cfg)) == [
        ("full", 0), ("note", 0), ("note", 1), (None, 1)
    ]  # fmt: skip
    assert [len(cells) for cells in again.of(["a"], [0, 1])] == [1, 1]
    assert again.of(["a"], [1])[1] == []
    told = {"run": "c", "seed": 0, "own": None, "trained": "base"}
    book.add(told | {"level": 1, "kl": 0.1, "kl_ci": [0.0, 0.2]})
    again = contexts.Book(tmp_path, cfg.played)
    again.check(told | {"run": "b"})
    with pytest.raises(UserError, match=r"another run of that folder: .*'base'"):
        again.check(told | {"trained": "full, 3 updates", "own": "full"})
    with pytest.raises(UserError, match="episodes"):
        contexts.Book(tmp_path, config(episodes=5).played)
    with pytest.raises(UserError, match="out="):
        contexts.Book(tmp_path / "rows.json", cfg.played)  # before anything is played


@pytest.mark.parametrize(
    "changed",
    [
        {"managed": "full"},
        {"managed": "x"},
        {"levels": ()},
        {"levels": (2,)},
        {"levels": (0, 0)},
        {"runs": ()},
        {"episodes": 0},
    ],
)
def test_what_cannot_be_compared_is_refused(changed: dict[str, Any]) -> None:
    [name] = changed
    with pytest.raises(ValueError, match=name):
        config(**changed)


@pytest.mark.parametrize("rounds", range(7))
def test_the_program_keeps_the_first_round_and_the_newest(rounds: int) -> None:
    whole = [[n] for n in range(rounds)]
    assert shown(whole) == (whole if rounds < 5 else [[0], [rounds - 2], [rounds - 1]])


@pytest.mark.parametrize(
    ("trained", "own"),
    [
        ({}, "full"), ({"context": trail.NOTE}, "note"), ({"agent": PROGRAM}, "program"),
        ({"steps": 0}, None), ({"context": ContextConfig()}, UserError),
        ({"agent": ProgramConfig(command=("q", "{prompt}"))}, UserError),
    ],
)  # fmt: skip
def test_a_run_is_of_the_scaffold_that_it_was_trained_under(
    trained: dict[str, Any], own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = TrainConfig(**{"model": "quick", "task": "trail", "steps": 3} | trained)
    monkeypatch.setattr(contexts, "run_config", lambda folder: cfg)
    scaffolds = {**config().scaffolds, "program": contexts.Scaffold(agent=PROGRAM)}
    run = Run(folder=Path("a"), settings={}, rows=(), summary=None)
    if own is UserError:
        with pytest.raises(UserError, match="is none of"):
            contexts.known_of(run, scaffolds)
    else:
        assert contexts.known_of(run, scaffolds)["own"] == own
