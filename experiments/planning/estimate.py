"""An update in closed form: what `measure` finds by compiling, in a millisecond, roughly.

Sizes of a model and of a mesh flow in; work, bytes moved and memory of one device flow out. The
products and collectives are those of the program, term by term; memory and bytes moved leave out
what is small. Tests hold both beside the compiled program.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from experiments.planning.abstract import TILES
from experiments.planning.config import PlanConfig, sequences
from experiments.planning.counting import PASSES, Sent, Work
from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig
from forge_jax.models.config import ModelConfig
from forge_jax.models.experts import CHUNK
from forge_jax.models.layout import layout
from forge_jax.rl.logprob import DEVICE_LOGITS
from forge_jax.rl.rows import EDGES_GROWTH
from forge_jax.sched.ladder import bucket
from forge_jax.sharding import LENT, cuts
from forge_jax.trees import Param

WIDE = 4  # bytes of float32
HIGHEST = max(PASSES.values())
EXPERTS = ("gate", "up", "down")  # of which a token uses some, where there are experts


class Rough(NamedTuple):
    """What a device does and holds, by a closed form."""

    memory: dict[str, float]  # bytes at the peak, by what they are of
    programs: list[tuple[int, Work, float]]  # runs, work of one, bytes that one moves


class Weight(NamedTuple):
    """One parameter on one device, all layers of it."""

    name: str
    stored: float  # numbers kept
    used: float  # numbers of one layer, once the parts of other ranks are there
    layers: int  # 0 outside of the layers
    lent: tuple[str, ...]  # axes over which it is put together
    copies: tuple[str, ...]  # axes with other tokens that hold the same part


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one device computes with."""

    model: ModelConfig
    mesh: Mesh
    tokens: int  # of one rank, padded to tiles
    context: int
    tile: int
    bytes: int  # of an activation
    remat: str  # see `forge_jax.models.remat`
    weights: tuple[Weight, ...]

    @property
    def again(self) -> int:
        """1 where layers are computed again for the backward pass."""
        return int(self.remat != "none")

    @property
    def attends_again(self) -> int:
        """1 where attention is as well."""
        return int(self.remat in ("block", "offload"))

    def ranks(self, *axes: str) -> int:
        """Devices along `axes` together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def heads(self) -> float:
        """Query heads of a device."""
        return self.model.heads / self.ranks("tensor")

    @property
    def kv_heads(self) -> float:
        """Key heads of a device."""
        return self.model.kv_heads / self.ranks("tensor")

    @property
    def pairs(self) -> float:
        """(query, key) pairs in the tiles that a device visits, for one head of one layer."""
        padded = self.tokens * self.ranks("context")
        return (padded + self.tile) * padded / 2 / self.ranks("context")

    @property
    def top(self) -> float:
        """Numbers of the unembedding."""
        return self.model.embed * self.model.vocab / self.ranks("tensor")


def rough(
    model: ModelConfig, mesh: Mesh, cut: MeshConfig, cfg: PlanConfig, topology: Topology
) -> Rough:
    """An update on a mesh."""
    of, rounds = sizes(model, mesh, cfg), math.ceil(sequences(cfg, topology) / cut.places)
    stored = sum(weight.stored for weight in of.weights)
    # Read: weights, moments and gradients; written: the first two. A sum reads two, writes one.
    apply, add = 7 * WIDE * stored, 3 * WIDE * stored
    programs = [(rounds, work(of), moved(of)), (1, Work(), apply), (rounds - 1, Work(), add)]
    return Rough(memory(of, rounds), programs)


def model_flops(model: ModelConfig, cfg: PlanConfig, topology: Topology) -> float:
    """Of an update: 6 a weight and token and 12 a channel and visible pair, nothing again."""
    pairs = cfg.context * (cfg.context + 1) / 2
    attention = 12 * model.layers * model.heads * model.head_dim * pairs
    each = 6 * active(model) * cfg.context + attention
    return sequences(cfg, topology) * each


def active(model: ModelConfig) -> int:
    """Weights that a token is multiplied with."""
    described = layout(model)
    total = model.embed * model.vocab
    for name, param in described["layers"].items():
        if len(param.shape) > 2 and not name.endswith("norm"):
            expert = model.experts and name in EXPERTS
            share = model.experts_per_token / model.experts if expert else 1
            total += round(math.prod(param.shape) * share)
    return total


def sizes(model: ModelConfig, mesh: Mesh, cfg: PlanConfig) -> Sizes:
    """Of a model on a mesh."""
    tile = cfg.tile or TILES[0]
    share = cfg.context / mesh.shape["context"]
    return Sizes(
        model=model,
        mesh=mesh,
        tokens=math.ceil(share / tile) * tile,
        context=cfg.context,
        tile=tile,
        bytes=2 if cfg.dtype == "bfloat16" else 4,
        remat=cfg.remembered,
        weights=tuple(_weights(model, mesh)),
    )


def _weights(model: ModelConfig, mesh: Mesh) -> Iterator[Weight]:
    described = layout(model)
    layers = described.pop("layers")
    for count, params in ((0, described), (model.layers, layers)):
        for name, param in params.items():
            yield _weight(name, param, count, mesh)


def _weight(name: str, param: Param, layers: int, mesh: Mesh) -> Weight:
    cut = cuts(param, mesh)
    lent = tuple(
        axis
        for logical, axes in zip(param.axes, cut, strict=True)
        if logical in LENT
        for axis in axes
    )
    every = [axis for axes in cut for axis in axes]
    stored = math.prod(param.shape) / math.prod(mesh.shape[axis] for axis in every)
    used = stored * math.prod(mesh.shape[axis] for axis in lent) / max(1, layers)
    copies = (axis for axis in mesh.axis_names if axis not in (*every, "tensor"))
    return Weight(name, stored, used, layers, lent, tuple(a for a in copies if mesh.shape[a] > 1))


def work(of: Sizes) -> Work:
    """Of one row of micro-batches."""
    plain, highest = _products(of)
    sent: dict[Sent, float] = defaultdict(float)
    for weight in of.weights:
        uses = max(1, weight.layers)
        if weight.lent:
            others = 1 - 1 / of.ranks(*weight.lent)
            axes = tuple(sorted(weight.lent))
            gathers = (2 if weight.layers else 1) * of.bytes  # none is kept for the backward pass
            sent[Sent("all_gather", axes, True)] += uses * weight.used * gathers * others
            sent[Sent("reduce_scatter", axes, True)] += uses * weight.used * WIDE * others
        if weight.copies:
            others = 1 - 1 / of.ranks(*weight.copies)
            axes = tuple(sorted(weight.copies))
            sent[Sent("psum", axes, True)] += 2 * weight.stored * WIDE * others
    for key, size in _activations(of):
        sent[key] += size
    return Work(flops=plain + highest, passes=plain + HIGHEST * highest, sent=sent)


def _products(of: Sizes) -> tuple[float, float]:
    """FLOPs in the dtype of the layers, and in float32."""
    m, t = of.model, of.tokens
    linear = 0.0
    for weight in of.weights:
        if weight.name in ("q", "k", "v", "o", *EXPERTS):
            expert = m.experts and weight.name in EXPERTS
            rows = t * m.experts_per_token * of.ranks("expert") if expert else t
            each = weight.used / m.experts if expert else weight.used
            # Nobody waits for what "down" made of the layer's hidden units a second time.
            times = 3 + (0 if weight.name == "down" else 1 if expert else of.again)
            times -= of.again - of.attends_again if weight.name == "v" else 0
            linear += 2 * rows * each * times * weight.layers
    # Two products forward, three for the queries' and four for the keys' gradients.
    products = 2 * (1 + of.attends_again) + 3 + 4
    attention = 2.0 * products * m.head_dim * of.heads * of.pairs * m.layers
    router = 2.0 * t * m.embed * m.experts * (3 + of.again) * m.layers
    share = math.ceil((of.context - 1) / of.ranks("context"))
    edges = bucket(min(t, of.context - 1), share, EDGES_GROWTH, 1)  # as rows are laid out
    logits = their_gradient = 4 * edges * of.top  # the first twice, forward and backward
    if of.bytes == WIDE:  # kernels and head then multiply at full precision, layers do not
        return linear, router + attention + logits + their_gradient
    return linear + attention + logits, router + their_gradient


def _activations(of: Sizes) -> Iterator[tuple[Sent, float]]:
    """What ranks that share a micro-batch, or experts, tell each other."""
    m, t = of.model, of.tokens
    stream = t * m.embed
    if of.ranks("context") > 1:
        others = 1 - 1 / of.ranks("context")
        keys = 2 * of.context * of.kv_heads * m.head_dim * m.layers * others
        yield Sent("all_gather", ("context",), False), keys * of.bytes * (1 + of.again)
        yield Sent("reduce_scatter", ("context",), False), keys * WIDE
    if of.ranks("tensor") > 1:
        others = 1 - 1 / of.ranks("tensor")
        # Into and out of attention and feed-forward; the embedding; the head's gradient.
        times = (4 + of.again) * m.layers + 2
        yield Sent("psum", ("tensor",), False), 2 * times * stream * WIDE * others
    if m.experts and of.ranks("expert") > 1:
        ranks = of.ranks("expert")
        every = stream * (ranks - 1) * m.layers
        yield Sent("all_gather", ("expert",), False), every * of.bytes * (2 + of.again)
        yield Sent("reduce_scatter", ("expert",), False), every * WIDE * 2


def moved(of: Sizes) -> float:
    """Bytes to and from memory for one row of micro-batches, the large ones."""
    m, t, b = of.model, of.tokens, of.bytes
    # A weight is put together and read for the forward pass, once more where that is repeated,
    # and for the backward one; its gradient is made, widened and summed.
    weights = sum(
        weight.used * (2 * b * (1 + of.again) + b + 4 * WIDE) * max(1, weight.layers)
        for weight in of.weights
    )
    if m.experts:  # all of them for every chunk of rows, their gradients summed up chunk by chunk
        experts = sum(one.used * one.layers for one in of.weights if one.name in EXPERTS)
        weights += experts * (6 * b + 4 * WIDE) * max(1.0, t * m.experts_per_token / CHUNK)
    wide = (of.heads + 2 * of.kv_heads) * m.head_dim
    hidden = m.ffn / of.ranks("tensor") * max(1, m.experts_per_token)
    activations = t * m.layers * (2 + of.again) * (12 * m.embed + 8 * wide + 6 * hidden) * b
    tiles = of.pairs / of.tile**2
    key_tile = of.tile * m.head_dim * b * of.kv_heads
    query_tile = of.tile * m.head_dim * b * of.heads
    attention = tiles * (key_tile * (2 * (1 + of.attends_again) + 3) + 2 * query_tile) * m.layers
    keys = 2 * of.context * of.kv_heads * m.head_dim * m.layers * (4 * b + 6 * WIDE)
    chunks = max(1.0, t * m.vocab / of.ranks("tensor") / DEVICE_LOGITS)
    logits = t * m.vocab / of.ranks("tensor") * WIDE * 8
    return weights + activations + attention + keys + logits + 5 * WIDE * of.top * chunks


def memory(of: Sizes, rounds: int) -> dict[str, float]:
    """Bytes on a device at the peak of an update of `rounds` rows."""
    m, t, b = of.model, of.tokens, of.bytes
    stored = sum(weight.stored for weight in of.weights)
    layer = sum(weight.used for weight in of.weights if weight.layers)
    wide = (of.heads + 2 * of.kv_heads) * m.head_dim
    hidden = m.ffn / of.ranks("tensor")
    keys = 2 * of.context * of.kv_heads * m.head_dim * (3 * b + 3 * WIDE)
    own = t * (4 * m.embed * WIDE + 4 * wide * b + (0 if m.experts else 5 * hidden * b))
    if m.experts:
        own += t * of.ranks("expert") * m.embed * (2 * b + 2 * WIDE)
    # On the device: what enters each layer, and more of it where less is computed again.
    each = 0.0 if of.remat == "offload" else float(m.embed)
    if not of.attends_again:
        each += 2 * of.heads * m.head_dim + 2 * of.kv_heads * m.head_dim
    if not of.again:
        each += 3 * m.embed + wide + 4 * hidden * max(1, m.experts_per_token)
    kept = t * each * b * m.layers
    logits = min(t * m.vocab / of.ranks("tensor"), DEVICE_LOGITS) * WIDE * 8
    # The unembedding and its gradient: summed up, rounded to the dtype of the layers, widened.
    head = of.top * (2 * b + 2 * WIDE) + t * m.embed * 3 * WIDE + logits
    return {
        "weights": stored * WIDE,
        "moments": stored * 2 * WIDE,
        "gradients": stored * WIDE * (2 if rounds > 1 else 1),
        "kept activations": kept,
        "working": max(layer * (2 * b + (3 if m.experts else 1) * WIDE) + keys + own, head),
    }
