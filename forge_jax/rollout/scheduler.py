"""Continuous batching: which request sits in which slot, and what came of it.

Requests and device results flow in, device plans and chunks flow out; no clock, no event
loop, no device. Invariant: a slot is free or owned by one running job, and every job
submitted ends exactly once.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Job
from forge_jax.rollout.packets import (
    EXHAUSTED,
    GOES_ON,
    IDLE,
    LOGP,
    STATUS,
    STOPPED,
    TOKEN,
    Sampled,
    buckets,
    pack_prefill,
)
from forge_jax.types import Chunk, Finish


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One round on the device: prefill calls, then a block of decode steps."""

    prefills: tuple[np.ndarray, ...]  # packed, see packets
    admitted: tuple[tuple[tuple[int, Job], ...], ...]  # (slot, job) per row of each prefill
    owners: tuple[Job | None, ...]  # by slot
    decode: bool  # some owner may sample more than its prefill does


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """What the round of a plan sampled, as packets."""

    plan: Plan
    firsts: tuple[Sampled, ...]  # of each prefill call
    block: Sampled | None  # None where the plan did not decode
    version: int  # of the weights that sampled it
    began: float  # when it was dispatched, on the clock of the submissions


class Scheduler:
    """Admits in order of arrival, as soon as a slot is free."""

    def __init__(self, cfg: RolloutConfig):
        self._cfg = cfg
        self._buckets = buckets(cfg.context)
        self._waiting: OrderedDict[int, Job] = OrderedDict()
        self._owners: list[Job | None] = [None] * cfg.slots
        self._free = list(reversed(range(cfg.slots)))
        self._slots: dict[int, int] = {}  # job number -> slot
        self.counts: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._slots)

    @property
    def crowded(self) -> bool:
        """More requests wait than slots are free."""
        return len(self._waiting) > len(self._free)

    @property
    def goes_on(self) -> bool:
        """Some running request may sample more than has been dispatched."""
        return any(job is not None and job.asked < job.row.limit for job in self._owners)

    def submit(self, job: Job) -> None:
        self._waiting[job.number] = job
        self.counts["submitted"] += 1

    def abandon(self, number: int) -> None:
        """Ends a job whose caller has gone; does nothing if it had ended before."""
        if number in self._slots:
            self._end(self._slots[number], Finish.ABORT)
        elif self._waiting.pop(number, None) is not None:
            self.counts[Finish.ABORT] += 1

    def drain(self) -> list[tuple[int, Chunk]]:
        """Ends every job with an empty aborted chunk."""
        numbers = [*self._slots, *self._waiting]
        for number in numbers:
            self.abandon(number)
        nothing = np.zeros(0, np.int32)
        chunk = Chunk(
            ids=nothing, logprobs=np.zeros(0, np.float32), versions=nothing, finish=Finish.ABORT
        )
        return [(number, chunk) for number in numbers]

    def plan(self) -> Plan | None:
        """Admits what fits and plans the next round; None if there is nothing to do."""
        groups: dict[int, list[tuple[int, Job]]] = {}
        while self._waiting and self._free:
            (_, job), slot = self._waiting.popitem(last=False), self._free.pop()
            job.asked = 1
            self._owners[slot], self._slots[job.number] = job, slot
            groups.setdefault(self._bucket(job), []).append((slot, job))
        calls = [(size, rows) for size in sorted(groups) for rows in self._split(groups[size])]
        decode = self.goes_on
        if decode:
            self._ask()
        if not calls and not decode:
            return None
        height, slots = self._cfg.prefill_rows, self._cfg.slots
        packed = [
            pack_prefill([(slot, job.row) for slot, job in rows], height, size, slots)
            for size, rows in calls
        ]
        self._count(calls, decode)
        return Plan(
            prefills=tuple(packed),
            admitted=tuple(rows for _, rows in calls),
            owners=tuple(self._owners),
            decode=decode,
        )

    def apply(self, results: Results) -> list[tuple[int, Chunk]]:
        """Takes in what a round sampled; chunks by job number.

        Rows of jobs that ended since are dropped. Raises FloatingPointError if a log-prob
        is not a number: the weights are broken.
        """
        plan = results.plan
        first = {
            slot: _row(of, row, job)
            for rows, of in zip(plan.admitted, results.firsts, strict=True)
            for row, (slot, job) in enumerate(rows)
        }
        chunks = []
        for slot, job in enumerate(plan.owners):
            if job is None or self._owners[slot] is not job:
                continue
            parts = [first[slot]] if slot in first else []
            if results.block is not None:
                parts.append(Sampled(*(x if x is None else x[:, slot] for x in results.block)))
            sampled = np.concatenate([part.packet for part in parts])
            sampled = sampled[sampled[:, STATUS] != IDLE]
            if len(sampled):
                fed = [part.routes for part in parts if part.routes is not None]
                chunks.append((job.number, self._chunk(slot, job, sampled, fed, results)))
        return chunks

    def _chunk(
        self, slot: int, job: Job, sampled: np.ndarray, fed: list[np.ndarray], results: Results
    ) -> Chunk:
        """`fed` has the routes of the tokens fed, of a prompt whole, then of one for each token
        sampled from it."""
        stop_text, finish = None, None
        status = sampled[-1, STATUS]
        if job.stop is not None:
            found = job.stop.feed(sampled[:, TOKEN].tolist())
            if found is not None:
                sampled, stop_text = sampled[: found[0]], found[1]
            elif status != GOES_ON:
                stop_text = job.stop.flush()
        if stop_text is not None or status == STOPPED:
            finish = Finish.STOP
        elif status == EXHAUSTED:
            finish = Finish.LENGTH
        logprobs = np.ascontiguousarray(sampled[:, LOGP]).view(np.float32)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"weights of version {results.version} gave {logprobs=}")
        self.counts["sampled"] += len(sampled)
        fresh, job.fresh = job.fresh, False
        if finish is not None:
            self._end(slot, finish)
        return Chunk(
            ids=np.ascontiguousarray(sampled[:, TOKEN]),
            logprobs=logprobs,
            versions=np.full(len(sampled), results.version, np.int32),
            finish=finish,
            stop_text=stop_text,
            queue_seconds=results.began - job.submitted if fresh else 0.0,
            routes=_fed(fed, len(sampled) + (len(job.row.prompt) - 1 if fresh else 0)),
        )

    def _end(self, slot: int, finish: Finish) -> None:
        job = self._owners[slot]
        assert job is not None, f"slot {slot} is free"
        self._owners[slot] = None
        del self._slots[job.number]
        self._free.append(slot)
        self.counts[finish] += 1

    def _ask(self) -> None:
        for job in self._owners:
            if job is not None:
                job.asked += self._cfg.decode_steps

    def _bucket(self, job: Job) -> int:
        return next(size for size in self._buckets if size >= len(job.row.prompt))

    def _split(self, rows: Sequence[tuple[int, Job]]) -> Iterator[tuple[tuple[int, Job], ...]]:
        for start in range(0, len(rows), self._cfg.prefill_rows):
            yield tuple(rows[start : start + self._cfg.prefill_rows])

    def _count(self, calls: Sequence[tuple[int, Sequence[tuple[int, Job]]]], decode: bool) -> None:
        self.counts["prefill_calls"] += len(calls)
        self.counts["prefill_tokens"] += sum(len(j.row.prompt) for _, r in calls for _, j in r)
        if decode:
            self.counts["decode_calls"] += 1
            self.counts["slot_rounds"] += self._cfg.slots
            self.counts["busy_slot_rounds"] += self.running


def _row(of: Sampled, row: int, job: Job) -> Sampled:
    """What a prefill call gives one of its prompts, as a block of one step does."""
    routes = None if of.routes is None else of.routes[row, : len(job.row.prompt)]
    return Sampled(of.packet[row][None], routes)


def _fed(routes: list[np.ndarray], count: int) -> np.ndarray | None:
    """The routes of the first `count` tokens fed; None where none are recorded."""
    return np.concatenate(routes)[:count] if routes else None
