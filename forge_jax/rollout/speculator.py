"""The host's part of speculation: how deep to draft, what was said before, what came of drafts.

Plans ask it, results are told to it. Invariant: it changes how fast tokens come, never which.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.depth import DepthController
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.ngram import NOTHING, Memory
from forge_jax.rollout.packets import GOES_ON, IDLE, STATUS, DecodeShape
from forge_jax.rollout.plans import Results
from forge_jax.rollout.rows import rows_for


class Speculator:
    """Owns the choice of a depth, and the completions that drafts are looked up in."""

    def __init__(self, cfg: RolloutConfig):
        self._cfg = cfg
        self._depths = DepthController(sorted({0, *cfg.depths}))
        self._said = Memory(cfg.context)
        self._ended = 0.0  # when the last round was read
        self.counts: Counter[str] = Counter()
        self._seconds = {"decode_seconds": 0.0, "decode_seconds_undrafted": 0.0}

    def depth(self, stays: Sequence[Stay]) -> int:
        """Drafts before each step of the next decode call, of `stays`: none where logits are
        changed (see `planning`), always as many where results are to repeat to the bit, which a
        choice by the clock would not."""
        if self._cfg.speculate == "off":
            return 0
        chosen = 0
        if not any(stay.job.sampling.shaped for stay in stays):
            rows = rows_for((stay.slot for stay in stays), self._cfg)
            chosen = self._cfg.drafts
            if not self._cfg.deterministic:
                followed = sum(stay.followed for stay in stays) / len(stays)
                chosen = self._depths.choose(rows, followed)
        if self._cfg.speculate == "mtp" and not chosen:
            for stay in stays:  # modules do not read what is sampled now
                stay.followed = False
        return chosen

    def said(self, job: Job) -> np.ndarray | None:
        """What drafts of a job are looked up in, see `packets.Fresh`."""
        if self._cfg.speculate != "ngram":
            return None
        own = np.full(self._cfg.context, NOTHING, np.int32)
        own[: job.length] = job.tokens[: job.length]
        return np.concatenate([self._said.recall(job.tokens[: job.prompt]), own])

    def ended(self, job: Job) -> None:
        """A job's completion is over."""
        if self._cfg.speculate == "ngram":
            self._said.remember(job.tokens[: job.prompt], job.tokens[job.prompt : job.length])

    def read(self, results: Results) -> None:
        """Takes in what a round came to."""
        since, self._ended = max(results.began, self._ended), results.ended
        decode, block = results.plan.decode, results.block
        if decode is None or block is None or self._cfg.speculate == "off":
            self._depths.apart()
            return
        shape, status = decode.shape, block.packet[..., STATUS]
        self.counts[f"calls_of_{shape.drafts}"] += 1
        if not results.plan.prefills and not shape.shaped:
            self._depths.time(shape.rows, shape.drafts, (results.ended - since) / shape.steps)
            self._compare(shape, status, results.ended - since)
        else:
            self._depths.apart()
        rows = [i for i, s in enumerate(decode.owners) if s is not None and s.followed]
        if shape.drafts and rows:
            self._judge(status[:, :, rows])

    def stats(self) -> dict[str, float]:
        """Totals, and what they say of the drafter: of the i-th drafts how many were checked and
        how many accepted; calls by depth; seconds of calls without a prefill, and what calls of
        depth 0 would have taken for the same tokens."""
        shares = enumerate(self._depths.acceptance(), 1) if self._cfg.speculate != "off" else ()
        gains = self._depths.speedups().items()
        verifies = self.counts["verifies"]
        return {
            "drafts": verifies,
            "draft_tokens": self.counts["tried"],
            "accepted_tokens": self.counts["accepted"],
            "tokens_per_verify": 1 + self.counts["accepted"] / verifies if verifies else 1.0,
            **{name: n for name, n in self.counts.items() if name[-1].isdigit()},
            **self._seconds,
            **{f"acceptance_{place}": share for place, share in shares},
            **{f"speedup_{rows}": gain for rows, gain in gains},
        }

    def _judge(self, status: np.ndarray) -> None:
        """`status` is i32[K, γ + 1, B] of rows whose drafts mean something. A draft is tried where
        the token before it goes on, and accepted where there is one after it."""
        tried = np.zeros(max(self._cfg.depths), int)
        accepted = tried.copy()
        drafts = status.shape[1] - 1
        tried[:drafts] = (status[:, :-1] == GOES_ON).sum(axis=(0, 2))
        accepted[:drafts] = (status[:, 1:] != IDLE).sum(axis=(0, 2))
        self._depths.observe(tried.tolist(), accepted.tolist())
        self.counts["verifies"] += int((status[:, 0] != IDLE).sum())
        self.counts["tried"] += int(tried.sum())
        self.counts["accepted"] += int(accepted.sum())
        for place in range(drafts):
            self.counts[f"draft_tokens_{place + 1}"] += int(tried[place])
            self.counts[f"accepted_tokens_{place + 1}"] += int(accepted[place])

    def _compare(self, shape: DecodeShape, status: np.ndarray, seconds: float) -> None:
        """Takes in how long a call took, and how long its tokens take at depth 0."""
        cost = self._depths.cost(shape.rows, shape.drafts)
        verifies = (status[:, 0] != IDLE).sum()
        if cost is not None and verifies:
            tokens = float((status != IDLE).sum() / verifies)
            self._seconds["decode_seconds"] += seconds
            self._seconds["decode_seconds_undrafted"] += seconds / cost * tokens
