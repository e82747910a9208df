"""Host records that cross the walls between rooms; plain numpy, frozen, no behaviour.

A `Turn` goes from the gateway to the pool, a `PackedTree` from the scheduler to the
trainer; `Request` and `Chunk` are what gateway and engine say to each other.
"""

import enum
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from forge_jax.drawing import CLOSED as CLOSED
from forge_jax.drawing import LOST as LOST
from forge_jax.drawing import OPEN as OPEN
from forge_jax.drawing import Grammar as Grammar
from forge_jax.drawing import Sampling as Sampling
from forge_jax.drawing import Support as Support
from forge_jax.lineage import STEMS as STEMS
from forge_jax.lineage import UNSPLICED as UNSPLICED
from forge_jax.lineage import Branch as Branch
from forge_jax.lineage import Lineage as Lineage
from forge_jax.lineage import Rule as Rule

NO_ROUTE = -1  # in place of an expert: none was recorded, the router chooses


def route_dtype(experts: int) -> np.dtype:
    """The smallest dtype that holds every expert and `NO_ROUTE`."""
    return np.dtype(np.int8 if experts <= 128 else np.int16)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a request looked like before it became tokens; only scripted engines read it."""

    text: str = ""  # the rendered prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # offered tools, OpenAI shape
    tool_result: bool = False  # the last message is a tool's result
    json_schema: Mapping[str, Any] | None = None  # schema of the response, if one is asked for
    session: str = ""  # what ids of its session's calls are made of: its name, if nothing else
    call: int = 0  # number of the call in its session, from 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion asked of an engine."""

    prompt: np.ndarray  # i32[P], P >= 1
    sampling: Sampling
    facts: Facts = field(default_factory=Facts)


