"""A look into a data pool, and care for it; see docs/pool.md.

    python -m experiments.pool pool=RUN_DIR/pool what=stats|verify
    python -m experiments.pool pool=RUN_DIR/pool what=compact [keep=256] [size=256] [run=RUN_DIR]
    python -m experiments.pool pool=RUN_DIR/pool what=export [format=parquet|jsonl] out=FILE

Prints one JSON object. All but compact only read. Ctrl-C or a kill is no harm: compact and export
go on where they stopped when they are called again, and FILE is whole or not there.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments.command import command, complaining
from experiments.pool_items import intact, shown
from forge_jax.config import UserError, check, load
from forge_jax.rl.report import METRICS, progress, read_rows
from forge_jax.sched.pool import Pool

FORMATS = ("parquet", "jsonl")


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """One call; see `configs/pool.yaml`."""

    pool: str
    what: str = "stats"
    run: str | None = None
    out: str | None = None
    format: str = "parquet"
    keep: int = 256
    size: int = 256

    def __post_init__(self) -> None:
        check(self.what in WHAT, f"what={self.what!r} must be one of {', '.join(WHAT)}")
        named = f"format={self.format!r} must be one of {', '.join(FORMATS)}"
        check(self.format in FORMATS, named)
        exports = self.what == "export"
        check(exports == (self.out is not None), f"out={self.out} goes with what=export")
        plain = self.format == PoolConfig.format
        check(exports or plain, f"format={self.format} goes with what=export")
        for name in ("keep", "size"):
            value = getattr(self, name)
            plain = value == getattr(PoolConfig, name)
            check(self.what == "compact" or plain, f"{name}={value} goes with what=compact")
        check(self.run is None or self.what == "compact", f"run={self.run} goes with what=compact")
        check(self.keep >= 0, f"keep={self.keep} must be >= 0")
        check(self.size >= 1, f"size={self.size} must be at least 1")


@command("pool", plain=("pool", "out", "run"))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(PoolConfig, mapping)
    if "://" not in cfg.pool and not Path(cfg.pool).is_dir():
        raise UserError(f"pool={cfg.pool!r} is no folder")
    if cfg.out is not None and not Path(cfg.out).absolute().parent.is_dir():
        raise UserError(f"out={cfg.out}: no such folder to write it in")
    if cfg.run is not None and not (Path(cfg.run) / METRICS).exists():
        raise UserError(f"run={cfg.run}: no {METRICS} there")
    pool = Pool.open(cfg.pool)
    with complaining("to go on: the same call"), progress(Console(stderr=True)) as bars:
        return {"what": cfg.what, "pool": cfg.pool} | WHAT[cfg.what](cfg, pool, bars)


def stats(cfg: PoolConfig, pool: Pool, bars: Progress) -> dict[str, Any]:
    """What the pool holds."""
    count: Counter[str] = Counter()
    loose = len(pool.loose())
    whole = filter(None, intact(pool, pool.items(), bars, "stats"))
    for size, episodes in whole:
        count["bytes"] += size
        count["episodes"] += len(episodes)
        for turn in (turn for episode in episodes for turn in episode.turns):
            count["turns"] += 1
            count["tokens_prompt"] += len(turn.prompt)
            count["tokens_sampled"] += len(turn.output)
        count["items"] += 1
    names = ("items", "episodes", "turns", "tokens_prompt", "tokens_sampled", "bytes")
    found = {name: count[name] for name in names}
    return found | {"compacted": len(pool.items()) - loose, "corrupt": len(pool.corrupt())}


def verify(cfg: PoolConfig, pool: Pool, bars: Progress) -> dict[str, Any]:
    """Reads every item, and changes none: the numbers of those that are not whole."""
    items = pool.items()
    found = intact(pool, items, bars, "verify")
    damaged = [item for item, whole in zip(items, found, strict=True) if whole is None]
    return {"items": len(items), "damaged": damaged, "corrupt": list(pool.corrupt())}


def compact(cfg: PoolConfig, pool: Pool, bars: Progress) -> dict[str, Any]:
    """Merges consumed items, all but the newest `keep`."""
    loose = pool.loose()
    consumed = consumed_items(Path(cfg.pool).parent if cfg.run is None else Path(cfg.run))
    old = [item for item in loose if consumed is None or item in consumed]
    old = old[: max(0, len(old) - cfg.keep)]
    batches = [old[i : i + cfg.size] for i in range(0, len(old), cfg.size)]
    moved = sum(pool.compact(batch) for batch in shown(batches, bars, "compact"))
    return {"items": len(pool.items()), "compacted": moved, "loose": len(pool.loose())}


def export(cfg: PoolConfig, pool: Pool, bars: Progress) -> dict[str, Any]:
    """Writes one row a call. Raises UserError where pyarrow is not installed."""
    assert cfg.out is not None
    try:
        from experiments import pool_export
    except ImportError as error:
        raise UserError("what=export needs pyarrow: pip install 'forge_jax[export]'") from error
    path = Path(cfg.out).absolute()
    found = pool_export.export(cfg.pool, pool, path, cfg.format, bars)
    return found | {"out": str(path), "format": cfg.format, "bytes": path.stat().st_size}


WHAT = {"stats": stats, "verify": verify, "compact": compact, "export": export}


def consumed_items(run: Path) -> set[int] | None:
    """Items of a run that no resume takes back: those consumed up to the oldest checkpoint that
    it keeps. None where the folder is no run's: then all are taken for consumed."""
    if not (run / METRICS).exists():
        return None
    steps = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
    rows = read_rows(run / METRICS)
    return {item for row in rows if row["step"] <= min(steps, default=0) for item in row["items"]}


if __name__ == "__main__":
    main()
