"""hop_spoken: only the digit is worth anything; what the script does wrong is what is measured."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import ScriptedCall
from forge_jax.agents.tasks import hop_spoken
from forge_jax.gateway.messages import ToolCall
from forge_jax.gateway.parsers.lookup import LookupParser
from forge_jax.gateway.refusals import refused
from forge_jax.models.chat import built_in
from forge_jax.rl.process import mixing
from forge_jax.types import Task

FAULTLESS = hop_spoken.Noise(early=0.0, wrong=0.0, foreign=0.0, bad=0.0)
WORLD = hop_spoken.SpokenHop("ilb3")


def measured(call: ScriptedCall) -> tuple[bool, bool]:
    """Whether the gateway finds a bad call in a reply, and whether its letters are mixed."""
    chat = built_in("lookup")
    text = chat.render([call.reply], call.tools, add_generation_prompt=False)
    parser = LookupParser(hop_spoken.TOOLS, "call")
    pieces = [*parser.feed(text.removesuffix("\n")), *parser.finish()]
    found = [piece for piece in pieces if isinstance(piece, ToolCall)]
    bad = parser.malformed + refused(found, hop_spoken.TOOLS) > 0
    assert len(text.encode()) <= hop_spoken.MAX_TOKENS
    return bad, mixing(text, ("LATIN",)) > 0


def rates(noise: hop_spoken.Noise) -> tuple[float, float]:
    plays = (hop_spoken.play(np.random.default_rng(seed), noise) for seed in range(60))
    bad, mixed = np.mean([measured(call) for call in itertools.chain(*plays)], axis=0)
    return float(bad), float(mixed)


def test_what_the_script_does_wrong_is_what_is_measured() -> None:
    assert rates(FAULTLESS) == (0, 0)
    assert rates(replace(FAULTLESS, foreign=1.0)) == (0, 1)
    bad, mixed = rates(replace(FAULTLESS, bad=0.4))
    assert (0.2 < bad < 0.4, mixed) == (True, 0)  # of calls and answers together
    bad, mixed = rates(hop_spoken.NOISE)
    assert 0.1 < bad < 0.25 < mixed < 0.4


def test_a_bad_call_is_told_and_changes_nothing() -> None:
    for name, arguments, said in [("ask", {"key": "i"}, "unknown"), ("get", {}, "no key")]:
        with pytest.raises(BadCall, match=said):
            asyncio.run(WORLD.call(name, arguments))
    for name, key, found in [("get", "i", "l"), ("back", "l", "i"), ("get", "3", "-")]:
        assert asyncio.run(WORLD.call(name, {"key": key})) == found


@pytest.mark.parametrize("words", ["", " so", " так", " so 3"])
def test_words_behind_the_digit_are_worth_nothing(words: str) -> None:
    assert asyncio.run(WORLD.score(f"!3{words}")) == 1
    for wrong in ("!4", "3", "!", "!i", "!33", "so !3", "!3так"):
        assert asyncio.run(WORLD.score(wrong + words)) == 0


def test_a_chain_is_that_of_its_task() -> None:
    tasks = [Task(family="hop_spoken", seed=seed) for seed in range(5)]
    first, again = ([hop_spoken.world_of(task).chain for task in tasks] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(tasks)
