"""The pool of a run: in its folder, or elsewhere and then marked as its own.

A configuration and a run folder flow in, the opened pool flows out. The invariant: items of one
run are never taken for those of another.
"""

import json
import secrets
from pathlib import Path

from forge_jax.config import UserError
from forge_jax.rl.writing import write_whole
from forge_jax.sched.pool import Pool

OWNER = "pool_owner.json"  # in the folder of a run that keeps its pool elsewhere


def pool_of(location: str | None, folder: Path) -> Pool:
    """The pool at `location`, `folder`/pool where that is None.

    Raises UserError where it cannot be opened, or holds items of another run.
    """
    if location is None:
        return Pool.open(str(folder / "pool"))
    pool = Pool.open(location)
    mine = _owner(folder).encode()
    there = pool.owner()
    if there is None and pool.items():
        raise UserError(f"pool={location} holds items, and nothing says of which run")
    if there is None:
        there = pool.claim(mine)
    if there != mine:
        run = json.loads(there)["folder"]
        raise UserError(f"pool={location} holds items of another run, {run}: choose another place")
    return pool


def _owner(folder: Path) -> str:
    """What names the run in a pool: whatever its folder is called later, the same text."""
    path = folder / OWNER
    if not path.exists():
        name = {"run": secrets.token_hex(16), "folder": str(folder.resolve())}
        write_whole(path, json.dumps(name) + "\n")
    return path.read_text()
