"""Folders of runs that nobody ran: settings, rows and summaries as the training command leaves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def make_run(
    folder: Path,
    rewards: Sequence[float | None],
    *,
    seed: int = 0,
    window: int = 0,
    steps: int | None = None,
    ended: bool = True,
    seconds: float = 1.0,
) -> Path:
    """A run with a row for each of `rewards`, each of `seconds` and 10 tokens."""
    folder.mkdir(parents=True)
    settings: dict[str, Any] = {
        "model": "quick",
        "task": "hop",
        "steps": len(rewards) if steps is None else steps,
        "seed": seed,
        "sched": {"policy": "window", "window": window},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / ".hydra").mkdir()  # Hydra keeps a file of that name beside it
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {"step": i, "reward": reward, "reward_slow": reward, "tokens_sampled": 10,
         "seconds_collect": 0.75 * seconds, "seconds_update": 0.25 * seconds}
        for i, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        summary = {
            "steps": settings["steps"],
            "eval_after": rewards[-1],
            "eval_after_ci": [0.0, 1.0],
            "seconds": seconds * len(rewards),
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def make_multirun(folder: Path) -> Path:
    """Two windows, three seeds each: W=8 learns twice as fast, in half the seconds a step."""
    for window, gain, seconds in ((0, 0.05, 2.0), (8, 0.1, 1.0)):
        for seed in range(3):
            rewards = [min(1.0, gain * (step + seed)) for step in range(20)]
            make_run(
                folder / f"sched.window={window},seed={seed}",
                rewards,
                seed=seed,
                window=window,
                seconds=seconds,
            )
    return folder
