"""One training run: warm start, gate, reinforcement learning, evaluation, summary.

A configuration and a model go in; the run folder and its summary come out. A run that
was killed continues from its newest checkpoint as if it had not been.
"""

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from forge_jax.agents.limits import WorldLimits
from forge_jax.agents.protocol import Agent
from forge_jax.config import RolloutConfig, TrainConfig, UserError
from forge_jax.models.hf_lora import export_adapter
from forge_jax.models.load import LoadedModel
from forge_jax.models.lora import merge, tuned
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.collect import Collector
from forge_jax.rl.credit import says_nothing
from forge_jax.rl.evaluate import Evaluation, played, summarise
from forge_jax.rl.guard import Guard
from forge_jax.rl.keeping import Keeper, Run
from forge_jax.rl.loop import reinforce
from forge_jax.rl.mixture import agents_of, by_domain, evaluated, lanes_of, sources_of, tunings_of
from forge_jax.rl.play import Player
from forge_jax.rl.plots import draw_curves
from forge_jax.rl.pool import pool_of
from forge_jax.rl.queueing import group_deadline
from forge_jax.rl.report import Reporter, progress
from forge_jax.rl.rewards import Scorer, fault_means, measured_faults
from forge_jax.rl.serving import Serving, engine_elsewhere, serving
from forge_jax.rl.start import Start, beginning, prepared, step_config
from forge_jax.rl.stopping import stoppable
from forge_jax.rl.summary import domain_summary, summary_of
from forge_jax.rl.watchdog import watching
from forge_jax.rl.writing import write_whole
from forge_jax.rollout.fitting import check_model, over_places