class Finish(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller went away, or the engine shut down


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobs:
    """What a model makes of the tokens of a prompt but the first, each after all before it.

    All are of ``softmax(logits)``, whatever the settings of the request; likelier tokens rank
    first, equally likely ones by their ids.
    """

    logprobs: np.ndarray  # f32[P - 1]
    ranks: np.ndarray  # i32[P - 1], from 1
    top_ids: np.ndarray  # i32[P - 1, k], likeliest first
    top_logprobs: np.ndarray  # f32[P - 1, k]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Newly sampled tokens of one request, in order; the last one has a finish reason.

    On a stop string the tokens up to the one that completes it are kept (they were
    sampled, so they are trained on) and `stop_text` names the string, for the
    gateway to cut the text.
    """

    ids: np.ndarray  # i32[n]
    # f32[n], of the distribution that was sampled: of all that its settings make of the logits
    # (temperature 0: of argmax, 0).
    logprobs: np.ndarray
    versions: np.ndarray  # i32[n], version of the weights that sampled each token
    finish: Finish | None = None
    stop_text: str | None = None
    queue_seconds: float = 0.0  # from submission to the first prefill; on the first chunk
    cached_tokens: int = 0  # prompt tokens read from a cache; on the first chunk
    # int[m, layers, k], the experts of the tokens fed since the last chunk: the prompt's on the
    # first one, then those of the sampled tokens, each once it is fed. None: not recorded.
    routes: np.ndarray | None = None
    raw: np.ndarray | None = None  # f32[n], log-probs under softmax(logits); None: not told
    top_ids: np.ndarray | None = None  # i32[n, top_logprobs], likeliest first; None: not asked for
    top_logprobs: np.ndarray | None = None  # f32[n, top_logprobs], of `top_ids`, as `logprobs` are
    support: Support | None = None  # of each token; None: logits over temperature, all of them
    prompt: PromptLogprobs | None = None  # on the first chunk, of the weights that sampled its
    # first token; None: not asked for


class Refused(Exception):
    """An engine will not serve a request; `status` is the HTTP status that says why.

    400 bad request (code "context_length_exceeded" when the prompt does not fit),
    429 overloaded, 5xx fault. `param` names the field of a client at fault.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Engine(Protocol):
    """What a gateway needs of whatever makes tokens.

    Closing the iterator before its end aborts the request and frees its place.
    """

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yields chunks until one has a finish reason. Raises `Refused`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One call of a model, token-exact: one training sample.

    `prompt` is what was really fed, `output` what was really sampled.
    """

    prompt: np.ndarray  # i32[P]
    output: np.ndarray  # i32[C]
    logprobs: np.ndarray  # f32[C], the sampler's
    versions: np.ndarray  # i32[C], weight version of each token
    temperature: float
    finish: Finish
    parent: int | None  # call of the session whose prompt + output begins this prompt
    start: float  # seconds since the session opened
    seconds: float  # from arrival of the call to its last token
    queue_seconds: float  # of those, waiting for the engine
    # int[P + C, layers, k], the experts that the engine used, `NO_ROUTE` at tokens never fed.
    routes: np.ndarray | None = None  # None: not recorded
    support: Support | None = None  # of each output token, as in `Chunk`
    malformed: int = 0  # tool calls begun in the output that its format does not read
    lineage: Lineage | None = None  # what it took over from earlier calls; None: not recorded
    refused: int = 0  # tool calls of the output that no offered tool takes, by name and schema
    agent: str = ""  # of the episode that made the call, as it named itself


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task to solve: everything else about it follows from its family, level and seed."""

    family: str  # "hop"
    seed: int
    split: str = "train"  # "train" | "eval": seeds of the two never meet
    level: int = 0  # of difficulty, 0 the easiest; the only one where the family has no others


class Status(enum.StrEnum):
    """How an episode ended; only COMPLETED ones enter loss and baseline."""

    COMPLETED = "completed"
    ENVIRONMENT_FAILED = "environment_failed"  # the task could not be set up, stepped or verified
    AGENT_FAILED = "agent_failed"  # the agent raised
    TIMED_OUT = "timed_out"  # the agent did not end in time
    EXPIRED = "expired"  # enough of its group had completed, and did not wait for it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one agent run came to: exactly one for every run started."""

    status: Status
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # "turns", "tool_seconds", ...
    error: str = ""  # why it is not COMPLETED
    # Of agents that have a reward of their own in place of `reward`, by `Turn.agent`.
    agents: Mapping[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        return self.status is Status.COMPLETED


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One run of an agent at a task, with every call it made."""

    item: int  # number of its group in the generation queue
    replica: int  # 0 .. group size - 1
    task: Task
    outcome: Outcome
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence with per-token training signals, ready to be merged.

    Raises ValueError where shapes disagree or the first token is trained.
    """

    tokens: np.ndarray  # i32[T]
    mask: np.ndarray  # bool[T], True where the token is trained; never at 0
    old_logp: np.ndarray  # f32[T], the sampler's, 0 off the mask
    advantage: np.ndarray  # f32[T], 0 off the mask
    temperature: float = 1.0  # of the sampler; old_logp is under it
    # i64[T], a key of all else that a token brings into the model: its adapter, the features
    # of its image, an offset of its position. None: 0 everywhere.
    inputs: np.ndarray | None = None
    # int[T, layers, k], experts to replay, `NO_ROUTE` where the router is to choose. None: there
    # everywhere.
    routes: np.ndarray | None = None
    # Of each token; those that are trained are not LOST. None: softmax(logits / temperature).
    support: Support | None = None
    group: int = 0  # whose episode it is of
    episode: int = 0  # number within the group

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0:
            raise ValueError("a sample without tokens")
        for name in ("mask", "old_logp", "advantage", "inputs", "routes"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries, tokens {n}")
        if self.support is not None:
            if len(self.support.kind) != n:
                raise ValueError(f"support has {len(self.support.kind)} entries, tokens {n}")
            if np.any(self.support.kind[self.mask.astype(bool)] == LOST):
                raise ValueError("a token whose support is lost cannot be trained")
        if self.mask[0]:
            raise ValueError("the first token of a sample has no context and cannot be trained")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTree:
    """A forest of prefix trees in depth-first order, padded to bucketed sizes.

    Query i sees key j iff ``j <= i < exit[j]``. Padding tokens see themselves
    alone; padding occurrences have weight 0 and point at edge 0.
    """

    tokens: np.ndarray  # i32[N]
    depth: np.ndarray  # i32[N], position in its sequence, from 0
    parent: np.ndarray  # i32[N], index of the parent; a root is its own
    exit: np.ndarray  # i32[N], index past the subtree
    edge_token: np.ndarray  # i32[E], child token of each loss-bearing edge (never a root)
    edge_temperature: np.ndarray  # f32[E], sampling temperature of the edge, > 0
    edge_support: Support | None  # [E], OPEN without ids at padding; None: of no edge
    occurrence_edge: np.ndarray  # i32[M]
    occurrence_sample: np.ndarray  # i32[M], index into the samples merged; 0 at padding
    old_logp: np.ndarray  # f32[M]
    advantage: np.ndarray  # f32[M]
    weight: np.ndarray  # f32[M], or f64 in such a step, > 0 at a trained occurrence, 0 at padding
    occurrence_index: np.ndarray  # i64[M], place in the concatenated samples; -1 at padding
    multiplicity: np.ndarray  # f32[N], samples that pass through a token; 0 at padding
    routes: np.ndarray | None  # int[N, layers, k], as in `Sample`; `NO_ROUTE` at padding
    n_tokens: int  # real sizes, before padding
    n_edges: int
    n_occurrences: int
    # f32[M] each, 0 at padding: what else a loss compares occurrences with, see `rl.anchors`.
    others: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class CarriedTree:
    """One tree beyond the budget, trained block by block of its depth-first order.

    A block ends where the next one starts. Its queries read the keys of its own tokens and,
    carried over, of their ancestors in earlier blocks.
    """

    tree: PackedTree  # whole and unpadded
    start: np.ndarray  # i64[B], first token of each block
    sizes: np.ndarray  # i64[B], its padded tokens


MicroBatch = PackedTree | CarriedTree
