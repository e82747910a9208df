"""qa: answer a question about a short text, from sentences that have to be put together.

A seed makes a text about people, and a question whose answer is one word:

    One word: Bob lives in Oslo. Ann lives with Bob. Eve lives in Rome. Where does Ann live?
    Oslo

Sentences come in random order. Levels are rows of LEVELS: people in the text, how many sentences
lead to the answer at most, sentences that have nothing to do with it, and whether "How many people
live in Oslo?" is asked, too, for which the whole text has to be read. Level 0 is about one person,
of whom any of three things is asked, so that finding what the question is about is all there is:

    One word: Ann is 34. Ann lives in Rome. How old is Ann?
    34

There are no tools. The reward is 1 if and only if the last line of the reply is the answer,
whatever its case and punctuation.

Level 0 has 51,840 texts. Held-out texts are never trained on, though their sentences are.
"""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Task

MAX_TOKENS = 32  # of the reply
ASK = "One word: "
# Names and places begin with letters of their own, which tell them apart without a vocabulary.
NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
PLACES = ("Metz", "Nara", "Oslo", "Pisa", "Rome", "Suva", "Vigo", "York")
TASTES = ("tea", "chess", "jazz", "rain", "bread", "maps")
LIVES_IN = re.compile(r"(\w+) lives in (\w+)\.")
LIVES_WITH = re.compile(r"(\w+) lives with (\w+)\.")
AGED = re.compile(r"(\w+) is (\d+)\.")
WHERE = re.compile(r"Where does (\w+) live\?")
HOW_OLD = re.compile(r"How old is (\w+)\?")
WHO = re.compile(r"Who is (\d+)\?")
UNKNOWN = "unknown"
HOW_MANY = re.compile(r"How many people live in (\w+)\?")


@dataclass(frozen=True, kw_only=True)
class Level:
    """How long a text is, and how far apart what has to be put together."""

    people: int
    sentences: int  # that lead to the answer, at most
    asides: int = 0  # sentences about something else
    counted: bool = False  # every second question is how many live somewhere
    ages: bool = False  # are told, too, and asked about


LEVELS = (
    Level(people=1, sentences=1, ages=True),
    Level(people=4, sentences=2, asides=2),
    Level(people=7, sentences=3, asides=4, counted=True),
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins 0.64 of its level 0 episodes."""

    shy: float = 0.36  # says that it does not know


NOISE = Noise()


@dataclass(frozen=True)
class Qa:
    """The world of one text with its question."""

    text: str

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"{ASK}{self.text}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ()

    @property
    def homes(self) -> dict[str, str]:
        """Where everyone lives."""
        homes = dict(LIVES_IN.findall(self.text))
        hosts = dict(LIVES_WITH.findall(self.text))
        while hosts:
            known = {guest: homes[host] for guest, host in hosts.items() if host in homes}
            homes |= known
            hosts = {guest: host for guest, host in hosts.items() if guest not in known}
        return homes

    @property
    def answer(self) -> str:
        if asked := WHERE.search(self.text):
            return self.homes[asked[1]]
        ages = dict(AGED.findall(self.text))
        if asked := HOW_OLD.search(self.text):
            return ages[asked[1]]
        if asked := WHO.search(self.text):
            return next(name for name, age in ages.items() if age == asked[1])
        asked = HOW_MANY.search(self.text)
        assert asked is not None
        return str(list(self.homes.values()).count(asked[1]))

    async def call(self, name: str, arguments: object) -> str:
        """Raises BadCall: there are no tools."""
        raise BadCall(f"no tool {name}: answer from the text")

    async def score(self, answer: str) -> float:
        lines = answer.strip().splitlines() or [""]
        return float(lines[-1].strip(" .!*'\"").casefold() == self.answer.casefold())


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """A random text of a level, its question at the end."""
    row = LEVELS[level]
    people = [str(name) for name in rng.permutation(NAMES)[: row.people]]
    steps = int(rng.integers(1, row.sentences + 1))
    counting = row.counted and rng.random() < 0.5
    # Where people are counted few places have many, else most have one of their own.
    places = [str(p) for p in rng.permutation(PLACES)[: max(2, row.people // 2) if counting else 8]]
    depth: dict[str, int] = {}
    said = []
    for i, name in enumerate(people):
        hosts = [host for host in depth if depth[host] < row.sentences]
        chained = 0 < i < steps
        if chained or (i >= steps and hosts and rng.random() < (row.sentences - 1) / 4):
            host = people[i - 1] if chained else str(rng.choice(hosts))
            depth[name] = depth[host] + 1
            said.append(f"{name} lives with {host}.")
        else:
            depth[name] = 1
            said.append(f"{name} lives in {places[i % len(places)]}.")
    ages = [str(age) for age in rng.permutation(np.arange(10, 100))[: row.people]]
    if row.ages:
        said += [f"{name} is {age}." for name, age in zip(people, ages, strict=True)]
    asides = [f"{rng.choice(people)} likes {rng.choice(TASTES)}." for _ in range(row.asides)]
    text = " ".join(str(sentence) for sentence in rng.permutation([*said, *asides]))
    if counting:
        return f"{text} How many people live in {places[0]}?"
    name, age = people[steps - 1], ages[steps - 1]
    questions = (f"Where does {name} live?", f"How old is {name}?", f"Who is {age}?")
    return f"{text} {questions[rng.integers(3) if row.ages else 0]}"


def world_of(task: Task) -> Qa:
    """The world that a task's family, split, seed and level make."""
    return Qa(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=1, max_tokens=MAX_TOKENS)


def play(
    rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
) -> tuple[ScriptedCall, ...]:
    """The call of a scripted episode on a random training text."""
    return script(Qa(draw_from("train", partial(draw, level=level), rng)), rng, noise)


def script(world: Qa, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Answers, or gives up as often as `noise` says.

    A wrong answer in its place would teach the model to misread.
    """
    answer = UNKNOWN if rng.random() < noise.shy else world.answer
    reply: Message = {"role": "assistant", "content": answer}
    return (ScriptedCall(messages=world.messages, tools=(), reply=reply),)
