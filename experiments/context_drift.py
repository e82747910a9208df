"""How far a policy's next tokens move when its context is managed: same replies, two prompts.

Held-out trails flow in, each followed by the script without errors once with whole and once with
managed contexts. Replies are the same in both, prompts are not. What flows out is the divergence
KL(managed || whole) of the policy's distributions at every token of these replies, exact, over
the whole vocabulary. Prompts that do not differ are left out: they have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.tasks import trail
from forge_jax.attention.reference import reference_attention
from forge_jax.config import ContextConfig
from forge_jax.models import transformer
from forge_jax.models.chat import Chat
from forge_jax.models.config import ModelConfig
from forge_jax.models.load import LoadedModel
from forge_jax.rl.warm import written
from forge_jax.types import Task

PERFECT = trail.Noise(early=0.0, wrong=0.0, lost=0.0)
ROWS = 64  # computed at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One reply behind two prompts."""

    managed: np.ndarray  # i32[P], a prompt
    whole: np.ndarray  # i32[Q], another
    reply: np.ndarray  # i32[R], up to its end of turn


def pairs(tasks: Sequence[Task], context: ContextConfig, chat: Chat) -> list[Pair]:
    """Those of the script at `tasks`, where the prompts differ; texts that the manager asks for
    have no counterpart and are left out."""
    found = []
    for task in tasks:
        managed, whole = (_moves(task, one) for one in (context, trail.WHOLE))
        for short, long in zip(managed, whole, strict=True):
            (prompt, text), (other, same) = (
                written(chat, call.messages, call.tools, call.reply) for call in (short, long)
            )
            assert text == same, f"{text!r} and {same!r} of one script"
            if prompt != other:
                ids = (chat.tokenizer.encode(one) for one in (prompt, other, text))
                a, b, c = (np.asarray(one, np.int32) for one in ids)
                found.append(Pair(managed=a, whole=b, reply=c))
    return found


def _moves(task: Task, context: ContextConfig) -> list[ScriptedCall]:
    """Lookups and the answer."""
    calls = trail.script(trail.world_of(task), np.random.default_rng(0), PERFECT, context)
    return [c for c in calls if "tool_calls" in c.reply or c.reply["content"].startswith("!")]


def drift(model: LoadedModel, found: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """KL(managed || whole) in nats, and whether the likeliest token is another one, of every token
    of every reply: f64[n], bool[n]."""
    longest = max(max(len(p.managed), len(p.whole)) + len(p.reply) for p in found)
    length = -(-longest // 32) * 32  # few shapes
    kls: list[float] = []
    moved: list[bool] = []
    for start in range(0, len(found), ROWS):
        part = found[start : start + ROWS]
        short = _logp(model, [(p.managed, p.reply) for p in part], length)
        long = _logp(model, [(p.whole, p.reply) for p in part], length)
        for p, q in zip(short, long, strict=True):
            kls += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
            moved += (p.argmax(axis=-1) != q.argmax(axis=-1)).tolist()
    return np.array(kls, np.float64), np.array(moved, bool)


def _logp(
    model: LoadedModel, samples: Sequence[tuple[np.ndarray, np.ndarray]], length: int
) -> list[np.ndarray]:
    """Log-probs f64[R, V] of what may stand in each place of each sample's reply."""
    tokens = np.zeros((ROWS, length), np.int32)
    for row, (prompt, reply) in zip(tokens, samples, strict=False):
        row[: len(prompt) + len(reply)] = np.concatenate([prompt, reply])
    logp = np.asarray(next_logp(model.params, jnp.asarray(tokens), model.cfg))
    return [
        logp[i, len(prompt) - 1 : len(prompt) - 1 + len(reply)].astype(np.float64)
        for i, (prompt, reply) in enumerate(samples)
    ]


@partial(jax.jit, static_argnames="cfg")
def next_logp(
    params: dict[str, Any], tokens: Int[Array, "B T"], cfg: ModelConfig
) -> Float[Array, "B T V"]:
    """Log-probs of the token after each one, under causal attention."""
    here = jnp.arange(tokens.shape[1])
    ends = jnp.full_like(here, tokens.shape[1])

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        def one(q: Array, k: Array, v: Array) -> Array:
            return reference_attention(q, k, v, here, here, ends, cfg.head_dim**-0.5)[0]

        return jax.vmap(one)(q, k, v), cache

    places = jnp.broadcast_to(here, tokens.shape)
    h, _, _ = transformer.hidden(params, tokens, places, attend, cfg)
    return jax.nn.log_softmax(transformer.logits(params, h, cfg))
