"""The policy that a run is held near: the one before its first update.

What is trained goes in as it is at the first start, and is kept in the run's folder; the same comes
out then and at every resume, to the bit, in arrays that no update consumes.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

from forge_jax.config import UserError
from forge_jax.rl.checkpoint import Checkpoints

FOLDER = "reference"  # in that of the run


def remembered(params: Any, folder: Path, fresh: bool) -> Any:
    """What was trained from in the run of `folder`, as wide and on the devices as `params`; if it
    is `fresh`, that is `params`.

    Raises UserError where the run began without keeping it, or it cannot be read.
    """
    if not fresh and not (folder / FOLDER).is_dir():
        raise UserError(f"loss.reference=start: {folder} began without it, and lacks {FOLDER}/")
    with closing(Checkpoints(folder / FOLDER, keep=1)) as kept:
        if kept.latest() is None:
            kept.save(0, params, {})
        found, _ = kept.restore(0, params)
    return found
