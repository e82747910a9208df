"""Whatever the drafts, tokens are those that are drawn without any, and distributed like them."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.rollout.sampling import request_key, sample
from forge_jax.rollout.verify import NO_DRAFT, verified
from forge_jax.trees import pytree

VOCAB, WINDOW = 5, 4


@pytree
class Rows:
    """Slots of a toy engine: what was said before counts in what is said next."""

    token: Any  # i32[B]
    active: Any  # bool[B]
    left: Any  # i32[B]
    position: Any  # i32[B], of the token
    key: Any
    counts: Any  # f32[B, V]


def rows_of(seeds: np.ndarray, left: int) -> Rows:
    n = len(seeds)
    zeros = jnp.zeros(n, jnp.int32)
    return Rows(
        token=zeros,
        active=jnp.ones(n, bool),
        left=jnp.full(n, left, jnp.int32),
        position=zeros,
        key=request_key(zeros, jnp.asarray(seeds, jnp.int32), zeros),
        counts=jnp.zeros((n, VOCAB)),
    )


def draw(logits: Any, rows: Rows, temperature: float, stop: int) -> tuple[Rows, Any]:
    """One token a row, less likely the more often it was said; the packet has it and its log-prob,
    -1 of a row that is not active."""
    at = rows.position + 1
    shaped = logits - 0.7 * rows.counts
    warm = jnp.full(len(at), temperature)
    token, logp = sample(shaped, warm, rows.key, at)[:2]
    said = jax.nn.one_hot(token, VOCAB)
    left = rows.left - 1
    after = Rows(
        token=token,
        active=(left > 0) & (token != stop),
        left=left,
        position=at,
        key=rows.key,
        counts=rows.counts + said,
    )
    live = rows.active

    def kept(new: Any, old: Any) -> Any:
        return jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    packet = jnp.stack([token.astype(jnp.float32), logp], axis=-1)
    after = jax.tree.map(kept, after, rows)
    after = dataclasses.replace(after, active=jnp.where(live, after.active, False))
    return after, jnp.where(live[:, None], packet, -1)


def table() -> Any:
    """Logits of the token after each word."""
    return jnp.asarray(np.random.default_rng(3).normal(size=(VOCAB, VOCAB)) * 1.5, jnp.float32)


@partial(jax.jit, static_argnames=("temperature", "stop", "steps"))
def without(rows: Rows, temperature: float, stop: int, steps: int) -> Any:
    def step(rows: Rows, _: None) -> Any:
        return draw(table()[rows.token], rows, temperature, stop)

    return jax.lax.scan(step, rows, length=steps)[1]  # [steps, B, 2]


@partial(jax.jit, static_argnames=("temperature", "stop", "steps", "right"))
def with_drafts(
    rows: Rows, key: Any, temperature: float, stop: int, steps: int, right: float
) -> Any:
    """The same with windows of WINDOW tokens, whose drafts are the truth with probability
    `right`, else anything or nothing."""

    def step(rows: Rows, key: Any) -> Any:
        _, truth = jax.lax.scan(
            lambda r, _: draw(table()[r.token], r, temperature, -1), rows, length=WINDOW - 1
        )
        k1, k2 = jax.random.split(key)
        shape = (len(rows.token), WINDOW - 1)
        other = jax.random.randint(k1, shape, NO_DRAFT, VOCAB)
        wrong = jax.random.uniform(k2, shape) >= right
        drafts = jnp.where(wrong, other, truth[..., 0].T.astype(jnp.int32))
        fed = jnp.concatenate([rows.token[:, None], drafts], axis=1)  # -1 reads garbage, unseen
        return verified(
            table()[fed.T], drafts, rows, partial(draw, temperature=temperature, stop=stop)
        )

    return jax.lax.scan(step, rows, jax.random.split(key, steps))[1]  # [steps, W, B, 2]


def said(packets: Any) -> list[list[tuple[float, float]]]:
    """What every row drew, in order."""
    flat = np.asarray(packets).reshape(-1, *packets.shape[-2:])
    return [[tuple(x) for x in flat[:, b] if x[0] >= 0] for b in range(flat.shape[1])]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_change_nothing(temperature: float, right: float) -> None:
    rows = rows_of(np.arange(40), left=11)
    key = jax.random.key(5)
    off = said(without(rows, temperature, 4, 12))
    on = with_drafts(rows, key, temperature, 4, 12, right)
    assert said(on) == off
    assert {len(x) for x in off} - {11}, "some rows met the stop id"
    assert {x[-1][0] for x in off if len(x) < 11} <= {4.0}
    if right == 1.0:  # a draft that is right saves its step
        windows = (np.asarray(on)[..., 0] >= 0).any(axis=1).sum(axis=0)
        assert (windows == [-(-len(x) // WINDOW) for x in off]).all()


def test_tokens_have_their_exact_distribution() -> None:
    n = 40_000
    on = said(with_drafts(rows_of(np.arange(n), 3), jax.random.key(1), 1.0, -1, 3, 0.5))
    words = np.array([[t for t, _ in x] for x in on], int)
    found = np.zeros((VOCAB,) * 3)
    np.add.at(found, tuple(words.T), 1)
    logits, exact = np.asarray(table(), float), np.zeros((VOCAB,) * 3)
    for a, b, c in np.ndindex(exact.shape):
        p = 1.0
        for past, word in (((), a), ((a,), b), ((a, b), c)):
            z = logits[past[-1] if past else 0] - 0.7 * np.bincount(past, minlength=VOCAB)
            p *= np.exp(z[word]) / np.exp(z).sum()
        exact[a, b, c] = p
    keep = exact * n >= 5
    expected = np.append(exact[keep], exact[~keep].sum()) * n
    seen = np.append(found[keep], found[~keep].sum())
    chi2 = ((seen - expected) ** 2 / expected).sum()
    free = len(expected) - 1
    assert chi2 < free + 5 * np.sqrt(2 * free)  # five standard deviations


def test_a_shared_uniform_guesses_better_than_the_likeliest_word() -> None:
    n = 4000
    rng = np.random.default_rng(0)
    p = jnp.asarray(np.repeat(rng.normal(size=(1, 50)) * 0.7, n, axis=0), jnp.float32)
    q = p + jnp.asarray(np.repeat(rng.normal(size=(1, 50)) * 0.05, n, axis=0), jnp.float32)
    zeros = jnp.zeros(n, jnp.int32)
    keys = request_key(zeros, jnp.arange(n), zeros)
    truth, shared = (sample(x, jnp.ones(n), keys, zeros)[0] for x in (p, q))
    greedy = sample(q, jnp.zeros(n), keys, zeros)[0]
    assert (shared == truth).mean() > 2 * (greedy == truth).mean()
