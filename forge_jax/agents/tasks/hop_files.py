"""hop for programs: the same hidden chains, each lookup a file.

A program is told the first key and finds a folder in which the file named by a key holds the next
one, a digit at the end. So any agent that can read files can follow a chain. The reward is 1 if and
only if the last line it prints is the answer, as in `hop`. The files that lead nowhere hold what
an absent key holds there.
"""

from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from forge_jax.agents.protocol import FolderReader
from forge_jax.agents.tasks.hop import Chain, world_of
from forge_jax.types import Task


@dataclass(frozen=True)
class HopFiles:
    """The folder of one chain."""

    world: Chain
    prompt: str

    def setup(self, folder: Path) -> None:
        for key in ascii_lowercase:
            (folder / key).write_text(self.world.look_up(key))

    def score(self, folder: FolderReader, stdout: str) -> float:
        """The files are not read: the program could have changed them."""
        lines = stdout.strip().splitlines()
        return float(bool(lines) and lines[-1].strip() == self.world.answer(self.world.chain[-1]))


def workspace_of(task: Task) -> HopFiles:
    """The folder that a task's family, split and seed make."""
    world = world_of(task)
    return HopFiles(world, told(world.chain[0]))


def told(first: str) -> str:
    """What a program has to do that starts at the file `first`."""
    return (
        "Every file here is named by a letter and holds another letter, the name of the next "
        f"file, or a digit. Start at the file {first}, read one file after another until you "
        "find a digit, then answer with an exclamation mark and that digit, for example !7, "
        "alone on the last line."
    )
