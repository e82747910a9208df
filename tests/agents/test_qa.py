"""qa: the answer follows from the text, is one place or number, and nothing else pays."""

import asyncio
import re

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.tasks import qa

TEXT = "Bob lives in Oslo. Ann lives with Bob. Eve lives in Lima. Ann likes tea."


def score(world: qa.Qa, answer: str) -> float:
    return asyncio.run(world.score(answer))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Where does Ann live?", "Oslo"),
        ("Where does Eve live?", "Lima"),
        ("How many people live in Oslo?", "2"),
        ("How many people live in Rome?", "0"),
        ("Ida is 34. How old is Ida?", "34"),
        ("Ida is 34. Leo is 43. Who is 43?", "Leo"),
    ],
)
def test_answers_are_what_a_reader_finds(question: str, answer: str) -> None:
    assert qa.Qa(f"{TEXT} {question}").answer == answer


def test_only_the_answer_pays_on_the_last_line() -> None:
    world = qa.Qa(f"{TEXT} Where does Ann live?")
    for right in ("Oslo", "oslo.", " Oslo \n", "**Oslo**", "Ann lives with Bob.\nOslo"):
        assert score(world, right) == 1
    for wrong in ("", "Lima", "Oslo, Lima", "Oslo\nLima", "Ann lives in Oslo", "Oslo Lima Rome"):
        assert score(world, wrong) == 0


@pytest.mark.parametrize("level", range(len(qa.LEVELS)))
def test_levels_are_as_long_and_as_deep_as_they_say(level: int) -> None:
    rng, row, steps, kinds = np.random.default_rng(level), qa.LEVELS[level], set(), set()
    for _ in range(120):
        text = qa.draw(rng, level)
        world = qa.Qa(text)
        assert len(world.homes) == row.people
        ages = dict(qa.AGED.findall(text))
        assert len(ages) == (row.people if row.ages else 0)
        assert text.count(".") == row.people + len(ages) + row.asides
        found_there = {*world.homes, *world.homes.values(), *ages.values()}
        assert world.answer in found_there | set(map(str, range(1, row.people + 1)))
        kinds.add(text.rpartition(". ")[2].split()[0])
        if asked := qa.WHERE.search(text):
            hosts, name, found = dict(qa.LIVES_WITH.findall(text)), asked[1], 1
            while name in hosts:
                name, found = hosts[name], found + 1
            steps.add(found)
    assert steps == set(range(1, row.sentences + 1))
    assert kinds == {"Where"} | ({"How"} if row.counted else set()) | (
        {"How", "Who"} if row.ages else set()
    )


def test_the_place_of_a_sentence_does_not_tell_the_answer() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(600):
        world = qa.Qa(qa.draw(rng))
        if world.answer in world.homes.values():
            found.append(re.findall(r"(\w+)\.", world.text).index(world.answer))
    shares = np.bincount(found) / len(found)
    assert len(shares) == 2
    assert shares.min() > 0.4


def test_there_are_no_tools() -> None:
    world = qa.Qa(f"{TEXT} Where does Ann live?")
    with pytest.raises(BadCall):
        asyncio.run(world.call("search", {"query": "Ann"}))
