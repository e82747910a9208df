"""The domains of a run: their lanes, tasks, held-out episodes, scripted play, and what each gave.

A configuration, and later consumed items, flow in; queues, tasks and rows of metrics flow out. The
invariant: a run of one task is a mixture of one domain, and differs from another in nothing else.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.agents.curriculum import DomainTasks, Source
from forge_jax.agents.families import agent_of
from forge_jax.agents.protocol import Agent
from forge_jax.agents.shared_tasks import SharedTasks
from forge_jax.config import Domain, SchedConfig, TrainConfig, UserError
from forge_jax.models.chat import Chat
from forge_jax.rl.collect import Collector, Taken
from forge_jax.rl.evaluate import Evaluation, held_out, summarise
from forge_jax.rl.measure import mean
from forge_jax.rl.queueing import new_deadline, new_policy, new_tuning
from forge_jax.rl.tuning import Tuning
from forge_jax.rl.warm import scripted_samples
from forge_jax.sched.lanes import LaneConfig, Lanes
from forge_jax.sched.stages import Stage
from forge_jax.types import Episode, Sample, Task


def lanes_of(cfg: TrainConfig) -> Lanes:
    """The empty queues of a run: one for each domain, or one for all.

    Raises UserError where a domain's share of a batch is less than an item, or its sizes do not go
    together.
    """
    sched = cfg.sched
    lanes = [
        LaneConfig(name=name, policy=new_policy(own), share=share, deadline=new_deadline(own))
        for name, share, own in lane_scheds(cfg)
    ]
    return Lanes(
        lanes,
        batch=sched.batch,
        tokens=sched.shares == "tokens",
        exact=sched.synchronous,
        stages=stages_of(cfg),
        spare=cfg.filter.tries or 0,
    )


def stages_of(cfg: TrainConfig) -> list[Stage]:
    """The shares of all domains in every stage; empty: they stay as they are."""
    stages = []
    for own in cfg.stages or ():
        whole = sum(own.shares.values())
        shares = tuple(own.shares.get(domain.name, 0.0) / whole for domain in cfg.mixture)
        stages.append(Stage(shares=shares, until=own.until))
    return stages


def tunings_of(cfg: TrainConfig, lanes: Lanes) -> list[Tuning]:
    """What changes the windows of the lanes while the run goes on, one for each; empty: nothing."""
    pairs = zip(lane_scheds(cfg), lanes.queues, strict=True)
    found = [new_tuning(sched, queue) for (_, _, sched), queue in pairs]
    return [tuning for tuning in found if tuning is not None]


def lag_bound(cfg: TrainConfig) -> int | None:
    """The largest lag, in items of its own lane, that a run can have, whatever windows it adopts;
    None: there is no bound."""
    lanes = lanes_of(cfg)
    if cfg.sched.tune is None:
        return lanes.lag_bound
    return max(cfg.sched.tune.lag_updates * queue.batch for queue in lanes.queues) - 1


def shared(cfg: TrainConfig) -> bool:
    """Whether all domains have one queue."""
    return cfg.sched.shares == "admitted"


def lane_scheds(cfg: TrainConfig) -> list[tuple[str, float, SchedConfig]]:
    """Of every lane its name, its share and its sizes."""
    if shared(cfg):
        return [("all", 1.0, cfg.sched)]
    return [(domain.name, domain.share, lane_sched(domain, cfg)) for domain in cfg.mixture]


def lane_sched(domain: Domain, cfg: TrainConfig) -> SchedConfig:
    """`cfg.sched` for one domain: its own sizes, or its share of the run's, rounded up; of stages
    the largest."""
    sched, own = cfg.sched, domain.own
    at = [other.name for other in cfg.mixture].index(domain.name)
    most = max([stage.shares[at] for stage in stages_of(cfg)], default=domain.share)

    def part(whole: int) -> int:
        return math.ceil(most * whole - 1e-9)

    least = [math.floor(other.share * sched.batch + 1e-9) for other in cfg.mixture]
    batch = max(1, math.floor(most * sched.batch + 1e-9))
    fixed = sched.shares == "items" and cfg.stages is None  # quotas, but for the remainders
    places = part(sched.places) if own.in_flight is None else own.in_flight
    if sched.synchronous:  # a batch may take the quota of all domains' remainders from this one
        batch = places = batch + sched.batch - sum(least) if fixed else sched.batch
    window = sched.window if type(sched.window) is not int else part(sched.window)
    try:
        if sched.synchronous and own.in_flight is not None:
            raise ValueError(f"in_flight={own.in_flight} goes with sched.synchronous=False")
        return dataclasses.replace(
            sched,
            batch=batch if fixed or sched.synchronous else 1,
            updates=1,  # of a batch of all domains, and no matter of one's queue
            in_flight=places,
            window=window if own.window is None else own.window,
            buffer=None if sched.buffer is None else part(sched.buffer),
            head_seconds=sched.head_seconds if own.head_seconds is None else own.head_seconds,
            requeue=sched.requeue if own.requeue is None else own.requeue,
        )
    except ValueError as error:
        raise UserError(f"domain {domain.name}: {error}") from error


def sources_of(cfg: TrainConfig) -> list[Source]:
    """The tasks of every lane. Raises UserError on an unknown family."""
    each = [
        DomainTasks(
            domain.family, cfg.seed, domain.own.tasks, domain.own.curriculum, cfg.filter.solved
        )
        for domain in cfg.mixture
    ]
    if shared(cfg):
        parts = {domain.family: own for domain, own in zip(cfg.mixture, each, strict=True)}
        return [SharedTasks(parts, [domain.share for domain in cfg.mixture])]
    return [*each]


def agents_of(cfg: TrainConfig) -> Mapping[str, Agent]:
    """An agent for the tasks of every family. Raises UserError as `agent_of`."""
    families = dict.fromkeys(domain.family for domain in cfg.mixture)
    return {family: agent_of(family, cfg.agent, cfg.tools, cfg.context) for family in families}


def evaluated(cfg: TrainConfig) -> list[Task]:
    """The held-out tasks of all domains, one after the other, `cfg.eval.episodes` of each; of a
    curriculum every level in turn."""
    tasks = []
    for domain in cfg.mixture:
        levels = levels_of(domain)
        own = held_out(domain.family, cfg.eval.episodes, cfg.eval.seed)
        for number, task in enumerate(own):
            tasks.append(dataclasses.replace(task, level=levels[number % len(levels)]))
    return tasks


def levels_of(domain: Domain) -> tuple[int, ...]:
    """The levels that a domain may play, from easy to hard."""
    return (0,) if domain.own.curriculum is None else domain.own.curriculum.levels


def by_domain(cfg: TrainConfig, episodes: Sequence[Episode]) -> dict[str, Evaluation]:
    """What the episodes of `evaluated` came to in every domain."""
    each = cfg.eval.episodes
    parts = [episodes[i * each : (i + 1) * each] for i in range(len(cfg.mixture))]
    return {d.name: summarise(part) for d, part in zip(cfg.mixture, parts, strict=True)}


def imitated_play(cfg: TrainConfig, chat: Chat, step: int) -> list[Sample]:
    """A batch of scripted episodes of all families, in the shares of their domains and at the
    levels that these play."""
    shares: dict[str, float] = {}
    levels: dict[str, list[int]] = {}
    for domain in cfg.mixture:
        shares[domain.family] = shares.get(domain.family, 0.0) + domain.share
        own = levels.setdefault(domain.family, [])
        own += [level for level in levels_of(domain) if level not in own]
    samples, before, given = [], 0.0, 0
    for family, share in shares.items():
        before += share
        episodes = round(before * cfg.warm.batch) - given
        given += episodes
        samples += scripted_samples(
            family, chat, episodes, cfg.seed, step, cfg.context, levels[family]
        )
    return samples


def domain_row(cfg: TrainConfig, taken: Sequence[Taken], collector: Collector) -> dict[str, Any]:
    """What each domain gave to an update, under names that end in the domain's; its shares of what
    has been trained so far. Nothing of a run of one task, but for what its filter left aside."""
    row: dict[str, Any] = {}
    if cfg.filter.constant:
        row["items_constant"] = sum(item.again for item in taken)
    if cfg.domains is None:
        return row
    sources = collector.sources
    for at, domain in enumerate(cfg.mixture):
        name, own = domain.name, [item for item in taken if _is_of(item, domain, cfg)]
        episodes = [e for item in own for e in item.episodes]
        lags = [item.lag for item in own]
        ends = [max([t.start + t.seconds for t in e.turns], default=0.0) for e in episodes]
        values = {
            "seconds": mean(ends),  # from the start of an episode to the end of its last call
            "reward": mean([e.outcome.reward for e in episodes if e.outcome.valid]),
            "items": sum(not item.again for item in own),
            "lag_mean": mean(lags),
            "lag_max": max(lags, default=None),
            "tokens_sampled": sum(len(t.output) for e in episodes for t in e.turns),
        }
        if cfg.filter.constant:
            values["items_constant"] = sum(item.again for item in own)
        if not shared(cfg):
            values |= {"tasks_" + told: value for told, value in sources[at].report().items()}
        row |= {f"{key}_{name}": value for key, value in values.items()}
    return row | (sources[0].report() if shared(cfg) else shares_row(collector.lanes))


def _is_of(item: Taken, domain: Domain, cfg: TrainConfig) -> bool:
    """Whether an item is of `domain`; in a shared queue only its tasks tell."""
    if not shared(cfg):
        return item.domain == domain.name
    return any(episode.task.family == domain.family for episode in item.episodes)


def shares_row(lanes: Lanes) -> dict[str, Any]:
    """The shares of all trained items and of their sampled tokens that each domain has had."""
    items = sum(lane.items for lane in lanes.trained)
    tokens = sum(lane.tokens for lane in lanes.trained)
    row: dict[str, Any] = {}
    for name, lane in zip(lanes.names, lanes.trained, strict=True):
        row[f"share_items_{name}"] = lane.items / items if items else None
        row[f"share_tokens_{name}"] = lane.tokens / tokens if tokens else None
    return row
