"""The simulator: every call once, the numbers of a case done by hand, and what routing is worth."""

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from forge_jax.config import UserError
from forge_jax.rollout.router.baselines import POLICIES, round_robin
from forge_jax.rollout.router.cache import Cache
from forge_jax.rollout.router.cost import Weights
from forge_jax.rollout.router.index import Block
from forge_jax.rollout.router.instance import InstanceConfig
from forge_jax.rollout.router.simulate import Served, TierConfig, simulate
from forge_jax.rollout.router.traces import Session, TraceConfig, Turn, trace

AGENTS = TraceConfig(calls=12, turn=1024, spread=0.8, rate=0.1, sessions=20, pause=10.0)
GROUPS = TraceConfig(group=8, task=4096, calls=1, turn=64, reply=256, rate=1.5, sessions=120)
UNSHARED = TraceConfig(systems=0, calls=1, task=4096, turn=64, spread=0.8, rate=0.8, sessions=120)
TIERS = TierConfig()
SMALL = InstanceConfig(memory=100_000)


def play(cfg: TraceConfig, policy: str, seed: int = 0, tiers: TierConfig = TIERS) -> list[Served]:
    sessions = trace(cfg, 4, seed)
    return simulate(sessions, 4, POLICIES[policy], Weights(), SMALL, tiers, seed)


def times(served: list[Served]) -> tuple[float, float]:
    ttft = sorted(call.ttft for call in served)
    return statistics.fmean(ttft), ttft[int(0.99 * len(ttft))]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_is_served_once_and_again_the_same(policy: str) -> None:
    served = play(AGENTS, policy)
    assert len(served) == sum(len(s.turns) for s in trace(AGENTS, 4, 0))
    for call in served:
        assert 0 <= call.cached <= call.tokens
        assert 0 < call.ttft <= call.ended - call.arrived + SMALL.step + SMALL.row * SMALL.slots
    assert served == play(AGENTS, policy)
    assert served != play(AGENTS, policy, seed=1)


def test_a_call_alone_takes_what_its_sizes_say() -> None:
    """A prompt of 1000 and a reply of 10, then its follow-up, without noise."""
    cfg = InstanceConfig(noise=0.0)
    first = Turn(added=(Block("a", 1000),), reply=(Block("b", 10),), pause=0.0)
    then = Turn(added=(Block("c", 100),), reply=(Block("d", 1),), pause=5.0)
    session = Session(name="s", start=1.0, turns=(first, then))
    alone = TierConfig(store=False, peers=False)
    one, two = simulate([session], 1, round_robin, Weights(), cfg, alone)
    prefill = 0.01 + 1000 * 1e-4 + 3e-9 * 1000 * 500
    step = 0.012 + 3e-4
    assert one.ttft == pytest.approx(prefill + step)
    assert one.ended == pytest.approx(1.0 + prefill + 10 * step)
    assert two.arrived == pytest.approx(one.ended + 5.0)
    assert (two.tokens, two.cached) == (1110, 1010)
    assert two.ttft == pytest.approx(0.01 + 100 * 1e-4 + 3e-9 * 100 * 1060 + step)


def test_decoding_and_prefill_share_the_instance() -> None:
    """While a prompt of many chunks is computed, steps come once a chunk."""
    cfg = InstanceConfig(noise=0.0, base=0.0, pair=0.0)
    long = Turn(added=(Block("long", 10_000),), reply=(Block("x", 1),), pause=0.0)
    short = Turn(added=(Block("short", 0),), reply=(Block("y", 100),), pause=0.0)
    sessions = [
        Session(name="decodes", start=0.0, turns=(short,)),
        Session(name="storm", start=0.0, turns=(long,)),
    ]
    alone = TierConfig(store=False, peers=False)
    served = {c.tokens: c for c in simulate(sessions, 1, round_robin, Weights(), cfg, alone)}
    step = 0.012 + 3e-4
    rounds = 1.0 / 0.05  # chunks of the long prompt, one step of the other call with each
    assert served[10_000].ttft == pytest.approx(1.0 + rounds * step + (step + 3e-4))
    assert served[0].ended == pytest.approx(
        1.0 + rounds * step + (step + 3e-4) + (100 - rounds - 1) * step, rel=1e-3
    )


