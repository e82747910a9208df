"""The process between a trainer and one episode's processes, none of which outlive it.

Run as a script by the bare interpreter, so it imports the standard library alone. The first line
of its stdin is what to run, as JSON; an end of stdin ends the episode, so a trainer that dies, by
whatever signal, leaves nothing behind. Its one line of stdout is how the episode ended.

Invariant: when it has told that, every descendant is dead, also those that left their process
group or session: as a subreaper it inherits orphans, and it kills until none is left.
"""

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.2  # how often its processes are counted
LAST_SECONDS = 5.0  # that killing may take
PIECE = 1 << 16


class Tail:
    """The last bytes of an output that may be endless."""

    def __init__(self, source: IO[bytes], most: int):
        self.source, self.most = source, most
        self.kept, self.total = b"", 0
        os.set_blocking(source.fileno(), False)

    def read(self) -> bool:
        """Takes what is there; False at the end of the output."""
        try:
            piece = os.read(self.source.fileno(), PIECE)
        except BlockingIOError:
            return True
        self.total += len(piece)
        self.kept = (self.kept + piece)[-self.most :]
        return bool(piece)

    def drain(self) -> None:
        """Takes what is left once nobody writes any more."""
        while True:
            before = self.total
            if not self.read() or self.total == before:
                return


def children(pid: int) -> list[int]:
    """Processes that `pid` started or inherited; none of one that is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants() -> list[int]:
    """All processes below this one."""
    found, rest = [], [os.getpid()]
    while rest:
        below = children(rest.pop())
        found += below
        rest += below
    return found


def send(pids: list[int], number: int) -> None:
    """Signals all that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def reap() -> None:
    """Forgets children that are dead; their CPU time is counted then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_all(top: int) -> bool:
    """Kills every descendant; False if some did not die in time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(top, signal.SIGKILL)  # ends a PID namespace as a whole
    until = time.monotonic() + LAST_SECONDS
    while left := descendants():
        if time.monotonic() > until:
            return False
        # At once for all of a group, so that none of them forks away meanwhile.
        for group in groups(left):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        send(left, signal.SIGKILL)
        reap()
    return True


def groups(pids: list[int]) -> set[int]:
    """The process groups of `pids` but ours."""
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpgid(pid))
    return found - {os.getpgrp()}


def relay(listener: socket.socket, target: tuple[str, int]) -> None:
    """Carries bytes between what connects inside the sandbox and the gateway outside."""
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(target)
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


def carry(source: socket.socket, sink: socket.socket) -> None:
    """Copies bytes until the source ends or either breaks, and passes the end on."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            sink.sendall(piece)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


class Begun(NamedTuple):
    """The first process inside, and what it writes to."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    handle: object = None  # which would wait for the process if it were dropped


# Starts it: what to run, its stdin, and the socket that it is told the rest by.
Begin = Callable[[dict[str, Any], IO[bytes], socket.socket], Begun]


def spawned(spec: dict[str, Any], stdin: IO[bytes], inner: socket.socket) -> Begun:
    """A program of its own, between walls where there are any."""
    process = subprocess.Popen(
        [*spec["around"], *spec["inside"], str(inner.fileno())],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=spec["env"],
        pass_fds=(inner.fileno(),),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    return Begun(process.pid, process.stdout, process.stderr, process)


class Episode:
    """One run of what `spec` says, until it ends or is ended."""

    def __init__(self, spec: dict[str, Any], begin: Begin):
        self.spec = spec
        self.ended: dict[str, Any] = {}  # how, once it is known
        self.asked = ""  # why it was asked to end
        self.until = time.monotonic() + (spec["seconds"] or float("inf"))
        self.control, inner = socket.socketpair()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(spec["stdin"].encode(errors="surrogateescape"))
            stdin.seek(0)
            begun = begin(spec, stdin, inner)
        inner.close()
        self.begun = begun
        pipes = (begun.stdout, begun.stderr)
        self.outputs = [Tail(pipe, spec["output_bytes"]) for pipe in pipes]
        self.control.sendall(json.dumps(spec["within"]).encode() + b"\n")
        self.told = b""

    def run(self) -> None:
        """Returns when it has ended, or has to be killed."""
        watching = selectors.DefaultSelector()
        watching.register(sys.stdin.fileno(), selectors.EVENT_READ, self.on_lifeline)
        watching.register(self.control, selectors.EVENT_READ, self.on_word)
        for tail in self.outputs:
            watching.register(tail.source, selectors.EVENT_READ, tail.read)
        looked = 0.0
        while not self.ended:
            wait = min(LOOK_SECONDS, self.until - time.monotonic())
            for key, _ in watching.select(max(0.0, wait)):
                if not key.data():
                    watching.unregister(key.fileobj)
            if not self.ended:
                self.judge()
            if time.monotonic() >= looked + LOOK_SECONDS:
                looked = time.monotonic()
                reap()
                if len(descendants()) > self.spec["processes"]:
                    self.ended = {"how": "too_many_processes"}

    def judge(self) -> None:
        """Acts where its time, or after that its grace, is over."""
        if time.monotonic() < self.until:
            return
        if self.asked:
            self.ended = {"how": self.asked}
        else:
            self.ask("timed_out")

    def ask(self, why: str) -> None:
        """Asks it to end, once; `judge` ends it if it does not."""
        if not self.asked:
            self.asked = why
            self.until = time.monotonic() + self.spec["grace"]
            with contextlib.suppress(OSError):
                self.control.sendall(b"T")

    def on_lifeline(self) -> bool:
        if os.read(sys.stdin.fileno(), PIECE):
            return True
        self.ask("stopped")
        return False

    def on_word(self) -> bool:
        """What the process inside tells: a listening socket first, if any, then how it ended."""
        try:
            piece, handles, _, _ = socket.recv_fds(self.control, PIECE, 1)
        except OSError:
            piece, handles = b"", []
        for handle in handles:
            target = (self.spec["gateway"][0], self.spec["gateway"][1])
            listener = socket.socket(fileno=handle)
            threading.Thread(target=relay, args=(listener, target), daemon=True).start()
        self.told += piece
        *lines, self.told = self.told.split(b"\n")
        for line in filter(None, lines):
            said = json.loads(line)
            self.ended = {**said, "how": self.asked or said["how"]}
        if not piece and not self.ended:
            self.ended = {"how": self.asked or "broken"}
        return bool(piece)


def main(begin: Begin = spawned) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the trainer says when to end
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), PIECE)
        if not piece:
            return
        line += piece
    began = time.monotonic()
    episode = Episode(json.loads(line), begin)
    try:
        episode.run()
    finally:
        seconds = time.monotonic() - began
        dead = kill_all(episode.begun.pid)
    for tail in episode.outputs:
        tail.drain()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "status": None,
        "error": "",
        **episode.ended,
        "outputs": [tail.kept.decode(errors="replace") for tail in episode.outputs],
        "totals": [tail.total for tail in episode.outputs],
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "dead": dead,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
