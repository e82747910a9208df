"""Episodes as a table: one row a call, in Parquet or in JSON lines.

Groups of episodes flow in, a file flows out. The invariant: under its name the file is whole,
and memory holds the rows of one batch.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forge_jax.rl.credit import leave_one_out, why_left_out
from forge_jax.types import Episode, Turn

BATCH_TOKENS = 1 << 20  # of the rows that are written at once
NO_COLUMN = ("routes", "support")  # of several axes, and only of use to the trainer
ARRAYS = {
    "prompt": pa.list_(pa.int32()),
    "output": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(pa.int32()),
}
EPISODE_COLUMNS = {
    "item": pa.int64(), "replica": pa.int64(), "family": pa.string(), "seed": pa.int64(),
    "split": pa.string(), "status": pa.string(), "error": pa.string(), "metrics": pa.string(),
    "reward": pa.float64(), "advantage": pa.float64(), "turn": pa.int64(), "left_out": pa.string(),
}  # fmt: skip


def _scalar(hint: Any) -> pa.DataType:
    """The type of a column that holds values of a field so annotated."""
    if isinstance(hint, types.UnionType):
        [hint] = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    for kind, column in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
        if hint is kind:
            return column
    return pa.string()


TURN_COLUMNS = ARRAYS | {
    name: _scalar(hint)
    for name, hint in typing.get_type_hints(Turn).items()
    if name not in (*ARRAYS, *NO_COLUMN)
}
SCHEMA = pa.schema(list((EPISODE_COLUMNS | TURN_COLUMNS).items()))

Row = dict[str, Any]


def rows_of(group: Sequence[Episode]) -> Iterator[Row]:
    """The calls of a group. `left_out` is why a trainer learns nothing from a call, null if it
    does; `advantage` is that of the episode, null where it has none."""
    rewards = np.array([episode.outcome.reward for episode in group], np.float64)
    valid = np.array([episode.outcome.valid for episode in group], bool)
    advantages = leave_one_out(rewards, valid)
    for index, episode in enumerate(group):
        counts = advantages is not None and bool(valid[index])
        shared = {
            "item": episode.item,
            "replica": episode.replica,
            "family": episode.task.family,
            "seed": episode.task.seed,
            "split": episode.task.split,
            "status": str(episode.outcome.status),
            "error": _text(episode.outcome.error),
            "metrics": json.dumps(dict(episode.outcome.metrics)),
            "reward": episode.outcome.reward,
            "advantage": float(advantages[index]) if counts else None,  # type: ignore[index]
        }
        for number, turn in enumerate(episode.turns):
            why = why_left_out(turn, episode.outcome, constant=advantages is None)
            label = {"turn": number, "left_out": _plain(why)}
            yield shared | label | {name: _plain(getattr(turn, name)) for name in TURN_COLUMNS}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, np.ndarray | bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    return json.dumps(dataclasses.asdict(value))


def _text(value: str) -> str:
    """What UTF-8 can hold of a text."""
    return str(value).encode("utf-8", "backslashreplace").decode()


class Sink(Protocol):
    """What takes rows."""

    def write(self, rows: Sequence[Row]) -> None: ...
    def close(self) -> None: ...


class Parquet:
    """Rows as Parquet, a row group a batch."""

    def __init__(self, path: Path):
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")

    def write(self, rows: Sequence[Row]) -> None:
        self._writer.write_table(pa.Table.from_pylist(list(rows), SCHEMA))

    def close(self) -> None:
        self._writer.close()


class JsonLines:
    """Rows as JSON, one a line; a number that JSON has no word for is null."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            plain = {name: _finite(value) for name, value in row.items()}
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_finite(one) for one in value.tolist()]
    return None if isinstance(value, float) and not np.isfinite(value) else value


@contextmanager
def table(path: Path, kind: str) -> Iterator[Sink]:
    """A file of rows, under its name once it is whole; what is broken off leaves none."""
    beside = path.with_name(path.name + ".part")
    sink: Sink = Parquet(beside) if kind == "parquet" else JsonLines(beside)
    try:
        try:
            yield sink
        finally:
            sink.close()
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    beside.replace(path)
