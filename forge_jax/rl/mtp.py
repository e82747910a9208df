"""The loss of the multi-token prediction modules: they learn to guess what the policy says.

Hidden states of the policy and states of its modules flow in; for every edge and depth the
divergence flows out, and how often a guess would be accepted. The policy is the teacher and
data: only the modules get gradients. No array of [edges, vocab] exists but for one chunk of
edges, as in `rl.logprob`; the gradient by the states is made in the same pass, since what
multiplies it is known by then, and the backward pass only scales it.

At an edge with the temperature T the teacher is ``p = softmax(h[source] @ w / T)`` and the
guess of depth k ``q = softmax(g_k[source] @ w / T)``: what the engine would sample from, and
with what it would be proposed. S are the `top_k` likeliest words of p, and everything else is
one more outcome:

    KL = Σ_{v in S} p_v log(p_v / q_v) + p_rest log(p_rest / q_rest),

at least 0 and at most the full divergence. ``α = Σ_v min(p_v, q_v)``, over the whole
vocabulary, is the share of guesses that speculative sampling accepts (arXiv 2211.17192).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from forge_jax.config import MtpConfig
from forge_jax.rl.logprob import CHUNK_LOGITS, SMALLEST_CHUNK, edge_logits
from forge_jax.trees import Mean, pytree

_dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@pytree
class Guess:
    """What the modules make of each edge; without a gradient but of `loss`."""

    loss: Array  # [modules, M]
    kl: Array  # [modules, M], nats, see above
    accepted: Array  # [modules, M], α
    agrees: Array  # [modules, M], 1 where policy and module have the same likeliest word


def share_of_loss(
    guess: Guess,
    weight: Float[Array, " M"],
    depth: Int[Array, " M"],
    denominator: Float[Array, ""],
    cfg: MtpConfig,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """``λ Σ_k Σ_edges weight * loss_k / denominator`` of a micro-batch, and its metrics.

    `weight` is the sum of those of an edge's occurrences, `depth` that of its source; a source
    of depth < k has no k-th ancestor and is not in the loss of module k.
    """
    modules = len(guess.loss)
    known = depth[None] >= jnp.arange(1, modules + 1)[:, None]
    each = jnp.where(known, weight[None], 0)
    share = cfg.weight * jnp.sum(each * guess.loss) / denominator
    metrics = {
        f"mtp_{name}_{k + 1}": Mean.of(value[k], each[k])
        for name, value in (
            ("kl", guess.kl),
            ("accepted", guess.accepted),
            ("agrees", guess.agrees),
        )
        for k in range(modules)
    }
    return share, jax.lax.stop_gradient(metrics)


def guesses(
    h: Float[Array, "N E"],
    states: Float[Array, "modules N E"],
    w: Float[Array, "E V"],
    source: Int[Array, " M"],
    temperature: Float[Array, " M"],
    cfg: MtpConfig,
    *,
    axes: tuple[str, ...] = (),
    chunk: int | None = None,
) -> Guess:
    """The modules' guesses at each of M edges, in float32 (float64 if an input is).

    `axes` are those of the enclosing `shard_map` over which the columns of `w` are cut, in order
    of the ranks. `chunk` is the number of edges whose logits exist at once; by default it follows
    from the vocabulary.
    """
    edges = len(source)
    if chunk is None:
        chunk = max(SMALLEST_CHUNK, CHUNK_LOGITS // w.shape[1])
    chunk = max(1, min(chunk, edges))
    missing = -edges % chunk
    edge = (
        jnp.pad(source, (0, missing)).reshape(-1, chunk),
        jnp.pad(temperature, (0, missing), constant_values=1).reshape(-1, chunk),
    )
    fixed = jax.lax.stop_gradient((h, w, *edge))
    found = _guesses(states, *fixed, cfg, axes)
    flat = [jnp.moveaxis(x, 1, 0).reshape(len(states), -1)[:, :edges] for x in found]
    rest = jax.lax.stop_gradient(flat[1:])
    return Guess(loss=flat[0], kl=rest[0], accepted=rest[1], agrees=rest[2])


@partial(jax.custom_vjp, nondiff_argnames=("cfg", "axes"))
def _guesses(states, h, w, source, temperature, cfg, axes):
    return _forward(states, h, w, source, temperature, cfg, axes)[0]


def _forward(states, h, w, source, temperature, cfg, axes):
    wide = jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32)
    wide_w = w.astype(wide)

    def chunk(_, edge):
        source, temperature = edge
        temperature = temperature.astype(wide)[:, None]
        z = edge_logits(h[source], w) / temperature
        likely = z >= _kth_largest(z, cfg.top_k, axes)  # ties of the last one are likely too

        def module(state):
            guess = edge_logits(state[source], w) / temperature
            loss, dz, *measures = _divergence(z, guess, likely, cfg, axes)
            rows = _dot(dz / temperature, wide_w.T)
            return (loss, *measures), jax.lax.psum(rows, axes) if axes else rows

        # A module at a time: each has logits of its own.
        return None, jax.lax.map(module, states)

    _, (found, rows) = jax.lax.scan(chunk, None, (source, temperature))
    return found, (rows, source, states)


def _backward(cfg, axes, saved, cotangent):
    rows, source, states = saved  # rows [chunks, modules, chunk, E]
    scaled = rows * cotangent[0][..., None].astype(rows.dtype)
    scaled = jnp.moveaxis(scaled, 1, 0).reshape(len(states), -1, rows.shape[-1])
    d_states = jnp.zeros(states.shape, rows.dtype).at[:, source.reshape(-1)].add(scaled)
    return d_states.astype(states.dtype), None, None, None, None


_guesses.defvjp(_forward, _backward)


def _divergence(
    z: Array, guess: Array, likely: Array, cfg: MtpConfig, axes: tuple[str, ...]
) -> tuple[Array, ...]:
    """Of each of C edges the loss [C], its gradient by the logits `guess` [C, V], KL, α and
    agreement [C], from logits over the temperature [C, V]."""
    log_p, log_q = z - _log_sum(z, None, axes), guess - _log_sum(guess, None, axes)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    rest_p, rest_q = (_log_sum(x, ~likely, axes) for x in (log_p, log_q))
    inside = _sum(jnp.where(likely, p * (log_p - log_q), 0), axes)
    outside = jnp.where(rest_p > -jnp.inf, jnp.exp(rest_p) * (rest_p - rest_q), 0)
    kl = inside + outside
    d_kl = q - jnp.where(likely, p, q * jnp.exp(rest_p - rest_q))
    accepted = _sum(jnp.minimum(p, q), axes)
    lower = jnp.where(q < p, q, 0)  # where α grows with q
    d_accepted = lower - q * _sum(lower, axes)
    share = jnp.exp(-cfg.decay * accepted)
    loss = share * kl + (1 - share) * (1 - accepted)
    top = (z == _largest(z, axes)) & (guess == _largest(guess, axes))
    agrees = jnp.minimum(_sum(top.astype(z.dtype), axes), 1)
    beside = (x[:, 0] for x in (kl, accepted, agrees))
    return loss[:, 0], share * d_kl - (1 - share) * d_accepted, *beside


def _largest(x: Array, axes: tuple[str, ...]) -> Array:
    top = jnp.max(x, axis=1, keepdims=True)
    return jax.lax.pmax(top, axes) if axes else top


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    total = jnp.sum(x, axis=1, keepdims=True)
    return jax.lax.psum(total, axes) if axes else total


def _log_sum(x: Array, where: Any, axes: tuple[str, ...]) -> Array:
    """``log Σ exp x`` [C, 1] over the words in `where`; -inf of none."""
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    top = jnp.maximum(_largest(x, axes), jnp.finfo(x.dtype).min)
    return top + jnp.log(_sum(jnp.exp(x - top), axes))


def _kth_largest(z: Array, k: int, axes: tuple[str, ...]) -> Array:
    """The k-th largest of each row, or the smallest of one that has fewer, [C, 1]."""
    best = jax.lax.top_k(z, min(k, z.shape[1]))[0]
    if axes:
        best = jax.lax.all_gather(best, axes, axis=1, tiled=True)
        best = jax.lax.top_k(best, min(k, best.shape[1]))[0]
    return best[:, -1:]