def test_a_store_moves_what_computing_would_repeat() -> None:
    tiers = {True: TIERS, False: replace(TIERS, store=False, peers=False)}
    served = {on: play(AGENTS, "round_robin", tiers=cfg) for on, cfg in tiers.items()}
    hits = {
        on: sum(c.cached for c in calls) / sum(c.tokens for c in calls)
        for on, calls in served.items()
    }
    assert sum(c.moved for c in served[False]) == 0 < sum(c.moved for c in served[True])
    assert hits[True] > hits[False] + 0.2
    assert times(served[True])[0] < 0.5 * times(served[False])[0]


@pytest.mark.parametrize("cfg", [AGENTS, GROUPS], ids=["agents", "groups"])
def test_the_cost_function_beats_every_baseline_where_prefixes_are_shared(cfg: TraceConfig) -> None:
    """Mean and p99 over three seeds, all policies with the same tiers."""
    found = {policy: [times(play(cfg, policy, seed)) for seed in range(3)] for policy in POLICIES}
    mean, tail = (
        {p: statistics.fmean(run[of] for run in runs) for p, runs in found.items()} for of in (0, 1)
    )
    assert min(mean, key=mean.__getitem__) == "cost", mean
    assert min(tail, key=tail.__getitem__) == "cost", tail


@pytest.mark.parametrize(
    "tiers",
    [TIERS, replace(TIERS, store_bandwidth=3e8, peers=False), replace(TIERS, store=False)],
    ids=["store", "slow", "none"],
)
def test_the_cost_function_does_not_lose_where_nothing_is_shared(tiers: TierConfig) -> None:
    for policy in POLICIES.keys() - {"cost"}:
        for of in (0, 1):
            ours, theirs = (
                statistics.fmean(times(play(UNSHARED, p, seed, tiers))[of] for seed in range(2))
                for p in ("cost", policy)
            )
            assert ours < 1.05 * theirs, (policy, of)


@pytest.mark.parametrize("seed", range(30))
def test_a_cache_keeps_paths_whole_and_pins_where_they_are(seed: int) -> None:
    rng = random.Random(seed)
    held: set[int] = set()
    cache = Cache(50, held.add, held.remove)
    parents = {n: (n - 1) // 2 for n in range(1, 63)}  # a binary tree of keys

    def path(leaf: int) -> list[Block]:
        nodes = [leaf]
        while nodes[-1]:
            nodes.append(parents[nodes[-1]])
        return [Block(n, 1 + n % 5) for n in reversed(nodes)]

    pinned: list[list[Block]] = []
    for _ in range(200):
        chosen = path(rng.randrange(63))
        if pinned and rng.random() < 0.3:
            cache.unpin(pinned.pop())
        elif rng.random() < 0.3:
            there = [block for block in chosen if block.key in held]
            cache.pin(there)
            pinned.append(there)
        elif rng.random() < 0.2 and cache.reserve(10):
            cache.release(10)
        else:
            cache.insert(chosen)
        assert all(n == 0 or parents[n] in held for n in held), "a leaf goes first"
        assert sum(1 + n % 5 for n in held) <= 50
        assert {b.key for blocks in pinned for b in blocks} <= held


def test_a_trace_is_what_its_seed_says() -> None:
    made = trace(replace(AGENTS, group=4), 4, 3)
    assert made == trace(replace(AGENTS, group=4), 4, 3)
    assert made != trace(replace(AGENTS, group=4), 4, 4)
    assert len(made) == 80
    assert Counter(Counter(s.start for s in made).values()) == {4: 20}
    heads = Counter(s.turns[0].added[0].key for s in made)
    assert 1 < len(heads) <= 8, "sessions share the system prompts"
    keys = [b.key for s in made for t in s.turns for b in (*t.added, *t.reply)]
    for session in made:
        total = sum(b.tokens for t in session.turns for b in (*t.added, *t.reply))
        assert len(session.turns) == 1 or total <= AGENTS.longest
    assert len(set(keys)) < len(keys)


def test_a_memory_below_a_call_is_refused() -> None:
    with pytest.raises(UserError, match="memory=1000 is below a call's"):
        simulate(trace(AGENTS, 1, 0), 1, round_robin, Weights(), replace(SMALL, memory=1000), TIERS)
