"""A small model behind an engine, and callers of it."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.attention.reference import reference_attention
from forge_jax.config import RolloutConfig
from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import layout
from forge_jax.models.tokenizer import ByteTokenizer, Tokenizer
from forge_jax.models.transformer import hidden, logits
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.trees import Param, is_param
from forge_jax.types import Chunk, Finish, Request, Sampling

SMALL = ModelConfig(
    vocab=264,
    embed=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    rope_theta=10000.0,
    tied=False,
    max_context=256,
    init_std=0.3,
)
WIDE = RolloutConfig(slots=32, context=32, page=8, chunk=32, decode_steps=4)
NARROW = RolloutConfig(slots=3, context=16, page=4, chunk=8, decode_steps=3)
PATIENCE = 120.0  # seconds after which a test has hung, compilation included
BYTES = ByteTokenizer()


class Digits(ByteTokenizer):
    """Every id is its number in three digits."""

    def piece(self, index: int, first: bool = False) -> bytes:
        return b"%03d" % index


def weights(seed: int = 0) -> Any:
    """Stacked parameters of the small model."""
    return weights_of(SMALL, seed)


@cache
def weights_of(cfg: ModelConfig, seed: int) -> Any:
    """Stacked parameters, drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(p: Param) -> jax.Array:
        scale = rng.normal(0, p.std, p.shape) if p.std else np.ones(p.shape)
        return jax.device_put(scale.astype(np.float32))

    return jax.tree.map(draw, layout(cfg), is_leaf=is_param)


@asynccontextmanager
async def idle_engine(
    rollout: RolloutConfig = WIDE,
    stop_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer = BYTES,
    params: Any = None,
) -> AsyncIterator[RolloutEngine]:
    """An engine that nobody serves yet."""
    params = weights() if params is None else params
    with ThreadPoolExecutor(1) as device:
        yield RolloutEngine(SMALL, params, stop_ids, rollout, tokenizer, device)


@asynccontextmanager
async def served(rollout: RolloutConfig = WIDE, **options: Any) -> AsyncIterator[RolloutEngine]:
    """An engine that serves; every request must have ended, exactly once, at the end."""
    async with idle_engine(rollout, **options) as engine, serving(engine):
        yield engine
        stats = engine.stats()
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        assert stats["requests_submitted"] == sum(stats[f"requests_{f}"] for f in Finish)


@asynccontextmanager
async def serving(engine: Any) -> AsyncIterator[None]:
    """Serves inside the context; a fault of the engine is raised at its end."""
    task = asyncio.create_task(engine.serve())
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True)
class Completion:
    """All chunks of one request."""

    ids: list[int]
    logprobs: np.ndarray  # f32[n]
    versions: list[int]
    finish: Finish
    stop_text: str | None


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def ask(tokens: np.ndarray, **sampling: Any) -> Request:
    return Request(prompt=tokens, sampling=Sampling(**sampling))


async def complete(engine: RolloutEngine, request: Request) -> Completion:
    chunks: list[Chunk] = [chunk async for chunk in engine.generate(request)]
    assert [chunk.finish is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(len(c.ids) == len(c.logprobs) == len(c.versions) for c in chunks)
    last = chunks[-1]
    assert last.finish is not None
    return Completion(
        ids=np.concatenate([c.ids for c in chunks]).tolist(),
        logprobs=np.concatenate([c.logprobs for c in chunks]),
        versions=np.concatenate([c.versions for c in chunks]).tolist(),
        finish=last.finish,
        stop_text=last.stop_text,
    )


@partial(jax.jit, static_argnames="cfg")
def _logits(params: Any, tokens: Any, cfg: ModelConfig) -> Any:
    order = jnp.arange(len(tokens))

    def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
        ends = jnp.full(len(tokens), len(tokens))
        return reference_attention(q, k, v, order, order, ends, q.shape[-1] ** -0.5)[0], cache

    return logits(params, hidden(params, tokens, order, attend, cfg)[0], cfg)


def teacher_logits(
    params: Any, tokens: list[int], context: int = WIDE.context, cfg: ModelConfig = SMALL
) -> np.ndarray:
    """f32[T, V]: logits after each token, all tokens read at once."""
    padded = np.zeros(context, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(params, padded, cfg))[: len(tokens)]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def teacher_logprobs(
    params: Any, tokens: np.ndarray, output: list[int], temperature: float
) -> np.ndarray:
    """f32[n]: log-probs of `output` after the prompt `tokens`."""
    rows = teacher_logits(params, [*tokens.tolist(), *output])[len(tokens) - 1 : -1]
    scores = log_softmax(rows / temperature)
    return scores[np.arange(len(output)), output]


@partial(jax.jit, static_argnames="cfg")
def _step(params: Any, cache: Any, token: Any, position: Any, cfg: ModelConfig) -> Any:
    def attend(q: Any, k: Any, v: Any, layer: Any) -> Any:
        keys, values = (x.at[position].set(new[0]) for x, new in zip(layer, (k, v), strict=True))
        order = jnp.arange(len(keys))
        ends = jnp.full(len(keys), len(keys))
        scale = q.shape[-1] ** -0.5
        o = reference_attention(q, keys, values, position[None], order, ends, scale)[0]
        return o, (keys, values)

    h, cache, _ = hidden(params, token[None], position[None], attend, cfg, cache)
    return logits(params, h, cfg)[0], cache


def replayed_logprobs(versions: dict[int, Any], tokens: np.ndarray, out: Completion) -> np.ndarray:
    """f32[n]: log-probs of `out`, each token fed by the weights that sampled the next one."""
    shape = (SMALL.layers, WIDE.context, SMALL.kv_heads, SMALL.head_dim)
    cache = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    scores = []
    feeders = [out.versions[0]] * (len(tokens) - 1) + out.versions
    fed = [*tokens.tolist(), *out.ids]
    for position, version in enumerate(feeders):
        row, cache = _step(
            versions[version], cache, np.int32(fed[position]), np.int32(position), SMALL
        )
        scores.append(log_softmax(np.asarray(row))[fed[position + 1]])
    return np.array(scores[len(tokens) - 1 :], np.float32)
