"""wiki: the answer follows from the pages, which do not all fit; nothing else pays."""

import asyncio
import itertools
import json

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.split import draw_from, held_out
from forge_jax.agents.tasks import wiki
from forge_jax.config import ContextConfig
from forge_jax.models.chat import built_in

PERFECT = wiki.Noise(shy=0.0)
LOOKUP = built_in("lookup")
PAGES = {
    "Ann": "Ann, baker. mate Bob. boss Eve. town Rome.",
    "Bob": "Bob, judge. Once baker. mate Ann. boss Ann. town Oslo.",
}


def world(question: str = "the baker's Mate's Town?") -> wiki.Wiki:
    return wiki.Wiki(json.dumps({"pages": PAGES, "question": question}))


def drawn(level: int, count: int) -> list[wiki.Wiki]:
    rng = np.random.default_rng(level)
    return [wiki.Wiki(wiki.draw(rng, level)) for _ in range(count)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("the baker's Mate's Town?", "Oslo"),
        ("the judge's Boss's Mate's Boss?", "Ann"),
        ("Bob's Town?", "Oslo"),
        ("the baker's Boss's Town?", ""),  # has no page
        ("the pilot's Town?", ""),
    ],
)
def test_answers_are_what_a_reader_finds(question: str, answer: str) -> None:
    assert world(question).answer == answer


def test_only_the_word_pays_on_the_last_line() -> None:
    for right in ("Oslo", "oslo.", "He lives there:\nOslo\n"):
        assert asyncio.run(world().score(right)) == 1
    for wrong in ("", "Rome", "Oslo Rome", "Oslo\nRome", "Bob"):
        assert asyncio.run(world().score(wrong)) == 0


def test_tools_find_words_and_pages() -> None:
    assert world().use("search", {"word": "baker"}) == "Ann Bob"
    assert world().use("search", {"word": "bak"}) == wiki.NOTHING
    assert world().use("open", {"page": " Bob"}) == PAGES["Bob"]
    assert world().use("open", {"page": "Eve"}) == wiki.NOTHING
    for name, arguments in (("find", {"word": "x"}), ("open", {}), ("search", {"word": 3})):
        with pytest.raises(BadCall, match="open"):
            asyncio.run(world().call(name, arguments))


@pytest.mark.parametrize("level", range(len(wiki.LEVELS)))
def test_questions_lead_over_as_many_pages_as_they_say(level: int) -> None:
    row = wiki.LEVELS[level]
    for one in drawn(level, 40):
        known, relations = wiki.asked(one.question)
        assert (len(one.pages), len(relations)) == (row.pages, row.steps + 1)
        owners = [name for name, page in one.pages.items() if f", {known}." in page]
        assert len(owners) == 1
        visited = [owners[0]]
        for name in relations[:-1]:
            visited.append(wiki.relation(one.pages[visited[-1]], name) or "")
        assert len(set(visited)) == row.steps + 1
        assert one.answer in itertools.chain(*wiki.WORDS.values())
        assert len(one.use("search", {"word": known}).split()) == 1 + row.once
        for page in one.pages.values():  # nobody is there twice
            others = [wiki.relation(page, name) for name in wiki.PEOPLE]
            told = [other for other in others if other is not None]
            assert len(told) == len(set(told)) == row.people


@pytest.mark.parametrize("level", range(len(wiki.LEVELS)))
def test_pages_do_not_fit_unless_they_are_folded(level: int) -> None:
    """At level 0 those of the settings: `configs/task/wiki.yaml` gives it 144 tokens."""

    def longest(calls) -> int:
        return max(len(LOOKUP.render(call.messages, call.tools)) for call in calls)

    folded, whole = [], []
    for one in drawn(level, 40):
        calls = wiki.script(one, np.random.default_rng(0), PERFECT)
        assert calls[-1].reply["content"] == one.answer
        folded.append(longest(calls))
        whole.append(longest(wiki.script(one, np.random.default_rng(0), PERFECT, ContextConfig())))
    assert max(folded) < min(whole)
    if level == 0:
        assert max(folded) + wiki.MAX_TOKENS < 144 < min(whole)


@pytest.mark.parametrize("operation", ["summarise", "note"])
@pytest.mark.parametrize("policy", ["tool", "fixed"])
def test_the_script_wins_however_its_context_is_managed(policy: str, operation: str) -> None:
    context = ContextConfig(
        policy=policy,
        operation=operation,
        every=2 if policy == "fixed" else None,
        keep=2 if operation == "note" else None,
    )
    for one in drawn(1, 10):
        calls = wiki.script(one, np.random.default_rng(0), PERFECT, context)
        assert calls[-1].reply["content"] == one.answer


def test_wikis_of_training_are_not_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def kept(split, draw, rng) -> str:
        seen.append(draw_from(split, draw, rng))
        return seen[-1]

    monkeypatch.setattr(wiki, "draw_from", kept)
    for seed in range(20):
        wiki.play(np.random.default_rng(seed))
    assert not any(map(held_out, seen))
    rng = np.random.default_rng(0)
    assert all(held_out(draw_from("eval", wiki.draw, rng)) for _ in range(5))
