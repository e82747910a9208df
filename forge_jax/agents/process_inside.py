"""The first process inside an episode's sandbox: it finishes the walls and starts the agent.

Run as a script by the bare interpreter, so it imports the standard library alone. A socket, whose
number is its argument, brings one line of JSON that says what to do, then a byte when the agent is
to be asked to end; back go a listening socket where there is a relay, and one line that says how
the agent ended. In a PID namespace it is process 1: when it ends, so does all inside.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV = 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
CAPABILITIES = 64  # more than any kernel has
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

Become = Callable[[dict[str, Any]], NoReturn]  # what turns a process into the agent


def checked(result: int, what: str) -> None:
    """Raises OSError, with what libc says of it, unless a call gave 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError."""
    arguments = [text.encode() for text in (source, target, kind)]
    result = LIBC.mount(*arguments, ctypes.c_ulong(flags), data.encode())
    checked(result, f"mount {kind or source} on {target}")


def tmpfs(path: str) -> None:
    """An empty folder in memory over `path`, which anybody may write."""
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")


def build(walls: dict[str, Any]) -> None:
    """A file system that is read-only but for the episode's folder and private temporary ones."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    kept = [(path, os.open(path, os.O_PATH)) for path in (walls["folder"], *walls["show"])]
    attributes = struct.pack("QQQQ", ATTR_RDONLY, 0, 0, 0)
    root = LIBC.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes)
    )
    checked(root, "make / read-only")
    for path in walls["empty"]:
        if os.path.isdir(path):
            tmpfs(path)
        elif os.path.exists(path):
            mount("/dev/null", path, "", MS_BIND)
    for path, handle in kept:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        mount(f"/proc/self/fd/{handle}", path, "", MS_BIND | MS_REC)
        os.close(handle)
        flags = 0 if path == walls["folder"] else ATTR_RDONLY
        attributes = struct.pack("QQQQ", flags, ATTR_RDONLY - flags, 0, 0)
        result = LIBC.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), 0, attributes, len(attributes)
        )
        checked(result, f"set the mode of {path}")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)


def number(most: int) -> None:
    """Leaves the PID namespace so many process numbers, where it has its own: since Linux 6.14."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:
        file.write(str(most))


def listen(control: socket.socket, port: int) -> None:
    """Gives away a socket that listens on the loopback of the sandbox: its only way out."""
    with socket.socket() as probe:
        request = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", request)[1]
        if not flags & IFF_UP:
            fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    with socket.create_server(("127.0.0.1", port), backlog=64) as listener:
        socket.send_fds(control, [b"\n"], [listener.fileno()])


def drop() -> None:
    """Gives up every capability, for good: what the agent starts has none either."""
    for number in range(CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def limit(limits: dict[str, int]) -> None:
    """Sets resource limits by name, never above those that hold already."""
    for name, value in limits.items():
        number = getattr(resource, name)
        most = resource.getrlimit(number)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(number, (value, value))


def execute(spec: dict[str, Any]) -> NoReturn:
    """Becomes the agent's program."""
    os.execvpe(spec["argv"][0], spec["argv"], dict(os.environ))


def start(spec: dict[str, Any], failed: int, become: Become) -> int:
    """Forks the agent; what keeps it from starting is written to the pipe `failed`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(spec["workdir"])
        limit(spec["limits"])
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        become(spec)
    except OSError as error:
        os.write(failed, os.strerror(error.errno or 0).encode())
    finally:
        os._exit(127)


def watch(pid: int, control: socket.socket) -> int:
    """The wait status of the agent once it ended; asks it to end where it is told to."""
    handle = os.pidfd_open(pid)
    open_ends = [control.fileno(), handle]
    while True:
        ready, _, _ = select.select(open_ends, [], [], 1.0)
        if control.fileno() in ready:
            if not control.recv(1):  # nobody watches any more
                os.killpg(pid, signal.SIGKILL)
                os._exit(1)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == pid:
                    return found[1]


def run(control: socket.socket, become: Become) -> dict[str, Any]:
    """Reads what to do, does it, and says how the agent ended. Raises OSError where walls fail."""
    line = b""
    while not line.endswith(b"\n"):
        line += control.recv(1)  # not more: the next byte has a meaning of its own
    spec = json.loads(line)
    if spec["walls"] is not None:
        build(spec["walls"])
        number(spec["numbers"])
    if spec["port"] is not None:
        listen(control, spec["port"])
    if spec["drop"]:
        drop()
    failing, failed = os.pipe()
    pid = start(spec, failed, become)
    os.close(failed)
    status = os.waitstatus_to_exitcode(watch(pid, control))
    problem = os.read(failing, 4096).decode()
    if problem:
        return {"how": "not_started", "error": f"{spec['argv'][0]}: {problem}"}
    return {"how": "exited", "status": status}


def main(control: socket.socket, become: Become = execute) -> None:
    control.set_inheritable(False)
    try:
        ended = run(control, become)
    except Exception as error:
        ended = {"how": "broken", "error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(ended).encode() + b"\n")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
