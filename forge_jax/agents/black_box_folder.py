"""The folder of one episode of a black-box agent.

    FOLDER/home    HOME; where the files of the configuration for its program go
    FOLDER/work    what the task set up; where the program runs
    FOLDER/tmp     TMPDIR

The agent can leave anything behind: a verifier reads through `Reader`, which never follows a
symbolic link and never waits for a pipe.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

LARGEST = 1 << 26  # bytes of a file that a verifier reads
PARTS = ("home", "work", "tmp")


@contextmanager
def episode_folder(within: Path | None = None) -> Iterator[Path]:
    """A fresh folder of mode 700, removed with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix="forge_jax-episode-", dir=within))
    try:
        for part in PARTS:
            (folder / part).mkdir()
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes a folder, also where its owner took the rights to away."""
    for path, _, _ in os.walk(folder):  # does not follow links
        os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes texts to their paths below `folder`, over what may be there."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


class Reader:
    """Reads below one folder; see `protocol.FolderReader`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, path: str) -> bytes:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise PermissionError(f"{path!r} is not below the folder")
        place = os.open(self._folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for part in parts[:-1]:
                place = _exchanged(place, part, os.O_DIRECTORY)
            place = _exchanged(place, parts[-1], os.O_NONBLOCK)
            found = os.fstat(place)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path!r} is not a regular file")
            if found.st_size > LARGEST:
                raise OSError(f"{path!r} has {found.st_size} bytes, more than {LARGEST}")
            with os.fdopen(os.dup(place), "rb") as file:
                return file.read(LARGEST)
        finally:
            os.close(place)


def _exchanged(place: int, name: str, flags: int) -> int:
    """An open folder for what is in it, which must not be a link."""
    found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=place)
    os.close(place)
    return found
