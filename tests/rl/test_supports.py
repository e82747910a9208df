"""Trained log-probs are of what was drawn from, their gradients exact, however samples merge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import agentic

from forge_jax.drawing import CLOSED, LOST, OPEN, Support
from forge_jax.rl import step
from forge_jax.rl.credit import turn_sample
from forge_jax.rl.logprob import edge_logprob
from forge_jax.rl.step import StepConfig
from forge_jax.rl.supports import to_device
from forge_jax.sched.merge import MODES, merge
from forge_jax.types import Finish, Sample, Turn

N, E, V, S = 11, 8, 30, 6


def random_support(rng: np.random.Generator, labels: np.ndarray, vocab: int) -> Support:
    """Open and closed ones, each with the label among what can come."""
    ids = np.stack([rng.permutation(vocab)[:S] for _ in labels]).astype(np.int32)
    ids[(ids == labels[:, None])] = -1
    offsets = rng.choice([0.0, 1.5, -np.inf], ids.shape).astype(np.float32)
    ids[:, 0], offsets[:, 0] = labels, rng.normal(size=len(labels))
    kind = rng.choice([OPEN, CLOSED], len(labels)).astype(np.int8)
    return Support(ids=ids, offsets=np.where(ids < 0, 0, offsets).astype(np.float32), kind=kind)


def dense(support: Support, vocab: int) -> np.ndarray:
    """f64[n, V], the offset of every word."""
    table = np.where(support.kind[:, None] == CLOSED, -np.inf, np.zeros((1, vocab)))
    for row, ids, offsets in zip(table, support.ids, support.offsets, strict=True):
        row[ids[ids >= 0]] = offsets[ids >= 0]
    return table


@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients_are_those_of_dense_autodiff(seed: int) -> None:
    rng, edges = np.random.default_rng(seed), 21
    with jax.enable_x64(True):
        h, w = jnp.asarray(rng.normal(size=(N, E))), jnp.asarray(rng.normal(size=(E, V)))
        source, label = (rng.integers(0, n, edges).astype(np.int32) for n in (N, V))
        temperature = rng.choice([0.5, 1.0, 2.0], edges)
        support = random_support(rng, label, V)
        offset = jnp.asarray(dense(support, V))
        pulls = tuple(jnp.asarray(rng.normal(size=edges)) for _ in range(2))

        def direct(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            can = offset > -jnp.inf
            z = jnp.where(can, (h[source] @ w + jnp.where(can, offset, 0)), 0)
            z = jnp.where(can, z / temperature[:, None], -1e9)
            logp = jax.nn.log_softmax(z)
            entropy = -jnp.sum(jnp.where(can, jnp.exp(logp) * logp, 0), axis=1)
            return logp[jnp.arange(edges), label], entropy

        def ours(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            edge = (jnp.asarray(x) for x in (source, label, temperature))
            return edge_logprob(h, w, *edge, support=to_device(support), chunk=8)

        (got, pull), (want, pull_direct) = jax.vjp(ours, h, w), jax.vjp(direct, h, w)
        for a, b in zip((*got, *pull(pulls)), (*want, *pull_direct(pulls)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def supported(samples: list[Sample]) -> list[Sample]:
    """Half of the samples with supports, that are a function of what a token follows."""
    found = []
    for i, sample in enumerate(samples):
        digest = int(np.sum(sample.tokens[: len(sample.tokens) // 2]))
        rng = np.random.default_rng(digest)
        support = random_support(rng, sample.tokens, MODEL.vocab)
        found.append(dataclasses.replace(sample, support=support if i % 2 else None))
    return found


def test_merging_changes_neither_log_probs_nor_gradients() -> None:
    samples = supported(agentic(0, MODEL.vocab))
    cfg = StepConfig(model=MODEL, ratio_cap=1.5)
    results = []
    for mode in MODES:
        found = step.gather(parameters(cfg.dtype), packed(samples, mode), cfg)
        length = sum(len(sample.tokens) for sample in samples)
        logp = step.scatter(found.logp, found.index, length)
        results.append((logp, *map(np.asarray, jax.tree.leaves(found.grads))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))
    bare = [dataclasses.replace(sample, support=None) for sample in samples]
    plain = step.gather(parameters(cfg.dtype), packed(bare, "none"), cfg)
    assert np.abs(step.scatter(plain.logp, plain.index, length) - results[0][0]).max() > 0.1


def test_samples_share_an_edge_only_if_their_supports_are_equal() -> None:
    tokens, mask = np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], bool)
    support = random_support(np.random.default_rng(0), tokens, MODEL.vocab)
    other = dataclasses.replace(support, offsets=support.offsets + 1)
    nothing = np.zeros(4, np.float32)

    def edges(*supports: Support | None) -> int:
        return merge([
            Sample(tokens=tokens, mask=mask, old_logp=nothing, advantage=nothing, support=each)
            for each in supports
        ]).n_edges  # fmt: skip

    assert edges(support, support) == edges(None, None) == 2
    assert edges(support, other) == edges(support, None) == 4


def test_tokens_whose_support_is_lost_are_not_trained() -> None:
    support = random_support(np.random.default_rng(0), np.arange(3), MODEL.vocab)
    support = dataclasses.replace(support, kind=np.array([OPEN, LOST, CLOSED], np.int8))
    turn = Turn(
        prompt=np.array([1, 2], np.int32), output=np.arange(3, dtype=np.int32),
        logprobs=np.full(3, -1.0, np.float32), versions=np.zeros(3, np.int32), temperature=1.0,
        finish=Finish.STOP, parent=None, start=0.0, seconds=0.0, queue_seconds=0.0,
        support=support,
    )  # fmt: skip
    sample = turn_sample(turn, 2.0)
    assert sample.mask.tolist() == [False, False, True, False, True]
    assert sample.advantage.tolist() == [0, 0, 2, 0, 2]
    with pytest.raises(ValueError, match="lost"):
        dataclasses.replace(sample, mask=np.array([0, 0, 1, 1, 1], bool))
