"""Modules that decode keep the states that they have over the whole sequence."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.models import layout, mtp, transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.layers import rms_norm
from forge_jax.rollout.drafting import draft, read

CFG = ModelConfig(
    family="qwen3", vocab=29, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24,
    rope_theta=1e4, norm_eps=1e-6, tied=False, max_context=64, mtp=3, init_std=0.3,
)  # fmt: skip
MOE = dataclasses.replace(CFG, experts=4, experts_per_token=2)
LENGTH = 40


def causal(q: Any, k: Any, v: Any, cache: None) -> tuple[Any, None]:
    """Attention of a whole sequence, [T, H, D]."""
    n = len(q)
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((1, n, n), bool)), scores, -1e30)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v), None


def attend_at(positions: Any) -> Any:
    """Attention over a contiguous cache [B, S, K, D]; positions are written first."""

    def attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
        row = jnp.arange(len(q))[:, None]
        keys, values = (
            old.at[row, positions].set(new) for old, new in zip(cache, (k, v), strict=True)
        )
        wide = [jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (keys, values)]
        scores = jnp.einsum("bthd,bshd->bhts", q, wide[0]) / np.sqrt(q.shape[-1])
        sees = jnp.arange(keys.shape[1])[None, None] <= positions[..., None]
        scores = jnp.where(sees[:, None], scores, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), wide[1]), (keys, values)

    return attend


@partial(jax.jit, static_argnames="cfg")
def whole(params: Any, tokens: Any, cfg: ModelConfig) -> tuple[Any, Any]:
    """The model's states of a sequence and its modules', final-normed."""
    at = jnp.arange(len(tokens))
    h = transformer.hidden(params, tokens, at, causal, cfg)[0]
    above = lambda s: jnp.concatenate([s[:1], s[:-1]])  # noqa: E731
    return h, mtp.states(params, h, tokens, at, above, causal, cfg)


def parameters(cfg: ModelConfig) -> Any:
    params = layout.init(cfg, jax.random.key(2))
    for name in ("token_norm", "state_norm", "norm"):
        scale = params["mtp"][name]
        params["mtp"][name] = 1 + 0.3 * jax.random.normal(jax.random.key(len(name)), scale.shape)
    return params


def unstacked(params: Any, cfg: ModelConfig) -> Any:
    modules = tuple(jax.tree.map(lambda x, i=i: x[i], params["mtp"]) for i in range(cfg.mtp))
    return params | {"mtp": modules}


def greedy(logits: Any, position: Any) -> Any:
    del position
    return jnp.argmax(logits, axis=-1)


@partial(jax.jit, static_argnums=(6,))
def was_read(params: Any, caches: Any, h: Any, before: Any, tokens: Any, at: Any, cfg: Any) -> Any:
    return read(params, caches, h, before, tokens, at, attend_at, cfg)


@partial(jax.jit, static_argnums=(7, 8))
def drafted(
    params: Any,
    caches: Any,
    h: Any,
    before: Any,
    row: Any,
    count: Any,
    start: Any,
    cfg: Any,
    n: int,
) -> Any:
    return draft(params, caches, h, before, row, count, start, attend_at, greedy, n, cfg)


def normed(params: Any, states: Any) -> Any:
    """States of modules 1, 2, ... [modules, ..., E] as `mtp.states` returns them."""
    scales = params["mtp"]["norm"]
    return jnp.stack([rms_norm(g, s, CFG.norm_eps) for g, s in zip(states, scales, strict=False)])


def guesses_of(params: Any, known: np.ndarray, cfg: ModelConfig) -> list[int]:
    """What the modules say after known tokens, by whole sequences only."""
    said: list[int] = []
    for k in range(1, cfg.mtp + 1):
        # The state of the newest known token does not exist yet, and none of these reads it.
        row = np.concatenate([known, said]).astype(np.int32)
        row = np.pad(row, (0, LENGTH + cfg.mtp - len(row)))
        _, states = whole(params, row, cfg)
        last = states[k - 1, len(known) + k - 2]
        said.append(int(jnp.argmax(transformer.logits(params, last, cfg))))
    return said


@pytest.mark.parametrize("cfg", [CFG, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("prompt", [1, 2, 13])
def test_states_in_decode_are_those_of_the_whole_sequence(cfg: ModelConfig, prompt: int) -> None:
    params = parameters(cfg)
    ready = unstacked(params, cfg)
    rng = np.random.default_rng(prompt)
    tokens = rng.integers(0, cfg.vocab, LENGTH + cfg.mtp).astype(np.int32)
    h, states = whole(params, tokens, cfg)
    shape = (1, LENGTH + 2 * cfg.mtp, cfg.kv_heads, cfg.head_dim)
    caches = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(cfg.mtp))

    # The prompt but for its last token, in two chunks.
    before = jnp.full((1, cfg.mtp, cfg.embed), 7.0)  # before the first token: must not matter
    for a, b in ((0, (prompt - 1) // 2), ((prompt - 1) // 2, prompt - 1)):
        if a == b:
            continue
        at = np.arange(a, b)[None]
        found, caches = was_read(ready, caches, h[None, a:b], before, tokens[None, a:b], at, cfg)
        np.testing.assert_allclose(found[0, 0], h[a:b])
        np.testing.assert_allclose(normed(params, found[1:, 0]), states[:-1, a:b], atol=2e-5)
        before = jnp.swapaxes(found[:, :, -1], 0, 1)

    # Its last token, then windows of which 1 to 4 tokens turn out to be known.
    width, start, count, known_h = 1, prompt - 2, 1, before[:, :1]
    before = before[:, 1:]
    while start + count + width < LENGTH:
        row = tokens[None, start + 1 : start + 1 + width].copy()
        row[:, count:] = 3  # rejected drafts
        at = np.array([count]), np.array([start])
        found, here, before, caches = drafted(ready, caches, known_h, before, row, *at, cfg, 3)
        assert found.tolist() == [guesses_of(params, tokens[: start + count + 1], cfg)]
        # The states of tokens start .. start + count - 1.
        first = max(start, 0)
        got = normed(params, here[1:, 0, first - start : count])
        np.testing.assert_allclose(got, states[:-1, first : start + count], atol=2e-5)
        start += count
        width, count = 4, int(rng.integers(1, 5))
        known_h = h[None, start : start + width].at[:, count:].set(5.0)
    assert start > LENGTH - 10


@pytest.mark.parametrize("wanted", [1, 2])
def test_modules_that_do_not_guess_are_kept_up(wanted: int) -> None:
    params = unstacked(parameters(CFG), CFG)
    rng = np.random.default_rng(0)
    shape = (2, 16, CFG.kv_heads, CFG.head_dim)
    caches = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(CFG.mtp))
    h = jnp.asarray(rng.normal(size=(2, 3, CFG.embed)), jnp.float32)
    before = jnp.asarray(rng.normal(size=(2, 2, CFG.embed)), jnp.float32)
    count, start = np.array([3, 2]), np.array([4, 5])
    row = rng.integers(0, CFG.vocab, (2, 3))
    few, many = (drafted(params, caches, h, before, row, count, start, CFG, n) for n in (wanted, 3))
    np.testing.assert_array_equal(few[0], many[0][:, :wanted])
    np.testing.assert_allclose(few[2], many[2], atol=1e-6)
    for b, n in enumerate(count):
        known = slice(start[b] + 1, start[b] + 1 + n)
        for a, c in zip(jax.tree.leaves(few[3]), jax.tree.leaves(many[3]), strict=True):
            np.testing.assert_allclose(a[b, known], c[b, known], atol=1e-6)
