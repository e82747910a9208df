"""The policy that a run is held near: the one before its first update.

What is trained goes in as it is at the first start, and is kept in the run's folder; the same comes
out then and at every resume, to the bit, in arrays that no update consumes.
"""

import shutil
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
    place = folder / FOLDER
    if not fresh and not place.is_dir():
        raise UserError(f"loss.reference=start: {folder} began without it, and lacks {FOLDER}/")
    if fresh and place.exists():  # of a start that came to nothing, as below warm.gate
        shutil.rmtree(place)
    with closing(Checkpoints(place, keep=1)) as kept:
        if fresh:
            kept.save(0, params, {})
        found, _ = kept.restore(0, params)
    return found
