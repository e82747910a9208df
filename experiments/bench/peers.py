"""Other people's programs on the same workload, in the same run.

A peer is a shell command. In it ``{workload}`` stands for the workload's file and ``{model}``,
where it occurs, for a Hugging Face folder of the weights; environment variables may precede it.
It makes one update as `experiments.replay` defines it, and the last line it prints is a JSON
object with at least ``seconds`` (of the update alone), ``loss`` and ``grad_norm`` (global L2,
before clipping), both of the weights before the update. Only where those two are ours does its
time mean anything: else the row holds both numbers and no ratio.
"""

import json
import math
import re
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.children import shell
from forge_jax.config import UserError, check

TOLERANCE = 1e-4  # relative, of loss and gradient norm: fp32, summed in another order
KEYS = ("seconds", "loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One program to compare with. Raises ValueError for a command without its workload."""

    name: str
    command: str

    def __post_init__(self) -> None:
        plain = re.fullmatch(r"[\w-]+", self.name) is not None  # it is part of a file's name
        check(plain, f"peers.{self.name} must be letters, digits, - and _")
        check(
            "{workload}" in self.command,
            f"peers.{self.name}={self.command!r} must say where its {{workload}} goes",
        )

    @property
    def wants_model(self) -> bool:
        return "{model}" in self.command

    def run(self, workload: Path, model: Path, log: Path) -> dict[str, Any]:
        """The object it prints. Raises UserError where it fails or prints none."""
        command = self.command.replace("{workload}", shlex.quote(str(workload.absolute())))
        command = command.replace("{model}", shlex.quote(str(model.absolute())))
        printed = shell(f"peers.{self.name}", command, log).strip()
        return self.read(printed.splitlines()[-1] if printed else "")

    def read(self, line: str) -> dict[str, Any]:
        """The object of its last line. Raises UserError naming what is wrong with it."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"peers.{self.name}: its last line is no JSON object: {line[:200]!r}")
        for key in KEYS:
            value = found.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"peers.{self.name}: {key}={value!r} must be a number")
            if not math.isfinite(value):
                raise UserError(f"peers.{self.name}: {key}={value} must be finite")
        if found["seconds"] <= 0:
            raise UserError(f"peers.{self.name}: seconds={found['seconds']} must be > 0")
        return found


def compared(found: list[dict[str, Any]], ours: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A peer's part of a row, from what it printed, our `loss` and `grad_norm`, our seconds."""
    last = found[-1]
    row = {
        "seconds": statistics.median(x["seconds"] for x in found),
        "agrees": close(last["loss"], ours["loss"], TOLERANCE)
        and close(last["grad_norm"], ours["grad_norm"], TOLERANCE),
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
        "our_loss": ours["loss"],
        "our_grad_norm": ours["grad_norm"],
        "printed": last,
    }
    return row | ({"speedup": row["seconds"] / seconds} if row["agrees"] else {})


def close(found: float, wanted: float, tolerance: float) -> bool:
    """Equal up to a relative error."""
    return abs(found - wanted) <= tolerance * abs(wanted)
