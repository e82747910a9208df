"""Around what a run writes to its folder: where that fails, one line says where and how full it is.

The invariant: a file is there whole, or as it was before.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around writing `path`. Raises OSError naming it and the space that is left, where that, or
    tensorstore beneath it, fails."""
    try:
        yield
    except (OSError, ValueError) as error:
        free = shutil.disk_usage(_there(path)).free
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(
            f"{path} cannot be written, {free / 1e6:.0f} MB are free there: {reason}"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes beside and renames: whenever a kill comes, the old text is there or the new one.

    Raises OSError as `written`.
    """
    beside = path.with_name(path.name + ".tmp")
    with written(path):
        try:
            beside.write_text(text)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _there(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(folder for folder in path.absolute().parents if folder.exists())
