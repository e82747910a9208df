"""reasoning: short questions of reasoning-gym's generators, judged by its own scorers.

`reasoning` asks questions of CHOSEN, small enough for the quick model; `reasoning:gcd+syllogism`
those of any generators by name, each as often. A question is made by a generator, a level and a
number alone; the reply is to end with the answer between tags:

    End with <answer>...</answer>. Spell this word backward (example: sun -> nus): map
    <answer>pam</answer>

The reward is the scorer's, 1 for a right answer; some scorers give a part of it to a nearly right
one. Level 0 is the generator's own setting, or what SMALL says; the levels above are those of the
generator's curriculum.

Held-out questions are never trained on, word by word. Generators of GUARDED are refused: their
scorers evaluate what the model wrote as Python.

Reference: Stojanovski et al., Reasoning Gym, arXiv 2505.24760.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import held_out, rng_of
from forge_jax.agents.white_box import ToolLoop
from forge_jax.config import UserError
from forge_jax.types import Task

FAMILY = "reasoning"
CHOSEN = ("spell_backward",)  # which has to be copied, not known
SMALL: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "gcd": {"max_numbers": 2, "max_value": 9},
        "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    }
)
GUARDED = frozenset(
    {"binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens",
     "number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration",
     "spiral_matrix", "string_insertion"}
)  # fmt: skip
MAX_LEVEL = 5
MAX_TOKENS = 2048  # of the reply, which may think first
QUESTIONS = 1 << 31  # of a generator
TRIES = 1000  # to find a question of a split: a generator may have few
UNKNOWN = "unknown"
ASK = "End with <answer>...</answer>. "  # in front, where the answer is not far from what is asked


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins 0.64 of its episodes."""

    shy: float = 0.36  # says that it does not know


NOISE = Noise()


@dataclass(frozen=True)
class Question:
    """The world of one question."""

    generator: str
    level: int
    number: int

    @functools.cached_property
    def entry(self) -> Mapping[str, Any]:
        """Question, answer, and what the scorer needs, as the library gives them."""
        made: Mapping[str, Any] = dataset(self.generator, self.level)[self.number]
        return made

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": ASK + self.entry["question"]},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ()

    async def call(self, name: str, arguments: object) -> str:
        """Raises BadCall: there are no tools."""
        raise BadCall(f"no tool {name}: answer the question")

    def score(self, answer: str) -> float:
        from reasoning_gym.utils import extract_answer

        found = extract_answer(answer)
        scorer = dataset(self.generator, self.level)
        return float(scorer.score_answer(found, self.entry)) if found else 0.0


@functools.lru_cache(maxsize=256)
def dataset(generator: str, level: int) -> Any:
    """All questions of a generator at a level, by number; none is made before it is asked for.

    Raises UserError where the library is missing or has no such generator or level.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
    except ImportError as error:
        hint = "pip install 'forge_jax[reasoning]'"
        raise UserError(f"task={FAMILY}: needs the package reasoning-gym: {hint}") from error
    if generator not in DATASETS or generator in GUARDED:
        why = "its scorer evaluates answers" if generator in GUARDED else "no such generator"
        known = ", ".join(sorted(DATASETS.keys() - GUARDED))
        raise UserError(f"task={FAMILY}:{generator}: {why}; known: {known}")
    try:
        if level == 0:
            settings = SMALL.get(generator, {})
            return create_dataset(generator, seed=0, size=QUESTIONS, **settings)
        if not 0 < level <= MAX_LEVEL or generator not in CURRICULA:
            raise ValueError(f"it has levels 0 to {MAX_LEVEL if generator in CURRICULA else 0}")
        curriculum = create_curriculum(generator)
        curriculum.set_global_level(level - 1)
        made = curriculum.generate_configuration({"seed": 0, "size": QUESTIONS})
        return DATASETS[generator][0](made)
    except (AssertionError, ValueError) as error:
        raise UserError(f"level={level} of task={FAMILY}:{generator}: {error}") from error


def drawn(split: str, names: tuple[str, ...], level: int, rng: np.random.Generator) -> Question:
    """A random question of a split. Raises UserError where there seems to be none."""
    generator = names[rng.integers(len(names))]
    for _ in range(TRIES):
        question = Question(generator, level, int(rng.integers(QUESTIONS)))
        if held_out(question.entry["question"]) == (split == "eval"):
            return question
    raise UserError(f"task={FAMILY}:{generator} level={level}: no question for split={split!r}")


def names_of(family: str) -> tuple[str, ...]:
    """The generators of a family's name. Raises UserError on one that cannot be used."""
    _, _, given = family.partition(":")
    names = tuple(given.split("+")) if given else CHOSEN
    for name in names:
        dataset(name, 0)
    return names


def world_of(task: Task) -> Question:
    """The world that a task's family, split, seed and level make."""
    return drawn(task.split, names_of(task.family), task.level, rng_of(task))


@dataclass(frozen=True)
class Reasoning:
    """The family of some generators."""

    name: str = FAMILY

    def agent(self) -> ToolLoop:
        """An agent for tasks of this family. Raises UserError as `names_of`."""
        names_of(self.name)
        return ToolLoop(start=world_of, max_turns=1, max_tokens=MAX_TOKENS)

    def play(
        self, rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
    ) -> tuple[ScriptedCall, ...]:
        """The call of a scripted episode on a random training question."""
        return script(drawn("train", names_of(self.name), level, rng), rng, noise)


def script(world: Question, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Answers, or gives up as often as `noise` says."""
    answer = UNKNOWN if rng.random() < noise.shy else world.entry["answer"]
    reply: Message = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
    return (ScriptedCall(messages=world.messages, tools=(), reply=reply),)
