"""Episodes as a table: one row a call, in Parquet or in JSON lines.

Groups of episodes flow in, rows and files of them flow out. The invariant: a row says all that
its call was, array by array, nested as deep as the array has axes.
"""

import dataclasses
import json
import math
import shutil
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forge_jax.rl.credit import credited, why_left_out
from forge_jax.types import Episode, Turn

Row = dict[str, Any]
SUPPORT = "support_"  # begins the columns of a support's arrays


def _lists(leaf: pa.DataType, axes: int = 1) -> pa.DataType:
    return pa.list_(_lists(leaf, axes - 1)) if axes else leaf


ARRAYS = {
    "prompt": _lists(pa.int32()),
    "output": _lists(pa.int32()),
    "logprobs": _lists(pa.float32()),
    "versions": _lists(pa.int32()),
    "routes": _lists(pa.int16(), 3),
    "support_ids": _lists(pa.int32(), 2),
    "support_offsets": _lists(pa.float32(), 2),
    "support_kind": _lists(pa.int8()),
}
EPISODE_COLUMNS = {
    "item": pa.int64(), "replica": pa.int64(), "family": pa.string(), "seed": pa.int64(),
    "split": pa.string(), "status": pa.string(), "error": pa.string(), "metrics": pa.string(),
    "reward": pa.float64(), "outcome_advantage": pa.float64(), "turn": pa.int64(),
    "left_out": pa.string(),
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
    if name not in (*ARRAYS, "support")
}
SCHEMA = pa.schema(list((EPISODE_COLUMNS | TURN_COLUMNS).items()))


def rows_of(group: Sequence[Episode]) -> Iterator[Row]:
    """The calls of a group. `outcome_advantage` is what a call has by the outcomes of its group
    alone, with the default credit, null where it has none; `left_out` is why a trainer so credited
    learns nothing from it, null if it does."""
    [credit] = credited([group])
    for episode, values in zip(group, credit, strict=True):
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
        }
        for number, turn in enumerate(episode.turns):
            none = bool(np.isnan(values[number]))
            why = why_left_out(turn, episode.outcome, constant=none)
            own = None if none else float(values[number])
            label = {"turn": number, "left_out": _plain(why), "outcome_advantage": own}
            yield shared | label | {name: _plain(_value(turn, name)) for name in TURN_COLUMNS}


def _value(turn: Turn, column: str) -> Any:
    if not column.startswith(SUPPORT):
        return getattr(turn, column)
    return turn.support and getattr(turn.support, column.removeprefix(SUPPORT))


def bytes_of(row: Row) -> int:
    """What the arrays of a row take."""
    return sum(value.nbytes for value in row.values() if isinstance(value, np.ndarray))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, np.ndarray | bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    return json.dumps(dataclasses.asdict(value))


def _text(value: str) -> str:
    """What UTF-8 can hold of a text."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def write(path: Path, rows: Sequence[Row], kind: str) -> None:
    """A file of rows: `kind` is parquet or jsonl."""
    if kind == "parquet":
        columns = [_column([row[field.name] for row in rows], field.type) for field in SCHEMA]
        pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), path, compression="zstd")
        return
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            plain = {name: _finite(value) for name, value in row.items()}
            file.write(json.dumps(plain, allow_nan=False) + "\n")


def join(parts: Sequence[Path], path: Path, kind: str) -> None:
    """One file of the rows of many, a part in memory at a time."""
    if kind == "parquet":
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            for part in parts:
                writer.write_table(pq.ParquetFile(part).read())
        return
    with path.open("wb") as file:
        for part in parts:
            with part.open("rb") as rows:
                shutil.copyfileobj(rows, file)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column; arrays, of as many axes as `kind` has lists, without a look at each
    number."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    arrays = [value for value in values if value is not None]
    axes = 0
    while pa.types.is_list(kind):
        axes, kind = axes + 1, kind.value_type
    none = np.empty(0, kind.to_pandas_dtype())
    column = pa.array(np.concatenate([none, *(array.ravel() for array in arrays)]), kind)
    for axis in reversed(range(1, axes)):
        sizes = [np.full(math.prod(array.shape[:axis]), array.shape[axis]) for array in arrays]
        column = pa.ListArray.from_arrays(_offsets(sizes), column)
    lengths = np.array([0 if value is None else len(value) for value in values])
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(_offsets([lengths]), column, mask=missing)


def _offsets(sizes: Sequence[np.ndarray]) -> pa.Array:
    """Where lists begin, and the last ends, by the sizes of them all."""
    ends = np.cumsum(np.concatenate([[0], *sizes]).astype(np.int64))
    return pa.array(ends, pa.int32())


def _finite(value: Any) -> Any:
    """What JSON has words for: a number that is not finite is null."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
