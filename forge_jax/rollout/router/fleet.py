"""Everything a router knows of its instances, and the decision it takes from it.

Events flow in, each with its moment: calls sent, first tokens, ends, transfers. Plans flow out.
Sans-IO: the simulator and the live router drive the same object.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_jax.rollout.router.cost import Call, Link, Plan, Policy, Prefill, Source, View, Weights
from forge_jax.rollout.router.fit import LinkFit
from forge_jax.rollout.router.index import Block, PrefixIndex
from forge_jax.rollout.router.ledger import Ledger

STORE = "store"  # the name of the shared store among the sources


@dataclass(frozen=True, kw_only=True)
class Priors:
    """What is believed of prefills and transfers before any was seen."""

    prefill: Prefill = Prefill(base=1e-3, token=1e-4)  # noqa: RUF009  (frozen)
    store: Link | None = None  # None: there is no shared store
    peer: Link | None = None  # None: instances do not fetch from each other


class Fleet:
    """Instances by name, and what they were sent."""

    def __init__(self, policy: Policy, weights: Weights, priors: Priors):
        self._policy = policy
        self._weights = weights
        self._priors = priors
        self._ledgers: dict[str, Ledger] = {}
        self._promised = PrefixIndex()  # what calls that were sent will bring about
        self._calls: dict[int, tuple[str, Sequence[Block]]] = {}
        self._store = None if priors.store is None else LinkFit(priors.store)
        self._peer = None if priors.peer is None else LinkFit(priors.peer)
        self._inbound: dict[str, _Lane] = {}
        self._outbound: dict[str, _Lane] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._ledgers)

    def add(self, name: str, slots: int) -> None:
        """A new instance, of which nothing is known; names are not used twice."""
        self._ledgers[name] = Ledger(slots, self._priors.prefill)
        self._inbound[name], self._outbound[name] = _Lane(), _Lane()

    def remove(self, name: str) -> None:
        """The instance gets no calls any more; those it has are still to be ended."""
        del self._ledgers[name]
        self._promised.clear(name)

    def renewed(self) -> None:
        """The weights changed: no block of the old ones is of use to anybody."""
        for name in self._ledgers:
            self._promised.clear(name)
        self._calls = {number: (name, ()) for number, (name, _) in self._calls.items()}

    def decide(
        self, call: Call, blocks: Sequence[Block], held: Mapping[str, int], now: float
    ) -> Plan:
        """Where to serve a call whose prompt is `blocks`, and what to fetch for it; `held` is
        how many of its first tokens each instance, and the store, has."""
        promised = self._promised.prefixes(blocks)
        views = [
            View(
                name=name,
                queue=ledger.queue(now),
                inbound=self._inbound[name].wait(now),
                prefix=max(held.get(name, 0), promised.get(name, 0)),
                load=ledger.load,
                running=ledger.running,
                busy=ledger.busy(now),
                prefill=ledger.prefill,
            )
            for name, ledger in self._ledgers.items()
        ]
        return self._policy(call, views, self._sources(held, now), self._weights)

    def sent(self, call: Call, blocks: Sequence[Block], plan: Plan, now: float) -> None:
        """The call goes where `plan` says, from now on."""
        if plan.source is not None:
            lanes = self._lanes(plan)
            begins = now + max(lane.wait(now) for lane in lanes)
            seconds = self._link(plan.source, 0.0).seconds(plan.fetched)
            for lane in lanes:
                lane.begin(begins + seconds)
        self._ledgers[plan.instance].sent(call.number, now, call.tokens, plan.work)
        for block in blocks:
            self._promised.add(plan.instance, block.key)
        self._calls[call.number] = plan.instance, blocks

    def fetched(self, plan: Plan, now: float, tokens: int, seconds: float) -> None:
        """The transfer of a plan is over; it brought `tokens` in `seconds`, its wait apart."""
        assert plan.source is not None
        fit = self._store if plan.source == STORE else self._peer
        if fit is not None and tokens:
            fit.observe(tokens, seconds)
        for lane in self._lanes(plan):
            lane.end(now)

    def first(self, number: int, now: float, queued: float, cached: int) -> None:
        """A call's first token; see `Ledger.first`."""
        name, blocks = self._calls[number]
        self._kept(name, blocks)
        self._calls[number] = name, ()
        if name in self._ledgers:
            self._ledgers[name].first(number, now, queued, cached)

    def ended(self, number: int, now: float) -> None:
        """A call ended, however."""
        name, blocks = self._calls.pop(number)
        self._kept(name, blocks)
        if name in self._ledgers:
            self._ledgers[name].ended(number, now)

    def _sources(self, held: Mapping[str, int], now: float) -> list[Source]:
        names = [] if self._peer is None else [name for name in self._ledgers if name in held]
        if self._store is not None and STORE in held:
            names.append(STORE)
        return [
            Source(
                name=name,
                prefix=held[name],
                link=self._link(name, 0.0 if name == STORE else self._outbound[name].wait(now)),
            )
            for name in names
        ]

    def _link(self, source: str, wait: float) -> Link:
        fit = self._store if source == STORE else self._peer
        assert fit is not None
        return fit.model(wait)

    def _lanes(self, plan: Plan) -> list["_Lane"]:
        """What a transfer takes: the way into its instance, and out of another one."""
        lanes = [self._inbound[plan.instance]]
        if plan.source is not None and plan.source != STORE:
            lanes.append(self._outbound[plan.source])
        return lanes

    def _kept(self, name: str, blocks: Iterable[Block]) -> None:
        """What was promised is in the index now, or will never be."""
        if name in self._ledgers:
            for block in blocks:
                self._promised.discard(name, block.key)


class _Lane:
    """Transfers through one place, one after the other."""

    def __init__(self) -> None:
        self._through = 0.0  # when those asked for should be through
        self._moving = 0

    def wait(self, now: float) -> float:
        return max(0.0, self._through - now)

    def begin(self, through: float) -> None:
        self._through = through
        self._moving += 1

    def end(self, now: float) -> None:
        self._moving -= 1
        if not self._moving:
            self._through = now
