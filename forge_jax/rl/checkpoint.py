"""Checkpoints that hold the device's TrainState and the host's cursors together.

A checkpoint is visible only when it is whole (Orbax writes beside and renames), and
names the update after which it was taken.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from forge_jax.config import UserError
from forge_jax.rl.state import TrainState


class Checkpoints:
    """The checkpoints of one phase of a run, newest last; owns their folder."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Writes state and cursors as one object; returns when it is on disk.

        Raises ValueError if there is a checkpoint of `step` or a later one.
        """
        written = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
            ),
        )
        if not written:
            raise ValueError(f"checkpoint {step=} is not after {self.latest()}")

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The checkpoint of `step`, with the shapes and shardings of `like`.

        Raises UserError naming the folder if it cannot be read or does not fit.
        """
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(like), host=ocp.args.JsonRestore()
                ),
            )
        # What orbax raises on files that are missing, damaged or of other arrays. A fault of
        # the device is none of these.
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"checkpoint {self.folder / str(step)} cannot be read: {reason}"
            ) from error
        return found.state, found.host

    def close(self) -> None:
        self._manager.close()
