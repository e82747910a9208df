"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes models write."""

from forge_jax.gateway.parsers.blocks import Before, Block, Start, tag_start
from forge_jax.gateway.parsers.protocol import DECODER, call_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """Blocks of one call each. A closing tag may be missing at the end of the reply."""

    def start(self, text: str, before: Before, last: bool) -> Start:
        return tag_start(text, OPEN, last)

    def read(self, text: str, last: bool) -> Block | None:
        if not last and CLOSE not in text:
            return None
        begin = len(text[len(OPEN) :]) - len(text[len(OPEN) :].lstrip()) + len(OPEN)
        try:
            value, end = DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            # Unless there is no more, the tag seen is part of a string that goes on.
            return _text(text) if last else None
        behind = text[end:].lstrip()
        if not last and CLOSE.startswith(behind) and behind != CLOSE:
            return None  # the call's own tag has begun
        closed = behind.startswith(CLOSE) or (last and CLOSE.startswith(behind))
        call = None
        if closed and isinstance(value, dict):
            call = call_of(value.get("name"), value.get("arguments", {}))
        if call is None:
            return _text(text)
        return Block(len(text) - len(behind[len(CLOSE) :]), (call,))


def _text(text: str) -> Block:
    """A malformed call up to its closing tag."""
    end = text.find(CLOSE)
    return Block(len(text) if end < 0 else end + len(CLOSE), malformed=True)
