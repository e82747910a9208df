"""What it costs to serve a call at an instance, and the instance where it costs least.

A call, what is known of every instance, and where its prefix can be fetched from flow in; a
`Plan` flows out. The simulator and the live router call the same function. Invariant: the
decision depends on its arguments alone, so that a decision can be replayed.

Times are in seconds, lengths in tokens. Nothing here knows of sessions: a session stays where
it is because its prefix is there, and leaves when waiting costs more than moving or computing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forge_jax.config import check

BUSIEST = 0.9  # an instance that works for more of its time counts as busy as that


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Seconds to prefill what a cache does not have; no coefficient is negative."""

    base: float = 0.0  # of a call, however short
    token: float = 0.0  # of a token computed
    pair: float = 0.0  # of a (query, key) pair
    beside: float = 0.0  # of a token computed, for each sequence that decodes beside it

    def seconds(self, tokens: int, prefix: int, running: int = 0) -> float:
        """Of a prompt of `tokens`, its first `prefix` known, at an instance with `running`."""
        _, new, pairs, beside = prefill_sizes(tokens, prefix, running)
        return self.base + self.token * new + self.pair * pairs + self.beside * beside


def prefill_sizes(tokens: int, prefix: int, running: int) -> tuple[float, float, float, float]:
    """What the coefficients of `Prefill` multiply: 1, m, m (prefix + m / 2), m running."""
    computed = max(tokens - prefix, 0)
    return 1.0, computed, computed * (prefix + computed / 2), computed * running


@dataclass(frozen=True, kw_only=True)
class Link:
    """Seconds to move the keys and values of a stretch of tokens out of one place."""

    latency: float = 0.0
    token: float = 0.0  # of a token: its bytes over the bandwidth
    wait: float = 0.0  # until what its source sends already is through

    def seconds(self, tokens: int) -> float:
        """Of `tokens`, without the wait before them."""
        return self.latency + self.token * tokens


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a policy knows of a call."""

    number: int  # of the call at this router, from 0
    session: str
    tokens: int  # of its prompt


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of an instance at the moment of a decision, for one call."""

    name: str
    queue: float  # seconds until it would begin with another prompt
    inbound: float  # seconds until what it fetches already is there
    prefix: int  # tokens of the prompt that it has, or will have when it begins
    load: int  # calls that it was sent and that have not ended
    running: int  # of those, decoding
    busy: float  # share of its time that prefills take, lately
    prefill: Prefill


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place that pages can be fetched from: the shared store, or an instance."""

    name: str
    prefix: int  # tokens of the prompt that it has, of the weights being served
    link: Link


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A call served at one instance."""

    instance: str
    seconds: float  # to the first token, as predicted
    work: float  # of those, seconds of the instance, which other calls wait for
    source: str | None = None  # where pages are fetched from
    fetched: int = 0  # tokens that are fetched


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the cost is made of beside the time to the first token."""

    work: float = 1.0  # beta: of a second that calls to come will wait for work added
    bound: float = 1.5  # the load of an instance over the mean, beyond which it gets no call
    matched: float = 0.3  # thresholds: share of the prompt that is worth going to its holder
    apart: int = 64  # thresholds: largest load less smallest that is out of balance ...
    ratio: float = 1.5  # ... if the largest is this many times the smallest, too

    def __post_init__(self) -> None:
        check(self.work >= 0, f"work={self.work} must be >= 0")
        check(self.bound >= 1, f"bound={self.bound} must be at least 1")
        check(0 <= self.matched <= 1, f"matched={self.matched} must be in [0, 1]")
        check(self.apart >= 0, f"apart={self.apart} must be >= 0")
        check(self.ratio >= 1, f"ratio={self.ratio} must be at least 1")


Policy = Callable[[Call, Sequence[View], Sequence[Source], Weights], Plan]


def plan_at(call: Call, view: View, sources: Sequence[Source]) -> Plan:
    """The quickest way to serve `call` at one instance.

    min over computing what is not there, queue + prefill(n, prefix), and fetching it from
    one of the sources first, max(queue, transfer) + prefill(n, prefix of the source): pages
    are fetched while the call queues.
    """
    work = view.prefill.seconds(call.tokens, view.prefix, view.running)
    best = Plan(instance=view.name, seconds=view.queue + work, work=work)
    for source in sources:
        fetched = source.prefix - view.prefix
        if fetched <= 0 or source.name == view.name:
            continue
        work = view.prefill.seconds(call.tokens, source.prefix, view.running)
        link = source.link
        arrived = max(view.inbound, link.wait) + link.seconds(fetched)
        seconds = max(view.queue, arrived) + work
        if seconds < best.seconds:
            best = replace(best, seconds=seconds, work=work, source=source.name, fetched=fetched)
    return best


def imposed(busy: float) -> float:
    """Seconds of calls that a second of work more takes at an instance that is so `busy`.

    Of a queue with Poisson arrivals and exponential work, which holds busy / (1 - busy) calls on
    average, it is the derivative by `busy`: 1, the second itself, where nobody else comes, and 4
    where every other second is taken, since those who come later wait for it.
    """
    return 1 / (1 - min(busy, BUSIEST)) ** 2


def by_cost(call: Call, views: Sequence[View], sources: Sequence[Source], weights: Weights) -> Plan:
    """The plan of the least cost: seconds to the first token + beta * those that the work added
    takes of this and later calls.

    Instances whose load is beyond `bound` times the mean are left out, so that no prefix,
    however long, draws everybody to one place; the one with the least load never is. Equal
    costs go to the least load.
    """
    mean = sum(view.load for view in views) / len(views)
    allowed = [view for view in views if view.load <= weights.bound * (mean + 1)]

    def cost(plan: Plan, view: View) -> float:
        return plan.seconds + weights.work * imposed(view.busy) * plan.work

    plans = [(plan_at(call, view, sources), view) for view in allowed]
    best, _ = min(plans, key=lambda pair: (cost(*pair), pair[1].load))
    return best
