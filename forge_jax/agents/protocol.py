"""What an agent is, and what a white-box agent needs of the world it acts in.

A task flows into an agent and one `Outcome` flows out. Everything in between are chat
calls over HTTP: an agent sees messages and tools, never tokens, engines or trainers.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openai import AsyncOpenAI

from forge_jax.types import Outcome, Task

Message = Mapping[str, Any]  # one message of a conversation, OpenAI shape
Tool = Mapping[str, Any]  # one tool offered to the model, OpenAI shape


class Agent(Protocol):
    """Anything that works at a task by calling a model."""

    async def run(self, task: Task, client: AsyncOpenAI, model: str) -> Outcome:
        """Works at `task` until it is done, every call through `client`.

        Raises EnvironmentFault where the world of the task is at fault; anything else
        it raises is the agent's own failure.
        """
        ...


class Environment(Protocol):
    """The world of one task: what the model is told, what its tools do, what its answer is worth.

    A call that never returns can be timed out, and holds up no other episode: what waits is a
    coroutine, and a plain function, for what computes, runs in a thread of its own.
    """

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation before the model's first reply."""
        ...

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | Awaitable[str]:
        """The result of a tool. Raises BadCall where the model asked for what is not there."""
        ...

    def score(self, answer: str) -> float | Awaitable[float]:
        """The reward of the model's answer."""
        ...


class WindowedEnvironment(Protocol):
    """A world seen through windows; between two of them only a note is kept."""

    @property
    def windows(self) -> int:
        """How many windows there are; the reply to the last is the answer."""
        ...

    def observe(self, window: int, note: str) -> tuple[Message, ...]:
        """What the model is told in a window, its own note included; `window` from 0."""
        ...

    def keep(self, reply: str) -> str:
        """The note that a reply leaves, cut to the room there is."""
        ...

    def score(self, answer: str) -> float | Awaitable[float]:
        """The reward of the model's answer."""
        ...


class FolderReader(Protocol):
    """The folder that a program worked in, after it ended; nothing outside can be read."""

    def read(self, path: str) -> bytes:
        """The content of a regular file. Raises OSError where there is none within the folder,
        or it is larger than a verifier reads."""
        ...


class Workspace(Protocol):
    """The world of one task for an agent that is a program: a folder, and a text to start from."""

    @property
    def prompt(self) -> str: ...

    def setup(self, folder: Path) -> None:
        """Fills the empty folder that the program will work in."""
        ...

    def score(self, folder: FolderReader, stdout: str) -> float:
        """The reward of what the program left behind and last printed; runs outside its sandbox."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScriptedCall:
    """One call of a scripted episode: the request as a live agent sends it, and a reply to it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Message  # an assistant message
