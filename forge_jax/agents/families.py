"""The task families by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from forge_jax.agents.protocol import Agent, ScriptedCall
from forge_jax.agents.tasks import hop, notes
from forge_jax.config import UserError


class Family(Protocol):
    """What a family's module offers."""

    def agent(self) -> Agent:
        """An agent for the family's tasks; it keeps no state between them."""
        ...

    def play(self, rng: np.random.Generator) -> tuple[ScriptedCall, ...]:
        """The calls of one scripted episode on training content, the same for the same `rng`.

        Each is one training sample: the reply is to be imitated, all before it is context.
        """
        ...


FAMILIES: Mapping[str, Family] = MappingProxyType({"hop": hop, "notes": notes})


def family_of(name: str) -> Family:
    """The family called `name`. Raises UserError naming it and those there are."""
    if name not in FAMILIES:
        raise UserError(f"task={name!r} is not a task family; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def agent_of(name: str) -> Agent:
    """An agent for tasks of the family called `name`. Raises UserError as `family_of`."""
    return family_of(name).agent()
