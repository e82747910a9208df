"""The process that imports a black-box function once and is forked for every episode of it.

    python -P -m forge_jax.agents.process_nursery SOCKET module:function

Who connects to the socket speaks as to a supervisor (`process_supervisor`): a line that says what
to run, an end of the stream that ends it, a line back that says how it ended. Each connection gets
a fork, which supervises a fork of its own, in which the function is called: with environment,
folder, limits and outputs of its episode, and with the modules that are imported already. The
socket is there once the function is; a nursery that cannot import it ends with the trace.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import IO, Any, NoReturn

from forge_jax.agents import process_inside, process_supervisor
from forge_jax.agents.process_call import call, loaded

WAITING = 1024  # connections that are not accepted yet


def main() -> None:
    path, target = sys.argv[1:]
    become = partial(answer, function=loaded(target), keep=handles())
    # What no fork will ever free need not be looked at, and copied by that, in each of them.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that ended are forgotten
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(WAITING)
        os.rename(f"{path}.new", path)
        while True:
            episode, _ = listener.accept()
            with episode:
                if os.fork() == 0:
                    listener.close()
                    supervise(episode, become)


def supervise(episode: socket.socket, become: process_inside.Become) -> NoReturn:
    """Runs one episode as its supervisor, whose stdin and stdout are the connection."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(episode.fileno(), 0)
        os.dup2(episode.fileno(), 1)
        episode.close()
        process_supervisor.main(partial(forked, become=become))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def forked(
    spec: dict[str, Any], stdin: IO[bytes], inner: socket.socket, become: process_inside.Become
) -> process_supervisor.Begun:
    """Starts the first process of an episode as a fork; see `process_supervisor.Begin`."""
    out, err = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for number, source in enumerate((stdin.fileno(), out[1], err[1])):
            os.dup2(source, number)
        os.setsid()
        os.environ.clear()
        os.environ.update(spec["env"])
        try:
            process_inside.main(inner, become)
        finally:
            os._exit(0)
    os.close(out[1])
    os.close(err[1])
    return process_supervisor.Begun(pid, os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0))


def answer(
    spec: dict[str, Any], function: Callable[[str], object], keep: frozenset[int]
) -> NoReturn:
    """Calls `function` in this process, as if it had just been started for it."""
    status = 1
    try:
        for number in handles() - keep:
            os.close(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        call(function)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def handles() -> frozenset[int]:
    """The file descriptors that are open now."""
    listing = os.listdir("/proc/self/fd")  # one of them is that of the listing, closed again
    return frozenset(number for number in map(int, listing) if is_open(number))


def is_open(number: int) -> bool:
    """Whether a file descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
