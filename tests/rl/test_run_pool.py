"""A whole run whose pool is in object storage: that goes away for a while, or is another run's."""

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_endpoint import Service, s3_bucket, s3_service
from small_run import config

from experiments.models import resolve
from forge_jax.config import TrainConfig, UserError
from forge_jax.rl import durable
from forge_jax.rl.play import Player
from forge_jax.rl.report import read_rows
from forge_jax.rl.run import train
from forge_jax.sched.pool import Pool
from forge_jax.types import Task


class Held:
    """Counts groups that were begun and are not yet in the pool, and stops the pool's store."""

    def __init__(
        self, service: Service, puts: int, then: Callable[[], None], patch: pytest.MonkeyPatch
    ):
        """After so many puts `then` happens; the store starts when four calls have failed."""
        self.begun = self.stored = self.most = self.failed = 0
        self._service = service
        self._lock = threading.Lock()
        play, put = Player.group, Pool.put

        async def group(player: Player, number: int, task: Task, size: int, *rest: Any) -> Any:
            self.begun += 1
            self.most = max(self.most, self.begun - self.stored)
            return await play(player, number, task, size, *rest)

        def counted(pool: Pool, item: int, episodes: Any) -> bool:
            done = put(pool, item, episodes)
            with self._lock:
                self.stored += 1
                if self.stored == puts:
                    then()
            return done

        patch.setattr(Player, "group", group)
        patch.setattr(Pool, "put", counted)
        patch.setattr(durable.logger, "handlers", [self])

    level = logging.WARNING

    def handle(self, record: logging.LogRecord) -> None:
        assert "the pool is away" in record.getMessage()
        with self._lock:
            self.failed += 1
            if self.failed == 4:
                self._service.start()


def elsewhere(pool: str) -> TrainConfig:
    return dataclasses.replace(config(), pool=pool)


def test_a_run_goes_on_when_its_pool_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_service() as (service, bucket):
        seen = Held(service, 3, service.stop, monkeypatch)
        cfg = elsewhere(f"{bucket}/a run")
        summary = train(cfg, resolve("quick"), tmp_path, {})
        pool = Pool.open(cfg.pool or "")
        rows = read_rows(tmp_path / "metrics.jsonl")
        consumed = [number for row in rows for number in row["items"]]
        assert len(consumed) == len(set(consumed)) == 3 * 2
        groups = [pool.get(number) for number in consumed]
        assert all([e.replica for e in group] == list(range(5)) for group in groups)
        sampled = sum(len(t.output) for group in groups for e in group for t in e.turns)
        assert summary["tokens_sampled"] == sampled
        assert seen.most <= cfg.sched.places, "more groups were held than there are places"
        assert rows[-1]["pool_retries"] == seen.failed >= 4
        assert not (tmp_path / "pool").exists()


def test_a_pool_that_denies_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_service() as (service, bucket):
        cfg = elsewhere(f"{bucket}/denied")
        pool = Pool.open(cfg.pool or "")
        with monkeypatch.context() as patch:
            seen = Held(service, 3, service.deny, patch)
            with pytest.raises(ExceptionGroup) as caught:
                train(cfg, resolve("quick"), tmp_path, {})
        assert caught.group_contains(UserError, match="refuses: PERMISSION_DENIED: AccessDenied")
        assert seen.failed == 0, "it was waited for"
        service.permit()
        assert len(pool.items()) >= 3
        train(dataclasses.replace(cfg, resume=str(tmp_path)), resolve("quick"), tmp_path, {})
        consumed = [n for row in read_rows(tmp_path / "metrics.jsonl") for n in row["items"]]
        assert len(consumed) == len(set(consumed)) == 3 * 2


def test_a_pool_is_of_one_run(tmp_path: Path) -> None:
    with s3_bucket() as bucket:
        cfg = dataclasses.replace(elsewhere(f"{bucket}/pool"), steps=1)
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir()
        train(cfg, resolve("quick"), first, {})
        with pytest.raises(UserError, match=f"holds items of another run, {first}"):
            train(cfg, resolve("quick"), second, {})
        moved = first.rename(tmp_path / "moved")
        again = dataclasses.replace(cfg, steps=2, resume=str(moved))
        summary = train(again, resolve("quick"), moved, {})
        counts = Counter(n for row in read_rows(moved / "metrics.jsonl") for n in row["items"])
        assert (summary["steps"], set(counts.values()), len(counts)) == (2, {1}, 4)


def test_items_of_nobody_are_not_taken(tmp_path: Path) -> None:
    Pool.open(str(tmp_path / "old")).put(0, ())
    with pytest.raises(UserError, match="old holds items, and nothing says of which run"):
        train(elsewhere(str(tmp_path / "old")), resolve("quick"), tmp_path, {})


def test_a_pool_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="pool=memory:// would not outlive"):
        elsewhere("memory://")
