"""A completion that an engine elsewhere makes, as far as it has come.

What the engine tells flows in, chunks flow out. Invariant: a completion ends at its first stop
string, whatever the engine has sampled behind that, and has at most its limit of tokens.
"""

from dataclasses import dataclass, field

import numpy as np

from forge_jax.rollout.external.dialect import Piece, support_of
from forge_jax.rollout.stop import StopStrings
from forge_jax.types import Chunk, Finish, Request

ENDS = (Finish.STOP, Finish.LENGTH)  # that an engine comes to by itself


@dataclass(eq=False)
class Running:
    """Its request, and what it has."""

    request: Request
    stop: StopStrings | None
    limit: int  # tokens it may have
    output: list[int] = field(default_factory=list)  # tokens it has
    stretch: int = 0  # updates of the weights that it was asked for anew after

    @property
    def left(self) -> int:
        """Tokens it may still have."""
        return self.limit - len(self.output)

    def chunk(self, piece: Piece, version: int) -> Chunk:
        """Takes in what the weights of `version` sampled."""
        sampling, first = self.request.sampling, not self.output
        count, finish, text = len(piece.ids), piece.finish, None
        if self.stop is not None:
            found = self.stop.feed(piece.ids.tolist())
            if found is not None:
                count, text = found
            elif finish in ENDS:
                text = self.stop.flush()
            finish = Finish.STOP if text is not None else finish
        self.output += piece.ids[:count].tolist()
        greedy = sampling.temperature == 0
        return Chunk(
            ids=piece.ids[:count],
            logprobs=np.zeros(count, np.float32) if greedy else piece.logprobs[:count],
            versions=np.full(count, version, np.int32),
            finish=None if finish is Finish.ABORT else finish,
            stop_text=text,
            cached_tokens=piece.cached_tokens if first else 0,
            top_ids=None if piece.top_ids is None else piece.top_ids[:count],
            top_logprobs=None if piece.top_logprobs is None else piece.top_logprobs[:count],
            support=support_of(sampling, count),
        )

    def ending(self) -> Chunk:
        """The end of a completion that was cut short and is not gone on with."""
        none, top = np.zeros(0, np.float32), self.request.sampling.top_logprobs
        return Chunk(
            ids=np.zeros(0, np.int32),
            logprobs=none,
            versions=np.zeros(0, np.int32),
            finish=Finish.ABORT if self.left else Finish.LENGTH,
            top_ids=np.zeros((0, top), np.int32) if top else None,
            top_logprobs=np.zeros((0, top), np.float32) if top else None,
        )
