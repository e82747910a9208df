"""One episode of a program against a stand-in server, for tests of black-box agents."""

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stand_in_server import completion, replies, says, stand_in

from forge_jax.agents.black_box import black_box
from forge_jax.agents.protocol import FolderReader
from forge_jax.agents.runner import run_episode
from forge_jax.loading import load
from forge_jax.programs import ProgramConfig
from forge_jax.types import Outcome, Task

TASK = Task(family="hop", seed=1)
PYTHON = [sys.executable, "-S", "-c"]


@dataclass
class World:
    """A workspace that keeps what it is asked to score."""

    prompt: str = "go"
    broken: str = ""
    log: str = field(default_factory=lambda: tempfile.mkstemp(prefix="forge_jax-world-")[1])

    def setup(self, folder: Path) -> None:
        self.breaks("setup")
        (folder / "given").write_text("here")

    def score(self, folder: FolderReader, stdout: str) -> float:
        self.breaks("score")
        with open(self.log, "a") as log:  # a verifier is called in another process
            log.write(json.dumps(stdout) + "\n")
        return 1.0

    @property
    def seen(self) -> list[str]:
        return [json.loads(line) for line in Path(self.log).read_text().splitlines()]

    def breaks(self, where: str) -> None:
        if self.broken == where:
            raise OSError(f"no {where}")


def config(**settings: Any) -> ProgramConfig:
    return load(ProgramConfig, {"sandbox": {"kind": "none"}, "stdin": "{prompt}", **settings})


def episode(cfg: ProgramConfig, world: World, *texts: str, seconds: float = 60.0) -> Outcome:
    async def run() -> Outcome:
        answer, _ = replies(*(completion(says(text)) for text in texts))
        async with stand_in(answer) as client:
            return await run_episode(black_box(cfg, lambda task: world), TASK, client, "m", seconds)

    return asyncio.run(run())
