"""Whose fault it is: the world's (`EnvironmentFault`) or the policy's (`BadCall`).

Only what an environment itself raises becomes an `EnvironmentFault`; a policy that
calls a tool wrongly is told so and goes on, and that is never a fault.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class EnvironmentFault(Exception):
    """The world of a task could not be set up, stepped or verified."""


class BadCall(Exception):
    """The model called a tool that does not exist, or with arguments it does not take.

    The message is the tool's result.
    """


@contextmanager
def environment(stage: str) -> Iterator[None]:
    """Around every use of an environment: its exceptions become EnvironmentFault.

    `stage` says what was being done: "reset", "tool lookup", "score".
    """
    try:
        yield
    except (EnvironmentFault, BadCall):
        raise
    except Exception as error:
        raise EnvironmentFault(f"{stage}: {type(error).__name__}: {error}") from error
