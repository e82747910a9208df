"""Verifiers that tests call, sound and broken ones; imported fast, as there is a process for it."""

import ctypes
import os
import time
from pathlib import Path


def right(said: str) -> float:
    return float(said == "yes")


def sleeps(place: str) -> float:
    Path(place).write_text(str(os.getpid()))
    if os.fork() == 0:  # what it starts holds its connection, too
        time.sleep(3600)
    time.sleep(3600)
    return 1.0


def spins(place: str) -> float:
    Path(place).write_text(str(os.getpid()))
    while True:
        pass


def crashes(place: str) -> float:
    Path(place).write_text(str(os.getpid()))
    ctypes.string_at(0)
    return 1.0


def raises(place: str) -> float:
    Path(place).write_text(str(os.getpid()))
    raise ValueError("no such answer")


def parent_of() -> float:
    return float(os.getppid())
