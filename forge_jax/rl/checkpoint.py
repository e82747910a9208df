"""Checkpoints that hold the device's TrainState and the host's cursors together.

A checkpoint is visible only when it is whole (Orbax writes beside and renames), and
names the update after which it was taken.
"""

from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from forge_jax.config import UserError
from forge_jax.rl.writing import written

State = TypeVar("State")  # a TrainState, or what of one is kept


class Checkpoints:
    """The checkpoints of one phase of a run, newest last; owns their folder."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "host": ocp.JsonCheckpointHandler(),
            },
        )

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Writes state and cursors as one object; returns when it is on disk.

        Raises ValueError if there is a checkpoint of `step` or a later one, OSError naming the
        folder and what is free where it cannot be written; the earlier ones stay.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"checkpoint {step=} is not after {latest}")
        with written(self.folder / str(step)):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
                ),
            )

    def restore(self, step: int, like: State) -> tuple[State, dict[str, Any]]:
        """The checkpoint of `step`, with the shapes and shardings of `like`.

        Raises UserError naming the folder if it cannot be read or does not fit.
        """
        try:
            # Before anything is read: Orbax abandons its other readers when one of them fails.
            _check_shapes(self._manager.item_metadata(step)["state"].tree, like)
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(like), host=ocp.args.JsonRestore()
                ),
            )
        except jax.errors.JaxRuntimeError:
            raise  # a fault of the device, not of the files
        except Exception as error:  # of many kinds, a bare Exception for a damaged array
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"checkpoint {self.folder / str(step)} cannot be read: {reason}"
            ) from error
        state: State = found.state
        return state, found.host

    def close(self) -> None:
        self._manager.close()


def _check_shapes(stored: Any, like: Any) -> None:
    """Raises ValueError naming the first array that is not in both, or of another shape."""
    there, here = _shapes(stored), _shapes(like)
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ValueError(f"{name} is {there.get(name)} there, {here.get(name)} here")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x.shape for p, x in leaves}
