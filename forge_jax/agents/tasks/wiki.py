"""wiki: answer a question over several pages of a small wiki, in less context than they take.

A seed makes people with a page each, and a question about one who is known by a job:

    One word: the nurse's Boss's Town?
    ?search nurse   =Ann   ?open Ann   =Ann, nurse. boss Eve. town Rome. pets owls.
    ?fold Eve       ?open Eve   =Eve, judge. ... town Oslo. ...   Oslo

With `fold` the model puts what it found in the place of the pages that it read for it, so that
the context holds the question, one name for each step, and the page at hand. The reward is 1 if
and only if the last line of the answer is the word asked for, whatever its case and punctuation.
Levels are rows of LEVELS: pages, steps, relations on a page, and others who once had the job, of
whom the search tells as well. Words of a kind are equally long and begin with letters of their
own, relations in the question with capitals that nothing else there has: so a small model that
reads bytes can tell by letters and places what is asked for.

Held-out wikis with their questions are never trained on, though their names and words are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.faults import BadCall
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.scripting import calling, led, saying
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.white_box import ToolLoop
from forge_jax.managing import WRITTEN, ContextConfig
from forge_jax.types import Task

MAX_TURNS = 24
MAX_TOKENS = 24  # of one reply
CONTEXT = ContextConfig(policy="tool", operation="fold")
NAMES = ("Ann", "Cal", "Dan", "Eve", "Gus", "Ida", "Jon", "Kim", "Leo", "Ned", "Ray", "Sue")
JOBS = ("baker", "judge", "nurse", "actor", "miner", "pilot", "smith", "guide", "clerk", "diver")
PEOPLE = ("boss", "heir", "mate")  # relations to others
WORDS: Mapping[str, tuple[str, ...]] = {
    "town": ("Cork", "Graz", "Jena", "Lima", "Nara", "Oslo", "Rome", "Vigo"),
    "pets": ("cats", "dogs", "hens", "owls", "pigs", "rats"),
    "food": ("rice", "soup", "figs", "eggs", "nuts", "peas"),
}
QUESTION = re.compile(r"(?:the )?(\w+)((?:'s \w+)+)\?")
ASK = "One word: "
NOTHING = "nothing"
UNKNOWN = "unknown"


def tool(name: str, parameter: str, description: str) -> Tool:
    """One of the wiki, which takes a text."""
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    tool("search", "word", "Names of all pages that have a word."),
    tool("open", "page", "The page of a name."),
)
PARAMETERS = {
    one["function"]["name"]: one["function"]["parameters"]["required"][0] for one in TOOLS
}


@dataclass(frozen=True, kw_only=True)
class Level:
    """How large a wiki is, and how far apart what has to be put together."""

    pages: int
    steps: int  # from one to another before the word that is asked for
    people: int  # relations to others on a page
    words: int  # others on a page
    once: int = 0  # who had the job before


LEVELS = (
    Level(pages=4, steps=1, people=1, words=2),
    Level(pages=8, steps=2, people=3, words=2, once=1),
    Level(pages=12, steps=4, people=3, words=3, once=2),
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins 0.6 of its level 0 episodes."""

    shy: float = 0.4  # says that it does not know, at the end


NOISE = Noise()


@dataclass(frozen=True)
class Wiki:
    """The world of one content."""

    content: str  # JSON: pages by name, the question

    @cached_property
    def pages(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.content)["pages"]
        return found

    @property
    def question(self) -> str:
        return str(json.loads(self.content)["question"])

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"{ASK}{self.question}"},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return TOOLS

    @property
    def answer(self) -> str:
        """The word asked for."""
        return answered(self.question, self.pages)

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool gives. Raises BadCall unless it is one of them with a text."""
        text = arguments.get(PARAMETERS.get(name, ""))
        if not isinstance(text, str) or len(arguments) != 1:
            known = "search with a word or open with a page"
            raise BadCall(f"no tool {name} with {sorted(arguments)}; use {known}")
        if name == "open":
            return self.pages.get(text.strip(), NOTHING)
        having = [page for page in self.pages if text in re.findall(r"\w+", self.pages[page])]
        return " ".join(sorted(having)) or NOTHING

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall as `use`."""
        return self.use(name, arguments)

    async def score(self, answer: str) -> float:
        return float(is_word(answer, self.answer))


def is_word(answer: str, word: str) -> bool:
    """Whether the last line of an answer is the word, whatever its case and punctuation."""
    lines = answer.strip().splitlines() or [""]
    return lines[-1].strip(" .!*'\"").casefold() == word.casefold()


def asked(question: str) -> tuple[str, list[str]]:
    """Whom a question begins with, a job or a name, and the relations from there. Raises
    ValueError where it is no such question."""
    found = QUESTION.search(question)
    if found is None:
        raise ValueError(f"{question!r} asks for nothing")
    return found[1], found[2].lower().split("'s ")[1:]


