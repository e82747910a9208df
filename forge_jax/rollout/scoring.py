"""The prefill of prompts whose log-probs are asked for.

As `programs.prefill`, of spans that bring the token behind them; what the model makes of each
next token flows out beside. Invariant: a prompt read in any number of spans is scored as in one,
since the last token of a span has the first one of the next for its label.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import packets
from forge_jax.rollout.access import Pool
from forge_jax.rollout.packets import PrefillShape, Scores
from forge_jax.rollout.programs import recorded, spans_read
from forge_jax.rollout.speculation import Drafter
from forge_jax.rollout.tracing import traces

CHUNK_LOGITS = 1 << 22  # logits that exist at once: 16 MiB of float32


@partial(
    jax.jit,
    static_argnames=("cfg", "shape", "top", "attention", "routes", "mesh"),
    donate_argnames=("pool", "drafter"),
)
def prefill(
    params: dict[str, Any],
    pool: Pool,
    drafter: Drafter,
    packed: Int[Array, "R C"],
    *,
    cfg: ModelConfig,
    shape: PrefillShape,
    top: int,
    attention: str = "xla",
    routes: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Pool, Drafter, Int[Array, "R T layers k"] | None, Scores]:
    """`programs.prefill` of a scored shape; the `top` likeliest tokens are told beside each next
    one."""
    traces["prefill"] += 1
    pool, drafter, h, routing = spans_read(
        params, pool, drafter, packed, cfg, shape, attention, mesh
    )
    labels = packed[:, packets.PREFILL_HEADER + shape.pages + 1 :]
    told = scored(params, h.reshape(-1, h.shape[-1]), labels.reshape(-1), cfg, top)
    told = Scores(*(x.reshape(*labels.shape, *x.shape[1:]) for x in told))
    return pool, drafter, recorded(routing, cfg) if routes else None, told


def scored(
    params: dict[str, Any],
    h: Float[Array, "M E"],
    labels: Int[Array, " M"],
    cfg: ModelConfig,
    top: int,
    chunk: int | None = None,
) -> Scores:
    """What ``softmax(logits)`` after the states `h` says of `labels`.

    `chunk` is the number of states whose logits exist at once; by default as many as make
    `CHUNK_LOGITS` of them.
    """
    count = len(labels)
    size = max(1, min(count, CHUNK_LOGITS // cfg.vocab if chunk is None else chunk))
    missing = -count % size
    rows = jnp.pad(h, ((0, missing), (0, 0))).reshape(-1, size, h.shape[1])

    def some(each: tuple[Array, Array]) -> Scores:
        return _scores(transformer.logits(params, each[0], cfg), each[1], min(top, cfg.vocab))

    told = jax.lax.map(some, (rows, jnp.pad(labels, (0, missing)).reshape(-1, size)))
    return Scores(*(x.reshape(count + missing, *x.shape[2:])[:count] for x in told))


def _scores(logits: Float[Array, "M V"], labels: Int[Array, " M"], top: int) -> Scores:
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)
    words = jnp.arange(logits.shape[1], dtype=labels.dtype)[None]
    before = (logits > own) | ((logits == own) & (words < labels[:, None]))
    total = jax.nn.logsumexp(logits, axis=1)
    values, ids = jax.lax.top_k(logits, top)
    return Scores(
        logprobs=own[:, 0] - total,
        ranks=1 + jnp.sum(before, axis=1, dtype=jnp.int32),
        top_ids=ids,
        top_logprobs=values - total[:, None],
    )
