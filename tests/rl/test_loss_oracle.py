"""Every loss of a step is that of its samples one by one, in value and in every gradient.

The oracle computes each sample by itself with plain causal attention; what a loss makes of
log-probs and entropies, and its slopes by them, are formulas by hand. What a run does comes against
it: a tree in micro-batches or blocks, log-probs recomputed where a loss compares with them, weights
of the average.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, packed
from synthetic import agentic, make_sample
from test_averages import longest, owned
from test_losses import by_hand
from test_step import assert_close

from forge_jax.config import LossConfig, ProtectConfig, Skip
from forge_jax.models import layout, transformer
from forge_jax.rl.averages import averaged, sample_weights
from forge_jax.rl.guard import Guard
from forge_jax.rl.losses import LOSSES, Judged, Loss, Seen, gspo
from forge_jax.rl.parallel import gather, update
from forge_jax.rl.state import create
from forge_jax.rl.step import StepConfig
from forge_jax.rl.updates import Minibatch, compared
from forge_jax.sched.merge import merge
from forge_jax.sharding import make_mesh, shardings
from forge_jax.types import CarriedTree

TINY = dataclasses.replace(MODEL, layers=1)
NARROW = {"eps_low": 0.02, "eps_high": 0.03}
BLENDED = {  # every loss of a token, and what it counts in the sum of all
    LossConfig(kind="clip", anchor="trainer", **NARROW): 0.7,
    LossConfig(kind="decoupled", **NARROW): -1.3,
    LossConfig(kind="tis"): 0.4,
    LossConfig(kind="cispo", anchor="trainer"): 1.1,
    LossConfig(kind="cispo", anchor="trainer", mask=True, **NARROW): -0.6,
    LossConfig(kind="reinforce"): 0.9,
}
NEAR_START = LossConfig(
    kind="gspo", anchor="trainer", per="sample", entropy=0.3, kl=0.4, reference="start", **NARROW
)
NEAR_SAMPLER = LossConfig(kind="gspo", per="group", kl=0.2)
AVERAGES = [LossConfig(), *(LossConfig(per=per) for per in ("sample", "episode", "group"))]
AVERAGES.append(LossConfig(per="constant", constant=7.0))
CAP = 1.05  # of ratios: some are beyond it
BLOCK = 32  # tokens, where the tree is carried
UPDATED, BEFORE, START = 1.0, 1.1, 0.9  # factors of the weights of three policies


def blended(seen: Seen, cfg: LossConfig, ratio_cap: float) -> Judged:
    """All of `BLENDED` at once, so that one program is compiled for them."""
    each = [(c, LOSSES[one.kind](seen, one, ratio_cap)) for one, c in BLENDED.items()]
    return Judged(loss=sum(c * x.loss for c, x in each), clipped=each[0][1].clipped)


def blended_by_hand(x: dict[str, np.ndarray], sample: np.ndarray) -> tuple[Any, Any]:
    each = [(c, by_hand(x, one, sample, CAP)) for one, c in BLENDED.items()]
    assert sum(np.any(y[2]) for _, y in each) == len(BLENDED) - 1  # all but reinforce's
    return tuple(sum(c * y[i] for c, y in each) for i in range(2))


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@cache
def samples() -> list[Any]:
    """Calls of episodes in two groups, one of them twice; and one that trains nothing."""
    made = agentic(0, MODEL.vocab, rollouts=2, system=6, observation=3)
    rng = np.random.default_rng(1)
    again = [make_sample(rng, made[i].tokens, made[i].mask, t) for i, t in ((1, 1.0), (2, 0.75))]
    return owned([*made, *again])


@cache
def policy(factor: float) -> Any:
    """The one that is updated, or another one near it."""
    drawn = layout.init(TINY, jax.random.key(1), jnp.float64)
    return jax.tree.map(lambda x: x * factor, drawn)


@cache
def rows() -> dict[str, np.ndarray]:
    """The samples side by side, [S, T] each."""
    length = longest(samples())
    made = {
        name: np.stack([np.pad(getattr(s, name), (0, length - len(s.tokens))) for s in samples()])
        for name in ("tokens", "mask", "old_logp", "advantage")
    }
    return made | {"temperature": np.array([s.temperature for s in samples()])}


@jax.jit
def one_by_one(params: Any, tokens: Any, temperature: Any) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [S, T] of every token but the first, of each sample by itself."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
        k, v = (jnp.repeat(x, TINY.heads // TINY.kv_heads, axis=-2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(TINY.head_dim)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, v), cache

    place = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    h, _, _ = transformer.hidden(params, tokens, place, attend, TINY)
    z = transformer.logits(params, h[:, :-1], TINY) / temperature[:, None, None]
    z = jax.nn.log_softmax(z)
    found = jnp.take_along_axis(z, tokens[:, 1:, None], axis=2)[..., 0], -(jnp.exp(z) * z).sum(-1)
    logp, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in found)
    return logp, entropy


@jax.jit
def pulled(params: Any, tokens: Any, temperature: Any, slopes: Any) -> Any:
    """Gradient by the parameters of what has `slopes` by log-probs and entropies."""
    return jax.vjp(lambda p: one_by_one(p, tokens, temperature), params)[1](slopes)[0]


def oracle(cfg: LossConfig, average: LossConfig, blend: bool = False) -> dict[str, Any]:
    """Loss, every gradient, and the divergence from the reference."""
    row = rows()
    mask, given = row["mask"], (row["tokens"], row["temperature"])
    logps = {f: one_by_one(policy(f), *given) for f in (UPDATED, BEFORE, START)}
    logp, before, start = (np.asarray(logps[f][0])[mask] for f in (UPDATED, BEFORE, START))
    sample = np.nonzero(mask)[0]
    old, advantage = (row[name][mask].astype(np.float64) for name in ("old_logp", "advantage"))
    anchor = before if cfg.recomputed else old
    x = {"logp": logp, "old_logp": old, "anchor": anchor, "advantage": advantage}
    loss, slope = blended_by_hand(x, sample) if blend else by_hand(x, cfg, sample, CAP)[:2]
    apart = (start if cfg.reference else anchor) - logp
    k3 = np.exp(apart) - 1 - apart
    loss = loss - cfg.entropy * np.asarray(logps[UPDATED][1])[mask] + cfg.kl * k3
    slope = slope + cfg.kl * (1 - np.exp(apart))
    share = sample_weights(samples(), average)[sample] / len(sample)
    slopes = np.zeros((2, *mask.shape))
    slopes[:, mask] = slope * share, -cfg.entropy * share
    grads = pulled(policy(UPDATED), *given, tuple(slopes))
    kl = {"kl_reference": np.mean(k3)} if cfg.reference else {}
    return jax.device_get({"loss": np.sum(loss * share), "grads": grads} | kl)


def step_config(objective: LossConfig, loss: Loss = gspo) -> StepConfig:
    return StepConfig(
        model=TINY, loss=loss, objective=objective, ratio_cap=CAP, attention="reference",
        dtype="float64",
    )  # fmt: skip


def moved(parts: list[Any], cfg: StepConfig, axes: dict[str, int] | None = None) -> Any:
    """The policy of an update that is not the first of its batch, and its micro-batches, as a run
    has them."""

    def placed(factor: float) -> Any:
        if axes is None:
            return policy(factor)
        return jax.device_put(policy(factor), shardings(layout.layout(TINY), make_mesh(**axes)))

    batch = [Minibatch(samples=len(samples()), parts=tuple(parts))]
    start = placed(START) if cfg.objective.reference else None
    *_, last = compared(batch, placed(BEFORE), 2, cfg, start)
    return placed(UPDATED), last.parts


def assert_same(params: Any, parts: Any, cfg: StepConfig, wanted: dict[str, Any]) -> None:
    done = gather(params, parts, cfg)
    found = {"loss": done.loss, "grads": jax.device_get(done.grads)}
    if cfg.objective.reference:
        found["kl_reference"] = done.metrics.values()["kl_reference"]
    assert_close(found, wanted, 1e-10)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)


def test_every_loss_of_a_token_over_every_average() -> None:
    parts = packed(samples(), "tree", longest(samples()))
    assert len(parts) > 1
    assert any(t.n_occurrences > len(np.unique(t.occurrence_edge[t.weight > 0])) for t in parts)
    objective = LossConfig(anchor="trainer", entropy=0.3, kl=0.4, reference="start")
    cfg = step_config(objective, blended)
    params, told = moved(parts, cfg)
    for average in AVERAGES:
        weighted = averaged(told, samples(), average)
        assert_same(params, weighted, cfg, oracle(objective, average, blend=True))


def test_a_loss_of_samples_in_blocks() -> None:
    tree = merge(samples())
    start = np.arange(0, tree.n_tokens, BLOCK)
    assert len(start) == 2
    part = CarriedTree(tree=tree, start=start, sizes=np.full(len(start), BLOCK))
    parts, cfg = averaged([part], samples(), NEAR_START), step_config(NEAR_START)
    assert_same(*moved(parts, cfg), cfg, oracle(NEAR_START, NEAR_START))


def test_a_loss_of_samples_over_ranks_and_a_step_that_is_skipped_there() -> None:
    parts = averaged(packed(samples(), "tree", longest(samples())), samples(), NEAR_SAMPLER)
    cfg = step_config(NEAR_SAMPLER)
    params, parts = moved(parts, cfg, {"fsdp": 2, "context": 2})
    assert_same(params, parts, cfg, oracle(NEAR_SAMPLER, NEAR_SAMPLER))
    state = create(params, cfg.optim)
    before = on_every_rank(state)
    judge = Guard(ProtectConfig(least_ess=0.999)).judge(samples())
    state, done = update(state, parts, cfg, judge=judge)
    assert done.skipped is Skip.ESS
    after = on_every_rank(state)
    assert len(after) > 4
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def on_every_rank(state: Any) -> list[np.ndarray]:
    """What each rank holds of every array."""
    return [np.array(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]
