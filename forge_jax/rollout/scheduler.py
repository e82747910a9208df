"""Continuous batching: which requests run, what the device does next, and what came of it.

Requests and device results flow in, device plans and chunks flow out; no clock, no event
loop, no device. Invariant: a slot is free or of one running job, every job submitted ends
exactly once, and with all pages taken the oldest running job still goes on.
"""

from collections import Counter, OrderedDict
from itertools import islice

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.placement import seat
from forge_jax.rollout.places import Places
from forge_jax.rollout.planning import plan_decode, plan_prefill, reach, window
from forge_jax.rollout.plans import Decode, Plan, Prefill, Results
from forge_jax.rollout.reading import chunk_of, read_prefills, routes_of, sampled_by
from forge_jax.rollout.shaped import Draws
from forge_jax.rollout.speculator import Speculator
from forge_jax.types import Chunk, Finish, Refused

PREFILLS = 8  # prefill calls of a round while few rows decode; fewer as more do
FIRST = 32  # ... while nobody who has a token waits for the next: decoding few rows costs as many
AHEAD = 4  # waiting requests looked at for each slot, of which some may wait for a prefix


class Scheduler:
    """Admits in order of arrival, but for those whose prefix is being computed."""

    def __init__(self, cfg: RolloutConfig, root: bytes, vocab: int):
        """`root` is the key of the weights, see `keys.root_key`; `vocab` is the model's."""
        self._cfg, self._vocab = cfg, vocab
        self._refused: list[tuple[int, Refused]] = []
        self.places = Places(cfg, root)
        self.speculator = Speculator(cfg)
        self.admitting = True  # False: no waiting request gets a slot
        self.paused = False  # True: nothing is planned
        self._waiting: OrderedDict[int, Job] = OrderedDict()
        self._seats: list[Stay | None] = [None] * cfg.slots
        self._stays: OrderedDict[int, Stay] = OrderedDict()  # by job number
        self._beginnings: Counter[bytes] = Counter()  # first pages of live jobs
        self._shaped = 0  # live jobs that change their logits
        self.counts: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._stays)

    @property
    def crowded(self) -> bool:
        """More requests wait than slots are free."""
        return self.admitting and len(self._waiting) > self._cfg.slots - len(self._stays)

    @property
    def goes_on(self) -> bool:
        """Some running request may sample more than has been asked of it."""
        return any(not stay.asked for stay in self._stays.values())

    @property
    def stepwise(self) -> bool:
        """Some request needs what it was given last before more is asked of it."""
        return self._shaped > 0

    def submit(self, job: Job) -> None:
        self._waiting[job.number] = job
        self._beginnings[self._beginning(job)] += 1
        self._shaped += job.sampling.shaped
        self.counts["submitted"] += 1

    def abandon(self, number: int) -> None:
        """Ends a job whose caller has gone; does nothing if it had ended before."""
        if number in self._stays:
            self._end(self._stays[number].job, Finish.ABORT)
        elif number in self._waiting:
            self._end(self._waiting[number], Finish.ABORT)

    def drain(self) -> list[tuple[int, Chunk]]:
        """Ends every job with an empty aborted chunk. Calls that were planned may never run: have
        it `renew` before the next plan, so that nobody reads what they were to write."""
        return self.abort([*self._stays, *self._waiting])

    def abort(self, numbers: list[int] | None = None) -> list[tuple[int, Chunk]]:
        """Ends jobs, all running ones if none are named, with an empty aborted chunk each."""
        numbers = [*self._stays] if numbers is None else numbers
        for number in numbers:
            self.abandon(number)
        nothing = np.zeros(0, np.int32)
        chunk = Chunk(
            ids=nothing, logprobs=np.zeros(0, np.float32), versions=nothing, finish=Finish.ABORT
        )
        return [(number, chunk) for number in numbers]

    def retract(self) -> None:
        """Puts every running job back to wait; it goes on from what is known of it."""
        self._put_back([*self._stays.values()])

    def renew(self, root: bytes) -> None:
        """Goes on with other weights. What is computed stays with the jobs that run, none of
        which puts pages in the tree from now on, and nobody else finds any of it. Prompts whose
        log-probs have not left are computed again: these are of one version."""
        self._put_back([stay for stay in self._stays.values() if stay.job.scoring])
        self.places.renew(root)
        for stay in self._stays.values():
            stay.publishes = False

    def plan(self) -> Plan | None:
        """Admits what fits and plans the next round; None if there is nothing to do."""
        if self.paused:
            return None
        self._grow()
        calls: list[Prefill] = []
        for _ in range(self._prefills()):
            self._admit()
            call = plan_prefill([*self._stays.values()], self.places.publish, self._cfg)
            if call is None:
                break
            calls.append(call)
        self._admit()  # mates of the last prefill may lack nothing
        self._grow()
        ready = [stay for stay in [*self._stays.values()] if stay.ready and self._followed(stay)]
        decode = self._decode(ready) if ready else None
        self._count(calls, decode is not None)
        if not calls and decode is None:
            return None
        return Plan(prefills=tuple(calls), decode=decode)

    def apply(self, results: Results) -> list[tuple[int, Chunk]]:
        """Takes in what a round sampled; chunks by job number.

        Rows of stays that are over are dropped. Raises FloatingPointError if a log-prob is not a
        number: the weights are broken.
        """
        read_prefills(results, self._cfg.page)
        self.speculator.read(results)
        decode, block = results.plan.decode, results.block
        if decode is None or block is None:
            return []
        chunks = []
        for slot, stay in enumerate(decode.owners):
            if stay is None or stay.over:
                continue
            stay.least -= decode.shape.steps
            stay.most -= decode.shape.steps * (1 + decode.shape.drafts)
            chunk = self._read(stay, *sampled_by(block, slot), results)
            if chunk is not None:
                chunks.append((stay.job.number, chunk))
        return chunks

    def _decode(self, ready: list[Stay]) -> Decode:
        depth, said = self.speculator.depth(ready), self.speculator.said
        return plan_decode(ready, depth, self._cfg, said, self._vocab)

    def _followed(self, stay: Stay) -> bool:
        """Whether the grammar of a job, where it has one, goes on from what is known of it; if
        not, the job ends."""
        job = stay.job
        if job.matcher is None:
            return True
        output = job.tokens[job.prompt : job.length]
        wrong = job.matcher.advance(output, min(self._cfg.decode_steps, job.total - job.length))
        if wrong is None:
            return True
        self._refused.append((job.number, wrong))
        self._end(job, Finish.ABORT)
        return False

    def refused(self) -> list[tuple[int, Refused]]:
        """Jobs that a plan had to end since this was called last, and why."""
        refused, self._refused = self._refused, []
        return refused

    def audit(self) -> None:
        """Raises AssertionError unless every page and slot has one place."""
        self.places.audit([*self._stays.values()])
        seated = {stay.job.number for stay in self._seats if stay is not None}
        assert seated == {*self._stays}, f"{seated=} but {[*self._stays]} run"

    def _read(
        self,
        stay: Stay,
        packet: np.ndarray,
        fed: np.ndarray | None,
        draws: Draws | None,
        results: Results,
    ) -> Chunk | None:
        if not len(packet):
            return None
        page, job = self._cfg.page, stay.job
        chunk = chunk_of(stay, packet, fed, draws, results, page)
        self.counts["sampled"] += len(chunk.ids)
        if not self._cfg.deterministic:  # where a decode step's bits are not those of a prefill
            for number, node in self.places.publish(stay, job.length - 1):
                node.routes = routes_of(job, number, page)
        if chunk.finish is not None:
            self._end(job, chunk.finish)
        return chunk

    def _admit(self) -> None:
        """Gives slots and pages to waiting jobs, first come first served."""
        looked = (
            [*islice(self._waiting.values(), AHEAD * self._cfg.slots)] if self.admitting else ()
        )
        for job in looked:
            if len(self._stays) == self._cfg.slots:
                break
            if job.held or self.places.still_waits(job):
                continue
            order = self.places.order(job)
            if self.places.awaits(job, order[0]):
                continue
            stay = self.places.open(job, order, self._reserve)
            if stay is None:
                break
            del self._waiting[job.number]
            mates = self._beginnings[self._beginning(job)] > 1
            stay.slot = self._seat(stay, mates)
            self._seats[stay.slot], self._stays[job.number] = stay, stay
            if job.silent:
                job.cached = min(stay.filled, job.prompt)
            self.counts["cached_tokens"] += stay.filled
            self.counts["admitted_tokens"] += stay.target

    def _seat(self, stay: Stay, mates: bool) -> int:
        """A free slot of the stay's place, see `placement.seat`."""
        first = stay.place * self._cfg.place_slots
        seats = self._seats[first : first + self._cfg.place_slots]
        return first + seat(stay, seats, self._bundle, mates)

    def _reserve(self, running: int) -> int:
        """Pages to leave for what so many jobs of a place will need next."""
        return running * -(-window(self._cfg, max(self._cfg.depths)) // self._cfg.page)

    def _grow(self) -> None:
        """Pages for the next tokens of all that are sampled, oldest first; while there are too
        few, the youngest of the place has to go."""
        for stay in sorted(self._stays.values(), key=lambda stay: stay.job.number):
            while not stay.over and stay.ready:
                if self.places.grow(stay, reach(stay, self._cfg, max(self._cfg.depths))):
                    break
                here = (other for other in self._stays.values() if other.place == stay.place)
                self._retract(max(here, key=lambda other: other.job.number))
                self.counts["preemptions"] += 1

    def _put_back(self, stays: list[Stay]) -> None:
        for stay in sorted(stays, key=lambda stay: -stay.job.number):
            self._retract(stay)

    def _retract(self, stay: Stay) -> None:
        self._leave(stay)
        self._waiting[stay.job.number] = stay.job
        self._waiting.move_to_end(stay.job.number, last=False)

    def _leave(self, stay: Stay) -> None:
        self.places.close(stay)
        self._seats[stay.slot] = None
        del self._stays[stay.job.number]

    def _end(self, job: Job, finish: Finish) -> None:
        self.speculator.ended(job)
        if job.number in self._stays:
            self._leave(self._stays[job.number])
        else:
            del self._waiting[job.number]
        beginning = self._beginning(job)
        self._beginnings[beginning] -= 1
        if not self._beginnings[beginning]:
            del self._beginnings[beginning]
        self._shaped -= job.sampling.shaped
        self.counts[finish] += 1

    @property
    def _bundle(self) -> int:
        return 1 if self._cfg.deterministic else self._cfg.bundle

    def _beginning(self, job: Job) -> bytes:
        """What jobs that may share pages have in common; that of one alone if it can share none."""
        page = self._cfg.page
        full = self._cfg.prefix_cache and job.prompt > page
        return job.tokens[:page].tobytes() if full else b"%d" % job.number

    def _prefills(self) -> int:
        stays = self._stays.values()
        if not any(stay.most or not stay.job.silent for stay in stays):
            return FIRST
        ready = sum(stay.ready for stay in stays)
        return max(1, PREFILLS * (self._cfg.slots - ready) // self._cfg.slots)

    def _count(self, calls: list[Prefill], decode: bool) -> None:
        self.counts["prefill_calls"] += len(calls)
        self.counts["prefill_tokens"] += sum(part.length for c in calls for part in c.parts)
        if decode:
            self.counts["decode_calls"] += 1
            self.counts["slot_rounds"] += self._cfg.slots
            self.counts["busy_slot_rounds"] += self.running
