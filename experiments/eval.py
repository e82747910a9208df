"""Plays held-out episodes of a task and says how many the policy solves.

    python -m experiments.eval model=NAME_OR_DIR_OR_RUN_DIR task=hop [episodes=256] [seed=0]
    python -m experiments.eval model=... task=hop agent=mini-swe-agent  # of configs/agent/
    python -m experiments.eval model=NAME_AT_URL url=http://127.0.0.1:8000/v1 task=hop

Without `url` the model is served here, through engine and gateway, as in training.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from experiments.command import command
from experiments.models import resolve
from forge_jax.agents.families import agent_of
from forge_jax.agents.protocol import Agent
from forge_jax.config import (
    BudgetConfig,
    ContextConfig,
    EvalConfig,
    MeshConfig,
    ProgramConfig,
    RolloutConfig,
    ToolsConfig,
    UserError,
    check,
    load,
)
from forge_jax.rl.evaluate import Evaluation, NothingPlayed, evaluate, held_out
from forge_jax.rl.play import Player, remote_episode
from forge_jax.rl.report import progress
from forge_jax.rl.serving import serving, shared_client
from forge_jax.sharding import mesh_from
from forge_jax.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class Config:
    """One evaluation."""

    model: str  # preset, Hugging Face folder or run folder; with `url` the model's name there
    task: str
    episodes: int = 256
    seed: int = 0
    temperature: float = 1.0
    concurrency: int = 64
    episode_seconds: float = 60.0
    agent: ProgramConfig | None = None  # null: the task family's own
    tools: ToolsConfig | None = None  # MCP servers of a white-box agent in its place
    context: ContextConfig | None = None  # of a white-box agent; null: as the family has it
    url: str | None = None  # OpenAI-compatible endpoint, ending in /v1
    budget: BudgetConfig = field(default_factory=BudgetConfig)  # of an episode
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)  # that a model served here runs on

    def __post_init__(self) -> None:
        # The limits are those of an evaluation during training.
        EvalConfig(
            episodes=self.episodes,
            concurrency=self.concurrency,
            temperature=self.temperature,
            seed=self.seed,
        )
        check(
            self.url is None or self.temperature == 1,
            f"temperature={self.temperature} needs our own server: agents leave it to url=",
        )
        check(
            self.url is None or self.mesh == MeshConfig(),
            f"mesh goes with a model served here, not with url={self.url}",
        )
        check(not self.rollout.routes, "rollout.routes=True: only training uses what is recorded")
        check(
            self.url is None or self.budget == BudgetConfig(),
            f"budget={self.budget} goes with a model served here, not with url={self.url}",
        )
        check(self.episode_seconds > 0, f"episode_seconds={self.episode_seconds} must be > 0")


@command("eval", plain=("model", "task"))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(Config, mapping)
    agent = agent_of(cfg.task, cfg.agent, cfg.tools, cfg.context)
    try:
        found = asyncio.run(at_url(cfg, agent) if cfg.url else here(cfg, agent))
    except NothingPlayed as error:
        if cfg.url is None:
            raise
        raise UserError(f"url={cfg.url}: {error}") from error
    return {"task": cfg.task, **dataclasses.asdict(found)}


async def here(cfg: Config, agent: Agent) -> Evaluation:
    """The model served by this process."""
    model = resolve(cfg.model, cfg.seed, mesh=mesh_from(cfg.mesh))
    with ThreadPoolExecutor(1, "device") as device:
        async with serving(model, model.params, 0, cfg.rollout, device) as up:
            player = Player(
                agent=agent,
                gateway=up.gateway,
                url=up.url,
                client=up.client,
                model=model.name,
                purpose="eval",
                seed=cfg.seed,
                temperature=cfg.temperature,
                seconds=cfg.episode_seconds,
                budget=cfg.budget,
            )
            return await shown(cfg, lambda number, task: player.episode(number, 0, task))


async def at_url(cfg: Config, agent: Agent) -> Evaluation:
    """A model served elsewhere."""
    assert cfg.url is not None
    async with shared_client(cfg.url.removesuffix("/").removesuffix("/v1")) as client:

        async def play(number: int, task: Task) -> Episode:
            return await remote_episode(agent, client, cfg.model, number, task, cfg.episode_seconds)

        return await shown(cfg, play)


async def shown(cfg: Config, play: Callable[[int, Task], Awaitable[Episode]]) -> Evaluation:
    """Evaluates with a progress bar on stderr."""
    with progress(Console(stderr=True)) as bars:
        bar = bars.add_task(f"{cfg.task} held out", total=cfg.episodes, shown="")
        tasks = held_out(cfg.task, cfg.episodes, cfg.seed)
        return await evaluate(tasks, play, cfg.concurrency, lambda: bars.advance(bar))


if __name__ == "__main__":
    main()