def train(
    cfg: TrainConfig, model: LoadedModel, folder: Path, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs `cfg` in `folder`, from its newest checkpoint if there is one; the summary.

    Consumes the weights of `model`; `config` is what is reported to wandb. Raises
    KeyboardInterrupt where a signal ends it, see `stoppable`, and UserError where the model does
    not fit what is asked of the engine or lacks modules to train, there are fewer devices than the
    mesh wants, a checkpoint cannot be read, its pool cannot be opened or is another run's, or the
    warm start stays below its gate.
    """
    began, model = time.monotonic(), prepared(cfg, model)
    agents = agents_of(cfg)
    lanes_of(cfg), sources_of(cfg)  # what does not go together is said before the warm start
    check_model(cfg.rollout, model.cfg)
    over_places(cfg.rollout, cfg.mesh.places * cfg.mesh.context)  # said before the warm start
    pool = pool_of(cfg.pool, folder)  # and so is this
    with (
        closing(Checkpoints(folder / "checkpoints", cfg.checkpoints_kept)) as checkpoints,
        progress(Console(stderr=True)) as bars,
    ):
        # On this thread, where an interrupt ends it at once; the device thread comes after.
        start = beginning(cfg, model, folder, checkpoints, bars)
        with (
            closing(Reporter(folder, cfg.log, config, start.step)) as reporter,
            ThreadPoolExecutor(1, "device") as device,
        ):
            run = Run(
                cfg=cfg, model=model, agents=agents, folder=folder, pool=pool, bars=bars,
                checkpoints=checkpoints, reporter=reporter, device=device, began=began,
            )  # fmt: skip
            summary = asyncio.run(play(run, start))
            if summary is None:
                raise KeyboardInterrupt
            reporter.summarise(summary)
            draw_curves(folder / "curves.png", reporter.rows, summary)
    write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


async def play(run: Run, start: Start) -> dict[str, Any] | None:
    """Everything that needs agents: evaluation, reinforcement learning, evaluation. None if it
    was stopped between them; then the last complete step is saved."""
    # The engine's copy is taken before the first update.
    params = merge(tuned(start.base, start.state.params), run.cfg.lora)
    published = run.folder / "weights"
    elsewhere = engine_elsewhere(run.cfg, run.model, published, start.step, run.device)
    async with (
        watching() as watchdog,
        serving(run.model, params, start.step, sizes(run.cfg), run.device, elsewhere) as up,
    ):
        collector = new_collector(run, up)
        keeper = await opened(run, up, start, collector)
        before = run.reporter.rows[-1] if run.reporter.rows else {}
        with stoppable() as stop:
            state = await reinforce(
                start.state,
                first=start.step + 1,
                cfg=run.cfg,
                step_cfg=step_config(run.cfg, run.model, warm=False),
                collector=collector,
                engine=up.engine,
                guard=Guard(run.cfg.protect, run.reporter.rows),
                device=run.device,
                on_step=keeper.keep,
                decode=run.model.chat.tokenizer.decode,
                base=start.base,
                reference=start.reference,
                stop=stop,
                measured=lambda step: measured(run, up, step),
                faults=lambda: added(
                    before, faults_of(up) | {"loop_blocked": watchdog.blocked} | collector.counts
                ),
            )
            if stop.is_set():
                await asyncio.get_running_loop().run_in_executor(run.device, keeper.stop)
                return None
        after, domains = await evaluation(run, up, "evaluation after")
    if run.cfg.lora.rank:
        said = (state.params, run.cfg.lora, base_name(run.cfg.model))
        export_adapter(run.folder / "adapter", run.model.cfg, *said)
    rows, totals = run.reporter.rows, keeper.totals
    found = summary_of(run.cfg, rows, totals, after) | domain_summary(
        run.cfg, rows, totals, domains, collector.lanes
    )
    return found | {"seconds": keeper.seconds(), "run_dir": str(run.folder)}


def faults_of(up: Serving) -> dict[str, int]:
    """Faults of what serves, and of the worlds that compute beside it, since it began."""
    return {
        "engine_restarts": up.health.failures,
        "gateway_restarts": up.gateway.restarts,
        "world_threads_left": up.threads.left,
    }


def added(before: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of a run, whose last row of earlier sessions is `before`."""
    return {name: before.get(name, 0) + count for name, count in counts.items()}


def base_name(model: str) -> str:
    """What an adapter says of its base: where the folder is, or the name of the preset."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


async def opened(run: Run, up: Serving, start: Start, collector: Collector) -> "Keeper":
    """The queue taken up where a checkpoint left it, or a fresh policy led through the gate.

    The fresh one is kept as checkpoint 0, so that a run killed before its next one neither
    evaluates again nor meets groups in its pool that it does not know. Raises UserError
    where the policy stays below the gate.
    """
    if start.cursors is not None:
        collector.restore(start.cursors, start.step)
        return Keeper(run, start.step, start.totals)
    whole, domains = await evaluation(run, up, "evaluation before")
    solved = {name: found.success for name, found in domains.items()}
    for name, success in solved.items():
        if success < run.cfg.warm.gate:
            raise UserError(
                f"the policy solves {success:.2f} of {name}, below "
                f"warm.gate={run.cfg.warm.gate}: RL would start from chance; raise warm.steps"
            )
    totals = dataclasses.replace(
        start.totals,
        eval_before=whole.success,
        evals_before=solved,
        faults_before=whole.faults,
    )
    keeper = Keeper(run, 0, totals)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(run.device, keeper.save, 0, start.state, collector.state())
    return keeper


def players(
    run: Run, up: Serving, purpose: str, seed: int, temperature: float
) -> dict[str, Player]:
    """By family a player of its tasks through what is up."""
    one = functools.partial(player, run, up, purpose, seed, temperature)
    return {family: one(agent) for family, agent in run.agents.items()}


def player(
    run: Run, up: Serving, purpose: str, seed: int, temperature: float, agent: Agent
) -> Player:
    """A player of an agent's tasks through what is up."""
    return Player(
        agent=agent,
        gateway=up.gateway,
        url=up.url,
        client=up.client,
        model=run.model.name,
        purpose=purpose,
        seed=seed,
        temperature=temperature,
        seconds=run.cfg.sched.episode_seconds,
        budget=run.cfg.budget,
        limits=WorldLimits(
            tool=run.cfg.sched.tool_seconds,
            verify=run.cfg.sched.verify_seconds,
            threads=up.threads,
        ),
        health=up.health,
    )


async def evaluation(run: Run, up: Serving, title: str) -> tuple[Evaluation, dict[str, Evaluation]]:
    """Plays the held-out episodes of all domains, the same ones, with the same seeds, whenever it
    is called: what they came to, all together and by domain."""
    cfg, tasks = run.cfg.eval, evaluated(run.cfg)
    bar = run.bars.add_task(title, total=len(tasks), shown="")
    one = players(run, up, "eval", cfg.seed, cfg.temperature)
    episodes = await played(
        tasks,
        lambda number, task: one[task.family].episode(number, 0, task),
        cfg.concurrency,
        advance=lambda: run.bars.advance(bar),
    )
    sizes = await asyncio.to_thread(measured_faults, episodes, scorer_of(run))
    found = dataclasses.replace(summarise(episodes), faults=fault_means(sizes))
    low, high = found.success_ci
    run.bars.update(
        bar,
        shown=f"success {found.success:.3f} [{low:.3f}, {high:.3f}]  calls {found.mean_turns:.2f}",
    )
    return found, by_domain(run.cfg, episodes)


async def measured(run: Run, up: Serving, step: int) -> dict[str, float]:
    """After every `eval.every` updates how much is solved, of all domains together and of each,
    and what calls did wrong."""
    every = run.cfg.eval.every
    if every is None or step % every:
        return {}
    whole, domains = await evaluation(run, up, f"evaluation {step}")
    row = {"eval": whole.success} | {f"eval_fault_{n}": x for n, x in whole.faults.items()}
    if run.cfg.domains is not None:
        row |= {f"eval_{name}": found.success for name, found in domains.items()}
    return row


def new_collector(run: Run, up: Serving) -> Collector:
    """Empty queues over the run's pool and task sources."""
    cfg = run.cfg
    one = players(run, up, "train", cfg.seed, cfg.temperature)
    lanes = lanes_of(cfg)
    scorer = scorer_of(run)
    return Collector(
        lanes=lanes,
        pool=run.pool,
        sources=sources_of(cfg),
        play=lambda number, task: one[task.family].group(
            number, task, cfg.sched.group, group_deadline(cfg.sched)
        ),
        patience=cfg.sched.pool_seconds,
        most_broken=cfg.protect.most_broken,
        tunings=tunings_of(cfg, lanes),
        filters=cfg.filter,
        constant=lambda group: says_nothing(group, scorer),
    )


def scorer_of(run: Run) -> Scorer:
    """How the episodes of a run are rewarded and credited."""
    decode = run.model.chat.tokenizer.decode
    return Scorer(reward=run.cfg.reward, credit=run.cfg.credit, decode=decode)


def sizes(cfg: TrainConfig) -> RolloutConfig:
    """The engine of a run. A synchronous one repeats to the bit, whatever is cached when."""
    return dataclasses.replace(
        cfg.rollout, deterministic=cfg.rollout.deterministic or cfg.sched.synchronous
    )
