"""An export that goes on where it was broken off.

Items of a pool flow in; parts of the file, one after another, and then the file flow out. The
invariant: what a part's record tells of is whole on disk, and under its name the file is whole.

Beside the file OUT lies, until it is there, the folder `OUT.parts`: `plan.json` (of which pool,
in which format, which items), and for each part its rows and `NUMBER.json`, written after them.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.pool_items import intact
from experiments.pool_rows import Row, bytes_of, join, rows_of, write
from forge_jax.config import UserError
from forge_jax.rl.writing import write_whole
from forge_jax.sched.locks import locked
from forge_jax.sched.pool import Pool

PART_BYTES = 1 << 24  # of the arrays in a part's rows: what memory holds
_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """What rows so far, with those of this part, come to."""

    until: int  # items of the plan that were read
    items: int  # of those, that were whole
    episodes: int
    turns: int
    tokens_sampled: int

    def __add__(self, other: "Part") -> "Part":
        mine, theirs = asdict(self), asdict(other)
        return Part(**{name: mine[name] + theirs[name] for name in mine})


def export(location: str, pool: Pool, path: Path, kind: str, bars: Progress) -> dict[str, Any]:
    """Writes one row a call of every item that was in the pool when the export was begun.

    Raises UserError where another export writes the same file, or one from elsewhere was broken
    off.
    """
    parts = path.with_name(path.name + ".parts")
    with alone(parts):
        plan = planned(parts, {"pool": location, "format": kind}, pool)
        done = written(parts)
        so_far = done[-1] if done else Part(until=0, items=0, episodes=0, turns=0, tokens_sampled=0)
        for rows, fresh in batches(pool, plan[so_far.until :], so_far.until, bars):
            name = f"{len(done):0{_DIGITS}d}"
            write(parts / f"{name}.rows", rows, kind)
            so_far += fresh
            write_whole(parts / f"{name}.json", json.dumps(asdict(so_far)))
            done.append(so_far)
        whole = parts / "whole"
        join([parts / f"{number:0{_DIGITS}d}.rows" for number in range(len(done))], whole, kind)
        whole.replace(path)
        shutil.rmtree(parts)
    return {name: count for name, count in asdict(so_far).items() if name != "until"}


@contextmanager
def alone(parts: Path) -> Iterator[None]:
    """Holds the folder of parts for this process."""
    try:
        with locked(parts, "export", wait=False):
            yield
    except BlockingIOError as error:
        raise UserError(f"out: another export writes {parts}") from error


def planned(parts: Path, of: dict[str, str], pool: Pool) -> list[int]:
    """The items to export: those of the export that was broken off, or else all."""
    path = parts / "plan.json"
    if not path.exists():
        write_whole(path, json.dumps(of | {"items": pool.items()}))
    plan = json.loads(path.read_text())
    items: list[int] = plan.pop("items")
    if plan != of:
        said = " ".join(f"{name}={value}" for name, value in plan.items())
        raise UserError(f"out: {parts} has parts of an export of {said}: end it, or remove them")
    return items


def written(parts: Path) -> list[Part]:
    """The records of the parts that are whole, in order."""
    records = sorted(parts.glob("[0-9]" * _DIGITS + ".json"))
    return [Part(**json.loads(record.read_text())) for record in records]


def batches(
    pool: Pool, items: list[int], done: int, bars: Progress
) -> Iterator[tuple[list[Row], Part]]:
    """Rows of some items at a time, and what they come to."""
    rows: list[Row] = []
    first = held = whole = episodes = tokens = 0
    for place, found in enumerate(intact(pool, items, bars, "export", done), 1):
        if found is not None:
            group = found[1]
            fresh = list(rows_of(group))
            whole, episodes, rows = whole + 1, episodes + len(group), rows + fresh
            tokens += sum(len(row["output"]) for row in fresh)
            held += sum(map(bytes_of, fresh))
        if held >= PART_BYTES or place == len(items):
            yield (
                rows,
                Part(
                    until=place - first,
                    items=whole,
                    episodes=episodes,
                    turns=len(rows),
                    tokens_sampled=tokens,
                ),
            )
            rows, first = [], place
            held = whole = episodes = tokens = 0
