"""Which tokens a grammar lets come next.

Grammars and the tokens of completions flow in; sets of tokens flow out, as bits. Everything
follows from the tokens alone, so it does not matter who sampled them, or in how many calls.
Invariant: a completion that a stop id has ended is a text of its grammar.
"""

import asyncio
import functools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from forge_jax.drawing import CHOICE, JSON_SCHEMA, REGEX, Grammar
from forge_jax.models.tokenizer import REPLACEMENT, Tokenizer
from forge_jax.types import Refused

# Between the parts of a JSON text: one space, or a new line and its indentation. Without a bound
# a model that has lost its way may write white space for ever.
WHITESPACE = r"( |\n[ \t]{0,16})"
LIMITS = LLParserLimits(verbose_errors=False)
NO_TOKEN = "the vocabulary has no token for what must come"
SHOWN = 500  # characters of an error of the compiler that a client is told


class Grammars:
    """Compiles grammars for one vocabulary; the last ones are kept. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]):
        """`vocab` is the model's, which may have more ids than the tokenizer."""
        self._tokenizer, self._vocab = tokenizer, vocab
        self._stop_ids = tuple(index for index in stop_ids if index < vocab)
        self._lock = threading.Lock()
        # Of its own: compiling takes turns, and others need the threads of the event loop.
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiled = functools.lru_cache(maxsize=256)(self._compile)

    def open(self) -> None:
        """Reads the vocabulary, which takes seconds where it is large, before a request has to."""
        if self._stop_ids:
            with self._lock:
                _ = self._vocabulary

    async def matched(self, grammar: Grammar) -> "Matcher":
        """`matcher`, which takes a while where `grammar` is new."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.matcher, grammar)

    def matcher(self, grammar: Grammar) -> "Matcher":
        """At the beginning of a completion. Raises Refused(400) where `grammar` is none."""
        with self._lock:
            inner = self._compiled(grammar).deep_copy()
        return Matcher(grammar, inner, self._vocab, self._stop_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._stop_ids:
            raise _refused(grammar, "the model has no stop id to end a text with")
        try:
            text = self._whole(grammar)
        except Exception as error:  # of a converter, which raises what it likes
            raise _refused(grammar, str(error)) from error
        made = LLMatcher(self._vocabulary, text, log_level=0, limits=LIMITS)
        if made.is_error():
            raise _refused(grammar, made.get_error())
        return made

    def _whole(self, grammar: Grammar) -> str:
        """A grammar as llguidance reads it, behind a thought if one may come. Raises where that
        cannot be."""
        written = _written(grammar)
        if grammar.thought is None:
            return written
        begin, end = map(self._tag, grammar.thought)
        rules = [
            "start: thought @answer"
            if grammar.thought[0] == ""
            else f"start: ({begin} thought)? @answer",
            "thought: thinking SPACE",
            # A control token is no text: no text goes on behind it that may end a thought too.
            f"thinking: TEXT {end}" if end.startswith("<") else f"thinking[lazy]: TEXT {end}",
            "TEXT: /(.|\\n)*/",
            "SPACE: /\\n{0,2}/",
        ]
        answer = {"lark_grammar": written}
        if written.startswith("{"):  # as the compiler writes schemas and expressions
            (answer,) = json.loads(written)["grammars"]
        outer = {"name": "reply", "lark_grammar": "\n".join(rules)}
        return json.dumps({"grammars": [outer, {**answer, "name": "answer"}]})

    def _tag(self, text: str) -> str:
        """A tag as rules quote it."""
        index = self._tokenizer.special_id(text)
        return f"<[{index}]>" if index in self._tokenizer.control_ids else json.dumps(text)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab, self._stop_ids))
        return LLTokenizer(wrapped, eos_token=[*self._stop_ids])


class Matcher:
    """Where a completion stands in its grammar."""

    def __init__(self, grammar: Grammar, inner: LLMatcher, vocab: int, stop_ids: Sequence[int]):
        self._grammar, self._inner = grammar, inner
        self._read = 0  # tokens of the completion
        self._stops = np.zeros(-(-vocab // 32), np.uint32)
        for index in stop_ids:
            self._stops[index // 32] |= np.uint32(1 << index % 32)
        self.forced: list[int] = []  # the only tokens that can come, one after another
        self.allowed = np.zeros_like(self._stops)  # bits of those that can come behind `forced`

    @property
    def steps(self) -> int:
        """Tokens that can be sampled without knowing what they are."""
        return len(self.forced) + 1

    def advance(self, output: np.ndarray, most: int) -> Refused | None:
        """Reads the tokens of a completion so far, and looks at most `most` tokens ahead.

        Returns what is wrong where nothing can come, as in a grammar that is too complex or that
        asks for bytes no token has.
        """
        inner = self._inner
        inner.consume_tokens(output[self._read :].tolist())
        self._read = len(output)
        self.forced = inner.compute_ff_tokens()[: most - 1]
        inner.consume_tokens(self.forced)
        inner.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        if not inner.is_accepting():
            self.allowed &= ~self._stops
        inner.rollback(len(self.forced))
        if inner.is_error():
            error = inner.get_error().removesuffix("<non-verbose/>").strip()
            return _refused(self._grammar, NO_TOKEN if error == "NoExtensionBias" else error)
        if not self.allowed.any():
            return _refused(self._grammar, NO_TOKEN)
        return None


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]):
        self._tokenizer = tokenizer
        count = min(tokenizer.vocab_size, vocab)
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        special = {*tokenizer.control_ids, *stop_ids}
        self.special_token_ids = [index for index in range(count) if index in special]
        # A stop id ends the text, even where its own bytes could be part of it.
        self.tokens = [
            b"<|%d|>" % index if index in special else self._bytes(index) for index in range(count)
        ]
        self.tokens += [b""] * (vocab - count)
        self._ids = {raw: i for i, raw in enumerate(self.tokens) if raw and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def _bytes(self, index: int) -> bytes:
        raw = self._tokenizer.piece(index, False)
        return b"" if raw == REPLACEMENT else raw

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a forced text: the tokenizer's, unless it adds to the text or reads it as
        something else, as it does with a space before the first word or with control tokens."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"))
        exact = all(index < len(self.tokens) for index in ids)
        if exact and b"".join(self.tokens[index] for index in ids) == text:
            return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest tokens, from left to right, as far as there are any."""
        ids: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((n for n in sizes if text[:n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


def _refused(grammar: Grammar, why: str) -> Refused:
    return Refused(400, f"{grammar.source}: {why.strip()[:SHOWN]}", param=grammar.source)


def _written(grammar: Grammar) -> str:
    """A grammar as llguidance reads it. Raises where that cannot be."""
    text = grammar.text
    if grammar.kind == JSON_SCHEMA:
        defaults: Any = {"whitespace_pattern": WHITESPACE}
        return LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    if grammar.kind == REGEX:
        return LLMatcher.grammar_from_regex(regex_to_lark(text, "d"))
    if grammar.kind == CHOICE:
        text = "start: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    elif "::=" in text:
        text = gbnf_to_lark(text)
    return LLMatcher.grammar_from_lark(text)
