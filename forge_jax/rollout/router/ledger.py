"""What a router knows of one instance without asking it: the calls it sent there.

Calls sent, first tokens and ends flow in, each with its moment; queue, load and the prefill
model flow out. Invariant: a call is in the ledger from `sent` to `ended`, once.
"""

import math
from dataclasses import dataclass

from forge_jax.rollout.router.cost import Prefill
from forge_jax.rollout.router.fit import PrefillFit

NEWEST = 0.1  # weight of the newest call in the mean time that calls decode for
LATELY = 60.0  # seconds after which work counts 1/e in how busy an instance is


@dataclass(kw_only=True)
class _Sent:
    tokens: int
    work: float  # seconds of prefill, as predicted
    moment: float
    beside: int  # sequences decoding when it was sent
    first: float | None = None  # moment of its first token


class Ledger:
    """The calls of one instance with `slots` places to decode."""

    def __init__(self, slots: int, prior: Prefill):
        self._slots = slots
        self._fit = PrefillFit(prior)
        self._sent: dict[int, _Sent] = {}
        self._waiting: dict[int, None] = {}  # of those, without a first token; in order
        self._backlog = 0.0  # seconds of work of those that wait
        self._newest = 0.0  # moment of the newest first token
        self._decoding = 0.0  # mean seconds from a first token to the end
        self._busy = 0.0  # at the moment `_newest_sent`
        self._newest_sent = 0.0

    @property
    def load(self) -> int:
        """Calls that have not ended."""
        return len(self._sent)

    @property
    def running(self) -> int:
        """Of those, calls that decode."""
        return len(self._sent) - len(self._waiting)

    @property
    def prefill(self) -> Prefill:
        return self._fit.model

    def queue(self, now: float) -> float:
        """Seconds until another call's prefill would begin.

        The work of the calls that wait, less what the head of them has had; or, where all
        places are taken, the ends that have to be awaited at the rate at which calls end.
        """
        backlog = self._backlog
        if self._waiting:
            head = self._sent[next(iter(self._waiting))]
            backlog -= min(now - max(head.moment, self._newest), head.work)
        short = self.load - self._slots + 1
        return max(backlog, short * self._decoding / self._slots, 0.0)

    def busy(self, now: float) -> float:
        """Share of its time that the work it was sent takes, lately."""
        return self._busy * math.exp((self._newest_sent - now) / LATELY)

    def sent(self, number: int, now: float, tokens: int, work: float) -> None:
        """A call of `tokens` was sent, whose prefill should take `work` seconds."""
        self._sent[number] = _Sent(tokens=tokens, work=work, moment=now, beside=self.running)
        self._waiting[number] = None
        self._backlog += work
        self._busy, self._newest_sent = self.busy(now) + work / LATELY, now

    def first(self, number: int, now: float, queued: float, cached: int) -> None:
        """Its first token came; `queued` of the seconds since `sent` it waited at the instance,
        and `cached` of its tokens were not computed."""
        sent = self._sent[number]
        self._begun(number)
        sent.first = self._newest = now
        self._fit.observe(sent.tokens, cached, sent.beside, now - sent.moment - queued)

    def ended(self, number: int, now: float) -> None:
        """It ended, however."""
        sent = self._sent[number]
        if sent.first is None:
            self._begun(number)
        else:
            seconds = now - sent.first
            share = NEWEST if self._decoding else 1.0
            self._decoding += share * (seconds - self._decoding)
        del self._sent[number]

    def _begun(self, number: int) -> None:
        del self._waiting[number]
        self._backlog -= self._sent[number].work
        if not self._waiting:
            self._backlog = 0.0  # what rounding left
