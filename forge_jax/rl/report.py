"""Where a run reports to: metrics.jsonl, a line on the terminal, wandb if asked.

Rows of metrics go in, one object a step; the step only grows, also after a resume.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forge_jax.config import LogConfig, UserError
from forge_jax.rl.writing import write_whole, written

METRICS = "metrics.jsonl"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line cut short by a kill is dropped."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not JSON: {line[:60]!r}") from error
    return rows


def progress(console: Console) -> Progress:
    """A progress display on stderr whose last column shows the newest metrics."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
        console=console,
        refresh_per_second=4,
    )


class Reporter:
    """Appends one row a step; owns metrics.jsonl and the wandb run of a training run."""

    def __init__(self, folder: Path, cfg: LogConfig, config: Mapping[str, Any], last_step: int):
        """Rows after `last_step`, the step of the checkpoint continued from, are cut."""
        self.path = folder / METRICS
        self.rows = [row for row in read_rows(self.path) if row["step"] <= last_step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._wandb = start_wandb(folder, cfg, config) if cfg.wandb != "disabled" else None

    def add(self, row: dict[str, Any]) -> None:
        """Writes one step. Raises ValueError if its step does not come after the last one, OSError
        where the file cannot be written; a row cut short is none when it is read again."""
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            raise ValueError(f"step {row['step']} after step {self.rows[-1]['step']}")
        self.rows.append(row)
        with written(self.path), self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self._wandb is not None:
            scalars = {k: v for k, v in row.items() if isinstance(v, int | float)}
            self._wandb.log(scalars, step=row["step"])

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Tells wandb how the run ended."""
        if self._wandb is not None:
            self._wandb.summary.update(dict(summary))

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(folder: Path, cfg: LogConfig, config: Mapping[str, Any]) -> Any:
    """A wandb run whose id is kept in the run folder, so that a resume continues it."""
    import wandb  # two seconds that runs without it do not pay

    name = folder / "wandb_id"
    if not name.exists():
        name.write_text(secrets.token_hex(4))
    return wandb.init(
        project=cfg.project,
        mode=cast(Any, cfg.wandb),  # checked by LogConfig
        dir=str(folder),
        id=name.read_text(),
        resume="allow",
        config=dict(config),
    )
