"""wiki_team: the questions of `wiki`, by a planner that hands every step over to a worker.

The planner is told the question and has no tools of the wiki; a worker is told one step and has:

    planner: One word: the nurse's Boss's Town?   ?the nurse's Boss?   =Eve
             ?Eve's Town?   =Oslo   Oslo
    worker:  One word: the nurse's Boss?   ?search nurse   =Ann   ?open Ann   =...   Eve

The planner's calls have the reward of the episode, as in `wiki`; those of workers the share of
their answers that are right, whatever the planner makes of them. Levels are those of `wiki`.
"""

from functools import partial

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Environment, ScriptedCall
from forge_jax.agents.scripting import calling, led, saying
from forge_jax.agents.split import draw_from
from forge_jax.agents.tasks.wiki import (
    ASK,
    MAX_TOKENS,
    NOISE,
    TOOLS,
    UNKNOWN,
    Noise,
    Reader,
    Wiki,
    answered,
    asked,
    draw,
    is_word,
    owned,
    world_of,
)
from forge_jax.agents.team import DELEGATE, Team, briefed
from forge_jax.agents.white_box import tool_message
from forge_jax.managing import ContextConfig

PLANNER_TURNS = 8
WORKER_TURNS = 8
BRIEF = f"{ASK}{{task}}"


def judged(world: Environment, task: str, answer: str) -> float:
    """1 for the word that a task asks for, if it asks for one that the wiki knows."""
    assert isinstance(world, Wiki)
    try:
        word = answered(task, world.pages)
    except ValueError:
        return 0.0
    return float(word != "" and is_word(answer, word))


def agent() -> Team:
    """The agents for a task of this family."""
    return Team(
        start=world_of,
        planner_turns=PLANNER_TURNS,
        worker_turns=WORKER_TURNS,
        max_tokens=MAX_TOKENS,
        brief=BRIEF,
        judge=judged,
    )


def play(
    rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on a random training wiki, those of all agents."""
    return script(Wiki(draw_from("train", partial(draw, level=level), rng)), rng, noise)


def script(world: Wiki, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Hands over one step after another, or gives up at the end as often as `noise` says."""
    knows = rng.random() >= noise.shy
    context, calls = Context.begun(world.messages), []
    known, relations = asked(world.question)
    for name in relations:
        task = f"{'' if known in world.pages else 'the '}{owned(known, [name])}"
        reply = calling("delegate", {"task": task})
        calls.append(ScriptedCall(messages=context.messages, tools=(DELEGATE,), reply=reply))
        reader = Reader(world=world, question=task, context=ContextConfig())
        calls += led(reader, briefed(BRIEF, task), TOOLS, Manager(), WORKER_TURNS)
        known = answered(task, world.pages)
        context = context.append(reply).append(tool_message("call_0", known))
    said = saying(known if knows else UNKNOWN)
    calls.append(ScriptedCall(messages=context.messages, tools=(DELEGATE,), reply=said))
    return tuple(calls)
