"""The training loop: tasks become episodes, a prefix tree, an update, new weights.

Producing and training run at once: agents play through the gateway against the
rollout engine while the trainer consumes what the window allows. Trainer and engine
share one device thread and take turns on it; the engine copies the weights it is given,
since the next update consumes the trainer's, and version s are the weights after step s.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from forge_jax.config import Skip, TrainConfig
from forge_jax.models.lora import merge, tuned
from forge_jax.rl.audit import Audit
from forge_jax.rl.averages import averaged
from forge_jax.rl.collect import Collector, Taken
from forge_jax.rl.costs import observe, prior, trusted
from forge_jax.rl.credit import LeftOut, credited, group_samples, left_out
from forge_jax.rl.guard import Guard, judged
from forge_jax.rl.hold import Held
from forge_jax.rl.measure import batch_row, drafts_row, episode_row, lineage_row, version_row
from forge_jax.rl.mixture import domain_row
from forge_jax.rl.parallel import update
from forge_jax.rl.process import Decode
from forge_jax.rl.reward_row import reward_row
from forge_jax.rl.rewards import Scorer
from forge_jax.rl.staleness import staleness_row
from forge_jax.rl.state import TrainState
from forge_jax.rl.step import StepConfig, Updated
from forge_jax.rl.stopping import unless
from forge_jax.rl.tuning import retune
from forge_jax.rl.updates import Minibatch, compared, dealt, laid, together, token_counts
from forge_jax.rollout.policy import PolicyEngine
from forge_jax.sched.cost import CostModel, Fit
from forge_jax.sched.pack import micro_batches
from forge_jax.types import MicroBatch, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step's consumed items, ready for the device."""

    samples: tuple[Sample, ...]
    turns: tuple[Turn, ...]  # the call each sample is of
    minibatches: tuple[Minibatch, ...]  # one for each update of a pass
    left_out: Mapping[LeftOut, int]  # sampled tokens that are not trained

    @property
    def trees(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of a pass."""
        return tuple(part for one in self.minibatches for part in one.parts)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step done: what a checkpoint and a report need to know of it."""

    state: TrainState
    cursors: dict[str, Any]  # of the collector, taken together with `state`
    batch: Prepared
    row: dict[str, Any]  # its line of metrics.jsonl


def prepare(taken: Sequence[Taken], cfg: TrainConfig, cost: CostModel, scorer: Scorer) -> Prepared:
    """Scores, merges and packs the consumed items; their order does not depend on which
    finished first, and what `cost` decides changes no result but by rounding."""
    ordered = sorted(taken, key=lambda item: item.number)
    groups = [item.episodes for item in ordered]
    credit = credited(groups, scorer)
    made = [group_samples(one, own) for one, own in zip(groups, credit, strict=True)]
    seed = (cfg.seed, ordered[0].number)
    deals = dealt([len(one) for one in made], cfg.sched.updates, seed)
    pairs = [[pair for place in places for pair in made[place]] for places in deals]
    left: Counter[LeftOut] = Counter()
    for one, own in zip(groups, credit, strict=True):
        left.update(left_out(one, own))
    carry = not cfg.mtp.weight  # prediction modules are not carried from block to block

    def pack(samples: Sequence[Sample]) -> Sequence[MicroBatch]:
        packed = micro_batches(samples, "tree", cfg.pack, cost, cfg.mesh, carry)
        return averaged(packed, samples, cfg.loss)

    minibatches = laid([[sample for sample, _ in own] for own in pairs], pack)
    return Prepared(
        samples=tuple(sample for own in pairs for sample, _ in own),
        turns=tuple(turn for own in pairs for _, turn in own),
        minibatches=minibatches,
        left_out=left,
    )


async def reinforce(
    state: TrainState,
    *,
    first: int,
    cfg: TrainConfig,
    step_cfg: StepConfig,
    collector: Collector,
    engine: PolicyEngine,
    guard: Guard,
    device: Executor,
    on_step: Callable[[Step], None],
    stop: asyncio.Event,
    faults: Callable[[], Mapping[str, int]],
    measured: Callable[[int], Awaitable[Mapping[str, Any]]],
    decode: Decode,
    base: Any = None,
    reference: Any = None,
) -> TrainState:
    """Updates `first` to `cfg.steps`, from what agents play meanwhile; the final state.

    With a `base`, `state` is of its adapters; the engine gets both merged. `decode` is the
    policy's tokenizer: what sampled tokens say. `reference` is of the policy that the loss holds
    its own near.

    `on_step` is called on the device thread after each update, while agents go on. What is
    in flight at the end is cancelled. With `stop` set an update that runs is ended and is the
    last. `faults` are counts of the run so far, for its rows; `measured` adds to the row of a step
    what its weights do when they play.
    """
    loop = asyncio.get_running_loop()
    scorer = Scorer(reward=cfg.reward, credit=cfg.credit, decode=decode)
    audit, costs = Audit(cfg.audit_versions, base), Fit(prior(step_cfg.model))
    held = Held(cfg.sched.hold_updates, last=cfg.steps)
    await loop.run_in_executor(device, audit.remember, first - 1, state.params)
    async with asyncio.TaskGroup() as workers:
        collector.resume(workers)
        for step in range(first, cfg.steps + 1):
            collector.fill(workers)
            before = engine.stats()
            began = time.monotonic()
            taken = await unless(stop, collector.take(workers))
            if taken is None:
                break
            collected = time.monotonic()
            cost = trusted(costs, step_cfg.model, cfg.sched.synchronous)
            batch = await asyncio.to_thread(prepare, taken, cfg, cost, scorer)
            state, trained = await loop.run_in_executor(
                device,
                train_step,
                state,
                batch,
                step,
                cfg.sched.epochs,
                step_cfg,
                audit,
                costs,
                guard,
                base,
                reference,
            )
            weights = await loop.run_in_executor(
                device, merge, tuned(base, state.params), step_cfg.lora
            )
            due = await loop.run_in_executor(device, held.due, step, weights)
            if due is not None:
                await engine.swap(*due)
            collector.updated()
            row = {"step": step} | await asyncio.to_thread(consumed_row, taken, batch, scorer)
            row |= drafts_row(before, engine.stats())
            row |= trained | {"seconds_collect": collected - began}
            row |= domain_row(cfg, taken, collector)
            row |= faults()
            row |= {f"items_{why}": count for why, count in collector.given_up().items()}
            row |= version_row(batch.turns, step - 1)
            row["seconds_update"] = time.monotonic() - collected
            row |= await retune(collector.tunings, collector.lanes.names, row["seconds_update"])
            row |= await measured(step)
            record = Step(state=state, cursors=collector.state(), batch=batch, row=row)
            await loop.run_in_executor(device, on_step, record)
            guard.check()
        collector.cancel()
    return state


def consumed_row(taken: Sequence[Taken], batch: Prepared, scorer: Scorer) -> dict[str, Any]:
    """What the row of a step says of the items it consumed, and of the batch they became."""
    row = episode_row(taken) | lineage_row(taken) | reward_row(taken, scorer)
    return row | batch_row(batch.left_out, batch.samples, batch.trees)


def train_step(
    state: TrainState,
    batch: Prepared,
    step: int,
    epochs: int,
    cfg: StepConfig,
    audit: Audit,
    costs: Fit,
    guard: Guard,
    base: Any,
    reference: Any,
) -> tuple[TrainState, dict[str, Any]]:
    """The updates of a batch, and what they say of themselves; one without a trained token
    changes nothing, and neither does one that `guard` skips."""
    found: list[Updated] = []
    judge, row = guard.judge(batch.samples), {}
    before = tuned(base, state.params)
    for one in compared(batch.minibatches, before, epochs, cfg, reference):
        state, done = update(state, one.parts, cfg, base, judge)
        observe(costs, one.parts, done, cfg.tile)
        row = guard.row(done)
        found.append(done)
    done = together(found, len(batch.minibatches))
    row |= {"stepped": done.stepped, "updates": sum(one.stepped for one in found)}
    row["skipped"] = done.skipped
    row |= token_counts(found, len(batch.minibatches)) | judged(found)
    if done.stepped or done.skipped not in (None, Skip.NON_FINITE):
        row |= {"loss": done.loss, "grad_norm": done.grad_norm} | done.metrics
        row |= staleness_row(batch.samples, batch.turns, done.logp, done.index, step - 1)
        first = batch.minibatches[0]  # the one that the weights of version step - 1 computed
        whose = batch.samples[: first.samples], batch.turns[: first.samples]
        if found[0].skipped is not Skip.NON_FINITE:
            row |= audit.gap(*whose, first.parts, step - 1, found[0], cfg)
    audit.remember(step, state.params)
    return state, row
