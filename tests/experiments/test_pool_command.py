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

from experiments import pool_export
from experiments.pool import main
from experiments.pool_rows import rows_of
from forge_jax.rl.credit import group_samples
from forge_jax.sched.locks import locked
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
    monkeypatch.setattr(pool_export, "PART_BYTES", batch)
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
        for name in ("prompt", "output", "versions", "routes"):
            assert row[name] == plain(getattr(turn, name))
        for name in ("ids", "offsets", "kind"):
            assert row[f"support_{name}"] == plain(turn.support and getattr(turn.support, name))
        for name in ("temperature", "finish", "parent", "start", "seconds", "queue_seconds"):
            assert row[name] == getattr(turn, name)
    assert {f.name for f in fields(Turn)} - set(rows[0]) == {"support"}
    assert list(tmp_path.glob("*.parts")) == []


def plain(array: np.ndarray | None) -> Any:
    return None if array is None else array.tolist()


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
            assert set(sample.advantage[sample.mask]) <= {np.float32(row["outcome_advantage"])}


def ends_after(reads: int, patch: pytest.MonkeyPatch) -> list[int]:
    """From now on Ctrl-C comes instead of the so many-th read of an item; the items read."""
    seen: list[int] = []
    read = Pool.get_object

    def get_object(pool: Pool, item: int) -> bytes:
        if len(seen) == reads:
            raise KeyboardInterrupt
        seen.append(item)
        return read(pool, item)

    patch.setattr(Pool, "get_object", get_object)
    return seen


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_export_goes_on_where_it_was_broken_off(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_export, "PART_BYTES", 1)
    out, calm = tmp_path / "episodes", tmp_path / "calm"
    call = (f"pool={folder}", "what=export", f"format={kind}", f"out={out}")
    wanted = called(*call[:-1], f"out={calm}")
    out.write_text("the one before")
    read: list[int] = []
    for reads in (0, 5, 3):
        with monkeypatch.context() as patch:
            seen = ends_after(reads, patch)
            with pytest.raises(SystemExit, match="130"):
                called(*call)
        read += seen
        assert out.read_text() == "the one before"
    Pool.open(str(folder)).put(99, random_group(99))  # later than the export was begun
    (tmp_path / "episodes.parts" / "00000099.rows").write_bytes(b"a kill while it was writt")
    with monkeypatch.context() as patch:
        seen = ends_after(10**6, patch)
        found = called(*call)
    assert set(read) | set(seen) == set(ITEMS)
    assert len(seen) < len(ITEMS) - 4, "what was done was done again"
    assert {**found, "out": ""} == {**wanted, "out": ""}
    assert out.read_bytes() == calm.read_bytes()
    assert not (tmp_path / "episodes.parts").exists()
    assert called(*call)["items"] == len(ITEMS) + 1, "the next begins anew"


@pytest.mark.parametrize("other", ["format=jsonl", "pool={}/other"])
def test_parts_of_another_export_are_not_gone_on_with(
    folder: Path, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    call = (f"pool={folder}", "what=export", f"out={tmp_path}/episodes")
    ends_after(3, monkeypatch)
    with pytest.raises(SystemExit, match="130"):
        called(*call)
    said = complaint(*call, other.format(tmp_path))
    assert f"episodes.parts has parts of an export of pool={folder} format=parquet" in said
    with locked(tmp_path / "episodes.parts", "export"):
        assert "another export writes" in complaint(*call)


def complaint(*overrides: str) -> str:
    """The last line of a call that is refused after it has begun."""
    err, argv = io.StringIO(), ["command", *QUIET, *overrides]
    with (
        mock.patch.object(sys, "argv", argv),
        redirect_stderr(err),
        pytest.raises(SystemExit, match="2"),
    ):
        main()
    return err.getvalue().splitlines()[-1]


def test_what_another_compacts_is_not_compacted(folder: Path) -> None:
    with locked(folder, "keeper"):
        said = complaint(f"pool={folder}", "what=compact", "keep=0")
    assert f"another process compacts or deletes in {folder}" in said


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
        (("what=stats", "size=8"), "size=8 goes with what=compact"),
        (("what=verify", "format=jsonl"), "format=jsonl goes with what=export"),
        (("unknown=1",), "unknown"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    assert message in refused(main, f"pool={folder}", *overrides)


def test_a_pool_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere' is no folder" in refused(main, f"pool={tmp_path}/nowhere")
    assert not (tmp_path / "nowhere").exists()
