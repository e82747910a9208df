"""What happened in an episode of a white-box agent, counted while it runs.

Counts flow in one by one; the metrics of the episode's outcome flow out.
"""

from dataclasses import dataclass

from forge_jax.types import Outcome, Status


@dataclass
class Tally:
    """What happened in one episode so far; the `metrics` of its outcome."""

    turns: int = 0  # replies of the model
    completion_tokens: int = 0  # of those, as the server counts them
    prompt_tokens: int = 0  # of all calls, likewise
    tool_calls: int = 0
    calling_replies: int = 0  # replies with tool calls
    parallel_replies: int = 0  # of those, the ones with several, which run at once
    malformed_calls: int = 0  # of those, the ones no tool could take
    tool_seconds: float = 0.0  # of every call of the world by itself
    tool_path_seconds: float = 0.0  # in which at least one ran
    wipes: int = 0  # of the context
    shortened: int = 0  # times that something else was done to the context
    written: int = 0  # replies that were asked for to that end
    overflowed: int = 0  # 1: the context went beyond its budget
    unfinished: int = 0  # 1: the last reply was cut off at its limit

    def outcome(self, reward: float) -> Outcome:
        metrics = {name: float(value) for name, value in vars(self).items()}
        return Outcome(status=Status.COMPLETED, reward=reward, metrics=metrics)