def owned(known: str, relations: Sequence[str]) -> str:
    """The question for the last of some relations that begin with `known`."""
    return known + "".join(f"'s {name.capitalize()}" for name in relations) + "?"


def relation(page: str, name: str) -> str | None:
    """Who or what a page says that someone's friend, town, ... is."""
    found = re.search(rf"\. {name} (\w+)\.", page)
    return None if found is None else found[1]


def answered(question: str, pages: Mapping[str, str]) -> str:
    """The word that a question asks for; "" where the wiki does not say."""
    known, relations = asked(question)
    if known not in pages:
        begin = f", {known}."
        known = next((name for name, page in pages.items() if begin in page), "")
    for name in relations:
        known = relation(pages.get(known, ""), name) or ""
    return known


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """A random wiki of a level with its question, which leads to someone new at each step."""
    row = LEVELS[level]
    names = [str(name) for name in rng.permutation(NAMES)[: row.pages]]
    jobs = [str(job) for job in rng.permutation(JOBS)]
    people, words = PEOPLE[: row.people], list(WORDS)[: row.words]
    chain = [str(rng.choice(people)) for _ in range(row.steps)]
    before = [str(name) for name in rng.permutation(names[1:])[: row.once]]
    pages = {}
    for number, name in enumerate(names):
        others = [str(other) for other in rng.permutation([n for n in names if n != name])]
        found = dict(zip(people, others, strict=False))
        if number < row.steps:  # on the way that the question goes
            found = turned(found, chain[number], names[number + 1])
        found |= {word: str(rng.choice(WORDS[word])) for word in words}
        job = jobs[number] if number < len(jobs) else jobs[number - len(jobs) + 1]
        once = f" Once {jobs[0]}." if name in before else ""
        said = "".join(f" {key} {value}." for key, value in found.items())
        pages[name] = f"{name}, {job}.{once}{said}"
    listed = {str(name): pages[str(name)] for name in rng.permutation(names)}
    question = f"the {owned(jobs[0], [*chain, str(rng.choice(words))])}"
    return json.dumps({"pages": listed, "question": question})


def turned(found: Mapping[str, str], name: str, other: str) -> dict[str, str]:
    """Relations of someone of whom `other` is the one called `name`; nobody is there twice."""
    swapped = {key: found[name] if value == other else value for key, value in found.items()}
    return {**swapped, name: other}


def world_of(task: Task) -> Wiki:
    """The world that a task's family, split, seed and level make."""
    return Wiki(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    manager = Manager(cfg=CONTEXT)
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS, manager=manager)


def play(
    rng: np.random.Generator,
    noise: Noise = NOISE,
    level: int = 0,
    context: ContextConfig = CONTEXT,
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training wiki."""
    world = Wiki(draw_from("train", partial(draw, level=level), rng))
    return script(world, rng, noise, context)


def script(
    world: Wiki, rng: np.random.Generator, noise: Noise, context: ContextConfig = CONTEXT
) -> tuple[ScriptedCall, ...]:
    """Reads one page after another, or gives up at the end as often as `noise` says."""
    knows = rng.random() >= noise.shy
    reader = Reader(world=world, question=world.question, context=context, knows=knows)
    return led(reader, world.messages, world.tools, Manager(cfg=context), MAX_TURNS)


@dataclass
class Reader:
    """The script; implements `Leader`."""

    world: Wiki
    question: str
    context: ContextConfig
    knows: bool = True  # the answer, at the end
    left: list[str] = field(init=False)  # relations of the question
    known: str = field(init=False)  # where they begin, a job at first
    candidates: list[str] = field(default_factory=list)  # that may have the job
    noting: bool = False  # a step was done, of which nothing was noted

    def __post_init__(self) -> None:
        self.known, self.left = asked(self.question)

    def reply(self, context: Context) -> Message:
        """The next page, or the answer."""
        operation = self.context.operation
        if self.noting and self.context.policy == "tool" and operation is not None:
            self.noting = False
            return calling(operation, {"text": self.write()} if operation in WRITTEN else {})
        if not self.left:
            return saying(self.known if self.knows else UNKNOWN)
        if self.known in self.world.pages:
            return calling("open", {"page": self.known})
        if not self.candidates:
            return calling("search", {"word": self.known})
        return calling("open", {"page": self.candidates[0]})

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        result = self.world.use(name, arguments)
        if name == "search":
            self.candidates = result.split()
        elif self.known in self.world.pages or f", {self.known}." in result:
            self.known = relation(result, self.left.pop(0)) or UNKNOWN
            self.noting, self.candidates = bool(self.left), []
        else:
            self.candidates.pop(0)
        return result

    def write(self) -> str:
        """What is left of the question; of a fold the name alone, as the others are there."""
        if self.context.operation == "fold" or not self.left:
            return self.known
        return owned(self.known, self.left)
