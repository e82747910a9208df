"""The process that verifiers are forked from, one fork for each answer.

    python -P -m forge_jax.agents.verify_nursery HANDLE [module]

HANDLE is a socket, and through it come those of the verifications. Each gets a fork, which writes
a line with its process, reads a pickled call, and writes what it came to as JSON: whether there is
a score, and the score or the error. What a verifier started dies with it, it with this process,
and this process when HANDLE is closed.
"""

import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # as in `process_nursery`
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not handles:
            return
        with socket.socket(fileno=handles[0]) as connection:
            if os.fork() == 0:
                control.close()
                verify(connection)


def verify(connection: socket.socket) -> NoReturn:
    """Answers one call in this process, and ends with all that it has started."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.sendall(f"{os.getpid()}\n".encode())
        connection.sendall(json.dumps(called(connection)).encode() + b"\n")
    finally:
        os.killpg(0, signal.SIGKILL)
        os._exit(1)


def called(connection: socket.socket) -> tuple[bool, float | str]:
    """What the pickled call comes to."""
    try:
        with connection.makefile("rb") as stream:
            score, arguments = pickle.load(stream)
        return True, float(score(*arguments))
    except BaseException as error:
        return False, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
