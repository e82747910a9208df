"""The pool's command: what it counts, keeps, moves and exports is what was put."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from random_episodes import random_group, same
from refusals import QUIET, refused

from experiments import pool_rows
from experiments.pool import main
from experiments.pool_rows import rows_of, table
from forge_jax.rl.credit import group_samples
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Turn

ITEMS = tuple(range(3, 15))


def called(*overrides: str) -> dict[str, Any]:
    out = io.StringIO()
    argv = ["command", *QUIET, *overrides]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(io.StringIO()):
        main()
    return json.loads(out.getvalue().splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pool = Pool.open(str(tmp_path / "pool"))
    for item in ITEMS:
        pool.put(item, random_group(item))
    return tmp_path / "pool"


def turns() -> list[tuple[Episode, int, Turn]]:
    groups = [random_group(item) for item in ITEMS]
    return [(e, i, turn) for group in groups for e in group for i, turn in enumerate(e.turns)]


def test_counts_are_those_of_what_was_put(folder: Path) -> None:
    found = called(f"pool={folder}")
    assert found["items"] == len(ITEMS)
    assert found["episodes"] == sum(len(random_group(item)) for item in ITEMS)
    assert found["turns"] == len(turns())
    assert found["tokens_sampled"] == sum(len(turn.output) for _, _, turn in turns())
    assert (found["compacted"], found["corrupt"]) == (0, 0)


def test_compaction_changes_no_count_and_keeps_the_newest(folder: Path) -> None:
    before = called(f"pool={folder}")
    moved = called(f"pool={folder}", "what=compact", "keep=2", "size=4")
    assert (moved["compacted"], moved["loose"]) == (10, 2)
    assert len(list((folder / "segments").iterdir())) == 3
    assert called(f"pool={folder}") == before | {"compacted": 10}
    assert called(f"pool={folder}", "what=compact", "keep=2")["compacted"] == 0
    pool = Pool.open(str(folder))
    assert all(same(pool.get(item), random_group(item)) for item in ITEMS)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_resume_may_play_again_is_not_compacted(folder: Path, elsewhere: bool) -> None:
    run = folder.parent / "run" if elsewhere else folder.parent
    run.mkdir(exist_ok=True)
    rows = [{"step": step, "items": [2 + step, 20 + step]} for step in range(1, 8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (4, 6):
        (run / "checkpoints" / str(step)).mkdir(parents=True)
    named = [f"run={run}"] if elsewhere else []
    called(f"pool={folder}", "what=compact", "keep=0", *named)
    assert Pool.open(str(folder)).loose() == tuple(range(7, 15))


def test_verify_names_what_is_not_whole_and_touches_nothing(folder: Path) -> None:
    file = folder / "items" / "000000000005"
    file.write_bytes(file.read_bytes()[:-1])
    found = called(f"pool={folder}", "what=verify")
    assert (found["items"], found["damaged"], found["corrupt"]) == (len(ITEMS), [5], [])
    assert file.exists()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("batch", [1, 10**9])
def test_an_export_holds_every_call(
    folder: Path, tmp_path: Path, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_rows, "BATCH_TOKENS", batch)
    out = tmp_path / f"episodes.{kind}"
    called(f"pool={folder}", "what=compact", "keep=5")
    found = called(f"pool={folder}", "what=export", f"format={kind}", f"out={out}")
    if kind == "parquet":
        rows = pq.read_table(out).to_pylist()
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert found["turns"] == len(rows) == len(turns())
    for row, (episode, number, turn) in zip(rows, turns(), strict=True):
        assert (row["item"], row["replica"], row["turn"]) == (episode.item, episode.replica, number)
        assert row["reward"] == episode.outcome.reward
        assert row["status"] == episode.outcome.status
        logprobs = np.array(row["logprobs"], np.float32)
        want = turn.logprobs
        if kind == "jsonl":  # what is not finite is null there
            want = np.where(np.isfinite(want), want, np.nan).astype(np.float32)
        np.testing.assert_array_equal(logprobs, want)
        for name in ("prompt", "output", "versions"):
            assert row[name] == getattr(turn, name).tolist()
        for name in ("temperature", "finish", "parent", "start", "seconds", "queue_seconds"):
            assert row[name] == getattr(turn, name)
    assert {f.name for f in fields(Turn)} - set(rows[0]) == set(pool_rows.NO_COLUMN)


def coherent(episode: Episode) -> Episode:
    """An episode of calls that could have been made."""
    kept = [replace(turn, parent=None) for turn in episode.turns if len(turn.prompt)]
    return replace(episode, turns=tuple(kept))


def test_rows_say_what_a_trainer_learns_from() -> None:
    for item in range(40):
        group = [coherent(episode) for episode in random_group(item)]
        trained = [row for row in rows_of(group) if row["left_out"] is None]
        samples = group_samples(group)
        assert len(trained) == len(samples)
        for row, (sample, turn) in zip(trained, samples, strict=True):
            assert row["output"].tolist() == turn.output.tolist()
            assert set(sample.advantage[sample.mask]) <= {np.float32(row["advantage"])}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_export_that_is_broken_off_leaves_no_file(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "episodes"
    out.write_text("the one before")

    def broken_off() -> None:
        with table(out, kind) as sink:
            sink.write(list(rows_of(random_group(3))))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [path.name for path in tmp_path.iterdir()] == ["episodes"]
    assert out.read_text() == "the one before"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("what=burn",), "what='burn'"),
        (("what=export",), "out=None goes with what=export"),
        (("out=x",), "out=x goes with what=export"),
        (("what=export", "out=x", "format=csv"), "format='csv'"),
        (("what=export", "out=/nowhere/at/all"), "out=/nowhere/at/all"),
        (("run=x",), "run=x goes with what=compact"),
        (("what=compact", "run=/nowhere"), "run=/nowhere: no metrics.jsonl there"),
        (("what=compact", "keep=-1"), "keep=-1"),
        (("what=compact", "size=0"), "size=0"),
        (("unknown=1",), "unknown"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    assert message in refused(main, f"pool={folder}", *overrides)


def test_a_pool_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere' is no folder" in refused(main, f"pool={tmp_path}/nowhere")
    assert not (tmp_path / "nowhere").exists()
