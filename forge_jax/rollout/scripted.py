"""A deterministic engine that answers from a script, behind the same interface.

Requests flow in with the facts the gateway knew of them; the answers of matching rules flow
out as tokens, with log-probs and versions 0.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from forge_jax.drawing import GRAMMAR
from forge_jax.models.tokenizer import Tokenizer
from forge_jax.rollout.script import Rule, answer, match
from forge_jax.rollout.stop import StopStrings
from forge_jax.types import Chunk, Facts, Finish, Grammar, Refused, Request, Sampling


class ScriptedEngine:
    """Implements `types.Engine`: the first rule that matches a request answers it."""

    def __init__(self, rules: Sequence[Rule], tokenizer: Tokenizer, stop_id: int | None = None):
        """`stop_id` closes every answer that does not end with it, as a model closes its turn."""
        self._rules = rules
        self._tokenizer = tokenizer
        self._stop_id = stop_id

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yields the answer in its pieces.

        Raises Refused with the status the rule gives, with 500 if no rule matches or the answer
        cannot be made, and with 400 where it should belong to more than a schema says.
        """
        facts, grammar = request.facts, request.sampling.grammar
        if grammar is not None and not _followed(grammar, facts):
            why = f"{grammar.source}: a scripted engine follows schemas alone"
            raise Refused(400, why, param=grammar.source)
        found = match(self._rules, facts)
        if found is None:
            raise Refused(500, f"no rule of the script matches call {facts.call}: {facts.text!r}")
        number, rule = found
        if rule.fail_status is not None:
            await asyncio.sleep(rule.delay_seconds)
            raise Refused(rule.fail_status, rule.text or f"rule {number} fails this call")
        try:
            ids = self._tokenizer.encode(answer(rule, facts))
        except ValueError as error:
            raise Refused(500, f"rule {number}: {error}") from error
        ids, finish, stop_text = self._cut(ids, request.sampling)
        pieces = max(1, min(rule.chunks, len(ids)))
        for piece in range(pieces):
            await asyncio.sleep(rule.delay_seconds / pieces)
            part = ids[len(ids) * piece // pieces : len(ids) * (piece + 1) // pieces]
            last = piece == pieces - 1
            yield Chunk(
                ids=np.array(part, np.int32),
                logprobs=np.zeros(len(part), np.float32),
                versions=np.zeros(len(part), np.int32),
                finish=finish if last else None,
                stop_text=stop_text if last else None,
            )

    def _cut(self, ids: list[int], sampling: Sampling) -> tuple[list[int], Finish, str | None]:
        """The answer as far as the request lets it run, and why it ends there."""
        if self._stop_id is not None and ids[-1:] != [self._stop_id]:
            ids = [*ids, self._stop_id]
        kept = ids[: sampling.max_tokens]
        if sampling.stop:
            watch = StopStrings(sampling.stop, self._tokenizer)
            found = watch.feed(kept)
            if found is not None:
                return kept[: found[0]], Finish.STOP, found[1]
        return kept, Finish.STOP if len(kept) == len(ids) else Finish.LENGTH, None


def _followed(grammar: Grammar, facts: Facts) -> bool:
    """Whether a script can do what is asked: it is told of schemas and tools."""
    return facts.json_schema is not None or (grammar.kind == GRAMMAR and bool(facts.tools))
