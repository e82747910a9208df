"""Plays held-out episodes of tasks and says how many the policy solves, and at what cost.

    python -m experiments.eval model=NAME_OR_DIR_OR_RUN_DIR task=hop [episodes=256] [seed=0]
    python -m experiments.eval model=... task=hop,notes,calc samples=8 plot=eval.png  # pass@8
    python -m experiments.eval model=RUN_DIR/checkpoints/20 suite=all  # of configs/suite/
    python -m experiments.eval model=... task=hop agent=mini-swe-agent  # of configs/agent/
    python -m experiments.eval model=NAME_AT_URL url=http://127.0.0.1:8000/v1 task=hop

Without `url` the model is served here, through engine and gateway, as in training. Several tasks
are played one after the other, so that each row is what its task gives alone: then the last line is
{"rows": [...], "plot"}, else the row itself.
"""

import asyncio
import dataclasses
import functools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from experiments.command import command
from experiments.eval_report import draw, table
from experiments.models import resolve
from experiments.simulate import check_plot
from forge_jax.agents.families import agent_of, check_level
from forge_jax.agents.protocol import Agent
from forge_jax.config import (
    BudgetConfig,
    ContextConfig,
    EvalConfig,
    FaultConfig,
    MeshConfig,
    ProgramConfig,
    RewardConfig,
    RolloutConfig,
    ToolsConfig,
    UserError,
    check,
    load,
)
from forge_jax.rl.evaluate import NothingPlayed, held_out, played, summarise
from forge_jax.rl.play import Player, remote_episode
from forge_jax.rl.report import progress
from forge_jax.rl.rewards import OUTCOME, Scorer
from forge_jax.rl.scores import scores
from forge_jax.rl.serving import serving, shared_client
from forge_jax.sharding import mesh_from
from forge_jax.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class Config:
    """One evaluation."""

    model: str  # preset, Hugging Face folder or run folder; with `url` the model's name there
    task: tuple[str, ...]  # task families
    episodes: int = 256  # of each task family
    samples: int = 1  # of those, of the same task: pass@k is of k up to so many
    level: int = 0  # of difficulty
    seed: int = 0
    temperature: float = 1.0
    concurrency: int = 64
    episode_seconds: float = 60.0
    scripts: tuple[str, ...] = ()  # of right letters, as LATIN; empty: any is right
    agent: ProgramConfig | None = None  # null: the task family's own
    tools: ToolsConfig | None = None  # MCP servers of a white-box agent in its place
    context: ContextConfig | None = None  # of a white-box agent; null: as the family has it
    url: str | None = None  # OpenAI-compatible endpoint, ending in /v1
    plot: str | None = None  # .png file to draw the rows in
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
        check(
            self.url is None or not self.scripts,
            f"scripts={list(self.scripts)} needs the tokens of replies, which url= does not tell",
        )
        check(self.episode_seconds > 0, f"episode_seconds={self.episode_seconds} must be > 0")
        rewarded(self)  # where names of scripts are checked
        check(bool(self.task), "task=[] must name at least one task family")
        check(len(set(self.task)) == len(self.task), f"task={list(self.task)}: each once")
        check(
            self.samples >= 1 and self.episodes % self.samples == 0,
            f"samples={self.samples} must be at least 1 and divide episodes={self.episodes}",
        )
        check(self.level >= 0, f"level={self.level} must be >= 0")
        check_plot(self.plot)


Play = Callable[[int, int, Task], Awaitable[Episode]]  # number of a task, replica, the task
Row = dict[str, Any]


@command("eval", plain=("model",), texts=("model",), listed=("task",))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    suite, overrides = HydraConfig.get().runtime.choices["suite"], HydraConfig.get().overrides.task
    if suite is not None and any(override.startswith("++plain.task=") for override in overrides):
        raise UserError(f"suite={suite} and task={','.join(mapping['task'])}: give one of them")
    cfg = load(Config, mapping)
    agents = {name: agent_of(name, cfg.agent, cfg.tools, cfg.context) for name in cfg.task}
    for name in cfg.task:
        check_level(name, cfg.level)
    try:
        rows = asyncio.run(at_url(cfg, agents) if cfg.url else here(cfg, agents))
    except NothingPlayed as error:
        if cfg.url is None:
            raise
        raise UserError(f"url={cfg.url}: {error}") from error
    print(table(rows), file=sys.stderr)
    if cfg.plot is not None:
        draw(cfg.plot, rows)
    return rows[0] if len(rows) == 1 else {"rows": rows, "plot": cfg.plot}


async def here(cfg: Config, agents: Mapping[str, Agent]) -> list[Row]:
    """The model served by this process."""
    model = resolve(cfg.model, cfg.seed, mesh=mesh_from(cfg.mesh))
    with ThreadPoolExecutor(1, "device") as device:
        async with serving(model, model.params, 0, cfg.rollout, device) as up:

            def player(agent: Agent) -> Play:
                return Player(
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
                ).episode

            scorer = Scorer(reward=rewarded(cfg), decode=model.chat.tokenizer.decode)
            return await shown(cfg, {n: player(agent) for n, agent in agents.items()}, scorer)


async def at_url(cfg: Config, agents: Mapping[str, Agent]) -> list[Row]:
    """A model served elsewhere."""
    assert cfg.url is not None
    async with shared_client(cfg.url.removesuffix("/").removesuffix("/v1")) as client:

        def player(agent: Agent) -> Play:
            return lambda number, replica, task: remote_episode(
                agent, client, cfg.model, number, task, cfg.episode_seconds
            )

        return await shown(cfg, {n: player(agent) for n, agent in agents.items()}, OUTCOME)


def rewarded(cfg: Config) -> RewardConfig:
    """What is a fault of a call."""
    return RewardConfig(faults=FaultConfig(scripts=cfg.scripts))


async def shown(cfg: Config, players: Mapping[str, Play], scorer: Scorer) -> list[Row]:
    """Evaluates task family by task family, with progress bars on stderr."""
    with progress(Console(stderr=True)) as bars:
        added = {n: bars.add_task(f"{n} held out", total=cfg.episodes, shown="") for n in players}
        rows = []
        for name, play in players.items():
            advance = functools.partial(bars.advance, added[name])
            episodes = await sampled(cfg, name, play, advance)
            rows.append(row_of(cfg, name, episodes, scorer))
        return rows


async def sampled(cfg: Config, name: str, play: Play, advance: Callable[[], None]) -> list[Episode]:
    """The episodes of a task family, those of one task behind each other."""
    tasks = held_out(name, cfg.episodes // cfg.samples, cfg.seed, cfg.level)
    return await played(
        [task for task in tasks for _ in range(cfg.samples)],
        lambda at, task: play(at // cfg.samples, at % cfg.samples, task),
        cfg.concurrency,
        advance,
    )


def row_of(cfg: Config, name: str, episodes: Sequence[Episode], scorer: Scorer) -> Row:
    """What is told of a task family."""
    whole = dataclasses.asdict(summarise(episodes))
    return {"task": name, "level": cfg.level} | whole | scores(episodes, cfg.samples, scorer)


if __name__ == "__main__":
    main()
